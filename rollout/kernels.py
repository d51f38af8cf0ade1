"""The compiled CPU kernels (csrc/): built once for this machine by its own compiler, then cached.

The library is plain C behind ctypes, which releases the GIL while it runs. It shares torch's OpenMP
threads. Where it cannot be built, `find_kernels` says why, and `TransformerPolicy` runs instead.
`find_library` does the building and caching, for any source file.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from rollout.errors import KernelsUnavailable

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "csrc" / "decoder.cpp"
FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC",
    "-fno-math-errno",
    "-ffp-contract=off",  # else a compiler may fuse one instance of a template and not another
)  # fmt: skip
BUILD_TIMEOUT_S = 300
PHASES = (
    "embed", "norm", "qkv", "rope", "attention", "out", "gate_up", "silu", "down", "head",
)  # fmt: skip
"""Steps of a forward, in the order of decoder.cpp's `Phase`."""
FLOAT32, BFLOAT16, INT8, INT8_INT8 = range(4)
"""Kinds of linear maps, linear.h."""


class Linear(ctypes.Structure):
    """linear.h"""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("row_sum", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    ]


class Block(ctypes.Structure):
    """decoder.cpp"""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, Linear) for name in ("qkv", "out", "gate_up", "down")),
    ]


class Model(ctypes.Structure):
    """decoder.cpp"""

    _fields_ = [
        ("blocks", ctypes.POINTER(Block)),
        ("head", Linear),
        ("embedding", Linear),
        ("norm", ctypes.c_void_p),
        *(
            (name, ctypes.c_int32)
            for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")
        ),
        ("eps", ctypes.c_float),
    ]


class Window(ctypes.Structure):
    """attention.h"""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("first", "length", "start", "unused")),
        ("pages", ctypes.c_void_p),
        ("visible", ctypes.c_void_p),
    ]


class Cache(ctypes.Structure):
    """attention.h"""

    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("pages", ctypes.c_int64),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
    ]


class Batch(ctypes.Structure):
    """decoder.cpp"""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("tokens", "windows", "scored", "threads")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "ids", "positions", "window", "wanted", "cos", "sin", "inputs", "logits", "hidden",
                "seconds",
            )
        ),
    ]  # fmt: skip


class Laws(ctypes.Structure):
    """law.h"""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("logits", "temperatures", "weights", "maxima", "cumulative")
        ),
        *((name, ctypes.c_int64) for name in ("positions", "vocab", "stride")),
        ("threads", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Kernels:
    """The library, loaded."""

    library: ctypes.CDLL
    instructions: str
    inner16: int
    inner8: int
    """Weights of a row that stand side by side under activations of 16 bits, and of 8 (linear.h)."""
    build_s: float
    """What compiling took; 0 when it was cached."""


@lru_cache(maxsize=1)
def find_kernels() -> Kernels:
    """Builds or finds the library. Raises KernelsUnavailable with the reason."""
    return load(*find_library(SOURCE, FLAGS))


def find_library(source: Path, flags: Sequence[str]) -> tuple[Path, float]:
    """The library of a source file, and the seconds that compiling it took, 0 when it was cached.
    What lies beside the file belongs to it. Raises KernelsUnavailable with the reason."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise KernelsUnavailable(
            f"compiled kernels run on Linux on x86-64, this is {platform.system()} on "
            f"{platform.machine()}"
        )
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise KernelsUnavailable("compiled kernels need g++, which is not on the path")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = caches / "exact-rollout" / "kernels" / f"{_key(compiler, source, flags)}.so"
    started = time.monotonic()
    built = build(compiler, path, flags, source)
    return path, time.monotonic() - started if built else 0.0


def _key(compiler: str, source: Path = SOURCE, flags: Sequence[str] | None = None) -> str:
    """Of what decides the machine code: sources, flags, compiler, processor."""
    sha = hashlib.sha256()
    for file in sorted(source.parent.iterdir()):
        sha.update(file.name.encode() + file.read_bytes())
    info = Path("/proc/cpuinfo").read_text().splitlines()
    lines = [line for line in info if line.startswith(("flags", "model name"))]
    sha.update("\n".join((compiler, *(flags or FLAGS), *lines[:2])).encode())
    return sha.hexdigest()[:16]


def build(compiler: str, path: Path, flags: Sequence[str] = FLAGS, source: Path = SOURCE) -> bool:
    """Compiles unless it was done before; one process at a time, the others wait for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return False
            _compile(compiler, path, flags, source)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        why = next((line for line in said if "error" in line), said[-1] if said else "")
        raise KernelsUnavailable(f"compiled kernels: {compiler} failed: {why}") from error
    return True


def _compile(compiler: str, path: Path, flags: Sequence[str], source: Path) -> None:
    """Under another name first, so that a library is whole or not there."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *flags, str(source), "-o", str(made)]
        logger.info("compiling CPU kernels, once: %s", " ".join(command))
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        os.replace(made, path)


def load(path: Path, build_s: float = 0.0) -> Kernels:
    """A library that was built."""
    library = ctypes.CDLL(str(path))
    library.er_scratch.restype = ctypes.c_void_p
    library.er_free.argtypes = [ctypes.c_void_p]
    library.er_linear.argtypes = [
        ctypes.POINTER(Linear), ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
    ]  # fmt: skip
    library.er_linear.restype = None
    library.er_laws.argtypes, library.er_laws.restype = [ctypes.POINTER(Laws)], None
    library.er_instructions.restype = ctypes.c_char_p
    library.er_embed.argtypes = [
        ctypes.POINTER(Model), ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip
    library.er_embed.restype = None
    pointers = [ctypes.POINTER(kind) for kind in (Model, Cache, Batch)]
    for forward in (library.er_forward_float, library.er_forward_bf16):
        forward.argtypes, forward.restype = [*pointers, ctypes.c_void_p], None
    assert library.er_phases() == len(PHASES)
    name = library.er_instructions().decode()
    return Kernels(library, name, library.er_inner16(), library.er_inner8(), build_s)


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Where a contiguous tensor's values lie; whoever passes it on keeps the tensor."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()
