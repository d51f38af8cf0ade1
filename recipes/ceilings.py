"""What bytes and bandwidth allow at one row, and what drafts make of it.

A step of one row reads every weight that it multiplies once, so tokens a second <= bandwidth / bytes.
With conditional acceptance a_1..a_g by position, a round of g drafted tokens emits
E = 1 + a_1 + a_1 a_2 + ... tokens, for one rate a: (1 - a^(g+1)) / (1 - a), and takes
g c + v(g) + h target steps: c drafts a token, v(g) = 1 + s g verifies, h is what else a round costs.
Speed-up is E over that; 1 without a draft.

Not counted: reading cached keys and values, arithmetic (which binds where rows are many), sampling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from quant.formats import FORMATS, FormatName
from rollout.checkpoint import check_weights
from rollout.decoder import DecoderConfig
from rollout.packing import quantised_matrices


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a round, in target steps."""

    draft: float
    """A drafted token (c)."""
    verify: float = 0.0
    """What each drafted token adds to the target's forward (s)."""
    overhead: float = 0.0
    """A round with drafts, beside them (h)."""

    def round_steps(self, draft_len: int) -> float:
        """A round of `draft_len` drafted tokens; a plain step for none."""
        if draft_len == 0:
            return 1.0
        return draft_len * (self.draft + self.verify) + 1.0 + self.overhead


@dataclass(frozen=True, slots=True)
class Best:
    """The draft length that gains most."""

    draft_len: int
    tokens_per_round: float
    speedup: float


def tokens_per_round(rates: Sequence[float]) -> float:
    """E of a draft whose positions have these conditional rates of acceptance."""
    expected, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        expected += reached
    return expected


def speedup(rates: Sequence[float], costs: Costs) -> float:
    """Over plain decoding, of drafts of `len(rates)` tokens."""
    return tokens_per_round(rates) / costs.round_steps(len(rates))


def best_draft_len(rates: Sequence[float], costs: Costs) -> Best:
    """Over all lengths from 0 to `len(rates)`; the shortest of equals."""
    lens = range(len(rates) + 1)
    best = max(lens, key=lambda n: (speedup(rates[:n], costs), -n))
    drafted = rates[:best]
    return Best(best, tokens_per_round(drafted), speedup(drafted, costs))


def break_even_rate(costs: Costs, max_len: int) -> float | None:
    """The acceptance above which some length up to `max_len` gains, were it one rate at every
    position; None where drafts lose also when all are accepted."""
    if best_draft_len([1.0] * max_len, costs).draft_len == 0:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        gains = best_draft_len([middle] * max_len, costs).draft_len > 0
        low, high = (low, middle) if gains else (middle, high)
    return high


def tokens_per_s(read_bytes: float, bandwidth: float) -> float:
    """Ceiling of plain decoding at one row."""
    return bandwidth / read_bytes


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor in a checkpoint's files, without reading them. Raises UnsupportedModel."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in check_weights(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes of a model's weights in one format."""

    stored: int
    read: int
    """By one step of one row: all but an embedding that is not the head as well, of which a step
    reads a line."""


def payload(
    shapes: Mapping[str, tuple[int, ...]],
    config: DecoderConfig,
    format_: FormatName,
    dtype: torch.dtype,
    *,
    quantised_head: bool = True,
) -> Payload:
    """Counts tensors as the engine holds them: a tied head once, scales along with their matrix.
    `quantised_head`: as in the native engine, not in vLLM's INT8."""
    scales = quantised_matrices(config, FORMATS[format_])
    if not quantised_head:
        scales.pop(config.head_name, None)
    sizes = {}
    for name, shape in shapes.items():
        if name in config.aliases():
            continue
        num = int(torch.Size(shape).numel())
        scale = scales.get(name)
        sizes[name] = num * dtype.itemsize if scale is None else num + shape[0] * scale.itemsize
    stored = sum(sizes.values())
    embedding = "model.embed_tokens.weight"
    return Payload(stored, stored - (0 if config.head_name == embedding else sizes[embedding]))
