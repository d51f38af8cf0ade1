"""Weights as they travel: packed once by the publisher, checked by every receiver.

A packed update is a flat mapping of tensors. A matrix that the format quantises becomes
`NAME.weight` (int8) and `NAME.weight_scale`; everything else is cast to the compute dtype. The output
head is quantised with the blocks, and the embedding that is tied to it; its scales are float32. Packing
starts from the learner's own precision, never from an earlier quantisation. A tensor that needs no
cast shares the learner's memory: put or copy it before the next optimiser step.
"""

import hashlib
from collections.abc import Iterable, Mapping

import torch

from quant.formats import Format
from quant.int8 import Int8Weight, quantise_weight
from rollout.decoder import DecoderConfig
from rollout.errors import InvalidWeights

SCALE = "_scale"


def pack(
    named: Iterable[tuple[str, torch.Tensor]],
    config: DecoderConfig,
    format_: Format,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Packs a full set of named weights. Raises InvalidWeights for missing, unknown, misshapen or
    non-finite tensors; a tied head that is sent as well counts as the embedding's alias."""
    packed: dict[str, torch.Tensor] = {}
    quantised = quantised_matrices(config, format_)
    for name, tensor in complete(named, config).items():
        if name not in quantised:
            packed[name] = tensor.to(dtype).contiguous()
            if not bool(packed[name].isfinite().all()):
                raise InvalidWeights(f"{name}: holds NaN or infinity")
            continue
        try:
            weight = quantise_weight(tensor, quantised[name])
        except ValueError as error:
            raise InvalidWeights(f"{name}: {error}") from error
        packed[name], packed[name + SCALE] = weight.values, weight.scales
    return packed


def complete(
    named: Iterable[tuple[str, torch.Tensor]], config: DecoderConfig
) -> dict[str, torch.Tensor]:
    """Named weights in the model's order, aliases left out. Raises InvalidWeights for missing, unknown
    and misshapen ones."""
    tensors = {name: t.detach() for name, t in named if name not in config.aliases()}
    shapes = config.matrix_shapes() | config.other_shapes()
    _check_same_names(set(tensors), set(shapes))
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            got = tuple(tensors[name].shape)
            raise InvalidWeights(f"{name}: got shape {got}, expected {shape}")
    return {name: tensors[name] for name in shapes}


def unpack(
    packed: Mapping[str, torch.Tensor],
    config: DecoderConfig,
    format_: Format,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor | Int8Weight]:
    """Checks a packed update against the model and format and returns its tensors by name."""
    shapes = config.matrix_shapes() | config.other_shapes()
    quantised = quantised_matrices(config, format_)
    expected = set(shapes) | {name + SCALE for name in quantised}
    _check_same_names(set(packed), expected)
    tensors: dict[str, torch.Tensor | Int8Weight] = {}
    for name, shape in shapes.items():
        tensor = packed[name]
        want = torch.int8 if name in quantised else dtype
        if tuple(tensor.shape) != shape or tensor.dtype != want:
            raise InvalidWeights(
                f"{name}: got {tensor.dtype} {tuple(tensor.shape)}, expected {want} {shape}"
            )
        scales = packed[name + SCALE] if name in quantised else None
        if scales is not None and (
            scales.dtype != quantised[name]
            or tuple(scales.shape) != shape[:1]
            or not bool((scales.isfinite() & (scales > 0)).all())
        ):
            raise InvalidWeights(
                f"{name + SCALE}: expected {shape[0]} finite {quantised[name]} above 0"
            )
        if scales is None and not bool(tensor.isfinite().all()):
            raise InvalidWeights(f"{name}: holds NaN or infinity")
        tensors[name] = tensor if scales is None else Int8Weight(tensor, scales)
    return tensors


def digest(packed: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in order of name; first 16 hex digits."""
    sha = hashlib.sha256()
    for name in sorted(packed):
        tensor = packed[name].contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]


def quantised_matrices(config: DecoderConfig, format_: Format) -> dict[str, torch.dtype]:
    """The matrices that a format quantises and the dtype of their scales."""
    if format_.scale_dtype is None:
        return {}
    blocks = dict.fromkeys(config.matrix_shapes(), format_.scale_dtype)
    return blocks | {config.head_name: torch.float32}


def _check_same_names(got: set[str], expected: set[str]) -> None:
    if missing := sorted(expected - got):
        raise InvalidWeights(
            f"{len(missing)} of {len(expected)} tensors are missing, first {missing[0]}; "
            "send the full set under Hugging Face names"
        )
    if unknown := sorted(got - expected):
        raise InvalidWeights(f"{len(unknown)} unknown tensors, first {unknown[0]}")
