"""What `dtype: auto` is, on a machine that multiplies bf16 and on one that does not."""

import pytest
import torch

from actors import engine_spec
from actors.engine_spec import EngineSpec


@pytest.mark.parametrize("multiplies", [torch.bfloat16, torch.float32])
def test_full_precision_on_a_cpu_is_the_learners_wherever_it_runs(
    multiplies: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_spec, "default_dtype", lambda device: multiplies)
    full = EngineSpec("m", mode="full", format="none", proposer="none")
    lossless = EngineSpec("m", mode="lossless", format="int8_w8a16", proposer="self_draft")
    assert full.torch_dtype == lossless.torch_dtype == torch.float32
    assert EngineSpec("m", mode="quantised", format="int8_w8a16").torch_dtype == multiplies
    named = EngineSpec("m", mode="full", format="none", proposer="none", dtype="bfloat16")
    assert named.torch_dtype == torch.bfloat16
