"""The unnormalised weights of laws from logits: the pass over the vocabulary that every round makes.

On a CPU it is compiled (csrc/law.h): maximum, exponentials and block sums of a position while its
logits are in the cache, where torch takes four passes. A forward reads all weights of the model, and
behind it no library is left in the caches: an operation of torch takes ten times as long there as in
a loop, so one call for several is worth more than its arithmetic.

Torch is the reference, and runs on other devices, for float64 (enumeration), and where the kernels
cannot be built.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from rollout.errors import KernelsUnavailable
from rollout.kernels import Laws, find_kernels

BLOCK = 256
"""Tokens a block sum covers; about the square root of common vocabulary sizes."""
FEW_POSITIONS = 4
"""Up to so many are worked out by one thread: waking another takes as long."""

Weights = tuple[torch.Tensor, torch.Tensor, np.ndarray]
"""Weights [N, V], largest 1; maxima [N] of the logits, NaN where a position holds NaN or +inf; sums of
the weights up to the end of each block [N, ceil(V / BLOCK)] float64."""


def law_weights(logits: torch.Tensor, temperatures: Sequence[float]) -> Weights:
    """exp((logit - maximum) / temperature) of logits [N, V], and their sums. What a position without a
    finite maximum gets is of no meaning."""
    if logits.dtype == torch.float32 and logits.device.type == "cpu" and _library() is not None:
        return compiled_weights(logits, temperatures)
    return torch_weights(logits, temperatures)


def torch_weights(logits: torch.Tensor, temperatures: Sequence[float]) -> Weights:
    maxima = logits.amax(-1)  # NaN if any logit of the row is
    maxima = torch.where(maxima == torch.inf, torch.nan, maxima)
    weights = logits - maxima[:, None]
    if any(temperature != 1 for temperature in temperatures):
        weights /= weights.new_tensor(temperatures)[:, None]
    weights.exp_()
    return weights, maxima, block_sums(weights).cumsum(-1).cpu().numpy()


def compiled_weights(logits: torch.Tensor, temperatures: Sequence[float]) -> Weights:
    """Float32 logits on a CPU."""
    library = _library()
    assert library is not None, "asked before"
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    num, vocab_size = logits.shape
    scales = np.asarray(temperatures, dtype=np.float32)
    weights, maxima = torch.empty(num, vocab_size), torch.empty(num)
    cumulative = np.empty((num, -(-vocab_size // BLOCK)))
    library.er_laws(
        Laws(
            logits.data_ptr(), scales.ctypes.data, weights.data_ptr(), maxima.data_ptr(),
            cumulative.ctypes.data, num, vocab_size, logits.stride(0),
            1 if num <= FEW_POSITIONS else torch.get_num_threads(),
        )
    )  # fmt: skip
    bad = np.isnan(cumulative[:, -1])
    if bad.any():
        highest = maxima.numpy()
        highest[bad & (highest != -np.inf)] = np.nan
    return weights, maxima, cumulative


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums over blocks of the vocabulary, [N, V] -> [N, ceil(V / BLOCK)] float64."""
    num, vocab_size = weights.shape
    whole = vocab_size // BLOCK * BLOCK
    sums = weights[:, :whole].reshape(num, -1, BLOCK).sum(-1).double()
    if whole == vocab_size:
        return sums
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True).double()], dim=-1)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """None where it cannot be built, which is asked once."""
    try:
        return find_kernels().library
    except KernelsUnavailable:
        return None
