"""What the benchmark of MTP heads replays, holds out and tells."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.config import LearnerConfig, MtpConfig, RunConfig
from recipes.grpo import Learner
from recipes.mtp_head import MtpHead
from rollout.checkpoint import read_config, read_weights
from scripts.bench_mtp import HELD_OUT, PastRun, measure_drift
from tests.recipes.test_grpo import group_of

RESPONSES = ((8, 9, 10), (11,), (12, 13), (14, 15, 16))


def past_run(path: Path) -> PastRun:
    """Three accepted groups of four, written out of order, and one that was set aside."""
    with (path / "samples.jsonl").open("w") as file:
        for number in range(4):
            fate = "filtered" if number == 1 else "accepted"
            for sample in reversed(group_of(RESPONSES).samples):
                request = replace(sample.request, group_id=f"g{number}")
                line = replace(sample, request=request).to_json()
                reward = float(request.sample_index == 0)
                file.write(json.dumps(line | {"fate": fate, "reward": reward}) + "\n")
    learner = LearnerConfig(learning_rate=3e-3)
    return PastRun(path, RunConfig(name="past", learner=learner, mtp=MtpConfig(depths=2)))


def test_a_past_runs_accepted_groups_come_back_whole_and_in_order(tmp_path: Path) -> None:
    groups = past_run(tmp_path).groups()
    assert [group.id for group, _ in groups] == ["g0", "g2", "g3"]
    for group, rewards in groups:
        assert tuple(sample.token_ids for sample in group.samples) == RESPONSES
        assert rewards == [1.0, 0.0, 0.0, 0.0]


def test_drift_compares_a_trained_head_with_its_copy_on_samples_nobody_saw(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, trained_on = read_config(tiny_llama), []
    head = MtpHead.from_policy(read_weights(tiny_llama), config, torch.arange(0, 300, 2))
    step = Learner.step

    def spying(learner: Learner, groups: list, rewards: list) -> object:  # type: ignore[type-arg]
        trained_on.extend(s.token_ids for group in groups for s in group.samples)
        return step(learner, groups, rewards)

    monkeypatch.setattr(Learner, "step", spying)
    measured = measure_drift(
        past_run(tmp_path),
        tiny_llama,
        head.tensors(version=0),
        steps=20,
        learning_rate=1e-3,
        tell=lambda _: None,
    )
    first, last = measured["rows"]
    assert first["online"] == first["frozen"]
    assert measured["gain_points"] == pytest.approx(
        100 * (last["online"][0] - last["frozen"][0]), abs=0.01
    )
    assert [row["step"] for row in measured["rows"]] == [0, 20] and measured["repeats"]
    assert set(trained_on) == set(RESPONSES[:-HELD_OUT]) and len(trained_on) == 20 * 2
