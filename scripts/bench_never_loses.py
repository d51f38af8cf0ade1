"""Whether the adaptive draft length loses: batch sizes times acceptances, in `bench_proposers.py`.

In a cell plain decoding, the adaptive length and fixed lengths decode the same prompts side by side,
each with a cache of its own, and take turns of `TURN` rounds in an order drawn anew each time: a
machine whose speed drifts within a second is as fast for all of them. Caches differ in speed by a per
cent, for as long as a process lasts, so from repeat to repeat the ways change them. Prompts are cached
before the clock starts: seconds are those of decoding, where a wrong length shows most. Plain decoding
runs twice, the second time as one way more: what the two differ by is what the benchmark can tell.
Those and the adaptive length run `PAIR_REPEATS` times as often as fixed lengths, since they differ by
little. Fixed lengths whose rounds score more than `MOST_SCORED` tokens take longest and are left out:
from 16 rows on the best fixed length is the best of 0, 1 and 3. Acceptance comes from what the history
proposer remembers:

    high         T=.3, after rollouts at T=.3
    low          T=1, after rollouts at T=1
    adversarial  T=1, the same drafts with every token replaced by its neighbour: the proposer is as
                 sure as before and always wrong

A ratio is one of whole cells: each way's tokens over those that plain decoding would have emitted in
its seconds, each turn's seconds counted at the rate that plain decoding had around it: the median of
`AROUND` turns before, beside and behind. On a machine of steady speed that is tokens a second over
tokens a second; a slow spell, which would weigh as many turns as it makes long, weighs as many as it
has. Plain decoding's own seconds are counted in the same way, so that noise is nobody's gain. The error
is the standard error over repeats. Beside ratios by the clock stand those by CPU seconds of this
process, which other processes on the machine disturb less.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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

ADAPTIVE, PLAIN, AGAIN = "adaptive", "plain", "plain again"
FIXED_LENS = (1, 3, 8)
MAX_LEN = 8
MOST_SCORED = 128
PAIR_REPEATS = 8
TURN = 8
"""Rounds of a way before the next one's turn."""
AROUND = 3
TEMPERATURES = {"high": 0.3, "low": 1.0, "adversarial": 1.0}


class Contrary(HistoryProposer):
    """The drafts of history with every token replaced: as sure as before, and always wrong but by
    chance."""

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        drafts = super().propose(rows, max_lens)
        return [replace(d, token_ids=tuple(token ^ 1 for token in d.token_ids)) for d in drafts]


@dataclass(slots=True)
class Decoded:
    """One run of a way to draft."""

    seconds: float
    cpu_s: float
    """Of all threads."""
    samples: list[RolloutSample]
    plain_tokens: float = 0.0
    """What plain decoding would have emitted in these seconds, at its rate in the turns beside."""

    @property
    def tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)


def by_clock(run: Decoded) -> float:
    """Seconds, in tokens of plain decoding."""
    return run.plain_tokens


def by_cpu(run: Decoded) -> float:
    """CPU seconds."""
    return run.cpu_s


@dataclass(slots=True)
class Cell:
    """One batch size and acceptance."""

    batch: int
    acceptance: str
    runs: dict[str, list[Decoded]] = field(default_factory=dict)
    """Way to run -> one entry a repeat; all ways were run in the first repeats."""

    def add(self, name: str, run: Decoded) -> None:
        self.runs.setdefault(name, []).append(run)

    def rate(self, name: str) -> float:
        """Tokens a second."""
        runs = self.runs[name]
        return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)

    def versus(
        self, name: str, clock: Callable[[Decoded], float] = by_clock, *, of: str = ADAPTIVE
    ) -> tuple[float, float]:
        """The rate `of` a way over another's in the repeats that both had, and its standard error."""
        pairs = list(zip(self.runs[of], self.runs[name]))
        ours, theirs = (
            sum(map(clock, runs)) / sum(run.tokens for run in runs) for runs in zip(*pairs)
        )
        spread = [clock(other) * one.tokens / clock(one) / other.tokens for one, other in pairs]
        error = statistics.stdev(spread) / len(spread) ** 0.5 if len(spread) > 1 else math.nan
        return theirs / ours, error

    @property
    def best_fixed(self) -> str:
        """The fastest way but the adaptive one, plain among them, in the repeats that all had."""
        fixed = [name for name in self.runs if name not in (ADAPTIVE, AGAIN)]
        num = min(len(self.runs[name]) for name in fixed)
        return min(fixed, key=lambda name: sum(map(by_clock, self.runs[name][:num])))

    def to_json(self) -> dict[str, Any]:
        counters = SpecCounters()
        for run in self.runs[ADAPTIVE]:
            for sample in run.samples:
                counters.add(sample.counters)
        vs_plain, vs_plain_error = self.versus(PLAIN)
        vs_best, vs_best_error = self.versus(self.best_fixed)
        return {
            "batch": self.batch,
            "acceptance": self.acceptance,
            "tok_s": {name: self.rate(name) for name in self.runs},
            "vs_plain": vs_plain,
            "vs_plain_error": vs_plain_error,
            "vs_plain_cpu": self.versus(PLAIN, by_cpu)[0],
            "plain_again": self.versus(PLAIN, of=AGAIN)[0],
            "vs_best_fixed": vs_best,
            "vs_best_fixed_error": None if math.isnan(vs_best_error) else vs_best_error,
            "best_fixed": self.best_fixed,
            "repeats": len(self.runs[ADAPTIVE]),
            "acceptance_rate": counters.acceptance_rate,
            "tokens_per_target_step": counters.tokens_per_target_step,
        }


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode, with the weights that its policy made ready."""

    engine: NativeEngine
    weights: object


def decode_in_turns(
    ways: Mapping[str, Way], prompts: Prompts, sampling: SamplingParams, seed: int
) -> dict[str, Decoded]:
    """The same requests by all ways, PLAIN among them, which take turns of `TURN` rounds behind prompts
    that are cached already. No two ways may share a cache."""
    for way in ways.values():
        way.engine.load(way.weights, version=seed, digest="bench")
        run_to_end(way.engine, requests_for(prompts, replace(sampling, max_new_tokens=1), -seed))
        way.engine.submit(requests_for(prompts, sampling, seed))
    taken = {name: Decoded(0.0, 0.0, []) for name in ways}
    names, turns, order = list(ways), [], random.Random(seed)
    while any(way.engine.num_unfinished for way in ways.values()):
        order.shuffle(names)  # what ran before leaves caches and clocks as it needs them
        going = [name for name in names if ways[name].engine.num_unfinished]
        turns.append({name: _take_turn(ways[name].engine, taken[name]) for name in going})
    plain_rates = [tokens / seconds for tokens, seconds in (t[PLAIN] for t in turns if PLAIN in t)]
    for at, turn in enumerate(turns):
        first = min(max(0, at - AROUND), len(plain_rates) - 1)
        plain_rate = statistics.median(plain_rates[first : at + AROUND + 1])
        for name, (_, seconds) in turn.items():
            taken[name].plain_tokens += seconds * plain_rate
    for run in taken.values():
        run.samples.sort(key=lambda sample: sample.request.id)
    return taken


def _take_turn(engine: NativeEngine, run: Decoded) -> tuple[int, float]:
    """Tokens and seconds."""
    before = _emitted(engine)
    began, cpu_before = time.perf_counter(), time.process_time()
    for _ in range(TURN):
        run.samples += engine.step()
    seconds = time.perf_counter() - began
    run.seconds += seconds
    run.cpu_s += time.process_time() - cpu_before
    return _emitted(engine) - before, seconds


def _emitted(engine: NativeEngine) -> int:
    counters = engine.counters()
    return counters.accepted + counters.corrections + counters.bonuses + counters.plain


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


def make_ways(
    loaded: LoadedPolicy, acceptance: str, earlier: Sequence[RolloutSample], batch: int = 1
) -> list[dict[str, Way]]:
    """Plain twice, adaptive and fixed lengths by name, once for each way that they can share out the
    caches; each with a memory of its own, and what it learns stays from run to run."""

    def remembering() -> Proposer:
        proposer = Contrary() if acceptance == "adversarial" else HistoryProposer()
        for sample in earlier:
            proposer.remember(sample.request.prompt_ids, sample.token_ids, sample.logprobs)
        return proposer

    lens: dict[str, DraftLen] = {
        ADAPTIVE: AdaptiveDraftLen(MAX_LEN),
        **{f"fixed {n}": FixedDraftLen(n) for n in FIXED_LENS if batch * (1 + n) <= MOST_SCORED},
    }
    drafting: dict[str, tuple[Proposer, DraftLen]] = {
        **{name: (NoProposer(), FixedDraftLen(0)) for name in (PLAIN, AGAIN)},
        **{name: (remembering(), draft_len) for name, draft_len in lens.items()},
    }
    caches = [loaded.beside() for _ in drafting]
    return [
        {
            name: Way(own.engine(proposer=proposer, draft_len=draft_len), own.weights)
            for own, (name, (proposer, draft_len)) in zip(
                caches[first:] + caches[:first], drafting.items()
            )
        }
        for first in range(len(caches))
    ]


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
                ways = make_ways(loaded, acceptance, recorded[temperature], batch)
                made = Cell(batch, acceptance)
                # Few rows take few seconds, and a repeat of them says little.
                _fill(made, ways, prompts[:batch], sampling, repeats * max(1, 8 // batch), tell)
                kept.keep(name, cell := made.to_json())
            cells.append(cell)
    return cells


def _fill(
    cell: Cell,
    ways: Sequence[dict[str, Way]],
    prompts: Prompts,
    sampling: SamplingParams,
    repeats: int,
    tell: Callable[[str], None],
) -> None:
    """Each way has one run before that is not counted."""
    for repeat in range(-1, repeats * PAIR_REPEATS):
        tell(
            f"B={cell.batch}, {cell.acceptance} acceptance: repeat {repeat + 1}/"
            f"{repeats * PAIR_REPEATS}"
        )
        due = ways[repeat % len(ways)]
        if repeat >= repeats:
            due = {name: due[name] for name in (PLAIN, AGAIN, ADAPTIVE)}
        taken = decode_in_turns(due, prompts, sampling, seed=2 + repeat)
        for name, run in taken.items():
            where = f"{name} at B={cell.batch}, {cell.acceptance}"
            check_same(taken[PLAIN].samples, run.samples, where)
            if repeat >= 0:
                cell.add(name, run)


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
    lines = [
        "adaptive draft length / plain by the clock (± standard error), by CPU seconds; plain again / "
        "plain; adaptive / best fixed:"
    ]
    for cell in cells:
        tok_s, best = cell["tok_s"], cell["best_fixed"]
        lines.append(
            f"  B={cell['batch']:<3}{cell['acceptance']:12} {tok_s[PLAIN]:7.1f} tok/s plain, "
            f"{tok_s[ADAPTIVE]:7.1f} adaptive: {cell['vs_plain']:6.3f} ± {cell['vs_plain_error']:.3f}  "
            f"{cell['vs_plain_cpu']:6.3f}  {cell['plain_again']:6.3f}  {cell['vs_best_fixed']:6.3f} "
            f"({best}, {tok_s[best]:.1f})"
        )
    return lines
