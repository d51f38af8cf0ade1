"""The target law: order and edges of the transformations, exact cells, recorded log-probabilities."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import rollout.law
from rollout.conditions import Condition, Conditions
from rollout.errors import InvalidLogits
from rollout.law import BLOCK, FEW, TargetLaws, pick_from
from rollout.sampling import SamplingParams
from tests.rollout.engines import edited_logits, filtered

P = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
LARGEST_UNIFORM = 1 - 2.0**-53


def law(
    logits: torch.Tensor, sampling: SamplingParams | None = None, banned: tuple[int, ...] = ()
) -> TargetLaws:
    """One position."""
    return TargetLaws(logits[None], [Condition(sampling or SamplingParams(), banned)])


def law_after(
    logits: torch.Tensor, sampling: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> TargetLaws:
    """One position behind a prompt and some output."""
    conditions = Conditions(sampling, prompt)
    for token in generated:
        conditions.push(token)
    return TargetLaws(logits[None], conditions.along(()))


def random_logits(size: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype)


def assert_law(laws: TargetLaws, expected: list[float], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        laws.probs(0).double(),
        torch.tensor(expected, dtype=torch.float64),
        atol=tolerance,
        rtol=0,
    )


def test_temperature_comes_before_top_p() -> None:
    # case 19: p^2 = (.25, .09, .0225, .0025)/.365, cumulative .685 .932: top-p .9 keeps two.
    # The other order would keep three (.5 + .3 < .9).
    assert_law(law(P, SamplingParams(temperature=0.5, top_p=0.9)), [25 / 34, 9 / 34, 0, 0])


def test_top_p_acts_on_the_law_that_top_k_left() -> None:
    # top-k 2 leaves (.625, .375); .625 reaches top-p .6 alone. On the full law .5 would not.
    assert_law(law(P, SamplingParams(top_k=2, top_p=0.6)), [1, 0, 0, 0])


def test_min_p_removes_what_is_small_beside_the_largest() -> None:
    # case 22: .2 * .6 = .12 keeps .6 and .3
    p = torch.tensor([0.6, 0.3, 0.06, 0.04]).log()
    assert_law(law(p, SamplingParams(min_p=0.2)), [2 / 3, 1 / 3, 0, 0])


@pytest.mark.parametrize(
    "sampling", [SamplingParams(top_k=1), SamplingParams(top_p=0.3), SamplingParams(min_p=1.0)]
)
def test_tokens_tied_with_the_last_kept_one_are_kept(sampling: SamplingParams) -> None:
    assert_law(law(torch.tensor([1.0, 1.0, 0.0]), sampling), [0.5, 0.5, 0])


@pytest.mark.parametrize("top_k", [0, 4, 5, 1000])
def test_top_k_of_nothing_or_of_everything_removes_nothing(top_k: int) -> None:
    # case 106
    assert_law(law(P, SamplingParams(top_k=top_k)), [0.5, 0.3, 0.15, 0.05])


def test_the_smallest_top_p_keeps_the_most_probable_token() -> None:
    # case 106: top_p=0 is refused, 1e-9 is the most probable token
    assert_law(law(P, SamplingParams(top_p=1e-9)), [1, 0, 0, 0])


def test_a_nucleus_wider_than_the_guess_is_found() -> None:
    # 4000 equal tokens: ties keep them all; a slope makes the nucleus half the mass
    logits = torch.linspace(0, 1e-3, 4000, dtype=torch.float64)
    kept = law(logits, SamplingParams(top_p=0.5)).probs(0) > 0
    assert 1990 < int(kept.sum()) < 2001 and bool(kept[-1990:].all())


def test_greedy_takes_the_first_of_tied_maxima() -> None:
    # case 108
    assert_law(law(torch.tensor([1.0, 1.0, 0.0]), SamplingParams(temperature=0)), [1, 0, 0], 0)


@pytest.mark.parametrize(
    ("dtype", "larger"), [(torch.float32, 1e-9), (torch.float64, 1e-17), (torch.float32, 1e-40)]
)
@pytest.mark.parametrize("sampling", [{}, {"bad_words": ((2,),)}, {"logit_bias": ((2, -1.0),)}])
def test_greedy_compares_logits_and_not_what_exp_rounds_them_to(
    dtype: torch.dtype, larger: float, sampling: dict[str, tuple]
) -> None:
    # exp(-1e-9) is 1 in float32, and the first of tied weights would be token 0
    greedy = SamplingParams(temperature=0, **sampling)  # type: ignore[arg-type]
    assert_law(
        law_after(torch.tensor([0.0, larger, -1.0], dtype=dtype), greedy, (), ()), [0, 1, 0], 0
    )


def full_sort(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Tokens [V] of the nucleus by sorting everything: all down to the one that completes top_p."""
    ranked = weights.sort(descending=True).values.double()
    complete = ranked.cumsum(-1) >= top_p * weights.sum(dtype=torch.float64)
    last = int(complete.nonzero()[0]) if complete.any() else len(ranked) - 1
    return weights >= ranked[last]


@pytest.mark.parametrize("top_p", [1e-300, 1e-9, 0.01, 0.25, 0.5, 0.9, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("size", [1, 7, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_nucleus_is_that_of_a_full_sort(top_p: float, size: int, dtype: torch.dtype) -> None:
    """Flat, peaked, with ties everywhere and all tied; the nucleus is never empty."""
    rough = random_logits(size, seed=size, dtype=dtype)
    rows = (rough, 5 * rough, 0.01 * rough, rough.round(), torch.zeros(size, dtype=dtype))
    for logits in rows:
        kept = law(logits, SamplingParams(top_p=top_p)).probs(0) > 0
        weights = (logits - logits.max()).exp()
        assert torch.equal(kept, full_sort(weights, top_p) & (weights > 0)) and kept.any()


@pytest.mark.parametrize("seed", range(5))
def test_a_nucleus_that_stops_one_token_early_is_seen(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: strictly more than the threshold is kept."""
    really = rollout.law._nucleus_threshold
    monkeypatch.setattr(
        rollout.law, "_nucleus_threshold", lambda w, p: math.nextafter(really(w, p), 2.0)
    )
    logits = random_logits(300, seed)
    kept = law(logits, SamplingParams(top_p=0.9)).probs(0) > 0
    assert not torch.equal(kept, full_sort((logits - logits.max()).exp(), 0.9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-30, 1e-8, 1e-6, 1e-5, 1e-3])
def test_every_tiny_temperature_is_the_argmax_without_inf_or_nan(
    temperature: float, dtype: torch.dtype
) -> None:
    # case 37
    laws = law(torch.tensor([10.0, 9.0], dtype=dtype), SamplingParams(temperature=temperature))
    assert laws.probs(0).tolist() == [1.0, 0.0]
    assert laws.pick(0, LARGEST_UNIFORM) == 0
    assert laws.logprobs([0], [0]) == ([0.0], [0.0], [1.0])


def test_a_tiny_temperature_shares_the_mass_of_tied_maxima() -> None:
    assert_law(
        law(torch.tensor([9.0, 10.0, 10.0]), SamplingParams(temperature=1e-30)), [0, 0.5, 0.5]
    )


def test_a_cold_peak_has_probability_one_exactly() -> None:
    # case 11
    logits = torch.full((1000,), -15.0)
    logits[123] = 37.0
    assert law(logits, SamplingParams(temperature=0.002)).prob(0, 123) == 1.0


def test_banned_ids_leave_the_law_and_the_rest_is_renormalised() -> None:
    assert_law(law(P, banned=(0, 3)), [0, 2 / 3, 1 / 3, 0])


def test_bans_come_before_greedy_and_before_the_filters() -> None:
    assert_law(law(P, SamplingParams(temperature=0), banned=(0,)), [0, 1, 0, 0], 0)
    assert_law(law(P, SamplingParams(top_k=1), banned=(0,)), [0, 1, 0, 0], 0)


def test_a_banned_giant_does_not_leave_the_rest_to_underflow() -> None:
    logits = torch.tensor([1000.0, 0.0, math.log(3.0)])
    assert_law(law(logits, banned=(0,)), [0, 0.25, 0.75], 1e-4)


INVALID = {
    "nan": [0.0, float("nan"), 1.0],
    "plus infinity": [0.0, float("inf"), 1.0],
    "nothing left": [float("-inf")] * 3,
}


@pytest.mark.parametrize("name", INVALID)
def test_a_position_without_a_law_raises_and_its_neighbours_do_not(name: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], INVALID[name], [0.0, 1.0, 2.0]])
    laws = TargetLaws(logits, [Condition(SamplingParams(top_k=2))] * 3)
    with pytest.raises(InvalidLogits):
        laws.check(1)
    for index in (0, 2):
        laws.check(index)
        assert torch.equal(laws.probs(index), law(logits[index], SamplingParams(top_k=2)).probs(0))


def test_banning_every_token_with_mass_raises() -> None:
    laws = law(torch.tensor([0.0, 1.0, float("-inf")]), banned=(0, 1))
    with pytest.raises(InvalidLogits, match="banned"):
        laws.check(0)


def test_single_minus_infinities_are_tokens_without_mass() -> None:
    assert_law(law(torch.tensor([0.0, float("-inf"), 0.0])), [0.5, 0, 0.5])


SIZES = [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 17]


@pytest.mark.parametrize("size", SIZES)
def test_pick_returns_the_cell_of_the_plain_cumulative_sum(size: int) -> None:
    laws = law(random_logits(size, seed=size))
    edges = np.concatenate([[0.0], laws.probs(0).numpy().cumsum()])
    middles = (edges[:-1] + edges[1:]) / 2
    assert [laws.pick(0, u) for u in middles] == list(range(size))
    for u in np.random.default_rng(size).random(300):
        assert laws.pick(0, u) == np.searchsorted(edges[1:], u, side="right")


@pytest.mark.parametrize("size", SIZES)
def test_float32_cells_end_where_their_probabilities_say(size: int) -> None:
    # float32 block sums are off by a few 1e-7; a cell is probed 2e-6 inside its edges
    laws = law(random_logits(size, seed=size, dtype=torch.float32))
    edges = np.concatenate([[0.0], laws.probs(0).double().numpy().cumsum()])
    for token in np.flatnonzero(np.diff(edges) > 5e-6):
        assert laws.pick(0, edges[token] + 2e-6) == token
        assert laws.pick(0, min(edges[token + 1] - 2e-6, LARGEST_UNIFORM)) == token


@pytest.mark.parametrize("size", [4, 2 * BLOCK + 4, 3 * BLOCK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extreme_uniforms_never_pick_a_token_without_mass(
    size: int, dtype: torch.dtype
) -> None:
    logits = torch.full((size,), float("-inf"), dtype=dtype)
    logits[size // 2], logits[size // 2 + 1] = 0.3, 0.1
    laws = law(logits)
    assert laws.pick(0, 0.0) == size // 2
    assert laws.pick(0, LARGEST_UNIFORM) == size // 2 + 1
    assert pick_from(laws.probs(0), 0.0) == size // 2
    assert pick_from(laws.probs(0), 1.0) == size // 2 + 1  # u * total rounded up to the total


def test_filters_remove_tokens_from_the_blocks_they_are_in() -> None:
    logits = random_logits(2 * BLOCK + 9, seed=5)
    laws = law(logits, SamplingParams(top_k=3))
    top = set(logits.topk(3).indices.tolist())
    assert {laws.pick(0, u) for u in np.linspace(0, LARGEST_UNIFORM, 400)} == top


def test_the_behaviour_logprob_is_that_of_the_scaled_logits() -> None:
    # case 101: softmax(4, 2, 0)[0] = 1/(1 + e^-2 + e^-4), ln = -.143; unscaled it is -.408
    (sampled,), (full,), (kept,) = law(
        torch.tensor([2.0, 1.0, 0.0]), SamplingParams(temperature=0.5)
    ).logprobs([0], [0])
    assert sampled == pytest.approx(-0.1429, abs=1e-4)
    assert (full, kept) == (pytest.approx(sampled, abs=1e-12), pytest.approx(1.0))


def test_both_logprobs_of_a_filtered_law_are_recorded() -> None:
    # case 103: ln(.5/.95) = -.642, ln .5 = -.693
    (sampled,), (full,), (kept,) = law(P, SamplingParams(top_p=0.9)).logprobs([0], [0])
    assert sampled == pytest.approx(-0.6419, abs=1e-4)
    assert full == pytest.approx(-0.6931, abs=1e-4)
    assert kept == pytest.approx(0.95, abs=1e-6)


def test_a_greedy_token_has_logprob_zero_in_both() -> None:
    assert law(P, SamplingParams(temperature=0)).logprobs([0], [0]) == ([0.0], [0.0], [1.0])


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.3, top_k=7),
    SamplingParams(temperature=1.7, top_p=0.7),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01),
]


@pytest.mark.parametrize("num_banned", [0, 1, 5])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sampled_logprob_is_the_full_one_less_the_log_of_the_kept_mass(
    sampling: SamplingParams, num_banned: int
) -> None:
    logits = random_logits(2 * BLOCK + 9, seed=11)
    laws = law(logits, sampling, tuple(logits.topk(num_banned).indices.tolist()))
    tokens = [laws.pick(0, u) for u in np.linspace(0, LARGEST_UNIFORM, 50)]
    sampled, full, kept = laws.logprobs([0] * 50, tokens)
    reference = (logits / sampling.temperature).log_softmax(-1)[tokens]
    assert full == pytest.approx(reference.tolist(), abs=1e-9)
    assert sampled == pytest.approx([f - math.log(k) for f, k in zip(full, kept)], abs=1e-9)
    assert sampled == pytest.approx([math.log(laws.prob(0, t)) for t in tokens], abs=1e-9)


EDITS = {
    "ban": {"bad_words": ((7,), (40, 9))},
    "ban of the largest by bias": {"logit_bias": ((123, -math.inf),)},
    "bias": {"logit_bias": ((3, 2.0), (123, -4.0))},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "rewards": {"repetition_penalty": 0.7, "frequency_penalty": -0.4, "presence_penalty": -0.2},
    "all": {"bad_words": ((7,),), "logit_bias": ((3, 2.0),), "presence_penalty": 1.5},
}
FILTERS: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.6},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_records_of_an_edited_law_are_those_of_the_reference(
    edit: str, filters: dict[str, float], dtype: torch.dtype, tolerance: float
) -> None:
    """Against float64 arithmetic of one token at a time, over three blocks and a bit."""
    sampling = SamplingParams(**EDITS[edit], **filters)  # type: ignore[arg-type]
    logits, prompt, generated = random_logits(3 * BLOCK + 5, 17, dtype), (3, 50, 123), (8, 40, 8)
    logits[123] = 12.0
    expected = filtered(edited_logits(logits.tolist(), prompt, generated, sampling), sampling)
    laws = law_after(logits, sampling, prompt, generated)
    ids = list(expected)
    full = (logits.double() / sampling.temperature).log_softmax(-1)[ids]
    got_sampled, got_full, got_kept = laws.logprobs([0] * len(ids), ids)
    assert set(laws.probs(0).nonzero()[:, 0].tolist()) == set(ids)
    assert got_sampled == pytest.approx([math.log(p) for p in expected.values()], abs=tolerance)
    assert got_full == pytest.approx(full.tolist(), abs=tolerance)
    assert got_kept == pytest.approx([float(full.exp().sum())] * len(ids), abs=tolerance)


def test_a_bias_changes_the_odds_and_not_the_kept_mass() -> None:
    # (.5, .3, .15, .05) with 1 doubled: (.5, .6, .15, .05)/1.3; nothing is left out
    laws = law(P.double(), SamplingParams(logit_bias=((1, math.log(2)),)))
    (sampled,), (full,), (kept,) = laws.logprobs([0], [1])
    assert (math.exp(sampled), math.exp(full)) == (pytest.approx(6 / 13), pytest.approx(0.3))
    assert kept == pytest.approx(1.0)


def test_positions_of_one_call_keep_their_own_sampling_and_bans() -> None:
    samplings, banned = SAMPLINGS * 2, [()] * len(SAMPLINGS) + [(1, 2)] * len(SAMPLINGS)
    logits = torch.stack([random_logits(300, seed) for seed in range(len(samplings))])
    laws = TargetLaws(logits, list(map(Condition, samplings, banned)))
    for index, (sampling, bans) in enumerate(zip(samplings, banned)):
        assert torch.equal(laws.probs(index), law(logits[index], sampling, bans).probs(0))


def test_logprobs_of_no_tokens_are_empty_lists() -> None:
    assert law(P).logprobs([], []) == ([], [], [])


def test_logits_are_not_written_to() -> None:
    logits = P.clone()
    law(logits, SamplingParams(temperature=0.5, top_k=1), banned=(0,))
    assert torch.equal(logits, P)


def test_bfloat16_logits_make_a_float32_law() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.bfloat16)
    assert torch.equal(law(logits).probs(0), law(logits.float()).probs(0))


@pytest.mark.parametrize("size", [1, 2, 31, FEW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_weights_are_drawn_from_as_many_are(size: int, dtype: torch.dtype) -> None:
    """Weights of 0 behind them change nothing but the code that adds them up."""
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(size, generator=generator, dtype=dtype) * (torch.arange(size) % 3 < 2)
    padded = torch.cat([weights, weights.new_zeros(FEW + 1)])
    for uniform in [0.0, 1.0, *torch.rand(200, generator=generator).tolist()]:
        assert pick_from(weights, uniform) == pick_from(padded, uniform)
