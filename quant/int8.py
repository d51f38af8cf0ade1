"""INT8 weights, symmetric per output channel, and INT8 activations, symmetric per token.

w ~ scale * q with q = round(w / scale) in [-127, 127] (ties to even, as torch rounds; -128 is never
used) and scale = absmax / 127 of the channel. An all-zero channel has scale 1 and exact zeros back;
so has one so small that its scale would be 0 in float32.
Stored and rounded as `compressed-tensors` "int-quantized" does, strategies channel and token: given
the scales, the values are the same bit for bit. The scale rule is `torchao`'s reduced symmetric
range; `compressed-tensors` itself would take absmax / 127.5 and use -128.

Two uses of the same weights:
- W8A16: activations keep 16 bits: torch's kernel rounds them to bf16, the compiled kernels
  (rollout/csrc) to whole numbers as W8A8 does, of 16 bits or as many as leave a sum within 32 (15.8 for
  576 inputs, 12 for 8,192). Scales are rounded to bf16 *before* the weights are, since torch's packed
  kernel multiplies by bf16 scales. Format, not accident: the pair (q, scale) is the weight.
- W8A8: activations are quantised per token at run time; scales are float32. The format is chaotic: an
  activation on the edge of two steps falls to either side by a rounding, and the step is magnified from
  layer to layer (SmolLM2: a change of 1e-6 moves logits by .5). Two forwards that are not equal bit for
  bit are two laws, so plain decoding and verification agree only on kernels whose results do not depend
  on the batch, as the compiled ones.

In both the output head is INT8 weights under activations that torch does not round and the compiled
kernels round as those of W8A16.
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
    scales = _scales(absmax).to(scale_dtype)
    values = (weight / scales.float()[:, None]).round().clamp(-LIMIT, LIMIT).to(torch.int8)
    return Int8Weight(values, scales)


def dequantise_weight(weight: Int8Weight) -> torch.Tensor:
    """[out, in] float32."""
    return weight.values.float() * weight.scales.float()[:, None]


def quantise_tokens(activations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, in] -> values [N, in], whole numbers in float32, and float32 scales [N]."""
    activations = activations.float()
    scales = _scales(activations.abs().amax(-1))  # [N]
    return (activations / scales[:, None]).round().clamp(-LIMIT, LIMIT), scales


def _scales(absmax: torch.Tensor) -> torch.Tensor:
    """Steps for float32 maxima: never 0; NaN stays NaN, so that it shows in every product."""
    steps = absmax / LIMIT
    return torch.where(steps == 0, 1.0, steps)
