"""A dense decoder with its own KV cache: ragged windows, slots, rollback, forks.

All tokens of a call run through the linear maps as one flat batch [N, hidden], without padding.
Attention runs in buckets of windows of equal length, so a round of plain decodes with a few longer
windows pads nothing either. Rolling back is forgetting: a cached position is overwritten before it
is read again, since a position is visible only to windows that start behind it.

A tree window (arXiv:2305.09781) takes one cache entry a token, is rotated by depth and masked by
ancestry; chains build neither that mask nor a second set of positions. Keeping a path of a tree
moves its entries together: each was rotated for the very position it comes to lie at.

Shapes: N tokens of the call, B windows of a bucket, n tokens a window, T cached positions, S slots,
H query heads, J key/value heads, D head size.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quant.formats import Format, make_head, make_linear, payload_bytes
from quant.int8 import Int8Weight
from quant.linear import Linear, has_bf16_gemm
from rollout.decoder import DecoderConfig
from rollout.decoder_weights import Matrix, block_tensors, plain, rotations
from rollout.packing import unpack
from rollout.policy import Window, ancestors, num_in_place


def default_dtype(device: str = "cpu") -> torch.dtype:
    """bf16 where products of it run in hardware, else float32."""
    return torch.bfloat16 if has_bf16_gemm(torch.device(device).type) else torch.float32


@dataclass(frozen=True, slots=True)
class _Block:
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
    blocks: tuple[_Block, ...]
    norm: torch.Tensor
    head: Linear

    def bytes(self) -> int:
        """Storage of everything a forward reads, tied tensors once."""
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
        return payload_bytes(tensors)

    def kernels(self) -> dict[str, str]:
        """Which kernel runs which class of matrix."""
        return {"blocks": self.blocks[0].qkv.kernel, "head": self.head.kernel}


@dataclass(frozen=True, slots=True)
class _Tokens:
    """All tokens of a call, window after window."""

    ids: torch.Tensor  # [N]
    slots: torch.Tensor  # [N]
    entries: torch.Tensor  # [N] where in the slot keys and values go
    positions: torch.Tensor  # [N] what is rotated by; the entry itself in a chain


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Windows of one length and where their tokens stand in the flat batch."""

    tokens: torch.Tensor  # [B * n] indices into N
    num_windows: int
    length: int
    slots: torch.Tensor | slice  # [B]
    num_cached: int  # T
    mask: torch.Tensor  # [B, 1, 1, n, T] additive


class TransformerPolicy:
    """Runs one model for `num_slots` rows of up to `context_len` tokens each."""

    def __init__(
        self,
        config: DecoderConfig,
        format_: Format,
        *,
        num_slots: int,
        context_len: int,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
    ) -> None:
        self.config, self.format, self.device = config, format_, torch.device(device)
        self.dtype = dtype or default_dtype(device)
        self.vocab_size, self.num_slots = config.vocab_size, num_slots
        self.context_len = min(context_len, config.max_context_len)
        self.weights: DecoderWeights | None = None
        cache_shape = (
            config.num_layers,
            num_slots,
            config.num_kv_heads,
            self.context_len,
            config.head_dim,
        )
        cache_dtype = format_.cache_dtype(self.dtype)
        self._keys = torch.zeros(cache_shape, dtype=cache_dtype, device=self.device)
        self._values = torch.zeros_like(self._keys)
        self._tainted = False  # a forward was not finite, so the cache may hold NaN
        self._cos, self._sin = (  # [context_len, D]: both halves turn by the same angles
            torch.cat([half, half], dim=-1).to(self.device, self.dtype)
            for half in rotations(config, self.context_len)
        )

    # ---- weights --------------------------------------------------------------------------

    def load(self, weights: Mapping[str, torch.Tensor]) -> DecoderWeights:
        """Builds runnable weights from a packed update (`rollout.packing`)."""
        return self.build(unpack(weights, self.config, self.format, self.dtype))

    def build(self, tensors: Mapping[str, torch.Tensor | Int8Weight]) -> DecoderWeights:
        """Runnable weights from tensors that are known to be complete and of the right shapes."""

        def linear(matrix: Matrix, bias: torch.Tensor | None = None) -> Linear:
            bias = None if bias is None else bias.to(self.device)
            return make_linear(self.format, _to(self.device, matrix), bias)

        def block(layer: int) -> _Block:
            at = block_tensors(tensors, self.config, layer)
            return _Block(
                attention_norm=at.attention_norm.to(self.device),
                qkv=linear(at.qkv, at.qkv_bias),
                q_norm=None if at.q_norm is None else at.q_norm.to(self.device),
                k_norm=None if at.k_norm is None else at.k_norm.to(self.device),
                out=linear(at.out),
                mlp_norm=at.mlp_norm.to(self.device),
                gate_up=linear(at.gate_up),
                down=linear(at.down),
            )

        embedding = _to(self.device, tensors["model.embed_tokens.weight"])
        tied = self.config.tied_head
        return DecoderWeights(
            embedding=embedding,
            blocks=tuple(block(layer) for layer in range(self.config.num_layers)),
            norm=plain(tensors, "model.norm.weight").to(self.device),
            head=make_head(embedding if tied else _to(self.device, tensors["lm_head.weight"])),
        )

    def swap(self, prepared: DecoderWeights) -> None:
        self.weights = prepared
        if self._tainted:
            self._keys.zero_()
            self._values.zero_()
            self._tainted = False

    # ---- cache ----------------------------------------------------------------------------

    def grow(self, slot: int, length: int) -> bool:
        """Every slot has its `context_len` entries from the start."""
        return True

    def truncate(self, slot: int, length: int) -> None:
        """Positions from `length` on are overwritten before they are read, and masked until then.
        Only NaN must go: 0 * NaN shows through a mask."""
        if self._tainted:
            for cache in (self._keys, self._values):
                cache[:, slot, :, length:] = 0

    def compact(self, slot: int, start: int, kept: Sequence[int]) -> None:
        first = num_in_place(kept)
        if first < len(kept):
            source = start + torch.tensor(kept[first:], device=self.device)
            for cache in (self._keys, self._values):
                entries = cache[:, slot]  # [layers, J, T, D]
                entries[:, :, start + first : start + len(kept)] = entries[:, :, source]
        self.truncate(slot, start + len(kept))

    def fork(self, source: int, target: int, length: int) -> None:
        for cache in (self._keys, self._values):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    # ---- forward --------------------------------------------------------------------------

    @torch.inference_mode()
    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        assert self.weights is not None, "no weights are in force"
        tokens = self._flatten(windows)
        buckets = self._buckets(windows)
        cos, sin = self._cos[tokens.positions, None], self._sin[tokens.positions, None]  # [N, 1, D]
        hidden = self._embed(tokens.ids)  # [N, hidden]
        for layer, block in enumerate(self.weights.blocks):
            normed = self._norm(hidden, block.attention_norm)
            query = self._project(layer, block, normed, cos, sin, tokens)  # [N, H, D]
            mixed = self._attend(layer, query, buckets)  # [N, H * D]
            hidden = hidden + block.out(mixed)
            gate, up = block.gate_up(self._norm(hidden, block.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + block.down(F.silu(gate) * up)
        self._tainted = self._tainted or not bool(hidden.isfinite().all())
        wanted = self._scored(windows)
        if not len(wanted):
            return torch.empty(0, self.vocab_size)
        return self.weights.head(self._norm(hidden[wanted], self.weights.norm)).float()  # [M, V]

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.weights is not None
        embedding = self.weights.embedding
        if isinstance(embedding, Int8Weight):
            rows = embedding.values[ids].float() * embedding.scales[ids, None]
            return rows.to(self.dtype)
        return F.embedding(ids, embedding)

    def _flatten(self, windows: Sequence[Window]) -> _Tokens:
        ids: list[int] = []
        slots: list[int] = []
        entries: list[int] = []
        for window in windows:
            end = window.start + len(window.token_ids)
            assert end <= self.context_len, f"window ends at {end}, context {self.context_len}"
            ids += window.token_ids
            slots += [window.slot] * len(window.token_ids)
            entries += range(window.start, end)
        flat = torch.tensor([ids, slots, entries], device=self.device)
        positions = flat[2]
        if not all(window.is_chain for window in windows):
            depths = [window.start + depth for window in windows for depth in window.depths]
            positions = torch.tensor(depths, device=self.device)
        return _Tokens(flat[0], flat[1], flat[2], positions)

    def _scored(self, windows: Sequence[Window]) -> torch.Tensor:
        """Flat indices of the tokens whose predictions were asked for."""
        wanted: list[int] = []
        end = 0
        for window in windows:
            end += len(window.token_ids)
            wanted += range(end - window.num_logits, end)
        return torch.tensor(wanted, dtype=torch.long, device=self.device)

    def _buckets(self, windows: Sequence[Window]) -> list[_Bucket]:
        by_length: dict[int, list[tuple[Window, int]]] = defaultdict(list)
        offset = 0
        for window in windows:
            if window.token_ids:
                by_length[len(window.token_ids)].append((window, offset))
            offset += len(window.token_ids)
        return [self._bucket(length, members) for length, members in by_length.items()]

    def _bucket(self, length: int, members: list[tuple[Window, int]]) -> _Bucket:
        steps = torch.arange(length, device=self.device)
        offsets = torch.tensor([offset for _, offset in members], device=self.device)
        starts = torch.tensor([window.start for window, _ in members], device=self.device)
        num_cached = int(starts.max()) + length
        last_visible = starts[:, None] + steps  # [B, n]
        hidden = torch.arange(num_cached, device=self.device) > last_visible[..., None]  # [B, n, T]
        if not all(window.is_chain for window, _ in members):
            seen = ancestors([window for window, _ in members]).to(self.device)  # [B, n, n]
            entries = (starts[:, None] + steps)[:, None].expand_as(seen)
            hidden.scatter_(2, entries, ~seen)
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(hidden, -torch.inf)
        slots = [window.slot for window, _ in members]
        contiguous = slots == list(range(slots[0], slots[0] + len(slots)))
        return _Bucket(
            tokens=(offsets[:, None] + steps).reshape(-1),
            num_windows=len(members),
            length=length,
            slots=slice(slots[0], slots[0] + len(slots))
            if contiguous
            else torch.tensor(slots, device=self.device),
            num_cached=num_cached,
            mask=mask[:, None, None],
        )

    def _project(
        self,
        layer: int,
        block: _Block,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        tokens: _Tokens,
    ) -> torch.Tensor:
        """Queries [N, H, D]; keys and values go to the cache."""
        config = self.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        query, key, value = (
            part.unflatten(-1, (-1, config.head_dim))
            for part in block.qkv(normed).split([n * config.head_dim for n in heads], dim=-1)
        )
        if block.q_norm is not None and block.k_norm is not None:
            query, key = self._norm(query, block.q_norm), self._norm(key, block.k_norm)
        rotated = _rotate(key, cos, sin).to(self._keys.dtype)
        self._keys[layer][tokens.slots, :, tokens.entries] = rotated
        self._values[layer][tokens.slots, :, tokens.entries] = value.to(self._values.dtype)
        return _rotate(query, cos, sin)

    def _attend(self, layer: int, query: torch.Tensor, buckets: list[_Bucket]) -> torch.Tensor:
        """Softmax attention of every window over its slot's cache, [N, H * D]."""
        config = self.config
        mixed = torch.empty_like(query)  # [N, H, D]
        for bucket in buckets:
            num, length, cached = bucket.num_windows, bucket.length, bucket.num_cached
            keys = self._keys[layer][bucket.slots, :, :cached].to(query.dtype)  # [B, J, T, D]
            values = self._values[layer][bucket.slots, :, :cached].to(query.dtype)
            q = query[bucket.tokens].view(num, length, config.num_kv_heads, -1, config.head_dim)
            q = q.permute(0, 2, 3, 1, 4)  # [B, J, H / J, n, D]
            flat = q.reshape(num, config.num_kv_heads, -1, config.head_dim)  # [B, J, H / J * n, D]
            scores = (flat @ keys.transpose(-1, -2)) * config.head_dim**-0.5
            scores = scores.view(*q.shape[:-1], cached) + bucket.mask
            probs = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
            out = probs.view(num, config.num_kv_heads, -1, cached) @ values
            out = out.view(q.shape).permute(0, 3, 1, 2, 4)  # [B, n, J, H / J, D]
            mixed[bucket.tokens] = out.reshape(num * length, config.num_heads, config.head_dim)
        return mixed.flatten(1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, halves convention of Hugging Face; x [N, heads, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _to(device: torch.device, matrix: Matrix) -> Matrix:
    if isinstance(matrix, Int8Weight):
        return Int8Weight(matrix.values.to(device), matrix.scales.to(device))
    return matrix.to(device)
