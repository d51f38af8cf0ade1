"""What a learner holds: launch or connect, submit, publish, next_groups, accept.

A thin client of the controller process. Weights are packed and quantised once, here in the learner's
process, and travel through the object store; the controller keeps its own copy of the current
version, so that a replaced actor gets it also when the learner is gone. Or they go from GPU to GPU by
vLLM's own back-ends (`EngineSpec.weight_transfer`), and no copy is kept.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from actors.config import ClusterConfig
from actors.controller import Boundary, RemoteController, Retired, tokenise_probe
from actors.group_queue import RolloutGroup
from actors.member import first_line
from actors.metrics import ClusterSnapshot, Publication
from actors.ray_session import start_ray
from actors.rollout_actor import ActorInfo
from actors.vllm.support import check_version, installed_version
from actors.weights import WeightPublisher, as_tensor, to_arrays
from rollout.errors import FleetDead, RolloutError, RolloutTimeout
from rollout.request import RolloutRequest, RolloutSample
from rollout.sampling import SamplingParams

if TYPE_CHECKING:
    from actors.vllm.pass_through import WeightSender

CONTROL_TIMEOUT_S = 60.0
"""Limit for calls that only read or write the controller's state."""


class RolloutCluster:
    """A running fleet of rollout actors. Use as a context manager, or call `shutdown`."""

    def __init__(self, controller: Any, config: ClusterConfig, *, owned: bool) -> None:
        self._controller, self.config, self._owned = controller, config, owned
        self._publisher = WeightPublisher(config.engine, tokenise_probe(config))
        self._sender: WeightSender | None = None

    @staticmethod
    def launch(config: ClusterConfig, *, name: str | None = None) -> "RolloutCluster":
        """Starts a fleet; returns when every actor has its model. Ray is started if need be.
        With a `name` others may connect to it."""
        start_ray()
        options = {"name": _actor_name(name)} if name else {}
        controller = RemoteController.options(**options).remote(config, tokenise_probe(config))
        cluster = RolloutCluster(controller, config, owned=True)
        try:
            cluster._ask(controller.start.remote(), config.start_timeout_s + CONTROL_TIMEOUT_S)
        except RolloutError:
            cluster.shutdown()
            raise
        return cluster

    @staticmethod
    def connect(name: str, address: str) -> "RolloutCluster":
        """Joins a named cluster that another process keeps up. Raises FleetDead."""
        start_ray(address=address)
        try:
            controller = ray.get_actor(_actor_name(name))
        except ValueError as error:
            raise FleetDead(f"no cluster named {name!r} at {address}") from error
        config: Any = ray.get(controller.config.remote(), timeout=CONTROL_TIMEOUT_S)
        return RolloutCluster(controller, config, owned=False)

    # ---- requests -------------------------------------------------------------------------

    def submit(
        self,
        prompts: Sequence["Prompt"],
        sampling: SamplingParams,
        *,
        group_size: int,
        finished: Sequence[RolloutSample] = (),
    ) -> list[str]:
        """Queues one group of `group_size` rollouts a prompt; the group ids.
        Raises InvalidRequest for the first bad prompt and queues none."""
        groups = [prompt.requests(sampling, group_size, self.config.run_seed) for prompt in prompts]
        self._ask(self._controller.submit.remote(groups, list(finished)))
        return [group[0].group_id for group in groups]

    def next_groups(self, num_groups: int, timeout_s: float = 600.0) -> list[RolloutGroup]:
        """The next whole groups in dispatch order within the staleness bound."""
        call = self._controller.next_groups.remote(num_groups, timeout_s)
        return self._ask(call, timeout_s + CONTROL_TIMEOUT_S)

    def accept(self, groups: Iterable[RolloutGroup]) -> None:
        """An optimiser step has consumed these groups."""
        self._settle(groups, "accepted")

    def filter(self, groups: Iterable[RolloutGroup]) -> None:
        """The learner set these groups aside."""
        self._settle(groups, "filtered")

    def _settle(self, groups: Iterable[RolloutGroup], fate: str) -> None:
        ids = [sample.request.id for group in groups for sample in group.samples]
        self._ask(self._controller.settle.remote(ids, fate))

    def retired(self) -> list[Retired]:
        """Samples that ended stale or failed since the last call; each is told once."""
        return self._ask(self._controller.retired.remote())

    # ---- weights --------------------------------------------------------------------------

    def publish(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        draft: Mapping[str, torch.Tensor] | None = None,
    ) -> Publication:
        """Packs named weights and puts them in force on every actor, with those that draft, `draft`:
        an MTP head or vLLM's draft model (None: the last ones again). Raises InvalidWeights and
        leaves the old version whole."""
        started, limit = time.time(), self._publish_limit_s
        sender = self._open_sender()
        named = list(weights)
        update = self._publisher.pack(version, named, draft)
        told = update if sender is None else update.announced()
        begun = self._controller.begin.remote([ray.put(told)], version)
        reference = self._publisher.reference(named)  # while the actors build theirs
        self._ask(begun, limit)

        def commit(sent: dict[str, Any] | None = None) -> Publication:
            call = self._controller.commit.remote(version, reference, started, sent)
            return self._ask(call, limit)

        return commit() if sender is None else sender.send(update.views(), commit)

    def _open_sender(self) -> "WeightSender | None":
        """What sends weights that do not go through shared memory. Raises InvalidConfig where this
        process cannot."""
        spec, limit = self.config.engine, self._publish_limit_s
        if spec.keeps_weights or (self._sender is not None and self._sender.is_open):
            return self._sender
        check_version(installed_version())
        from actors.vllm.pass_through import WeightSender

        self._sender = WeightSender(
            spec,
            self.config.num_actors,
            host=ray.util.get_node_ip_address(),  # loopback where Ray is on this machine only
            gpus=[gpu for actor in self.actors() for gpu in actor.gpus],
            join=lambda infos: self._ask(self._controller.join.remote(infos), limit),
            limit_s=limit,
        )
        return self._sender

    @property
    def _publish_limit_s(self) -> float:
        calls = 3 * self.config.publish_timeout_s  # commit, tell what is new, take it in
        return self.config.start_timeout_s + calls + CONTROL_TIMEOUT_S

    # ---- what proposers remember ----------------------------------------------------------

    def history(self) -> dict[str, torch.Tensor] | None:
        """What the actors' proposers remember, for `load_history`; None where none remembers.
        Raises RolloutTimeout also when a publish holds it up."""
        boxed = self._ask(self._controller.history.remote())
        if not boxed:
            return None
        return {name: as_tensor(array) for name, array in self._ask(boxed[0]).items()}

    def load_history(self, history: Mapping[str, torch.Tensor]) -> None:
        """Goes on from what `history` gave, after the first publish and before the first submit;
        nothing where no proposer remembers. Raises InvalidConfig for that of another model."""
        arrays, _ = to_arrays(history)
        call = self._controller.load_history.remote([ray.put(arrays)])
        self._ask(call, self.config.publish_timeout_s + CONTROL_TIMEOUT_S)

    # ---- state ----------------------------------------------------------------------------

    def metrics(self) -> ClusterSnapshot:
        """Lifetime sums; see `actors.metrics.metrics_row` for rates between two of them."""
        return self._ask(self._controller.snapshot.remote())

    def actors(self) -> list[ActorInfo]:
        """The actors that serve now."""
        return self._ask(self._controller.actors.remote())

    def boundary(self) -> Boundary:
        """What `restore` needs, with what was retired up to the same moment."""
        return self._ask(self._controller.boundary.remote())

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over fates and clock of a checkpoint; before the first submit."""
        self._ask(self._controller.restore.remote(state))

    def shutdown(self) -> None:
        """Ends the fleet and its controller; a connected client only lets go."""
        if self._sender is not None:
            self._sender.close()
        if not self._owned:
            return
        self._owned = False
        with suppress(FleetDead, RolloutTimeout):  # gone already is what was wanted
            self._ask(self._controller.shutdown.remote(), timeout_s=10.0)
        ray.kill(self._controller)

    def __enter__(self) -> "RolloutCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _ask(self, reference: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        try:
            return ray.get(reference, timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, RolloutError):
                raise error.cause from error
            raise FleetDead(f"the controller failed: {first_line(error.cause)}") from error
        except RayActorError as error:
            raise FleetDead(f"the cluster's controller died: {error}") from error
        except GetTimeoutError as error:
            raise RolloutTimeout(f"the controller gave no answer in {timeout_s} s") from error


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task on its way to becoming a group."""

    group_id: str
    """Used once in a run."""
    prompt_id: str
    prompt_ids: Sequence[int]
    first_sample_index: int = 0
    """Samples this prompt had before in the run: visited again, it draws fresh randomness."""

    def requests(
        self, sampling: SamplingParams, group_size: int, run_seed: int
    ) -> list[RolloutRequest]:
        """The group's members, ids `group/0 .. group/n-1`."""
        return [
            RolloutRequest(
                id=f"{self.group_id}/{member}",
                group_id=self.group_id,
                prompt_id=self.prompt_id,
                sample_index=self.first_sample_index + member,
                prompt_ids=tuple(self.prompt_ids),
                sampling=sampling,
                run_seed=run_seed,
            )
            for member in range(group_size)
        ]


def _actor_name(cluster: str) -> str:
    return f"cluster:{cluster}"
