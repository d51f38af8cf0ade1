"""A decoder's weights in the layout of the compiled kernels: panels of 16 rows (csrc/linear.h)."""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quant.formats import FormatName, payload_bytes
from rollout.decoder import DecoderConfig
from rollout.decoder_weights import Matrix, Tensors, block_tensors, plain
from rollout.kernels import (
    BFLOAT16,
    FLOAT32,
    INT8,
    INT8_INT8,
    Block,
    Kernels,
    Linear,
    Model,
    pointer,
)

LANES = 16


@dataclass(frozen=True, slots=True)
class CompiledWeights:
    """Weights ready to run; `model` points into `tensors`."""

    model: Model
    tensors: list[torch.Tensor]
    blocks: ctypes.Array[Block]
    names: dict[str, str]

    def bytes(self) -> int:
        """Storage of everything a forward reads, tied tensors once."""
        return payload_bytes(self.tensors)

    def kernels(self) -> dict[str, str]:
        """Which kernel runs which class of matrix."""
        return self.names


class Packer:
    """Packs tensors and keeps them alive."""

    def __init__(self, kernels: Kernels) -> None:
        self._inner16, self._inner8 = kernels.inner16, kernels.inner8
        self.tensors: list[torch.Tensor] = []

    def vector(self, tensor: torch.Tensor | None) -> int | None:
        """float32, padded to whole panels."""
        if tensor is None:
            return None
        return self._kept(F.pad(tensor.float(), (0, -tensor.shape[0] % LANES)))

    def linear(self, matrix: Matrix, bias: torch.Tensor | None, *, int8_inputs: bool) -> Linear:
        """A map over weights [rows, cols]."""
        if isinstance(matrix, torch.Tensor):
            rows, cols = matrix.shape
            kind = BFLOAT16 if matrix.dtype == torch.bfloat16 else FLOAT32
            weight = self._kept(panels(matrix if kind == BFLOAT16 else matrix.float(), 1))
            return Linear(weight, None, None, self.vector(bias), rows, cols, kind)
        rows, cols = matrix.values.shape
        inner = self._inner8 if int8_inputs else self._inner16
        weight = self._kept(panels(matrix.values, inner))
        sums: int | None = None
        if int8_inputs:  # what activations of x + 128 add: csrc/vec.h
            extra = 128 * matrix.values.sum(-1, dtype=torch.int32)
            sums = self._kept(F.pad(extra, (0, -rows % LANES)))
        kind = INT8_INT8 if int8_inputs else INT8
        scales, bias_at = self.vector(matrix.scales), self.vector(bias)
        return Linear(weight, scales, sums, bias_at, rows, cols, kind)

    def _kept(self, tensor: torch.Tensor) -> int | None:
        self.tensors.append(tensor.contiguous())
        return pointer(self.tensors[-1])


def panels(matrix: torch.Tensor, inner: int) -> torch.Tensor:
    """[rows, cols] -> [rows / 16, cols / inner, 16, inner], zeros where it is padded."""
    rows, cols = matrix.shape
    padded = F.pad(matrix, (0, -cols % inner, 0, -rows % LANES))
    return padded.view(-1, LANES, padded.shape[1] // inner, inner).transpose(1, 2).contiguous()


def compile_weights(
    tensors: Tensors,
    config: DecoderConfig,
    format_: FormatName,
    kernels: Kernels,
) -> CompiledWeights:
    """Packs a complete set of tensors."""
    packer = Packer(kernels)
    int8_inputs = format_ == "int8_w8a8"
    blocks = (Block * config.num_layers)()
    for layer in range(config.num_layers):
        block = block_tensors(tensors, config, layer)
        blocks[layer] = Block(
            packer.vector(block.attention_norm),
            packer.vector(block.mlp_norm),
            packer.vector(block.q_norm),
            packer.vector(block.k_norm),
            packer.linear(block.qkv, block.qkv_bias, int8_inputs=int8_inputs),
            packer.linear(block.out, None, int8_inputs=int8_inputs),
            packer.linear(block.gate_up, None, int8_inputs=int8_inputs),
            packer.linear(block.down, None, int8_inputs=int8_inputs),
        )
    embedding = packer.linear(tensors["model.embed_tokens.weight"], None, int8_inputs=False)
    head = embedding
    if not config.tied_head:
        head = packer.linear(tensors["lm_head.weight"], None, int8_inputs=False)
    model = Model(
        blocks, head, embedding,
        packer.vector(plain(tensors, "model.norm.weight")),
        config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads,
        config.head_dim, config.intermediate_size, config.norm_eps,
    )  # fmt: skip
    kinds = {FLOAT32: "float32", BFLOAT16: "bf16", INT8: "int8 x int16", INT8_INT8: "int8 x int8"}
    names = {
        name: f"compiled {kernels.instructions}, {kinds[linear.kind]}"
        for name, linear in (("blocks", blocks[0].qkv), ("head", head))
    }
    return CompiledWeights(model, packer.tensors, blocks, names)


def runs_compiled(config: DecoderConfig) -> str | None:
    """Why the kernels cannot run a model of these sizes; None if they can."""
    sizes = {
        "hidden_size": config.hidden_size,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
    }
    odd = [f"{name} {size}" for name, size in sizes.items() if size % LANES]
    return f"compiled kernels need multiples of {LANES}, got {', '.join(odd)}" if odd else None
