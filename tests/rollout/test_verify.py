"""Acceptance, correction and bonus at one position: enumerated first, then drawn with seeds.

The toy pair of laws has three possible corrections: with only one, noise that is used twice could
not be seen.
"""

from collections.abc import Callable, Sequence

import pytest
import torch

from rollout.conditions import Condition
from rollout.draft import NO_DRAFT, POINT_MASS, DenseLaw, Draft, DraftLaw, SparseLaw, check_draft
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes
from rollout.errors import InvalidDraft, InvalidLogits
from rollout.law import TargetLaws
from rollout.sampling import SamplingParams
from rollout.streams import Draws, SeededDraws
from rollout.table_policy import random_table
from rollout.verdict import Foretold, Verdict
from rollout.verify import verify
from rollout.verify_positions import acceptance, residual
from tests.rollout.engines import ScriptedProposer, drawing_proposer, request, run, table_engine

P = (0.10, 0.40, 0.30, 0.20)
Q = (0.60, 0.25, 0.10, 0.05)
# sum min(P, Q) = .10 + .25 + .10 + .05 = .50; (P - Q)+ / .50 = (0, .3, .4, .3)
NUM_DRAWS = 10_000
TOLERANCE = 0.025
"""Of a frequency in NUM_DRAWS draws; 5 standard deviations at 1/2, false alarm rate 6e-7."""


def row(probs: Sequence[float]) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64)


def laws_of(*positions: Sequence[float]) -> TargetLaws:
    logits = torch.stack([row(p).log() for p in positions])
    return TargetLaws(logits, [Condition(SamplingParams())] * len(positions))


class FixedUniforms(SeededDraws):
    """Every uniform has the same value."""

    def __init__(self, value: float) -> None:
        self._value = value

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        return self._value


class RefusingDraws(SeededDraws):
    """Every coin falls on the wrong side."""

    def coin(self, accept_prob: float, start: int, position: int) -> bool:
        return False


def verify_one(
    p: Sequence[float],
    law: DraftLaw,
    token: int,
    draws: Draws,
    bonus: Sequence[float] | None = None,
) -> Verdict:
    return verify(laws_of(p, bonus or p), 0, Draft((token,), (law,)), draws, start=0)


def first_token(verdict: Verdict, token: int) -> int:
    return token if verdict.accepted_len else verdict.next_token


def emitted_law(
    p: Sequence[float], choose: Callable[[Draws], tuple[int, DraftLaw]]
) -> tuple[list[float], float]:
    """(law of the first emitted token, acceptance rate), enumerated."""

    def run_once(draws: EnumeratedDraws) -> tuple[int, bool]:
        token, law = choose(draws)
        verdict = verify_one(p, law, token, draws)
        return first_token(verdict, token), verdict.accepted_len == 1

    outcomes = enumerate_outcomes(run_once)
    tokens = [sum(outcomes.get((t, a), 0.0) for a in (True, False)) for t in range(len(p))]
    return tokens, sum(prob for (_, accepted), prob in outcomes.items() if accepted)


def drawn_from_q(draws: Draws) -> tuple[int, DraftLaw]:
    return draws.draft(row(Q), 0, 0), DenseLaw(row(Q))


def frequencies(make_draws: Callable[[int], Draws]) -> tuple[list[float], float]:
    """(frequencies of the first emitted token, acceptance rate) over seeded draws of the toy."""
    laws, q = laws_of(P, P), DenseLaw(row(Q))
    counts, num_accepted = [0] * 4, 0
    for seed in range(NUM_DRAWS):
        draws = make_draws(seed)
        token = draws.draft(q.probs, 0, 0)
        verdict = verify(laws, 0, Draft((token,), (q,)), draws, start=0)
        counts[first_token(verdict, token)] += 1
        num_accepted += verdict.accepted_len
    return [count / NUM_DRAWS for count in counts], num_accepted / NUM_DRAWS


# ---- worked examples ----------------------------------------------------------------------


def test_worked_example_accepts_the_overlap_and_corrects_to_the_only_token_short_of_p() -> None:
    p, q = (0.40, 0.30, 0.15, 0.10, 0.05), (0.25, 0.35, 0.20, 0.10, 0.10)
    assert acceptance(laws_of(p), 0, DenseLaw(row(q)), 0) == pytest.approx(0.85, abs=1e-12)
    left = residual(laws_of(p).probs(0), DenseLaw(row(q)))
    assert (left / left.sum()).tolist() == pytest.approx([1, 0, 0, 0, 0], abs=1e-12)


def test_overlap_and_residual_add_up_to_the_target() -> None:
    """min(p, q) + (1 - alpha) r = p."""
    left = residual(row(P), DenseLaw(row(Q)))
    assert (left / left.sum()).tolist() == pytest.approx([0, 0.3, 0.4, 0.3], abs=1e-12)
    assert (torch.minimum(row(P), row(Q)) + left).tolist() == pytest.approx(P, abs=1e-12)


def test_the_toy_emits_the_target_and_accepts_half() -> None:
    # cases 1, 7
    tokens, accepted = emitted_law(P, drawn_from_q)
    assert tokens == pytest.approx(P, abs=1e-12)
    assert accepted == pytest.approx(0.5, abs=1e-12)


def test_seeded_draws_of_the_toy_have_the_target_frequencies() -> None:
    # cases 1, 7, on the streams that rows use
    tokens, accepted = frequencies(lambda seed: SeededDraws(seed, "toy", 0))
    assert tokens == pytest.approx(P, abs=TOLERANCE)
    assert accepted == pytest.approx(0.5, abs=TOLERANCE)


class SharedNoise(SeededDraws):
    """Fault: the draft pick, the coin and the correction read one uniform."""

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        return super().uniform(b"shared", start, position)


class ConstantCoin(SeededDraws):
    """Fault: the coin is a constant 0 instead of a uniform."""

    def coin(self, accept_prob: float, start: int, position: int) -> bool:
        return accept_prob > 0


def test_noise_used_twice_is_seen_by_the_toy() -> None:
    """Negative control of case 1: token 0 keeps Q's cell up to u = 1/6, its ratio."""
    tokens, _ = frequencies(lambda seed: SharedNoise(seed, "toy", 0))
    assert max(abs(got - want) for got, want in zip(tokens, P)) > 3 * TOLERANCE


def test_a_constant_coin_is_seen_by_the_toy() -> None:
    """Negative control of case 7: everything accepted, so the output is Q."""
    tokens, accepted = frequencies(lambda seed: ConstantCoin(seed, "toy", 0))
    assert tokens == pytest.approx(Q, abs=TOLERANCE)
    assert accepted == 1.0


def test_corrections_never_leave_the_support_of_the_target() -> None:
    # case 3: every draft is refused
    q = row((0, 0, 0.5, 0.5))
    tokens, accepted = emitted_law(
        (0.5, 0.5, 0, 0), lambda draws: (draws.draft(q, 0, 0), DenseLaw(q))
    )
    assert tokens == pytest.approx([0.5, 0.5, 0, 0], abs=1e-12)
    assert (tokens[2], tokens[3], accepted) == (0, 0, 0)


def test_a_greedy_draft_is_a_point_mass() -> None:
    # case 4
    tokens, accepted = emitted_law((0.5, 0.5), lambda _: (0, POINT_MASS))
    assert tokens == pytest.approx([0.5, 0.5], abs=1e-12)
    assert accepted == pytest.approx(0.5, abs=1e-12)


def test_a_greedy_draft_reported_as_sampled_is_biased() -> None:
    """Negative control of case 4: .5/.6 of token 0 is kept, the rest corrected to token 1."""
    tokens, _ = emitted_law((0.5, 0.5), lambda _: (0, DenseLaw(row((0.6, 0.4)))))
    assert tokens[0] == pytest.approx(0.8333, abs=1e-4)


def test_one_deterministic_candidate_leaves_the_target_alone() -> None:
    # case 16
    tokens, _ = emitted_law((0.55, 0.45), lambda _: (0, POINT_MASS))
    assert tokens == pytest.approx([0.55, 0.45], abs=1e-12)


def test_withholding_the_draft_law_is_exact_and_accepts_less() -> None:
    # case 14: sum p q = .06 + .10 + .03 + .01 = .20
    tokens, accepted = emitted_law(P, lambda draws: (draws.draft(row(Q), 0, 0), POINT_MASS))
    assert tokens == pytest.approx(P, abs=1e-12)
    assert accepted == pytest.approx(0.20, abs=1e-12)


@pytest.mark.parametrize("token", range(4))
@pytest.mark.parametrize("seed", range(20))
def test_a_sparse_law_is_verified_like_the_dense_one_it_abbreviates(seed: int, token: int) -> None:
    sparse = SparseLaw(torch.tensor([3, 0]), row((0.25, 0.75)))
    dense = DenseLaw(row((0.75, 0, 0, 0.25)))
    draws = SeededDraws(seed, "sparse", token)
    one, other = (verify_one(P, law, token, draws) for law in (sparse, dense))
    assert (one.accepted_len, one.next_token) == (other.accepted_len, other.next_token)
    assert one.foretold and other.foretold
    assert one.foretold.mean == pytest.approx(other.foretold.mean)


# ---- edges --------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [DenseLaw(row((0.5, 0.5, 0))), POINT_MASS])
def test_a_token_without_target_mass_is_refused_when_the_uniform_is_zero(law: DraftLaw) -> None:
    # case 8
    verdict = verify_one((0, 0.5, 0.5), law, 0, FixedUniforms(0.0))
    assert (verdict.accepted_len, verdict.next_token) == (0, 1 if law is POINT_MASS else 2)


def test_a_token_of_tiny_target_mass_may_be_accepted_at_zero() -> None:
    # case 8
    p = (1e-30, 0.5, 0.5)
    assert verify_one(p, DenseLaw(row((0.5, 0.5, 0))), 0, FixedUniforms(0.0)).accepted_len == 1


def test_the_coin_is_strict() -> None:
    draws = FixedUniforms(0.25)
    assert not draws.coin(0.25, 0, 0)
    assert draws.coin(0.25 + 1e-12, 0, 0)


@pytest.mark.parametrize(
    "law", [DenseLaw(row((0, 1, 0, 0))), SparseLaw(torch.tensor([1]), row([1]))]
)
def test_a_token_its_law_could_not_draw_is_refused(law: DraftLaw) -> None:
    verdict = verify_one(P, law, 0, FixedUniforms(0.0))
    assert (verdict.accepted_len, verdict.origin) == (0, "correction")


@pytest.mark.parametrize("token", range(4))
def test_a_draft_law_equal_to_the_target_is_never_refused(token: int) -> None:
    # case 12: the largest uniform there is
    laws = laws_of(P, P)
    draft = Draft((token,), (DenseLaw(laws.probs(0)),))
    verdict = verify(laws, 0, draft, FixedUniforms(1 - 2.0**-53), start=0)
    assert (verdict.accepted_len, verdict.origin, verdict.zero_residual) == (1, "bonus", False)


def test_a_cold_peak_is_accepted_without_touching_the_residual() -> None:
    # case 11
    logits = torch.full((2, 100), -15.0)
    logits[:, 7] = 37.0
    laws = TargetLaws(logits, [Condition(SamplingParams(temperature=0.002))] * 2)
    draft = Draft((7,), (DenseLaw(laws.probs(0)),))
    verdict = verify(laws, 0, draft, FixedUniforms(1 - 2.0**-53), start=0)
    assert (verdict.accepted_len, verdict.zero_residual) == (1, False)
    assert verdict.foretold == Foretold(1.0, 0.0)


def test_a_residual_without_mass_draws_from_the_target_and_says_so() -> None:
    # case 12: u in cells (.1, .5, .8, 1) of P; a uniform law would give .2 to 0 and .79 to 3
    q = DenseLaw(laws_of(P).probs(0))
    for uniform, token in ((0.05, 0), (0.2, 1), (0.79, 2), (0.9, 3)):

        class Draws(FixedUniforms, RefusingDraws):
            pass

        verdict = verify_one(P, q, 1, Draws(uniform))
        assert (verdict.next_token, verdict.origin, verdict.zero_residual) == (
            token, "correction", True,
        )  # fmt: skip


def test_zero_residual_draws_are_counted() -> None:
    # case 12
    table = random_table(4, depth=1, seed=3)
    proposer = drawing_proposer("dense", table)
    engine = table_engine(
        table, 4, proposer=proposer, draft_len=1, draws_for=lambda _: RefusingDraws(0, "p", 0)
    )
    counters = run(engine, [request(sampling=SamplingParams(max_new_tokens=5))])["r0"].counters
    # rounds that emit 4 corrections, then the last token without room for a draft
    assert (counters.zero_residual_draws, counters.corrections, counters.plain) == (4, 4, 1)


def test_a_residual_of_tiny_mass_keeps_its_law() -> None:
    q = row((0.5, 0.3, 0.2))
    left = residual(q + row((-1e-14, 6e-15, 4e-15)), DenseLaw(q))
    assert (left / left.sum()).tolist() == pytest.approx([0, 0.6, 0.4], abs=0.02)


@pytest.mark.parametrize("seed", range(50))
def test_a_refused_point_mass_is_not_emitted_in_its_place(seed: int) -> None:
    verdict = verify_one((0.25, 0.25, 0.25, 0.25), POINT_MASS, 2, SeededDraws(seed, "p", 0))
    assert (verdict.next_token == 2) <= (verdict.accepted_len == 1)


def test_a_refusal_drops_the_rest_and_the_bonus_follows_full_acceptance() -> None:
    one, two = (0.0, 1.0), (1.0, 0.0)
    laws, draws = laws_of(one, one, two), FixedUniforms(0.5)
    cases = {
        (0, 1): Verdict((), 1, "correction", Foretold(0.0, 0.0), num_reached=1),
        (1, 0): Verdict((0,), 1, "correction", Foretold(1.0, 0.0), num_reached=2),
        (1, 1): Verdict((0, 1), 0, "bonus", Foretold(2.0, 0.0), num_reached=2),
    }
    for tokens, verdict in cases.items():
        assert verify(laws, 0, Draft.of_points(tokens), draws, 5) == verdict
    assert verify(laws, 2, NO_DRAFT, draws, 5) == Verdict((), 0, "plain", Foretold(0.0, 0.0))


def test_position_wise_the_expected_length_is_the_acceptance_of_reached_positions() -> None:
    draft = Draft((1, 0), (DenseLaw(row(Q)), POINT_MASS))
    verdict = verify(laws_of(P, P, P), 0, draft, FixedUniforms(0.4), 0, rule="position")
    assert verdict.accepted == (0,)  # .4 < .40/.25; then u = .4 draws token 1, not 0
    # .5 + .1; .5 * .5 + .1 * .9
    assert verdict.foretold and verdict.foretold.mean == pytest.approx(0.6)
    assert verdict.foretold.variance == pytest.approx(0.34)


def test_a_position_without_a_law_matters_only_when_it_is_reached() -> None:
    logits = torch.tensor([[0.0, -torch.inf], [torch.nan, 0.0]])
    laws = TargetLaws(logits, [Condition(SamplingParams())] * 2)
    assert verify(laws, 0, Draft.of_points((1,)), FixedUniforms(0.5), 0).next_token == 0
    with pytest.raises(InvalidLogits):
        verify(laws, 0, Draft.of_points((0,)), FixedUniforms(0.5), 0)


def test_verification_does_not_write_to_the_draft_law() -> None:
    # case 18
    q = row(Q)
    for seed in range(20):
        verify_one(P, DenseLaw(q), 0, SeededDraws(seed, "p", 0))
    assert torch.equal(q, row(Q))


# ---- drafts that cannot be used -----------------------------------------------------------

ROW = torch.tensor
BAD_DRAFTS = {
    "id below the vocabulary": Draft.of_points((-1,)),
    "id above the vocabulary": Draft.of_points((4,)),
    "NaN law": Draft((0,), (DenseLaw(torch.full((4,), torch.nan)),)),
    "law of mass 2": Draft((0,), (DenseLaw(row((1, 1, 0, 0))),)),
    "negative law": Draft((0,), (DenseLaw(row((1.5, -0.5, 0, 0))),)),
    "weights of another total": Draft((0,), (DenseLaw(row((2, 1, 1, 0)), 3.0),)),
    "weights of no total": Draft((0,), (DenseLaw(row((2, 1, 1, 0)), 0.0),)),
    "weights of infinite total": Draft((0,), (DenseLaw(row((2, 1, 1, 0)), torch.inf),)),
    "law of another vocabulary": Draft((0,), (DenseLaw(row((0.5, 0.5))),)),
    "sparse id above the vocabulary": Draft((0,), (SparseLaw(ROW([0, 4]), row((0.5, 0.5))),)),
    "sparse id below the vocabulary": Draft((0,), (SparseLaw(ROW([0, -1]), row((0.5, 0.5))),)),
    "sparse id twice": Draft((0,), (SparseLaw(ROW([0, 0]), row((0.5, 0.5))),)),
}


@pytest.mark.parametrize("name", BAD_DRAFTS)
def test_a_draft_that_no_verification_can_use_is_refused(name: str) -> None:
    with pytest.raises(InvalidDraft):
        check_draft(BAD_DRAFTS[name], vocab_size=4)


@pytest.mark.parametrize("name", BAD_DRAFTS)
def test_a_bad_draft_ends_its_own_row_only(name: str) -> None:
    # cases 10, 15
    table = random_table(4, depth=1, seed=3)
    good = drawing_proposer("dense", table)
    proposer = ScriptedProposer(
        lambda row, n: BAD_DRAFTS[name] if row.request.id == "b" else good._draft(row, n)
    )
    requests = [request(n) for n in "abc"]
    samples = run(table_engine(table, 4, proposer=proposer, draft_len=2), requests)
    alone = run(table_engine(table, 4, proposer=good, draft_len=2), [requests[0], requests[2]])
    assert samples["b"].finish_reason == "error" and samples["b"].finish_detail
    assert [samples[n].token_ids for n in "ac"] == [alone[n].token_ids for n in "ac"]


def test_tokens_and_laws_of_a_draft_come_in_pairs() -> None:
    with pytest.raises(InvalidDraft, match="2 tokens with 1 laws"):
        Draft((0, 1), (POINT_MASS,))


# ---- the coupled form ---------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("draft_len", [1, 3, 8])
def test_point_mass_drafts_emit_what_plain_decoding_emits_token_for_token(
    temperature: float, draft_len: int
) -> None:
    table = random_table(3, depth=3, seed=4)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=40)
    requests = [request(f"r{i}", sampling=sampling) for i in range(12)]
    generator = torch.Generator().manual_seed(draft_len)
    proposer = ScriptedProposer(
        lambda _, n: Draft.of_points(torch.randint(3, (n,), generator=generator).tolist())
    )
    plain = run(table_engine(table, 3), requests)
    drafted = run(table_engine(table, 3, proposer=proposer, draft_len=draft_len), requests)
    assert sum(sample.counters.accepted for sample in drafted.values()) > 0
    assert {n: s.token_ids for n, s in drafted.items()} == {
        n: s.token_ids for n, s in plain.items()
    }


def test_a_law_whose_float32_sum_is_off_by_rounding_is_normalised() -> None:
    # draws are in proportion to the law: 1.00002 x q accepts as q does
    q = torch.tensor(Q)
    (law,) = check_draft(Draft((0,), (DenseLaw(q * 1.00002),)), vocab_size=4).laws
    assert isinstance(law, DenseLaw) and torch.allclose(law.probs, q, rtol=1e-6)
    (law,) = check_draft(Draft((0,), (DenseLaw(q * 5.0001, 5.0),)), vocab_size=4).laws
    assert isinstance(law, DenseLaw) and torch.allclose(law.probs, q, rtol=1e-6)
    with pytest.raises(InvalidDraft, match="sums to"):
        check_draft(Draft((0,), (DenseLaw(q * 1.001),)), vocab_size=4)
