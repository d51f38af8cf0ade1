"""The Ray actor that hosts one engine. Every method forwards to a plain object."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import ray
import torch

from actors.engine_loop import EngineLoop, LoopReport
from actors.engine_spec import EngineSpec, make_engine, make_policy
from actors.weights import AnnouncedUpdate, WeightUpdate, as_tensor, to_arrays
from quant.drift import Drift, measure_drift
from rollout.engine import EngineLimits, InFlight, Probing
from rollout.errors import InvalidWeights
from rollout.mtp_policy import MtpWeights
from rollout.probe import DriftProbe
from rollout.proposer import Remembering
from rollout.request import RolloutRequest

HistoryPart = Literal["all", "new", "told"]
"""The exports of `rollout.proposer.Remembering`: everything, what was learned here since it was last
asked for, or the rest of everything."""


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """What an actor turned out to be."""

    name: str
    pid: int
    threads: int
    limits: EngineLimits
    remembers: bool
    """Its proposer has a memory that can be shared."""
    gpus: tuple[str, ...] = ()
    """Physical ones, of an actor that weights come to from another (`EngineSpec.weight_transfer`)."""


@dataclass(frozen=True, slots=True)
class Begun:
    """An actor's answer to `begin`: the update is built, not in force."""

    version: int
    digest: str
    weights_bytes: int
    kernels: dict[str, str]
    draft_version: int | None
    """Policy version whose rollouts the MTP head was trained on last; None without one."""


@dataclass(frozen=True, slots=True)
class Committed:
    """An actor's answer to `commit`: the update is in force."""

    drift: Drift
    swap_s: float
    """Wait for the end of the round in progress."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    weights: Any
    digest: str
    probe_logits: torch.Tensor | None  # [N, V]
    """None where the engine can be probed only once they are in force."""


class RolloutActor:
    """One engine, its loop and its probe; a plain object, `RemoteRolloutActor` runs it in Ray."""

    def __init__(
        self, name: str, spec: EngineSpec, num_cores: int, probe_ids: Sequence[Sequence[int]]
    ) -> None:
        torch.set_num_threads(num_cores)
        self._engine = make_engine(spec)
        self._loop = EngineLoop(self._engine)
        self._prepared: dict[int, _Prepared] = {}
        self._probe_ids = probe_ids
        self._probe = None if isinstance(self._engine, Probing) else make_probe(spec, probe_ids)
        self._info = ActorInfo(
            name,
            os.getpid(),
            torch.get_num_threads(),
            self._engine.limits,
            remembers=self._engine.memory is not None,
            gpus=() if spec.keeps_weights else self._receiver.gpus(),
        )

    @property
    def _receiver(self) -> Any:
        """The engine, where weights are sent to it: then it is vLLM's."""
        return self._engine

    def info(self) -> ActorInfo:
        return self._info

    def join(self, init_info: dict[str, Any], timeout_s: float) -> None:
        """Opens this end of a transfer by which the learner sends weights; see
        `actors.vllm.pass_through`."""
        self._loop.call(lambda: self._receiver.join(init_info), timeout_s)

    def begin(self, update: WeightUpdate | AnnouncedUpdate, timeout_s: float) -> Begun:
        """Builds an update beside the weights in force and runs the probe on it, between two
        rounds."""
        return self._loop.call(lambda: self._build(update), timeout_s)

    def _build(self, update: WeightUpdate | AnnouncedUpdate) -> Begun:
        prepared = self._engine.prepare(update.tensors())
        logits = None if self._probe is None else self._probe.logits(prepared)
        if logits is not None and not bool(logits.isfinite().all()):
            raise InvalidWeights(f"version {update.version}: logits on the probe are not finite")
        self._prepared = {update.version: _Prepared(prepared, update.digest, logits)}
        return Begun(
            update.version,
            update.digest,
            prepared.bytes(),
            prepared.kernels(),
            draft_version=prepared.version if isinstance(prepared, MtpWeights) else None,
        )

    def commit(
        self,
        version: int,
        reference: np.ndarray,
        in_flight: InFlight,
        timeout_s: float,
        sent: dict[str, Any] | None = None,
    ) -> Committed:
        """Puts a begun update in force between two rounds, and compares its probe with
        full precision's log-probabilities [N, V]; `sent` is how one arrives that was announced."""
        if version not in self._prepared:
            raise InvalidWeights(f"version {version} was not begun on {self._info.name}")
        prepared = self._prepared.pop(version)
        weights = prepared.weights if sent is None else replace(prepared.weights, sent=sent)
        started = time.perf_counter()
        self._loop.load(
            weights,
            version=version,
            digest=prepared.digest,
            in_flight=in_flight,
            timeout_s=timeout_s,
        )
        swap_s = time.perf_counter() - started
        logits = prepared.probe_logits
        if logits is None:
            logits = self._loop.call(self._probe_in_force, timeout_s)
        next_tokens = torch.tensor([token for ids in self._probe_ids for token in ids[1:]])
        return Committed(
            measure_drift(torch.from_numpy(reference.copy()), logits, next_tokens), swap_s
        )

    def _probe_in_force(self) -> torch.Tensor:
        assert isinstance(self._engine, Probing), "other engines are probed before"
        return self._engine.probe(self._probe_ids)

    def abandon(self, version: int) -> None:
        """Forgets a prepared update."""
        self._prepared.pop(version, None)

    def export_history(
        self, part: HistoryPart, timeout_s: float
    ) -> tuple[int, dict[str, np.ndarray]]:
        """What the proposer remembers, as its size in bytes and the arrays, which leave this process
        by the object store: whoever asked need not hold them."""
        memory = self._memory()
        export = {"all": memory.export, "new": memory.export_new, "told": memory.export_told}[part]
        arrays, _ = to_arrays(self._loop.call(export, timeout_s))
        return sum(array.nbytes for array in arrays.values()), arrays

    def merge_history(self, timeout_s: float, *exported: Mapping[str, np.ndarray]) -> None:
        """Takes in what others exported, between two rounds. Raises InvalidConfig for the history of
        another model."""
        memory = self._memory()

        def merge() -> None:
            for arrays in exported:
                memory.merge({name: as_tensor(array) for name, array in arrays.items()})

        self._loop.call(merge, timeout_s)

    def _memory(self) -> Remembering:
        memory = self._engine.memory
        assert memory is not None, f"{self._info.name} remembers nothing; see ActorInfo.remembers"
        return memory

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._loop.submit(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._loop.abort(request_ids)

    def collect(self, timeout_s: float) -> LoopReport:
        return self._loop.collect(timeout_s)


def make_probe(spec: EngineSpec, probe_ids: Sequence[Sequence[int]]) -> DriftProbe:
    """The probe in slots of its own."""
    longest = max(map(len, probe_ids))
    return DriftProbe(make_policy(spec, num_slots=len(probe_ids), context_len=longest), probe_ids)


OPTIONS: dict[str, Any] = {"max_restarts": 0, "max_concurrency": 8}
RemoteRolloutActor: Any = ray.remote(**OPTIONS)(RolloutActor)
"""A `RolloutActor` in a process of its own. Ray does not restart it: a new one must hold the current
weights before it serves, which the controller sees to."""
