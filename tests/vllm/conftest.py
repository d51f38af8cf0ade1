"""Two policies of one shape for each module of tests; a module that needs other heads says so."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rollout.checkpoint import read_weights
from tests.tiny_model import tiny_folder
from tests.vllm.engines import HEADS

Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def heads() -> dict[str, int]:
    return HEADS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, heads: dict[str, int]) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "llama", **heads)


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    return read_weights(folder)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, heads: dict[str, int]) -> Weights:
    """Another policy of the same shape."""
    return read_weights(tiny_folder(tmp_path_factory.mktemp("models") / "other", seed=1, **heads))
