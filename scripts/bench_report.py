"""What the engine benchmark found: ratios, targets, tables for people and one JSON object."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from scripts.bench_roofline import Roofline, StepWork

BASELINES = ("hf_bf16", "vllm_bf16", "vllm_w8a8", "llama_cpp")
LABELS = {
    "ours_bf16": "this engine, bf16 plain",
    "ours_float32": "this engine, float32 plain",
    "ours_w8a16": "this engine, W8A16 plain",
    "ours_w8a8": "this engine, W8A8 plain",
    "ours_w8a16_spec": "this engine, W8A16 speculative",
    "ours_w8a8_spec": "this engine, W8A8 speculative",
    "hf_bf16": "Hugging Face generate, bf16",
    "hf_float32": "Hugging Face generate, float32",
    "vllm_bf16": "vLLM, bf16",
    "vllm_float32": "vLLM, float32",
    "vllm_w8a8": "vLLM, W8A8",
    "llama_cpp": "llama.cpp, Q4_1",
}

Times = Mapping[str, Mapping[int, Sequence[float]]]
"""Engine -> B -> tokens a second of every repeat."""
Ratios = dict[str, dict[int, float]]
"""Baseline -> B -> ours / baseline."""
Bound = Literal["at least", "at most", "below"]


# ---- targets ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Goal:
    """What a number should be."""

    figure: str
    """`ratio/<baseline>`, `ratio_speculative/<baseline>`, or a figure of its own."""
    batch: int
    bound: Bound
    value: float

    def met(self, measured: float) -> bool:
        if self.bound == "at least":
            return measured >= self.value
        return measured <= self.value if self.bound == "at most" else measured < self.value


def _ratios(figure: str, by_batch: Mapping[int, float]) -> list[Goal]:
    return [Goal(figure, batch, "at least", value) for batch, value in by_batch.items()]


OVERHEAD_BATCH = 8
GOALS: tuple[Goal, ...] = (
    *_ratios("ratio/hf_bf16", {1: 5.0, 8: 4.5, 32: 3.5}),
    *_ratios("ratio/vllm_bf16", {1: 2.8, 8: 2.0, 32: 1.6}),
    *_ratios("ratio/vllm_w8a8", {1: 2.0, 8: 1.6, 32: 1.3}),
    *_ratios("ratio/llama_cpp", {1: 1.0}),
    *_ratios("ratio_speculative/llama_cpp", {1: 1.3}),
    *_ratios("roofline_share", {1: 0.45, 8: 0.40, 32: 0.40}),
    *_ratios("vllm_controller_vs_plain", {1: 1.15, 8: 0.97, 32: 0.97}),
    Goal("zero_speculation_overhead", OVERHEAD_BATCH, "at most", 0.02),
    Goal("sampler_share", 32, "below", 0.15),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A goal and what came of it; None where it was not measured."""

    goal: Goal
    measured: float | None

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else self.goal.met(self.measured)

    def to_json(self) -> dict[str, Any]:
        return asdict(self.goal) | {"measured": self.measured, "met": self.met}


# ---- what was measured --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Missing:
    """An engine that was asked for and did not run."""

    engine: str
    reason: str
    install: str


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step of the better quantised plain engine at one batch size."""

    engine: str
    work: StepWork
    seconds: float
    by_phase_s: dict[str, float]
    by_operation_s: dict[str, float]

    def roofline_share(self, roofline: Roofline) -> float:
        return self.work.seconds(roofline) / self.seconds

    @property
    def sampler_share(self) -> float:
        """Law, draw and bookkeeping of the rows: what is not the forward."""
        phases = self.by_phase_s
        return (phases["verify"] + phases["commit"]) / sum(phases.values())


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything a run of the benchmark found."""

    num_tokens: int
    times: Times
    steps: Mapping[int, Step]
    roofline: Roofline
    time_shares: Mapping[str, Mapping[int, Mapping[str, float]]]
    """Our engine -> B -> phase -> share of its seconds."""
    speculation: Mapping[str, Mapping[int, Mapping[str, float | None]]]
    """Our speculative engine -> B -> acceptance rate and tokens a target step."""
    zero_speculation_overhead: float | None
    overhead_range: tuple[float, float] | None
    memory: Mapping[str, Any]
    missing: Sequence[Missing]
    about: Mapping[str, Any] = field(default_factory=dict)
    """Machine, versions, settings: as they go into the JSON."""
    vllm_controller: Mapping[str, Any] = field(default_factory=dict)
    """B -> what `bench_vllm.py` found there."""

    @property
    def vllm_controller_vs_plain(self) -> dict[int, float]:
        """B -> vLLM with our plug-in and an adaptive draft length / the faster plain vLLM."""
        cells = self.vllm_controller.items()
        return {int(batch): cell["vs"][cell["plain"]] for batch, cell in cells}

    @property
    def tok_s(self) -> dict[str, dict[int, float]]:
        return {
            engine: {batch: statistics.median(values) for batch, values in by_batch.items()}
            for engine, by_batch in self.times.items()
        }

    def quantised(self, names: Sequence[str]) -> dict[int, str]:
        """B -> the fastest of the named engines."""
        return best_by_batch(self.tok_s, names)

    def ratio(self, names: Sequence[str]) -> Ratios:
        """The fastest of the named engines against every baseline that ran."""
        return ratios(self.tok_s, names)

    def figures(self, plain: Sequence[str], speculative: Sequence[str]) -> dict[str, Any]:
        """Figure -> B -> value, as goals name them."""
        found: dict[str, dict[int, float]] = {
            "roofline_share": {b: s.roofline_share(self.roofline) for b, s in self.steps.items()},
            "sampler_share": {b: step.sampler_share for b, step in self.steps.items()},
            "vllm_controller_vs_plain": self.vllm_controller_vs_plain,
        }
        for name, engines in (("ratio", plain), ("ratio_speculative", speculative)):
            found |= {f"{name}/{base}": by for base, by in self.ratio(engines).items()}
        if self.zero_speculation_overhead is not None:
            found["zero_speculation_overhead"] = {OVERHEAD_BATCH: self.zero_speculation_overhead}
        return found

    def targets(self, plain: Sequence[str], speculative: Sequence[str]) -> list[Target]:
        found = self.figures(plain, speculative)
        return [Target(goal, found.get(goal.figure, {}).get(goal.batch)) for goal in GOALS]

    def to_json(self, plain: Sequence[str], speculative: Sequence[str]) -> dict[str, Any]:
        """Batch sizes become strings, as JSON wants its keys."""
        found = self.figures(plain, speculative)
        whole = {
            "tok_s": self.tok_s,
            "ratio": self.ratio(plain),
            "ratio_speculative": self.ratio(speculative),
            "roofline_share": found["roofline_share"],
            "vllm_controller_vs_plain": self.vllm_controller_vs_plain,
            "vllm_controller": self.vllm_controller,
            "zero_speculation_overhead": self.zero_speculation_overhead,
            "sampler_share": found["sampler_share"],
            "memory": self.memory,
            **self.about,
            "num_tokens": self.num_tokens,
            "tok_s_range": {
                engine: {batch: [min(values), max(values)] for batch, values in by.items()}
                for engine, by in self.times.items()
            },
            "quantised_plain": self.quantised(plain),
            "quantised_speculative": self.quantised(speculative),
            "speculation": self.speculation,
            "time_shares": self.time_shares,
            "zero_speculation_overhead_range": self.overhead_range,
            "roofline": asdict(self.roofline),
            "steps": {
                batch: {
                    "engine": step.engine,
                    "step_s": step.seconds,
                    "roofline_s": step.work.seconds(self.roofline),
                    **asdict(step.work),
                    "by_phase_s": step.by_phase_s,
                    "by_operation_s": step.by_operation_s,
                }
                for batch, step in self.steps.items()
            },
            "targets": [target.to_json() for target in self.targets(plain, speculative)],
            "missing": [asdict(missing) for missing in self.missing],
        }
        return _string_keys(whole)


def best_by_batch(tok_s: Mapping[str, Mapping[int, float]], names: Sequence[str]) -> dict[int, str]:
    """B -> the fastest of those of the named engines that ran it."""
    batches = sorted({batch for name in names for batch in tok_s.get(name, {})})
    return {
        batch: max((n for n in names if batch in tok_s.get(n, {})), key=lambda n: tok_s[n][batch])
        for batch in batches
    }


def ratios(tok_s: Mapping[str, Mapping[int, float]], names: Sequence[str]) -> Ratios:
    """Baseline -> B -> the fastest of the named engines / the baseline, of medians."""
    best = best_by_batch(tok_s, names)
    return {
        base: {
            batch: tok_s[best[batch]][batch] / value
            for batch, value in tok_s[base].items()
            if batch in best
        }
        for base in BASELINES
        if base in tok_s
    }


def _string_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _string_keys(inner) for key, inner in value.items()}
    return value


# ---- tables -------------------------------------------------------------------------------


def table(outcome: Outcome, plain: Sequence[str], speculative: Sequence[str]) -> str:
    """The whole result as text."""
    parts = [
        _throughput(outcome),
        _ratio_table(outcome, plain, speculative),
        _step_table(outcome),
        _share_table(outcome),
        _speculation_table(outcome),
        _controller_table(outcome),
        _memory_table(outcome),
        _target_table(outcome, plain, speculative),
        _bounds(outcome, plain, speculative),
        _missing(outcome),
    ]
    return "\n\n".join(part for part in parts if part)


def _throughput(outcome: Outcome) -> str:
    batches = sorted({batch for by in outcome.times.values() for batch in by})
    lines = [f"{'tok/s, median (range)':32}" + "".join(f"{f'B={b}':>20}" for b in batches)]
    for engine, by_batch in outcome.times.items():
        cells = []
        for batch in batches:
            values = by_batch.get(batch)
            text = "–"
            if values:
                text = f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"
            cells.append(f"{text:>20}")
        lines.append(f"{LABELS[engine]:32}" + "".join(cells))
    return "\n".join(lines)


def _ratio_table(outcome: Outcome, plain: Sequence[str], speculative: Sequence[str]) -> str:
    lines = []
    for title, names in (("plain", plain), ("speculative", speculative)):
        best = outcome.quantised(names)
        if not best:
            continue
        lines.append(f"{f'quantised {title} / baseline':32}" + _row(f"B={b}" for b in best))
        lines.append(
            f"{'  which of ours':32}" + _row(name[5:10].rstrip("_") for name in best.values())
        )
        for base, by_batch in outcome.ratio(names).items():
            cells = (f"{by_batch[b]:.2f}" if b in by_batch else "–" for b in best)
            lines.append(f"{'  / ' + LABELS[base]:32}" + _row(cells))
    return "\n".join(lines)


def _row(cells: Iterable[str], width: int = 10) -> str:
    return "".join(f"{cell:>{width}}" for cell in cells)


def _step_table(outcome: Outcome) -> str:
    roofline = outcome.roofline
    lines = [
        f"roofline: {roofline.bytes_per_s / 1e9:.1f} GB/s, "
        f"{roofline.operations_per_s / 1e9:.0f} GOP/s ("
        + ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in roofline.by_probe.items())
        + ")"
    ]
    if outcome.steps:
        names = ("step ms", "bytes ms", "arith ms", "share", "sampler")
        lines.append(f"{'quantised plain, a step':32}" + _row(names))
    for batch, step in outcome.steps.items():
        cells = (
            f"{1e3 * step.seconds:.2f}",
            f"{1e3 * step.work.read_s(roofline):.2f}",
            f"{1e3 * step.work.compute_s(roofline):.2f}",
            f"{step.roofline_share(roofline):.2f}",
            f"{step.sampler_share:.3f}",
        )
        lines.append(f"  B={batch:<3} {step.engine:25}" + _row(cells))
    return "\n".join(lines)


def _share_table(outcome: Outcome) -> str:
    rows = [
        (engine, batch, shares)
        for engine, by_batch in outcome.time_shares.items()
        for batch, shares in by_batch.items()
    ]
    if not rows:
        return ""
    lines = [f"{'time shares':32}" + _row(rows[0][2])]
    for engine, batch, shares in rows:
        lines.append(f"  B={batch:<3} {engine:25}" + _row(f"{s:.3f}" for s in shares.values()))
    return "\n".join(lines)


def _speculation_table(outcome: Outcome) -> str:
    lines = []
    for engine, by_batch in outcome.speculation.items():
        for batch, facts in by_batch.items():
            cells = (f"{name} {'–' if v is None else f'{v:.2f}'}" for name, v in facts.items())
            lines.append(f"  B={batch:<3} {engine:25}" + ", ".join(cells))
    return "\n".join(["speculation", *lines]) if lines else ""


def _controller_table(outcome: Outcome) -> str:
    lines = [
        f"{'vLLM, adaptive draft length':32}" + _row(["/ plain", "±", "controller", "plain"], 12)
    ]
    for batch, cell in outcome.vllm_controller.items():
        plain, error = cell["plain"], cell["vs_error"][cell["plain"]]
        cells = (
            f"{cell['vs'][plain]:.3f}",
            "–" if error is None else f"{error:.3f}",
            f"{cell['tok_s']['controller']:.1f}",
            f"{cell['tok_s'][plain]:.1f}",
        )
        lines.append(f"  B={batch:<3} {f'against {plain}':25}" + _row(cells, 12))
    return "\n".join(lines) if outcome.vllm_controller else ""


def _memory_table(outcome: Outcome) -> str:
    lines = [f"{'memory':32}" + _row(["MB"])]
    for place, by_name in outcome.memory.items():
        for name, number in by_name.items():
            lines.append(f"  {f'{place} {name}':30}" + _row([f"{number / 1e6:.1f}"]))
    return "\n".join(lines)


def _target_table(outcome: Outcome, plain: Sequence[str], speculative: Sequence[str]) -> str:
    lines = [f"{'targets':40}" + _row(["goal", "measured"])]
    for target in outcome.targets(plain, speculative):
        goal = target.goal
        sign = {"at least": "≥", "at most": "≤", "below": "<"}[goal.bound]
        measured = "–" if target.measured is None else f"{target.measured:.3f}"
        verdict = {True: "met", False: "NOT MET", None: "not measured"}[target.met]
        lines.append(
            f"  {f'{goal.figure}, B={goal.batch}':38}"
            + _row([f"{sign} {goal.value:g}", measured])
            + f"  {verdict}"
        )
    return "\n".join(lines)


def _bounds(outcome: Outcome, plain: Sequence[str], speculative: Sequence[str]) -> str:
    """For the batch sizes where a target is not met: where a step's time goes."""
    missed = [t.goal for t in outcome.targets(plain, speculative) if t.met is False]
    parts = []
    for batch in sorted({goal.batch for goal in missed} & set(outcome.steps)):
        step, roofline = outcome.steps[batch], outcome.roofline
        figures = ", ".join(goal.figure for goal in missed if goal.batch == batch)
        lines = [
            f"what bounds B={batch} ({step.engine}; missed: {figures}):",
            f"  of {1e3 * step.seconds:.2f} ms a step, {step.work.read_bytes / 1e6:.0f} MB take "
            f"{1e3 * step.work.read_s(roofline):.2f} ms to read and "
            f"{step.work.operations / 1e9:.2f} GOP {1e3 * step.work.compute_s(roofline):.2f} ms "
            "to compute at the rates measured; prefill is in the phases below",
        ]
        for title, seconds in (("phase", step.by_phase_s), ("operation", step.by_operation_s)):
            total = sum(seconds.values())
            for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
                cells = (f"{1e3 * value:.3f} ms", f"{value / total if total else 0:.3f}")
                lines.append(f"  {title:10}{name:20}" + _row(cells, 12))
        parts.append("\n".join(lines))
    return "\n".join(parts)


def _missing(outcome: Outcome) -> str:
    return "\n".join(f"not run: {m.engine}: {m.reason}; {m.install}" for m in outcome.missing)
