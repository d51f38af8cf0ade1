"""A weight update in shared memory, readable by a process that knows its path, gone with its owner.

The file is written as safetensors, unlinked at once and reached through the owner's open descriptor
(/proc/PID/fd/N): the kernel frees it when the owner closes it or dies and the last reader is done, so
nothing is left in /dev/shm whatever ends the processes. Readers map it without a copy and are
processes of the same user on the same machine.
"""

import os
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollout.errors import InvalidWeights
from rollout.packing import digest

SHARED_MEMORY = Path("/dev/shm")


class StagedUpdate:
    """One update's file, open until `close` or until nobody refers to it."""

    def __init__(self, descriptor: int, digest_: str) -> None:
        self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        self.digest = digest_
        self.num_bytes = os.fstat(descriptor).st_size
        self._close = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Frees the memory once the last reader is done; a second call does nothing."""
        self._close()


def write_update(tensors: Mapping[str, torch.Tensor], folder: Path = SHARED_MEMORY) -> StagedUpdate:
    """Writes an update into the memory-backed `folder`, with the digest of its tensors. Raises OSError
    where it does not fit."""
    found = digest(tensors)
    with tempfile.TemporaryDirectory(prefix="exact-rollout-", dir=folder) as private:  # mode 0700
        file = Path(private) / "update.safetensors"
        save_file(dict(tensors), file, metadata={"digest": found})
        file.chmod(0o600)
        return StagedUpdate(os.open(file, os.O_RDONLY), found)


def map_update(path: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """The tensors of an update, over the file's memory (nothing may write to them), and the digest
    that was sent. Raises InvalidWeights for a file that is gone or is no update."""
    try:
        with safe_open(path, framework="pt") as file:
            sent = (file.metadata() or {}).get("digest")
            return {key: file.get_tensor(key) for key in file.keys()}, sent  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InvalidWeights(f"{path}: no weight update: {error}") from error


def read_update(path: Path) -> dict[str, torch.Tensor]:
    """`map_update`, every byte of it looked at. Raises InvalidWeights also for other bytes than were
    sent."""
    tensors, sent = map_update(path)
    if (found := digest(tensors)) != sent:
        raise InvalidWeights(f"{path}: holds digest {found}, sent as {sent}")
    return tensors
