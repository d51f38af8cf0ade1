"""One forward of a dense decoder over a cache of slots: tensors in, tensors out.

`forward` reads weights, cache and a `Step` and writes the cache. It looks at no number of a tensor and
makes none from a list, so that what it does depends on the shapes of a step alone: a device can record
it and run it again (`rollout.decode_graphs`).

All tokens run through the linear maps as one flat batch [N, hidden], without padding. Attention runs in
buckets of windows of one length.

Shapes: N tokens of the step, M of them scored, B windows of a bucket, n tokens a window, T cached
positions, S slots, H query heads, J key/value heads, D head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quant.formats import payload_bytes
from quant.int8 import Int8Weight
from quant.linear import Linear
from rollout.decoder import DecoderConfig
from rollout.decoder_weights import Matrix
from rollout.policy import Scored


@dataclass(frozen=True, slots=True)
class Block:
    """One layer, ready to run."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: Linear
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights ready to run."""

    embedding: Matrix  # [V, hidden]
    blocks: tuple[Block, ...]
    norm: torch.Tensor
    head: Linear

    def tensors(self) -> list[torch.Tensor]:
        """Everything a forward reads; tied ones twice."""
        tensors = [self.norm, *self.head.tensors()]
        tensors += (
            [self.embedding.values, self.embedding.scales]
            if isinstance(self.embedding, Int8Weight)
            else [self.embedding]
        )
        for block in self.blocks:
            tensors += [block.attention_norm, block.mlp_norm]
            tensors += [t for t in (block.q_norm, block.k_norm) if t is not None]
            for linear in (block.qkv, block.out, block.gate_up, block.down):
                tensors += linear.tensors()
        return tensors

    def bytes(self) -> int:
        """Storage of everything a forward reads, tied tensors once."""
        return payload_bytes(self.tensors())

    def copy_from(self, other: "DecoderWeights") -> None:
        """Takes over the numbers of weights of the same model and format, each in its place."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), "of another model"
            mine.copy_(theirs)

    def kernels(self) -> dict[str, str]:
        """Which kernel runs which class of matrix."""
        return {"blocks": self.blocks[0].qkv.kernel, "head": self.head.kernel}


@dataclass(frozen=True, slots=True)
class SlotCache:
    """What is cached, and the rotary tables of the positions it can hold."""

    keys: torch.Tensor  # [layers, S, J, context_len, D]
    values: torch.Tensor
    cos: torch.Tensor  # [context_len, D] in the compute dtype: both halves turn by the same angles
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Windows of one length."""

    tokens: torch.Tensor | slice  # [B * n] where their tokens stand among the N
    slots: torch.Tensor | slice  # [B]
    mask: torch.Tensor  # [B, 1, 1, n, T] additive


@dataclass(frozen=True, slots=True)
class Step:
    """All tokens of a forward, window after window."""

    ids: torch.Tensor  # [N]
    slots: torch.Tensor  # [N]
    entries: torch.Tensor  # [N] where in the slot keys and values go
    positions: torch.Tensor  # [N] what is rotated by; the entry itself in a chain
    buckets: tuple[Bucket, ...]
    scored: torch.Tensor | None  # [M] tokens whose predictions are asked for; None: all
    inputs: torch.Tensor | None = None  # [N, hidden] in place of the embeddings of the ids


def forward(
    config: DecoderConfig, weights: DecoderWeights, cache: SlotCache, step: Step
) -> tuple[Scored, torch.Tensor]:
    """The scored tokens in float32, and whether all that was computed is finite []."""
    eps = config.norm_eps
    cos, sin = cache.cos[step.positions, None], cache.sin[step.positions, None]  # [N, 1, D]
    dtype = cache.cos.dtype
    hidden = embed(weights.embedding, step.ids, dtype) if step.inputs is None else step.inputs
    for layer, block in enumerate(weights.blocks):
        keys, values = cache.keys[layer], cache.values[layer]
        normed = _norm(hidden, block.attention_norm, eps)
        query, key, value = _heads(config, block, normed)  # [N, H, D], [N, J, D] twice
        keys[step.slots, :, step.entries] = _rotate(key, cos, sin).to(keys.dtype)
        values[step.slots, :, step.entries] = value.to(values.dtype)
        mixed = _attend(_rotate(query, cos, sin), keys, values, step.buckets)  # [N, H * D]
        hidden = hidden + block.out(mixed)
        gate, up = block.gate_up(_norm(hidden, block.mlp_norm, eps)).chunk(2, dim=-1)
        hidden = hidden + block.down(F.silu(gate) * up)
    finite = hidden.isfinite().all()
    scored = hidden if step.scored is None else hidden[step.scored]  # [M, hidden]
    normed = _norm(scored, weights.norm, eps)
    if not len(scored):
        logits = hidden.new_empty(0, config.vocab_size, dtype=torch.float32)
    else:
        logits = weights.head(normed).float()
    return Scored(logits, normed.float()), finite


def hiding_mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bucket's mask from which entries a token must not see, [B, n, T] bool."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -torch.inf)[:, None, None]


def embed(embedding: Matrix, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Embeddings [n, hidden] of ids [n]."""
    if isinstance(embedding, Int8Weight):
        return (embedding.values[ids].float() * embedding.scales[ids, None]).to(dtype)
    return F.embedding(ids, embedding)


def _heads(
    config: DecoderConfig, block: Block, normed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [N, H, D], keys and values [N, J, D], not rotated yet."""
    sizes = [n * config.head_dim for n in (config.num_heads, *[config.num_kv_heads] * 2)]
    query, key, value = (
        part.unflatten(-1, (-1, config.head_dim)) for part in block.qkv(normed).split(sizes, dim=-1)
    )
    if block.q_norm is not None and block.k_norm is not None:
        eps = config.norm_eps
        query, key = _norm(query, block.q_norm, eps), _norm(key, block.k_norm, eps)
    return query, key, value


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, buckets: tuple[Bucket, ...]
) -> torch.Tensor:
    """Softmax attention of every window over its slot's cache [S, J, context_len, D]: [N, H * D]."""
    mixed = torch.empty_like(query)  # [N, H, D]
    num_kv, head_dim = keys.shape[1], keys.shape[-1]
    for bucket in buckets:
        num, _, _, length, cached = bucket.mask.shape
        k = keys[bucket.slots, :, :cached].to(query.dtype)  # [B, J, T, D]
        v = values[bucket.slots, :, :cached].to(query.dtype)
        q = query[bucket.tokens].view(num, length, num_kv, -1, head_dim)
        q = q.permute(0, 2, 3, 1, 4)  # [B, J, H / J, n, D]
        flat = q.reshape(num, num_kv, -1, head_dim)  # [B, J, H / J * n, D]
        scores = (flat @ k.transpose(-1, -2)) * head_dim**-0.5
        scores = scores.view(*q.shape[:-1], cached) + bucket.mask
        probs = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        out = probs.view(num, num_kv, -1, cached) @ v
        out = out.view(q.shape).permute(0, 3, 1, 2, 4)  # [B, n, J, H / J, D]
        mixed[bucket.tokens] = out.reshape(num * length, -1, head_dim)
    return mixed.flatten(1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, halves convention of Hugging Face; x [N, heads, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
