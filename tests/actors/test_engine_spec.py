"""Which policy a spec gets, and what is refused before an actor starts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine_spec import EngineSpec, make_policy
from rollout import compiled_policy
from rollout.compiled_policy import CompiledPolicy
from rollout.errors import InvalidConfig, KernelsUnavailable
from rollout.lossless_policy import LosslessPolicy
from rollout.transformer_policy import TransformerPolicy


def spec(folder: Path, **fields: Any) -> EngineSpec:
    return EngineSpec(str(folder), num_slots=2, context_len=64, **fields)


def no_kernels() -> None:
    raise KernelsUnavailable("compiled kernels need g++, which is not on the path")


def test_a_cpu_runs_compiled_kernels_unless_torch_is_named(tiny_llama: Path) -> None:
    assert isinstance(make_policy(spec(tiny_llama)), CompiledPolicy)
    assert isinstance(make_policy(spec(tiny_llama, kernels="compiled")), CompiledPolicy)
    assert isinstance(make_policy(spec(tiny_llama, kernels="torch")), TransformerPolicy)


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_lossless_mode_runs_twins_over_one_cache(tiny_llama: Path, kernels: Any) -> None:
    policy = make_policy(spec(tiny_llama, kernels=kernels, mode="lossless", proposer="self_draft"))
    assert isinstance(policy, LosslessPolicy)
    target, draft = policy.target, policy.draft
    assert (
        type(target)
        is type(draft)
        is (CompiledPolicy if kernels == "compiled" else TransformerPolicy)
    )
    assert (target.format.name, draft.format.name) == ("none", "int8_w8a16")


def test_without_a_compiler_torch_runs_and_says_so(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_policy, "find_kernels", no_kernels)
    assert isinstance(make_policy(spec(tiny_llama)), TransformerPolicy)
    assert "g++" in caplog.text and "torch" in caplog.text


@pytest.mark.parametrize("fields", [{"kernels": "compiled"}, {"max_cached_tokens": 64}])
def test_what_needs_compiled_kernels_is_refused_where_there_are_none(
    fields: dict[str, Any], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KernelsUnavailable, match="device=cuda"):
        make_policy(spec(tiny_llama, device="cuda", **fields))
    monkeypatch.setattr(compiled_policy, "find_kernels", no_kernels)
    with pytest.raises(KernelsUnavailable, match=r"g\+\+"):
        make_policy(spec(tiny_llama, **fields))


def test_a_gpu_that_is_not_there_is_refused(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidConfig, match=r"device=cuda: torch .* sees no GPU; set device=cpu"):
        make_policy(spec(tiny_llama, device="cuda"))


def test_a_cap_that_holds_no_row_and_rounds_of_nothing_are_refused(tiny_llama: Path) -> None:
    with pytest.raises(InvalidConfig, match="max_cached_tokens=63"):
        spec(tiny_llama, max_cached_tokens=63)
    with pytest.raises(InvalidConfig, match="max_round_tokens=0"):
        spec(tiny_llama, max_round_tokens=0)
