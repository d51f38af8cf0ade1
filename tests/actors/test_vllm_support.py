"""What is refused before vLLM is started, and without vLLM."""

from typing import Any

import pytest

from actors.engine_spec import EngineSpec
from actors.vllm.support import check_version
from rollout.errors import InvalidConfig

FULL: dict[str, Any] = {"engine": "vllm", "mode": "full", "format": "none", "proposer": "history"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mode": "lossless", "format": "int8_w8a8", "proposer": "self_draft"}, "mode=lossless"),
        ({"mode": "quantised", "format": "int8_w8a16"}, "format=int8_w8a16"),
        ({"proposer": "mtp", "mtp_head": "head"}, "proposer=mtp"),
        ({"tree_nodes": 4}, "tree_nodes=4"),
        ({"kernels": "compiled"}, "kernels=compiled"),
        ({"proposer": "vllm_draft_model"}, "without draft_model"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    EngineSpec("folder", **FULL)
    with pytest.raises(InvalidConfig, match=named):
        EngineSpec("folder", **FULL | fields)


def test_vllms_draft_model_is_not_the_native_engines() -> None:
    with pytest.raises(InvalidConfig, match="it is vLLM that drafts"):
        EngineSpec(
            "folder",
            **FULL | {"engine": "native", "proposer": "vllm_draft_model", "draft_model": "draft"},
        )


def test_a_vllm_that_was_not_tested_is_refused() -> None:
    check_version("0.32.1")
    for version in ("0.31.2", "0.33.0", "0.320.0", "1.0"):
        with pytest.raises(InvalidConfig, match=rf"vLLM {version}.*tested with 0\.32\.x"):
            check_version(version)
