"""INT8 weights, symmetric per output channel, and INT8 activations, symmetric per token.

w ~ scale * q with q = round(w / scale) in [-127, 127] (ties to even, as torch rounds; -128 is never
used) and scale = absmax / 127 of the channel. An all-zero channel has scale 1 and exact zeros back.
This is the grid of `compressed-tensors` "int-quantized", strategies channel and token.

Two uses of the same weights:
- W8A16: activations stay in bf16; scales are rounded to bf16 *before* the weights are, since the
  packed kernel multiplies by bf16 scales. Format, not accident: the pair (q, scale) is the weight.
- W8A8: activations are quantised per token at run time; scales are float32.
"""

from dataclasses import dataclass

import torch

LIMIT = 127


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """One quantised matrix."""

    values: torch.Tensor  # [out, in] int8
    scales: torch.Tensor  # [out] float32, or bf16 for W8A16


def quantise_weight(weight: torch.Tensor, scale_dtype: torch.dtype) -> Int8Weight:
    """Quantises [out, in] per output channel. Raises ValueError when a weight is not finite."""
    weight = weight.float()
    absmax = weight.abs().amax(-1)  # [out]
    if not bool(absmax.isfinite().all()):
        raise ValueError("weight holds NaN or infinity")
    scales = torch.where(absmax > 0, absmax / LIMIT, 1.0).to(scale_dtype)
    values = (weight / scales.float()[:, None]).round().clamp(-LIMIT, LIMIT).to(torch.int8)
    return Int8Weight(values, scales)


def dequantise_weight(weight: Int8Weight) -> torch.Tensor:
    """[out, in] float32."""
    return weight.values.float() * weight.scales.float()[:, None]


def quantise_tokens(activations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, in] -> values [N, in] (whole numbers in the input's dtype) and float32 scales [N]."""
    absmax = activations.abs().amax(-1).float()  # [N]
    scales = torch.where(absmax > 0, absmax / LIMIT, 1.0)
    return (activations / scales[:, None].to(activations.dtype)).round(), scales
