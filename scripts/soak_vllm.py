#!/usr/bin/env python
"""Publishes by the hundred into a running vLLM: is every token's version right, and is memory flat?

    python scripts/soak_vllm.py [--publishes 200] [--format none|int8_w8a8] [--check-every 5]
        [--model smollm2] [--rows 8] [--quick] [--json]

Run by an interpreter that has vLLM. One engine (history proposer, adaptive draft length, float32)
generates all the time; every few steps all of its weights change, every row of every tensor by a
factor of its own, with rows in flight that go on under the new ones. Every tenth publish brings the
first weights back. Checked, after every `--check-every`th publish:

- format none: the recorded log-probabilities of a finished sample, token by token, against Hugging
  Face's forward with the weights of the version that the token names, within 1e-4. The same tokens
  under the version next to it have to be further off than that, or the check would say nothing;
- both formats: vLLM's own forward of fixed texts (`probe`) is bit for bit what it was when the same
  weights were in force before, and another one under other weights. In int8_w8a8 there is no
  second forward to compare with: rounding an activation the other way moves what follows by a step.

Memory is read after every publish: what this process holds (resident, less the file pages it shares,
after `malloc_trim`) and what lies in /dev/shm, which others may use as well. Its growth is the slope
of a line through the second half, with its standard error. `grows`: the slope is above `LIMIT_MB` a
publish by more than two errors; `flat`: it is below by as much; else, and of fewer than
`LEAST_PUBLISHES`, `not clear`, which a longer run settles. Exit code 1 where anything is inconsistent
or grows.

oneDNN compiles kernels for every number of tokens that a forward has, of SmolLM2 in float32 1.4 MB a
number, and by default keeps the last 1,024, which was .5 MB a publish here: each is followed by a
forward of another number. The engine lets it keep 64 (`actors.vllm.launch`).

Not measured: speed (updates are computed in this process), GPUs, several workers, Ray.
"""

import argparse
import ctypes
import importlib.util
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

from actors.vllm.support import INSTALL

if importlib.util.find_spec("vllm") is None:
    sys.exit(f"soak_vllm: {sys.executable} has no vLLM; {INSTALL}")

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from actors.engine_spec import EngineSpec, pack_weights
from actors.vllm.engine import VllmEngine
from recipes.passport import machine, project_state, versions
from recipes.smollm2 import model_folder
from rollout.checkpoint import read_config, read_weights
from rollout.packing import digest
from rollout.request import RolloutRequest, RolloutSample
from rollout.sampling import SamplingParams
from scripts.bench_engine import fill_in, make_tell, own_stdout
from tests.tiny_model import tiny_folder

FULL = {"publishes": 200, "check_every": 5}
QUICK = {"publishes": 12, "check_every": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""Of the tiny model: vLLM's CPU attention takes heads of 32 and more."""
RETURN_EVERY = 10
"""Publishes between those of the first weights."""
CHANGE = 0.05
"""Standard deviation of the factors."""
STEPS = 6
"""Between two publishes."""
TOKENS = (24, 40, 16, 32, 20, 36, 28)
"""Of samples in turn, so that rows do not all end in one step."""
PROMPT_LEN, NUM_PROMPTS = 16, 4
TOLERANCE = 1e-4
LIMIT_MB = 0.25
LEAST_PUBLISHES = 100
"""The first take 1 to 5 MB each, until kernels and the allocator's pools are there."""

Weights = Mapping[str, torch.Tensor]
Verdict = Literal["flat", "grows", "not clear"]


# ---- memory -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Growth:
    """A line through the second half of a series in MB, one value a publish."""

    num: int
    """Publishes of the whole series."""
    slope_mb: float
    error_mb: float
    """Standard error of the slope."""

    @property
    def verdict(self) -> Verdict:
        if self.num < LEAST_PUBLISHES:
            return "not clear"
        if self.slope_mb - 2 * self.error_mb > LIMIT_MB:
            return "grows"
        return "flat" if self.slope_mb + 2 * self.error_mb <= LIMIT_MB else "not clear"


def growth(series: Sequence[float]) -> Growth:
    half = np.asarray(series[len(series) // 2 :])
    assert len(half) > 2, f"{len(series)} values have no slope with an error"
    at = np.arange(len(half)) - (len(half) - 1) / 2
    slope = float(at @ half / (at @ at))
    left = half - half.mean() - slope * at
    return Growth(
        len(series), slope, math.sqrt(float(left @ left) / (len(half) - 2) / float(at @ at))
    )


def private_mb() -> float:
    """Resident memory of this process that is not shared with files, once the allocator has given
    back what is free: what it keeps for later swings by more than a hundred MB."""
    ctypes.CDLL(None).malloc_trim(0)
    memory = psutil.Process().memory_info()
    return (memory.rss - memory.shared) / 1e6


def shm_mb() -> float:
    return shutil.disk_usage("/dev/shm").used / 1e6


# ---- weights and their reference ----------------------------------------------------------


def changed(base: Weights, version: int) -> dict[str, torch.Tensor]:
    """The weights of a version, float32: those of every tenth are the same."""
    seed = 0 if version % RETURN_EVERY == 0 else version
    noise = torch.Generator().manual_seed(seed)
    made = {}
    for name, tensor in base.items():
        factors = 1 + CHANGE * torch.randn(len(tensor), generator=noise)
        made[name] = tensor.float() * factors.view(-1, *[1] * (tensor.ndim - 1))
    return made


class Reference:
    """Hugging Face's forward in float32 under any version."""

    def __init__(self, folder: Path, base: Weights) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._base = base

    @torch.inference_mode()
    def logprobs(self, sample: RolloutSample, version: int) -> list[float]:
        """Of every token of a sample."""
        weights = changed(self._base, version)
        self._model.load_state_dict(weights, strict=False)  # a tied head is not among them
        prompt = sample.request.prompt_ids
        ids = torch.tensor([[*prompt, *sample.token_ids]])
        table = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own: list[float] = table.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0].tolist()
        return own


@dataclass(slots=True)
class Checks:
    """What was looked at and how far it was off."""

    num_samples: int = 0
    num_tokens: int = 0
    num_spans: int = 0
    max_error: float = 0.0
    """Of a recorded log-probability, nats."""
    min_control_error: float = math.inf
    """Smallest, over samples, of the largest error under the version after the one named."""
    num_probes: int = 0
    """Returns of the first weights."""
    wrong: list[str] = field(default_factory=list)

    def compare(self, sample: RolloutSample, reference: Reference) -> None:
        """Token by token, each under the version that it names; the last span also under the next."""
        self.num_samples += 1
        begin = 0
        for version, num in sample.version_spans:
            span = slice(begin, begin := begin + num)
            error = _error(sample, reference.logprobs(sample, version), span)
            if not error <= TOLERANCE:
                self.wrong.append(f"{sample.request.id}, version {version}: off by {error:.2g}")
            self.max_error = max(self.max_error, error)
            self.num_spans += 1
            self.num_tokens += num
        control = _error(sample, reference.logprobs(sample, version + 1), span)
        if not control > 10 * TOLERANCE:
            self.wrong.append(f"{sample.request.id}: version {version + 1} fits as well")
        self.min_control_error = min(self.min_control_error, control)

    def probe(self, version: int, found: torch.Tensor, first: torch.Tensor) -> None:
        same = torch.equal(found, first)
        if same != (version % RETURN_EVERY == 0):
            self.wrong.append(f"version {version}: the probe equals the first one: {same}")
        self.num_probes += same


def _error(sample: RolloutSample, right: Sequence[float], span: slice) -> float:
    return max(abs(a - b) for a, b in zip(sample.logprobs[span], right[span], strict=True))


# ---- the soak -----------------------------------------------------------------------------


class Traffic:
    """Requests without end over a few prompts."""

    def __init__(self, vocab_size: int) -> None:
        noise = torch.Generator().manual_seed(1)
        sizes = (NUM_PROMPTS, PROMPT_LEN)
        self._prompts = torch.randint(8, vocab_size, sizes, generator=noise).tolist()
        self._num = 0

    def fill(self, engine: VllmEngine, num: int) -> None:
        """Until so many are unfinished."""
        while engine.num_unfinished < num:
            which, index = self._num % NUM_PROMPTS, self._num
            self._num += 1
            engine.submit(
                [
                    RolloutRequest(
                        f"r{index}",
                        f"g{index}",
                        f"p{which}",
                        index,
                        tuple(self._prompts[which]),
                        SamplingParams(max_new_tokens=TOKENS[index % len(TOKENS)]),
                    )
                ]
            )


def soak(
    arguments: argparse.Namespace, folder: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The whole run."""
    base, quantised = read_weights(folder), arguments.format != "none"
    spec = EngineSpec(
        str(folder),
        engine="vllm",
        mode="quantised" if quantised else "full",
        format=arguments.format,
        smoothing=0.0,
        num_slots=arguments.rows,
        context_len=64,
        dtype="float32",
    )
    engine, traffic = VllmEngine(spec), Traffic(read_config(folder).vocab_size)
    reference = None if quantised else Reference(folder, base)
    checks, finished = Checks(), list[RolloutSample]()
    rss, shm, live = list[float](), list[float](), list[int]()
    texts, first = [list(range(20, 32)), list(range(40, 46))], None
    for version in range(arguments.publishes + 1):
        tell(f"publish {version}/{arguments.publishes}")
        traffic.fill(engine, arguments.rows + 2)
        if version:
            live.append(int(engine.gauges()["rows/live"]))
        _publish(engine, spec, changed(base, version), version)
        finished += engine.step()  # in force from here on
        if version % arguments.check_every == 0:
            found = engine.probe(texts)
            if first is None:
                first = found
            checks.probe(version, found, first)
            crossed = [sample for sample in finished if len(sample.version_spans) > 1]
            if reference is not None and crossed:
                checks.compare(crossed[-1], reference)
            finished = []
        for _ in range(STEPS):
            finished += engine.step()
            traffic.fill(engine, arguments.rows + 2)
        if version:
            rss.append(private_mb())
            shm.append(shm_mb())
    return _found(arguments, checks, live, {"rss": rss, "shm": shm})


def _publish(engine: VllmEngine, spec: EngineSpec, weights: Weights, version: int) -> None:
    packed = pack_weights(spec, weights.items())
    engine.load(
        engine.prepare(packed), version=version, digest=digest(packed), in_flight="interrupt"
    )


def _found(
    arguments: argparse.Namespace,
    checks: Checks,
    live: Sequence[int],
    series: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    growths = {name: growth(values) for name, values in series.items()}
    if min(live) < 1:
        checks.wrong.append("a publish found no row in flight")
    if not checks.num_samples and arguments.format == "none":
        checks.wrong.append("no sample crossed a publish where one was checked")
    return {
        "consistent": not checks.wrong,
        "wrong": checks.wrong,
        "checked": {
            "samples": checks.num_samples,
            "spans": checks.num_spans,
            "tokens": checks.num_tokens,
            "max_error": checks.max_error,
            "min_control_error": checks.min_control_error if checks.num_samples else None,
            "returns_of_the_first_weights": checks.num_probes,
        },
        "memory": {
            name: {
                "verdict": found.verdict,
                "slope_mb_per_publish": found.slope_mb,
                "slope_error_mb": found.error_mb,
                "first_mb": series[name][0],
                "middle_mb": series[name][len(series[name]) // 2],
                "last_mb": series[name][-1],
            }
            for name, found in growths.items()
        },
        "rows_in_flight_at_a_publish": min(live),
        "series_mb": {
            name: [round(value, 1) for value in values] for name, values in series.items()
        },
        "settings": {
            name: getattr(arguments, name)
            for name in ("publishes", "format", "check_every", "model", "rows", "quick")
        },
        "machine": machine(),
        "versions": versions(),
        "project": project_state(),
    }


# ---- the command --------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--publishes", type=int, help=f"{FULL['publishes']}")
    parser.add_argument("--check-every", type=int, help=f"publishes; {FULL['check_every']}")
    parser.add_argument("--format", choices=("none", "int8_w8a8"), default="none")
    parser.add_argument("--model", default="smollm2", help="smollm2 or a model folder")
    parser.add_argument("--rows", type=int, default=8, help="rows in flight")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few publishes")
    parser.add_argument("--json", action="store_true", help="the JSON line only")
    arguments = parser.parse_args()
    fill_in(arguments, QUICK if arguments.quick else FULL)
    if arguments.publishes < 6 or arguments.check_every < 1 or arguments.rows < 1:
        parser.error("expected --publishes of 6 and more, --check-every and --rows of 1 and more")
    return arguments


def text(found: Mapping[str, Any]) -> str:
    """For people."""
    checked = found["checked"]
    lines = [
        f"{checked['samples']} samples, {checked['spans']} spans of versions and "
        f"{checked['tokens']} tokens compared: off by {checked['max_error']:.2g} nats at most; "
        f"the first weights came back {checked['returns_of_the_first_weights']} times",
        *(f"WRONG: {sentence}" for sentence in found["wrong"]),
    ]
    for name, memory in found["memory"].items():
        lines.append(
            f"{name}: {memory['verdict']}, {memory['slope_mb_per_publish']:.3f} "
            f"± {memory['slope_error_mb']:.3f} MB a publish in the second half "
            f"({memory['first_mb']:.0f}, {memory['middle_mb']:.0f}, {memory['last_mb']:.0f} MB)"
        )
    return "\n".join(lines)


def main() -> None:
    arguments, tell = parse(), make_tell()
    answers = own_stdout()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.quick:
            arguments.model = str(tiny_folder(Path(scratch) / "tiny", **HEADS))
        found = soak(arguments, model_folder(arguments.model), tell)
    tell("")
    if not arguments.json:
        print(text(found), file=answers)
    print(json.dumps(found), file=answers, flush=True)
    grows = any(memory["verdict"] == "grows" for memory in found["memory"].values())
    os._exit(int(grows or not found["consistent"]))  # vLLM's own end takes long


if __name__ == "__main__":
    main()
