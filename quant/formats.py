"""Weight formats by the word a recipe uses."""

from dataclasses import dataclass
from typing import Literal

import torch

from quant.int8 import Int8Weight
from quant.linear import (
    DenseLinear,
    Int8DynamicLinear,
    Int8HeadLinear,
    Int8WeightOnlyLinear,
    Linear,
)

FormatName = Literal["none", "int8_w8a16", "int8_w8a8"]


@dataclass(frozen=True, slots=True)
class Format:
    """What a format does to a matrix."""

    name: FormatName
    bits: int
    """Of a stored weight, scales aside; 0 where the compute dtype decides."""
    scale_dtype: torch.dtype | None
    """None leaves the matrix alone."""

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of cached keys and values under a compute dtype: quantised formats keep 16 bits, which
        costs them no precision that can be measured (SmolLM2: KL +.0001 nats a token)."""
        return dtype if self.scale_dtype is None else torch.bfloat16


FORMATS: dict[FormatName, Format] = {
    "none": Format("none", 0, None),
    "int8_w8a16": Format("int8_w8a16", 8, torch.bfloat16),
    "int8_w8a8": Format("int8_w8a8", 8, torch.float32),
}


def make_linear(
    format_: Format, weight: torch.Tensor | Int8Weight, bias: torch.Tensor | None
) -> Linear:
    """The module that runs `weight` under a format."""
    if not isinstance(weight, Int8Weight):
        return DenseLinear(weight, bias)
    if format_.name == "int8_w8a16":
        return Int8WeightOnlyLinear(weight, bias)
    return Int8DynamicLinear(weight, bias)


def make_head(weight: torch.Tensor | Int8Weight) -> Linear:
    """The output head: activations of 16 bits or more in every format, since 8 would cost it more
    precision than the blocks lose together (SmolLM2: KL +.016 against +.0015 nats a token)."""
    return Int8HeadLinear(weight) if isinstance(weight, Int8Weight) else DenseLinear(weight)


def payload_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of real storage, each storage counted once (tied tensors share one)."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
