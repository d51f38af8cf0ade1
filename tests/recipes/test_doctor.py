"""`rollout doctor` and the closing table."""

import json

import pytest
import torch
from rich.console import Console

import recipes.doctor
from recipes.cli import main
from recipes.doctor import FOLDERS, examine
from recipes.summary import print_summary


def test_a_sound_installation_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    assert {f"import {name}" for name in FOLDERS} <= {finding["name"] for finding in findings}


def test_a_shadowed_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own json stands where one of the project's folders is looked for."""
    monkeypatch.setattr(recipes.doctor, "FOLDERS", ("json",))
    (finding, *_) = examine()
    assert not finding.ok and finding.needed and "shadowed by" in finding.text
    assert main(["doctor", "--json"]) == 1


@pytest.mark.parametrize(
    ("capability", "w8a8"), [((9, 0), "torch._int_mm"), ((7, 0), "float32 GEMM")]
)
def test_a_gpu_is_named_with_what_would_run_on_it(
    capability: tuple[int, int], w8a8: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Model X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    (finding,) = (f for f in examine() if f.name == "GPU")
    assert finding.ok and "Model X" in finding.text and f"W8A8 as {w8a8};" in finding.text


def test_the_closing_table_tells_also_when_speculation_loses() -> None:
    rung = {
        "speedup_vs_first": 1.0, "tokens_per_target_step": 1.0, "acceptance_rate": None,
        "drift_kl": 0.0, "same_tokens_rate": 1.0,
    }  # fmt: skip
    names = [
        f"{way} {w}" for way in ("plain", "speculative") for w in ("full precision", "quantised")
    ]
    ladder = [rung | {"name": name, "tokens_per_s": 100.0 - i} for i, name in enumerate(names)]
    summary = {
        "name": "x", "ended": "finished", "steps": 3, "run": "runs/x", "ladder": ladder,
        "reward_first_third": 0.1, "reward_last_third": 0.5,
    }  # fmt: skip
    console = Console(record=True, width=120)
    print_summary(summary, console)
    text = console.export_text()
    assert "0.100 -> 0.500" in text and "speculative quantised" in text and "–" in text
    assert "lost" in text.lower() or "slower" in text.lower()
