"""Whether the adaptive draft length loses: batch sizes times acceptances, in `bench_proposers.py`.

Every cell runs plain decoding, the adaptive length and fixed lengths in turn on the same prompts, which
are cached before the clock starts: seconds are those of decoding, where a wrong length shows most. The
first two run `PAIR_REPEATS` times as often as the fixed lengths, since what they differ by is small.
Fixed lengths whose rounds score more than `MOST_SCORED` tokens take longest and are left out, so from
16 rows on the best fixed length is the best of 0, 1 and 3. Acceptance comes from what the history
proposer remembers:

    high         T=.3, after rollouts at T=.3
    low          T=1, after rollouts at T=1
    adversarial  T=1, the same drafts with every token replaced by its neighbour: the proposer is as
                 sure as before and always wrong

Beside ratios by the clock stand those by CPU seconds of this process, which other processes on the
machine disturb less.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proposers.history import HistoryProposer
from proposers.none import NoProposer
from rollout.draft import Draft
from rollout.draft_len import AdaptiveDraftLen, DraftLen, FixedDraftLen
from rollout.engine import run_to_end
from rollout.native_engine import NativeEngine
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample, SpecCounters
from rollout.row import Row
from rollout.sampling import SamplingParams
from scripts.bench_contenders import Prompts
from scripts.bench_exact import Inexact
from scripts.bench_kept import Kept
from scripts.bench_ours import LoadedPolicy

ADAPTIVE, PLAIN = "adaptive", "plain"
FIXED_LENS = (1, 3, 8)
MAX_LEN = 8
MOST_SCORED = 128
PAIR_REPEATS = 3
TEMPERATURES = {"high": 0.3, "low": 1.0, "adversarial": 1.0}


class Contrary(HistoryProposer):
    """The drafts of history with every token replaced: as sure as before, and always wrong but by
    chance."""

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        drafts = super().propose(rows, max_lens)
        return [replace(d, token_ids=tuple(token ^ 1 for token in d.token_ids)) for d in drafts]


@dataclass(frozen=True, slots=True)
class Decoded:
    """One run of a way to draft."""

    seconds: float
    cpu_s: float
    """Of all threads."""
    samples: list[RolloutSample]

    @property
    def tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tok_cpu_s(self) -> float:
        return self.tokens / self.cpu_s


@dataclass(slots=True)
class Cell:
    """One batch size and acceptance."""

    batch: int
    acceptance: str
    runs: dict[str, list[Decoded]] = field(default_factory=dict)
    """Way to run -> one entry a repeat; all ways were run in the first repeats."""

    def add(self, name: str, run: Decoded) -> None:
        self.runs.setdefault(name, []).append(run)

    def median(self, name: str) -> float:
        return statistics.median(run.tok_s for run in self.runs[name])

    def versus(self, name: str) -> float:
        """Median of the ratios of the adaptive rate to another within a repeat."""
        pairs = zip(self.runs[ADAPTIVE], self.runs[name])
        return statistics.median(ours.tok_s / other.tok_s for ours, other in pairs)

    @property
    def vs_plain_cpu(self) -> float:
        pairs = zip(self.runs[ADAPTIVE], self.runs[PLAIN])
        return statistics.median(ours.tok_cpu_s / plain.tok_cpu_s for ours, plain in pairs)

    @property
    def best_fixed(self) -> str:
        """The way of the highest median but the adaptive one, plain among them."""
        return max((name for name in self.runs if name != ADAPTIVE), key=self.median)

    def to_json(self) -> dict[str, Any]:
        counters = SpecCounters()
        for run in self.runs[ADAPTIVE]:
            for sample in run.samples:
                counters.add(sample.counters)
        ratios = [a.tok_s / p.tok_s for a, p in zip(self.runs[ADAPTIVE], self.runs[PLAIN])]
        return {
            "batch": self.batch,
            "acceptance": self.acceptance,
            "tok_s": {name: self.median(name) for name in self.runs},
            "vs_plain": self.versus(PLAIN),
            "vs_plain_range": [min(ratios), max(ratios)],
            "vs_plain_cpu": self.vs_plain_cpu,
            "vs_best_fixed": self.versus(self.best_fixed),
            "best_fixed": self.best_fixed,
            "acceptance_rate": counters.acceptance_rate,
            "tokens_per_target_step": counters.tokens_per_target_step,
        }


def decode(
    engine: NativeEngine, prepared: object, prompts: Prompts, sampling: SamplingParams, seed: int
) -> Decoded:
    """Decoding behind prompts that are cached already."""
    engine.load(prepared, version=seed, digest="bench")
    run_to_end(engine, requests_for(prompts, replace(sampling, max_new_tokens=1), -seed))
    requests = requests_for(prompts, sampling, seed)
    began, cpu_before = time.perf_counter(), time.process_time()
    samples = run_to_end(engine, requests)
    return Decoded(time.perf_counter() - began, time.process_time() - cpu_before, samples)


def requests_for(prompts: Prompts, sampling: SamplingParams, seed: int) -> list[RolloutRequest]:
    return [
        RolloutRequest(f"{seed}/{p}", f"g{p}", f"p{p}", 0, tuple(ids), sampling, run_seed=seed)
        for p, ids in enumerate(prompts)
    ]


def record(
    loaded: LoadedPolicy, prompts: Prompts, sampling: SamplingParams, num_samples: int
) -> list[RolloutSample]:
    """Earlier rollouts of the prompts."""
    engine = loaded.engine(proposer=NoProposer(), draft_len=FixedDraftLen(0))
    engine.load(loaded.weights, version=0, digest="bench")
    requests = [
        replace(request, id=f"{request.id}/{index}", sample_index=1 + index)
        for index in range(num_samples)
        for request in requests_for(prompts, sampling, 0)
    ]
    return run_to_end(engine, requests)


def ways(
    loaded: LoadedPolicy, acceptance: str, earlier: Sequence[RolloutSample], batch: int = 1
) -> dict[str, NativeEngine]:
    """Plain, adaptive and fixed lengths by name; each with a memory of its own, and what it learns
    stays from run to run."""

    def remembering() -> Proposer:
        proposer = Contrary() if acceptance == "adversarial" else HistoryProposer()
        for sample in earlier:
            proposer.remember(sample.request.prompt_ids, sample.token_ids, sample.logprobs)
        return proposer

    lens: dict[str, DraftLen] = {
        ADAPTIVE: AdaptiveDraftLen(MAX_LEN),
        **{f"fixed {n}": FixedDraftLen(n) for n in FIXED_LENS if batch * (1 + n) <= MOST_SCORED},
    }
    drafting = {
        name: loaded.engine(proposer=remembering(), draft_len=draft_len)
        for name, draft_len in lens.items()
    }
    return {PLAIN: loaded.engine(proposer=NoProposer(), draft_len=FixedDraftLen(0)), **drafting}


def measure(
    loaded: LoadedPolicy,
    prompts: Prompts,
    *,
    batches: Sequence[int],
    num_tokens: int,
    num_earlier: int,
    repeats: int,
    kept: Kept,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """All cells, those that are kept not again. Raises Inexact where a way emits other tokens than
    plain decoding, which drafts that name tokens never do."""
    cells = []
    recorded: dict[float, list[RolloutSample]] = {}
    for acceptance, temperature in TEMPERATURES.items():
        sampling = SamplingParams(temperature=temperature, max_new_tokens=num_tokens)
        for batch in batches:
            name = f"never_loses_{batch}_{acceptance}"
            if (cell := kept.find(name)) is None:
                if temperature not in recorded:
                    tell(f"recording {num_earlier} rollouts a prompt at T={temperature}")
                    recorded[temperature] = record(loaded, prompts, sampling, num_earlier)
                earlier = recorded[temperature]
                engines = ways(loaded, acceptance, earlier, batch)
                cell = _measure_cell(
                    Cell(batch, acceptance),
                    loaded,
                    engines,
                    prompts[:batch],
                    sampling,
                    repeats,
                    tell,
                ).to_json()
                kept.keep(name, cell)
            cells.append(cell)
    return cells


def _measure_cell(
    cell: Cell,
    loaded: LoadedPolicy,
    engines: dict[str, NativeEngine],
    prompts: Prompts,
    sampling: SamplingParams,
    repeats: int,
    tell: Callable[[str], None],
) -> Cell:
    """Each way has one run before that is not counted."""
    for repeat in range(-1, repeats * PAIR_REPEATS):
        tell(
            f"B={cell.batch}, {cell.acceptance} acceptance: repeat {repeat + 1}/"
            f"{repeats * PAIR_REPEATS}"
        )
        names = list(engines) if repeat < repeats else [PLAIN, ADAPTIVE]
        turn = repeat % len(names)
        taken = {
            name: decode(engines[name], loaded.weights, prompts, sampling, seed=2 + repeat)
            for name in (*names[turn:], *names[:turn])
        }
        for name, run in taken.items():
            where = f"{name} at B={cell.batch}, {cell.acceptance}"
            check_same(taken[PLAIN].samples, run.samples, where)
            if repeat >= 0:
                cell.add(name, run)
    return cell


def check_same(plain: list[RolloutSample], drafted: list[RolloutSample], where: str) -> None:
    """Raises Inexact unless drafts that name tokens left what a seed gives alone."""
    pairs = zip(plain, drafted, strict=True)
    if wrong := [one.request.id for one, other in pairs if one.token_ids != other.token_ids]:
        raise Inexact(f"{where}: {len(wrong)} of {len(plain)} samples differ from plain decoding's")


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "min_vs_plain": min(cell["vs_plain"] for cell in cells),
        "min_vs_plain_cpu": min(cell["vs_plain_cpu"] for cell in cells),
        "min_vs_best_fixed": min(cell["vs_best_fixed"] for cell in cells),
        "cells": list(cells),
    }


def text(cells: Sequence[dict[str, Any]]) -> list[str]:
    """For people."""
    lines = ["adaptive draft length / plain by the clock (range) and by CPU seconds, / best fixed:"]
    for cell in cells:
        tok_s, best, (low, high) = cell["tok_s"], cell["best_fixed"], cell["vs_plain_range"]
        lines.append(
            f"  B={cell['batch']:<3}{cell['acceptance']:12} {tok_s[PLAIN]:7.1f} tok/s plain, "
            f"{tok_s[ADAPTIVE]:7.1f} adaptive: {cell['vs_plain']:5.2f} ({low:.2f}-{high:.2f})  "
            f"{cell['vs_plain_cpu']:5.2f}  {cell['vs_best_fixed']:5.2f} ({best}, {tok_s[best]:.1f})"
        )
    return lines
