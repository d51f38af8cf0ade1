"""Linear maps over plain and quantised weights, each saying which kernel runs it.

Kernels are chosen by what the machine has, not by trial, so a run is repeatable:

- W8A8 on a CPU with AVX-512 VNNI: `torch._int_mm`, integer products and sums. On other CPUs torch runs
  a reference loop for it (5 to 20 times slower than a float GEMM). On a GPU with INT8 tensor cores it
  refuses 16 tokens and fewer, which are padded, and matrices whose sizes are no multiples of 8. Where
  it is not taken the same whole numbers go through a float32 GEMM. Products are exact; a sum is exact
  up to 2^24 and rounded beyond, 2 * 10^-7 relative.
- W8A16 with few tokens on a CPU: `torch._weight_int8pack_mm`, which streams the INT8 bytes. With
  many tokens it falls off (it has no blocking), so the values are widened and a GEMM runs; INT8 and
  bf16 represent the whole numbers exactly, scales go on the output. A GPU always widens,
  which writes the wide values before it reads them: it saves memory there, not time.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from quant.int8 import Int8Weight, quantise_tokens

PACKED_MAX_TOKENS = 48 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 16
"""Up to here the packed W8A16 kernel beats widening (measured on SmolLM2's matrices): with AVX-512 it
falls off a cliff before 32 tokens, with AVX2, whose GEMM is slower, the lines cross at about 50."""

CHUNK = 2048
"""Rows of a head widened at a time: what was just written is still in the cache."""


INT8_TENSOR_CORES = (7, 5)
"""Compute capability of the first GPUs that have them."""


def has_vnni() -> bool:
    """The CPU multiplies INT8 in hardware."""
    return bool(torch.cpu._is_vnni_supported())


def int_mm_min_tokens(device: torch.device, shape: tuple[int, int]) -> int | None:
    """The fewest tokens `torch._int_mm` takes for a matrix [out, in]; None where it is not run."""
    if device.type == "cpu":
        return 1 if has_vnni() else None
    fits = all(size % 8 == 0 for size in shape)
    return 17 if fits and torch.cuda.get_device_capability(device) >= INT8_TENSOR_CORES else None


def has_bf16_gemm(device: str = "cpu") -> bool:
    """bf16 products run in hardware; elsewhere torch converts and float32 is faster."""
    return device != "cpu" or bool(torch.cpu._is_avx512_bf16_supported())


class Linear(Protocol):
    """y = x W^T + b for x [N, in]."""

    kernel: str
    """What runs, for passports and tables."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def tensors(self) -> list[torch.Tensor]:
        """Everything stored for it."""
        ...


class DenseLinear:
    """Unquantised weights in the compute dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.kernel = f"F.linear {str(weight.dtype).removeprefix('torch.')}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self._weight, self._bias) if t is not None]


class Int8WeightOnlyLinear:
    """W8A16."""

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None = None) -> None:
        assert weight.scales.dtype == torch.bfloat16, "W8A16 scales are bf16 by format"
        self._weight, self._bias = weight, bias
        on_bf16 = has_bf16_gemm(weight.values.device.type)
        self._wide_dtype = torch.bfloat16 if on_bf16 else torch.float32
        wide = str(self._wide_dtype).removeprefix("torch.")
        self._packed = weight.values.device.type == "cpu"
        self.kernel = f"widened int8 -> {wide} GEMM"
        if self._packed:
            self.kernel = (
                f"torch._weight_int8pack_mm up to {PACKED_MAX_TOKENS} tokens, else {self.kernel}"
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = self._weight.values, self._weight.scales
        if self._packed and x.shape[0] <= PACKED_MAX_TOKENS:
            y = torch._weight_int8pack_mm(x.bfloat16(), values, scales).to(x.dtype)
        else:
            wide = x.bfloat16().to(self._wide_dtype)
            y = F.linear(wide, values.to(self._wide_dtype)) * scales.to(wide.dtype)
            y = y.bfloat16().to(x.dtype)  # as the packed kernel returns it, whatever the width
        return y if self._bias is None else y + self._bias

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self._weight.values, self._weight.scales, self._bias) if t is not None]


class Int8DynamicLinear:
    """W8A8 with per-token activation scales."""

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None = None) -> None:
        assert weight.scales.dtype == torch.float32, "W8A8 scales are float32 by format"
        self._weight, self._bias = weight, bias
        out, width = weight.values.shape
        self._min_tokens = int_mm_min_tokens(weight.values.device, (out, width))
        self.kernel = "torch._int_mm"
        if self._min_tokens is None:
            self.kernel = "float32 GEMM over int8 values (no integer product here)"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tokens, token_scales = quantise_tokens(x.float())  # [N, in], [N]
        values, num = self._weight.values, len(tokens)
        if self._min_tokens is None:
            sums = F.linear(tokens, values.float())  # [N, out]
        else:
            whole = tokens.to(torch.int8)
            if num < self._min_tokens:
                whole = F.pad(whole, (0, 0, 0, self._min_tokens - num))
            sums = torch._int_mm(whole, values.t())[:num].float()
        y = (sums * token_scales[:, None] * self._weight.scales).to(x.dtype)
        return y if self._bias is None else y + self._bias

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self._weight.values, self._weight.scales, self._bias) if t is not None]


class Int8HeadLinear:
    """INT8 weights under float32 activations and sums: logits are not rounded."""

    def __init__(self, weight: Int8Weight) -> None:
        self._weight = weight
        self.kernel = "widened int8 -> float32 GEMM"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        chunks = zip(self._weight.values.split(CHUNK), self._weight.scales.split(CHUNK))
        return torch.cat([F.linear(x, v.float()) * s for v, s in chunks], dim=-1)

    def tensors(self) -> list[torch.Tensor]:
        return [self._weight.values, self._weight.scales]
