"""Turns the folder of a run into one HTML page that needs nothing but itself.

`write_report(run_dir)` reads config.yaml, passport.json, metrics.jsonl, samples.jsonl and
summary.json and writes report.html beside them: headline numbers, plots as inline SVG, the ladder of
plain against speculative decoding, transcripts, passport and configuration. The page loads nothing,
runs no script, and follows the reader's light or dark scheme.

Runs end in every way, so every input may be missing or cut short: the page says which, a headline
number that summary.json lacks is computed from what is there, and a plot without data says so.
Ratios are sums over sums, also across samples. Of rows that repeat a step (a resumed run) the last
one counts. Everything that came from the run is escaped; models write HTML too.

What it does not do: compare runs, or read wandb's files.
"""

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.page import details, document, esc, problems, table, tiles

MISSING = "\N{EN DASH}"
MAX_TEXT_LEN = 2000
MAX_TRANSCRIPTS = 6
TIME_SHARES = ("propose", "verify", "commit", "other")
FATES = ("accepted", "stale", "filtered", "failed", "duplicate", "waiting", "in_flight")
FINISH_REASONS = ("stop", "length", "abort", "error")

# Colours that no plot would pick by chance; the page maps each to a variable of its colour scheme.
INK, GRID, *SERIES = ("#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005", "#0a0006", "#0a0007")
CSS_VARIABLES = {INK: "--ink", GRID: "--line"} | {
    colour: f"--series-{number}" for number, colour in enumerate(SERIES, start=1)
}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SampleView:
    """What the page needs of a line of samples.jsonl; the per-token lists are left behind."""

    id: str
    step: float | None
    num_tokens: int
    finish_reason: str
    reward: float | None
    fate: str
    text: str | None
    rounds: int
    verified: int
    accepted: int
    reached: tuple[int, ...]
    accepted_by_position: tuple[int, ...]


@dataclass(slots=True)
class RunData:
    """What could be read of a run, and in `problems` what could not, in sentences."""

    name: str
    config: str | None = None
    passport: str | None = None
    rows: list[Row] = field(default_factory=list)
    samples: list[SampleView] = field(default_factory=list)
    summary: Row = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def series(self, metric: str, axis: str = "learner/step") -> tuple[list[float], list[float]]:
        """The metric over its axis, by x; NaN where the run logged a value that was not finite."""
        points: dict[float, float] = {}
        for row in self.rows:
            x = _number(row.get(axis, row.get("rollout/version")))
            if x is not None and metric in row:
                value = _number(row[metric])
                points[x] = math.nan if value is None else value
        xs = sorted(points)
        return xs, [points[x] for x in xs]

    def last(self, metric: str) -> float | None:
        """The last finite value of the metric."""
        values = (_number(row.get(metric)) for row in reversed(self.rows))
        return next((value for value in values if value is not None), None)


def write_report(run_dir: Path) -> Path:
    """Writes `run_dir/report.html` from whatever the run left there and returns its path.

    Raises `FileNotFoundError` if the folder does not exist.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is not a folder; give the folder that a run wrote")
    path = run_dir / "report.html"
    path.write_text(_page(_read_run(run_dir)), encoding="utf-8", errors="replace")
    return path


# Reading


def _read_run(run_dir: Path) -> RunData:
    run = RunData(name=run_dir.resolve().name)
    run.config = _read_text(run_dir / "config.yaml", run.problems)
    run.passport, _ = _read_object(run_dir / "passport.json", run.problems)
    run.rows = list(_read_lines(run_dir / "metrics.jsonl", run.problems))
    run.samples = [_sample(row) for row in _read_lines(run_dir / "samples.jsonl", run.problems)]
    _, run.summary = _read_object(run_dir / "summary.json", run.problems)
    run.name = str(run.summary.get("name") or run.name)
    if num_nan := int(sum(_number(row.get("sink/nan_count")) or 0 for row in run.rows)):
        run.problems.append(f"Values logged as NaN or infinite, gaps in the plots: {num_nan}.")
    return run


def _read_text(path: Path, problems: list[str]) -> str | None:
    if not path.exists():
        problems.append(f"{path.name} is missing.")
        return None
    return path.read_text(encoding="utf-8", errors="replace")


def _read_object(path: Path, problems: list[str]) -> tuple[str | None, Row]:
    """The text of a file, if there is one, and the JSON object in it, empty if there is none."""
    text = _read_text(path, problems)
    value = None if text is None else _parse(text)
    if text is not None and value is None:
        problems.append(f"{path.name} is cut short or not a JSON object.")
    return text, value or {}


def _read_lines(path: Path, problems: list[str]) -> Iterable[Row]:
    """The JSON objects of a file, one a line; adds a problem for the lines that are none."""
    if not path.exists():
        problems.append(f"{path.name} is missing.")
        return
    num_bad, last_is_bad = 0, False
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            row = _parse(line)
            last_is_bad = row is None and bool(line.strip())
            num_bad += last_is_bad
            if row is not None:
                yield row
    if num_bad:
        place = ", the last line among them" if last_is_bad else ""
        problems.append(
            f"{path.name}: lines that could not be read and were left out: {num_bad}{place}."
        )


def _parse(text: str) -> Row | None:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _count(value: object) -> int:
    return int(_number(value) or 0)


def _counts(value: object) -> tuple[int, ...]:
    return tuple(map(_count, value)) if isinstance(value, list) else ()


def _sample(row: Row) -> SampleView:
    counters = row.get("counters") or {}
    text = row.get("text")
    return SampleView(
        id=str(row.get("id", MISSING)),
        step=_number(row.get("step")),
        num_tokens=len(row.get("token_ids") or ()),
        finish_reason=str(row.get("finish_reason", MISSING)),
        reward=_number(row.get("reward")),
        fate=str(row.get("fate", MISSING)),
        text=None if text is None else str(text)[:MAX_TEXT_LEN],
        rounds=_count(counters.get("rounds")),
        verified=_count(counters.get("verified")),
        accepted=_count(counters.get("accepted")),
        reached=_counts(counters.get("reached")),
        accepted_by_position=_counts(counters.get("accepted_by_position")),
    )


# Headline numbers


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline number, its unit or definition, and where it was read."""

    label: str
    value: str
    note: str


def _tiles(run: RunData) -> list[Tile]:
    samples = run.samples
    rounds = sum(s.rounds for s in samples)
    verified = sum(s.verified for s in samples)
    return [
        _tile(run, "Accepted samples / h", "accepted_samples_per_hour", "{:,.0f}",
              "accepted/samples_per_hour"),
        _tile(run, "Tokens / s", "tokens_per_second", "{:,.1f}", "rollout/tokens_per_s"),
        _tile(run, "Tokens per target step", "tokens_per_target_step", "{:.2f}",
              computed=_ratio(sum(s.num_tokens for s in samples), rounds)),
        _tile(run, "Acceptance rate", "acceptance_rate", "{:.3f}",
              computed=_ratio(sum(s.accepted for s in samples), verified)),
        _reward_tile(run),
        _tile(run, "Drift KL", "drift_kl", "{:.2e}", "quant/drift_kl"),
    ]  # fmt: skip


def _tile(
    run: RunData,
    label: str,
    key: str,
    form: str,
    metric: str | None = None,
    computed: float | None = None,
) -> Tile:
    """The summary's number, else the metric's last value, else the one computed from samples."""
    for value, note in (
        (_number(run.summary.get(key)), "whole run"),
        (run.last(metric) if metric else None, "last logged value"),
        (computed, "over the samples on disk"),
    ):
        if value is not None:
            return Tile(label, form.format(value), note)
    return Tile(label, MISSING, "not recorded")


def _reward_tile(run: RunData) -> Tile:
    first = _number(run.summary.get("reward_first_third"))
    last = _number(run.summary.get("reward_last_third"))
    note = "mean, first third \N{RIGHTWARDS ARROW} last third of the steps"
    if first is None or last is None:
        first, last = _reward_thirds(run.samples)
    return Tile("Reward", f"{_show(first)} \N{RIGHTWARDS ARROW} {_show(last)}", note)


def _reward_thirds(samples: Sequence[SampleView]) -> tuple[float | None, float | None]:
    """Mean reward a sample over the first and the last third of the steps that have samples."""
    known = [(s.step, s.reward) for s in samples if s.step is not None and s.reward is not None]
    steps = sorted({step for step, _ in known})
    if not steps:
        return None, None
    third = math.ceil(len(steps) / 3)
    early = [reward for step, reward in known if step <= steps[third - 1]]
    late = [reward for step, reward in known if step >= steps[-third]]
    return _ratio(sum(early), len(early)), _ratio(sum(late), len(late))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _show(value: float | None, form: str = "{:.3f}") -> str:
    return MISSING if value is None else form.format(value)


# Plots: each draws on a figure and says whether there was anything to draw


def _draw_reward(run: RunData, figure: Figure) -> bool:
    xs, ys = run.series("reward/mean")
    axes = _axes(figure, "step", "mean reward")
    axes.plot(xs, ys, "o", markersize=2.5, alpha=0.55, color=SERIES[0], label="step")
    axes.plot(xs, _moving_mean(ys), color=SERIES[1], label="moving mean")
    _legend(axes)
    return bool(xs)


def _moving_mean(values: Sequence[float]) -> list[float]:
    """Trailing mean over a tenth of the run (3 values at least); NaN is left out, not averaged in."""
    window = max(3, len(values) // 10)
    means: list[float] = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - window) : end] if not math.isnan(value)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means


def _draw_accepted_per_hour(run: RunData, figure: Figure) -> bool:
    axes = _axes(figure, "step", "samples per hour")
    drawn = [
        _line(run, axes, "accepted/samples_per_hour_window", "recent window", SERIES[1]),
        _line(run, axes, "accepted/samples_per_hour", "since start", SERIES[0]),
    ]
    axes.set_ylim(bottom=0)
    _legend(axes)
    return any(drawn)


def _draw_positions(run: RunData, figure: Figure) -> bool:
    reached = _sum_by_position(s.reached for s in run.samples)
    accepted = _sum_by_position(s.accepted_by_position for s in run.samples)
    accepted += [0] * (len(reached) - len(accepted))
    kept = [position for position, count in enumerate(reached) if count]
    axes = _axes(figure, "draft position", "accepted / reached")
    bars = axes.bar(kept, [accepted[p] / reached[p] for p in kept], width=0.7, color=SERIES[0])
    labels = [_compact(reached[position]) for position in kept]
    axes.bar_label(bars, labels, padding=2, fontsize=7, rotation=90 if len(kept) > 10 else 0)
    axes.set_ylim(0, 1.14)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_xticks(kept)
    return bool(kept)


def _sum_by_position(lists: Iterable[Sequence[int]]) -> list[int]:
    totals: list[int] = []
    for counts in lists:
        totals += [0] * (len(counts) - len(totals))
        for position, count in enumerate(counts):
            totals[position] += count
    return totals


def _compact(count: float) -> str:
    if count >= 1e6:
        return f"{count / 1e6:.1f}M"
    return f"{count / 1e3:.1f}k" if count >= 1e4 else f"{count:,.0f}"


def _draw_tokens_per_step(run: RunData, figure: Figure) -> bool:
    axes = _axes(figure, "step", "tokens per target step")
    drawn = _line(run, axes, "spec/tokens_per_target_step", "emitted / target steps", SERIES[0])
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":", alpha=0.6, label="plain decoding")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return drawn


def _draw_draft_lengths(run: RunData, figure: Figure) -> bool:
    axes = _axes(figure, "step", "probability, share")
    drawn = _line(run, axes, "spec/draft/price", "price of a drafted token", SERIES[0])
    drawn |= _line(run, axes, "spec/draft/plain_rounds_share", "rounds without drafts", SERIES[1])
    drawn |= _line(run, axes, "spec/draft/kept_share", "scored / offered tokens", SERIES[2])
    axes.set_ylim(0, 1.02)
    _legend(axes)
    return drawn


def _draw_time_shares(run: RunData, figure: Figure) -> bool:
    shares = [
        dict(zip(*run.series(f"spec/time/{part}_share"), strict=True)) for part in TIME_SHARES
    ]
    xs = sorted(set().union(*shares))
    heights = [[np.nan_to_num(share.get(x, 0.0)) for x in xs] for share in shares]
    axes = _axes(figure, "step", "share of time")
    if xs:
        axes.stackplot(xs, heights, labels=TIME_SHARES, colors=SERIES, alpha=0.85, linewidth=0)
        axes.set_ylim(0, 1)
        axes.margins(x=0)
        _legend(axes)
    return bool(xs)


def _draw_staleness(run: RunData, figure: Figure) -> bool:
    axes = _axes(figure, "step", "versions behind")
    drawn = [
        _line(run, axes, "staleness/max", "max", SERIES[1]),
        _line(run, axes, "staleness/mean", "mean", SERIES[0]),
    ]
    axes.set_ylim(bottom=0)
    _legend(axes)
    return any(drawn)


def _draw_drift(run: RunData, figure: Figure) -> bool:
    upper, lower = _two_axes(figure, "policy version")
    upper.set_ylabel("KL, nats")
    lower.set_ylabel("mean |\N{GREEK CAPITAL LETTER DELTA}logp|, nats")
    drawn = [
        _line(run, upper, "quant/drift_kl", "KL", SERIES[0], axis="rollout/version"),
        _line(run, lower, "quant/drift_abs_logp", "|dlogp|", SERIES[1], axis="rollout/version"),
    ]
    upper.set_ylim(bottom=0)
    lower.set_ylim(bottom=0)
    return any(drawn)


def _draw_lengths(run: RunData, figure: Figure) -> bool:
    by_reason = {
        reason: [s.num_tokens for s in run.samples if s.finish_reason == reason]
        for reason in FINISH_REASONS
    }
    by_reason["unknown"] = [
        s.num_tokens for s in run.samples if s.finish_reason not in FINISH_REASONS
    ]
    present = {reason: lengths for reason, lengths in by_reason.items() if lengths}
    axes = _axes(figure, "tokens in the sample", "samples")
    if present:
        longest = max(max(lengths) for lengths in present.values())
        edges = np.linspace(0, longest + 1, min(24, longest + 1) + 1)
        colours = [SERIES[list(by_reason).index(reason)] for reason in present]
        axes.hist(
            list(present.values()), bins=list(edges), stacked=True, color=colours, alpha=0.9,
            label=list(present), rwidth=0.92,
        )  # fmt: skip
        _legend(axes)
    return bool(present)


def _draw_ledger(run: RunData, figure: Figure) -> bool:
    counts = _ledger(run)
    axes = _axes(figure, "samples", "")
    fates = list(counts)[::-1]
    bars = axes.barh(fates, [counts[fate] for fate in fates], color=SERIES[0], height=0.65)
    axes.bar_label(bars, [f"{counts[fate]:,.0f}" for fate in fates], padding=3, fontsize=8)
    axes.margins(x=0.14)
    axes.grid(visible=False, axis="y")
    return bool(counts)


def _ledger(run: RunData) -> dict[str, float]:
    """Samples by fate: the summary's ledger, else the last one logged."""
    final = run.summary.get("ledger")
    final = final if isinstance(final, dict) else {}
    counts = {fate: _number(final.get(fate)) for fate in FATES}
    if not any(count is not None for count in counts.values()):
        counts = {fate: run.last(f"ledger/{fate}") for fate in FATES}
    return {fate: count for fate, count in counts.items() if count is not None}


def _draw_mismatch(run: RunData, figure: Figure) -> bool:
    upper, lower = _two_axes(figure, "step")
    upper.set_ylabel("nats")
    lower.set_ylabel("ESS, share")
    drawn = [
        _line(run, upper, "mismatch/k1", "k1", SERIES[0]),
        _line(run, upper, "mismatch/k3", "k3", SERIES[1]),
        _line(run, lower, "mismatch/ess", "ESS", SERIES[2]),
    ]
    _legend(upper)
    return any(drawn)


def _axes(figure: Figure, xlabel: str, ylabel: str) -> Axes:
    axes: Axes = figure.subplots()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return axes


def _two_axes(figure: Figure, xlabel: str) -> tuple[Axes, Axes]:
    upper, lower = figure.subplots(2, 1, sharex=True)
    lower.set_xlabel(xlabel)
    return upper, lower


def _line(
    run: RunData, axes: Axes, metric: str, label: str, colour: str, axis: str = "learner/step"
) -> bool:
    xs, ys = run.series(metric, axis)
    marker = "o" if len(xs) < 3 else None  # a line through one point would be invisible
    axes.plot(xs, ys, color=colour, label=label, marker=marker, markersize=3)
    return bool(xs)


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=5, frameon=False,
        borderaxespad=0.1, handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of the page: `caption` states what is divided by what."""

    title: str
    caption: str
    draw: Callable[[RunData, Figure], bool]


PLOTS = (
    Plot("Reward over steps", "Mean reward of the samples a step learnt from.", _draw_reward),
    Plot(
        "Accepted samples per hour",
        "Samples that an optimiser step consumed / hours of training.",
        _draw_accepted_per_hour,
    ),
    Plot(
        "Acceptance by draft position",
        "Accepted / verifications that reached the position, summed over samples; "
        "above each bar, how often it was reached.",
        _draw_positions,
    ),
    Plot(
        "Tokens per target step",
        "Emitted tokens / target forwards a row took part in; plain decoding is 1.",
        _draw_tokens_per_step,
    ),
    Plot(
        "Why rounds draft as much as they do",
        "A drafted token is scored where the chance that it will be accepted exceeds its price: what "
        "it adds to the round's seconds, in tokens. Means over the engine's rounds.",
        _draw_draft_lengths,
    ),
    Plot("Where rollout time goes", "Share of the engine's time a phase took.", _draw_time_shares),
    Plot(
        "Staleness",
        "Policy version of the learner less that of the sample, when a step consumes it.",
        _draw_staleness,
    ),
    Plot(
        "Drift of the rollout weights",
        "Rollout law against the full-precision law, on a fixed probe batch.",
        _draw_drift,
    ),
    Plot("Sample lengths", "Samples by length and by how they finished.", _draw_lengths),
    Plot("What became of the samples", "Every sample has one fate; counts.", _draw_ledger),
    Plot(
        "Learner against rollout",
        "k1 and k3 estimate the KL between the two laws of the same tokens; "
        "ESS is the effective share of samples after importance weighting.",
        _draw_mismatch,
    ),
)

PLOT_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: selectable, and in the page's own font
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.4,
    "legend.fontsize": 8,
}


def _plot_html(run: RunData, plot: Plot) -> str:
    with matplotlib.rc_context(PLOT_STYLE | {"svg.hashsalt": plot.title}):
        figure = Figure(figsize=(5.6, 2.9), layout="constrained")
        drawn = plot.draw(run, figure)
        picture = _svg(figure, plot.title) if drawn else '<p class="empty">no data</p>'
    return (
        f"<figure><h3>{esc(plot.title)}</h3>{picture}"
        f"<figcaption>{esc(plot.caption)}</figcaption></figure>"
    )


def _svg(figure: Figure, title: str) -> str:
    """The figure as an element for an HTML page: no prologue, no outside names, page colours."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every figure of the page
    viewbox = re.search(r'viewBox="[^"]*"', svg)
    assert viewbox is not None, "matplotlib gives every figure a viewBox"
    opening = f'<svg {viewbox[0]} role="img" aria-label="{esc(title)}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)
    for colour, variable in CSS_VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg


# The ladder

LADDER_COLUMNS = (
    ("tokens/s", "tokens_per_s", "{:,.1f}"),
    ("min", "tokens_per_s_min", "{:,.1f}"),
    ("max", "tokens_per_s_max", "{:,.1f}"),
    ("speed-up", "speedup_vs_first", "{:.2f}\N{MULTIPLICATION SIGN}"),
    ("tokens per target step", "tokens_per_target_step", "{:.2f}"),
    ("acceptance", "acceptance_rate", "{:.3f}"),
    ("drift KL", "drift_kl", "{:.2e}"),
)


def _ladder_html(summary: Row) -> str:
    ladder = summary.get("ladder")
    rows = [row for row in ladder if isinstance(row, dict)] if isinstance(ladder, list) else []
    if not rows:
        return '<p class="empty">no data</p>'
    head = "".join(f"<th>{esc(title)}</th>" for title, _, _ in LADDER_COLUMNS)
    body = "".join(
        f"<tr><th>{esc(row.get('name', MISSING))}</th>"
        + "".join(
            f"<td>{_show(_number(row.get(key)), form)}</td>" for _, key, form in LADDER_COLUMNS
        )
        + "</tr>"
        for row in rows
    )
    verdicts = "".join(f"<p>{esc(sentence)}</p>" for sentence in ladder_verdicts(rows))
    return verdicts + table(f"<th></th>{head}", body)


def ladder_verdicts(ladder: Sequence[Row]) -> list[str]:
    """A sentence for each speculative row that has its plain counterpart: who won on this machine."""
    by_name = {str(row.get("name")): row for row in ladder}
    sentences = []
    for name, row in by_name.items():
        kind = name.removeprefix("speculative ")
        if kind != name and (plain := by_name.get(f"plain {kind}")):
            sentences.append(_verdict(kind, plain, row))
    return sentences


def _verdict(kind: str, plain: Row, speculative: Row) -> str:
    slow, fast = _number(plain.get("tokens_per_s")), _number(speculative.get("tokens_per_s"))
    if not slow or fast is None:
        return f"{kind.capitalize()}: a speed is missing, so there is no verdict."
    numbers = (
        f"{fast:,.1f} against {slow:,.1f} tokens/s for plain decoding, {fast / slow:.2f} times"
    )
    overlap = _ranges_overlap(plain, speculative)
    spread = {None: "no spread recorded", True: "ranges overlap", False: "ranges do not overlap"}
    outcome = "won" if fast > slow else "lost"
    if overlap or fast == slow:
        outcome = "neither won nor lost"
    return f"{kind.capitalize()}: speculation {outcome} on this machine ({numbers}; {spread[overlap]})."


def _ranges_overlap(one: Row, other: Row) -> bool | None:
    """Whether the measured speeds of two rows overlap; None when a spread is missing, as it is of a
    single measurement."""
    lows = [_number(row.get("tokens_per_s_min")) for row in (one, other)]
    highs = [_number(row.get("tokens_per_s_max")) for row in (one, other)]
    if None in lows or None in highs or lows == highs:
        return None
    return max(low for low in lows if low is not None) <= min(h for h in highs if h is not None)


# Transcripts


def _transcripts_html(samples: Sequence[SampleView]) -> str:
    chosen = _choose_transcripts([sample for sample in samples if sample.text])
    return "".join(map(_transcript_html, chosen)) or '<p class="empty">no data</p>'


def _choose_transcripts(samples: Sequence[SampleView]) -> list[SampleView]:
    """The first two, the two of the lowest and of the highest reward, and the last; each once."""
    by_reward = sorted((s for s in samples if s.reward is not None), key=lambda s: s.reward or 0.0)
    picks = [*samples[:1], *by_reward[:2], *by_reward[-2:], *samples[-1:]]
    return list({sample.id: sample for sample in picks}.values())[:MAX_TRANSCRIPTS]


def _transcript_html(sample: SampleView) -> str:
    facts = (
        f"step {_show(sample.step, '{:.0f}')}",
        f"reward {_show(sample.reward)}",
        sample.fate,
        f"{sample.num_tokens:,} tokens, {sample.finish_reason}",
    )
    return (
        f"<article><header><code>{esc(sample.id)}</code>"
        f"{''.join(f'<span>{esc(fact)}</span>' for fact in facts)}</header>"
        f"<pre>{esc(sample.text)}</pre></article>"
    )


# The page


def _page(run: RunData) -> str:
    return document(
        run.name,
        (
            f'<h1>{esc(run.name)}</h1><p class="lead">{esc(_lead(run))}</p>',
            problems(run.problems),
            tiles((tile.label, tile.value, tile.note) for tile in _tiles(run)),
            f'<h2>Plots</h2><section class="plots">{_plots_html(run)}</section>',
            f"<h2>Plain against speculative decoding</h2>{_ladder_html(run.summary)}",
            f"<h2>Transcripts</h2>{_transcripts_html(run.samples)}",
            "<h2>What this run was</h2>",
            details("Passport", run.passport),
            details("Configuration", run.config),
        ),
    )


def _lead(run: RunData) -> str:
    steps = _number(run.summary.get("steps")) or run.last("learner/step")
    accepted = _number(run.summary.get("accepted_samples")) or run.last("accepted/samples")
    size = "of unknown length" if steps is None else f"of {steps:,.0f} optimiser steps"
    fed = "" if accepted is None else f", fed by {accepted:,.0f} accepted samples"
    return (
        f"A reinforcement-learning run {size}{fed}; its rollouts come from exact speculative "
        "sampling, so every token follows the law of the policy that verified it. "
        f"How it ended: {run.summary.get('ended', 'not recorded')}."
    )


def _plots_html(run: RunData) -> str:
    return "".join(_plot_html(run, plot) for plot in PLOTS)
