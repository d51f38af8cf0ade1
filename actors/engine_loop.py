"""An engine that runs in a thread of its own: others hand it work and take what is finished.

The engine belongs to the loop's thread. Everything that comes in waits in an inbox and is applied
between two rounds; this is what makes a weight swap fall between rounds.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from rollout.engine import Engine, InFlight
from rollout.errors import RolloutTimeout
from rollout.request import RolloutRequest, RolloutSample, SpecCounters

Answer = TypeVar("Answer")

TELL_EVERY_S = 0.25
"""How old the sums and the explanation of a report may be while no sample ends: working them out takes
as long as planning a round."""


@dataclass(frozen=True, slots=True)
class LoopReport:
    """What has happened since the last report, and where the engine stands."""

    samples: tuple[RolloutSample, ...]
    counters: SpecCounters
    """Lifetime sums, rows in flight included."""
    gauges: dict[str, float]
    version: int | None
    explanation: str
    """Why the last round drafted as much as it did."""


class EngineLoop:
    """Steps an engine until stopped. A failure of the engine is raised by every later call."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._finished: list[RolloutSample] = []
        self._status = (SpecCounters(), dict[str, float](), engine.version, "")
        self._told_s = -math.inf
        self._swapped: Future[None] | None = None
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._thread.start()

    # ---- the loop's thread ----------------------------------------------------------------

    def _run(self) -> None:
        # A new thread's OpenMP has every core until torch is first asked: a step that began with one
        # number and ends with another is an error of vLLM's attention.
        torch.get_num_threads()
        try:
            while self._take_inbox():
                samples = self._engine.step()
                self._after_round(samples)
        except BaseException as failure:  # noqa: BLE001  # a thread has no caller: `_check` raises
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _take_inbox(self) -> bool:
        """Waits for work and applies what came in; False when it is time to stop."""
        with self._changed:
            while not (self._inbox or self._stopping or self._has_work()):
                self._changed.wait()
            inbox, self._inbox = self._inbox, []
        for action in inbox:
            action()
        return not self._stopping

    def _has_work(self) -> bool:
        ready = self._engine.version is not None and self._engine.num_unfinished > 0
        return ready or self._engine.load_is_due

    def _after_round(self, samples: list[RolloutSample]) -> None:
        engine = self._engine
        with self._changed:
            self._finished += samples
            swapped = self._swapped is not None and not engine.load_is_due
            if samples or swapped or time.monotonic() > self._told_s + TELL_EVERY_S:
                gauges = dict(engine.gauges())
                self._status = (engine.counters(), gauges, engine.version, engine.explain())
                self._told_s = time.monotonic()
            if self._swapped is not None and swapped:
                self._swapped.set_result(None)
                self._swapped = None
            self._changed.notify_all()

    # ---- callers' threads -----------------------------------------------------------------

    def _put(self, action: Callable[[], None]) -> None:
        with self._changed:
            self._check()
            self._inbox.append(action)
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Raises InvalidRequest for the first bad one, here and not in the loop."""
        self._engine.check(requests)
        self._put(lambda: self._engine.submit(requests))

    def abort(self, request_ids: Sequence[str]) -> None:
        def abort() -> None:
            samples = self._engine.abort(request_ids)
            with self._changed:
                self._finished += samples
                self._changed.notify_all()

        self._put(abort)

    def call(self, work: Callable[[], Answer], timeout_s: float) -> Answer:
        """Does something in the loop's thread between two rounds, so that the process never computes
        with more threads than it has cores; its answer, or its error, here. Raises RolloutTimeout."""
        answer: Future[Answer] = Future()

        def do() -> None:
            try:
                answer.set_result(work())
            except Exception as error:  # noqa: BLE001  # the caller's, not the loop's
                answer.set_exception(error)

        self._put(do)
        try:
            return answer.result(timeout_s)
        except FutureTimeout as error:
            self._check()
            raise RolloutTimeout(f"no round ended within {timeout_s} s") from error

    def load(
        self, prepared: Any, *, version: int, digest: str, in_flight: InFlight, timeout_s: float
    ) -> None:
        """Returns once the weights are in force. Raises RolloutTimeout."""
        swapped: Future[None] = Future()

        def begin() -> None:
            self._swapped = swapped
            self._engine.load(prepared, version=version, digest=digest, in_flight=in_flight)

        self._put(begin)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not swapped.done():
                self._check()
                if not self._changed.wait(deadline - time.monotonic()):
                    raise RolloutTimeout(f"version {version} not in force after {timeout_s} s")

    def collect(self, timeout_s: float) -> LoopReport:
        """Finished samples; waits up to `timeout_s` for the first one."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._finished and (left := deadline - time.monotonic()) > 0:
                self._check()
                self._changed.wait(left)
            self._check()
            samples, self._finished = tuple(self._finished), []
            return LoopReport(samples, *self._status)

    def stop(self, timeout_s: float = 10.0) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
