"""A decoder's weights layer by layer, maps that read the same input stacked into one."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quant.int8 import Int8Weight
from rollout.decoder import DecoderConfig

Matrix = torch.Tensor | Int8Weight
Tensors = Mapping[str, Matrix]


@dataclass(frozen=True, slots=True)
class BlockTensors:
    """One layer; matrices [out, in]."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None
    out: Matrix
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Matrix
    down: Matrix


def block_tensors(tensors: Tensors, config: DecoderConfig, layer: int) -> BlockTensors:
    """The layer's tensors; they are known to be complete and of the right shapes."""
    at = f"model.layers.{layer}"
    attention = [f"{at}.self_attn.{name}_proj" for name in "qkv"]
    biases = [plain(tensors, f"{name}.bias") for name in attention] if config.qkv_bias else []
    return BlockTensors(
        attention_norm=plain(tensors, f"{at}.input_layernorm.weight"),
        qkv=_stack([tensors[f"{name}.weight"] for name in attention]),
        qkv_bias=torch.cat(biases) if biases else None,
        q_norm=plain(tensors, f"{at}.self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=plain(tensors, f"{at}.self_attn.k_norm.weight") if config.qk_norm else None,
        out=tensors[f"{at}.self_attn.o_proj.weight"],
        mlp_norm=plain(tensors, f"{at}.post_attention_layernorm.weight"),
        gate_up=_stack([tensors[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up")]),
        down=tensors[f"{at}.mlp.down_proj.weight"],
    )


def rotations(config: DecoderConfig, context_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [context_len, D / 2] of the rotary angles, float32."""
    angles = torch.outer(torch.arange(context_len).float(), torch.tensor(config.inv_freq))
    return angles.cos() * config.rope_scale, angles.sin() * config.rope_scale


def plain(tensors: Tensors, name: str) -> torch.Tensor:
    """A tensor that no format quantises."""
    tensor = tensors[name]
    assert isinstance(tensor, torch.Tensor), f"{name} is never quantised"
    return tensor


def _stack(matrices: list[Matrix]) -> Matrix:
    """Joins matrices along the output axis; scales are per output, so they join alike."""
    dense = [m for m in matrices if isinstance(m, torch.Tensor)]
    quantised = [m for m in matrices if isinstance(m, Int8Weight)]
    assert not dense or not quantised, "a fused map is quantised as a whole or not at all"
    if dense:
        return torch.cat(dense)
    return Int8Weight(
        torch.cat([m.values for m in quantised]), torch.cat([m.scales for m in quantised])
    )
