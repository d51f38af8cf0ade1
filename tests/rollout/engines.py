"""Small engines, scripted proposers and the plain law that the tests of this folder share."""

import math
from collections.abc import Callable, Collection, Sequence

import torch

from proposers.none import NoProposer
from rollout.draft import POINT_MASS, DenseLaw, Draft, DraftLaw, SparseLaw
from rollout.draft_len import FixedDraftLen
from rollout.draft_tree import grow_tree, most_probable
from rollout.grammar import CompileGrammar, MaskProvider, named_grammars
from rollout.native_engine import NativeEngine, seeded_draws
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.scheduler import MAX_ROUND_TOKENS
from rollout.streams import Draws
from rollout.table_policy import Table, TablePolicy
from rollout.verify import Rule


def request(
    name: str = "r0",
    prompt: Sequence[int] = (0,),
    sampling: SamplingParams | None = None,
    *,
    prompt_id: str | None = None,
    sample_index: int = 0,
    run_seed: int = 0,
) -> RolloutRequest:
    return RolloutRequest(
        id=name,
        group_id=f"group of {name}",
        prompt_id=prompt_id or f"prompt of {name}",
        sample_index=sample_index,
        prompt_ids=tuple(prompt),
        sampling=sampling or SamplingParams(max_new_tokens=8),
        run_seed=run_seed,
    )


def table_engine(
    table: Table,
    vocab_size: int,
    *,
    proposer: Proposer | None = None,
    draft_len: int = 0,
    num_slots: int = 8,
    context_len: int = 64,
    draws_for: Callable[[RolloutRequest], Draws] = seeded_draws,
    decode: Callable[[Sequence[int]], str] | None = None,
    verification: Rule = "block",
    branching: bool = False,
    compile_grammar: CompileGrammar | None = None,
    num_ids: int | None = None,
    policy: TablePolicy | None = None,
    max_cached_tokens: int | None = None,
    max_round_tokens: int = MAX_ROUND_TOKENS,
) -> NativeEngine:
    """An engine over a table, at version 0; `policy` in place of one made from the sizes."""
    policy = policy or TablePolicy(
        table,
        vocab_size=vocab_size,
        context_len=context_len,
        num_slots=num_slots,
        max_cached_tokens=max_cached_tokens,
    )
    engine = NativeEngine(
        policy,
        proposer or NoProposer(),
        FixedDraftLen(draft_len, branching),
        verification=verification,
        draws_for=draws_for,
        decode=decode,
        compile_grammar=compile_grammar,
        num_ids=num_ids,
        max_round_tokens=max_round_tokens,
    )
    engine.load(table, version=0, digest="table")
    return engine


def run(engine: NativeEngine, requests: Sequence[RolloutRequest]) -> dict[str, RolloutSample]:
    """Submits and steps until everything has ended."""
    engine.submit(requests)
    samples: dict[str, RolloutSample] = {}
    for _ in range(10_000):
        samples |= {sample.request.id: sample for sample in engine.step()}
        if not engine.num_unfinished:
            return samples
    raise AssertionError("the engine did not finish")


class ScriptedProposer(NoProposer):
    """Drafts whatever a function of the row and the length says."""

    def __init__(self, draft: Callable[[Row, int], Draft]) -> None:
        self._draft = draft

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        return [self._draft(row, n) if n else Draft() for row, n in zip(rows, max_lens)]


def drawing_proposer(
    kind: str, draft_table: Table, *, stop_after: Callable[[Sequence[int]], bool] | None = None
) -> ScriptedProposer:
    """Draws each token from its own law by the row's draft stream: `dense`, `sparse` (the two most
    probable ids), `point` (the most probable one) or `mixed` by position. `stop_after` sees the
    tokens so far and may end the draft: a stopping time."""

    def draft(row: Row, max_len: int) -> Draft:
        tokens = list(row.token_ids)
        ids: list[int] = []
        laws: list[DraftLaw] = []
        start = len(tokens)
        while len(ids) < max_len and not (stop_after and ids and stop_after(tokens)):
            probs = draft_table(tuple(tokens)).softmax(-1)
            here = ("dense", "sparse", "point")[len(tokens) % 3] if kind == "mixed" else kind
            law: DraftLaw = POINT_MASS
            if here == "point":
                token = int(probs.argmax())
            elif here == "dense":
                token, law = row.draws.draft(probs, start, len(tokens)), DenseLaw(probs)
            else:
                top = probs.topk(2)
                weights = top.values / top.values.sum()
                token = int(top.indices[row.draws.draft(weights, start, len(tokens))])
                law = SparseLaw(top.indices, weights)
            ids.append(token)
            laws.append(law)
            tokens.append(token)
        return Draft(tuple(ids), tuple(laws))

    return ScriptedProposer(draft)


class TableTrees(NoProposer):
    """Branches to the `width` most probable tokens of a table, as a head's top-k does."""

    def __init__(self, draft_table: Table, width: int = 2, max_depth: int = 8) -> None:
        self._table, self._width, self._max_depth = draft_table, width, max_depth

    def propose_trees(
        self, rows: Sequence[Row], max_nodes: Sequence[int], max_depths: Sequence[int]
    ) -> list[Draft]:
        def continuations(tokens: tuple[int, ...]) -> list[tuple[int, float, tuple[int, ...]]]:
            best = most_probable(self._table(tokens).softmax(-1), self._width)
            return [(token, chance, (*tokens, token)) for token, chance in best]

        return [
            grow_tree(
                tuple(row.token_ids),
                continuations,
                max_nodes=nodes,
                max_depth=min(depth, self._max_depth),
            )
            for row, nodes, depth in zip(rows, max_nodes, max_depths)
        ]


# ---- grammars -----------------------------------------------------------------------------

Allowed = Callable[[tuple[int, ...]], Collection[int]]
"""Tokens generated so far -> the ids that may come next: a grammar, for `plain_law` and engines."""


def strict_mask(allowed: Allowed, vocab_size: int, stop_ids: Collection[int] = ()) -> MaskProvider:
    """A provider that fails when asked for a prefix that its own masks do not allow, or past a stop."""

    def mask(generated: Sequence[int]) -> torch.Tensor:
        done = tuple(generated)
        for end, token in enumerate(done):
            assert token in allowed(done[:end]), f"asked for {done}, whose token {end} is forbidden"
            assert token not in stop_ids, f"asked for {done}, past the stop at {end}"
        ids = torch.zeros(vocab_size, dtype=torch.bool)
        ids[list(allowed(done))] = True
        return ids

    return mask


def grammar_named(
    name: str, allowed: Allowed, vocab_size: int, stop_ids: Collection[int] = ()
) -> CompileGrammar:
    """Compiles `Grammar.named(name)` to the strict mask."""
    return named_grammars({name: lambda: strict_mask(allowed, vocab_size, stop_ids)})


# ---- the law of plain sampling, written independently of `rollout.law` ----------------------


def edited_logits(
    logits: Sequence[float],
    prompt: Sequence[int],
    generated: tuple[int, ...],
    sampling: SamplingParams,
    allowed: Allowed | None = None,
) -> list[float]:
    """Grammar, bans, bias and penalties, one token at a time in float64."""
    stops = sampling.stop_token_ids + (() if sampling.ignore_eos else sampling.eos_token_ids)
    edited = []
    for token, value in enumerate(logits):
        early_stop = token in stops and len(generated) < sampling.min_tokens
        completes = (
            phrase[-1] == token and generated[len(generated) - len(phrase) + 1 :] == phrase[:-1]
            for phrase in sampling.bad_words
            if len(generated) >= len(phrase) - 1
        )
        forbidden = allowed is not None and token not in allowed(generated)
        if early_stop or forbidden or any(completes):
            value = -math.inf
        value += dict(sampling.logit_bias).get(token, 0.0)
        if token in prompt or token in generated:
            penalty = sampling.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value -= sampling.frequency_penalty * generated.count(token)
        value -= sampling.presence_penalty * (token in generated)
        edited.append(value)
    return edited


def filtered(edited: Sequence[float], sampling: SamplingParams) -> dict[int, float]:
    """Temperature, top-k, top-p, min-p; the law of tokens without ties at a filter's edge."""
    if sampling.greedy:
        return {edited.index(max(edited)): 1.0}
    weights = [math.exp((value - max(edited)) / sampling.temperature) for value in edited]
    ranked = sorted(range(len(weights)), key=lambda t: -weights[t])[: sampling.top_k or None]
    total = sum(weights[t] for t in ranked)
    mass = 0.0
    kept: list[int] = []
    for token in ranked:
        if sampling.top_p == 1 or mass < sampling.top_p * total or not kept:
            kept.append(token)
            mass += weights[token]
    kept = [t for t in kept if weights[t] >= sampling.min_p * weights[kept[0]] and weights[t] > 0]
    total = sum(weights[t] for t in kept)
    return {t: weights[t] / total for t in kept}


def plain_law(
    table: Table,
    prompt: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
    allowed: Allowed | None = None,
) -> dict[tuple[int, ...], float]:
    """Joint law of plain sampling; `allowed` is the request's grammar."""
    stops = sampling.stop_token_ids + (() if sampling.ignore_eos else sampling.eos_token_ids)
    law: dict[tuple[int, ...], float] = {}

    def extend(done: tuple[int, ...], probability: float) -> None:
        ended = done and done[-1] in stops and len(done) > sampling.min_tokens
        if ended or len(done) == sampling.max_new_tokens:
            law[done] = law.get(done, 0.0) + probability
            return
        logits = table((*prompt, *done))
        assert logits.shape == (vocab_size,)
        edited = edited_logits(logits.tolist(), prompt, done, sampling, allowed)
        for token, prob in filtered(edited, sampling).items():
            extend((*done, token), probability * prob)

    extend((), 1.0)
    return law
