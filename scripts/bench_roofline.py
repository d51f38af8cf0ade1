"""What this machine could do: measured bandwidth and arithmetic, and what a decode step needs of them.

A step of plain decoding reads the weights and the cached keys and values once and multiplies them
with B rows, so it takes at least max(bytes / bandwidth, operations / arithmetic) (Williams et al.,
"Roofline", 2009). Both rates are the best of what the probes below reach with the threads of this
process; a probe that reaches more belongs in PROBES. A multiply-add counts as two operations.

Not in the roofline: the sampler, norms, activations, what a kernel spends on unpacking.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from quant.int8 import quantise_weight
from rollout.compiled_weights import Packer
from rollout.decoder import DecoderConfig
from rollout.errors import KernelsUnavailable
from rollout.kernels import find_kernels, pointer

READ_BYTES = 512 * 2**20
MIN_RUN_S = 0.1
"""GEMMs grow until one takes this long, so that its start-up does not count."""
MAX_SIZE = 4096
Kind = Literal["read", "arithmetic"]


@dataclass(frozen=True, slots=True)
class Probe:
    """One way to find out a rate."""

    name: str
    kind: Kind
    rate: Callable[[], float]
    """Bytes a second of a read, operations a second of arithmetic."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The best rates found, and what each probe found."""

    bytes_per_s: float
    operations_per_s: float
    by_probe: dict[str, float]


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step must read and compute, whatever runs it."""

    read_bytes: float
    operations: float

    def read_s(self, roofline: Roofline) -> float:
        return self.read_bytes / roofline.bytes_per_s

    def compute_s(self, roofline: Roofline) -> float:
        return self.operations / roofline.operations_per_s

    def seconds(self, roofline: Roofline) -> float:
        return max(self.read_s(roofline), self.compute_s(roofline))


def cache_token_bytes(config: DecoderConfig, itemsize: int) -> int:
    """Keys and values of one token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def decode_step(
    config: DecoderConfig,
    *,
    weights_bytes: int,
    num_rows: int,
    context_len: float,
    cache_itemsize: int,
) -> StepWork:
    """A plain decode step of `num_rows` rows with `context_len` cached tokens each."""
    matrices = sum(out * into for out, into in config.matrix_shapes().values())
    head = config.vocab_size * config.hidden_size
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * context_len
    cached = num_rows * context_len * cache_token_bytes(config, cache_itemsize)
    return StepWork(weights_bytes + cached, 2 * num_rows * (matrices + head + attention))


def measure_roofline(probes: Sequence[Probe] | None = None) -> Roofline:
    """Runs every probe; about ten seconds."""
    probes = PROBES if probes is None else probes
    found = {probe.name: probe.rate() for probe in probes}
    best = {
        kind: max(found[probe.name] for probe in probes if probe.kind == kind)
        for kind in ("read", "arithmetic")
    }
    return Roofline(best["read"], best["arithmetic"], found)


# ---- probes -------------------------------------------------------------------------------


def _best_seconds(run: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _read_by_sum() -> float:
    values = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _best_seconds(values.sum)


def _read_by_dot() -> float:
    half = torch.ones(READ_BYTES // 8), torch.ones(READ_BYTES // 8)
    return READ_BYTES / _best_seconds(lambda: torch.dot(*half))


def _read_by_matrix_vector() -> float:
    matrix, vector = torch.ones(READ_BYTES // 4 // 4096, 4096), torch.ones(4096)
    return READ_BYTES / _best_seconds(lambda: torch.mv(matrix, vector))


def _gemm_rate(
    multiply: Callable[[torch.Tensor, torch.Tensor], object], dtype: torch.dtype
) -> float:
    """The best rate over square GEMMs, growing until one takes MIN_RUN_S."""
    best, size = 0.0, 256
    while size <= MAX_SIZE:
        left = torch.ones(size, size).to(dtype)
        right = torch.ones(size, size).to(dtype).t()
        multiply(left, right)
        seconds = _best_seconds(lambda: multiply(left, right), repeats=5)  # noqa: B023
        best = max(best, 2 * size**3 / seconds)
        if seconds > MIN_RUN_S:
            break
        size *= 2
    return best


def _compiled_rate() -> float:
    """The engine's own INT8 kernel on matrices that stay in the cache; 0 where there is none."""
    try:
        kernels = find_kernels()
    except KernelsUnavailable:
        return 0.0
    rows, cols, tokens = 1024, 576, 24
    weight = quantise_weight(torch.ones(rows, cols), torch.float32)
    packer = Packer(kernels)
    linear = packer.linear(weight, None, int8_inputs=True)
    x, y = torch.ones(tokens, cols), torch.empty(tokens, rows)

    def run() -> None:
        kernels.library.er_linear(linear, pointer(x), tokens, pointer(y), torch.get_num_threads())

    return 2 * rows * cols * tokens / _best_seconds(run, repeats=500)


PROBES: tuple[Probe, ...] = (
    Probe("compiled int8", "arithmetic", _compiled_rate),
    Probe("read: sum", "read", _read_by_sum),
    Probe("read: dot", "read", _read_by_dot),
    Probe("read: matrix-vector", "read", _read_by_matrix_vector),
    Probe("int8 GEMM", "arithmetic", lambda: _gemm_rate(torch._int_mm, torch.int8)),
    Probe("bf16 GEMM", "arithmetic", lambda: _gemm_rate(torch.mm, torch.bfloat16)),
    Probe("float32 GEMM", "arithmetic", lambda: _gemm_rate(torch.mm, torch.float32)),
)
