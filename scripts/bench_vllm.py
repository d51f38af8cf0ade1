#!/usr/bin/env python
"""vLLM with this project's plug-in and an adaptive draft length, against plain sampling by vLLM.

    python scripts/bench_vllm.py [--batches 1,8,32] [--tokens 64] [--repeats 3] [--history 16]
        [--dtype bfloat16] [--model smollm2] [--quick] [--json]

Run by an interpreter that has vLLM. Three engines on the same weights live in one process, each with a
cache of its own, hold the same prompts at the same time and take turns of as many tokens as `TURN`
plain steps give, so that a machine whose speed drifts within a second is as fast for all of them. An
engine is up to a per cent faster than one that was made before it, for as long as the process lasts, so
there are two of each, made in opposite order, for every other repeat:

    controller  our plug-in with history_sampled and the adaptive draft length
    plug_in     our plug-in, nobody drafts
    vllm        vLLM as it is: its own sampler, no plug-in, no log-probabilities asked for

Regime: SmolLM2-135M-Instruct, the prompts of `record_rollouts.py` (sums, word problems, open
questions), T=1, top-p 1, a fixed number of new tokens a row. The proposer knows `--history` earlier
rollouts of each prompt by the very weights, drawn with other seeds, and forgets before every repeat
what the repeat before it taught. Batches of fewer than `POOL` rows take their prompts from so many in
turn, and have more repeats. Prompts are outside the clock: it runs from every row's first token to the
last row's last one, which charges the controller with rows that end late; `full_tok_s` counts the turns
in which nobody had ended. The ratio that counts is against the faster of the two plain engines, all
tokens over all seconds; its error is the standard error over repeats. Ratios by CPU seconds of this
process, waiting threads included, stand beside those by the clock. What vLLM compiles is left
uncompiled in all three, as our plug-in runs it on a CPU, unless `--compiled` adds an engine that is: it
counts as plain then.

Before anything is timed the recorded log-probabilities of rows that were drafted for have to be those
of a forward of their own (vLLM's probe); else the exit code is 1. Not measured: prompts, arrivals,
vLLM in processes of its own (`bench_engine.py` has it), GPUs.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Before torch loads. Where waiting threads sleep, vLLM's steps take 1.6 times as long.
for _name, _value in {
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    "OMP_WAIT_POLICY": "ACTIVE",
    "GOMP_SPINCOUNT": "100000",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

from actors.vllm.support import INSTALL

if importlib.util.find_spec("vllm") is None:
    sys.exit(f"bench_vllm: {sys.executable} has no vLLM; {INSTALL}")

import torch
from vllm import SamplingParams as VllmSamplingParams
from vllm.sampling_params import RequestOutputKind

from actors.engine_spec import EngineSpec, pack_folder
from actors.vllm.engine import VllmEngine
from actors.vllm.launch import engine_args, start
from quant.linear import has_bf16_gemm
from recipes.passport import machine, project_state, versions
from recipes.smollm2 import model_folder
from rollout.checkpoint import read_tokenizer
from rollout.engine import run_to_end
from rollout.packing import digest
from rollout.request import RolloutRequest, RolloutSample, SpecCounters
from rollout.sampling import SamplingParams
from scripts.bench_contenders import Prompts, Setting
from scripts.bench_engine import fill_in, make_tell, own_stdout, rotated
from scripts.bench_exact import Inexact
from scripts.record_rollouts import make_prompts

FULL = {"batches": "1,8,32", "tokens": 64, "repeats": 4, "history": 16}
QUICK = {"batches": "1,2", "tokens": 8, "repeats": 1, "history": 2}
TURN = 8
"""Steps of a plain engine before the next one's turn."""
POOL = 8
CONTROLLER, PLUG_IN, VLLM, COMPILED = "controller", "plug_in", "vllm", "vllm_compiled"
CHECK_RUNS = 16
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of a mean |error| of log-probabilities, nats: forwards of other shapes round differently."""


class Contender(Protocol):
    """An engine that takes turns."""

    def begin(self, prompts: Prompts, num_tokens: int, seed: int) -> None:
        """Takes the prompts in and runs them; every row has one token then."""
        ...

    def step(self) -> None: ...

    @property
    def emitted(self) -> int:
        """Tokens since `begin`, one a row there included."""
        ...

    @property
    def num_live(self) -> int:
        """Rows that are not finished."""
        ...


class Ours:
    """The plug-in, with a proposer or without."""

    def __init__(self, spec: EngineSpec) -> None:
        self.engine = VllmEngine(spec)
        packed = pack_folder(spec)
        self.engine.load(
            self.engine.prepare(packed), version=0, digest=digest(packed), in_flight="interrupt"
        )
        self.engine.step()
        self.samples: list[RolloutSample] = []
        self._before = 0

    def begin(self, prompts: Prompts, num_tokens: int, seed: int) -> None:
        self.samples, self._before = [], self.engine.counters().emitted
        self.engine.submit(requests_for(prompts, num_tokens, seed))
        self.step()

    def step(self) -> None:
        self.samples += self.engine.step()

    @property
    def emitted(self) -> int:
        return self.engine.counters().emitted - self._before

    @property
    def num_live(self) -> int:
        return self.engine.num_unfinished


class Stock:
    """vLLM as it is."""

    def __init__(self, spec: EngineSpec, *, compiled: bool) -> None:
        arguments = engine_args(replace(spec, proposer="none"))
        arguments.worker_extension_cls, arguments.weight_transfer_config = "", None
        arguments.enforce_eager = not compiled
        self._core = start(arguments)
        self.num_live, self.emitted = 0, 0

    def begin(self, prompts: Prompts, num_tokens: int, seed: int) -> None:
        params = VllmSamplingParams(
            temperature=1.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for index, ids in enumerate(prompts):
            self._core.add_request(f"{seed}/{index}", {"prompt_token_ids": list(ids)}, params)
        self.num_live, self.emitted = len(prompts), 0
        self.step()

    def step(self) -> None:
        self.emitted += self.num_live  # one token a row
        self.num_live -= sum(output.finished for output in self._core.step())


def requests_for(
    prompts: Prompts, num_tokens: int, seed: int, *, num_samples: int = 1
) -> list[RolloutRequest]:
    sampling = SamplingParams(max_new_tokens=num_tokens)
    return [
        RolloutRequest(f"{p}/{s}", f"g{p}", f"p{p}", s, tuple(ids), sampling, run_seed=seed)
        for p, ids in enumerate(prompts)
        for s in range(num_samples)
    ]


# ---- measuring ----------------------------------------------------------------------------


@dataclass(slots=True)
class Clocked:
    """One contender in one repeat."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    """Of all threads of the process."""
    num_steps: int = 0
    num_tokens: int = 0
    full_s: float = 0.0
    """Of the turns at whose end every contender still had all of its rows."""
    full_tokens: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of the plug-in's own by what they went to."""


def in_turns(
    contenders: Mapping[str, Contender], prompts: Prompts, num_tokens: int, seed: int, turn: int
) -> dict[str, Clocked]:
    """The same prompts by all contenders, in an order that rotates."""
    names, taken = list(contenders), {name: Clocked() for name in contenders}
    for contender in contenders.values():
        contender.begin(prompts, num_tokens, seed)
        got = contender.emitted
        assert got == len(prompts), f"{got} tokens of {len(prompts)} prompts, which one step runs"
    before = {name: phases_of(contender) for name, contender in contenders.items()}
    goal, due = len(prompts) * num_tokens, len(prompts)
    while due < goal:
        due = min(due + TURN * len(prompts), goal)
        turn += 1
        turns = {
            name: _take_turn(contenders[name], taken[name], due) for name in rotated(names, turn)
        }
        if all(contender.num_live == len(prompts) for contender in contenders.values()):
            for name, (num, seconds) in turns.items():
                taken[name].full_tokens += num
                taken[name].full_s += seconds
    for name, contender in contenders.items():
        now = phases_of(contender)
        taken[name].phases = {key: now[key] - before[name][key] for key in now}
    return taken


def _take_turn(contender: Contender, clocked: Clocked, due: int) -> tuple[int, float]:
    """Steps until so many tokens are there; those and the seconds that were added."""
    emitted, seconds = contender.emitted, clocked.seconds
    while contender.emitted < due:
        began, cpu_before = time.perf_counter(), time.process_time()
        contender.step()
        clocked.seconds += time.perf_counter() - began
        clocked.cpu_s += time.process_time() - cpu_before
        clocked.num_steps += 1
    num = contender.emitted - emitted
    clocked.num_tokens += num
    return num, clocked.seconds - seconds


def phases_of(contender: Contender) -> dict[str, float]:
    if not isinstance(contender, Ours):
        return {}
    gauges = contender.engine.gauges()
    return {key: gauges[key] for key in gauges if key.startswith("seconds/")}


@dataclass(slots=True)
class Cell:
    """One batch size."""

    batch: int
    num_tokens: int
    runs: dict[str, list[Clocked]] = field(default_factory=dict)
    """Contender -> one entry a repeat."""
    counters: SpecCounters = field(default_factory=SpecCounters)
    """Of the controller."""

    def tok_s(self, name: str) -> float:
        runs = self.runs[name]
        return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)

    def full_tok_s(self, name: str) -> float | None:
        """While every row is there; None where that was never so for a turn."""
        seconds = sum(run.full_s for run in self.runs[name])
        return sum(run.full_tokens for run in self.runs[name]) / seconds if seconds else None

    @property
    def plain(self) -> str:
        """The faster plain engine."""
        return max((name for name in self.runs if name != CONTROLLER), key=self.tok_s)

    def versus(self, name: str) -> float:
        return self.tok_s(CONTROLLER) / self.tok_s(name)

    def error(self, name: str) -> float | None:
        """Standard error over repeats; None of one."""
        pairs = zip(self.runs[CONTROLLER], self.runs[name])
        each = [other.seconds / ours.seconds for ours, other in pairs]
        return statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None

    def cpu_ratio(self, name: str) -> float:
        ours, other = (sum(run.cpu_s for run in self.runs[n]) for n in (CONTROLLER, name))
        return other / ours

    def to_json(self) -> dict[str, Any]:
        others = [name for name in self.runs if name != CONTROLLER]
        return {
            "tok_s": {name: self.tok_s(name) for name in self.runs},
            "full_tok_s": {name: self.full_tok_s(name) for name in self.runs},
            "plain": self.plain,
            "vs": {name: self.versus(name) for name in others},
            "vs_error": {name: self.error(name) for name in others},
            "vs_cpu": {name: self.cpu_ratio(name) for name in others},
            "repeats": len(self.runs[CONTROLLER]),
            "steps": {name: sum(run.num_steps for run in runs) for name, runs in self.runs.items()},
            "step_ms": {
                name: 1e3 * sum(r.seconds for r in runs) / sum(r.num_steps for r in runs)
                for name, runs in self.runs.items()
            },
            "phase_ms": {
                name: {
                    key.removeprefix("seconds/"): 1e3
                    * sum(r.phases[key] for r in runs)
                    / sum(r.num_steps for r in runs)
                    for key in runs[0].phases
                }
                for name, runs in self.runs.items()
            },
            "acceptance_rate": self.counters.acceptance_rate,
            "tokens_per_target_step": self.counters.tokens_per_target_step,
            "drafted": self.counters.drafted,
            "verified": self.counters.verified,
        }


def measure(
    sets: Sequence[Mapping[str, Contender]],
    prompts: Prompts,
    batch: int,
    *,
    num_tokens: int,
    num_earlier: int,
    repeats: int,
    tell: Callable[[str], None],
) -> Cell:
    """One batch size, over prompts in turn, the sets of contenders in turn. A run of each before the
    repeats is not counted: draft lengths learn prices in it."""
    pool, controllers = prompts[: max(batch, POOL)], [controller_of(one) for one in sets]
    tell(f"B={batch}: recording {num_earlier} rollouts a prompt")
    first = controllers[0].engine
    first.renew(speculative=True)
    run_to_end(first, requests_for(pool, num_tokens, seed=0, num_samples=num_earlier))
    assert first.memory is not None, "history remembers"
    earlier = first.memory.export()
    cell = Cell(batch, num_tokens, {name: [] for name in sets[0]})
    for repeat in range(-len(sets), repeats):
        tell(f"B={batch}: " + (f"repeat {repeat + 1}/{repeats}" if repeat >= 0 else "warming up"))
        contenders, controller = (of[repeat % len(sets)] for of in (sets, controllers))
        controller.engine.renew(speculative=True)
        controller.engine.memory.merge(earlier)
        chosen = rotated(pool, batch * repeat)[:batch]
        taken = in_turns(contenders, chosen, num_tokens, 1 + len(sets) + repeat, repeat)
        if repeat < 0:
            continue
        for name, clocked in taken.items():
            cell.runs[name].append(clocked)
        for sample in controller.samples:
            cell.counters.add(sample.counters)
    return cell


def controller_of(contenders: Mapping[str, Contender]) -> Ours:
    controller = contenders[CONTROLLER]
    assert isinstance(controller, Ours), "it drafts"
    return controller


def make_contenders(spec: EngineSpec, *, compiled: bool, backwards: bool) -> dict[str, Contender]:
    """By name, in an order that stays; made in that order or backwards."""
    makers: dict[str, Callable[[], Contender]] = {
        CONTROLLER: lambda: Ours(spec),
        PLUG_IN: lambda: Ours(replace(spec, proposer="none")),
        VLLM: lambda: Stock(spec, compiled=False),
    }
    if compiled:
        makers[COMPILED] = lambda: Stock(spec, compiled=True)
    made = {name: makers[name]() for name in (reversed(makers) if backwards else makers)}
    return {name: made[name] for name in makers}


def check_exact(controller: Ours, prompts: Prompts, dtype: torch.dtype) -> float:
    """Mean |difference| of recorded log-probabilities from a forward that drafts nothing, over rows
    that were drafted for. Raises Inexact where it is more than rounding."""
    engine = controller.engine
    for seed in range(CHECK_RUNS):  # the first is the history of those that follow
        samples = run_to_end(engine, requests_for(prompts, 8, seed))
        if any(sample.counters.verified for sample in samples):
            break
    else:
        raise Inexact(f"nothing was drafted in {CHECK_RUNS} runs for the check")
    errors: list[float] = []
    for sample in samples:
        table = engine.probe([(*sample.request.prompt_ids, *sample.token_ids)])
        own = table[-len(sample.token_ids) :]
        right = own.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0].tolist()
        errors += [abs(a - b) for a, b in zip(sample.logprobs, right, strict=True)]
    error = statistics.mean(errors)
    if not error <= TOLERANCE[dtype]:
        raise Inexact(f"log-probabilities are off by {error:.4f} nats on average")
    return error


# ---- the command --------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", help=f"rows in the batch; {FULL['batches']}")
    parser.add_argument("--tokens", type=int, help=f"new tokens a row; {FULL['tokens']}")
    parser.add_argument("--repeats", type=int, help=f"runs of each batch size; {FULL['repeats']}")
    parser.add_argument("--history", type=int, help=f"rollouts a prompt; {FULL['history']}")
    parser.add_argument("--model", default="smollm2", help="smollm2 or a model folder")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16" if has_bf16_gemm() else "float32",
        help="compute dtype; bfloat16 where it is not emulated",
    )
    parser.add_argument("--compiled", action="store_true", help="also vLLM as it is, compiled")
    parser.add_argument("--quick", action="store_true", help="a trial: says that it runs, no more")
    parser.add_argument("--json", action="store_true", help="the JSON line only")
    arguments = parser.parse_args()
    fill_in(arguments, QUICK if arguments.quick else FULL)
    arguments.batches = tuple(sorted({int(word) for word in arguments.batches.split(",")}))
    if arguments.tokens < 2 or arguments.repeats < 1 or arguments.history < 1:
        parser.error("expected --tokens of 2 and more, --repeats and --history of 1 and more")
    return arguments


def run(arguments: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Any]:
    """Starts, checks, measures. Raises Inexact before anything is timed."""
    folder = model_folder(arguments.model)
    num = max(POOL, *arguments.batches)
    prompts = [list(ids) for ids in make_prompts(num, read_tokenizer(folder), seed=0)]
    setting = Setting(folder, prompts, arguments.batches, arguments.tokens, None, None)
    spec = EngineSpec(
        str(folder),
        engine="vllm",
        mode="full",
        format="none",
        num_slots=len(prompts),
        context_len=setting.context_len,
        max_round_tokens=sum(map(len, prompts)),  # one step takes all prompts
        dtype=arguments.dtype,
        proposer="history_sampled",
    )  # an adaptive draft length is the default
    tell("starting the engines")
    sets = [
        make_contenders(spec, compiled=arguments.compiled, backwards=backwards)
        for backwards in (False, True)
    ]
    tell("checking that what is timed is right")
    error = check_exact(controller_of(sets[0]), prompts[:2], spec.torch_dtype)
    cells = [
        measure(
            sets,
            prompts,
            batch,
            num_tokens=arguments.tokens,
            num_earlier=arguments.history,
            repeats=arguments.repeats * max(1, POOL // batch),  # few rows say little in a repeat
            tell=tell,
        )
        for batch in arguments.batches
    ]
    return {
        "vllm_controller_vs_plain": {str(cell.batch): cell.versus(cell.plain) for cell in cells},
        "vllm_controller": {str(cell.batch): cell.to_json() for cell in cells},
        "logprob_error": error,
        "settings": {
            "model": arguments.model,
            "dtype": arguments.dtype,
            "num_tokens": arguments.tokens,
            "history": arguments.history,
            "quick": arguments.quick,
        },
        "machine": machine() | {"threads": torch.get_num_threads()},
        "versions": versions(),
        "project": project_state(),
    }


def table(found: Mapping[str, Any]) -> str:
    """For people."""
    lines = []
    for batch, cell in found["vllm_controller"].items():
        lines.append(
            f"B={batch:<3} tok/s "
            + ", ".join(f"{name} {rate:.1f}" for name, rate in cell["tok_s"].items())
        )
        for name, ratio in cell["vs"].items():
            error = cell["vs_error"][name]
            counts = "  <- the faster plain one" if name == cell["plain"] else ""
            spread = "" if error is None else f" ± {error:.3f}"
            lines.append(
                f"      controller / {name}: {ratio:.3f}{spread} "
                f"(by CPU seconds {cell['vs_cpu'][name]:.3f}){counts}"
            )
    return "\n".join(lines)


def main() -> None:
    arguments, tell = parse(), make_tell()
    answers = own_stdout()
    try:
        found = run(arguments, tell)
    except Inexact as error:
        tell("")
        sys.exit(f"bench_vllm: {error}; nothing is timed")
    tell("")
    if not arguments.json:
        print(table(found), file=answers)
    print(json.dumps(found), file=answers, flush=True)
    os._exit(0)  # vLLM's own end takes long, and there is nothing left to write


if __name__ == "__main__":
    main()
