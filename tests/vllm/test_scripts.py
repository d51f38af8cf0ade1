"""The benchmarks and the soak of the vLLM engine run and end with the JSON that they promise."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rollout.engine import run_to_end
from rollout.request import RolloutRequest, RolloutSample, SpecCounters, Timings
from rollout.sampling import SamplingParams
from scripts import bench_vllm_verify, soak_vllm
from tests.tiny_model import tiny_folder
from tests.vllm.engines import HEADS, loaded, spec_of

SCRIPTS = Path(__file__).parents[2] / "scripts"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has a chat template."""
    folder = tiny_folder(tmp_path_factory.mktemp("models") / "llama", **HEADS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def last_line(script: str, *arguments: str) -> dict[str, Any]:
    """JSON of a script that ends with 0."""
    command = [sys.executable, str(SCRIPTS / script), "--quick", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 1, "with --json nothing else is on stdout"
    found: dict[str, Any] = json.loads(lines[0])
    return found


# ---- against plain vLLM -------------------------------------------------------------------


def test_the_controller_is_compared_with_both_plain_engines(chatting: Path) -> None:
    found = last_line("bench_vllm.py", "--model", str(chatting), "--dtype", "float32")
    assert set(found["vllm_controller_vs_plain"]) == {"1", "2"}
    for batch, cell in found["vllm_controller"].items():
        assert set(cell["tok_s"]) == {"controller", "plug_in", "vllm"}
        faster = max(("plug_in", "vllm"), key=cell["tok_s"].get)
        ratio = found["vllm_controller_vs_plain"][batch]
        assert ratio == cell["tok_s"]["controller"] / cell["tok_s"][faster]
    assert found["logprob_error"] < 1e-4


# ---- verification -------------------------------------------------------------------------


def test_verification_is_compared_with_stock_in_every_cell() -> None:
    found = last_line("bench_vllm_verify.py")
    assert {cell["kind"] for cell in found["cells"]} == {"named", "drawn"}
    for cell in found["cells"]:
        assert set(cell["ratio"]) == set(cell["cpu_ratio"]) == {"stock", "stock_logprobs"}
        assert cell["ms"]["ours"] > 0 and 1 <= cell["emitted"]["ours"] <= 1 + cell["draft_len"]


def test_a_verifier_that_emits_fewer_tokens_is_refused() -> None:
    """Negative control; of drawn drafts more may be emitted."""
    few, many = ([num, num + 1] * 20 for num in (2, 5))
    taken = {
        name: bench_vllm_verify.Taken(emitted=emitted)
        for name, emitted in (("ours", few), ("stock", many[::-1]))
    }
    with pytest.raises(bench_vllm_verify.Inexact, match="ours emits -3"):
        bench_vllm_verify.check_same_length(taken, exactly=False)
    more = {"ours": taken["stock"], "stock": taken["ours"]}
    bench_vllm_verify.check_same_length(more, exactly=False)
    with pytest.raises(bench_vllm_verify.Inexact):
        bench_vllm_verify.check_same_length(more, exactly=True)


# ---- the soak -----------------------------------------------------------------------------


@pytest.mark.parametrize("format_", ["none", "int8_w8a8"])
def test_the_soak_finds_every_version_right(format_: str) -> None:
    found = last_line("soak_vllm.py", "--format", format_)
    assert found["consistent"] and found["rows_in_flight_at_a_publish"] >= 1
    assert found["checked"]["returns_of_the_first_weights"] == 2
    assert set(found["memory"]) == {"rss", "shm"}
    assert all(one["verdict"] == "not clear" for one in found["memory"].values())  # too short
    if format_ == "none":
        assert found["checked"]["samples"] >= 4 and found["checked"]["max_error"] < 1e-4


def test_memory_that_grows_is_told_from_memory_that_swings() -> None:
    swing = [100.0 + (-1) ** index * 5 for index in range(200)]
    assert soak_vllm.growth(swing).verdict == "flat"
    assert soak_vllm.growth([mb + 0.5 * i for i, mb in enumerate(swing)]).verdict == "grows"
    assert soak_vllm.growth([mb + 0.25 * i for i, mb in enumerate(swing)]).verdict == "not clear"
    assert soak_vllm.growth(list(range(50))).verdict == "not clear"
    early = [min(i, 60) + mb for i, mb in enumerate(swing)]
    assert soak_vllm.growth(early).verdict == "flat"


def test_forwards_of_ever_other_sizes_end_taking_memory(chatting: Path) -> None:
    """oneDNN's compiled kernels, 1.2 MB a number of tokens: 72 MB of 60 where it keeps all."""
    engine = loaded(spec_of(chatting, proposer="none", context_len=256))

    def run(prompt_len: int) -> None:
        noise = torch.Generator().manual_seed(prompt_len)
        ids = torch.randint(8, 250, (prompt_len,), generator=noise).tolist()
        name, sampling = str(prompt_len), SamplingParams(max_new_tokens=1)
        run_to_end(engine, [RolloutRequest(name, name, name, 0, tuple(ids), sampling)])

    for prompt_len in range(100, 160):
        run(prompt_len)
    before = soak_vllm.private_mb()
    for prompt_len in range(160, 220):
        run(prompt_len)
    assert soak_vllm.private_mb() - before < 15


def test_a_token_of_another_version_is_noticed() -> None:
    """Negative control of the soak: the log-probability of a token under version v is -v."""
    request = RolloutRequest("r", "g", "p", 0, (1, 2), SamplingParams())
    right = RolloutSample(
        request, (3, 4, 5), (-1.0, -1.0, -2.0), (-1.0, -1.0, -2.0), (1.0,) * 3, ((1, 2), (2, 1)),
        "length", "", "full", "", SpecCounters(), Timings(),
    )  # fmt: skip
    reference: Any = SimpleNamespace(logprobs=lambda sample, version: [-float(version)] * 3)
    checks = soak_vllm.Checks()
    checks.compare(right, reference)
    assert not checks.wrong and checks.min_control_error == 1.0 and checks.num_spans == 2
    checks.compare(replace(right, version_spans=((1, 1), (2, 2))), reference)
    assert len(checks.wrong) == 1 and "version 2" in checks.wrong[0]
    blind: Any = SimpleNamespace(logprobs=lambda sample, version: list(sample.logprobs))
    checks.compare(right, blind)
    assert "fits as well" in checks.wrong[1]


def test_weights_that_do_not_come_back_are_noticed() -> None:
    checks, first = soak_vllm.Checks(), torch.zeros(2)
    checks.probe(0, first.clone(), first)
    checks.probe(3, first + 1, first)
    assert checks.num_probes == 1 and not checks.wrong
    checks.probe(10, first + 1, first)
    checks.probe(11, first.clone(), first)
    assert len(checks.wrong) == 2


def test_every_tenth_version_has_the_first_weights() -> None:
    base = {"a": torch.ones(4, 3), "b": torch.ones(5)}
    first, other, again = (soak_vllm.changed(base, version) for version in (0, 9, 10))
    assert all(torch.equal(first[name], again[name]) for name in base)
    assert all(bool((first[name] != other[name]).all()) for name in base)
