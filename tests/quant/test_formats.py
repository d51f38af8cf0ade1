"""Which matrices a format touches and what they weigh, on real tensors."""

from pathlib import Path

import pytest
import torch

from quant.formats import FORMATS, FormatName, make_linear, payload_bytes
from quant.int8 import Int8Weight, quantise_weight
from tests.rollout.policies import loaded_policy
from tests.tiny_model import tiny_folder

# The tiny Llama: 2 blocks of q 64x64, k and v 32x64, o 64x64, gate and up 96x64, down 64x96.
MATRIX_WEIGHTS = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 96 * 64)
CHANNELS = 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
VOCAB_SIZE, NORMS = 300, 5 * 64
EMBEDDING = VOCAB_SIZE * 64
QUANTISED: list[FormatName] = ["int8_w8a16", "int8_w8a8"]


def test_tied_tensors_and_views_are_counted_once() -> None:
    one, other = torch.zeros(10, 4), torch.zeros(3, dtype=torch.int8)
    assert payload_bytes([one, one.view(-1), one[2:], other]) == 160 + 3


@pytest.mark.parametrize(("name", "scale_bytes"), [("int8_w8a16", 2), ("int8_w8a8", 4)])
def test_payload_is_one_byte_a_weight_the_scales_and_one_embedding(
    name: FormatName, scale_bytes: int, tiny_llama: Path
) -> None:
    weights = loaded_policy(tiny_llama, name).weights
    assert weights is not None
    blocks = MATRIX_WEIGHTS + scale_bytes * CHANNELS
    assert weights.bytes() == blocks + EMBEDDING + 4 * (VOCAB_SIZE + NORMS)


@pytest.mark.parametrize("name", FORMATS)
def test_an_untied_embedding_is_a_matrix_in_the_compute_dtype(
    name: FormatName, tiny_llama: Path, tmp_path: Path
) -> None:
    tied = loaded_policy(tiny_llama, name).weights
    untied = loaded_policy(tiny_folder(tmp_path, tied=False), name).weights
    assert tied is not None and untied is not None
    assert untied.bytes() - tied.bytes() == 4 * EMBEDDING


def test_full_precision_weighs_the_dtype_times_the_number_of_weights(tiny_llama: Path) -> None:
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        weights = loaded_policy(tiny_llama, dtype=dtype).weights
        assert weights is not None
        assert weights.bytes() == size * (MATRIX_WEIGHTS + EMBEDDING + NORMS)


@pytest.mark.parametrize("name", QUANTISED)
def test_embedding_and_head_share_one_quantised_storage(name: FormatName, tiny_llama: Path) -> None:
    weights = loaded_policy(tiny_llama, name).weights
    assert weights is not None
    head, _ = weights.head.tensors()
    assert isinstance(weights.embedding, Int8Weight)
    assert head.data_ptr() == weights.embedding.values.data_ptr()
    assert head.dtype == torch.int8


@pytest.mark.parametrize("name", QUANTISED)
def test_every_block_matrix_is_quantised(name: FormatName, tiny_llama: Path) -> None:
    weights = loaded_policy(tiny_llama, name).weights
    assert weights is not None
    linears = [
        linear for b in weights.blocks for linear in (b.qkv, b.out, b.gate_up, b.down)
    ]  # fmt: skip
    assert len(linears) == 8
    assert all(linear.tensors()[0].dtype == torch.int8 for linear in linears)


@pytest.mark.parametrize("name", QUANTISED)
def test_fused_maps_keep_the_scales_of_their_parts(name: FormatName, tiny_llama: Path) -> None:
    """Filled with 127, 254 and 381, q, k and v have scales 1, 2 and 3 in their own rows."""
    fills = {"q_proj": 127.0, "k_proj": 254.0, "v_proj": 381.0}
    policy = loaded_policy(
        tiny_llama,
        name,
        change=lambda n, t: next((t * 0 + f for part, f in fills.items() if part in n), t),
    )
    assert policy.weights is not None
    _, scales = policy.weights.blocks[0].qkv.tensors()
    assert scales.tolist() == [1.0] * 64 + [2.0] * 32 + [3.0] * 32


def test_a_format_chooses_its_kernel_by_name() -> None:
    plain = torch.ones(4, 4)
    kernels = {
        name: make_linear(
            format_,
            plain if format_.scale_dtype is None else quantise_weight(plain, format_.scale_dtype),
            None,
        ).kernel
        for name, format_ in FORMATS.items()
    }
    assert kernels["none"] == "F.linear float32"
    assert "_weight_int8pack_mm" in kernels["int8_w8a16"]
    assert "int8" in kernels["int8_w8a8"] or "_int_mm" in kernels["int8_w8a8"]
    assert list(FORMATS) == [format_.name for format_ in FORMATS.values()]
