"""`rollout doctor`: is this installation able to run, and what will be slow on this machine?"""

import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from quant.linear import has_bf16_gemm, int_mm_min_tokens
from recipes.smollm2 import INSTALL, PACKAGE, cache_folder
from rollout.errors import KernelsUnavailable
from rollout.kernels import find_kernels

FOLDERS = ("rollout", "actors", "proposers", "quant", "recipes")
PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    needed: bool
    """Nothing runs without it."""
    text: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """Looks at everything; builds the CPU kernels if this is the first use of them."""
    return [*map(_folder, FOLDERS), *(check() for check in CHECKS)]


def _folder(name: str) -> Finding:
    """The project's folders are import names; another module may stand before one."""
    spec = importlib.util.find_spec(name)
    places = (
        [str(p) for p in spec.submodule_search_locations or [spec.origin or "?"]] if spec else []
    )
    ours = str(PROJECT / name) in places
    where = "this project's" if ours else f"shadowed by {places[0] if places else 'nothing'}"
    return Finding(f"import {name}", ours, True, where)


def _model() -> Finding:
    if (cache_folder() / "config.json").is_file():
        return Finding("SmolLM2", True, False, f"converted in {cache_folder()}")
    if importlib.util.find_spec(PACKAGE):
        return Finding("SmolLM2", True, False, "package is there, converted at first use")
    return Finding("SmolLM2", False, False, f"the quickstart needs it: {INSTALL}")


def _kernels() -> Finding:
    try:
        kernels = find_kernels()
    except KernelsUnavailable as error:
        return Finding(
            "kernels", False, False, f"{error}; torch runs instead, several times slower"
        )
    how = f"compiled in {kernels.build_s:.0f} s" if kernels.build_s else "compiled before"
    return Finding("kernels", True, False, f"{kernels.instructions}, {how}")


def _bf16() -> Finding:
    text = "bfloat16 GEMM" if has_bf16_gemm() else "no bfloat16 GEMM: float32 instead"
    return Finding("compute dtype", has_bf16_gemm(), False, text)


def _cores() -> Finding:
    num = len(os.sched_getaffinity(0))
    return Finding("cores", num >= 2, False, f"{num}; an actor and a learner want one each")


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").exists() else 0.0
    return Finding(
        "shared memory", free > 1, False, f"{free:.1f} GiB free; weights travel through it"
    )


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    return Finding("disk", free > 5, False, f"{free:.0f} GiB free; a SmolLM2 checkpoint takes 1.6")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", False, False, "none; not needed")
    multiplies_int8 = int_mm_min_tokens(torch.device("cuda"), (8, 8)) is not None
    text = (
        f"{torch.cuda.get_device_name()}; with model.device=cuda decode rounds run as CUDA graphs, "
        f"matrices as bfloat16 GEMM, those of W8A8 as "
        f"{'torch._int_mm' if multiplies_int8 else 'float32 GEMM'}; not run on a GPU yet: check "
        "it with scripts/check_cuda.py"
    )
    return Finding("GPU", True, False, text)


def _wandb() -> Finding:
    found = importlib.util.find_spec("wandb") is not None
    return Finding("wandb", found, True, "installed" if found else "pip install wandb")


CHECKS: Sequence[Callable[[], Finding]] = (
    _model, _cores, _kernels, _bf16, _gpu, _shared_memory, _disk, _wandb,
)  # fmt: skip


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """One line a finding."""
    console = console or Console()
    for finding in findings:
        mark = "ok  " if finding.ok else "FAIL" if finding.needed else "note"
        console.print(f"{mark}  {finding.name}: {finding.text}", markup=False, highlight=False)
