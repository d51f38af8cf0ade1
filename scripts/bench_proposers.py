#!/usr/bin/env python
"""What proposers and draft lengths earn: never less than plain decoding, and how much more where.

    python scripts/bench_proposers.py [--parts never_loses,makespan,lossless] [--batches 1,2,4,8,16,32]
        [--tokens 48] [--repeats 2] [--quant int8_w8a16] [--out bench] [--quick] [--json]

Regime: SmolLM2-135M, T=1 unless said, default kernels; all ways to draft alternate on the same prompts
and seeds within one run, ratios are medians of ratios within a repeat. Where drafts name tokens every
run has to emit plain decoding's tokens, else the exit code is 1. The parts, described in their modules:

    never_loses  batch sizes x {high, low, adversarial} acceptance: the adaptive length against plain
                 decoding and against the best fixed length of the cell (`bench_never_loses.py`)
    makespan     whole rollout steps of natural length after 20 steps of GRPO, which are trained first
                 and kept in --out (`bench_makespan.py`)
    lossless     quantised weights drafting for full precision (`bench_lossless.py`)

`bench_history.py` measures the history proposer alone. Not measured: MTP heads, which this project does
not have yet; several actors; GPUs.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from actors.threads import thread_environment

for _name, _value in thread_environment(len(os.sched_getaffinity(0))).items():
    os.environ.setdefault(_name, _value)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from actors.engine_spec import EngineSpec, make_policy
from recipes.passport import machine, project_state, versions
from recipes.smollm2 import model_folder
from rollout.checkpoint import read_tokenizer
from scripts.bench_engine import make_prompts, make_tell
from scripts.bench_exact import Inexact
from scripts.bench_lossless import LosslessCell
from scripts.bench_lossless import measure as measure_lossless
from scripts.bench_makespan import MAX_TOKENS, NUM_PROMPTS, NUM_SAMPLES, Makespan, train
from scripts.bench_makespan import measure as measure_makespan
from scripts.bench_never_loses import ADAPTIVE, PLAIN, Cell
from scripts.bench_never_loses import measure as measure_cells
from scripts.bench_ours import LoadedPolicy

PARTS = ("never_loses", "makespan", "lossless")
RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.yaml"
EARLIER = 8
MAKESPAN_CONTEXT = 384


@dataclass(slots=True)
class Results:
    """What was measured; empty for parts that were not asked for."""

    cells: list[Cell] = field(default_factory=list)
    makespan: Makespan | None = None
    lossless: list[LosslessCell] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if self.cells:
            result["never_loses"] = {
                "min_vs_plain": min(cell.vs_plain for cell in self.cells),
                "min_vs_best_fixed": min(cell.vs_best_fixed for cell in self.cells),
                "cells": [cell.to_json() for cell in self.cells],
            }
        if self.makespan is not None:
            result["makespan_speedup"] = self.makespan.speedup
            result["makespan"] = {
                "plain_s": self.makespan.plain_s,
                "speculative_s": self.makespan.speculative_s,
                "tokens_per_target_step": self.makespan.counters.tokens_per_target_step,
                "acceptance_rate": self.makespan.counters.acceptance_rate,
                "lengths": sorted(self.makespan.lengths),
            }
        if self.lossless:
            best = {
                cell.batch: max(
                    (c for c in self.lossless if c.batch == cell.batch), key=lambda c: c.speedup
                )
                for cell in self.lossless
            }
            result["lossless"] = {
                "speedup": {batch: cell.speedup for batch, cell in best.items()},
                "k3": max(cell.k3 for cell in self.lossless),
                "k3_plain": max(cell.k3_plain for cell in self.lossless),
                "cells": [cell.to_json() for cell in self.lossless],
            }
        return result

    def text(self) -> str:
        """For people."""
        lines = []
        if self.cells:
            lines.append("adaptive draft length / plain, / best fixed length (which):")
        for cell in self.cells:
            name, rate = cell.best_fixed
            lines.append(
                f"  B={cell.batch:<3}{cell.acceptance:12} {cell.median(PLAIN):7.1f} tok/s plain, "
                f"{cell.median(ADAPTIVE):7.1f} adaptive: {cell.vs_plain:5.2f}  "
                f"{cell.vs_best_fixed:5.2f} ({name}, {rate:.1f})"
            )
        if (step := self.makespan) is not None:
            lines.append(
                f"makespan of {NUM_PROMPTS} x {NUM_SAMPLES} rollouts of up to {MAX_TOKENS} tokens: "
                f"{step.speedup:.2f}x plain, {step.counters.tokens_per_target_step or 0:.2f} tokens "
                "per target step"
            )
        lines += [
            f"lossless, {cell.format} drafts, B={cell.batch}: {cell.speedup:.2f}x plain full "
            f"precision, {cell.counters.tokens_per_target_step or 0:.1f} tokens per target step, "
            f"k3 {cell.k3:.1e} (plain {cell.k3_plain:.1e})"
            for cell in self.lossless
        ]
        return "\n".join(lines)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--batches", default="1,2,4,8,16,32", help="rows, of never_loses")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens a row; 48")
    parser.add_argument("--repeats", type=int, default=2, help="runs that count; 2")
    parser.add_argument(
        "--quant", default="int8_w8a16", choices=("none", "int8_w8a16", "int8_w8a8")
    )
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder of results")
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


def run(arguments: argparse.Namespace) -> Results:
    tell = make_tell()
    folder = model_folder("smollm2")
    prompts = make_prompts(max(arguments.batches), read_tokenizer(folder))
    context_len = 64 * -(-(max(map(len, prompts)) + arguments.tokens + 40) // 64)
    results = Results()
    spec = EngineSpec(
        str(folder),
        mode="full" if arguments.quant == "none" else "quantised",
        format=arguments.quant,
        num_slots=max(arguments.batches),
        context_len=context_len,
    )
    if "never_loses" in arguments.parts:
        results.cells = measure_cells(
            LoadedPolicy.make(spec),
            prompts,
            batches=arguments.batches,
            num_tokens=arguments.tokens,
            num_earlier=2 if arguments.quick else EARLIER,
            repeats=arguments.repeats,
            tell=tell,
        )
    if "lossless" in arguments.parts:
        results.lossless = measure_lossless(
            folder,
            make_prompts(4, read_tokenizer(folder)),
            batches=tuple(b for b in (1, 2, 4) if not arguments.quick or b == 1),
            num_tokens=arguments.tokens,
            context_len=context_len,
            repeats=arguments.repeats,
            tell=tell,
        )
    if "makespan" in arguments.parts:
        tell("training the quickstart's policy for 20 steps, unless --out has it")
        weights = train(arguments.out / "makespan", RECIPE)
        wide = EngineSpec(
            str(folder), mode=spec.mode, format=spec.format, context_len=MAKESPAN_CONTEXT
        )
        results.makespan = measure_makespan(
            make_policy(wide), wide, weights, arguments.repeats, tell
        )
    tell("")
    return results


def main() -> None:
    arguments = parse()
    try:
        results = run(arguments)
    except Inexact as error:
        sys.exit(f"bench_proposers: {error}")
    about = {"machine": machine(), "project": project_state(), "versions": versions()}
    settings = {n: getattr(arguments, n) for n in ("tokens", "repeats", "quant", "quick")}
    as_json = json.dumps({**results.to_json(), "settings": settings, **about})
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "proposers.json").write_text(as_json + "\n")
    if not arguments.json:
        print(results.text())
        if arguments.quick:
            print("a trial (--quick): these numbers say that it runs, no more")
    print(as_json)


if __name__ == "__main__":
    main()
