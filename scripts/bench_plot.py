"""The picture of the engine benchmark: tokens a second against rows in the batch."""

from pathlib import Path

from scripts.bench_report import LABELS, Outcome

STYLES = {
    "ours_bf16": ("#9ecae1", "-", "o"),
    "ours_float32": ("#6baed6", "-", "o"),
    "ours_w8a16": ("#2171b5", "-", "o"),
    "ours_w8a8": ("#08306b", "-", "o"),
    "ours_w8a16_spec": ("#2171b5", ":", "D"),
    "ours_w8a8_spec": ("#08306b", ":", "D"),
    "hf_bf16": ("#969696", "-", "s"),
    "hf_float32": ("#525252", "-", "s"),
    "vllm_bf16": ("#fdae6b", "-", "^"),
    "vllm_float32": ("#fd8d3c", "-", "^"),
    "vllm_w8a8": ("#d94801", "-", "^"),
    "llama_cpp": ("#238b45", "-", "*"),
}
"""Colour, line, marker: blue is this engine, dotted is speculative."""


def plot(outcome: Outcome, file: Path, title: str) -> None:
    """Tokens a second against rows, with the roofline of the quantised plain step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5.6), layout="constrained")
    rooflines = {b: b / step.work.seconds(outcome.roofline) for b, step in outcome.steps.items()}
    if rooflines:
        axes.plot(list(rooflines), list(rooflines.values()), "--", color="black", linewidth=1.2,
                  label="roofline, quantised plain")  # fmt: skip
    tok_s = outcome.tok_s
    for engine in sorted(tok_s, key=lambda name: -list(tok_s[name].values())[-1]):
        colour, line, marker = STYLES[engine]
        medians = tok_s[engine]
        lows = [m - min(outcome.times[engine][b]) for b, m in medians.items()]
        highs = [max(outcome.times[engine][b]) - m for b, m in medians.items()]
        axes.errorbar(list(medians), list(medians.values()), yerr=[lows, highs], color=colour,
                      linestyle=line, marker=marker, markersize=9 if marker == "*" else 5,
                      capsize=2, label=LABELS[engine])  # fmt: skip
    batches = sorted({batch for by in tok_s.values() for batch in by})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.set_xlabel("rows in the batch")
    axes.set_ylabel("tokens a second (logarithmic)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
