#!/usr/bin/env python
"""What proposers and draft lengths earn: never less than plain decoding, and how much more where.

    python scripts/bench_proposers.py [--parts never_loses,makespan,lossless,history,mtp]
        [--batches 1,2,4,8,16,32] [--tokens 48] [--repeats 2] [--quant int8_w8a16] [--out bench]
        [--again] [--quick] [--json]

Regime: SmolLM2-135M, T=1 unless said, default kernels; all ways to draft alternate on the same prompts
and seeds within one run, ratios are medians of ratios within a repeat. Where drafts name tokens every
run has to emit plain decoding's tokens, else the exit code is 1. The parts, described in their modules:

    never_loses  batch sizes x {high, low, adversarial} acceptance: the adaptive length against plain
                 decoding and against the best fixed length of the cell (`bench_never_loses.py`)
    makespan     whole rollout steps of natural length after 20 steps of GRPO, which are trained first
                 and kept in --out (`bench_makespan.py`); one row at a time beside it, by history, MTP
                 head and both (`bench_alone.py`)
    lossless     quantised weights drafting for full precision (`bench_lossless.py`)
    history      the history proposer alone, in a process of its own (`bench_history.py`)
    mtp          a head trained on recorded rollouts, in a process of its own (`bench_mtp.py`)

What a part, and of the first each cell, has measured is kept in --out and not measured again by a call
with the same settings at the same commit, so an interrupted benchmark goes on; --again measures anew.
Not measured: several actors; GPUs.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from actors.threads import thread_environment

for _name, _value in thread_environment(len(os.sched_getaffinity(0))).items():
    os.environ.setdefault(_name, _value)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from actors.engine_spec import EngineSpec
from recipes.passport import machine, project_state, versions
from recipes.smollm2 import model_folder
from recipes.train_mtp import MtpOptions
from rollout.checkpoint import read_tokenizer
from scripts import bench_alone, bench_lossless, bench_makespan, bench_never_loses, bench_trained
from scripts.bench_engine import make_prompts, make_tell
from scripts.bench_exact import Inexact
from scripts.bench_kept import Kept
from scripts.bench_ours import LoadedPolicy

Tell = Callable[[str], None]

SCRIPTS = Path(__file__).resolve().parent
RECIPE = SCRIPTS.parent / "recipes" / "quickstart.yaml"
EARLIER = 8
LOSSLESS_BATCHES = (1, 2, 4)
MAKESPAN_CONTEXT = 384
HEAD, QUICK_HEAD = MtpOptions(minutes=10, max_steps=100), MtpOptions(minutes=10, max_steps=2)
"""How a head is trained for rows alone."""
FIRST_ALONE, NUM_ALONE = 1000, 2
"""Samples of each prompt that a row decodes alone, behind all that whole steps draw."""
QUICK_HISTORY = ("--prompts", "3", "--held-out", "1", "--samples", "64", "--length", "64")
QUICK_MTP = ("--parts", "recorded", "--steps", "2")
"""Of `bench_history.py` and `bench_mtp.py`, for a trial."""
HISTORY_KEYS = (
    "vs_arctic_t1", "vs_arctic_t07", "time_vs_arctic", "propose_us", "observe_us", "bytes_per_token",
)  # fmt: skip
MTP_KEYS = ("rate_depth1", "train_minutes", "online_gain_points")
NO_ARCTIC = "arctic-inference is not installed, so nothing was compared with it"


class Failed(Exception):
    """A part that runs in a process of its own did not end well."""


def never_loses(arguments: argparse.Namespace, kept: Kept, tell: Tell) -> list[dict[str, Any]]:
    prompts = make_prompts(max(arguments.batches), read_tokenizer(model_folder("smollm2")))
    return bench_never_loses.measure(
        LoadedPolicy.make(_spec(arguments, prompts)),
        prompts,
        batches=arguments.batches,
        num_tokens=arguments.tokens,
        num_earlier=2 if arguments.quick else EARLIER,
        repeats=arguments.repeats,
        kept=kept,
        tell=tell,
    )


def makespan(arguments: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """Whole steps, and then rows alone, which a head drafts for too."""
    trained = bench_trained.Trained.of(_trained_run(arguments, tell), arguments.quant, tell)
    spec = EngineSpec(
        str(trained.folder),
        mode=_mode(arguments),
        format=arguments.quant,
        context_len=MAKESPAN_CONTEXT,
    )
    steps = bench_makespan.measure(LoadedPolicy.make(spec), trained, arguments.repeats, tell)
    head, report = trained.head(QUICK_HEAD if arguments.quick else HEAD, tell)
    with_head = replace(spec, num_slots=1, proposer="mtp", mtp_head=str(head))
    new = trained.requests(FIRST_ALONE, 1 if arguments.quick else NUM_ALONE)
    alone = bench_alone.measure(LoadedPolicy.make(with_head), trained.earlier, new, tell)
    return {**steps.to_json(), **bench_alone.to_json(alone), "head": report}


def lossless(arguments: argparse.Namespace, tell: Tell) -> list[dict[str, Any]]:
    folder, quick = model_folder("smollm2"), arguments.quick
    batches = LOSSLESS_BATCHES[:1] if quick else LOSSLESS_BATCHES
    num_tokens = arguments.tokens if quick else bench_lossless.NUM_TOKENS
    prompts = make_prompts(max(batches), read_tokenizer(folder))
    cells = bench_lossless.measure(
        folder,
        prompts,
        batches=batches,
        num_tokens=num_tokens,
        context_len=_context_len(num_tokens, prompts),
        repeats=arguments.repeats * (1 if quick else bench_lossless.REPEATS),
        tell=tell,
    )
    return [cell.to_json() for cell in cells]


def history(arguments: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    tell("the history proposer alone, in a process of its own")
    found = _run_script("bench_history.py", QUICK_HISTORY if arguments.quick else ())
    told = {key: found[key] for key in (*HISTORY_KEYS, "accepted", "positions", "tokens_stored")}
    return told if told["vs_arctic_t1"] is not None else {**told, "why_null": NO_ARCTIC}


def mtp(arguments: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    tell("an MTP head, in a process of its own")
    kept = ("--out", str(arguments.out / "mtp"))
    if arguments.quick:
        return _run_script("bench_mtp.py", (*QUICK_MTP, *kept))
    return _run_script("bench_mtp.py", ("--run", str(_trained_run(arguments, tell)), *kept))


def whole(measure: Callable[[argparse.Namespace, Tell], Any], name: str) -> "Part":
    """A part that is kept as one; the cells of `never_loses` are kept one by one."""
    return lambda arguments, kept, tell: kept.find_or(name, lambda: measure(arguments, tell))


Part = Callable[[argparse.Namespace, Kept, Tell], Any]
PARTS: dict[str, Part] = {
    "never_loses": never_loses,
    "makespan": whole(makespan, "makespan"),
    "lossless": whole(lossless, "lossless"),
    "history": whole(history, "history"),
    "mtp": whole(mtp, "mtp"),
}


def _spec(arguments: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> EngineSpec:
    return EngineSpec(
        str(model_folder("smollm2")),
        mode=_mode(arguments),
        format=arguments.quant,
        num_slots=max(arguments.batches),
        context_len=_context_len(arguments.tokens, prompts),
    )


def _mode(arguments: argparse.Namespace) -> Any:
    return "full" if arguments.quant == "none" else "quantised"


def _context_len(num_tokens: int, prompts: Sequence[Sequence[int]]) -> int:
    """Room for prompt, new tokens and drafts, in whole pages."""
    return 64 * -(-(max(map(len, prompts)) + num_tokens + 40) // 64)


def _trained_run(arguments: argparse.Namespace, tell: Tell) -> Path:
    tell("training the quickstart's policy for 20 steps, unless --out has it")
    return bench_trained.trained_run(arguments.out / "makespan", RECIPE)


def _run_script(name: str, words: Sequence[str]) -> dict[str, Any]:
    """What another benchmark tells on its last line; its progress goes where ours does."""
    command = [sys.executable, str(SCRIPTS / name), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise Failed(f"{name} ended with code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def to_json(results: dict[str, Any]) -> dict[str, Any]:
    """The numbers that are asked for first, parts that were not run left out."""
    told: dict[str, Any] = {}
    if cells := results.get("never_loses"):
        told["never_loses"] = bench_never_loses.summary(cells)
    if step := results.get("makespan"):
        told["makespan_speedup"] = step["speedup"]
        told |= {key: step[key] for key in bench_alone.KEYS}
        told["makespan"] = step
    if cells := results.get("lossless"):
        told["lossless"] = bench_lossless.summary(cells)
    return told | {part: results[part] for part in ("history", "mtp") if part in results}


def text(results: dict[str, Any]) -> str:
    """For people."""
    lines: list[str] = []
    for part, told_by in (
        ("never_loses", bench_never_loses.text),
        ("makespan", bench_makespan.text),
        ("makespan", bench_alone.text),
        ("lossless", bench_lossless.text),
    ):
        if part in results:
            lines += told_by(results[part])
    for part, keys in (("history", HISTORY_KEYS), ("mtp", MTP_KEYS)):
        if part in results:
            told = (f"{key} {_short(results[part][key])}" for key in keys)
            lines.append(f"{part}: {', '.join(told)}")
    return "\n".join(lines)


def _short(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3g}"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--batches", default="1,2,4,8,16,32", help="rows, of never_loses")
    parser.add_argument(
        "--tokens", type=int, default=48, help="new tokens a row; 48, of lossless 192"
    )
    parser.add_argument("--repeats", type=int, default=2, help="runs that count; 2")
    parser.add_argument(
        "--quant", default="int8_w8a16", choices=("none", "int8_w8a16", "int8_w8a8")
    )
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder of results")
    parser.add_argument("--again", action="store_true", help="measure what --out has anew")
    parser.add_argument("--quick", action="store_true", help="a trial: says that it runs, no more")
    parser.add_argument("--json", action="store_true", help="the JSON line only")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.batches, arguments.tokens, arguments.repeats = "1,4", 16, 1
    arguments.parts = tuple(arguments.parts.split(","))
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"--parts {unknown[0]}: expected some of {','.join(PARTS)}")
    try:
        arguments.batches = tuple(sorted({int(word) for word in arguments.batches.split(",")}))
    except ValueError:
        parser.error(f"--batches {arguments.batches}: expected numbers with commas between them")
    if not 1 <= arguments.batches[0] <= arguments.batches[-1] <= 32:
        parser.error("--batches: expected 1 to 32 rows")
    return arguments


def run(arguments: argparse.Namespace, settings: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """What each part found, or had found before."""
    kept = Kept(arguments.out / "proposers", settings | {"commit": project_state()["commit"]})
    if arguments.again:
        kept.forget()
    results: dict[str, Any] = {}
    for number, part in enumerate(arguments.parts, start=1):
        tell(f"part {number} of {len(arguments.parts)}: {part}")
        results[part] = PARTS[part](arguments, kept, tell)
    tell("")
    return results


def main() -> None:
    arguments = parse()
    settings = {n: getattr(arguments, n) for n in ("tokens", "repeats", "quant", "quick")}
    try:
        results = run(arguments, settings, make_tell())
    except (Inexact, Failed) as error:
        sys.exit(f"bench_proposers: {error}")
    about = {"machine": machine(), "project": project_state(), "versions": versions()}
    as_json = json.dumps({**to_json(results), "settings": settings, **about})
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "proposers.json").write_text(as_json + "\n")
    if not arguments.json:
        print(text(results))
        if arguments.quick:
            print("a trial (--quick): these numbers say that it runs, no more")
    print(as_json)


if __name__ == "__main__":
    main()
