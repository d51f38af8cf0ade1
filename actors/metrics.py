"""What a cluster has done so far, and the metric row between two moments.

Snapshots hold lifetime sums; a rate is a difference of sums over a difference of sums, so rows over
unequal actors and intervals are never averaged. A ratio without a denominator is absent.

A metric's unit is in its name; `*_rate` and `*_share` are in 0..1.
"""

from dataclasses import dataclass, field

from quant.drift import Drift
from rollout.ledger import Ledger
from rollout.request import SpecCounters
from rollout.watch import acceptance_p_value, alarm, pit_p_value

PHASES = ("plan", "propose", "score", "verify", "commit")


@dataclass(frozen=True, slots=True)
class Publication:
    """One version that went into force."""

    version: int
    digest: str
    drift: Drift
    weights_bytes: int
    kernels: dict[str, str]
    publish_s: float
    """From the learner's call until every actor ran the new weights."""
    swap_s: float
    """Longest wait of an actor for the end of its round."""
    draft_version: int | None = None
    """Policy version whose rollouts the MTP head was trained on last; None without one."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """Lifetime sums of a cluster at one moment."""

    elapsed_s: float
    """Wall clock since the learner's first request, over all resumed parts of a run."""
    ledger: dict[str, int]
    generated_tokens: int
    finished_samples: int
    truncated_samples: int
    finished_tokens: int
    counters: SpecCounters
    phase_s: dict[str, float]
    ages: dict[int, int]
    """Samples handed over by age in versions."""
    stale_by_length: dict[int, int]
    """Samples dropped as stale by length class (the power of two at or above the length)."""
    publication: Publication | None
    actors: int
    restarts: int
    last_loss: str
    """The actor lost last and why; empty when none was."""
    groups_held: int
    """Groups submitted and not handed over."""
    gauges: dict[str, float] = field(default_factory=dict)
    explanations: dict[str, str] = field(default_factory=dict)
    """Why each actor's last round drafted as much as it did."""

    @staticmethod
    def zero() -> "ClusterSnapshot":
        """The moment before anything happened."""
        return ClusterSnapshot(
            elapsed_s=0.0,
            ledger=Ledger().counts(),
            generated_tokens=0,
            finished_samples=0,
            truncated_samples=0,
            finished_tokens=0,
            counters=SpecCounters(),
            phase_s={},
            ages={},
            stale_by_length={},
            publication=None,
            actors=0,
            restarts=0,
            last_loss="",
            groups_held=0,
        )


def metrics_row(before: ClusterSnapshot, now: ClusterSnapshot) -> dict[str, float]:
    """Metrics of the interval between two snapshots, and lifetime ones under `accepted/`."""
    seconds = now.elapsed_s - before.elapsed_s
    tokens = now.counters.emitted - before.counters.emitted
    finished = now.finished_samples - before.finished_samples
    accepted = now.ledger["accepted"] - before.ledger["accepted"]
    row = {
        "accepted/samples": float(now.ledger["accepted"]),
        "staleness/dropped": float(now.ledger["stale"]),
        "fleet/actors": float(now.actors),
        "fleet/restarts": float(now.restarts),
        **{f"ledger/{name}": float(count) for name, count in now.ledger.items()},
        **{name: value for name, value in now.gauges.items() if not name.startswith("draft/")},
    }
    _ratio(row, "accepted/samples_per_hour", now.ledger["accepted"] * 3600, now.elapsed_s)
    _ratio(row, "accepted/samples_per_hour_window", accepted * 3600, seconds)
    _ratio(row, "rollout/tokens_per_s", tokens, seconds)
    _ratio(row, "rollout/samples_per_s", finished, seconds)
    _ratio(row, "rollout/length_mean", now.finished_tokens - before.finished_tokens, finished)
    _ratio(
        row, "rollout/truncated_rate", now.truncated_samples - before.truncated_samples, finished
    )
    row |= spec_row(before.counters, now.counters)
    row |= draft_row(before.gauges, now.gauges)
    row |= exactness_row(now.counters)
    phases = {p: now.phase_s.get(p, 0.0) - before.phase_s.get(p, 0.0) for p in PHASES}
    total = sum(phases.values())
    _ratio(row, "spec/time/propose_share", phases["propose"], total)
    _ratio(row, "spec/time/verify_share", phases["score"] + phases["verify"], total)
    _ratio(row, "spec/time/commit_share", phases["commit"], total)
    _ratio(row, "spec/time/other_share", phases["plan"], total)
    ages = {a: n - before.ages.get(a, 0) for a, n in now.ages.items()}
    ages = {age: num for age, num in ages.items() if num}
    _ratio(row, "staleness/mean", sum(age * n for age, n in ages.items()), sum(ages.values()))
    if ages:
        row["staleness/max"] = float(max(ages))
    if (published := now.publication) is not None:
        row |= {
            "quant/drift_kl": published.drift.kl,
            "quant/drift_abs_logp": published.drift.abs_logp,
            "quant/drift_tv": published.drift.tv,
            "quant/weights_bytes": float(published.weights_bytes),
            "sync/version": float(published.version),
            "sync/publish_s": published.publish_s,
            "sync/swap_s": published.swap_s,
            "rollout/version": float(published.version),
        }
        if published.draft_version is not None:
            row["spec/draft_lag"] = float(published.version - published.draft_version)
    return row


def spec_row(before: SpecCounters, now: SpecCounters) -> dict[str, float]:
    """Speculation metrics of an interval."""
    row: dict[str, float] = {}
    rounds = now.rounds - before.rounds
    verified, accepted = now.verified - before.verified, now.accepted - before.accepted
    foretold = now.foretold_reached - before.foretold_reached
    expected = now.expected_accepted - before.expected_accepted
    observed = now.foretold_accepted - before.foretold_accepted
    drafted_rounds = _first(now.reached) - _first(before.reached)
    _ratio(row, "spec/acceptance_rate", accepted, verified)
    _ratio(row, "spec/tokens_per_target_step", now.emitted - before.emitted, rounds)
    _ratio(row, "spec/accepted_len_mean", accepted, drafted_rounds)
    _ratio(row, "spec/draft_len_mean", verified, rounds)
    _ratio(row, "spec/expected_acceptance", expected, foretold)
    _ratio(row, "spec/observed_minus_expected", observed - expected, foretold)
    for depth, count in enumerate(now.reached):
        old = before.reached[depth] if depth < len(before.reached) else 0
        old_accepted = (
            before.accepted_by_position[depth] if depth < len(before.accepted_by_position) else 0
        )
        _ratio(
            row,
            f"spec/pos_{depth}/conditional_rate",
            now.accepted_by_position[depth] - old_accepted,
            count - old,
        )
    return row


def draft_row(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """What the draft lengths of the interval's rounds rested on (`rollout.draft_len`); empty where
    lengths are fixed."""

    def since(name: str) -> float:
        return now.get(f"draft/{name}", 0.0) - before.get(f"draft/{name}", 0.0)

    row: dict[str, float] = {}
    if since("rounds") > 0:
        _ratio(row, "spec/draft/price", since("price"), since("rounds"))
        _ratio(row, "spec/draft/expected_speedup", since("speedup"), since("rounds"))
        _ratio(row, "spec/draft/plain_rounds_share", since("plain"), since("rounds"))
        _ratio(row, "spec/draft/kept_share", since("kept"), since("offered"))
    return row


def exactness_row(counters: SpecCounters) -> dict[str, float]:
    """The watch over everything emitted so far (`rollout.watch`); `exact/alarm` is 0 or 1."""
    row = {"exact/alarm": float(alarm(counters))}
    for name, p_value in (
        ("exact/acceptance_p_value", acceptance_p_value(counters)),
        ("exact/pit_p_value", pit_p_value(counters)),
    ):
        if p_value is not None:
            row[name] = p_value
    return row


def _first(counts: list[int]) -> int:
    return counts[0] if counts else 0


def _ratio(row: dict[str, float], name: str, numerator: float, denominator: float) -> None:
    if denominator > 0:
        row[name] = numerator / denominator
