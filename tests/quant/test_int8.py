"""The INT8 grid: scale, rounding, edges."""

import pytest
import torch

from quant.int8 import LIMIT, dequantise_weight, quantise_tokens, quantise_weight

DTYPES = [torch.float32, torch.bfloat16]


def random_weight(rows: int = 64, width: int = 96, seed: int = 0) -> torch.Tensor:
    """Channels of very different size, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (4 * torch.rand(rows, 1, generator=generator) - 3)
    return sizes * torch.randn(rows, width, generator=generator)


@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_values_equal_a_reference_written_one_number_at_a_time(scale_dtype: torch.dtype) -> None:
    weight = random_weight(8, 40)
    got = quantise_weight(weight, scale_dtype)
    for channel, values, scale in zip(weight, got.values, got.scales):
        want_scale = (max(abs(channel)) / 127).to(scale_dtype)
        assert scale == want_scale
        for number, value in zip(channel, values):
            # Python rounds ties to even, on the same float32 quotient.
            quotient = float(number / want_scale.float())
            assert int(value) == max(-127, min(127, round(quotient)))


def test_a_round_trip_is_off_by_at_most_half_a_step() -> None:
    weight = random_weight()
    got = quantise_weight(weight, torch.float32)
    error = (dequantise_weight(got) - weight).abs() / got.scales[:, None]
    assert error.max() <= 0.5 + 1e-4  # of a step; the quotient itself is rounded at 127 * 2^-24


@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_quantising_a_quantised_weight_changes_nothing(scale_dtype: torch.dtype) -> None:
    once = quantise_weight(random_weight(), scale_dtype)
    again = quantise_weight(dequantise_weight(once), scale_dtype)
    assert torch.equal(again.values, once.values)
    assert torch.equal(again.scales, once.scales)


def test_ties_go_to_the_even_neighbour() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])  # scale 1
    assert quantise_weight(weight, torch.float32).values.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


def test_the_grid_is_symmetric_and_never_uses_minus_128() -> None:
    weight = random_weight()
    there, back = (quantise_weight(w, torch.bfloat16).values for w in (weight, -weight))
    assert torch.equal(there, -back)
    assert int(there.min()) >= -LIMIT


@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_a_channel_of_zeros_comes_back_as_exact_zeros_with_scale_one(
    scale_dtype: torch.dtype,
) -> None:
    weight = random_weight()
    weight[3] = 0.0
    got = quantise_weight(weight, scale_dtype)
    assert got.scales[3] == 1
    assert torch.equal(dequantise_weight(got)[3], torch.zeros(96))


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 3e38])
def test_scales_are_finite_and_positive_at_the_ends_of_float32(
    size: float, scale_dtype: torch.dtype
) -> None:
    got = quantise_weight(torch.tensor([[size, -size, 0.0]]), scale_dtype)
    assert bool(got.scales.isfinite().all() and (got.scales > 0).all())
    assert got.values[0, 2] == 0 and got.values[0, 0] == -got.values[0, 1]


def test_an_outlier_costs_its_own_channel_only() -> None:
    weight = torch.ones(2, 4)
    weight[0, 0] = 1e5  # a step of 787: the ones beside it vanish, those of channel 1 do not
    back = dequantise_weight(quantise_weight(weight, torch.float32))
    assert back[0].tolist() == pytest.approx([1e5, 0, 0, 0])
    assert back[1].tolist() == pytest.approx([1, 1, 1, 1])


def test_w8a16_values_are_rounded_against_the_bf16_scale() -> None:
    """scale = 1.003 / 127 = .0078976, in bf16 .0078735; 0.5 is 63.31 of the one and 63.50 (a little
    more) of the other; 1.003 is 127.39 of the rounded step and is clipped."""
    weight = torch.tensor([[1.003, 0.5]])
    assert quantise_weight(weight, torch.float32).values.tolist() == [[127, 63]]
    assert quantise_weight(weight, torch.bfloat16).values.tolist() == [[127, 64]]


def test_a_master_finer_than_bf16_is_quantised_as_it_is() -> None:
    """Quantising bf16(w) instead of w would give the whole channel the value of 1.0."""
    weight = torch.tensor([[1.001, 1.0, 0.5]])
    assert quantise_weight(weight, torch.float32).scales[0] == torch.tensor(1.001) / 127
    assert quantise_weight(weight.bfloat16(), torch.float32).scales[0] == torch.tensor(1.0) / 127


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    weight = random_weight()
    weight[5, 7] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantise_weight(weight, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_have_a_scale_a_token_and_whole_values_in_range(dtype: torch.dtype) -> None:
    tokens = random_weight(seed=1).to(dtype)
    values, scales = quantise_tokens(tokens)
    assert scales.shape == (64,) and scales.dtype == torch.float32
    assert torch.equal(values, values.round()) and int(values.abs().max()) == LIMIT
    assert ((values * scales[:, None] - tokens.float()).abs() <= 0.5001 * scales[:, None]).all()


def test_a_token_of_zeros_stays_zero_and_does_not_disturb_its_neighbours() -> None:
    tokens = random_weight(seed=2)
    alone, _ = quantise_tokens(tokens[1:])
    tokens[0] = 0.0
    values, scales = quantise_tokens(tokens)
    assert scales[0] == 1 and not values[0].any()
    assert torch.equal(values[1:], alone)
