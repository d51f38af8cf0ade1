"""New weights from GPU to GPU, by vLLM's own NCCL and CUDA IPC back-ends. Not yet run on a GPU.

    sender = WeightSender(spec, ..., join=)  both ends of the transfer are opened
    begin, as ever                           actors look at names, dtypes, shapes; nothing is touched
    sender.send(tensors, commit)             vLLM sends; the actors receive, between two steps

The learner's process packs and digests on its CPU as for every engine, and sends from its current
CUDA device with vLLM's trainer engine; the actors' workers run vLLM's receiving engine. What the sender
asks of the others (vLLM's `VLLMWeightSyncClient`) goes through the controller. A commit is the whole
update there: every actor starts, receives and finishes it in one go, between two of its steps. By
IPC all of it is on the learner's GPU meanwhile, by NCCL two buffers of vLLM's.

The bytes that arrive are not digested again: what would show a wrong one is the probe of the weights
in force. A transfer that breaks off cannot be undone, so its actor ends, and with it the cluster, by
name: nobody keeps weights that a new actor could start from. vLLM's sender waits without end for an
actor that is gone; here it waits in a thread of its own, and no longer than a limit.

The rendezvous is vLLM's: a store of the sender's at `host`, on a port that is free, without
authentication; only trusted machines may reach that address. NCCL's own sockets are NCCL's
(NCCL_SOCKET_IFNAME).
"""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.v1.engine.llm_engine import LLMEngine

from actors.engine_spec import EngineSpec
from actors.vllm.weight_transfer import put_in_force
from rollout.errors import (
    ActorFailed,
    FleetDead,
    InvalidConfig,
    RolloutError,
    RolloutTimeout,
)

Info = dict[str, Any]
"""A message of vLLM's sender to its receivers."""


# ---- the receiving end --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnnouncedWeights:
    """An update whose names, dtypes and shapes were found good, and which is still with the sender."""

    tensors: Mapping[str, torch.Tensor]
    """On the meta device."""
    version_of_vllm: str
    sent: Info | None = None
    """How to receive it, once it is on its way."""

    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def kernels(self) -> dict[str, str]:
        """Who computes what."""
        return {"blocks": f"vLLM {self.version_of_vllm}"}

    def put_in_force(self, core: LLMEngine, version: str) -> None:
        """Receives it and puts it in force. Raises ActorFailed; the engine is of no use then."""
        assert self.sent is not None, "an update that is not on its way cannot be received"
        try:
            put_in_force(core, self.sent, version)
        except Exception as error:
            raise ActorFailed(
                f"version {version} broke off on its way, and what is in force is neither it nor the "
                f"one before: {error}"
            ) from error


def check_joined(engine: Any) -> None:
    """Raises InvalidConfig for an end of vLLM's, of either side, whose group carries nothing: without
    NCCL vLLM makes one that does not complain."""
    group = getattr(engine, "model_update_group", None)
    if group is not None and group.disabled:
        raise InvalidConfig(
            "weight_transfer=nccl: vLLM's communicator is disabled in this process (no NCCL library, "
            "or VLLM_DISABLE_PYNCCL); install or allow it, or set weight_transfer=shared_memory"
        )


def current_gpu(word: str) -> torch.device:
    """Of this process."""
    if not torch.cuda.is_available():
        raise InvalidConfig(
            f"{word}: this process, which sends the weights, sees no GPU; publish from one that does, "
            "or set weight_transfer=shared_memory"
        )
    return torch.device("cuda", torch.cuda.current_device())


def gpu_of(device: torch.device) -> str:
    """The physical GPU, whatever its number is in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


# ---- the sending end ----------------------------------------------------------------------


class PackedSource(WeightSource):
    """One version's packed tensors, copied to the sender's GPU as they are sent."""

    def __init__(self, device: torch.device) -> None:
        self.tensors: Mapping[str, torch.Tensor] = {}
        self._device = device

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.to(self._device)


class CommitClient:
    """The actors as vLLM's sender asks them; see the module's text. An error ends the sender's wait."""

    def __init__(self) -> None:
        self.ask: Callable[[Info], Any]
        self.fail: Callable[[BaseException], None]
        self.answer: Any = None

    def init_weight_transfer_engine(self, init_info: Info) -> None:
        self._forward(init_info)

    def start_weight_update(self) -> None:
        """Part of `update_weights`."""

    def update_weights(self, update_info: Any) -> None:
        self._forward(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Part of `update_weights`."""

    def _forward(self, info: Info) -> None:
        try:
            self.answer = self.ask(info)
        except BaseException as error:
            self.fail(error)
            raise


class WeightSender:
    """Sends from this process's current CUDA device. Made, it has both ends open: `join` is given what
    each actor needs for its own, `gpus` are the actors'. Raises InvalidConfig for a process without a
    GPU and for GPUs that the back-end cannot use, before anything is opened."""

    def __init__(
        self,
        spec: EngineSpec,
        num_actors: int,
        *,
        host: str,
        gpus: Sequence[str],
        join: Callable[[list[Info]], None],
        limit_s: float,
    ) -> None:
        self._word = f"weight_transfer={spec.weight_transfer}"
        self._spec, self._num_actors, self._limit_s = spec, num_actors, limit_s
        self._device = current_gpu(self._word)
        self._check_gpus(gpus)
        self._source, self._client = PackedSource(self._device), CommitClient()
        self._client.ask = lambda init_info: join(self._of_actors(init_info))
        self._engine: Any = self._bounded(lambda: self._open(host))
        check_joined(self._engine)

    @property
    def is_open(self) -> bool:
        return self._engine is not None

    def _open(self, host: str) -> Any:
        info: TrainerInitInfo = IPCTrainerInitInfo(rank=0)
        if self._spec.weight_transfer == "nccl":
            num_workers = self._num_actors * self._spec.tensor_parallel
            info = NCCLTrainerInitInfo(host, free_port(host), 1 + num_workers, rank=0)
        made = WeightTransferTrainerFactory.trainer_init
        return made(info, client=self._client, source=self._source)

    def _of_actors(self, init_info: Info) -> list[Info]:
        """vLLM counts the ranks of one engine; each actor is one, and the sender is rank 0."""
        ranks = [1 + index * self._spec.tensor_parallel for index in range(self._num_actors)]
        offsets = [{"rank_offset": rank} if "rank_offset" in init_info else {} for rank in ranks]
        return [init_info | offset for offset in offsets]

    def _check_gpus(self, gpus: Sequence[str]) -> None:
        own = gpu_of(self._device)
        others = [gpu for gpu in gpus if gpu != own]
        if self._spec.weight_transfer == "ipc" and others:
            raise InvalidConfig(
                f"{self._word}: the learner is on {own} and the actor on {others[0]}, and memory is "
                "shared on one GPU only; put both on it, or set weight_transfer=nccl"
            )
        if self._spec.weight_transfer == "nccl" and own in gpus:
            raise InvalidConfig(
                f"{self._word}: learner and actor are both on {own}, and NCCL takes one process a GPU; "
                "give the learner one that Ray does not give to actors, or set weight_transfer=ipc"
            )

    def send(self, tensors: Mapping[str, torch.Tensor], commit: Callable[[Info], Any]) -> Any:
        """What `commit` answers, which is given what the actors need to receive the tensors. Raises its
        error, RolloutTimeout, or FleetDead where the sending breaks; the ends are closed then."""
        self._source.tensors, self._client.ask = tensors, commit
        try:
            self._bounded(self._engine.send_weights)
        except RolloutError:
            self.close()
            raise
        finally:
            self._source.tensors = {}
        return self._client.answer

    def _bounded(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, or the error of an actor that was asked meanwhile, at once: vLLM would go
        on waiting for it. The thread is left behind then."""
        outcome: Future[Any] = Future()
        self._client.fail = lambda error: _settle(outcome.set_exception, error)

        def run() -> None:
            try:
                with torch.cuda.device(self._device):
                    result = work()
            except BaseException as error:  # noqa: BLE001  # the caller's, who waits below
                _settle(outcome.set_exception, error)
            else:
                _settle(outcome.set_result, result)

        threading.Thread(target=run, name="weight-sender", daemon=True).start()
        wait([outcome], self._limit_s)
        if not outcome.done():
            raise RolloutTimeout(f"{self._word}: not done after {self._limit_s} s")
        error = outcome.exception()
        if error is None or isinstance(error, RolloutError):
            return outcome.result()
        raise FleetDead(f"{self._word} failed in the sender: {error}") from error

    def close(self) -> None:
        """Leaves the group; the actors leave it when another sender is made."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def free_port(host: str) -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def _settle(settle: Callable[[Any], None], value: Any) -> None:
    with suppress(InvalidStateError):  # the first outcome counts
        settle(value)
