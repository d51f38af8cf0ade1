#!/usr/bin/env python
"""Does the engine compute on this GPU what it computes on a CPU, and how fast is it?

    python scripts/check_cuda.py [--model FOLDER] [--tokens 128] [--json]

This script has not been run on a GPU yet: it was written without one.

First it is right, or the exit code is 1. Decode rounds of 1 to 9 rows and 1 to 4 tokens behind
prefixes of different lengths, as recorded CUDA graphs and as they are, against a forward in float32 on
the CPU; by KL, nats a token, of the worst round. Tokens are random, so a format costs more than on
text: on a CPU with AVX2 the worst rounds of SmolLM2 were .006 (bf16), .026 (W8A16) and .22 (W8A8) from
float32, and .0005 (bf16) apart where only the order of sums differs. The limits are 4 times that and
more: what lies beyond is an error, not a rounding.

Then tokens/s of plain decoding at 1, 8 and 32 rows, T=1, the same prompts for all, warmed up by a run
that is not counted, which also records the graphs. Not measured: long contexts, speculation, other
models. Without a GPU it ends with exit code 2.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from actors.engine_spec import DTYPES, EngineSpec, make_engine, pack_folder
from quant.drift import measure_drift
from quant.formats import FORMATS, FormatName
from recipes.smollm2 import model_folder
from rollout.checkpoint import read_config
from rollout.engine import run_to_end
from rollout.graph_capture import Capture, CudaCapture
from rollout.policy import Window
from rollout.request import RolloutRequest
from rollout.sampling import SamplingParams
from rollout.transformer_policy import TransformerPolicy

BATCHES = (1, 8, 32)
PROMPT_LEN = 40
NUM_SLOTS = 32


@dataclass(frozen=True, slots=True)
class Regime:
    """One way to run, and the KL that is let pass, nats a token."""

    format: FormatName
    dtype: str
    from_cpu: float
    from_eager: float


REGIMES: Mapping[str, Regime] = {
    "float32": Regime("none", "float32", from_cpu=1e-5, from_eager=1e-5),
    "bf16": Regime("none", "bfloat16", from_cpu=0.03, from_eager=0.005),
    "int8_w8a16": Regime("int8_w8a16", "bfloat16", from_cpu=0.1, from_eager=0.005),
    "int8_w8a8": Regime("int8_w8a8", "bfloat16", from_cpu=1.0, from_eager=0.3),
}


@dataclass(frozen=True, slots=True)
class Check:
    """The worst round of one regime."""

    name: str
    kernel: str
    num_replayed: int
    from_cpu: float
    from_eager: float
    ok: bool


def make_policy(
    spec: EngineSpec, *, capture: Capture | None, num_slots: int = NUM_SLOTS
) -> TransformerPolicy:
    """A torch policy with the folder's weights in force."""
    policy = TransformerPolicy(
        read_config(Path(spec.model_folder)),
        FORMATS[spec.format],
        num_slots=num_slots,
        context_len=spec.context_len,
        dtype=DTYPES[spec.dtype or "float32"],
        device=spec.device,
        capture=capture,
    )
    policy.swap(policy.load(pack_folder(spec)))
    return policy


def rounds(vocab_size: int) -> Iterator[list[Window]]:
    """Decode rounds behind what `prefixes` caches."""
    generator = torch.Generator().manual_seed(0)
    for num_rows in range(1, 10):
        for length in range(1, 5):
            ids = torch.randint(vocab_size, (num_rows, length), generator=generator).tolist()
            yield [Window(s, 20 + 7 * s, tuple(row), length) for s, row in enumerate(ids)]


def prefixes(vocab_size: int) -> list[Window]:
    generator = torch.Generator().manual_seed(1)
    lengths = [20 + 7 * slot for slot in range(9)]
    ids = [torch.randint(vocab_size, (num,), generator=generator).tolist() for num in lengths]
    return [Window(slot, 0, tuple(row), 0) for slot, row in enumerate(ids)]


def score_rounds(policy: TransformerPolicy) -> list[torch.Tensor]:
    """Log-probabilities [N, V] of every round."""
    policy.score(prefixes(policy.vocab_size))
    return [policy.score(windows).log_softmax(-1).cpu() for windows in rounds(policy.vocab_size)]


def worst_kl(reference: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Of the rounds; NaN where one is."""
    kls = [
        measure_drift(one, other, torch.zeros(len(one), dtype=torch.long)).kl
        for one, other in zip(reference, others, strict=True)
    ]
    return float(torch.tensor(kls).max())


def check(
    name: str, folder: Path, reference: Sequence[torch.Tensor], *, device: str, capture: Capture
) -> Check:
    """Both ways of running one regime against the reference and against each other."""
    regime = REGIMES[name]
    spec = EngineSpec(
        str(folder), format=regime.format, dtype=regime.dtype, device=device, context_len=128
    )
    replaying = make_policy(spec, capture=capture, num_slots=9)
    replayed = score_rounds(replaying)
    eager = score_rounds(make_policy(spec, capture=None, num_slots=9))
    from_cpu = max(worst_kl(reference, replayed), worst_kl(reference, eager))
    from_eager = worst_kl(eager, replayed)
    assert replaying.graphs is not None and replaying.weights is not None
    num_replayed = round(replaying.graphs.gauges()["graphs/replayed"])
    ok = (
        num_replayed == len(replayed)
        and from_cpu <= regime.from_cpu
        and from_eager <= regime.from_eager
    )
    kernel = replaying.weights.kernels()["blocks"]
    return Check(name, kernel, num_replayed, from_cpu, from_eager, ok)


def tokens_per_s(
    name: str, folder: Path, *, device: str, capture: Capture | None, num_tokens: int
) -> dict[int, float]:
    """Of plain decoding, by rows."""
    regime = REGIMES[name]
    spec = EngineSpec(
        str(folder), format=regime.format, dtype=regime.dtype, device=device, proposer="none",
        context_len=PROMPT_LEN + num_tokens,
    )  # fmt: skip
    policy = make_policy(spec, capture=capture)
    engine = make_engine(spec, policy=policy)
    engine.load(policy.weights, version=0, digest="check")
    sampling = SamplingParams(max_new_tokens=num_tokens)
    generator = torch.Generator().manual_seed(2)
    rates = {}
    for batch in BATCHES:
        for run in ("warm-up", "counted"):
            ids = torch.randint(
                policy.vocab_size, (batch, PROMPT_LEN), generator=generator
            ).tolist()
            requests = [
                RolloutRequest(
                    f"{run}/{i}", f"g{i}", f"{run}{i}", 0, tuple(row), sampling, run_seed=0
                )
                for i, row in enumerate(ids)
            ]
            started = time.perf_counter()
            samples = run_to_end(engine, requests)
            seconds = time.perf_counter() - started
        rates[batch] = sum(len(sample.token_ids) for sample in samples) / seconds
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="model folder, or smollm2")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a row, timed")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees no CUDA device; nothing was checked")
        return 2
    folder, device = model_folder(arguments.model), "cuda"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {folder.name}")
    full = EngineSpec(str(folder), format="none", dtype="float32", context_len=128)
    reference = score_rounds(make_policy(full, capture=None, num_slots=9))
    checks, speeds = [], {}
    for name in REGIMES:
        found = check(
            name, folder, reference, device=device, capture=CudaCapture(torch.device(device))
        )
        checks.append(found)
        print(
            f"{'ok  ' if found.ok else 'FAIL'} {name} ({found.kernel}): KL {found.from_cpu:.1e} from "
            f"the CPU, {found.from_eager:.1e} between graphs and eager, {found.num_replayed} replays"
        )
    right = all(found.ok for found in checks)
    for name in REGIMES if right else ():
        for way, capture in (("eager", None), ("graphs", CudaCapture(torch.device(device)))):
            speeds[f"{name} {way}"] = rates = tokens_per_s(
                name, folder, device=device, capture=capture, num_tokens=arguments.tokens
            )
            print(f"{name} {way}: " + ", ".join(f"B={b} {r:.0f} tok/s" for b, r in rates.items()))
    if arguments.json:
        rows = [{field: getattr(c, field) for field in Check.__slots__} for c in checks]
        print(json.dumps({"checks": rows, "tokens_per_s": speeds}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
