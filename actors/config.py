"""How a rollout cluster is set up; the part of a recipe that `RolloutCluster.launch` takes."""

from dataclasses import dataclass

from actors.engine_spec import EngineSpec
from rollout.engine import InFlight
from rollout.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Engines, fleet, pacing and time limits."""

    engine: EngineSpec
    num_actors: int = 1
    cpus_per_actor: int = 1
    """Cores an actor is given and the threads it computes with."""
    own_cores: bool = False
    """Nothing else computes on the actors' cores: where the engine gains by it (vLLM) their waiting
    threads spin for a moment. Where it is not so, that costs a quarter of the speed."""
    groups_per_step: int = 8
    """Groups the learner takes a step; with max_staleness it sets how much is kept open."""
    max_staleness: int = 1
    """Learner version at hand-over minus oldest version in a sample, at most."""
    allow_short_groups: bool = False
    in_flight: InFlight = "interrupt"
    probe_texts: tuple[str, ...] = (
        "The rain had stopped by the time the train pulled into the station, and the platform was",
        "To solve this we add the two numbers together. First the ones, then the tens, which gives",
    )
    """Fixed texts on which the drift of each publish is measured."""
    run_seed: int = 0
    start_timeout_s: float = 180.0
    """Limit for an actor to load its model."""
    publish_timeout_s: float = 120.0
    request_timeout_s: float = 300.0
    """A request in flight longer than this is aborted and issued once more."""
    health_timeout_s: float = 60.0
    """An actor that does not answer for this long is replaced."""
    max_restarts: int = 8
    """Actors replaced over the cluster's life before it gives up."""
    max_reissues: int = 3
    """Actors that one request may be lost with before it is failed as the likely cause."""
    max_retries: int = 1
    """How often a sample that ended as an error is generated again."""

    @property
    def threads_spin(self) -> bool:
        """See `actors.threads`."""
        return self.own_cores and self.engine.engine == "vllm"

    def __post_init__(self) -> None:
        for name in ("num_actors", "cpus_per_actor", "groups_per_step"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}={getattr(self, name)}: expected at least 1")
        if self.engine.weight_transfer == "ipc" and self.num_actors > 1:
            raise InvalidConfig(
                f"weight_transfer=ipc with num_actors={self.num_actors}: memory is shared on the "
                "learner's GPU, where one actor is; set num_actors=1, or weight_transfer=nccl"
            )
        if self.max_staleness < 0:
            raise InvalidConfig(f"max_staleness={self.max_staleness}: expected at least 0")
