"""Weights for vLLM before vLLM sees them: their layout, and the file they travel in."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.vllm.layout import check_update, layout, module_of, pack_for_vllm, w8a8_folder
from actors.vllm.shared_update import read_update, write_update
from quant.formats import FORMATS
from rollout.checkpoint import read_config, read_weights
from rollout.errors import InvalidConfig, InvalidWeights
from rollout.packing import pack
from tests.tiny_model import tiny_folder


def test_int8_blocks_are_those_of_the_native_engine_and_the_rest_keeps_its_dtype(
    tiny_llama: Path,
) -> None:
    config, weights = read_config(tiny_llama), read_weights(tiny_llama)
    ours = pack(weights.items(), config, FORMATS["int8_w8a8"], torch.bfloat16)
    theirs = pack_for_vllm(weights.items(), config, "int8_w8a8", torch.bfloat16)
    assert set(theirs) == set(ours) - {f"{config.head_name}_scale"}  # the head stays as it is
    for name in config.matrix_shapes():
        assert torch.equal(theirs[name], ours[name])
        assert torch.equal(theirs[f"{name}_scale"][:, 0], ours[f"{name}_scale"])
    assert torch.equal(theirs[config.head_name], weights[config.head_name].bfloat16())


def test_full_precision_is_sent_as_it_is_and_a_tied_head_once(tiny_llama: Path) -> None:
    config, weights = read_config(tiny_llama), read_weights(tiny_llama)
    sent = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    packed = pack_for_vllm(sent.items(), config, "none", torch.float32)
    assert set(packed) == set(weights)
    assert all(torch.equal(packed[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("drop", "add", "said"),
    [
        ("model.layers.1.mlp", {}, "3 of .* tensors are missing"),
        ("nothing", {"model.norm.weight": torch.ones(3)}, "got shape .3,., expected .64,."),
        ("nothing", {"model.extra": torch.ones(1)}, "1 unknown tensors, first model.extra"),
        ("nothing", {"model.norm.weight": torch.full((64,), torch.inf)}, "NaN or infinity"),
        (
            "nothing",
            {"model.layers.0.mlp.up_proj.weight": torch.full((96, 64), torch.nan)},
            "up_proj.weight: weight holds NaN",
        ),
    ],
)
def test_a_set_that_is_not_whole_or_not_finite_is_not_packed(
    drop: str, add: dict[str, torch.Tensor], said: str, tiny_llama: Path
) -> None:
    named = {n: t for n, t in read_weights(tiny_llama).items() if drop not in n} | add
    with pytest.raises(InvalidWeights, match=said):
        pack_for_vllm(named.items(), read_config(tiny_llama), "int8_w8a8", torch.float32)


def test_a_format_that_vllm_is_not_given_is_refused_with_a_way_out(tiny_llama: Path) -> None:
    with pytest.raises(InvalidConfig, match="quant=int8_w8a16: set quant=int8_w8a8"):
        layout(read_config(tiny_llama), "int8_w8a16", torch.float32)


def test_biases_and_scales_belong_to_the_module_of_their_matrix(tmp_path: Path) -> None:
    config = read_config(tiny_folder(tmp_path, "qwen2"))
    expected = layout(config, "int8_w8a8", torch.float32)
    attention = {n for n in expected if module_of(n) == "model.layers.0.self_attn.qkv_proj"}
    assert {n.rpartition("self_attn.")[2] for n in attention} == {
        f"{part}_proj.{leaf}" for part in "qkv" for leaf in ("weight", "weight_scale", "bias")
    }
    whole = {n: torch.ones(expected[n][1]).to(expected[n][0]) for n in attention}
    check_update(whole, expected)
    for name in attention:
        with pytest.raises(InvalidWeights, match="in part"):
            check_update({n: t for n, t in whole.items() if n != name}, expected)


def test_a_quantised_folder_is_written_once_and_says_what_it_is(
    tiny_llama: Path, tmp_path: Path
) -> None:
    folder = w8a8_folder(tiny_llama, tmp_path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert w8a8_folder(tiny_llama, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    tensors = load_file(folder / "model.safetensors")
    expected = layout(read_config(tiny_llama), "int8_w8a8", torch.float32)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} == expected
    assert [file.name for file in tmp_path.iterdir()] == [folder.name]


# ---- the file -----------------------------------------------------------------------------

TENSORS = {"a": torch.arange(6).view(2, 3), "b": torch.full((2**18,), 0.5, dtype=torch.bfloat16)}


def test_an_update_is_read_as_it_was_written_also_by_another_process() -> None:
    staged = write_update(TENSORS)
    assert all(torch.equal(read_update(staged.path)[n], t) for n, t in TENSORS.items())
    code = (
        "import sys; from pathlib import Path; from actors.vllm.shared_update import read_update; "
        "print(float(read_update(Path(sys.argv[1]))['b'].sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(staged.path)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == 2**17


def test_nobody_else_may_read_it_and_no_name_leads_to_it(tmp_path: Path) -> None:
    staged = write_update(TENSORS, tmp_path)
    assert os.stat(staged.path).st_mode & 0o777 == 0o600
    assert os.stat(staged.path).st_nlink == 0 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_it_is_gone_with_its_owner(how: str) -> None:
    staged = write_update(TENSORS)
    path = staged.path
    if how == "closed":
        staged.close()
        staged.close()
    else:
        del staged
        gc.collect()
    with pytest.raises(InvalidWeights, match="no weight update"):
        read_update(path)


def test_a_process_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, torch; from pathlib import Path; "
        "from actors.vllm.shared_update import write_update; "
        "staged = write_update({'a': torch.ones(9)}, Path(sys.argv[1])); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_are_not_those_sent_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "update.safetensors"
    staged = write_update(TENSORS)
    content = bytearray(staged.path.read_bytes())
    file.write_bytes(content)
    read_update(file)
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InvalidWeights, match=r"holds digest .*, sent as"):
        read_update(file)
    file.write_bytes(content[:-1])
    with pytest.raises(InvalidWeights, match="no weight update"):
        read_update(file)
    save_file(TENSORS, file)  # by somebody else
    with pytest.raises(InvalidWeights, match="sent as None"):
        read_update(file)
