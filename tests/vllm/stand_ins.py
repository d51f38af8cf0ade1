"""What vLLM's NCCL and IPC back-ends call of NCCL and CUDA, stood in for: a store carries broadcasts,
files carry handles. Everything else of them is real, the rendezvous too."""

import itertools
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import ipc_engine, packed_tensor
from vllm.v1.worker.cpu import shm  # noqa: F401  # vLLM's own stand-ins come first, and stay

from actors.vllm import pass_through, worker

SENDER = torch.device("cpu")
"""The learner's GPU, by identity."""


class StoreCommunicator:
    """Of PyNcclCommunicator what the back-ends call: a broadcast ends when every rank has it."""

    disabled = False
    made: list["StoreCommunicator"] = []  # noqa: RUF012

    def __init__(self, group: StatelessProcessGroup, device: int) -> None:
        self.group: Any = group
        self._count = itertools.count()
        self.made.append(self)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        store, key = self.group.store, f"broadcast/{next(self._count)}"
        if self.group.rank == src:
            store.set(key, tensor.contiguous().view(torch.uint8).numpy().tobytes())
            store.wait([f"{key}/{rank}" for rank in range(1, self.group.world_size)])
            return
        sent = bytearray(store.get(key))
        tensor.view(torch.uint8).copy_(torch.frombuffer(sent, dtype=torch.uint8))
        store.set(f"{key}/{self.group.rank}", b"")

    def destroy(self) -> None:
        self.group = None  # the sender's has the store


class Stream:
    """Of torch.cuda.Stream."""

    def synchronize(self) -> None:
        pass


def reduce_tensor(tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
    """A handle of seven parts like CUDA's, the last one the device's number."""
    descriptor, name = tempfile.mkstemp(prefix="handle-", dir=os.environ[HANDLES])
    os.close(descriptor)
    torch.save(tensor, name)
    return None, (name, *range(5), 0)


def rebuild_cuda_tensor(name: str, *rest: object) -> torch.Tensor:
    opened: torch.Tensor = torch.load(Path(name))
    return opened


HANDLES = "TEST_HANDLES"
"""Names the folder that handles lie in."""
Set = Callable[[Any, str, Any], None]


def install(replace: Set = setattr, *, one_gpu: bool = False) -> None:
    """In this process; learner and actors compute on one GPU or on two."""
    replace(pass_through, "current_gpu", lambda word: SENDER)
    if not one_gpu:
        replace(pass_through, "gpu_of", lambda device: f"GPU-{int(device is not SENDER)}")
        replace(worker, "gpu_of", lambda device: "GPU-1")
    replace(pynccl, "PyNcclCommunicator", StoreCommunicator)
    replace(packed_tensor, "_get_streams", lambda device, num: tuple(Stream() for _ in range(num)))
    replace(ipc_engine, "reduce_tensor", reduce_tensor)
    replace(ipc_engine, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    replace(torch.accelerator, "current_device_index", lambda: 0)
    replace(torch.cuda, "device", lambda device: nullcontext())
    replace(torch.cuda, "stream", lambda stream: nullcontext())
    replace(torch.cuda, "current_stream", Stream)
    replace(torch.cuda, "ipc_collect", lambda: None)
    replace(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-0"))


def install_in_worker(worker: object) -> None:
    """What a worker that is a process of its own is asked to call."""
    install()


def install_in_ray() -> None:
    """What Ray calls in every process that it starts."""
    install()
