"""The law of whole outcomes on known tables: computed, not estimated, through the real engine.

The target is a table of logits over three tokens, so every way in which a request can go can be
walked: `rollout.enumerate` answers each random decision of the engine in every possible way and adds
up the probabilities of what was emitted. What comes out is the joint law of token ids and finish
reasons, of one row or of several in one batch. It is compared with plain sampling, worked out in
`plain_law` by forty lines of float64 that share no code with the engine, and the log-probabilities
that the engine recorded are compared with those that `plain_law` finds. A total variation above
1e-12 is a fault: no chance is involved. `grid` lists the comparisons: every proposer x every law.

Enumeration asks what is done with each decision and takes for granted that decisions are
independent: noise that is used for two of them changes no cell of the grid. So the second part runs
seeded streams (`rollout.streams`) on a target and a draft of four tokens whose law is known by hand,
against chi-square, and reads the noise off the decisions to see whether it is independent.

Every check takes the class of the engine and, where faults sit there, the proposer's wrapper or the
draws' class, so `recipes.audit_faults` runs the same check on engines that are wrong.
"""

import dataclasses
import itertools
import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch

from proposers.draft_model import DraftModelProposer
from proposers.history import HistoryProposer
from proposers.mixture import MixtureProposer
from proposers.mtp import MtpProposer
from proposers.ngram import NgramProposer
from proposers.none import NoProposer
from proposers.self_draft import SelfDraftProposer
from recipes.audit_statistics import Finding, chi_square, independence, largest_gap
from rollout.conditions import Condition
from rollout.draft import NO_DRAFT, DenseLaw, Draft
from rollout.draft_len import FixedDraftLen
from rollout.draft_tree import grow_tree, most_probable
from rollout.drafting import Drafting, sparse_law
from rollout.engine import run_to_end
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes, total_variation
from rollout.grammar import Grammar, named_grammars
from rollout.law import TargetLaws
from rollout.lossless_policy import LosslessPolicy, TwinWeights
from rollout.native_engine import NativeEngine
from rollout.policy import Policy
from rollout.proposer import Proposer
from rollout.request import FinishReason, RolloutRequest, RolloutSample
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import Draws, SeededDraws
from rollout.table_mtp import table_mtp, table_weights
from rollout.table_policy import TablePolicy, markov_table
from rollout.verify import Rule

TOLERANCE = 1e-12
"""Of a total variation: some hundred float64 roundings."""
LOGPROB_TOLERANCE = 1e-9
"""Of a recorded log-probability or kept mass."""
MAX_ROUNDS = 1000
"""More than any check needs; an engine that goes on has failed."""

Ids = tuple[int, ...]
WrapProposer = Callable[[Proposer], Proposer]


def unchanged(proposer: Proposer) -> Proposer:
    return proposer


# ---- the tables -------------------------------------------------------------------------------

V = 3
_OF_TARGET, _OF_DRAFT = (torch.Generator().manual_seed(seed) for seed in (138, 2))
_TARGET_LOGITS = {  # multiples of a half, so that tokens tie, also for the first place
    context: (3 * torch.randn(V, generator=_OF_TARGET, dtype=torch.float64)).round() / 2
    for context in itertools.product(range(V), repeat=2)
}
_DRAFT_PROBS = [
    torch.randn(V, generator=_OF_DRAFT, dtype=torch.float64).softmax(-1) for _ in range(V)
]
PROMPT = (0, 1, 1, 0, 1, 0, 0, 1)
"""Without token 2, so that the repetition penalty tells tokens apart; of eight tokens, so that the
first round is one that `rollout.watch` looks at."""
OTHER_PROMPTS = ((2, 0, 2), (1, 2))
REMEMBERED = ((0, 1, 2, 0), (0, 2, 1, 1), (2, 0, 0, 1))
"""What history proposers have seen of every prompt."""


def target_table(tokens: Ids) -> torch.Tensor:
    """Target logits [V], by the last two tokens."""
    return _TARGET_LOGITS[tokens[-2:]]


def draft_probs(tokens: Ids) -> torch.Tensor:
    """Draft law [V], by the last token."""
    return _DRAFT_PROBS[tokens[-1]]


def draft_table(tokens: Ids) -> torch.Tensor:
    """The same law as logits [V], for a policy that drafts."""
    return draft_probs(tokens).log()


# ---- the laws ---------------------------------------------------------------------------------

STRINGS = ((0, 1), (1,), (1, 0, 0))
"""What the grammar allows, each followed by the stop id 2."""


def allowed_next(generated: Ids) -> set[int]:
    """Ids that continue one of the strings, or end it."""
    num, texts = len(generated), [(*string, 2) for string in STRINGS]
    return {text[num] for text in texts if len(text) > num and text[:num] == generated}


def _mask(generated: Sequence[int]) -> torch.Tensor:
    allowed = allowed_next(tuple(generated))
    return torch.tensor([token in allowed for token in range(V)])


LAWS: dict[str, SamplingParams] = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=2.0),
    "greedy": SamplingParams(temperature=0.0),
    "top-1": SamplingParams(top_k=1),  # with its ties
    "top-k": SamplingParams(top_k=2),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.3),
    "top-p then min-p": SamplingParams(top_p=0.7, min_p=0.2),  # the other order keeps fewer
    "all filters": SamplingParams(temperature=1.3, top_k=2, top_p=0.75, min_p=0.1),
    "logit bias": SamplingParams(logit_bias=((0, 1.5), (2, -0.7))),
    "ban": SamplingParams(logit_bias=((1, -math.inf),)),
    "bad words": SamplingParams(bad_words=((0, 1), (2, 2))),
    "repetition": SamplingParams(repetition_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.6),
    "presence": SamplingParams(presence_penalty=0.8),
    "all penalties": SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.3
    ),
    "greedy with penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.9
    ),
    "grammar": SamplingParams(grammar=Grammar.named("strings"), stop_token_ids=(2,)),
    "min_tokens": SamplingParams(min_tokens=2, stop_token_ids=(2,)),
    "stop": SamplingParams(stop_token_ids=(2,)),
    "eos": SamplingParams(stop_token_ids=(2,), eos_token_ids=(1,)),
    "ignore_eos": SamplingParams(stop_token_ids=(2,), eos_token_ids=(1,), ignore_eos=True),
    "everything": SamplingParams(
        temperature=1.2, top_k=2, top_p=0.95, min_p=0.05, repetition_penalty=1.2,
        frequency_penalty=0.2, presence_penalty=0.1, logit_bias=((1, 0.4),), bad_words=((0, 0),),
        min_tokens=1, stop_token_ids=(2,),
    ),
}  # fmt: skip
"""How the tokens of a row are drawn."""

BATCHES: dict[str, tuple[tuple[Ids, str], ...]] = {
    "two rows of one prompt": ((OTHER_PROMPTS[0], "ban"), (OTHER_PROMPTS[0], "ban")),
    "greedy, plain and penalised rows": (
        (PROMPT, "greedy"), (OTHER_PROMPTS[0], "plain"), (OTHER_PROMPTS[1], "all penalties"),
    ),
}  # fmt: skip
"""Rows in flight together, each with its prompt and law."""


# ---- the proposers ----------------------------------------------------------------------------


class TableDrafts(NoProposer):
    """Draws from the draft table, each position by a law of its kind."""

    def __init__(self, *kinds: str, stop_behind: int | None = None) -> None:
        self._kinds, self._stop_behind = kinds, stop_behind

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        return [self._draft(Drafting(row, n), row) for row, n in zip(rows, max_lens)]

    def _draft(self, drafting: Drafting, row: Row) -> Draft:
        while drafting.room and drafting.token_ids[-1:] != (self._stop_behind,):
            tokens = (*row.token_ids, *drafting.token_ids)
            probs = draft_probs(tokens)
            kind = self._kinds[len(tokens) % len(self._kinds)]
            if kind == "dense":
                drafting.sample(DenseLaw(probs))
            elif kind == "sparse":
                drafting.sample(sparse_law(dict(most_probable(probs, 2))))
            else:
                drafting.point(int(probs.argmax()))
        return drafting.done()


class TableTrees(NoProposer):
    """Branches into the two most probable tokens of the draft table, as a draft head would."""

    def propose_trees(
        self, rows: Sequence[Row], max_nodes: Sequence[int], max_depths: Sequence[int]
    ) -> list[Draft]:
        return [
            grow_tree(tuple(row.token_ids), self._branches, max_nodes=nodes, max_depth=depth)
            if nodes
            else NO_DRAFT
            for row, nodes, depth in zip(rows, max_nodes, max_depths)
        ]

    def _branches(self, tokens: Ids) -> Iterator[tuple[int, float, Ids]]:
        for token, probability in most_probable(draft_probs(tokens), 2):
            yield token, probability, (*tokens, token)


def _primed(proposer: HistoryProposer) -> HistoryProposer:
    for prompt, rollout in itertools.product((PROMPT, *OTHER_PROMPTS), REMEMBERED):
        proposer.remember(prompt, rollout)
    return proposer


@dataclass(frozen=True, slots=True)
class Proposing:
    """A way to draft."""

    make: Callable[..., Proposer]
    """Without arguments; with the engine's policy, for one that drafts for itself."""
    sampled: bool = False
    """Tokens are drawn, so the rule of verification matters."""
    branching: bool = False
    of_itself: bool = False
    """The draft table is a twin of the target over one cache."""
    with_head: bool = False
    """The draft table is the target's MTP head."""


def _draft_model() -> Proposer:
    policy = TablePolicy(draft_table, vocab_size=V, context_len=32, num_slots=3)
    return DraftModelProposer(policy, vocab_size=V, num_ids=V)


PROPOSERS: dict[str, Proposing] = {
    "none": Proposing(NoProposer),
    "ngram": Proposing(lambda: NgramProposer(min_match=1)),
    "history": Proposing(lambda: _primed(HistoryProposer())),
    "history_sampled": Proposing(lambda: _primed(HistoryProposer(draw="best")), sampled=True),
    "history_tree": Proposing(lambda: _primed(HistoryProposer()), branching=True),
    "siblings": Proposing(HistoryProposer),  # a history of the rows in flight alone
    "siblings_sampled": Proposing(lambda: HistoryProposer(draw="counts"), sampled=True),
    "table_tree": Proposing(TableTrees, branching=True),
    "dense": Proposing(lambda: TableDrafts("dense"), sampled=True),
    "sparse": Proposing(lambda: TableDrafts("sparse"), sampled=True),
    "mixed": Proposing(lambda: TableDrafts("dense", "sparse", "point"), sampled=True),
    "stopping_time": Proposing(lambda: TableDrafts("dense", stop_behind=1), sampled=True),
    "draft_model": Proposing(_draft_model, sampled=True),
    "self_draft": Proposing(SelfDraftProposer, sampled=True, of_itself=True),
    "mtp": Proposing(MtpProposer, sampled=True, with_head=True),
    "mixture": Proposing(
        lambda policy: MixtureProposer(_primed(HistoryProposer()), MtpProposer(policy)),
        sampled=True,
        with_head=True,
    ),
}
"""Who drafts. Each is made anew for every path of an enumeration."""
DRAFTED = tuple(range(V - 1))
"""The MTP head's draft vocabulary: one token short of all."""
OF_SIBLINGS = ("siblings", "siblings_sampled")
ALONE = tuple(name for name in PROPOSERS if name not in OF_SIBLINGS)
SAMPLED = tuple(name for name in ALONE if PROPOSERS[name].sampled)


# ---- the grid ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison to be made."""

    proposer: str
    law: str
    """Of the one row, by its name in LAWS; or rows by their name in BATCHES."""
    rule: Rule = "block"
    num_tokens: int = 3
    draft_len: int = 2
    """Tokens of a chain or nodes of a tree."""

    @property
    def rows(self) -> list[tuple[Ids, SamplingParams]]:
        """(prompt, sampling) of each row."""
        rows = BATCHES.get(self.law, ((PROMPT, self.law),))
        return [
            (prompt, dataclasses.replace(LAWS[law], max_new_tokens=self.num_tokens))
            for prompt, law in rows
        ]


@dataclass(frozen=True, slots=True)
class Cell:
    """What one comparison found."""

    proposer: str
    law: str
    rule: Literal["block", "position", "points"]
    """`points`: nothing was drawn in drafting, and there is one rule for that."""
    num_tokens: int
    draft_len: int
    total_variation: float
    """Between the engine's law of whole outcomes and that of plain sampling."""
    logprob_error: float
    """Largest difference of a recorded logprob, logprob_full or kept mass from the exact one, over
    all tokens of all outcomes; infinite if an outcome has no probability."""
    num_paths: int
    """Ways the engine's decisions can fall."""
    num_outcomes: int
    accepted: float
    """Expected number of drafted tokens emitted: where it is 0 nothing was speculated."""

    @property
    def exact(self) -> bool:
        return self.total_variation <= TOLERANCE and self.logprob_error <= LOGPROB_TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """The fields and the verdict; an error that is not finite becomes null."""
        row = dataclasses.asdict(self) | {"exact": self.exact}
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }


BOTH: tuple[Rule, ...] = ("block", "position")
KEY_LAWS = ("plain", "all filters", "all penalties", "stop")
LONG_LAWS = (*KEY_LAWS, "grammar", "greedy with penalties")


def grid(*, thorough: bool = False) -> list[Case]:
    """Every proposer x law; where tokens are drawn, by the block rule, and by position as well for
    the proposer of that kind that runs use and for the key laws (thorough: always). Then longer
    drafts and trees, then batches."""
    cases: list[Case] = []
    for proposer, law in itertools.product(ALONE, LAWS):
        proposing = PROPOSERS[proposer]
        both = thorough or proposer == "history_sampled" or law in KEY_LAWS
        rules = BOTH if proposing.sampled and both else BOTH[:1]
        draft_len = 4 if proposing.branching else 2
        cases += [Case(proposer, law, rule, draft_len=draft_len) for rule in rules]
    longer = [("mixed", "stop"), ("sparse", "top-k"), ("history_sampled", "min_tokens")]
    longer += itertools.product(("mtp", "mixture"), ("plain", "stop"))
    longer += itertools.product(("ngram", "history"), LAWS if thorough else LONG_LAWS)
    longer += itertools.product(SAMPLED, KEY_LAWS if thorough else ())
    cases += [Case(*names, num_tokens=4, draft_len=3) for names in longer]
    trees = itertools.product(("table_tree", "history_tree"), LAWS if thorough else KEY_LAWS)
    cases += [Case(*names, num_tokens=4, draft_len=7) for names in trees]
    group, mixed = BATCHES
    cases += [Case("siblings", group), Case("siblings", group, num_tokens=4)]
    cases += [Case("siblings_sampled", group, rule) for rule in BOTH]
    together = SAMPLED if thorough else ("sparse",)
    drafting = ("ngram", "history", "history_tree", "table_tree", *together)
    cases += [Case(proposer, mixed, num_tokens=2) for proposer in drafting]
    return list(dict.fromkeys(cases))


def audit_grid(
    *,
    thorough: bool = False,
    processes: int = 1,
    on_cell: Callable[[Cell], None] = lambda _: None,
) -> list[Cell]:
    """Every cell of the grid, in its order; `on_cell` hears of each when it is done.

    Cells share nothing, so they are examined side by side, each on one thread of a process.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the locks of torch's threads
    cells: list[Cell] = []
    with ProcessPoolExecutor(processes, spawn, torch.set_num_threads, (1,)) as pool:
        for cell in pool.map(examine, grid(thorough=thorough)):
            cells.append(cell)
            on_cell(cell)
    return cells


# ---- one cell ---------------------------------------------------------------------------------

RowOutcome = tuple[Ids, FinishReason]
Outcome = tuple[RowOutcome, ...]


def examine(
    case: Case,
    *,
    engine_class: type[NativeEngine] = NativeEngine,
    wrap: WrapProposer = unchanged,
) -> Cell:
    """Walks every path of the engine and compares its outcomes and records with `plain_law`."""
    proposing = PROPOSERS[case.proposer]
    exact = [plain_law(prompt, sampling) for prompt, sampling in case.rows]
    requests = [_request(i, prompt, sampling) for i, (prompt, sampling) in enumerate(case.rows)]
    errors: list[float] = []
    accepted = 0.0

    def generate(draws: EnumeratedDraws) -> Outcome:
        nonlocal accepted
        policy, proposer = _parts(proposing, len(requests))
        engine = engine_class(
            policy,
            wrap(proposer),
            FixedDraftLen(case.draft_len, proposing.branching),
            verification=case.rule,
            compile_grammar=named_grammars({"strings": lambda: _mask}),
            draws_for=lambda _: draws,
        )
        engine.load(_weights(proposing), version=0, digest="table")
        samples = run_to_end(engine, requests, max_rounds=MAX_ROUNDS)
        outcome = tuple((sample.token_ids, sample.finish_reason) for sample in samples)
        for sample, row_outcome, law in zip(samples, outcome, exact):
            errors.append(_record_error(sample, law.get(row_outcome)))
            accepted += draws.probability * sample.counters.accepted
        return outcome

    law = enumerate_outcomes(generate)
    joint = {
        tuple(outcomes): math.prod(row[outcome].prob for row, outcome in zip(exact, outcomes))
        for outcomes in itertools.product(*exact)
    }
    return Cell(
        proposer=case.proposer,
        law=case.law,
        rule=case.rule if proposing.sampled else "points",
        num_tokens=case.num_tokens,
        draft_len=case.draft_len,
        total_variation=total_variation(law, joint),
        logprob_error=max(errors),
        num_paths=len(errors) // len(requests),
        num_outcomes=len(law),
        accepted=accepted,
    )


def _parts(proposing: Proposing, num_slots: int) -> tuple[Policy, Proposer]:
    """A fresh policy of the target table, and who drafts for it."""
    target = TablePolicy(target_table, vocab_size=V, context_len=32, num_slots=num_slots)
    if proposing.with_head:
        both = table_mtp(
            target_table, draft_table, DRAFTED, vocab_size=V, context_len=32, num_slots=num_slots
        )
        return both, proposing.make(both)
    if not proposing.of_itself:
        return target, proposing.make()
    twins = LosslessPolicy(target, target.sharing_cache(draft_table), dict)
    return twins, proposing.make(twins)


def _weights(proposing: Proposing) -> Any:
    """What a policy of `_parts` loads."""
    if proposing.with_head:
        return table_weights(target_table, draft_table, DRAFTED)
    return TwinWeights(target_table, draft_table) if proposing.of_itself else target_table


def _request(index: int, prompt: Ids, sampling: SamplingParams, seed: int = 0) -> RolloutRequest:
    return RolloutRequest(
        id=str(index),
        group_id="audit",
        prompt_id=str(prompt),
        sample_index=index,
        prompt_ids=prompt,
        sampling=sampling,
        run_seed=seed,
    )


def _record_error(sample: RolloutSample, exact: "Exact | None") -> float:
    """Largest difference of what the sample records from the exact numbers."""
    if exact is None:
        return math.inf
    recorded = zip(sample.logprobs, sample.logprobs_full, sample.kept_mass)
    pairs = zip(itertools.chain(*recorded), itertools.chain(*exact.records), strict=True)
    return max((abs(one - other) for one, other in pairs), default=0.0)


# ---- the reference ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exact:
    """One outcome of plain sampling."""

    prob: float
    records: tuple[tuple[float, float, float], ...]
    """(log-probability, that of the whole vocabulary, kept mass) of each token."""


def plain_law(prompt: Ids, sampling: SamplingParams) -> dict[RowOutcome, Exact]:
    """The law of a row's outcomes when each token is drawn in turn from its law."""
    law: dict[RowOutcome, Exact] = {}

    def extend(done: Ids, before: Exact) -> None:
        stopped = done and done[-1] in ends(sampling) and len(done) > sampling.min_tokens
        if stopped or len(done) == sampling.max_new_tokens:
            law[done, "stop" if stopped else "length"] = before
            return
        probs, full = next_probs(prompt, done, sampling)
        kept = sum(f for p, f in zip(probs, full) if p)
        for token, prob in enumerate(probs):
            if prob:
                record = (math.log(prob), math.log(full[token]), kept)
                extend((*done, token), Exact(before.prob * prob, (*before.records, record)))

    extend((), Exact(1.0, ()))
    return law


def next_probs(prompt: Ids, done: Ids, sampling: SamplingParams) -> tuple[list[float], list[float]]:
    """(sampled law [V], law of the whole vocabulary [V]) of the token behind `done`."""
    logits = [float(logit) for logit in target_table((*prompt, *done))]
    edited = list(logits)
    for token in range(V):
        phrases = [p[:-1] for p in sampling.bad_words if p[-1] == token]
        banned = any(done[len(done) - len(p) :] == p for p in phrases if len(p) <= len(done))
        banned |= len(done) < sampling.min_tokens and token in ends(sampling)
        banned |= sampling.grammar is not None and token not in allowed_next(done)
        edited[token] += -math.inf if banned else dict(sampling.logit_bias).get(token, 0.0)
        if token in (*prompt, *done):
            r = sampling.repetition_penalty
            edited[token] = edited[token] / r if edited[token] > 0 else edited[token] * r
        edited[token] -= sampling.frequency_penalty * done.count(token)
        edited[token] -= sampling.presence_penalty * (token in done)
    if sampling.temperature == 0:
        point = [float(token == edited.index(max(edited))) for token in range(V)]
        return point, point
    full = _softmax([logit / sampling.temperature for logit in logits])
    probs = _softmax([logit / sampling.temperature for logit in edited])
    if sampling.top_k:
        probs = _keep(probs, sorted(probs)[-min(sampling.top_k, V)])
    if sampling.top_p < 1:
        ranked = sorted(probs, reverse=True)
        masses = itertools.accumulate(ranked)
        probs = _keep(probs, next(p for p, mass in zip(ranked, masses) if mass >= sampling.top_p))
    probs = _keep(probs, sampling.min_p * max(probs))
    return probs, full


def ends(sampling: SamplingParams) -> Ids:
    """Ids that end a row."""
    return sampling.stop_token_ids + (() if sampling.ignore_eos else sampling.eos_token_ids)


def _softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def _keep(probs: list[float], least: float) -> list[float]:
    """Without those below `least`, normalised; ties with it are kept."""
    mass = sum(p for p in probs if p >= least)
    return [p / mass if p >= least else 0.0 for p in probs]


# ---- seeded streams ---------------------------------------------------------------------------

TOY_TARGET = (0.10, 0.40, 0.30, 0.20)
TOY_DRAFT = (0.60, 0.25, 0.10, 0.05)
"""The law of the token behind 0; behind t both are rolled by t. A drafted token is accepted with
probability .5, and the residual (0, .3, .4, .3) has three tokens: with one, noise that is used twice
could not be seen."""
SEED = 0
LEVEL = 1e-6
"""At which the power of each test is stated."""
NUM_REQUESTS = 8000
NUM_SLOTS = 1024
NUM_DRAWS = 20_000
CELLS = 1024
"""Resolution to which noise is read off decisions."""
VISIBLE_TV = 0.05
"""Size of a fault whose chance to be found is stated."""
VISIBLE_CORRELATION = 0.05


def rolled(probs: Sequence[float], token: int) -> torch.Tensor:
    """The law [4] behind a token."""
    return torch.tensor(probs, dtype=torch.float64).roll(token)


_TOY_DRAFTS = [DenseLaw(rolled(TOY_DRAFT, token)) for token in range(4)]


class ToyDrafts(NoProposer):
    """Draws from the toy's draft law."""

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        return [self._draft(row, max_len) for row, max_len in zip(rows, max_lens)]

    def _draft(self, row: Row, max_len: int) -> Draft:
        drafting, last = Drafting(row, max_len), row.token_ids[-1]
        while drafting.room:
            last = drafting.sample(_TOY_DRAFTS[last])
        return drafting.done()


def toy_law(num_tokens: int) -> dict[Ids, float]:
    """Probability of every continuation of the prompt (0,)."""
    law: dict[Ids, float] = {(0,): 1.0}
    for _ in range(num_tokens):
        law = {
            (*ids, token): prob * TOY_TARGET[(token - ids[-1]) % 4]
            for ids, prob in law.items()
            for token in range(4)
        }
    return {ids[1:]: prob for ids, prob in law.items()}


def toy_tokens(
    rule: Rule,
    draft_len: int,
    num_tokens: int,
    num_requests: int,
    *,
    engine_class: type[NativeEngine] = NativeEngine,
    draws_class: type[SeededDraws] = SeededDraws,
    top_k: int = 0,
) -> list[Ids]:
    """What requests with seeds of their own emit."""
    table = markov_table(torch.stack([rolled(TOY_TARGET, token) for token in range(4)]).log())
    engine = engine_class(
        TablePolicy(table, vocab_size=4, context_len=16, num_slots=NUM_SLOTS),
        ToyDrafts(),
        FixedDraftLen(draft_len),
        verification=rule,
        draws_for=lambda r: draws_class(r.run_seed, r.prompt_id, r.sample_index),
    )
    engine.load(table, version=0, digest="table")
    sampling = SamplingParams(max_new_tokens=num_tokens, top_k=top_k)
    requests = [_request(i, (0,), sampling, SEED) for i in range(num_requests)]
    return [sample.token_ids for sample in run_to_end(engine, requests, max_rounds=MAX_ROUNDS)]


def toy_findings(
    rule: Rule,
    draft_len: int,
    num_requests: int = NUM_REQUESTS,
    *,
    level: float = LEVEL,
    engine_class: type[NativeEngine] = NativeEngine,
    draws_class: type[SeededDraws] = SeededDraws,
) -> list[Finding]:
    """The first token, and all tokens of a whole round and its bonus, against the toy's law."""
    emitted = toy_tokens(
        rule, draft_len, draft_len + 1, num_requests,
        engine_class=engine_class, draws_class=draws_class,
    )  # fmt: skip
    where = f"of the toy, {draft_len} drafted, {rule}"
    return [
        chi_square(
            f"{what} {where}", Counter(ids[:num] for ids in emitted), toy_law(num),
            level, VISIBLE_TV,
        )
        for what, num in (("first token", 1), (f"{draft_len + 1} tokens", draft_len + 1))
    ]  # fmt: skip


class CoarseCoins(SeededDraws):
    """Coins of three bits: u = 0 comes once in 8, not once in 2^53."""

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        uniform = super().uniform(purpose, start, position)
        return math.floor(8 * uniform) / 8 if purpose == b"coin" else uniform


def refusal_at_zero(
    num_requests: int = 500,
    *,
    level: float = LEVEL,
    engine_class: type[NativeEngine] = NativeEngine,
    draws_class: type[SeededDraws] = CoarseCoins,
) -> list[Finding]:
    """A drafted token of probability 0 is refused by every coin, also by u = 0. Top-k 2 leaves two
    tokens of the toy: no level, one of the others is seen or not."""
    emitted = toy_tokens(
        "position", 1, 2, num_requests,
        engine_class=engine_class, draws_class=draws_class, top_k=2,
    )  # fmt: skip
    impossible = sum(ids[0] not in (1, 2) for ids in emitted)
    return [largest_gap("tokens of probability 0 when u = 0", [impossible / num_requests], 0.0)]


def stream_findings(
    num_draws: int = NUM_DRAWS,
    *,
    level: float = LEVEL,
    engine_class: type[NativeEngine] = NativeEngine,
    draws_class: type[SeededDraws] = SeededDraws,
) -> list[Finding]:
    """The noise behind the decisions of one round, and of a position that was drafted in a round,
    cut off, and drafted again in the next; of many rows, 32 positions each."""
    laws = TargetLaws(torch.zeros(1, CELLS), [Condition(SamplingParams())])
    even = torch.ones(CELLS)
    one_round: list[list[float]] = []  # [num_draws, 4]
    next_round: list[list[float]] = []  # [num_draws, 4]
    for index in range(num_draws):
        draws, position = draws_class(SEED, "streams", index // 32), 8 + index % 32
        start = position - 1 - index % 2
        draft, draft_again = (draws.draft(even, at, position) / CELLS for at in (start, start + 1))
        coin, coin_again = (coin_noise(draws, at, position) for at in (start, start + 1))
        correction = draws.correction(even, start, position) / CELLS
        target = draws.target(laws, 0, position) / CELLS
        one_round.append([draft, coin, correction, target])
        next_round.append([draft, coin, draft_again, coin_again])
    return [
        independence("noise of one round", one_round, level, VISIBLE_CORRELATION),
        independence("noise of the next round", next_round, level, VISIBLE_CORRELATION),
    ]


def coin_noise(draws: Draws, start: int, position: int) -> float:
    """The uniform behind a coin, rounded down to one of CELLS, by bisection."""
    low, width = 0.0, 1.0
    while width > 1 / CELLS:
        width /= 2
        if not draws.coin(low + width, start, position):
            low += width
    return low


def audit_streams(
    *,
    num_requests: int = NUM_REQUESTS,
    num_draws: int = NUM_DRAWS,
    level: float = LEVEL,
    engine_class: type[NativeEngine] = NativeEngine,
    draws_class: type[SeededDraws] = SeededDraws,
) -> list[Finding]:
    """Every check of seeded streams."""
    classes: dict[str, Any] = {"engine_class": engine_class, "draws_class": draws_class}
    return [
        *toy_findings("position", 1, num_requests, level=level, **classes),
        *toy_findings("block", 1, num_requests, level=level, **classes),
        *toy_findings("block", 2, num_requests, level=level, **classes),
        *refusal_at_zero(level=level, engine_class=engine_class),
        *stream_findings(num_draws, level=level, draws_class=draws_class),
    ]
