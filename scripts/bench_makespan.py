"""How much sooner a training step's rollouts end with drafts, in `bench_proposers.py`.

The policy is that of the quickstart after 20 steps of GRPO (`bench_trained.py`). A step is 8 prompts
with 4 samples each of natural length: they end by end-of-text, at 256 tokens at the latest, so the last
rows decode alone. The history proposer has seen earlier samples of the same prompts by these weights.
Makespan runs from submission to the last token, prompts included; plain and speculative alternate on
the same seeds.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from proposers.history import HistoryProposer
from proposers.none import NoProposer
from rollout.draft_len import AdaptiveDraftLen, FixedDraftLen
from rollout.engine import run_to_end
from rollout.native_engine import NativeEngine
from rollout.request import RolloutRequest, RolloutSample, SpecCounters
from scripts.bench_never_loses import check_same
from scripts.bench_ours import LoadedPolicy
from scripts.bench_trained import EARLIER, MAX_TOKENS, NUM_PROMPTS, Trained

NUM_SAMPLES = 4


@dataclass(slots=True)
class Makespan:
    """Seconds of whole steps, plain and speculative, pair by pair."""

    plain_s: list[float] = field(default_factory=list)
    speculative_s: list[float] = field(default_factory=list)
    counters: SpecCounters = field(default_factory=SpecCounters)
    """Of the speculative steps."""
    lengths: list[int] = field(default_factory=list)
    price: float = math.nan
    """Chance of acceptance at which a drafted token was worth its time, mean over the rounds."""

    @property
    def speedup(self) -> float:
        """Median of the ratios of pairs."""
        return statistics.median(p / s for p, s in zip(self.plain_s, self.speculative_s))

    def to_json(self) -> dict[str, Any]:
        return {
            "speedup": self.speedup,
            "plain_s": self.plain_s,
            "speculative_s": self.speculative_s,
            "tokens_per_target_step": self.counters.tokens_per_target_step,
            "acceptance_rate": self.counters.acceptance_rate,
            "lengths": sorted(self.lengths),
            "price": None if math.isnan(self.price) else self.price,
        }


def text(step: dict[str, Any]) -> list[str]:
    """For people."""
    line = (
        f"makespan of {NUM_PROMPTS} x {NUM_SAMPLES} rollouts of up to {MAX_TOKENS} tokens: "
        f"{step['speedup']:.2f}x plain, {step['tokens_per_target_step']:.2f} tokens per target step"
    )
    if step["price"] is not None:
        line += f"; a drafted token was worth its time from a chance of {step['price']:.2f} on"
    return [line]


def measure(
    loaded: LoadedPolicy, trained: Trained, repeats: int, tell: Callable[[str], None]
) -> Makespan:
    """Steps of new samples; the first pair warms up and is not counted."""
    history = HistoryProposer()
    for prompt, rollouts in zip(trained.earlier.prompts, trained.earlier.rollouts, strict=True):
        for one in rollouts:
            history.remember(prompt, one.token_ids, one.logprobs)
    plain = loaded.engine(proposer=NoProposer(), draft_len=FixedDraftLen(0))
    drafting = loaded.engine(proposer=history, draft_len=AdaptiveDraftLen(8))

    def timed(
        engine: NativeEngine, version: int, asked: list[RolloutRequest]
    ) -> tuple[float, list[RolloutSample]]:
        engine.load(loaded.weights, version=version, digest="bench")
        started = time.perf_counter()
        samples = run_to_end(engine, asked)
        return time.perf_counter() - started, samples

    made = Makespan()
    for repeat in range(-1, repeats):
        tell(f"makespan: step {repeat + 1}/{repeats}")
        version = EARLIER + (repeat + 1) * NUM_SAMPLES
        asked = trained.requests(version, NUM_SAMPLES)
        engines = (plain, drafting) if repeat % 2 else (drafting, plain)
        took = {engine is plain: timed(engine, version, asked) for engine in engines}
        check_same(took[True][1], took[False][1], f"samples of version {version}")
        if repeat < 0:
            continue
        made.plain_s.append(took[True][0])
        made.speculative_s.append(took[False][0])
        for sample in took[False][1]:
            made.counters.add(sample.counters)
            made.lengths.append(len(sample.token_ids))
    sums = drafting.gauges()
    if sums["draft/rounds"]:
        made.price = sums["draft/price"] / sums["draft/rounds"]
    return made
