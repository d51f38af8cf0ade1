"""What a model folder must hold, and how it is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.checkpoint import read_config, read_tokenizer, read_weights
from rollout.errors import UnsupportedModel
from tests.rollout.policies import hugging_face
from tests.tiny_model import CONFIGS, tiny_folder

Folder = Callable[..., Path]


@pytest.fixture
def edited(tmp_path: Path) -> Folder:
    """A tiny model whose config.json was edited by hand."""

    def make(architecture: str = "llama", **changes: Any) -> Path:
        folder = tiny_folder(tmp_path, architecture)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return folder

    return make


@pytest.mark.parametrize("architecture", CONFIGS)
def test_config_lists_exactly_the_tensors_of_the_folder(architecture: str, tmp_path: Path) -> None:
    for tied in (True, False):
        folder = tiny_folder(tmp_path / str(tied), architecture, tied=tied)
        config = read_config(folder)
        shapes = {name: tuple(t.shape) for name, t in read_weights(folder).items()}
        assert shapes == config.matrix_shapes() | config.other_shapes()
        assert config.tied_head == tied


def test_a_missing_folder_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"nowhere: no config\.json"):
        read_config(tmp_path / "nowhere")


def test_an_architecture_that_is_not_run_here_is_refused_by_name(edited: Folder) -> None:
    """Recurrent and hybrid models would need a state that can be rolled back."""
    with pytest.raises(UnsupportedModel, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        read_config(edited(architectures=["MambaForCausalLM"]))


def test_a_model_type_that_transformers_does_not_know_is_refused(edited: Folder) -> None:
    with pytest.raises(UnsupportedModel, match="transformers cannot read it"):
        read_config(edited(model_type="not_a_model"))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("mistral", {"sliding_window": 128}, "sliding-window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128}, "sliding-window"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 128}, "sliding-window"),
        ("llama", {"hidden_act": "gelu"}, "activation gelu"),
        ("llama", {"mlp_bias": True}, "biases in the MLP"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_the_forward_does_not_compute_is_refused(
    architecture: str, changes: dict[str, Any], message: str, edited: Folder
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_config(edited(architecture, **changes))


def test_a_sliding_window_that_is_switched_off_is_no_obstacle(edited: Folder) -> None:
    assert read_config(edited("qwen2", use_sliding_window=False, sliding_window=4096)).qkv_bias


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_frequencies_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, rope_parameters=ROPES[kind])
    want = hugging_face(folder).model.rotary_emb
    config = read_config(folder)
    torch.testing.assert_close(torch.tensor(config.inv_freq), want.inv_freq)
    assert config.rope_scale == want.attention_scaling


def test_default_frequencies_by_hand(tmp_path: Path) -> None:
    """theta^(-2 i / 16) for i = 0..7; with theta = 10^8 that is 10^(-i)."""
    folder = tiny_folder(
        tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e8}
    )  # fmt: skip
    assert read_config(folder).inv_freq == pytest.approx([10.0**-i for i in range(8)])


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope"])
def test_rotary_variants_that_depend_on_the_length_are_refused(kind: str, edited: Folder) -> None:
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        parameters |= {"original_max_position_embeddings": 64}
    with pytest.raises(UnsupportedModel, match=f"rope type {kind}; expected one of"):
        read_config(edited(rope_parameters=parameters))


@pytest.mark.parametrize(("eos", "want"), [(5, (5,)), ([5, 7], (5, 7)), (None, ())])
def test_stop_ids_are_a_tuple_whatever_the_config_holds(
    eos: Any, want: tuple[int, ...], edited: Folder
) -> None:
    assert read_config(edited(eos_token_id=eos)).eos_token_ids == want


def test_a_folder_without_safetensors_is_refused(edited: Folder) -> None:
    folder = edited()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors is missing; only safetensors"):
        read_weights(folder)


def test_a_damaged_safetensors_file_is_refused_by_name(edited: Folder) -> None:
    file = edited() / "model.safetensors"
    file.write_bytes(file.read_bytes()[: math.floor(0.9 * file.stat().st_size)])
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors: not a safetensors file"):
        read_weights(file.parent)


def test_shards_are_read_by_the_index_and_a_missing_one_is_named(edited: Folder) -> None:
    folder = edited()
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"shard-{i % 2}.safetensors" for i, name in enumerate(sorted(whole))}
    for shard in set(shards.values()):
        save_file({n: whole[n] for n in whole if shards[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    read = read_weights(folder)
    assert read.keys() == whole.keys() and all(torch.equal(read[n], whole[n]) for n in whole)
    (folder / "shard-1.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"shard-1\.safetensors is missing"):
        read_weights(folder)


def test_a_folder_without_a_fast_tokenizer_is_refused(edited: Folder) -> None:
    folder = edited()
    assert read_tokenizer(folder).decode(read_tokenizer(folder).encode("2 + 3\n")) == "2 + 3\n"
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        read_tokenizer(folder)
