"""The Ray actor that hosts one engine. Every method forwards to a plain object."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch

from actors.engine_loop import EngineLoop, LoopReport
from actors.engine_spec import EngineSpec, make_engine, make_policy
from actors.weights import WeightUpdate
from quant.drift import Drift, measure_drift
from rollout.engine import InFlight
from rollout.errors import InvalidWeights
from rollout.probe import DriftProbe
from rollout.request import RolloutRequest


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """What an actor turned out to be."""

    name: str
    pid: int
    threads: int
    vocab_size: int
    context_len: int
    can_decode: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """An actor's answer to `begin`: the update is built and judged, not in force."""

    version: int
    digest: str
    drift: Drift
    weights_bytes: int
    kernels: dict[str, str]
    seconds: float


class RolloutHost:
    """What a rollout actor does, without Ray."""

    def __init__(
        self, name: str, spec: EngineSpec, num_cores: int, probe_ids: Sequence[Sequence[int]]
    ) -> None:
        torch.set_num_threads(num_cores)
        self._engine = make_engine(spec)
        self._loop = EngineLoop(self._engine)
        self._prepared: dict[int, tuple[Any, str]] = {}
        self._probe = DriftProbe(
            make_policy(spec, num_slots=len(probe_ids), context_len=max(map(len, probe_ids))),
            probe_ids,
        )
        policy = self._engine.policy
        self._info = ActorInfo(
            name=name,
            pid=os.getpid(),
            threads=torch.get_num_threads(),
            vocab_size=policy.vocab_size,
            context_len=policy.context_len,
            can_decode=self._engine.can_decode,
        )

    def info(self) -> ActorInfo:
        return self._info

    def begin(self, update: WeightUpdate) -> Prepared:
        """Builds an update beside the weights in force and measures its drift."""
        started = time.perf_counter()
        prepared = self._engine.prepare(update.tensors())
        logits = self._probe.logits(prepared)
        if not bool(logits.isfinite().all()):
            raise InvalidWeights(f"version {update.version}: logits on the probe are not finite")
        self._prepared[update.version] = (prepared, update.digest)
        return Prepared(
            version=update.version,
            digest=update.digest,
            drift=measure_drift(
                torch.from_numpy(update.reference.copy()), logits, self._probe.next_tokens
            ),
            weights_bytes=prepared.bytes(),
            kernels=prepared.kernels(),
            seconds=time.perf_counter() - started,
        )

    def commit(self, version: int, in_flight: InFlight, timeout_s: float) -> float:
        """Puts a prepared update in force between two rounds; seconds it took."""
        started = time.perf_counter()
        if version not in self._prepared:
            raise InvalidWeights(f"version {version} was not begun on {self._info.name}")
        prepared, digest = self._prepared.pop(version)
        self._loop.load(
            prepared, version=version, digest=digest, in_flight=in_flight, timeout_s=timeout_s
        )
        return time.perf_counter() - started

    def abandon(self, version: int) -> None:
        """Forgets a prepared update."""
        self._prepared.pop(version, None)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._loop.submit(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._loop.abort(request_ids)

    def collect(self, timeout_s: float) -> LoopReport:
        return self._loop.collect(timeout_s)

    def stop(self) -> None:
        self._loop.stop()


@ray.remote(max_restarts=0, max_concurrency=8)
class RolloutActor(RolloutHost):
    """A `RolloutHost` in a process of its own. Not restarted by Ray: a new one must hold the current
    weights before it serves, which the controller sees to."""
