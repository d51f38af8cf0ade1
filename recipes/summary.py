"""The closing table of a run, for people."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from recipes.report import ladder_verdicts


def print_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """What the run came to, the ladder, and where the page is."""
    console = console or Console()
    title = f"{summary['name']}: {summary['ended']} after {summary['steps']} steps"
    table = Table(title=title, show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for label, value in _lines(summary):
        table.add_row(label, value)
    console.print(table)
    if summary["ladder"]:
        console.print(_ladder(summary["ladder"]))
        for sentence in ladder_verdicts(summary["ladder"]):
            console.print(sentence)
    console.print(f"page: {summary['run']}/report.html", soft_wrap=True)


def _lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    ledger = summary.get("ledger", {})
    fates = ", ".join(f"{n} {name}" for name, n in ledger.items() if n and name != "generated")
    return [
        (
            "reward, first third -> last third",
            f"{_number(summary['reward_first_third'], 3)} -> "
            f"{_number(summary['reward_last_third'], 3)}",
        ),
        ("accepted samples", _number(summary.get("accepted_samples"), 0)),
        ("accepted samples per hour", _number(summary.get("accepted_samples_per_hour"), 0)),
        ("tokens per second", _number(summary.get("tokens_per_second"), 1)),
        ("tokens per target step", _number(summary.get("tokens_per_target_step"), 3)),
        ("acceptance rate (accepted / verified)", _number(summary.get("acceptance_rate"), 3)),
        ("drift KL to full precision, nats a token", _number(summary.get("drift_kl"), 5)),
        ("exactness watch: p of acceptance, of tokens", _watched(summary.get("exactness", {}))),
        (f"generated {ledger.get('generated', 0)} samples", fates),
    ]


def _watched(exactness: Mapping[str, float]) -> str:
    acceptance = exactness.get("exact/acceptance_p_value")
    tokens = exactness.get("exact/pit_p_value")
    alarm = "  ALARM: run rollout audit" if exactness.get("exact/alarm") else ""
    return f"{_number(acceptance, 3)}, {_number(tokens, 3)}{alarm}"


def _ladder(rungs: list[Mapping[str, Any]]) -> Table:
    table = Table(title="ladder: the run's last prompts, same sampling, alternating")
    for name in (
        "",
        "tokens/s",
        "of first",
        "tokens/target step",
        "acceptance",
        "drift KL",
        "same",
    ):
        table.add_column(name, justify="right" if name else "left")
    for rung in rungs:
        table.add_row(
            rung["name"],
            f"{rung['tokens_per_s']:.1f}",
            f"{rung['speedup_vs_first']:.2f}x",
            f"{rung['tokens_per_target_step']:.3f}",
            _number(rung["acceptance_rate"], 3),
            _number(rung["drift_kl"], 5),
            f"{rung['same_tokens_rate']:.3f}",
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
