"""`rollout audit` from the command line: what it refuses, what it writes, what its exit code says."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import recipes.audit
import recipes.audit_enumerated
from recipes.audit import AuditPlan, read_sampling
from recipes.audit_enumerated import Case
from recipes.audit_faults import Control
from recipes.cli import main
from rollout.errors import InvalidConfig
from rollout.sampling import SamplingParams

FEW_CASES = [Case("none", "plain", num_tokens=2), Case("dense", "all penalties", num_tokens=2)]


def few_cases(**_: object) -> list[Case]:
    return FEW_CASES


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells of the grid, no streams, a control said to be caught: they have their own tests."""
    monkeypatch.setattr(recipes.audit_enumerated, "grid", few_cases)
    monkeypatch.setattr(recipes.audit, "audit_streams", lambda **_: [])
    caught = [Control("always accept", "Bent.", caught=True, by="enumeration", effect=0.3)]
    monkeypatch.setattr(recipes.audit, "run_controls", lambda **_: caught)


def run_audit(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> tuple[int, str, str]:
    code = main(["audit", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_an_audit_of_a_real_engine_writes_a_certificate_and_exits_0(
    small: None, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(tiny_llama), "--quant", "none", "--proposer", "history_sampled"]
    laws = ["--sampling", "temperature=0.7", "top_p=0.9", "--out", str(tmp_path), "--json"]
    code, out, err = run_audit(capsys, words + laws)
    row = json.loads(out.splitlines()[-1])
    assert (code, row["verdict"], row["failed"]) == (0, "exact", [])
    assert {"name", "caught"} <= row["controls"][0].keys()
    assert [part["proposer"] for part in row["sampled"]] == ["history_sampled"]
    assert Path(row["page"]).is_file() and "sampling the real engine" in err


def test_lossless_mode_is_audited_as_full_precision_that_its_quantised_self_drafts_for(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans: list[AuditPlan] = []

    def keep(plan: AuditPlan) -> None:
        plans.append(plan)
        raise InvalidConfig("far enough")

    monkeypatch.setattr(recipes.audit, "audit", keep)
    words = ["--model", str(tiny_llama), "--mode", "lossless", "--quant", "int8_w8a8"]
    code, _, err = run_audit(capsys, words)
    (plan,) = plans
    assert code == 2 and "far enough" in err and plan.proposers == ("self_draft",)
    assert (plan.spec.mode, plan.spec.target_format) == ("lossless", "none")


def test_controls_that_are_not_caught_make_the_audit_void(
    small: None, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    missed = [Control("always accept", "Bent.", caught=False, by="enumeration", effect=0.0)]
    monkeypatch.setattr(recipes.audit, "run_controls", lambda **_: missed)
    words = ["--model", str(tiny_llama), "--quant", "none", "--proposer", "none"]
    code, out, _ = run_audit(capsys, [*words, "--out", str(tmp_path)])
    assert code == 2 and "verdict: void" in out and "not caught: always accept" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sampling", "temprature=0.7"], "did you mean temperature?"),
        (["--sampling", "temperature"], "expected name=value"),
        (["--sampling", "top_p=0"], "top_p=0: expected a number in (0, 1]"),
        (["--draft-len", "-1"], "--draft-len -1: expected at least 0"),
        (["--model", "no/such/folder"], "no config.json"),
        (["--mode", "full", "--quant", "int8_w8a8"], "full goes with none"),
        (["--mode", "lossless"], "name their format"),
        (["--proposer", "self_draft"], "set mode=lossless"),
    ],
)
def test_bad_use_is_refused_by_name_with_exit_code_2(
    small: None, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_audit(capsys, words)
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_draft_model_that_nobody_names_is_a_noisy_copy_of_the_model(
    small: None, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(tiny_llama), "--proposer", "draft_model", "--out", str(tmp_path)]
    code, out, _ = run_audit(capsys, [*words, "--json"])
    row = json.loads(out.splitlines()[-1])
    (part,), audited = row["sampled"], row["audited"]
    assert code == 0 and 0.2 < part["acceptance_rate"] < 1.0  # wrong now and then
    weights, tokenizer = "weights_sha256", "tokenizer_sha256"
    assert audited["draft_model"][weights] != audited["model"][weights]
    assert audited["draft_model"][tokenizer] == audited["model"][tokenizer]
    assert not Path(audited["draft_model"]["folder"]).exists()


def test_an_engine_that_fails_is_not_called_inexact(
    small: None, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from rollout.errors import ActorFailed

    def fail(*_: object, **__: object) -> None:
        raise ActorFailed("the engine is gone")

    monkeypatch.setattr(recipes.audit, "audit_engine", fail)
    words = ["--model", str(tiny_llama), "--quant", "none", "--out", str(tmp_path)]
    code, _, err = run_audit(capsys, words)
    assert code == 2 and "the engine is gone" in err


def test_sampling_words_become_sampling_parameters() -> None:
    assert read_sampling([]) == SamplingParams()
    read = read_sampling(
        ["temperature=0.7", "top_k=20", "logit_bias={5: -100}", "bad_words=[[1,2]]"]
    )
    assert read == SamplingParams(
        temperature=0.7, top_k=20, logit_bias=((5, -100),), bad_words=((1, 2),)
    )


def test_an_unknown_sampling_parameter_names_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match="did you mean top_k"):
        read_sampling(["topk=3"])
