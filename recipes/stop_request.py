"""Ctrl-C and SIGTERM as a wish to stop at the next whole step; a second Ctrl-C stops at once."""

import signal
import sys
from types import FrameType
from typing import Any


class StopRequest:
    """True once somebody asked to stop. A context manager that puts the old handlers back."""

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("stopping after this step; once more stops at once", file=sys.stderr, flush=True)

    def __bool__(self) -> bool:
        return self.asked
