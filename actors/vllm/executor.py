"""vLLM's workers as processes of this machine, one for each rank of a model that is split over them.

vLLM's own executor, and beyond it: the workers share the cores that this process was given, instead of
taking as many each; and where one of them dies, fails or falls silent the engine fails by name, within
a stated time. What a worker raises arrives here as text only.

A worker can be stuck in a collective, waiting for a rank that is gone, where neither a signal nor the
end of its queue reaches it; so it ends with the process that started it (`end_with_parent`).
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

import torch
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from rollout.errors import ActorFailed

ANSWER_S = 600.0
"""Limit for what vLLM sets none for, its start included; for a step it is
VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS."""
END_S = 30.0
"""For a worker to end, before it is killed."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class RankExecutor(MultiprocExecutor):
    """Raises ActorFailed for workers that are of no use any more; the engine must be replaced."""

    def _init_executor(self) -> None:
        with shared_threads(self.parallel_config.world_size):
            super()._init_executor()

    def collective_rpc(
        self, method: Any, timeout: float | None = None, *positional: Any, **named: Any
    ) -> Any:
        answer = self._named(
            lambda: super(RankExecutor, self).collective_rpc(
                method, ANSWER_S if timeout is None else timeout, *positional, **named
            )
        )
        if named.get("non_block"):
            respond = answer.get_response
            answer.get_response = lambda: self._named(respond)
        return answer

    def shutdown(self) -> None:
        """Returns when no worker is left; vLLM's own, which a watching thread may have begun, does not
        wait for those that it kills."""
        super().shutdown()
        for worker in getattr(self, "workers", ()):
            worker.proc.join(END_S)
            if worker.proc.is_alive():
                worker.proc.kill()
                worker.proc.join()

    def _named(self, ask: Callable[[], Any]) -> Any:
        try:
            if self.is_failed:
                raise RuntimeError("they were ended before")
            return ask()
        except (RuntimeError, TimeoutError, AssertionError) as error:
            raise ActorFailed(f"vLLM's workers: {error}{self._ended()}") from error

    def _ended(self) -> str:
        ended = [
            f"rank {worker.rank} (process {worker.proc.pid}) ended with {worker.proc.exitcode}"
            for worker in self.workers
            if worker.proc.exitcode is not None
        ]
        return f"; {', '.join(ended)}" if ended else ""


@contextmanager
def shared_threads(num_workers: int) -> Iterator[None]:
    """Processes that are started meanwhile have their share of this one's threads each."""
    before = {name: os.environ.get(name) for name in THREADS}
    share = max(1, torch.get_num_threads() // num_workers)
    os.environ.update(dict.fromkeys(THREADS, str(share)))
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def end_with_parent() -> None:
    """Lets this process end with the one that started it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker of several is a process of its own"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch, name="end-with-parent", daemon=True).start()
