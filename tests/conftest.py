"""Models that several test folders share, and which tests are collected."""

from pathlib import Path

import pytest
import torch

from recipes.smollm2 import model_folder
from rollout.transformer_policy import TransformerPolicy
from tests.rollout.policies import loaded_policy
from tests.tiny_model import tiny_folder

VLLM_TESTS = Path(__file__).parent / "vllm"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vllm", action="store_true", help="run tests/vllm, which need vLLM; see scripts/test"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/vllm is collected with --vllm, where an absent vLLM is an error, and not without."""
    without = collection_path == VLLM_TESTS and not config.getoption("--vllm")
    return True if without else None


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny models: more threads only wait for each other, and a run that a test before this one
    made leaves its own number, which moves the last bits of a product."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a tied head."""
    return tiny_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, converted at first use."""
    return model_folder("smollm2")


@pytest.fixture(scope="session")
def smollm2_policy(smollm2: Path) -> TransformerPolicy:
    """SmolLM2 in full precision, float32."""
    return loaded_policy(smollm2, num_slots=64, context_len=64)
