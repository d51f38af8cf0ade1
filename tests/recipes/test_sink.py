import json
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

from recipes.sink import MetricsSink, SinkReport, axis_of

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]


class FakeRun:
    """A wandb run that, like the real one, drops rows whose explicit step lies behind the last."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.axes: dict[str, str | None] = {}
        self.summary: Row = {}
        self.finished = threading.Event()
        self._last_step = 0

    def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: Row, step: int | None = None) -> None:
        step = self._last_step if step is None else step
        if step >= self._last_step:
            self._last_step = step
            self.rows.append(data)

    def finish(self) -> None:
        self.finished.set()


class FakeWandb:
    """Hands out one run and keeps the options it was asked with."""

    def __init__(self, run: FakeRun | None = None) -> None:
        self.run = run or FakeRun()
        self.options: Row = {}

    def init(self, **options: Any) -> FakeRun:
        self.options = options
        return self.run


def open_sink(run_dir: Path, fake: Any = None, **options: Any) -> MetricsSink:
    return MetricsSink(run_dir, name="run", config={"seed": 1}, wandb_module=fake, **options)


def mirrored(run_dir: Path) -> list[Row]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a LevelDB log in 32 KiB blocks after a 7-byte file header."""
    data, block_len = path.read_bytes(), 32768
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = block_len - at % block_len
        if left < 7:  # too short for a chunk header: padding
            at += left
            continue
        _, chunk_len, kind = struct.unpack_from("<IHB", data, at)  # checksum, length, kind
        parts += data[at + 7 : at + 7 + chunk_len]
        at += 7 + chunk_len
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(parts)  # type: ignore[attr-defined]
            parts = b""


def wandb_history(path: Path) -> list[Row]:
    records = [r.history for r in wandb_records(path) if r.WhichOneof("record_type") == "history"]
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in rec.item}
        for rec in records
    ]


def wandb_files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))


def test_offline_file_holds_every_row_the_axes_and_the_summary(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, wandb_mode="offline")
    for step in range(500):
        sink.log(
            {"learner/step": step, "rollout/version": step, "spec/pos_0/conditional_rate": 0.5}
        )
    sink.summary({"accepted_samples": 7})
    report = sink.close(timeout_s=60)
    assert report == SinkReport(rows=500, forwarded=500, dropped=0, nan_values=0, warning=None)
    (path,) = wandb_files(tmp_path)
    assert [row["learner/step"] for row in wandb_history(path)] == list(range(500))
    records = list(wandb_records(path))
    axes = {r.metric.name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["spec/pos_0/conditional_rate"] == "rollout/version"
    summary = [item for r in records for item in r.summary.update if item.key == "accepted_samples"]
    assert [item.value_json for item in summary] == ["7"]
    assert records[-1].WhichOneof("record_type") == "exit"  # finished, not abandoned


ENDINGS = {
    "by exception": "with sink: fill(); raise KeyError('the run is over')",
    "by SIGTERM": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        "with sink: fill(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    ),
    "without close": "fill()\nwhile sink._run is None: time.sleep(0.01)\nsys.exit(1)",
}


# case 210
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_offline_file_is_whole_however_the_run_ends(tmp_path: Path, ending: str) -> None:
    script = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from recipes.sink import MetricsSink\n"
        "sink = MetricsSink(Path(sys.argv[1]), name='run', config={}, wandb_mode='offline')\n"
        "def fill():\n"
        "    for step in range(20): sink.log({'learner/step': step})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script + ending, str(tmp_path)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "wandb" not in done.stdout + done.stderr  # and it was quiet about it
    (path,) = wandb_files(tmp_path)
    assert len(wandb_history(path)) == len(mirrored(tmp_path)) == 20


# case 204
def test_a_clock_that_runs_ahead_hides_no_metric_of_another_clock(tmp_path: Path) -> None:
    fake = FakeWandb()
    sink = open_sink(tmp_path, fake)
    for version in range(1000):
        sink.log({"rollout/version": version, "rollout/tokens_per_s": 1.0})
    sink.log({"learner/step": 0, "learner/loss": 0.5})
    report = sink.close()
    assert (report.forwarded, len(fake.run.rows)) == (1001, 1001)
    assert fake.run.axes["rollout/tokens_per_s"] == "rollout/version"
    assert fake.run.axes["learner/loss"] == "learner/step"
    assert fake.run.axes["learner/step"] is None


def test_the_fake_client_drops_explicit_steps_that_run_backwards() -> None:
    run = FakeRun()  # the negative control of the test above
    run.log({"rollout/tokens_per_s": 1.0}, step=999)
    run.log({"learner/loss": 0.5}, step=0)
    assert len(run.rows) == 1


def test_only_rollout_side_metrics_are_drawn_over_the_policy_version() -> None:
    by_version = ["rollout/a", "spec/time/a_share", "quant/a", "sync/a"]
    by_step = ["learner/a", "reward/mean", "accepted/a", "ledger/a", "sink/nan_count", "fleet/a"]
    assert {axis_of(name) for name in by_version} == {"rollout/version"}
    assert {axis_of(name) for name in by_step} == {"learner/step"}


# case 206
def test_three_writers_through_one_sink_lose_no_row(tmp_path: Path) -> None:
    fake = FakeWandb()
    sink = open_sink(tmp_path, fake)

    def write(source: int) -> None:
        for count in range(100):
            sink.log({"learner/step": source * 100 + count})

    threads = [threading.Thread(target=write, args=(source,)) for source in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sink.close().forwarded == 300
    assert sorted(row["learner/step"] for row in fake.run.rows) == list(range(300))
    assert sorted(row["learner/step"] for row in mirrored(tmp_path)) == list(range(300))


# case 206
def test_a_second_writer_of_the_same_run_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    first = open_sink(tmp_path, wandb_mode="disabled")
    with pytest.raises(RuntimeError, match="already has a writer"):
        open_sink(tmp_path, wandb_mode="disabled")
    first.close()
    open_sink(tmp_path, wandb_mode="disabled").close()


# case 208
def test_nan_is_counted_and_null_on_disk_and_never_forwarded(tmp_path: Path) -> None:
    fake = FakeWandb()
    sink = open_sink(tmp_path, fake)
    for step in range(4, 7):
        loss, norm = (float("nan"), float("inf")) if step == 5 else (0.5, 1.0)
        sink.log({"learner/step": step, "learner/loss": loss, "learner/grad_norm": norm})
    assert sink.close().nan_values == 2
    on_disk = mirrored(tmp_path)[1]
    assert (on_disk["learner/step"], on_disk["sink/nan_count"]) == (5, 2)
    assert on_disk["learner/loss"] is None and on_disk["learner/grad_norm"] is None
    forwarded = fake.run.rows[1]
    assert forwarded.keys() == {"time", "learner/step", "sink/nan_count"}
    assert ["sink/nan_count" in row for row in fake.run.rows] == [False, True, False]


# case 195
def test_none_is_an_absent_metric_and_not_a_nan(tmp_path: Path) -> None:
    fake = FakeWandb()
    sink = open_sink(tmp_path, fake)
    sink.log({"learner/step": 1, "spec/acceptance_rate": None})
    assert sink.close().nan_values == 0
    assert mirrored(tmp_path)[0].keys() == fake.run.rows[0].keys() == {"time", "learner/step"}


# case 211
def test_totals_recomputed_from_the_mirror_equal_the_counters_in_memory(tmp_path: Path) -> None:
    rng = random.Random(211)
    sink = open_sink(tmp_path, FakeWandb())
    accepted = 0
    for step in range(200):
        num, loss = rng.randrange(9), rng.choice([0.5, float("nan")])
        accepted += num
        sink.log({"learner/step": step, "accepted/samples": num, "learner/loss": loss})
    report = sink.close()
    rows = mirrored(tmp_path)
    assert sum(row["accepted/samples"] for row in rows) == accepted
    assert sum(row.get("sink/nan_count", 0) for row in rows) == report.nan_values
    assert len(rows) == report.rows == report.forwarded + report.dropped


def test_the_mirror_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, wandb_mode="disabled")
    before = time.time()
    sink.log({"learner/step": 1})
    (row,) = mirrored(tmp_path)
    assert before <= row["time"] <= time.time()
    assert sink.close() == SinkReport(rows=1, forwarded=0, dropped=0, nan_values=0, warning=None)


def test_a_resumed_run_appends_after_a_cut_line_and_keeps_its_wandb_id(tmp_path: Path) -> None:
    first, second = FakeWandb(), FakeWandb()
    with open_sink(tmp_path, first) as sink:
        sink.log({"learner/step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"learner/st')  # what a crash in the middle of a write leaves
    with open_sink(tmp_path, second) as sink:
        sink.log({"learner/step": 2})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(lines[0])["learner/step"], json.loads(lines[2])["learner/step"]] == [1, 2]
    stored = (tmp_path / "wandb_id.txt").read_text().strip()
    assert first.options["id"] == second.options["id"] == stored
    assert second.options["resume"] == "allow"


class BlocksAtInit(FakeWandb):
    """Hangs for ever; `release` lets the thread end after the test."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def init(self, **options: Any) -> FakeRun:
        self.release.wait()
        return self.run


class BlocksAtLog(FakeRun):
    """Hangs in its first row."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def log(self, data: Row, step: int | None = None) -> None:
        self.entered.set()
        self.release.wait()


class BlocksAtFinish(FakeRun):
    """Takes every row and never lets go."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def finish(self) -> None:
        self.release.wait()


class RaisesAtInit(FakeWandb):
    def init(self, **options: Any) -> FakeRun:
        raise TimeoutError("no network")


class RaisesAtLog(FakeRun):
    def log(self, data: Row, step: int | None = None) -> None:
        raise ConnectionError("the service is gone")


def log_and_close(sink: MetricsSink, num_rows: int, timeout_s: float) -> tuple[SinkReport, float]:
    """Logs the rows, checks that this took no time worth a network, closes; seconds of the close."""
    start_s = time.monotonic()
    for step in range(num_rows):
        sink.log({"learner/step": step})
    logged_s = time.monotonic()
    assert logged_s - start_s < 2.0  # about 10 microseconds a row; a hang would be for ever
    report = sink.close(timeout_s)
    return report, time.monotonic() - logged_s


# case 212
def test_a_client_that_hangs_at_init_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = BlocksAtInit()
    sink = open_sink(tmp_path, fake, queue_len=16)
    report, close_s = log_and_close(sink, num_rows=200, timeout_s=0.4)
    assert close_s < 2.0
    assert (report.rows, report.forwarded, report.dropped) == (200, 0, 200)
    assert len(mirrored(tmp_path)) == 200
    assert len(caplog.records) == 1 and str(report.warning) in caplog.text
    fake.release.set()


# case 212
def test_a_client_that_hangs_in_a_row_is_still_finished_within_the_timeout(tmp_path: Path) -> None:
    run = BlocksAtLog()
    sink = open_sink(tmp_path, FakeWandb(run))
    report, close_s = log_and_close(sink, num_rows=50, timeout_s=0.4)
    assert run.entered.is_set() and run.finished.is_set()
    assert close_s < 2.0
    assert report.dropped == len(mirrored(tmp_path)) == 50
    run.release.set()


# case 212
def test_a_client_that_hangs_at_finish_does_not_hold_the_run(tmp_path: Path) -> None:
    run = BlocksAtFinish()
    report, close_s = log_and_close(open_sink(tmp_path, FakeWandb(run)), 50, timeout_s=0.4)
    assert close_s < 2.0
    assert report.forwarded == 50
    assert report.warning is not None and "did not finish in 0.4 s" in report.warning
    run.release.set()


# case 212
@pytest.mark.parametrize(
    ("make", "num_swallowed"),
    [(RaisesAtInit, 1), (lambda: FakeWandb(RaisesAtLog()), 30)],
    ids=["at init", "at log"],
)
def test_a_client_that_raises_costs_one_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[], FakeWandb],
    num_swallowed: int,
) -> None:
    sink = open_sink(tmp_path, make())
    report, close_s = log_and_close(sink, num_rows=30, timeout_s=10.0)
    assert close_s < 5.0
    assert (report.rows, report.dropped, report.swallowed) == (30, 30, num_swallowed)
    assert len(mirrored(tmp_path)) == 30
    assert len(caplog.records) == 1


def test_a_full_queue_drops_for_wandb_only_and_says_so(tmp_path: Path) -> None:
    run = BlocksAtLog()
    sink = open_sink(tmp_path, FakeWandb(run), queue_len=4)
    sink.log({"learner/step": 0})
    assert run.entered.wait(10)  # the thread holds this row; four more may wait
    for step in range(1, 11):
        sink.log({"learner/step": step})
    run.release.set()
    report = sink.close()
    assert (report.rows, report.forwarded, report.dropped) == (11, 5, 6)
    assert report.warning is not None and "4 rows waiting" in report.warning
    assert len(mirrored(tmp_path)) == 11


def test_a_row_that_is_not_numbers_is_swallowed_and_counted(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, FakeWandb())
    sink.log({"learner/step": 1, "learner/loss": "high"})  # type: ignore[dict-item]
    sink.log({"learner/step": 2})
    report = sink.close()
    assert (report.rows, report.forwarded, report.swallowed) == (1, 1, 1)
    assert report.warning is not None and "high" in report.warning


def test_the_summary_is_set_before_the_run_finishes(tmp_path: Path) -> None:
    fake = FakeWandb()
    sink = open_sink(tmp_path, fake)
    sink.summary({"steps": 3})
    sink.summary({"ended": "finished"})
    assert sink.close() is sink.close()  # closing twice is closing once
    assert fake.run.summary == {"steps": 3, "ended": "finished"}
    assert fake.run.finished.is_set()


@pytest.mark.parametrize(
    ("api_key", "variable", "mode"),
    [("", "", "offline"), ("k" * 40, "", "online"), ("k" * 40, "offline", "offline")],
)
def test_auto_is_online_with_a_key_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api_key: str, variable: str, mode: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", api_key)
    monkeypatch.setenv("WANDB_MODE", variable)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    fake = FakeWandb()
    open_sink(tmp_path, fake).close()
    assert fake.options["mode"] == mode


def test_a_key_in_netrc_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "netrc"
    path.write_text("machine api.wandb.ai\n  login user\n  password " + "k" * 40 + "\n")
    path.chmod(0o600)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(path))
    fake = FakeWandb()
    open_sink(tmp_path, fake).close()
    assert fake.options["mode"] == "online"


def test_disabled_never_touches_wandb(tmp_path: Path) -> None:
    fake = FakeWandb()
    sink = open_sink(tmp_path, fake, wandb_mode="disabled")
    sink.log({"learner/step": 1})
    assert sink.close().dropped == 0
    assert fake.options == {}
    assert not (tmp_path / "wandb_id.txt").exists()


def test_bad_options_and_a_missing_wandb_fail_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="wandb_mode='of'; use one of auto"):
        open_sink(tmp_path, FakeWandb(), wandb_mode="of")
    with pytest.raises(ValueError, match="queue_len=0"):
        open_sink(tmp_path, FakeWandb(), queue_len=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install wandb"):
        open_sink(tmp_path, wandb_mode="offline")
