"""The joint law of whole speculative generations, enumerated through the real engine.

Rule by kind of draft by target law, against `plain_law`, which shares no code with the engine; then
what is around them (trees, histories, stopping times, mixed batches), planted faults that must be
seen, and seeded samples of the path that runs in production.
"""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chi2

import rollout.verify
import rollout.verify_block
import rollout.verify_positions
from proposers.history import HistoryProposer
from proposers.ngram import NgramProposer
from proposers.none import NoProposer
from rollout.conditions import Condition, Conditions
from rollout.draft import DenseLaw, Draft
from rollout.draft_len import DraftLen, FixedDraftLen
from rollout.drafting import Drafting
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes, total_variation
from rollout.grammar import Grammar
from rollout.law import TargetLaws
from rollout.proposer import Proposer
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import Draws
from rollout.table_policy import Table, random_table
from rollout.verdict import Verdict
from rollout.verify import Rule
from rollout.verify_block import _Block
from rollout.verify_positions import law_prob
from tests.rollout.engines import (
    ScriptedProposer,
    TableTrees,
    drawing_proposer,
    grammar_named,
    plain_law,
    request,
    run,
    table_engine,
)

V = 3
TARGET = random_table(V, depth=2, seed=1)
DRAFT = random_table(V, depth=1, seed=2)
TOLERANCE = 1e-12
STOP = 2
RULES: tuple[Rule, ...] = ("block", "position")
KINDS = ("dense", "sparse", "point", "mixed")

Outcome = tuple[int, ...]
Law = dict[Outcome, float]
Make = Callable[[], Proposer]


def words(generated: Outcome) -> tuple[int, ...]:
    """A grammar: 0 is followed by 1 or the end, 1 by 0 or 1, and 0 begins."""
    return (0,) if not generated else (1, STOP) if generated[-1] == 0 else (0, 1)


def sampling(**changes: Any) -> SamplingParams:
    """Three tokens: a whole draft of two and its bonus."""
    return SamplingParams(**{"max_new_tokens": 3} | changes)


LAWS = {
    "plain": sampling(),
    "cold": sampling(temperature=0.5),
    "hot": sampling(temperature=2.0),
    "greedy": sampling(temperature=0.0),
    "top_k": sampling(top_k=2),
    "top_p": sampling(top_p=0.9),
    "min_p": sampling(min_p=0.3),
    "all filters": sampling(temperature=1.3, top_k=2, top_p=0.9, min_p=0.1),
    "stop": sampling(stop_token_ids=(STOP,)),
    "eos and stop": sampling(eos_token_ids=(STOP,), stop_token_ids=(1,)),
    "ignored eos": sampling(eos_token_ids=(STOP,), ignore_eos=True, min_tokens=2),
    "bias": sampling(logit_bias=((0, 1.5), (2, -0.7))),
    "ban by bias": sampling(logit_bias=((1, -math.inf),)),
    "bad word": sampling(bad_words=((2,),)),
    "bad phrases": sampling(bad_words=((0, 1), (2, 2), (1, 0, 0))),
    "repetition": sampling(repetition_penalty=1.8),
    "frequency": sampling(frequency_penalty=0.9),
    "presence": sampling(presence_penalty=0.8),
    "rewards": sampling(repetition_penalty=0.6, frequency_penalty=-0.5, presence_penalty=-0.4),
    "greedy penalties": sampling(temperature=0.0, repetition_penalty=2.0, frequency_penalty=4.0),
    "grammar": sampling(grammar=Grammar.named("words"), eos_token_ids=(STOP,)),
    "everything": sampling(
        grammar=Grammar.named("words"), eos_token_ids=(STOP,), min_tokens=1, bad_words=((0, 1, 1),),
        logit_bias=((1, 0.4),), repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.2,
        temperature=0.8, top_p=0.95, min_p=0.02,
    ),
}  # fmt: skip


@cache
def exact(sampling: SamplingParams, table: Table = TARGET, vocab_size: int = V) -> Law:
    allowed = words if sampling.grammar else None
    return plain_law(table, (0,), sampling, vocab_size, allowed)


def enumerated(
    make: Make,
    sampling: SamplingParams,
    draft_len: int = 2,
    *,
    rule: Rule = "block",
    branching: bool = False,
    table: Table = TARGET,
    vocab_size: int = V,
    lengths: DraftLen | None = None,
) -> Law:
    """The law of what an engine emits, each path run by a fresh one."""

    def generate(draws: EnumeratedDraws) -> Outcome:
        engine = table_engine(
            table,
            vocab_size,
            proposer=make(),
            draft_len=draft_len,
            draws_for=lambda _: draws,
            verification=rule,
            branching=branching,
            compile_grammar=grammar_named("words", words, V, stop_ids=(STOP,)),
        )
        engine.draft_len = lengths or engine.draft_len
        return run(engine, [request(sampling=sampling)])["r0"].token_ids

    return enumerate_outcomes(generate)


def drawing(kind: str, **options: Any) -> Make:
    return lambda: drawing_proposer(kind, DRAFT, **options)


def error(law: Law, sampling: SamplingParams) -> float:
    return total_variation(law, exact(sampling))


by_rule = pytest.mark.parametrize(
    ("rule", "kind"), [(r, k) for k in KINDS for r in RULES if (r, k) != ("position", "point")]
)


@by_rule
@pytest.mark.parametrize("name", LAWS)
def test_emitted_law_equals_target_by_enumeration(rule: Rule, kind: str, name: str) -> None:
    law = enumerated(drawing(kind), LAWS[name], rule=rule)
    assert error(law, LAWS[name]) < TOLERANCE


def test_the_laws_above_differ() -> None:
    """Negative control: the comparison tells each from the others, but for an eos that is ignored."""
    same = {
        (one, other)
        for one, other in itertools.combinations(LAWS, 2)
        if error(exact(LAWS[one]), LAWS[other]) < 0.005
    }
    assert same == {("plain", "ignored eos")}


# ---- length -------------------------------------------------------------------------------


@by_rule
@pytest.mark.parametrize("draft_len", [1, 3])
def test_emitted_law_does_not_depend_on_the_draft_length(
    rule: Rule, kind: str, draft_len: int
) -> None:
    stopping = SamplingParams(max_new_tokens=4, stop_token_ids=(0, STOP))
    law = enumerated(drawing(kind), stopping, draft_len, rule=rule)
    assert error(law, stopping) < TOLERANCE


def test_block_verification_of_drafts_of_four_leaves_the_law_alone() -> None:
    """Two tokens, so that a whole draft of four and its bonus can be enumerated."""
    target, draft = random_table(2, depth=3, seed=3), random_table(2, depth=2, seed=4)
    five = SamplingParams(max_new_tokens=5)
    law = enumerated(lambda: drawing_proposer("dense", draft), five, 4, table=target, vocab_size=2)
    assert total_variation(law, exact(five, target, 2)) < TOLERANCE


@by_rule
def test_draft_length_may_be_a_stopping_time(rule: Rule, kind: str) -> None:
    """A drafted 1 is kept and ends the draft; four tokens, of which three may be drafted."""
    stopping = SamplingParams(max_new_tokens=4, stop_token_ids=(0,))
    stop_after = drawing(kind, stop_after=lambda tokens: tokens[-1] == 1)
    assert error(enumerated(stop_after, stopping, 3, rule=rule), stopping) < TOLERANCE


@by_rule
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_min_tokens_ends_at_every_offset_of_a_window(
    rule: Rule, kind: str, min_tokens: int
) -> None:
    # case 29: before the window, at its first and second draft, at the bonus
    stopping = sampling(min_tokens=min_tokens, eos_token_ids=(0, STOP))
    assert error(enumerated(drawing(kind), stopping, rule=rule), stopping) < TOLERANCE


# ---- trees --------------------------------------------------------------------------------

TOLD = ((0, 1, 2), (0, 2, 1), (0, 1, 1), (1, 0, 1), (2, 0, 0))


def history(draw: str = "mode", told: Sequence[Outcome] = TOLD) -> HistoryProposer:
    """With rollouts of the prompt from earlier, so that continuations differ and repeat."""
    proposer = HistoryProposer(draw=draw)  # type: ignore[arg-type]
    for ids in told:
        proposer.remember((0,), ids)
    return proposer


TREES: dict[str, Make] = {
    "history": history,
    "two most probable": lambda: TableTrees(DRAFT),
    "all three": lambda: TableTrees(DRAFT, width=3),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", LAWS)
def test_trees_leave_the_law_alone(tree: str, name: str) -> None:
    """Nine nodes on two levels; penalties, bad phrases and the grammar differ from branch to branch."""
    law = enumerated(TREES[tree], LAWS[name], 9, branching=True)
    assert error(law, LAWS[name]) < TOLERANCE


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("num_nodes", [1, 2, 4, 7, 20])
def test_trees_of_any_size_leave_the_law_alone(tree: str, num_nodes: int) -> None:
    """Up to three levels."""
    four = SamplingParams(max_new_tokens=4, stop_token_ids=(1,), frequency_penalty=0.5)
    assert error(enumerated(TREES[tree], four, num_nodes, branching=True), four) < TOLERANCE


# ---- histories ----------------------------------------------------------------------------


def test_ngram_drafts_leave_the_law_alone() -> None:
    four = SamplingParams(max_new_tokens=4)
    law = enumerated(lambda: NgramProposer(min_match=1, max_match=2), four, 3)
    assert error(law, four) < TOLERANCE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["plain", "stop", "frequency", "grammar", "all filters"])
def test_drafts_drawn_from_the_counts_of_old_rollouts_leave_the_law_alone(
    rule: Rule, name: str
) -> None:
    law = enumerated(lambda: history("counts"), LAWS[name], rule=rule)
    assert error(law, LAWS[name]) < TOLERANCE


class Priced(FixedDraftLen):
    """Cuts drafts as the adaptive length does: before the first token whose estimated chance of being
    reached and accepted is below a price fixed beforehand."""

    def keep(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> list[Draft]:
        return [draft.truncated(self._worth(draft)) for draft in drafts]

    def _worth(self, draft: Draft) -> int:
        chain = itertools.accumulate(draft.chances or (), operator.mul)
        return sum(reached >= 0.5 for reached in chain)


class Peeking(ScriptedProposer):
    """The fault that a price makes possible: a chance worked out from the token that was drawn."""

    def __init__(self) -> None:
        super().__init__(self._peek)
        self._drawing = drawing_proposer("dense", DRAFT)

    def _peek(self, row: Row, max_len: int) -> Draft:
        draft = self._drawing._draft(row, max_len)
        chances = tuple(law_prob(law, token) for law, token in zip(draft.laws, draft.token_ids))
        return replace(draft, chances=chances)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draw", ["best", "counts"])
@pytest.mark.parametrize("name", ["plain", "stop", "all filters"])
def test_drawn_drafts_cut_by_their_price_leave_the_law_alone(
    rule: Rule, draw: str, name: str
) -> None:
    lens: set[int] = set()

    class Watched(Priced):
        def keep(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> list[Draft]:
            kept = super().keep(rows, drafts)
            lens.update(len(draft) - len(part) for draft, part in zip(drafts, kept))
            return kept

    law = enumerated(lambda: history(draw), LAWS[name], 2, rule=rule, lengths=Watched(2))
    assert error(law, LAWS[name]) < TOLERANCE
    assert max(lens) > 0  # something was cut


@pytest.mark.parametrize("rule", RULES)
def test_a_chance_that_looks_at_the_drawn_token_bends_the_law(rule: Rule) -> None:
    """The negative control."""
    law = enumerated(Peeking, LAWS["plain"], 2, rule=rule, lengths=Priced(2))
    assert error(law, LAWS["plain"]) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_a_request_that_is_sent_again_is_drafted_for_without_randomness(rule: Rule) -> None:
    proposer = drawing_proposer("mixed", DRAFT)
    engine = table_engine(TARGET, V, proposer=proposer, draft_len=3, verification=rule)
    plain = table_engine(TARGET, V)
    again = [
        replace(request(f"r{i}", sampling=sampling(max_new_tokens=12), sample_index=i), attempt=1)
        for i in range(20)
    ]
    samples, expected = run(engine, again), run(plain, again)
    assert {r: s.token_ids for r, s in samples.items()} == {
        r: s.token_ids for r, s in expected.items()
    }
    assert sum(sample.counters.verified for sample in samples.values()) > 0


def joint_law(make: Make, samplings: Sequence[SamplingParams], draft_len: int, **how: Any) -> Any:
    """Joint law of rows of one prompt, in flight together."""

    def generate(draws: EnumeratedDraws) -> tuple[Outcome, ...]:
        engine = table_engine(
            TARGET,
            V,
            proposer=make(),
            draft_len=draft_len,
            draws_for=lambda _: draws,
            compile_grammar=grammar_named("words", words, V, stop_ids=(STOP,)),
            **how,
        )
        requests = [
            request(str(i), sampling=s, prompt_id="p", sample_index=i)
            for i, s in enumerate(samplings)
        ]
        samples = run(engine, requests)
        return tuple(samples[r.id].token_ids for r in requests)

    return enumerate_outcomes(generate)


def independent(samplings: Sequence[SamplingParams]) -> dict[tuple[Outcome, ...], float]:
    joint: dict[tuple[Outcome, ...], float] = {(): 1.0}
    for one in samplings:
        joint = {(*j, o): p * q for j, p in joint.items() for o, q in exact(one).items()}
    return joint


GROUPS: dict[str, tuple[Make, dict[str, Any]]] = {
    "mode": (HistoryProposer, {}),
    "tree": (HistoryProposer, {"branching": True}),
    "counts by block": (lambda: HistoryProposer(draw="counts"), {"verification": "block"}),
    "counts by position": (lambda: HistoryProposer(draw="counts"), {"verification": "position"}),
}


@pytest.mark.parametrize("group", GROUPS)
def test_history_drafts_leave_the_joint_law_of_a_group_alone(group: str) -> None:
    """Two rollouts of one prompt, each drafting from the other while both are in flight."""
    make, how = GROUPS[group]
    two = [sampling(stop_token_ids=(STOP,)), sampling(top_k=2)]
    assert total_variation(joint_law(make, two, 2, **how), independent(two)) < TOLERANCE


def test_rows_of_different_laws_in_one_batch_keep_their_own() -> None:
    two = SamplingParams(max_new_tokens=2, repetition_penalty=1.8, bad_words=((2, 1),))
    short = SamplingParams(max_new_tokens=2, grammar=Grammar.named("words"), eos_token_ids=(STOP,))
    rows = [LAWS["greedy"], two, short, LAWS["greedy penalties"]]
    law = joint_law(drawing("mixed"), rows, draft_len=1)
    assert total_variation(law, independent(rows)) < TOLERANCE


# ---- planted faults -----------------------------------------------------------------------

POSITION_FAULTS: dict[str, tuple[str, Any]] = {
    "residual not used": ("residual", lambda target, law: target),
    "residual softmaxed": (
        "residual",
        lambda target, law: (target - law.probs).clamp(min=0).softmax(-1),
    ),
    "only the refused mass removed": ("residual", lambda target, law: target * (law.probs < 0.5)),
    "q reported is not q drawn": ("law_prob", lambda law, token: 0.5),
}


def stops_at_the_first_failure(
    laws: TargetLaws, first: int, draft: Draft, draws: Draws, start: int, *, foretell: bool
) -> Verdict:
    block, length = _Block(laws, first, draft), 0
    while length < len(draft) and draws.coin(block.accept_prob(length + 1), start, start + length):
        length += 1
    accepted, index = tuple(range(length)), first + length
    if length == len(draft):
        return Verdict(accepted, draws.target(laws, index, start + length), "bonus")
    corrected = draws.correction(block.excess(length), start, start + length)
    return Verdict(accepted, corrected, "correction")


def unchained(block: _Block) -> list[float]:
    """Ratios of single positions instead of their chain."""
    steps = enumerate(zip(block.draft.token_ids, block.draft.laws))
    ratios = [
        block._laws.prob(block._first + i, t) / rollout.verify_positions.law_prob(law, t)
        for i, (t, law) in steps
    ]
    return [0.0, *(math.log(min(1.0, ratio)) for ratio in ratios)]


def one_position_excess(block: _Block, length: int) -> torch.Tensor:
    law: Any = block.draft.laws[length]
    return (block._laws.probs(block._first + length) - law.probs).clamp(min=0)


BLOCK_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "stops at the first failure": (rollout.verify, "verify_block", stops_at_the_first_failure),
    "ratios not chained": (_Block, "_log_ratios", unchained),
    "interior h = r": (_Block, "accept_prob", lambda block, i: math.exp(block._log_r[i])),
    "always accepted": (_Block, "accept_prob", lambda block, i: 1.0),
    "residual not used": (
        _Block,
        "excess",
        lambda block, i: block._laws.probs(block._first + i),
    ),
    "residual of one position": (_Block, "excess", one_position_excess),
    "q reported is not q drawn": (rollout.verify_block, "law_prob", lambda law, token: 0.5),
}


class Mixtures(NoProposer):
    """One law a position: a share of a named token, the rest of a table's law, and shares that change
    with the position from none to all. `reported` is what is handed over for the law drawn from."""

    SHARES = (0.4, 0.0, 1.0, 0.75)

    def __init__(self, reported: Callable[[torch.Tensor, int], torch.Tensor] = lambda q, _: q):
        self._reported = reported

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        return [self._draft(row, max_len) for row, max_len in zip(rows, max_lens)]

    def _draft(self, row: Row, max_len: int) -> Draft:
        drafting = Drafting(row, max_len)
        named: list[int] = []
        drawn: list[torch.Tensor] = []
        while drafting.room:
            tokens = (*row.token_ids, *drafting.token_ids)
            share, probs = self.SHARES[len(tokens) % 4], DRAFT(tokens).softmax(-1)
            named.append((tokens[-1] + 1) % V)
            law = (1 - share) * probs
            law[named[-1]] += share
            drafting.sample(DenseLaw(law))
            drawn.append(law)
        made = drafting.done()
        return Draft(made.token_ids, tuple(map(DenseLaw, map(self._reported, drawn, named))))


@pytest.mark.parametrize("rule", ["block", "position"])
@pytest.mark.parametrize("name", ["plain", "all filters", "everything"])
@pytest.mark.parametrize("draft_len", [2, 3])
def test_mixtures_that_change_by_position_leave_the_law_alone(
    name: str, rule: Rule, draft_len: int
) -> None:
    whole = replace(LAWS[name], max_new_tokens=draft_len + 1)  # the draft and its bonus
    assert error(enumerated(Mixtures, whole, draft_len, rule=rule), whole) < TOLERANCE


@pytest.mark.parametrize("rule", ["block", "position"])
def test_a_mixture_reported_as_its_model_alone_is_seen(rule: Rule) -> None:
    """Negative control: half of the named token's mass is kept from the law handed over."""

    def halved(q: torch.Tensor, named: int) -> torch.Tensor:
        reported = q.clone()
        reported[named] /= 2
        return reported / reported.sum()

    law = enumerated(lambda: Mixtures(halved), LAWS["plain"], rule=rule)
    assert error(law, LAWS["plain"]) > 0.01


@pytest.mark.parametrize("fault", POSITION_FAULTS)
def test_a_fault_of_the_rule_by_positions_is_seen_by_enumeration(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the same comparison fails when the rule is bent."""
    monkeypatch.setattr(rollout.verify_positions, *POSITION_FAULTS[fault])
    law = enumerated(drawing("dense"), LAWS["plain"], rule="position")
    assert error(law, LAWS["plain"]) > 0.01


@pytest.mark.parametrize("fault", BLOCK_FAULTS)
def test_a_fault_of_the_rule_by_blocks_is_seen_by_enumeration(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control. By a single position several of these would be right: `interior h = r` and
    `ratios not chained` need a draft of two."""
    monkeypatch.setattr(*BLOCK_FAULTS[fault])
    law = enumerated(drawing("dense"), LAWS["plain"], rule="block")
    assert error(law, LAWS["plain"]) > 0.01


@pytest.mark.parametrize("rule", RULES)
def test_always_accepting_is_seen_by_enumeration(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EnumeratedDraws, "coin", lambda *_: True)
    assert error(enumerated(drawing("dense"), LAWS["plain"], rule=rule), LAWS["plain"]) > 0.01


def of_the_window(conditions: Conditions, draft_ids: Sequence[int], *_: object) -> list[Condition]:
    """Fault: every position of a window is under the state before it."""
    return [conditions._after([])] * (len(draft_ids) + 1)


def along_the_nodes(conditions: Conditions, draft_ids: Sequence[int], *_: object) -> Any:
    """Fault: a tree's nodes are taken for a chain."""
    return really_along(conditions, draft_ids)


really_along = Conditions.along


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["repetition", "frequency", "presence", "bad phrases"])
def test_a_state_that_does_not_move_along_the_draft_is_seen(
    rule: Rule, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(Conditions, "along", of_the_window)
    assert error(enumerated(drawing("dense"), LAWS[name], rule=rule), LAWS[name]) > 0.01


@pytest.mark.parametrize("fault", [of_the_window, along_the_nodes])
@pytest.mark.parametrize("name", ["frequency", "bad phrases"])
def test_a_state_that_does_not_follow_the_branches_of_a_tree_is_seen(
    fault: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(Conditions, "along", fault)
    law = enumerated(TREES["all three"], LAWS[name], 9, branching=True)
    assert error(law, LAWS[name]) > 0.01


def test_a_grammar_asked_along_the_wrong_branch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the strict mask."""
    monkeypatch.setattr(Conditions, "along", along_the_nodes)
    with pytest.raises(AssertionError, match=r"forbidden|past the stop"):
        enumerated(TREES["all three"], LAWS["grammar"], 9, branching=True)


@pytest.mark.parametrize("rule", RULES)
def test_a_token_dropped_after_it_was_looked_at_is_seen(rule: Rule) -> None:
    """Negative control of the stopping time: a last token 1 is dropped instead of kept."""
    inner = drawing_proposer("dense", DRAFT)

    def dropping() -> Proposer:
        def draft(row: Any, max_len: int) -> Draft:
            drawn = inner._draft(row, max_len)
            return drawn.truncated(len(drawn) - (drawn.token_ids[-1] == 1))

        return ScriptedProposer(draft)

    assert error(enumerated(dropping, LAWS["plain"], rule=rule), LAWS["plain"]) > 0.01


def test_enumeration_itself_counts_every_path_once() -> None:
    def two_coins(draws: EnumeratedDraws) -> tuple[bool, bool]:
        return draws.coin(0.25, 0, 0), draws.coin(0.5, 0, 1)

    law = enumerate_outcomes(two_coins)
    assert law == {(True, True): 0.125, (True, False): 0.125} | dict.fromkeys(
        [(False, True), (False, False)], 0.375
    )


# ---- seeded samples -----------------------------------------------------------------------

NUM_SAMPLES = 1000
FALSE_ALARM_RATE = 1e-6


def chi_square_tail(kind: str, rule: Rule = "block") -> float:
    """Chance that a correct engine is further from the plain law than three tokens of seeded
    samples are, drafted two at a time. Outcomes expected fewer than five times are one cell."""
    engine = table_engine(
        TARGET, V, proposer=drawing_proposer(kind, DRAFT), draft_len=2, num_slots=64,
        verification=rule,
    )  # fmt: skip
    samples = run(
        engine,
        [
            request(str(i), sampling=LAWS["plain"], prompt_id="p", sample_index=i)
            for i in range(NUM_SAMPLES)
        ],
    )
    observed, expected = Counter[object](), Counter[object]()
    cells: dict[Outcome, object] = {}
    for outcome, prob in exact(LAWS["plain"]).items():
        cells[outcome] = outcome if NUM_SAMPLES * prob >= 5 else "rare"
        expected[cells[outcome]] += NUM_SAMPLES * prob  # type: ignore[assignment]
    observed.update(cells[sample.token_ids] for sample in samples.values())
    distance = sum((observed[c] - mean) ** 2 / mean for c, mean in expected.items())
    return float(chi2.sf(distance, len(expected) - 1))


@pytest.mark.parametrize(
    ("rule", "kind"), [("position", "dense"), *(("block", kind) for kind in KINDS)]
)
def test_seeded_samples_of_the_real_path_have_the_target_law(rule: Rule, kind: str) -> None:
    assert chi_square_tail(kind, rule) > FALSE_ALARM_RATE


@pytest.mark.parametrize("rule", RULES)
def test_a_planted_fault_is_seen_in_seeded_samples(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: corrections drawn from the target instead of the residual."""
    monkeypatch.setattr(rollout.verify_positions, "residual", lambda target, law: target)
    monkeypatch.setattr(*BLOCK_FAULTS["residual not used"])
    assert chi_square_tail("dense", rule) < FALSE_ALARM_RATE
