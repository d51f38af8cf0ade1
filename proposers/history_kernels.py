"""The compiled look-up of a history (csrc/history.cpp) behind ctypes.

It holds Python's lock while it runs, some microseconds, so nobody moves the arrays that it reads.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proposers.history_law import DRAWS, Draw, Options, Reader, Step
from proposers.history_rollouts import PromptRollouts
from rollout.draft import SparseLaw
from rollout.kernels import find_library

SOURCE = Path(__file__).parent / "csrc" / "history.cpp"
FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-shared", "-fPIC",
    "-fno-math-errno", "-ffp-contract=off",
)  # fmt: skip
ROOM = 256
"""Longest draft."""


class _Prompt(ctypes.Structure):
    _fields_ = [
        ("lines", ctypes.c_void_p),
        ("tail", ctypes.c_void_p),
        ("num_lines", ctypes.c_int32),
        ("tail_len", ctypes.c_int32),
    ]


class _Options(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_double) for name in ("decay", "trust", "sharpness", "certain", "least")),
        *(
            (name, ctypes.c_int32)
            for name in ("min_match", "max_match", "max_scanned", "max_votes", "max_ids")
        ),
    ]


class _Reader(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_int64),
        ("noise", ctypes.c_int64),
        ("line", ctypes.c_int32),
        ("draw", ctypes.c_int32),
    ]


@lru_cache(maxsize=1)
def find_history_library() -> ctypes.PyDLL:
    """Builds or finds it. Raises KernelsUnavailable with the reason."""
    path, _ = find_library(SOURCE, FLAGS)
    library = ctypes.PyDLL(str(path))
    pointers = [ctypes.c_void_p] * 4
    library.eh_law.argtypes = [*pointers, ctypes.c_int32, *[ctypes.c_void_p] * 2]
    library.eh_draft.argtypes = [*pointers, *[ctypes.c_int32] * 2, *[ctypes.c_void_p] * 4]
    return library


class CompiledLookUp:
    """As `ReferenceLookUp`. Raises KernelsUnavailable."""

    def __init__(self, options: Options) -> None:
        self._library = find_history_library()
        self._max_match = options.max_match
        named = asdict(options)
        assert named.keys() == {field[0] for field in _Options._fields_}
        self._options = _Options(**named)
        self._prompt, self._reader = _Prompt(), _Reader()
        self._context = (ctypes.c_int32 * (options.max_match + ROOM))()
        self._ids = np.empty(options.max_ids, dtype=np.int64)
        self._probs = np.empty(options.max_ids)
        self._chances = (ctypes.c_double * ROOM)()
        self._num_points = ctypes.c_int32()
        told = (self._prompt, self._options, self._reader, self._context)
        self._told = tuple(map(ctypes.addressof, told))
        self._law = (self._ids.ctypes.data, self._probs.ctypes.data)
        self._drafted = (ctypes.addressof(self._chances), ctypes.addressof(self._num_points))

    def law(
        self, prompt: PromptRollouts, context: Sequence[int], reader: Reader
    ) -> list[tuple[int, float]]:
        length = self._tell(prompt, context, reader, "mode")
        num = self._library.eh_law(*self._told, length, *self._law)
        return list(zip(self._ids[:num].tolist(), self._probs[:num].tolist()))

    def step(
        self,
        prompt: PromptRollouts,
        context: Sequence[int],
        reader: Reader,
        draw: Draw,
        room: int,
    ) -> Step:
        length = self._tell(prompt, context, reader, draw)
        num_ids = self._library.eh_draft(
            *self._told, length, min(room, ROOM), *self._drafted, *self._law
        )
        num_points = self._num_points.value
        points = self._context[length : length + num_points]
        if not num_ids:
            return Step(points, None, self._chances[:num_points])
        law = SparseLaw(
            torch.from_numpy(self._ids[:num_ids].copy()),
            torch.from_numpy(self._probs[:num_ids].copy()),
        )
        return Step(points, law, self._chances[: num_points + 1])

    def _tell(
        self, prompt: PromptRollouts, context: Sequence[int], reader: Reader, draw: Draw
    ) -> int:
        """Fills in the arguments; how many tokens of context there are."""
        told = self._prompt
        told.lines, told.num_lines = prompt.address, prompt.num_lines
        told.tail, told.tail_len = prompt.tail.buffer_info()
        own = reader.own
        self._reader.version, self._reader.noise = reader.version, reader.noise
        self._reader.line = -1 if own is None else own.place
        self._reader.draw = DRAWS.index(draw)
        last: Any = list(context[-self._max_match :])
        self._context[: len(last)] = last
        return len(last)
