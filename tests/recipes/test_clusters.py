"""`rollout launch`, `status` and `stop`, as another process sees them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.cluster import Prompt, RolloutCluster
from actors.ray_session import ray_session
from recipes.clusters import _alive, registry
from rollout.checkpoint import read_weights
from rollout.sampling import SamplingParams

LIMIT_S = 240


def rollout(words: Sequence[str], home: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and the JSON of the last line."""
    done = subprocess.run(
        [sys.executable, "-m", "recipes.cli", *words, "--json"],
        env=os.environ | {"XDG_CACHE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    return done.returncode, json.loads(lines[-1])


def test_a_launched_cluster_serves_a_learner_that_connects_and_ends_when_told(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "fleet.yaml"
    recipe.write_text(f"name: fleet\nmodel: {{path: {tiny_llama}, context_len: 64}}\n")
    code, up = rollout(["launch", str(recipe), "--detach", "actors.slots=4"], tmp_path)
    assert (code, up["name"]) == (0, "fleet")
    try:
        code, said = rollout(["launch", str(recipe)], tmp_path)
        assert code == 2 and "a cluster named fleet is up" in said["error"]
        with ray_session(address=up["address"]):
            cluster = RolloutCluster.connect("fleet", up["address"])
            cluster.publish(0, read_weights(tiny_llama).items())
            cluster.submit(
                [Prompt("g", "p", [5, 6])], SamplingParams(max_new_tokens=4), group_size=3
            )
            cluster.accept(cluster.next_groups(1, timeout_s=LIMIT_S))
            cluster.shutdown()  # a client lets go, the cluster stays
        code, row = rollout(["status", "fleet"], tmp_path)
        assert (code, row["ledger/accepted"], row["fleet/actors"]) == (0, 3.0, 1.0)
        _, listed = rollout(["status"], tmp_path)
        assert [cluster["name"] for cluster in listed["clusters"]] == ["fleet"]
    finally:
        code, _ = rollout(["stop", "fleet"], tmp_path)
    assert code == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert list(registry().glob("*.json")) == []


def test_a_cluster_joins_the_ray_that_its_recipe_names_and_leaves_it_running(
    tiny_llama: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "joining.yaml"
    recipe.write_text(f"name: joining\nmodel: {{path: {tiny_llama}, context_len: 64}}\n")
    with ray_session(num_cpus=1):
        address = ray.get_runtime_context().gcs_address
        words = ["launch", str(recipe), "--detach", "actors.slots=4", f"actors.address={address}"]
        code, up = rollout(words, tmp_path)
        assert (code, up["address"]) == (0, address)
        assert ray.available_resources().get("CPU", 0) == 0  # its actor has the core
        code, _ = rollout(["stop", "joining"], tmp_path)
        assert code == 0 and len(ray.nodes()) == 1


def test_the_file_of_a_process_that_is_gone_tells_of_no_cluster(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(json.dumps({"name": "old", "address": "", "pid": os.getpid(), "started": 1.0}))
    assert _alive(file) is None and not file.exists()  # same id, another process's start time


def test_the_status_of_a_run_is_its_last_whole_row(tmp_path: Path) -> None:
    log = '{"learner/step": 1}\n{"learner/step": 2}\n{"learner/st'
    (tmp_path / "metrics.jsonl").write_text(log)
    code, row = rollout(["status", str(tmp_path)], tmp_path)
    assert (code, row) == (0, {"learner/step": 2})
