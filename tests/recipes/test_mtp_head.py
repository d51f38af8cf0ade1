"""The head to train: its block against transformers, its recursion against drafting step by step."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.mtp_head import MtpHead, draft_mask
from rollout.checkpoint import read_config, read_weights
from rollout.errors import InvalidWeights
from rollout.mtp_weights import check_mtp
from tests.tiny_model import CONFIGS, tiny_folder

VOCABULARY = torch.arange(0, 200, 2)


def head_of(folder: Path) -> MtpHead:
    return MtpHead.from_policy(read_weights(folder), read_config(folder), VOCABULARY)


def states(*, rows: int = 2, length: int, hidden: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, length, hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("architecture", CONFIGS)
@torch.no_grad()
def test_the_block_computes_what_the_policys_own_layer_does(
    architecture: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path, architecture)
    trunk = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    x, positions = states(length=7), torch.arange(7)[None]
    hiding = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    expected = trunk.layers[-1](
        x, attention_mask=hiding, position_embeddings=trunk.rotary_emb(x, positions)
    )
    torch.testing.assert_close(head_of(folder).layers[0](x, []), expected)


@torch.no_grad()
def test_all_depths_at_once_equal_drafting_from_each_position(tiny_llama: Path) -> None:
    """Reference: the trunk's states up to a position, behind them the head's own outputs one by one,
    the whole run anew as depth 1 for every token."""
    head = head_of(tiny_llama)
    hidden, embeddings = states(length=6), states(length=6, seed=1)
    together = head(hidden, embeddings, 3)
    for start in range(4):
        known = hidden[:, : start + 1]
        for depth in range(3):
            (alone,) = head(known, embeddings[:, : start + depth + 1], 1)
            torch.testing.assert_close(together[depth][:, start], alone[:, -1])
            known = torch.cat([known, alone[:, -1:]], dim=1)


@torch.no_grad()
def test_attending_to_the_trunks_states_inside_a_draft_is_something_else(tiny_llama: Path) -> None:
    """Negative control of the test above."""
    head = head_of(tiny_llama)
    hidden, embeddings = states(length=6), states(length=6, seed=1)
    (causal,) = head(hidden, embeddings, 1)
    assert (head(hidden, embeddings, 2)[1][:, 0] - causal[:, 1]).abs().max() > 1e-2


def test_what_a_position_sees_at_depth_3_by_hand() -> None:
    """Four positions of the trunk, three of depth 2 (from 1 on), two of depth 3 (from 2 on)."""
    assert draft_mask(4, 3).int().tolist() == [
        [1, 0, 0, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_tensors_are_those_of_the_format_and_come_back(architecture: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, architecture)
    head, config = head_of(folder), read_config(folder)
    tensors = head.tensors(version=3)
    check_mtp(tensors, config)
    again = MtpHead.from_tensors(tensors, config)
    torch.testing.assert_close(again.tensors(version=3), tensors, rtol=0, atol=0)
    x, e = states(length=4), states(length=4, seed=1)
    torch.testing.assert_close(again(x, e, 2), head(x, e, 2), rtol=0, atol=0)


def test_tensors_are_a_copy(tiny_llama: Path) -> None:
    head = head_of(tiny_llama)
    tensors = head.tensors(version=0)
    with torch.no_grad():
        head.norm.weight += 1
    assert not torch.equal(tensors["mtp.norm.weight"], head.norm.weight)


def test_a_head_of_another_model_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    tensors = head_of(tiny_llama).tensors(version=0)
    other = read_config(tiny_folder(tmp_path, "qwen2"))
    with pytest.raises(InvalidWeights, match=r"k_proj\.bias is missing"):
        MtpHead.from_tensors(tensors, other)
