"""The check for GPUs, as far as a machine without one can run it: the CPU stands for the device and
the tape for its graphs."""

import json
import sys
from pathlib import Path

import pytest
import torch

from actors.engine_spec import EngineSpec
from rollout.decode_graphs import DecodeGraphs
from rollout.graph_capture import TapeCapture
from scripts import check_cuda
from scripts.check_cuda import (
    BATCHES,
    REGIMES,
    Check,
    check,
    make_policy,
    score_rounds,
    tokens_per_s,
)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> list[torch.Tensor]:
    spec = EngineSpec(str(tiny_llama), format="none", dtype="float32", context_len=128)
    return score_rounds(make_policy(spec, capture=None, num_slots=9))


def checked(name: str, folder: Path, reference: list[torch.Tensor]) -> Check:
    return check(name, folder, reference, device="cpu", capture=TapeCapture())


def test_a_right_engine_passes(tiny_llama: Path, reference: list[torch.Tensor]) -> None:
    found = checked("float32", tiny_llama, reference)
    assert found.ok and found.num_replayed == 36


def test_a_graph_that_replays_old_inputs_fails(
    tiny_llama: Path, reference: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = DecodeGraphs._inputs
    monkeypatch.setattr(DecodeGraphs, "_inputs", lambda self, _, shape: inputs(self, (), shape))
    found = checked("float32", tiny_llama, reference)
    assert not found.ok and found.from_eager > 0.1


def test_logits_that_are_not_numbers_fail(tiny_llama: Path, reference: list[torch.Tensor]) -> None:
    spoilt = [*reference[:-1], torch.full_like(reference[-1], torch.nan)]
    assert not checked("float32", tiny_llama, spoilt).ok


@pytest.mark.parametrize("name", REGIMES)
def test_every_regime_is_timed_in_both_ways(name: str, tiny_llama: Path) -> None:
    for capture in (None, TapeCapture()):
        rates = tokens_per_s(name, tiny_llama, device="cpu", capture=capture, num_tokens=2)
        assert list(rates) == list(BATCHES) and min(rates.values()) > 0


def test_without_a_gpu_it_says_so_and_checks_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["check_cuda.py"])
    assert check_cuda.main() == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no GPU") and "nothing was checked" in line


def test_what_it_finds_is_one_object_on_the_last_line(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Check("float32", "F.linear float32", 36, 0.0, 0.0, ok=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Model X")
    monkeypatch.setattr(check_cuda, "CudaCapture", lambda device: None)
    monkeypatch.setattr(check_cuda, "check", lambda *_, **__: right)
    monkeypatch.setattr(check_cuda, "tokens_per_s", lambda *_, **__: {1: 10.0})
    monkeypatch.setattr(sys, "argv", ["check_cuda.py", "--model", str(tiny_llama), "--json"])
    assert check_cuda.main() == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(last["checks"]) == 4 and last["tokens_per_s"]["bf16 graphs"] == {"1": 10.0}
