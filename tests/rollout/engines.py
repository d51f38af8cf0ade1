"""Small engines and scripted proposers that the tests of this folder share."""

from collections.abc import Callable, Mapping, Sequence

import torch

from proposers.none import NoProposer
from rollout.draft import DenseLaw, Draft, PointMass, SparseLaw
from rollout.draft_len import FixedDraftLen
from rollout.native_engine import NativeEngine, seeded_draws
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import Draws
from rollout.table_policy import Table, TablePolicy


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
) -> NativeEngine:
    """An engine over a table, at version 0."""
    policy = TablePolicy(table, vocab_size=vocab_size, context_len=context_len, num_slots=num_slots)
    engine = NativeEngine(
        policy,
        proposer or NoProposer(),
        FixedDraftLen(draft_len),
        draws_for=draws_for,
        decode=decode,
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
        tokens, ids, laws = list(row.token_ids), [], []
        start = len(tokens)
        while len(ids) < max_len and not (stop_after and ids and stop_after(tokens)):
            probs = draft_table(tuple(tokens)).softmax(-1)
            here = ("dense", "sparse", "point")[len(tokens) % 3] if kind == "mixed" else kind
            if here == "point":
                token, law = int(probs.argmax()), PointMass()
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


def plain_law(
    table: Table, prompt: Sequence[int], sampling: SamplingParams, vocab_size: int
) -> dict[tuple[int, ...], float]:
    """Joint law of plain sampling, written independently of `rollout.law` (at most 20 lines)."""

    def next_law(tokens: tuple[int, ...], generated: int) -> Mapping[int, float]:
        logits = table(tokens).clone()
        if generated < sampling.min_tokens:
            logits[list(sampling.stop_token_ids)] = -torch.inf
        if sampling.greedy:
            return {int(logits.argmax()): 1.0}
        probs = (logits / sampling.temperature).softmax(-1)
        ranked = sorted(range(vocab_size), key=lambda t: -float(probs[t]))
        ranked = ranked[: sampling.top_k or vocab_size]
        total = sum(float(probs[t]) for t in ranked)
        mass, kept = 0.0, []
        for token in ranked:
            if mass < sampling.top_p * total or not kept:
                kept.append(token)
                mass += float(probs[token])
        kept = [t for t in kept if float(probs[t]) >= sampling.min_p * float(probs[kept[0]])]
        total = sum(float(probs[t]) for t in kept)
        return {t: float(probs[t]) / total for t in kept}

    law: dict[tuple[int, ...], float] = {}

    def extend(done: tuple[int, ...], probability: float) -> None:
        ended = done and done[-1] in sampling.stop_token_ids and len(done) > sampling.min_tokens
        if ended or len(done) == sampling.max_new_tokens:
            law[done] = law.get(done, 0.0) + probability
            return
        for token, prob in next_law((*prompt, *done), len(done)).items():
            extend((*done, token), probability * prob)

    extend((), 1.0)
    return law
