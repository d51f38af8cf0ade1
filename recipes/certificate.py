"""The certificate of an audit: what was audited, every test, every control, and one verdict.

`certificate.json` is for machines and holds everything; `certificate.html` is one page for people,
without scripts and without anything fetched.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from recipes.audit_enumerated import LOGPROB_TOLERANCE, TOLERANCE, Cell
from recipes.audit_faults import Control
from recipes.audit_sampled import SampledAudit
from recipes.audit_statistics import Finding, verdict
from recipes.page import details, document, esc, problems, table, tiles

Word = Literal["exact", "not exact", "void"]
EXIT_CODES: dict[Word, int] = {"exact": 0, "not exact": 1, "void": 2}
SENTENCES: dict[Word, str] = {
    "exact": "No test contradicts that the emitted tokens follow the target law and that the "
    "recorded log-probabilities are those of that law; every planted fault was caught.",
    "not exact": "At least one test fails that an exact engine passes: what is emitted, or the "
    "log-probabilities that are recorded, are not those of the target law.",
    "void": "A planted fault was not caught, so the tests prove nothing here.",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The real engine with one proposer under one law."""

    proposer: str
    law: str
    audit: SampledAudit

    @property
    def findings(self) -> list[Finding]:
        """Named by the setting, so that a failure says where."""
        where = f"{self.proposer}, {self.law}"
        return [replace(f, name=f"{f.name} ({where})") for f in self.audit.findings]

    def to_json(self) -> dict[str, Any]:
        return {"proposer": self.proposer, "law": self.law} | self.audit.to_json()


@dataclass(frozen=True, slots=True)
class Certificate:
    """The outcome of one audit."""

    audited: Mapping[str, Any]
    """Model, engine, settings, versions, hardware."""
    enumerated: Sequence[Cell]
    streams: Sequence[Finding]
    """Seeded draws on known tables."""
    sampled: Sequence[Setting]
    controls: Sequence[Control]
    false_alarm_rate: float
    """Chance that an exact engine fails any of the tests that sample."""
    seconds: float

    @property
    def findings(self) -> list[Finding]:
        """Every test with a p-value."""
        return [*self.streams, *(finding for part in self.sampled for finding in part.findings)]

    @property
    def failed(self) -> list[str]:
        """What an exact engine would have passed."""
        cells = [
            f"{cell.proposer} under {cell.law}, {cell.rule}"
            for cell in self.enumerated
            if not cell.exact
        ]
        return cells + verdict(self.findings, self.false_alarm_rate)

    @property
    def missed(self) -> list[str]:
        """Planted faults that were not caught."""
        return [control.name for control in self.controls if not control.caught]

    @property
    def verdict(self) -> Word:
        if self.missed or not self.controls:
            return "void"
        return "not exact" if self.failed else "exact"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """One object of plain types."""
        return {
            "verdict": self.verdict,
            "failed": self.failed,
            "not_caught": self.missed,
            "audited": dict(self.audited),
            "enumerated": {
                "tolerance": TOLERANCE,
                "logprob_tolerance": LOGPROB_TOLERANCE,
                "largest_total_variation": _largest(c.total_variation for c in self.enumerated),
                "largest_logprob_error": _largest(c.logprob_error for c in self.enumerated),
                "cells": [cell.to_json() for cell in self.enumerated],
            },
            "streams": [finding.to_json() for finding in self.streams],
            "sampled": [part.to_json() for part in self.sampled],
            "controls": [control.to_json() for control in self.controls],
            "false_alarm_rate": self.false_alarm_rate,
            "seconds": round(self.seconds, 1),
        }


def _largest(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def write_certificate(certificate: Certificate, folder: Path) -> Path:
    """Writes both files into `folder`, which is made; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(certificate.to_json(), indent=1)
    (folder / "certificate.json").write_text(text + "\n")
    page = folder / "certificate.html"
    page.write_text(_page(certificate))
    return page


# ---- the page ---------------------------------------------------------------------------------

MARKS = """
.exact { color: var(--series-3); } .failed { color: #d33c3c; font-weight: 600; }
td.name { text-align: left; white-space: normal; } td.grid { text-align: center; padding: 4px 6px; }
th.slant { text-align: center; font-size: 12px; }
"""


def _page(certificate: Certificate) -> str:
    word = certificate.verdict
    failed = [f"Failed: {name}" for name in certificate.failed]
    missed = [f"Not caught: {name}" for name in certificate.missed]
    return document(
        f"Exactness certificate: {word}",
        (
            f'<h1>Exactness certificate: <span class="{_mark(word == "exact")}">{word}</span></h1>',
            f'<p class="lead">{SENTENCES[word]}</p>',
            problems(failed) + problems(missed),
            tiles(_numbers(certificate)),
            "<h2>Enumerated: the joint law of whole outcomes against plain sampling</h2>",
            _grid(certificate.enumerated),
            "<h2>Seeded draws on known tables</h2>",
            _findings(certificate.streams, certificate),
            *(_sampled(part, certificate) for part in certificate.sampled),
            "<h2>Negative controls: planted faults</h2>",
            _controls(certificate.controls),
            "<h2>What was audited</h2>",
            details(
                "Engine, model, versions",
                json.dumps(dict(certificate.audited), indent=2),
                shown=True,
            ),
        ),
        MARKS,
    )


def _mark(good: bool) -> str:
    return "exact" if good else "failed"


def _numbers(certificate: Certificate) -> Sequence[tuple[str, str, str]]:
    cells, controls = certificate.enumerated, certificate.controls
    tokens = sum(setting.audit.num_tokens for setting in certificate.sampled)
    worst = _largest(cell.total_variation for cell in cells)
    return (
        ("Laws enumerated", f"{len(cells)}", "worst total variation "
         + ("–" if worst is None else f"{worst:.1e}")),
        ("Tests that sample", f"{len(certificate.findings)}",
         f"false alarm {certificate.false_alarm_rate:g} for all together"),
        ("Tokens of the real engine", f"{tokens:,}",
         "by proposer and law: " + str(len(certificate.sampled))),
        ("Planted faults caught", f"{sum(c.caught for c in controls)} of {len(controls)}",
         "all must be"),
        ("Time", f"{certificate.seconds:.0f} s", "start-up included"),
    )  # fmt: skip


def _grid(cells: Sequence[Cell]) -> str:
    """Worst total variation of each law (rows) and proposer (columns)."""
    proposers = list(dict.fromkeys(cell.proposer for cell in cells))
    laws = list(dict.fromkeys(cell.law for cell in cells))
    worst: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        key = cell.law, cell.proposer
        if key not in worst or cell.total_variation > worst[key].total_variation:
            worst[key] = cell
    head = "".join(f'<th class="slant">{esc(name)}</th>' for name in proposers)
    rows = "".join(
        f'<tr><th scope="row">{esc(law)}</th>'
        + "".join(_grid_cell(worst.get((law, proposer))) for proposer in proposers)
        + "</tr>"
        for law in laws
    )
    return table(f"<th>law</th>{head}", rows) + (
        f"<p>Worst of all rules, lengths and draft lengths; at most {TOLERANCE:g} passes, and "
        f"log-probabilities within {LOGPROB_TOLERANCE:g}.</p>"
    )


def _grid_cell(cell: Cell | None) -> str:
    if cell is None:
        return '<td class="grid"></td>'
    shown = f"{cell.total_variation:.0e}" if cell.total_variation else "0"
    return f'<td class="grid {_mark(cell.exact)}">{shown}</td>'


def _sampled(setting: Setting, certificate: Certificate) -> str:
    part = setting.audit
    rate = "no drafts" if part.acceptance_rate is None else f"{part.acceptance_rate:.3f} accepted"
    absent = "".join(
        f"<li>Not made: {esc(name)}: {esc(why)}</li>" for name, why in part.absent.items()
    )
    return (
        f"<h2>Real engine: proposer {esc(setting.proposer)}, {esc(setting.law)}</h2>"
        f'<p class="lead">{part.num_samples:,} samples, {part.num_tokens:,} tokens, {rate}; '
        f"reference: {esc(part.reference)}; {part.seconds['total']:.0f} s.</p>"
        + _findings(setting.findings, certificate)
        + (f"<ul>{absent}</ul>" if absent else "")
    )


def _findings(findings: Sequence[Finding], certificate: Certificate) -> str:
    failed = set(verdict(certificate.findings, certificate.false_alarm_rate))
    rows = "".join(
        f'<tr><td class="name">{esc(f.name)}<br><small>{esc(f.detail)}</small></td>'
        f"<td>{f.num_samples:,}</td><td>{f.effect:.3g}</td>"
        f'<td class="{_mark(f.name not in failed)}">{f.p_value:.3g}</td>'
        f"<td>{_power(f)}</td></tr>"
        for f in findings
    )
    headings = ("test", "n", "deviation", "p-value", "power")
    return table("".join(f"<th>{heading}</th>" for heading in headings), rows)


def _power(finding: Finding) -> str:
    if finding.power is None or finding.power_at is None:
        return "–"
    return f"{finding.power:.2f} at {finding.power_at:g}"


def _controls(controls: Sequence[Control]) -> str:
    rows = "".join(
        f'<tr><td class="name">{esc(c.name)}<br><small>{esc(c.sentence)}</small></td>'
        f'<td class="name">{esc(c.by)}</td>'
        f'<td class="{_mark(c.caught)}">{"caught" if c.caught else "NOT caught"}</td></tr>'
        for c in controls
    )
    return table("<th>fault</th><th>by</th><th></th>", rows)
