#!/usr/bin/env python
"""Do a learner and an actor on one machine cost each other anything beyond the cores they have?

    python scripts/bench_sharing.py [--repeats 3] [--seconds 20] [--json]

Regime: SmolLM2-135M; an actor's engine (INT8 W8A8, 32 rows, 64 new tokens, T=1) and the GRPO learner on
recorded groups, a process and one thread each, with the threads' environment of a run. Each works
alone, then both together, in turn. Printed: tokens/s and learner tokens/s alone and together, and the
throughput together as a share of the sum of both alone (the mean of the two shares). The goal is 0.85.
What is left is the machine's: shared memory bandwidth, and cores that may be halves of one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from actors.threads import thread_environment

GOAL = 0.85
PROMPT_LEN, NEW_TOKENS, GROUP, ROWS = 30, 64, 8, 32
READY_TIMEOUT_S = 180


def actor() -> Any:
    """A function that generates one batch and returns its tokens."""
    from actors.engine_spec import EngineSpec, make_engine, pack_folder
    from recipes.smollm2 import model_folder
    from rollout.engine import run_to_end

    folder = model_folder("smollm2")
    spec = EngineSpec(str(folder), format="int8_w8a8", proposer="none", context_len=128)
    engine = make_engine(spec)
    engine.load(engine.prepare(pack_folder(spec)), version=0, digest="bench")

    def work() -> int:
        requests = [request(prompt, i) for prompt in range(ROWS // GROUP) for i in range(GROUP)]
        samples = run_to_end(engine, requests, max_rounds=1000)
        return sum(len(sample.token_ids) for sample in samples)

    return work


def learner() -> Any:
    """A function that takes one optimiser step and returns the tokens it trained on."""
    from actors.group_queue import RolloutGroup
    from recipes.config import LearnerConfig
    from recipes.grpo import Learner
    from recipes.smollm2 import model_folder
    from rollout.request import RolloutSample, SpecCounters, Timings

    made = Learner(model_folder("smollm2"), LearnerConfig(), temperature=1.0)
    groups = []
    for prompt in range(2):
        samples = [
            RolloutSample(
                request=request(prompt, i),
                token_ids=tuple(range(100 + i, 100 + i + NEW_TOKENS)),
                logprobs=(-3.0,) * NEW_TOKENS,
                logprobs_full=(-3.0,) * NEW_TOKENS,
                kept_mass=(1.0,) * NEW_TOKENS,
                finish_reason="length",
                finish_detail="",
                version_spans=((0, NEW_TOKENS),),
                weights_digest="bench",
                mode="quantised",
                counters=SpecCounters(),
                timings=Timings(),
            )
            for i in range(GROUP)
        ]
        groups.append(RolloutGroup(f"g{prompt}", f"p{prompt}", tuple(samples), GROUP))
    rewards = [[float(i % 2) for i in range(GROUP)] for _ in groups]

    def work() -> int:
        made.step(groups, rewards)
        return len(groups) * GROUP * NEW_TOKENS

    return work


def request(prompt: int, index: int) -> Any:
    from rollout.request import RolloutRequest
    from rollout.sampling import SamplingParams

    ids = tuple(range(1000 + prompt, 1000 + prompt + PROMPT_LEN))
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return RolloutRequest(f"{prompt}/{index}", f"g{prompt}", f"p{prompt}", index, ids, sampling)


def serve(role: str) -> None:
    """Answers every line of seconds with {"tokens", "seconds"} of as many whole pieces of work."""
    import torch

    torch.set_num_threads(1)
    work = {"actor": actor, "learner": learner}[role]()
    work()
    print("ready", flush=True)
    for line in sys.stdin:
        started, tokens = time.perf_counter(), 0
        while time.perf_counter() - started < float(line):
            tokens += work()
        spent = time.perf_counter() - started
        print(json.dumps({"tokens": tokens, "seconds": spent}), flush=True)


class Worker:
    """One of the two, in a process of its own."""

    def __init__(self, role: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--role", role],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | thread_environment(1),
        )  # fmt: skip
        assert self._line() == "ready"

    def start(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def rate(self) -> float:
        answer = json.loads(self._line())
        return float(answer["tokens"] / answer["seconds"])

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"the {self.process.args} ended: {self.process.poll()}"
        return line

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=READY_TIMEOUT_S)


def measure(repeats: int, seconds: float) -> dict[str, Any]:
    workers = {role: Worker(role) for role in ("actor", "learner")}
    alone: dict[str, list[float]] = {role: [] for role in workers}
    together: dict[str, list[float]] = {role: [] for role in workers}
    for repeat in range(repeats):
        for role, worker in workers.items():
            worker.start(seconds)
            alone[role].append(worker.rate())
        for worker in workers.values():
            worker.start(seconds)
        for role, worker in workers.items():
            together[role].append(worker.rate())
        print(f"repeat {repeat + 1} of {repeats} done", file=sys.stderr)
    for worker in workers.values():
        worker.close()
    kept = {
        role: statistics.median(t / a for t, a in zip(together[role], alone[role]))
        for role in workers
    }
    return {
        "alone_tok_s": {role: statistics.median(rates) for role, rates in alone.items()},
        "together_tok_s": {role: statistics.median(rates) for role, rates in together.items()},
        "kept": kept,
        "share_of_sum": statistics.mean(kept.values()),
        "goal": GOAL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of work a measurement")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--role", choices=("actor", "learner"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        serve(arguments.role)
        return
    result = measure(arguments.repeats, arguments.seconds)
    for role, kept in result["kept"].items():
        alone, together = result["alone_tok_s"][role], result["together_tok_s"][role]
        print(f"{role:8} alone {alone:7.1f} tokens/s, together {together:7.1f}: {kept:.2f}")
    met = "met" if result["share_of_sum"] >= GOAL else "NOT met"
    print(f"together {result['share_of_sum']:.2f} of the sum of both alone; goal {GOAL}: {met}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
