"""A run as it happens, for the person in front of the terminal.

One block at the bottom of the terminal: a progress bar over optimiser steps, a row of the numbers
that matter, and a line that says what the run is doing. It draws on stderr, so stdout stays free
for `--json`, and draws nothing at all when stderr is not a terminal or the view is disabled.

The numbers are the last ones logged. A metric that is missing, or was logged as absent, shows as an
en-dash; NaN shows as nan, because hiding it would make a broken run look healthy. The view computes
nothing: every number here is also in metrics.jsonl under the name given in `COLUMNS`.
"""

import math
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

Row = Mapping[str, float | int | None]
Format = Callable[[float], str]

MISSING = "\N{EN DASH}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _plain(digits: int) -> Format:
    return lambda value: f"{value:,.{digits}f}"


COLUMNS: dict[str, tuple[tuple[str, Format], ...]] = {
    "step": (("learner/step", _whole),),
    "reward": (("reward/mean", _plain(3)),),
    "accepted\nper hour": (("accepted/samples_per_hour", _whole),),
    "tokens\nper s": (("rollout/tokens_per_s", _plain(1)),),
    "tokens per\ntarget step": (("spec/tokens_per_target_step", _plain(2)),),
    "accept\nrate": (("spec/acceptance_rate", _plain(3)),),
    "stale\nmean/max": (("staleness/mean", _plain(2)), ("staleness/max", _whole)),
    "weight\nversion": (("sync/version", _whole),),
    "actors/\nrestarts": (("fleet/actors", _whole), ("fleet/restarts", _whole)),
}
"""Heading of each column, the metrics it shows (joined by a slash) and how they are written."""


class LiveView:
    """Progress, key numbers and phase of a run of `steps` optimiser steps, redrawn in place.

    `enabled=None` draws when stderr is a terminal. Methods may be called from any thread, and
    before or after the context as well: then they only remember.
    """

    def __init__(self, steps: int, title: str, enabled: bool | None = None) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps}; a run to watch has at least one step")
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._title = title
        self._phase = "starting"
        self._latest: dict[str, float | int | None] = {}
        self._lock = threading.Lock()
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task(title, total=steps)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._enabled:
            self._live = Live(
                console=self._console, get_renderable=self.render, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        """Says what the run is doing now, such as "loading model" or "waiting for rollouts"."""
        with self._lock:
            self._phase = text

    def say(self, text: str) -> None:
        """Prints a line that stays, above the block; also where nothing is drawn."""
        self._console.print(text, markup=False, highlight=False)

    def update(self, row: Row) -> None:
        """Shows the metrics of `row`; those it does not name keep their last value.

        The bar follows `learner/step`, the number of optimiser steps finished.
        """
        with self._lock:
            self._latest.update(row)
        step = row.get("learner/step")
        if step is not None and math.isfinite(step):
            self._progress.update(self._task, completed=step)

    def render(self) -> RenderableType:
        """The block as it is drawn now."""
        with self._lock:
            phase, latest = self._phase, dict(self._latest)
        lines: list[RenderableType] = [self._progress, _table(latest)]
        if latest.get("exact/alarm"):
            lines.append(Text("exactness alarm: see exact/* and rollout audit", style="bold red"))
        return Group(*lines, Text(f"phase: {phase}", style="dim"))


def _table(latest: Row) -> Table:
    table = Table(expand=True, box=None, padding=0, header_style="dim")
    for heading in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row(*(_cell(latest, metrics) for metrics in COLUMNS.values()))
    return table


def _cell(latest: Row, metrics: tuple[tuple[str, Format], ...]) -> str:
    return "/".join(_number(latest.get(name), write) for name, write in metrics)


def _number(value: float | None, write: Format) -> str:
    if value is None:
        return MISSING
    return write(value) if math.isfinite(value) else str(float(value))
