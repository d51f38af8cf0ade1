"""The MTP head as a module to train, in float32: one decoder block between norms.

What it computes and what its tensors are called is said in `rollout.mtp_weights`; the block is written
out here for every dense decoder that the native engine runs, so that it needs nothing of the policy but
its sizes.

`forward` runs several depths of recursion over a whole response at once. Depth 1 takes the trunk's
hidden states. Depth k takes the outputs of depth k - 1 in their place, one position further on, and
attends as it will when it drafts: to its own entry, to those of the depths before it that lie on the
same draft, and before the draft to entries made from the trunk's own states.

Shapes: B rows, T positions of the head, H hidden size, N query heads, J key/value heads, D head size,
S entries attended to.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from rollout.decoder import DecoderConfig
from rollout.mtp_weights import MTP_PREFIX, VERSION, VOCABULARY, check_mtp

Entries = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [B, J, T - k + 1, D] of depth k = 1, 2, …"""


class MtpHead(nn.Module):
    """A head for one model and draft vocabulary, whose ids are sorted. Weights start at random."""

    vocabulary: torch.Tensor  # [V] int64

    def __init__(self, config: DecoderConfig, vocabulary: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.norm_eps
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.embedding_norm = nn.RMSNorm(hidden, eps)
        self.proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Block(config)])
        self.norm = nn.RMSNorm(hidden, eps)
        self.register_buffer("vocabulary", vocabulary, persistent=False)

    def forward(
        self, hidden: torch.Tensor, embeddings: torch.Tensor, depths: int
    ) -> list[torch.Tensor]:
        """Outputs by depth, behind the last norm: depth k has [B, T - k + 1, H].

        `hidden` [B, T, H] holds the trunk's states, `embeddings` [B, T, H] that of the token which
        follows each. Output i of depth k foretells the token k + 1 places behind state i.
        """
        entries: Entries = []
        outputs: list[torch.Tensor] = []
        for depth in range(depths):
            states = outputs[-1][:, :-1] if outputs else hidden
            joint = [self.hidden_norm(states), self.embedding_norm(embeddings[:, depth:])]
            mixed: torch.Tensor = self.layers[0](self.proj(torch.cat(joint, dim=-1)), entries)
            outputs.append(self.norm(mixed))
        return outputs

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """As they are published and kept (`rollout.mtp_weights`); a copy."""
        named = {MTP_PREFIX + k: v.detach().clone() for k, v in self.state_dict().items()}
        return named | {VOCABULARY: self.vocabulary.clone(), VERSION: torch.tensor(version)}

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor], config: DecoderConfig) -> "MtpHead":
        """A head that goes on from what `tensors` gave. Raises InvalidWeights."""
        check_mtp(tensors, config)
        head = MtpHead(config, tensors[VOCABULARY].clone())
        names = head.state_dict().keys()
        head.load_state_dict({name: tensors[MTP_PREFIX + name] for name in names})
        return head

    @staticmethod
    def from_policy(
        weights: Mapping[str, torch.Tensor], config: DecoderConfig, vocabulary: torch.Tensor
    ) -> "MtpHead":
        """A head that starts as the policy's last layer and final norm, run once more on the hidden
        state, with a little of the next token's embedding."""
        head = MtpHead(config, vocabulary)
        last = f"model.layers.{config.num_layers - 1}."
        block = {
            "layers.0." + name.removeprefix(last): tensor.float()
            for name, tensor in weights.items()
            if name.startswith(last)
        }
        hidden, eye = config.hidden_size, torch.eye(config.hidden_size)
        made = {
            "hidden_norm.weight": torch.ones(hidden),
            "embedding_norm.weight": torch.ones(hidden),
            "proj.weight": torch.cat([eye, 0.1 * eye], dim=1),
            "norm.weight": weights["model.norm.weight"].float(),
        }
        head.load_state_dict(block | made)
        return head


class Block(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: torch.Tensor, entries: Entries) -> torch.Tensor:
        """x [B, T - k + 1, H] of depth k = len(entries) + 1; appends its keys and values."""
        x = x + self.self_attn(self.input_layernorm(x), entries)
        mixed: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed


class Attention(nn.Module):
    """Rotary grouped-query attention over the entries of all depths so far."""

    inv_freq: torch.Tensor  # [D / 2]

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._config = config
        hidden, size = config.hidden_size, config.head_dim
        inner, shared = config.num_heads * size, config.num_kv_heads * size
        self.q_proj = nn.Linear(hidden, inner, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, shared, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, shared, bias=config.qkv_bias)
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(size, config.norm_eps)
            self.k_norm = nn.RMSNorm(size, config.norm_eps)
        self.register_buffer("inv_freq", torch.tensor(config.inv_freq), persistent=False)

    def forward(self, x: torch.Tensor, entries: Entries) -> torch.Tensor:
        size = (-1, self._config.head_dim)
        query, key, value = (  # [B, T - k + 1, N or J, D]
            proj(x).unflatten(-1, size) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self._config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        depth = len(entries)
        cos, sin = self._rotations(range(depth, depth + x.shape[1]))
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        entries.append((_rotate(key, cos, sin), value))
        mixed = F.scaled_dot_product_attention(
            _rotate(query, cos, sin),
            torch.cat([keys for keys, _ in entries], dim=2),
            torch.cat([values for _, values in entries], dim=2),
            attn_mask=draft_mask(depth + x.shape[1], depth + 1),
            enable_gqa=True,
        )  # [B, N, T - k + 1, D]
        return torch.as_tensor(self.o_proj(mixed.transpose(1, 2).flatten(2)))

    def _rotations(self, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [len(positions), D], both halves alike."""
        angles = torch.outer(torch.tensor(positions).float(), self.inv_freq)
        both = torch.cat([angles, angles], dim=-1)
        scale = self._config.rope_scale
        return both.cos() * scale, both.sin() * scale


class Mlp(nn.Module):
    """Gated SiLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


def draft_mask(length: int, depth: int) -> torch.Tensor:
    """Which entries the positions depth - 1 … length - 1 see at a depth, [length - depth + 1, S] bool:
    of depth 1 all up to where the draft left the trunk, of the later ones the draft's own."""
    queries = torch.arange(depth - 1, length)[:, None]
    seen = [torch.arange(length) <= queries - (depth - 1)]
    for other in range(2, depth + 1):
        seen.append(torch.arange(other - 1, length) == queries - (depth - other))
    return torch.cat(seen, dim=1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, halves convention of Hugging Face; x [..., D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
