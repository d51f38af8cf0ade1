"""Tensors of an MTP head: what is taken, what is refused, and what comes back from a file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout.checkpoint import read_config
from rollout.decoder import DecoderConfig
from rollout.errors import InvalidWeights
from rollout.mtp_weights import VERSION, VOCABULARY, check_mtp, load_mtp, mtp_shapes, save_mtp
from tests.tiny_model import CONFIGS, tiny_folder

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def config(tiny_llama: Path) -> DecoderConfig:
    return read_config(tiny_llama)


def tensors_of(config: DecoderConfig, num: int = 5) -> Tensors:
    shapes = mtp_shapes(config, num)
    whole = {VOCABULARY: torch.arange(num) * 2, VERSION: torch.tensor(0)}
    return {name: whole.get(name, torch.ones(shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_block_has_the_tensors_of_the_policys_first_layer(
    architecture: str, tmp_path: Path
) -> None:
    config = read_config(tiny_folder(tmp_path, architecture))
    of_policy = config.matrix_shapes() | config.other_shapes()
    layer = {n[len("model.") :]: s for n, s in of_policy.items() if ".layers.0." in n}
    got = mtp_shapes(config, 9)
    block = {n[len("mtp.") :]: s for n, s in got.items() if ".layers." in n}
    assert block == layer and len(got) == len(layer) + 6
    assert ("mtp.layers.0.self_attn.q_proj.bias" in got) == (architecture == "qwen2")
    assert ("mtp.layers.0.self_attn.q_norm.weight" in got) == (architecture == "qwen3")
    check_mtp(tensors_of(config), config)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mtp.proj.weight", None, "mtp.proj.weight is missing"),
        (VOCABULARY, None, "without mtp.vocabulary"),
        ("mtp.other", torch.ones(1), "mtp.other is unknown"),
        (
            "mtp.proj.weight",
            torch.ones(64, 64),
            r"got torch.float32 \(64, 64\), expected .*64, 128",
        ),
        ("mtp.norm.weight", torch.ones(64).bfloat16(), "got torch.bfloat16"),
        ("mtp.norm.weight", torch.full((64,), torch.nan), "NaN or infinity"),
        (VERSION, torch.tensor(1.0), "got torch.float32"),
        (VOCABULARY, torch.tensor([0, 2, 2]), "rising order"),
        (VOCABULARY, torch.tensor([-1, 2]), "got ids -1 to 2"),
        (VOCABULARY, torch.tensor([1, 10**6]), "got ids 1 to 1000000"),
        (VOCABULARY, torch.tensor([], dtype=torch.int64), r"got shape \(0,\)"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    config: DecoderConfig, name: str, value: torch.Tensor | None, message: str
) -> None:
    tensors = tensors_of(config)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    with pytest.raises(InvalidWeights, match=message):
        check_mtp(tensors, config)


def test_a_file_gives_back_what_it_was_given(config: DecoderConfig, tmp_path: Path) -> None:
    tensors = tensors_of(config)
    save_mtp(tmp_path / "new" / "head.safetensors", tensors, "a model")
    got = load_mtp(tmp_path / "new" / "head.safetensors", config, "a model")
    torch.testing.assert_close(got, tensors, rtol=0, atol=0)


def test_files_that_are_no_head_of_this_model_are_refused(
    config: DecoderConfig, tmp_path: Path
) -> None:
    path = tmp_path / "head.safetensors"
    with pytest.raises(InvalidWeights, match="no such file; `rollout train-mtp`"):
        load_mtp(path, config, "a model")
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InvalidWeights, match="not a safetensors file"):
        load_mtp(path, config, "a model")
    save_mtp(path, tensors_of(config), "another")
    with pytest.raises(InvalidWeights, match="a head of the model 'another', expected 'a model'"):
        load_mtp(path, config, "a model")
    save_file(tensors_of(config), path)
    with pytest.raises(InvalidWeights, match="a head of the model None"):
        load_mtp(path, config, "a model")
