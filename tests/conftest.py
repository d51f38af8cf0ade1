"""Models that several test folders share."""

from pathlib import Path

import pytest
import torch

from recipes.smollm2 import model_folder
from tests.tiny_model import tiny_folder

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a tied head."""
    return tiny_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, converted at first use."""
    return model_folder("smollm2")
