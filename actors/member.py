"""One rollout actor as the controller sees it: what it holds and whether it serves."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from actors.config import ClusterConfig
from actors.rollout_actor import ActorInfo, RemoteRolloutActor
from actors.threads import thread_environment
from rollout.errors import ActorFailed, RolloutError, RolloutTimeout
from rollout.request import RolloutRequest, SpecCounters


@dataclass(slots=True)
class Assigned:
    """A request that was sent to a member."""

    request: RolloutRequest
    since: float = field(default_factory=time.monotonic)
    aborted: bool = False
    """It ran for too long and was asked to end."""


@dataclass(slots=True)
class Member:
    """An actor's handle and the controller's books about it."""

    name: str
    handle: Any
    info: ActorInfo | None = None
    serving: bool = False
    """It holds the current version and may be given requests."""
    assigned: dict[str, Assigned] = field(default_factory=dict)
    sent: list[Any] = field(default_factory=list)
    """References of submissions whose receipt is not confirmed yet."""
    collecting: Any = None
    """Reference of the collect call under way."""
    collecting_since: float = 0.0
    counters: SpecCounters = field(default_factory=SpecCounters)
    gauges: dict[str, float] = field(default_factory=dict)
    explanation: str = ""

    @staticmethod
    def start(name: str, config: ClusterConfig, probe_ids: Sequence[Sequence[int]]) -> "Member":
        """Starts an actor in a process with the cores it is given and no more threads."""
        cores = config.cpus_per_actor
        handle = RemoteRolloutActor.options(
            num_cpus=cores,
            num_gpus=config.engine.num_gpus,
            runtime_env={"env_vars": thread_environment(cores, spin=config.threads_spin)},
        ).remote(name, config.engine, cores, probe_ids)
        return Member(name, handle)

    def ask(self, reference: Any, timeout_s: float) -> Any:
        """The answer to a call. Raises ActorFailed or RolloutTimeout naming the member, or the
        project's error that it raised."""
        try:
            return ray.get(reference, timeout=timeout_s)
        except RayActorError as error:
            raise ActorFailed(f"actor {self.name} died: {first_line(error)}") from error
        except GetTimeoutError as error:
            raise RolloutTimeout(f"actor {self.name} gave no answer in {timeout_s} s") from error
        except RayTaskError as error:
            if isinstance(error.cause, RolloutError):
                raise error.cause from error
            raise ActorFailed(f"actor {self.name} failed: {first_line(error.cause)}") from error


def first_line(error: BaseException) -> str:
    """An error in one line; of one that came by Ray, the error that was raised."""
    if isinstance(error, RayTaskError):
        error = error.cause
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
