"""Named clusters on this machine: `rollout launch`, `stop` and `status`.

A launched cluster is a process that holds Ray and the fleet until it is stopped. Where it listens (on
loopback) is written to a small file in the user's cache folder, by which learners and the other two
commands find it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from rich.console import Console
from rich.table import Table

from actors.cluster import RolloutCluster
from actors.metrics import ClusterSnapshot, metrics_row
from actors.ray_session import ray_session
from recipes.config import cluster_config, load_config
from recipes.smollm2 import cache_folder, model_folder
from recipes.stop_request import StopRequest
from rollout.errors import FleetDead, InvalidConfig, RolloutTimeout

STOP_TIMEOUT_S = 30.0
START_TOLERANCE_S = 5.0
"""A process's start time is counted from a boot time that moves with clock corrections."""
DETACH_TIMEOUT_S = 240.0


def registry() -> Path:
    """Where cluster files are kept."""
    return cache_folder().parent / "clusters"


def launch(recipe: Path, overrides: Sequence[str], detach: bool, as_json: bool) -> int:
    """Keeps a cluster named by the recipe up until it is stopped."""
    config = load_config(recipe, overrides)
    file = registry() / f"{config.name}.json"
    if (running := _alive(file)) is not None:
        raise InvalidConfig(
            f"a cluster named {config.name} is up (process {running['pid']}); stop it or set name="
        )
    if detach:
        return _launch_detached(recipe, overrides, file, as_json)
    folder = model_folder(config.model.path)
    with (
        StopRequest() as stop,
        ray_session(num_cpus=config.actors.num * config.actors.cpus, address=config.actors.address),
        RolloutCluster.launch(cluster_config(config, folder), name=config.name) as cluster,
    ):
        address = ray.get_runtime_context().gcs_address
        _write(file, {"name": config.name, "address": address, **_identity(os.getpid())})
        try:
            _tell_up(config.name, address, cluster, as_json)
            while not stop:
                cluster.actors()  # raises when the controller is gone
                time.sleep(1.0)
        finally:
            file.unlink(missing_ok=True)
    return 0


def _tell_up(name: str, address: str, cluster: RolloutCluster, as_json: bool) -> None:
    actors = [info.name for info in cluster.actors()]
    if as_json:
        print(json.dumps({"name": name, "address": address, "actors": actors}), flush=True)
    else:
        print(f"{name} is up at {address} with {len(actors)} actors; in a learner:", flush=True)
        print(f'    cluster = RolloutCluster.connect("{name}", "{address}")', flush=True)


def _launch_detached(recipe: Path, overrides: Sequence[str], file: Path, as_json: bool) -> int:
    """Starts the same command in a session of its own and waits until it is up."""
    log = file.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "recipes.cli", "launch", str(recipe), *overrides]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True
        )
    deadline = time.monotonic() + DETACH_TIMEOUT_S
    while (running := _alive(file)) is None:
        if process.poll() is not None:
            lines = log.read_text().strip().splitlines() or ["no output"]
            raise FleetDead(f"the cluster did not start: {lines[-1]} (log: {log})")
        if time.monotonic() > deadline:
            process.terminate()
            raise RolloutTimeout(f"the cluster was not up in {DETACH_TIMEOUT_S} s (log: {log})")
        time.sleep(0.2)
    print(json.dumps(running) if as_json else f"{running['name']} is up at {running['address']}")
    return 0


def stop(name: str, as_json: bool) -> int:
    """Asks the cluster's own process to end, by its recorded identity, and waits for it."""
    running = _alive(registry() / f"{name}.json")
    if running is None:
        raise InvalidConfig(f"no cluster named {name} is up; rollout status lists them")
    process = psutil.Process(running["pid"])
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except psutil.TimeoutExpired as error:
        raise RolloutTimeout(
            f"{name} (process {process.pid}) did not end in {STOP_TIMEOUT_S} s"
        ) from error
    print(json.dumps({"stopped": name}) if as_json else f"{name} is stopped")
    return 0


def status(target: str | None, as_json: bool) -> int:
    """A run folder's last metrics, a cluster's, or the list of clusters."""
    if target is None:
        rows = [running for file in _files() if (running := _alive(file))]
        if as_json:
            print(json.dumps({"clusters": rows}))
        for row in [] if as_json else rows:
            print(f"{row['name']}  {row['address']}  process {row['pid']}")
        if not rows and not as_json:
            print("no clusters are up")
        return 0
    row = _run_row(Path(target)) if Path(target).is_dir() else _cluster_row(target)
    if as_json:
        print(json.dumps(row))
    else:
        _print_row(target, row)
    return 0


def _run_row(folder: Path) -> dict[str, Any]:
    log = folder / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.is_file() else []
    whole = [line for line in lines if line.endswith("}")]
    if not whole:
        raise InvalidConfig(f"{folder}: no metrics yet")
    row: dict[str, Any] = json.loads(whole[-1])
    return row


def _cluster_row(name: str) -> dict[str, Any]:
    running = _alive(registry() / f"{name}.json")
    if running is None:
        raise InvalidConfig(f"{name}: neither a run folder nor a cluster that is up")
    with ray_session(address=running["address"]):
        now = RolloutCluster.connect(name, running["address"]).metrics()
    return metrics_row(ClusterSnapshot.zero(), now)


def _print_row(title: str, row: dict[str, Any]) -> None:
    table = Table(title=title)
    table.add_column("metric")
    table.add_column("value", justify="right")
    for metric, value in sorted(row.items()):
        table.add_row(metric, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


def _files() -> Iterator[Path]:
    yield from sorted(registry().glob("*.json"))


def _identity(pid: int) -> dict[str, Any]:
    """Process id and start time: together they name one process."""
    return {"pid": pid, "started": psutil.Process(pid).create_time()}


def _alive(file: Path) -> dict[str, Any] | None:
    """The cluster a file tells of, if its process lives."""
    if not file.is_file():
        return None
    running: dict[str, Any] = json.loads(file.read_text())
    try:
        started_s = psutil.Process(running["pid"]).create_time()
        same = abs(started_s - running["started"]) < START_TOLERANCE_S
    except psutil.NoSuchProcess:
        same = False
    if not same:
        file.unlink(missing_ok=True)
    return running if same else None


def _write(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.rename(file)
