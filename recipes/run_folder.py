"""The folder of one run: what it was, what it did, and where it can go on from.

    config.yaml      resolved config            metrics.jsonl   one row a step (written by the sink)
    passport.json    model, machine, versions   samples.jsonl   one line a sample with a final fate
    summary.json     the closing numbers        report.html     one self-contained page
    checkpoints/step-000012/                    model, optimiser, what the proposer remembers, an
                                                MTP head that is trained and its optimiser
                                                (safetensors), state.json

A checkpoint is written beside its final name and renamed, so there is never half of one. It notes
how long the two logs were; going on from it cuts them back to that, so that steps which will be done
again leave no lines twice.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollout.errors import RunFolderError
from rollout.mtp_weights import save_mtp

LOGS = ("metrics.jsonl", "samples.jsonl")
HISTORY = "history.safetensors"
MTP, MTP_OPTIMISER = "mtp.safetensors", "mtp_optimiser.safetensors"
KEPT_CHECKPOINTS = 2


@dataclass(frozen=True, slots=True)
class SavedHead:
    """An MTP head that is being trained."""

    tensors: Mapping[str, torch.Tensor]
    optimiser: Mapping[str, torch.Tensor]
    salt: str
    """Names the model it belongs to."""


class RunFolder:
    """An open run folder; one process writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = (path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise RunFolderError(
                f"{path}: another process runs into this folder; wait for it or stop it"
            ) from error
        self._samples = (path / "samples.jsonl").open("a")

    @staticmethod
    def create(out: Path, name: str, config_yaml: str) -> "RunFolder":
        """Makes `out/<time>-<name>`. Raises RunFolderError when it exists or cannot be written."""
        path = out / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
        try:
            path.mkdir(parents=True)
            (path / "checkpoints").mkdir()
            (path / "config.yaml").write_text(config_yaml)
        except FileExistsError as error:
            raise RunFolderError(
                f"{path} exists already; resume it with --resume, or use another name"
            ) from error
        except OSError as error:
            raise RunFolderError(
                f"cannot make a run folder in {out}: {error.strerror}; set out= to a folder that "
                "can be written and has room"
            ) from error
        return RunFolder(path)

    @staticmethod
    def resume(path: Path, config_yaml: str) -> tuple["RunFolder", "Checkpoint"]:
        """Opens a run at its last checkpoint, with its config as resolved now. Raises
        RunFolderError when there is none, or another process is at it."""
        names = sorted((path / "checkpoints").glob("step-*"))
        if not names:
            raise RunFolderError(f"{path}: no checkpoint to go on from; start the run again")
        checkpoint = Checkpoint(names[-1])
        folder = RunFolder(path)
        for log, length in checkpoint.state["log_bytes"].items():
            _cut(path / log, length)
        (path / "config.yaml").write_text(config_yaml)
        return folder, checkpoint

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes one file whole. Raises RunFolderError."""
        try:
            partial = self.path / f"{name}.partial"
            partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
            partial.rename(self.path / name)
        except OSError as error:
            raise RunFolderError(f"{self.path / name}: {error.strerror}; free some room") from error

    def add_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Adds keys to a file written before."""
        self.write_json(name, json.loads((self.path / name).read_text()) | dict(content))

    def write_sample(self, line: Mapping[str, Any]) -> None:
        """Appends one sample; flushed, so that what was settled is on disk. Raises RunFolderError."""
        try:
            self._samples.write(json.dumps(line, allow_nan=False) + "\n")
            self._samples.flush()
        except OSError as error:
            raise RunFolderError(
                f"{self._samples.name}: {error.strerror}; free some room"
            ) from error

    def log_bytes(self) -> dict[str, int]:
        """How long the logs are now."""
        return {log: os.path.getsize(self.path / log) for log in LOGS if (self.path / log).exists()}

    def checkpoint(
        self,
        step: int,
        model: Mapping[str, torch.Tensor],
        optimiser: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        history: Mapping[str, torch.Tensor] | None = None,
        head: SavedHead | None = None,
    ) -> None:
        """Writes one checkpoint and removes all but the newest few. Raises RunFolderError.
        `state` holds `log_bytes`, the lengths of the logs it belongs to."""
        folder = self.path / "checkpoints"
        partial = folder / f"partial-{step:06d}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            save_file({k: t.contiguous() for k, t in model.items()}, partial / "model.safetensors")
            save_file(dict(optimiser), partial / "optimiser.safetensors")
            if history is not None:
                save_file(dict(history), partial / HISTORY)
            if head is not None:
                save_mtp(partial / MTP, head.tensors, head.salt)
                save_file(dict(head.optimiser), partial / MTP_OPTIMISER)
            (partial / "state.json").write_text(json.dumps(state))
            final = folder / f"step-{step:06d}"
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
        except (
            OSError,
            SafetensorError,
        ) as error:  # the second is how safetensors tells a full disk
            shutil.rmtree(partial, ignore_errors=True)
            raise RunFolderError(
                f"checkpoint at step {step} could not be written ({error}); earlier ones are whole"
            ) from error
        for old in sorted(folder.glob("step-*"))[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)

    def close(self) -> None:
        self._samples.close()
        self._lock.close()


class Checkpoint:
    """One written checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = json.loads((path / "state.json").read_text())

    def model(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / "model.safetensors")

    def optimiser(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / "optimiser.safetensors")

    def history(self) -> dict[str, torch.Tensor] | None:
        """What the proposer remembered; None for one that remembers nothing, and where no actor was
        left to ask."""
        file = self.path / HISTORY
        return load_file(file) if file.is_file() else None

    def mtp(self) -> Path | None:
        """File of the MTP head; None where none was trained."""
        file = self.path / MTP
        return file if file.is_file() else None

    def mtp_optimiser(self) -> dict[str, torch.Tensor]:
        """Of that head."""
        return load_file(self.path / MTP_OPTIMISER)


def _cut(log: Path, length: int) -> None:
    """Shortens a log to what it was; a shorter one has lost lines and cannot be gone on from."""
    size = log.stat().st_size if log.exists() else 0
    if size < length:
        raise RunFolderError(f"{log} has {size} bytes, the checkpoint saw {length}: lines are lost")
    if size:
        os.truncate(log, length)
