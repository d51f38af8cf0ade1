"""This project's engine in the engine benchmark: the rows it runs as, and what one run tells."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch

from actors.engine_spec import EngineSpec, make_engine, make_policy, pack_folder
from proposers.history import HistoryProposer
from quant.formats import FormatName
from rollout.checkpoint import read_config
from rollout.decoder import DecoderConfig
from rollout.draft_len import DraftLen
from rollout.native_engine import NativeEngine
from rollout.policy import Policy
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample, SpecCounters
from rollout.sampling import SamplingParams
from scripts.bench_contenders import Prompts


@dataclass(frozen=True, slots=True)
class OurRow:
    """One way to run this project's engine."""

    format: FormatName
    dtype: str | None
    """None is the machine's default."""
    speculative: bool = False


OURS: dict[str, OurRow] = {
    "ours_bf16": OurRow("none", "bfloat16"),
    "ours_float32": OurRow("none", "float32"),
    "ours_w8a16": OurRow("int8_w8a16", None),
    "ours_w8a8": OurRow("int8_w8a8", None),
    "ours_w8a16_spec": OurRow("int8_w8a16", None, speculative=True),
    "ours_w8a8_spec": OurRow("int8_w8a8", None, speculative=True),
}
QUANTISED_PLAIN = ("ours_w8a16", "ours_w8a8")
QUANTISED_SPECULATIVE = ("ours_w8a16_spec", "ours_w8a8_spec")


@dataclass(frozen=True, slots=True)
class OurRun:
    """What one run did, beside how long it took."""

    seconds: float
    step_s: float
    """Median over the rounds, so without the prefill that the first ones do."""
    by_phase: dict[str, float]
    """Seconds, prefill included."""
    by_operation: dict[str, float]
    """Seconds inside the policy, where it counts them."""
    num_rounds: int
    counters: SpecCounters
    samples: list[RolloutSample] = field(repr=False)


class ReadyWeights(Protocol):
    """What a policy makes of an update."""

    def bytes(self) -> int: ...

    def kernels(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy and its weights; engines that share it must not run at the same time."""

    spec: EngineSpec
    config: DecoderConfig
    policy: Policy
    weights: ReadyWeights

    @staticmethod
    def make(spec: EngineSpec) -> "LoadedPolicy":
        folder, policy = Path(spec.model_folder), make_policy(spec)
        weights = policy.load(pack_folder(spec))
        return LoadedPolicy(spec, read_config(folder), policy, weights)

    def beside(self) -> "LoadedPolicy":
        """The same weights with a cache of its own, for an engine that runs in turns with others."""
        return replace(self, policy=make_policy(self.spec))

    def cache_tensors(self) -> list[torch.Tensor]:
        """A policy's tensors of rank three and more are its cached keys and values."""
        held = vars(self.policy).values()
        return [value for value in held if isinstance(value, torch.Tensor) and value.ndim >= 3]

    def engine(
        self, *, proposer: Proposer | None = None, draft_len: DraftLen | None = None
    ) -> NativeEngine:
        return make_engine(self.spec, policy=self.policy, proposer=proposer, draft_len=draft_len)


class OurEngine:
    """The native engine. Weights are loaded anew before every run, which empties its caches: no run
    finds the prompts of an earlier one."""

    def __init__(self, name: str, loaded: LoadedPolicy, engine: NativeEngine) -> None:
        self.name, self.loaded, self.engine = name, loaded, engine
        self.max_rows = loaded.policy.num_slots
        self.last: OurRun | None = None
        self._version = 0

    def generate(self, prompts: Prompts, num_tokens: int, seed: int) -> float:
        self.last = self.run(prompts, SamplingParams(max_new_tokens=num_tokens), seed)
        return self.last.seconds

    def run(
        self, prompts: Prompts, sampling: SamplingParams, seed: int, *, num_samples: int = 1
    ) -> OurRun:
        self._version += 1
        self.engine.load(self.loaded.weights, version=self._version, digest="bench")
        requests = [
            RolloutRequest(f"{p}/{s}", f"g{p}", f"p{p}", s, tuple(ids), sampling, run_seed=seed)
            for p, ids in enumerate(prompts)
            for s in range(num_samples)
        ]
        before, operations_before = self.engine.gauges(), self._operations()
        counters = self.engine.counters()
        step_ends = [time.perf_counter()]
        self.engine.submit(requests)
        ended: dict[str, RolloutSample] = {}
        while self.engine.num_unfinished:
            ended |= {sample.request.id: sample for sample in self.engine.step()}
            step_ends.append(time.perf_counter())
        samples = [ended[request.id] for request in requests]
        gauges = self.engine.gauges()
        assert all(len(sample.token_ids) == sampling.max_new_tokens for sample in samples), (
            "a row ended early"
        )
        spent = {key: gauges[key] - before[key] for key in gauges}
        return OurRun(
            seconds=step_ends[-1] - step_ends[0],
            step_s=statistics.median(end - start for start, end in pairwise(step_ends)),
            by_phase={
                key.removeprefix("seconds/"): value
                for key, value in spent.items()
                if key.startswith("seconds/")
            },
            by_operation={
                key: value - operations_before.get(key, 0.0)
                for key, value in self._operations().items()
            },
            num_rounds=round(spent["count/rounds"]),
            counters=_since(counters, self.engine.counters()),
            samples=samples,
        )

    def _operations(self) -> dict[str, float]:
        """A policy may count its seconds by operation."""
        seconds = getattr(self.engine.policy, "seconds", None)
        return dict(seconds()) if callable(seconds) else {}

    def record(self, prompts: Prompts, num_samples: int, num_tokens: int) -> list[RolloutSample]:
        """Earlier rollouts of the prompts, which the engine's proposer learns from as they end."""
        sampling = SamplingParams(max_new_tokens=num_tokens)
        return self.run(prompts, sampling, seed=0, num_samples=num_samples).samples

    def remember(self, samples: Sequence[RolloutSample]) -> None:
        """Takes in what another engine recorded."""
        proposer = self.engine.proposer
        assert isinstance(proposer, HistoryProposer), "only the history proposer remembers"
        for sample in samples:
            proposer.remember(sample.request.prompt_ids, sample.token_ids, sample.logprobs)

    def close(self) -> None:
        pass


def make_ours(
    names: Sequence[str], folder: Path, *, num_slots: int, context_len: int
) -> dict[str, OurEngine]:
    """The named rows; those that differ in the proposer only share a policy."""
    policies: dict[tuple[FormatName, str | None], LoadedPolicy] = {}
    engines = {}
    for name in names:
        row = OURS[name]
        key = row.format, row.dtype
        if key not in policies:
            spec = EngineSpec(
                str(folder),
                mode="full" if row.format == "none" else "quantised",
                format=row.format,
                proposer="none",
                num_slots=num_slots,
                context_len=context_len,
                dtype=row.dtype,
            )
            policies[key] = LoadedPolicy.make(spec)
        loaded = policies[key]
        if row.speculative:
            spec = EngineSpec(
                str(folder), format=row.format, num_slots=num_slots, context_len=context_len
            )  # the defaults: history, adaptive draft length
            engine = make_engine(spec, policy=loaded.policy)
        else:
            engine = loaded.engine()
        engines[name] = OurEngine(name, loaded, engine)
    return engines


def _since(before: SpecCounters, now: SpecCounters) -> SpecCounters:
    """The counts that `.tokens_per_target_step` and `.acceptance_rate` are made of."""
    names = ("rounds", "drafted", "verified", "accepted", "corrections", "bonuses", "plain")
    return SpecCounters(**{name: getattr(now, name) - getattr(before, name) for name in names})
