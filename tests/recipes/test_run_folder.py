"""Run folders: never two writers into one, never half a checkpoint, logs cut to the checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from actors.weights import as_tensor, to_arrays
from proposers.history import HistoryProposer
from recipes.mtp_head import MtpHead
from recipes.run_folder import Checkpoint, RunFolder, SavedHead
from rollout.checkpoint import read_config
from rollout.errors import RunFolderError
from rollout.mtp_weights import load_mtp

MODEL = {"w": torch.arange(4.0)}
STATE = {"step": 1, "log_bytes": {}}
CONFIG = "name: test\n"


def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "test", CONFIG)


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.checkpoint(1, MODEL, {"w.exp_avg": torch.ones(4)}, STATE)
    made.close()
    _, checkpoint = RunFolder.resume(made.path, CONFIG)
    assert torch.equal(checkpoint.model()["w"], MODEL["w"])
    assert torch.equal(checkpoint.optimiser()["w.exp_avg"], torch.ones(4))
    assert checkpoint.state["step"] == 1


def test_a_checkpoint_holds_what_the_proposer_remembers_if_it_does(tmp_path: Path) -> None:
    """An empty history too, and one whose memory cannot be written, as in the object store."""
    made, proposer = folder(tmp_path), HistoryProposer(salt="model")
    for step, num_told in ((1, 0), (2, 3)):
        for first in range(num_told):
            proposer.remember([1, 2, 3], [first, 8, 9])
        arrays, _ = to_arrays(proposer.export())
        for array in arrays.values():
            array.setflags(write=False)
        history = {name: as_tensor(array) for name, array in arrays.items()}
        made.checkpoint(step, MODEL, {}, STATE, history)
        kept = Checkpoint(made.path / "checkpoints" / f"step-{step:06d}").history()
        assert kept is not None
        again = HistoryProposer(salt="model")
        again.merge(kept)
        assert again.gauges() == proposer.gauges()
        assert again.gauges()["history/sequences"] == num_told
    made.checkpoint(3, MODEL, {}, STATE)
    made.close()
    assert RunFolder.resume(made.path, CONFIG)[1].history() is None


def test_a_checkpoint_holds_the_head_that_is_trained_if_one_is(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """As a file that can be drafted with, and its optimiser."""
    made, config = folder(tmp_path), read_config(tiny_llama)
    tensors = MtpHead(config, torch.arange(5)).tensors(version=1)
    head = SavedHead(tensors, {"norm.weight.step": torch.tensor(3.0)}, salt="a model")
    made.checkpoint(1, MODEL, {}, STATE, head=head)
    kept = Checkpoint(made.path / "checkpoints" / "step-000001")
    file = kept.mtp()
    assert file is not None
    torch.testing.assert_close(load_mtp(file, config, "a model"), tensors, rtol=0, atol=0)
    assert kept.mtp_optimiser() == head.optimiser
    made.checkpoint(2, MODEL, {}, STATE)
    made.close()
    assert RunFolder.resume(made.path, CONFIG)[1].mtp() is None


def test_going_on_cuts_the_logs_to_the_checkpoint(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.write_sample({"id": "kept"})
    (made.path / "metrics.jsonl").write_text('{"learner/step": 1}\n')
    state = STATE | {"log_bytes": made.log_bytes()}
    made.write_sample({"id": "done again"})  # after the boundary, before the checkpoint
    made.checkpoint(1, MODEL, {}, state)
    with (made.path / "metrics.jsonl").open("a") as log:
        log.write('{"learner/st')  # killed while writing
    made.close()
    RunFolder.resume(made.path, CONFIG)
    assert (made.path / "samples.jsonl").read_text() == '{"id": "kept"}\n'
    assert (made.path / "metrics.jsonl").read_text() == '{"learner/step": 1}\n'


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    made = folder(tmp_path)
    for step in (1, 2, 3, 10):
        made.checkpoint(step, MODEL, {}, STATE)
    names = sorted(p.name for p in (made.path / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000010"]


def test_a_second_run_into_the_same_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "20300101-000000")
    folder(tmp_path)
    with pytest.raises(RunFolderError, match="exists already; resume it with --resume"):
        folder(tmp_path)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="set out="):
        RunFolder.create(tmp_path / "file", "test", "")


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_full_disk_leaves_the_earlier_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    made = folder(tmp_path)
    made.checkpoint(1, MODEL, {}, STATE)

    def no_space(*_: object) -> None:
        raise kind("No space left on device")

    monkeypatch.setattr("recipes.run_folder.save_file", no_space)
    with pytest.raises(RunFolderError, match="No space left"):
        made.checkpoint(2, MODEL, {}, STATE)
    assert [p.name for p in (made.path / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.parametrize("missing", ["nothing", "checkpoint"])
def test_what_cannot_be_gone_on_from_is_refused(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "none" if missing == "nothing" else folder(tmp_path).path
    with pytest.raises(RunFolderError, match="no checkpoint"):
        RunFolder.resume(path, CONFIG)


def test_logs_that_lost_lines_are_not_gone_on_from(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.write_sample({"id": "a"})
    made.checkpoint(1, MODEL, {}, STATE | {"log_bytes": made.log_bytes()})
    (made.path / "samples.jsonl").write_text("")
    made.close()
    with pytest.raises(RunFolderError, match="lines are lost"):
        RunFolder.resume(made.path, CONFIG)


def test_a_folder_that_a_process_runs_into_is_left_alone(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.write_sample({"id": "a"})
    made.checkpoint(1, MODEL, {}, STATE | {"log_bytes": {"samples.jsonl": 0}})
    with pytest.raises(RunFolderError, match="another process runs into this folder"):
        RunFolder.resume(made.path, CONFIG)
    assert (made.path / "samples.jsonl").read_text() == '{"id": "a"}\n'
