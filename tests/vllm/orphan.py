"""A process that starts another, prints its number and waits to be killed; see test_tensor_parallel."""

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

from actors.vllm.executor import end_with_parent


def child(watches: bool, ready: Connection) -> None:
    if watches:
        end_with_parent()
    ready.send(None)
    time.sleep(600)  # stands for a collective that waits for a rank that is gone


if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=child, args=(sys.argv[1] == "watches", there), daemon=True)
    process.start()
    here.recv()
    print(process.pid, flush=True)
    process.join()
