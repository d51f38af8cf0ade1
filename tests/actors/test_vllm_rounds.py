"""The joint law of whole generations through `Rounds`, enumerated, under a scheduler as vLLM's is: it
cuts drafts, drops them, pads requests and puts strangers beside them. No vLLM."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.vllm.rounds import Parts, Rounds
from actors.vllm.scheduled import Scheduled
from proposers.none import NoProposer
from rollout.draft import Draft
from rollout.draft_len import FixedDraftLen
from rollout.engine import EngineLimits
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes, total_variation
from rollout.proposer import Proposer
from rollout.round_cost import RoundCost
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.table_policy import random_table
from tests.rollout.engines import ScriptedProposer, drawing_proposer, plain_law, request

V, TICKET = 3, 7
TARGET = random_table(V, depth=2, seed=1)
DRAFT = random_table(V, depth=1, seed=2)
LAWS = {
    "plain": SamplingParams(max_new_tokens=3),
    "filtered": SamplingParams(max_new_tokens=4, temperature=0.8, top_k=2, top_p=0.9),
    "edited": SamplingParams(
        max_new_tokens=3, frequency_penalty=0.9, logit_bias=((0, 1.5),), min_p=0.1
    ),
    "stops": SamplingParams(max_new_tokens=3, stop_token_ids=(2,), min_tokens=2),
}
Cut = Callable[[int, tuple[int, ...]], int]
"""Round and draft ids -> tokens that are scheduled of it."""


def in_turn(round_: int, ids: tuple[int, ...]) -> int:
    """All, none, one, whatever they are."""
    return (len(ids), 0, 1)[round_ % 3]


def by_token(round_: int, ids: tuple[int, ...]) -> int:
    """A fault: what is scheduled depends on what was drawn."""
    return 0 if ids[:1] == (0,) else len(ids)


def rounds_of(draws: EnumeratedDraws, proposer: Proposer, draft_len: int) -> Rounds:
    limits = EngineLimits(V, 32, can_decode=False)
    parts = Parts(
        proposer, FixedDraftLen(draft_len), "block", "full", limits, V, 2, None, None,
        draws_for=lambda _: draws,
    )  # fmt: skip
    rounds = Rounds(parts)
    rounds.publish(0, "")
    return rounds


def logits_of(tokens: Sequence[int], draft: Sequence[int]) -> list[torch.Tensor]:
    return [TARGET((*tokens, *draft[:depth])) for depth in range(len(draft) + 1)]


def generate(
    draws: EnumeratedDraws, sampling: SamplingParams, kind: str, cut: Cut
) -> tuple[int, ...]:
    """One row from its prompt to its end."""
    rounds = rounds_of(draws, drawing_proposer(kind, DRAFT), 2)
    rounds.add(TICKET, request(sampling=sampling))
    draft: tuple[int, ...] = ()
    for round_ in range(10):
        tokens, padded = rounds.token_ids(TICKET), round_ % 2
        garbage = [torch.full((V,), torch.nan, dtype=torch.float64)] * 2
        rows = [*logits_of(tokens, draft), *garbage[:padded], *garbage]
        ours = Scheduled(TICKET, 1 + len(draft), len(tokens), draft, num_padded=padded)
        strangers = [Scheduled(None, 3, 3), Scheduled(8, 5, 9, partial=True)]
        rounds.begin(draining=False)
        emitted = rounds.verify([ours, *strangers], torch.stack(rows))[0]
        assert rounds.token_ids(TICKET) == [*tokens, *emitted]
        drafted = dict(rounds.draft()).get(TICKET, ())
        if ended := rounds.take_ended():
            ((ticket, sample),) = ended
            assert ticket == TICKET and sample.counters.emitted == len(sample.token_ids)
            return sample.token_ids
        draft = drafted[: cut(round_, drafted)]
    raise AssertionError("it did not end")


@pytest.mark.parametrize("kind", ["point", "sparse", "dense", "mixed"])
@pytest.mark.parametrize("law", LAWS)
def test_the_joint_law_is_that_of_plain_sampling(law: str, kind: str) -> None:
    got = enumerate_outcomes(lambda draws: generate(draws, LAWS[law], kind, in_turn))
    assert total_variation(got, plain_law(TARGET, (0,), LAWS[law], V)) < 1e-12


def test_a_scheduler_that_looks_at_tokens_is_seen() -> None:
    """Negative control."""
    got = enumerate_outcomes(lambda draws: generate(draws, LAWS["plain"], "dense", by_token))
    assert total_variation(got, plain_law(TARGET, (0,), LAWS["plain"], V)) > 1e-3


def of_vllm(draws: EnumeratedDraws, honest: bool) -> tuple[int, ...]:
    """Two drafts of vLLM's own, drawn from a law that comes with them, or from another."""
    rounds = rounds_of(draws, NoProposer(), 0)
    rounds.add(TICKET, request(sampling=LAWS["plain"]))
    while True:
        tokens = rounds.token_ids(TICKET)
        law = DRAFT(tuple(tokens)).softmax(-1)
        drawn_from = law if honest else law.flip(0)
        draft = (draws.draft(drawn_from, 0, 0),) if len(tokens) < 4 else ()
        probs = law[None] if draft else None
        rounds.begin(draining=False)
        scored = Scheduled(TICKET, 1 + len(draft), len(tokens), draft, probs)
        rounds.verify([scored], torch.stack(logits_of(tokens, draft)))
        if ended := rounds.take_ended():
            return ended[0][1].token_ids


def test_drafts_of_vllms_own_are_verified_under_the_laws_that_come_with_them() -> None:
    expected = plain_law(TARGET, (0,), LAWS["plain"], V)
    assert total_variation(enumerate_outcomes(lambda d: of_vllm(d, True)), expected) < 1e-12
    assert total_variation(enumerate_outcomes(lambda d: of_vllm(d, False)), expected) > 1e-3


def test_a_row_that_vllm_holds_otherwise_is_noticed() -> None:
    rounds = rounds_of(EnumeratedDraws(), NoProposer(), 0)
    rounds.add(TICKET, request())
    with pytest.raises(AssertionError, match="vLLM holds 5 tokens of a row of 1"):
        rounds.verify([Scheduled(TICKET, 1, 5)], torch.zeros(1, V))


def test_what_drafts_take_is_choosing_proposing_and_learning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, seen = [0.0], list[RoundCost]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def propose(row: Row, n: int) -> Draft:
        now[0] += 10
        return Draft.of_points([0])

    class Slow(FixedDraftLen):
        def choose(self, rows: Sequence[Row], **kwargs: Any) -> list[int]:
            now[0] += 1
            return super().choose(rows, **kwargs)

        def observe(self, round_: RoundCost) -> None:
            seen.append(round_)
            now[0] += 100

    rounds = rounds_of(EnumeratedDraws(), ScriptedProposer(propose), 1)
    rounds.parts = replace(rounds.parts, draft_len=Slow(1))
    rounds.add(TICKET, request(sampling=SamplingParams(max_new_tokens=9)))
    draft: tuple[int, ...] = ()
    for _ in range(3):
        tokens = rounds.token_ids(TICKET)
        rounds.begin(draining=False)
        now[0] += 1000
        scored = Scheduled(TICKET, 1 + len(draft), len(tokens), draft)
        rounds.verify([scored], torch.stack(logits_of(tokens, draft)))
        draft = dict(rounds.draft())[TICKET]
    assert [(round_.seconds, round_.propose_seconds) for round_ in seen] == [
        (1000.0, 0.0),
        (1000.0, 111.0),
        (1000.0, 111.0),
    ]


def test_a_row_whose_draft_is_broken_ends_and_its_neighbour_is_drafted_for() -> None:
    proposer = ScriptedProposer(
        lambda row, n: Draft.of_points([0, V if row.request.id == "bad" else 1])
    )
    rounds = rounds_of(EnumeratedDraws(), proposer, 2)
    for ticket, name in enumerate(("bad", "good")):
        rounds.add(ticket, request(name, sampling=LAWS["filtered"]))
    rounds.begin(draining=False)
    prompts = [Scheduled(ticket, 1, len(rounds.token_ids(ticket))) for ticket in (0, 1)]
    rounds.verify(prompts, torch.stack([TARGET((0,))] * 2))
    assert rounds.draft() == [(1, (0, 1))]
    ((ticket, sample),) = rounds.take_ended()
    assert (ticket, sample.finish_reason) == (0, "error")
    assert f"draft token {V}" in sample.finish_detail
