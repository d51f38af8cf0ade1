"""`rollout run` whole, through the command line's entry: the quickstart recipe on a tiny model, with an
actor killed, a Ctrl-C, a resume; and once on SmolLM2."""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import recipes.run
from actors.cluster import RolloutCluster
from actors.engine_spec import history_salt
from recipes.cli import main
from recipes.mtp_head import MtpHead
from recipes.run_folder import Checkpoint, RunFolder
from rollout.checkpoint import read_config, read_weights
from rollout.errors import FleetDead, RolloutTimeout
from rollout.mtp_weights import load_mtp, save_mtp
from tests.recipes.test_sink import wandb_files, wandb_history

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")
NEEDED = (
    "accepted_samples", "accepted_samples_per_hour", "tokens_per_second", "tokens_per_target_step",
    "acceptance_rate", "drift_kl", "reward_first_third", "reward_last_third", "ledger", "ladder",
)  # fmt: skip


@pytest.fixture
def tiny_words(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The quickstart on a tiny model, which never adds right: its reward is the response's length
    being even, so that groups differ and the learner has work."""
    monkeypatch.setattr(recipes.run, "reward", lambda _, response: float(len(response) % 2 == 0))
    return [
        "run", QUICKSTART, f"model.path={tiny_llama}", f"out={tmp_path}", "steps=4",
        "learner.groups_per_step=2", "learner.group_size=4", "draft.length=3", "--json",
    ]  # fmt: skip


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return summary


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def at_step(step: int, action: Callable[[RolloutCluster], None], monkeypatch: Any) -> None:
    """Does something while the learner is about to wait for the groups of a step."""
    inner, calls = recipes.run._next_groups, iter(range(1, 10**6))

    def next_groups(config: Any, cluster: RolloutCluster, *rest: Any) -> Any:
        if next(calls) == step:
            action(cluster)
        return inner(config, cluster, *rest)

    monkeypatch.setattr(recipes.run, "_next_groups", next_groups)


def assert_one_fate_each(run: Path, summary: dict[str, Any]) -> None:
    """The lines on disk, the ledger and the steps tell the same story."""
    samples = lines(run, "samples.jsonl")
    ids = [line["id"] for line in samples]
    assert len(ids) == len(set(ids))
    fates = Counter(line["fate"] for line in samples)
    ledger = summary["ledger"]
    assert fates == {f: ledger[f] for f in ("accepted", "stale", "filtered", "failed") if ledger[f]}
    ended = sum(n for name, n in ledger.items() if name not in ("generated", "in_flight"))
    assert ended == ledger["generated"]
    groups = {id_.partition("/")[0] for id_ in ids}
    assert groups == {f"{i:06d}" for i in range(len(groups))}  # from the first on, none left out


def test_a_run_leaves_everything_it_promises(
    tiny_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tiny_words) == 0
    summary = last_json(capsys)
    assert [name for name in NEEDED if summary.get(name) is None] == []
    (run,) = tmp_path.glob("*-quickstart")
    for name in ("config.yaml", "passport.json", "summary.json", "report.html", "checkpoints"):
        assert (run / name).exists(), name
    assert_one_fate_each(run, summary)
    assert len(summary["ladder"]) == 4
    rows = lines(run, "metrics.jsonl")
    assert [row["learner/step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["sync/version"] == row["learner/step"] for row in rows)
    (file,) = wandb_files(run)
    in_wandb = wandb_history(file)
    assert [row["reward/mean"] for row in in_wandb] == [row["reward/mean"] for row in rows]
    for sample in lines(run, "samples.jsonl"):
        assert len(sample["logprobs"]) == len(sample["logprobs_full"]) == len(sample["token_ids"])
        assert sum(num for _, num in sample["version_spans"]) == len(sample["token_ids"])


def test_a_killed_actor_costs_no_sample(
    tiny_words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_step(2, lambda c: os.kill(c.actors()[0].pid, signal.SIGKILL), monkeypatch)
    assert main([*tiny_words, "ladder.enabled=false"]) == 0
    summary = last_json(capsys)
    assert summary["restarts"] == 1 and summary["steps"] == 4
    (run,) = tmp_path.glob("*-quickstart")
    assert_one_fate_each(run, summary)


def test_ctrl_c_ends_at_a_step_and_resume_goes_on_without_loss_or_repeat(
    tiny_words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        at_step(3, lambda _: os.kill(os.getpid(), signal.SIGINT), patch)
        assert main(tiny_words) == 130
    stopped = last_json(capsys)
    assert (stopped["ended"], stopped["steps"]) == ("interrupted", 2)
    (run,) = tmp_path.glob("*-quickstart")
    assert (run / "report.html").exists()
    (kept,) = (run / "checkpoints").glob("step-000002/history.safetensors")
    remembered, loaded = load_file(kept), []
    assert len(remembered["token_lens"]) >= stopped["accepted_samples"] > 0
    inner = RolloutCluster.load_history

    def load_history(cluster: RolloutCluster, history: dict[str, torch.Tensor]) -> None:
        inner(cluster, history)
        loaded.append(history)

    monkeypatch.setattr(RolloutCluster, "load_history", load_history)
    assert main(["run", "--resume", str(run), "--json", "ladder.enabled=false"]) == 0
    summary = last_json(capsys)
    torch.testing.assert_close(loaded, [remembered], rtol=0, atol=0, equal_nan=True)
    (kept,) = (run / "checkpoints").glob("step-000004/history.safetensors")
    grown = load_file(kept)
    assert len(grown["token_lens"]) > len(remembered["token_lens"])
    assert torch.equal(grown["noises"][: len(remembered["noises"])], remembered["noises"])
    assert summary["exactness"]["exact/alarm"] == 0  # rows in flight were drawn again
    assert summary["steps"] == 4
    assert_one_fate_each(run, summary)
    assert [row["learner/step"] for row in lines(run, "metrics.jsonl")] == [1, 2, 3, 4]
    assert summary["accepted_samples"] >= stopped["accepted_samples"]


def test_a_run_trains_its_head_and_a_resumed_one_goes_on_with_it(
    tiny_words: list[str],
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is published is the file's head, then the one trained, then the checkpoint's."""
    config, salt = read_config(tiny_llama), history_salt(tiny_llama)
    made = MtpHead.from_policy(read_weights(tiny_llama), config, torch.arange(0, 300, 2))
    save_mtp(tmp_path / "head.safetensors", made.tensors(version=0), salt)
    inner, drafts = RolloutCluster.publish, list[dict[str, torch.Tensor] | None]()

    def publish(cluster: RolloutCluster, version: int, named: Any, draft: Any = None) -> Any:
        drafts.append(draft)
        return inner(cluster, version, named, draft=draft)

    monkeypatch.setattr(RolloutCluster, "publish", publish)
    options = [f"mtp.path={tmp_path / 'head.safetensors'}", "proposer=mtp", "ladder.enabled=false"]
    assert main([*tiny_words, "steps=2", *options]) == 0
    (run,) = tmp_path.glob("*-quickstart")
    kept = load_mtp(run / "checkpoints" / "step-000002" / "mtp.safetensors", config, salt)
    assert drafts[0] is None and drafts[1] is not None and len(drafts) == 3
    torch.testing.assert_close(drafts[2], kept, rtol=0, atol=0)
    assert not torch.equal(kept["mtp.proj.weight"], made.proj.weight)
    assert all(0 < row["mtp/acceptance_depth1"] < 1 for row in lines(run, "metrics.jsonl"))
    assert main(["run", "--resume", str(run), "--json", "steps=3"]) == 0
    torch.testing.assert_close(drafts[3], kept, rtol=0, atol=0)
    assert drafts[4] is not None
    assert not torch.equal(drafts[4]["mtp.proj.weight"], kept["mtp.proj.weight"])


def test_a_recipe_that_names_no_head_begins_one_and_tells_its_lag(
    tiny_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*tiny_words, "steps=2", "proposer=mixture", "ladder.enabled=false"]) == 0
    assert last_json(capsys)["acceptance_rate"] > 0
    (run,) = tmp_path.glob("*-quickstart")
    assert (run / "mtp.safetensors").is_file()
    rows = lines(run, "metrics.jsonl")
    assert all(0 <= row["spec/draft_lag"] <= 2 for row in rows)
    assert all("mtp/loss" in row and row["mtp/tokens"] > 0 for row in rows if "learner/loss" in row)


@pytest.mark.parametrize("error", [FleetDead, RolloutTimeout])
def test_a_fleet_that_is_gone_costs_the_history_and_not_the_checkpoint(
    tmp_path: Path, error: type[Exception]
) -> None:
    def history() -> None:
        raise error("nobody answers")

    folder = RunFolder.create(tmp_path, "test", "name: test\n")
    learner: Any = SimpleNamespace(model=torch.nn.Linear(2, 2), optimiser_tensors=dict)
    cluster: Any = SimpleNamespace(history=history)
    recipes.run._checkpoint(folder, cluster, learner, recipes.run.Progress(step=1))
    (written,) = (folder.path / "checkpoints").glob("step-*")
    assert {file.name for file in written.iterdir()} == {
        "model.safetensors", "optimiser.safetensors", "state.json",
    }  # fmt: skip
    assert Checkpoint(written).history() is None


def test_the_quickstart_runs_on_smollm2(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["steps=2", "learner.groups_per_step=2", "ladder.groups=1", "ladder.repeats=1"]
    assert main(["run", QUICKSTART, f"out={tmp_path}", *words, "--json"]) == 0
    summary = last_json(capsys)
    assert summary["steps"] == 2 and summary["tokens_per_target_step"] >= 1
    assert 0 < summary["drift_kl"] < 0.05
    (run,) = tmp_path.glob("*-quickstart")
    assert_one_fate_each(run, summary)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", QUICKSTART, "proposr=none"], "did you mean proposer"),
        (["run", QUICKSTART, "model.path=/no/such/folder"], r"no config\.json"),
        (["run", "missing.yaml"], "no such recipe"),
        (["run"], "no recipe"),
        (["run", "--resume", "nowhere"], "expected a run folder"),
        (["report", "nowhere"], "no such run folder"),
        (["stop", "nobody"], "no cluster named nobody"),
        (["status", "nobody"], "neither a run folder nor a cluster"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_two(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert re.search(message, said), said
