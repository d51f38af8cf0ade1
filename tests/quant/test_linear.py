"""Fast kernels against products of the dequantised weights."""

import pytest
import torch

import quant.linear
from quant.int8 import Int8Weight, dequantise_weight, quantise_tokens, quantise_weight
from quant.linear import (
    PACKED_MAX_TOKENS,
    DenseLinear,
    Int8DynamicLinear,
    Int8WeightOnlyLinear,
)

SIZES = [1, 2, 8, 16, 17, 64]  # both sides of where the packed kernel hands over
WIDTH, OUT = 96, 80


def inputs(num: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(num)).to(dtype)


def int8_weight(scale_dtype: torch.dtype) -> Int8Weight:
    weight = torch.randn(OUT, WIDTH, generator=torch.Generator().manual_seed(99))
    weight[0] = 0.0
    return quantise_weight(weight, scale_dtype)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", SIZES)
def test_w8a16_multiplies_bf16_activations_by_the_dequantised_weight(
    num: int, dtype: torch.dtype
) -> None:
    weight, x = int8_weight(torch.bfloat16), inputs(num, dtype)
    want = x.bfloat16().double() @ dequantise_weight(weight).double().T
    got = Int8WeightOnlyLinear(weight)(x)
    assert got.dtype == dtype and got.shape == (num, OUT)
    assert relative_error(got, want) < 2**-7  # results are rounded to bf16, at most twice


@pytest.mark.parametrize("num", SIZES)
def test_w8a8_multiplies_quantised_tokens_by_the_dequantised_weight(num: int) -> None:
    weight, x = int8_weight(torch.float32), inputs(num)
    tokens, scales = quantise_tokens(x)
    want = (tokens.double() * scales[:, None]) @ dequantise_weight(weight).double().T
    assert relative_error(Int8DynamicLinear(weight)(x), want) < 1e-6


@pytest.mark.parametrize("num", SIZES)
def test_w8a8_integer_and_float_kernels_give_the_same_sums(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = int8_weight(torch.float32), inputs(num)
    results = []
    for vnni in (True, False):
        monkeypatch.setattr(quant.linear, "has_vnni", lambda vnni=vnni: vnni)
        linear = Int8DynamicLinear(weight)
        assert linear.kernel.startswith("torch._int_mm") == vnni
        results.append(linear(x))
    assert torch.equal(*results)  # 96 * 127^2 < 2^24: the float sums are exact


@pytest.mark.parametrize("num", [1, PACKED_MAX_TOKENS, PACKED_MAX_TOKENS + 1])
def test_w8a16_packed_and_widened_kernels_agree_within_bf16(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, x = Int8WeightOnlyLinear(int8_weight(torch.bfloat16)), inputs(num)
    results = []
    for limit in (0, 64):
        monkeypatch.setattr(quant.linear, "PACKED_MAX_TOKENS", limit)
        results.append(linear(x).double())
    assert relative_error(*results) < 2**-7


@pytest.mark.parametrize("num", [2, 17])
def test_a_bias_is_added_once_by_every_kernel(num: int) -> None:
    bias, x = torch.arange(OUT).float(), inputs(num)
    wide, narrow = int8_weight(torch.float32), int8_weight(torch.bfloat16)
    for make, weight in (
        (DenseLinear, dequantise_weight(wide)),
        (Int8DynamicLinear, wide),
        (Int8WeightOnlyLinear, narrow),
    ):
        with_bias, without = make(weight, bias)(x), make(weight)(x)
        assert torch.allclose(with_bias, without + bias, atol=1e-4)


@pytest.mark.parametrize("make", [Int8DynamicLinear, Int8WeightOnlyLinear])
def test_a_channel_of_zeros_gives_exact_zeros(make: type) -> None:
    scale_dtype = torch.float32 if make is Int8DynamicLinear else torch.bfloat16
    assert not make(int8_weight(scale_dtype))(inputs(17))[:, 0].any()


def test_rows_of_a_w8a8_product_do_not_depend_on_their_neighbours() -> None:
    linear, x = Int8DynamicLinear(int8_weight(torch.float32)), inputs(64)
    loud = torch.cat([x[:8], 1000 * x[8:]])
    assert torch.equal(linear(x)[:8], linear(loud)[:8])


@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_shows_in_its_own_w8a8_row_only(
    bad: float, vnni: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quant.linear, "has_vnni", lambda: vnni)
    x = inputs(4)
    x[1, 5] = bad
    finite = Int8DynamicLinear(int8_weight(torch.float32))(x).isfinite()
    assert not finite[1].any() and finite[[0, 2, 3]].all()


def test_scales_of_the_other_format_are_refused() -> None:
    with pytest.raises(AssertionError, match="bf16 by format"):
        Int8WeightOnlyLinear(int8_weight(torch.float32))
    with pytest.raises(AssertionError, match="float32 by format"):
        Int8DynamicLinear(int8_weight(torch.bfloat16))


# ---- as on a GPU ----------------------------------------------------------------------------


def cuda_int_mm(tokens: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`torch._int_mm` with what its CUDA version refuses."""
    assert tokens.dtype == matrix.dtype == torch.int8
    assert tokens.shape[0] > 16, "self.size(0) needs to be greater than 16"
    assert tokens.shape[1] % 8 == matrix.shape[1] % 8 == 0, "a multiple of 8"
    return tokens.int() @ matrix.int()


def like_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Kernels are chosen as for a GPU of this compute capability and run on the CPU."""
    choose = quant.linear.int_mm_min_tokens
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        quant.linear, "int_mm_min_tokens", lambda device, shape: choose(torch.device("cuda"), shape)
    )
    monkeypatch.setattr(torch, "_int_mm", cuda_int_mm)


@pytest.mark.parametrize("num", SIZES)
def test_w8a8_pads_few_tokens_where_int_mm_refuses_them(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quant.linear, "has_vnni", lambda: False)
    weight, x = int8_weight(torch.float32), inputs(num)
    want = Int8DynamicLinear(weight)(x)
    like_a_gpu(monkeypatch, (8, 0))
    linear = Int8DynamicLinear(weight)
    assert linear.kernel == "torch._int_mm"
    assert torch.equal(linear(x), want)  # 96 * 127^2 < 2^24: the float sums are exact


def test_the_stand_in_refuses_what_would_not_be_padded() -> None:
    """Negative control."""
    weight = int8_weight(torch.float32).values.t()
    with pytest.raises(AssertionError, match="greater than 16"):
        cuda_int_mm(torch.ones(16, WIDTH, dtype=torch.int8), weight)


@pytest.mark.parametrize(
    ("capability", "out", "width"), [((7, 0), 80, 96), ((9, 0), 84, 96), ((9, 0), 80, 100)]
)
def test_w8a8_takes_a_float_gemm_where_a_gpu_has_no_int_mm_for_it(
    capability: tuple[int, int], out: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    like_a_gpu(monkeypatch, capability)
    weight = quantise_weight(torch.randn(out, width), torch.float32)
    linear = Int8DynamicLinear(weight)
    assert linear.kernel.startswith("float32 GEMM")
    assert linear(torch.randn(3, width)).shape == (3, out)
