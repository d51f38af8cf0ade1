"""One writer for the metrics of a run: a JSONL mirror first, Weights & Biases behind it.

A row goes two ways. It is appended to `run_dir/metrics.jsonl` before `log` returns, so what was
logged is on disk whatever happens next; then it is handed to a bounded queue, from which one
daemon thread talks to wandb. The training loop therefore never waits for a network, and a client
that hangs, raises at start or raises at every row costs one warning and nothing else.

Clocks. Learner and rollouts advance independently, and wandb's built-in step throws away whatever
arrives behind it. No row carries an explicit `step`; each metric is bound by `define_metric` to
the axis it is measured on: `rollout/version` for `rollout/*`, `spec/*`, `exact/*`, `quant/*` and
`sync/*`, `learner/step` for the rest.

Values. `None` means the metric does not exist in this row and is left out of both ways. NaN and
infinities are counted in the row's `sink/nan_count`, written as null in the mirror (which stays
strict JSON) and withheld from wandb, whose charts would hide them.

Resume. An existing mirror is appended to, and the wandb run id in `wandb_id.txt` is used again.
A run resumed from a checkpoint may repeat steps: readers keep the last row of a step. Offline, every
start leaves its own folder with the same id; `wandb sync` uploads them in order of their start.

What it does not do: average, sample or rename anything, or upload files.
"""

import atexit
import fcntl
import importlib
import importlib.util
import json
import logging
import math
import netrc
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO, cast
from urllib.parse import urlsplit

Number = float | int

LEARNER_AXIS = "learner/step"
ROLLOUT_AXIS = "rollout/version"
ROLLOUT_PREFIXES = ("rollout/", "spec/", "exact/", "quant/", "sync/")
NAN_COUNT = "sink/nan_count"
MODES = ("auto", "online", "offline", "disabled")

QUIET_SETTINGS = {
    "console": "off",  # the terminal belongs to the live view
    "silent": True,
    # Also what an unreachable server may hold the interpreter's exit for, after close has returned.
    "init_timeout": 20.0,
    "finish_timeout": 10.0,
}

logger = logging.getLogger(__name__)


class WandbRun(Protocol):
    """What the sink needs of a wandb run."""

    summary: Any

    def define_metric(self, name: str, *, step_metric: str | None = None) -> object: ...
    def log(self, data: dict[str, Number]) -> None: ...
    def finish(self) -> None: ...


class WandbModule(Protocol):
    """What the sink needs of the wandb package."""

    def init(self, **options: Any) -> WandbRun: ...


@dataclass(frozen=True, slots=True)
class SinkReport:
    """What became of the rows, once the sink is closed."""

    rows: int
    """Rows given to `log`; each is a line of metrics.jsonl unless the disk refused it."""
    forwarded: int
    """Rows that the wandb client took."""
    dropped: int
    """Rows meant for wandb that it did not take; 0 when wandb is disabled."""
    nan_values: int
    """Values that were NaN or infinite."""
    warning: str | None
    """The one warning of this sink: the first thing that went wrong."""
    swallowed: int = 0
    """Exceptions caught and not passed on."""


class MetricsSink:
    """The only writer of a run's metrics; `log` may be called from any thread.

    Meant as a context manager. A run that leaves without closing is still finished when the
    interpreter exits in order, which a signal that nobody turns into an exception prevents.

    Raises at construction only: `ValueError` for a bad option, `ModuleNotFoundError` when wandb is
    wanted but not installed, `RuntimeError` when another writer holds this run's metrics.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        wandb_mode: str = "auto",
        project: str = "exact-rollout",
        name: str,
        config: Mapping[str, Any],
        queue_len: int = 1024,
        wandb_module: WandbModule | None = None,
    ) -> None:
        """Opens the mirror and starts the thread; `wandb_module` replaces the package in tests.

        `wandb_mode` auto follows the WANDB_MODE variable if set; otherwise it is online with an API
        key (WANDB_API_KEY or netrc) and offline without. `queue_len` bounds the rows waiting for
        wandb; rows beyond it reach the mirror only.
        """
        if wandb_mode not in MODES:
            raise ValueError(f"wandb_mode={wandb_mode!r}; use one of {', '.join(MODES)}")
        if queue_len < 1:
            raise ValueError(f"queue_len={queue_len}; rows need room to wait, use 1 or more")
        self._mode = _resolve_mode(wandb_mode)
        self._module = wandb_module
        if self._enabled and wandb_module is None:
            _require_wandb()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = _open_mirror(run_dir / "metrics.jsonl")
        self._queue_len = queue_len
        self._queue: deque[dict[str, Number]] = deque()
        self._wake = threading.Condition()  # guards the queue, the counters and the mirror
        self._rows = self._forwarded = self._nan_values = self._swallowed = 0
        self._warning: str | None = None
        self._summary: dict[str, Any] = {}
        self._run: WandbRun | None = None
        self._drain_until: float | None = None  # set by close: when to stop emptying the queue
        self._finishing = False
        self._finished = threading.Event()  # nothing more will be asked of wandb
        self._report: SinkReport | None = None
        if self._enabled:
            self._options = _init_options(run_dir, project, name, config)
            threading.Thread(target=self._forward, name="metrics-sink", daemon=True).start()
        else:
            self._finished.set()
        atexit.register(self.close)

    def log(self, row: Mapping[str, Number | None]) -> None:
        """Writes `row` to the mirror, stamped with `time` (unix seconds), and queues it for wandb.

        Waits for the local disk only, and never raises: a row that cannot be written is counted.
        """
        with self._guard("log"):
            mirrored, num_nan = _clean(row)
            line = json.dumps(mirrored, allow_nan=False)
            with self._wake:
                self._rows += 1
                self._nan_values += num_nan
                self._enqueue({key: val for key, val in mirrored.items() if val is not None})
                self._file.write(line + "\n")
                self._file.flush()

    def summary(self, values: Mapping[str, Any]) -> None:
        """Sets the wandb run summary to `values` when the run ends; later calls add to earlier."""
        with self._wake:
            self._summary.update(values)

    def close(self, timeout_s: float = 10.0) -> SinkReport:
        """Empties the queue, finishes the wandb run and reports; returns within `timeout_s`.

        Half the time is for the rows that still wait. What wandb has not taken by then is dropped
        (it is in the mirror) and the run is finished in the other half. A second call returns the
        first report.
        """
        if self._report is None:
            atexit.unregister(self.close)
            self._finish_within(timeout_s)
            with self._guard("closing metrics.jsonl"):
                self._file.close()
            self._report = self._take_report()
        return self._report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _enabled(self) -> bool:
        return self._mode != "disabled"

    def _enqueue(self, row: dict[str, Number]) -> None:
        if not self._enabled or self._finished.is_set():
            return
        if len(self._queue) >= self._queue_len:
            self._warn(f"wandb keeps {self._queue_len} rows waiting; more go to metrics.jsonl only")
            return
        self._queue.append(row)
        self._wake.notify()

    def _forward(self) -> None:
        """The daemon thread: everything that touches wandb, from its import to its finish."""
        with self._guard("wandb.init"):
            self._run = self._open_run()
        if self._run is None:
            self._finished.set()
            return
        defined: set[str] = set()
        while (row := self._next_row()) is not None:
            with self._guard("wandb.log"):
                _define_axes(self._run, row, defined)
                self._run.log(row)
                self._forwarded += 1
        self._finish()

    def _open_run(self) -> WandbRun:
        module = self._module or _import_wandb()
        mode = self._mode
        if mode == "auto":
            mode = "online" if _has_api_key() else "offline"
        return module.init(mode=mode, **self._options)

    def _next_row(self) -> dict[str, Number] | None:
        """The next row, waiting for one; None once the sink closes and nothing should follow."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._drain_until is not None)
            too_late = self._drain_until is not None and time.monotonic() > self._drain_until
            return self._queue.popleft() if self._queue and not too_late else None

    def _finish(self) -> None:
        """Sets the summary and finishes the run, once, from whichever thread comes first."""
        with self._wake:
            if self._finishing:
                return
            self._finishing = True
        assert self._run is not None, "only an opened run is finished"
        with self._guard("wandb summary"):
            self._run.summary.update(self._summary)
        with self._guard("wandb.finish"):
            self._run.finish()
        self._finished.set()

    def _finish_within(self, timeout_s: float) -> None:
        with self._wake:
            self._drain_until = time.monotonic() + timeout_s / 2
            self._wake.notify()
        if self._finished.wait(timeout_s / 2):
            return
        if self._run is not None:  # the thread is stuck in a row, or finishing already
            threading.Thread(target=self._finish, name="metrics-finish", daemon=True).start()
        if not self._finished.wait(timeout_s / 2):
            self._warn(f"wandb did not finish in {timeout_s:g} s; metrics.jsonl has every row")

    def _take_report(self) -> SinkReport:
        with self._wake:
            dropped = self._rows - self._forwarded if self._enabled else 0
            if dropped:
                self._warn(f"wandb missed {dropped} of {self._rows} rows; metrics.jsonl has them")
            return SinkReport(
                rows=self._rows,
                forwarded=self._forwarded,
                dropped=dropped,
                nan_values=self._nan_values,
                warning=self._warning,
                swallowed=self._swallowed,
            )

    @contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        """Broad on purpose: metrics may fail, a run may not fail for them. Counts what it swallows."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            with self._wake:
                self._swallowed += 1
                self._warn(f"{doing} failed: {type(error).__name__}: {error}")

    def _warn(self, text: str) -> None:
        with self._wake:
            if self._warning is None:
                self._warning = text
                logger.warning("metrics: %s", text)


def axis_of(metric: str) -> str:
    """The x-axis that `metric` is drawn over."""
    return ROLLOUT_AXIS if metric.startswith(ROLLOUT_PREFIXES) else LEARNER_AXIS


def _define_axes(run: WandbRun, row: Mapping[str, Number], defined: set[str]) -> None:
    """Binds each metric to its axis when it first appears.

    By name and not by pattern: of two patterns that match a name, which one counts is not stated.
    """
    for metric in row.keys() - defined:
        is_axis = metric in (LEARNER_AXIS, ROLLOUT_AXIS)
        run.define_metric(metric, step_metric=None if is_axis else axis_of(metric))
        defined.add(metric)


def _clean(row: Mapping[str, Number | None]) -> tuple[dict[str, Number | None], int]:
    """The row as the mirror keeps it, and how many of its values were not finite."""
    clean: dict[str, Number | None] = {"time": time.time()}
    for key, value in row.items():
        if value is not None:
            number = int(value) if isinstance(value, int) else float(value)
            clean[key] = number if isinstance(number, int) or math.isfinite(number) else None
    num_nan = sum(value is None for value in clean.values())
    if num_nan:
        clean[NAN_COUNT] = num_nan
    return clean, num_nan


def _open_mirror(path: Path) -> TextIO:
    """Opens `path` for appending, ends a line that a crash cut short, refuses a second writer."""
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise RuntimeError(
            f"{path} already has a writer; close that sink, or give this run its own folder"
        ) from error
    except OSError as error:
        logger.debug("no lock on %s: %s", path, error)  # file systems without locks exist
    size_bytes = file.tell()
    if size_bytes and os.pread(file.fileno(), 1, size_bytes - 1) != b"\n":
        file.write("\n")
    return file


def _resolve_mode(mode: str) -> str:
    asked = os.environ.get("WANDB_MODE", "")
    return asked if mode == "auto" and asked in MODES else mode


def _init_options(
    run_dir: Path, project: str, name: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "dir": str(run_dir),
        "project": project,
        "name": name,
        "config": dict(config),
        "id": _run_id(run_dir / "wandb_id.txt"),
        "resume": "allow",
        "reinit": "create_new",  # never a run that someone else opened in this process
        "settings": dict(QUIET_SETTINGS),
    }


def _require_wandb() -> None:
    if importlib.util.find_spec("wandb") is None:
        raise ModuleNotFoundError(
            "wandb is not installed; pip install wandb, or set wandb_mode=disabled"
        )


def _import_wandb() -> WandbModule:
    module = importlib.import_module("wandb")
    # Silent from here on: the settings of the run come too late for the line about the login.
    module.setup(module.Settings(silent=True))
    return cast(WandbModule, module)


def _has_api_key() -> bool:
    """Whether wandb could log in without asking: the environment first, then netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    path = os.environ.get("NETRC") or str(Path.home() / ".netrc")
    try:
        return netrc.netrc(path).authenticators(urlsplit(server).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _run_id(path: Path) -> str:
    """The wandb id of this run folder: the stored one, or a new one which is stored."""
    if not path.exists():
        path.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
