"""A dense decoder with its own KV cache: ragged windows, slots, rollback, forks.

`score` plans a round on the host (`_plan`) and runs it as one function of tensors
(`rollout.decoder_forward`): attention in buckets of windows of equal length, so a round of plain
decodes with a few longer windows pads nothing. With a `capture` rounds that only decode are recorded
once a shape and replayed (`rollout.decode_graphs`). Rolling back is forgetting: a cached position is
overwritten before it is read again, since a position is visible only to windows that start behind it.

A tree window (arXiv:2305.09781) takes one cache entry a token, is rotated by depth and masked by
ancestry; chains build neither that mask nor a second set of positions. Keeping a path of a tree
moves its entries together: each was rotated for the very position it comes to lie at.

Shapes: N tokens of the call, B windows of a bucket, n tokens a window, T cached positions, S slots,
J key/value heads, D head size.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from quant.formats import Format, make_head, make_linear
from quant.int8 import Int8Weight
from quant.linear import Linear, has_bf16_gemm
from rollout.decode_graphs import DecodeGraphs
from rollout.decoder import DecoderConfig
from rollout.decoder_forward import (
    Block,
    Bucket,
    DecoderWeights,
    SlotCache,
    Step,
    embed,
    forward,
    hiding_mask,
)
from rollout.decoder_weights import Matrix, block_tensors, plain, rotations
from rollout.graph_capture import Capture
from rollout.packing import unpack
from rollout.policy import Scored, Window, ancestors, num_in_place


def default_dtype(device: str = "cpu") -> torch.dtype:
    """bf16 where products of it run in hardware, else float32."""
    return torch.bfloat16 if has_bf16_gemm(torch.device(device).type) else torch.float32


class TransformerPolicy:
    """Runs one model for `num_slots` rows of up to `context_len` tokens each.

    `capture` records decode rounds of windows of up to `max_graph_len` tokens; the policy then keeps
    weights of its own, into which every update is copied, and one slot more. None records nothing.
    """

    def __init__(
        self,
        config: DecoderConfig,
        format_: Format,
        *,
        num_slots: int,
        context_len: int,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        capture: Capture | None = None,
        max_graph_len: int = 9,
    ) -> None:
        self.config, self.format, self.device = config, format_, torch.device(device)
        self.dtype = dtype or default_dtype(device)
        self.vocab_size, self.num_slots = config.vocab_size, num_slots
        self.context_len = min(context_len, config.max_context_len)
        self.weights: DecoderWeights | None = None
        cache_shape = (
            config.num_layers,
            num_slots + (capture is not None),
            config.num_kv_heads,
            self.context_len,
            config.head_dim,
        )
        cache_dtype = format_.cache_dtype(self.dtype)
        self._keys = torch.zeros(cache_shape, dtype=cache_dtype, device=self.device)
        self._values = torch.zeros_like(self._keys)
        self._finite = torch.ones((), dtype=torch.bool, device=self.device)  # every forward was
        self._unread = self._tainted = False  # tainted: not finite, so the cache may hold NaN
        self._cos, self._sin = (  # [context_len, D]
            torch.cat([half, half], dim=-1).to(self.device, self.dtype)
            for half in rotations(config, self.context_len)
        )
        self._capture, self._max_graph_len = capture, max_graph_len
        self.graphs = self._new_graphs()

    def sharing_cache(self, format_: Format) -> "TransformerPolicy":
        """Another model of the same sizes over the same cache, without weights: each sees what the
        other has written."""
        twin = copy.copy(self)
        twin.format, twin.weights = format_, None
        twin.graphs = twin._new_graphs()
        return twin

    def _new_graphs(self) -> DecodeGraphs | None:
        if self._capture is None:
            return None
        return DecodeGraphs(
            self._forward,
            self._capture,
            scratch=self.num_slots,
            context_len=self.context_len,
            vocab_size=self.vocab_size,
            hidden_size=self.config.hidden_size,
            dtype=self.dtype,
            device=self.device,
            max_len=self._max_graph_len,
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

        def block(layer: int) -> Block:
            at = block_tensors(tensors, self.config, layer)
            return Block(
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
        if self.graphs is None:
            self.weights = prepared
        elif self.weights is None:
            self.weights = copy.deepcopy(prepared)  # recordings read these tensors for good
        else:
            self.weights.copy_from(prepared)
        if self._is_tainted():
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
        if self._is_tainted():
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

    def _is_tainted(self) -> bool:
        """Asked behind the round, when its logits were read: no forward waits for the answer."""
        if self._unread:
            self._tainted |= not bool(self._finite)
            self._finite, self._unread = torch.ones_like(self._finite), False
        return self._tainted

    # ---- forward --------------------------------------------------------------------------

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        return self.score_hidden(windows).logits

    @torch.inference_mode()
    def score_hidden(self, windows: Sequence[Window], inputs: torch.Tensor | None = None) -> Scored:
        """As `HiddenPolicy` says; rounds with `inputs` are not replayed."""
        assert self.weights is not None, "no weights are in force"
        for window in windows:
            end = window.start + len(window.token_ids)
            assert end <= self.context_len, f"window ends at {end}, context {self.context_len}"
        if inputs is not None:
            step = replace(self._plan(windows), inputs=inputs.to(self.device, self.dtype))
            scored, finite = self._forward(step)
        else:
            replayed = None if self.graphs is None else self.graphs.score(windows)
            scored, finite = replayed or self._forward(self._plan(windows))
        self._finite, self._unread = self._finite & finite, True
        return scored

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        assert self.weights is not None, "no weights are in force"
        ids = torch.tensor(token_ids, dtype=torch.long, device=self.device)
        return embed(self.weights.embedding, ids, torch.float32).float()

    def _forward(self, step: Step) -> tuple[Scored, torch.Tensor]:
        assert self.weights is not None
        cache = SlotCache(self._keys, self._values, self._cos, self._sin)
        return forward(self.config, self.weights, cache, step)

    def _plan(self, windows: Sequence[Window]) -> Step:
        """A round of windows of any lengths and shapes as tensors."""
        ids: list[int] = []
        slots: list[int] = []
        entries: list[int] = []
        scored: list[int] = []
        by_length: dict[int, list[tuple[Window, int]]] = defaultdict(list)
        for window in windows:
            num, offset = len(window.token_ids), len(ids)
            ids += window.token_ids
            slots += [window.slot] * num
            entries += range(window.start, window.start + num)
            scored += range(offset + num - window.num_logits, offset + num)
            if num:
                by_length[num].append((window, offset))
        flat = torch.tensor([ids, slots, entries], dtype=torch.long, device=self.device)
        positions = flat[2]
        if not all(window.is_chain for window in windows):
            depths = [window.start + depth for window in windows for depth in window.depths]
            positions = torch.tensor(depths, device=self.device)
        return Step(
            ids=flat[0],
            slots=flat[1],
            entries=flat[2],
            positions=positions,
            buckets=tuple(self._bucket(*item) for item in by_length.items()),
            scored=torch.tensor(scored, dtype=torch.long, device=self.device),
        )

    def _bucket(self, length: int, members: list[tuple[Window, int]]) -> Bucket:
        steps = torch.arange(length, device=self.device)
        offsets = torch.tensor([offset for _, offset in members], device=self.device)
        starts = torch.tensor([window.start for window, _ in members], device=self.device)
        num_cached = max(window.start for window, _ in members) + length
        last_visible = starts[:, None] + steps  # [B, n]
        hidden = torch.arange(num_cached, device=self.device) > last_visible[..., None]  # [B, n, T]
        if not all(window.is_chain for window, _ in members):
            seen = ancestors([window for window, _ in members]).to(self.device)  # [B, n, n]
            entries = (starts[:, None] + steps)[:, None].expand_as(seen)
            hidden.scatter_(2, entries, ~seen)
        slots = [window.slot for window, _ in members]
        contiguous = slots == list(range(slots[0], slots[0] + len(slots)))
        return Bucket(
            tokens=(offsets[:, None] + steps).reshape(-1),
            slots=slice(slots[0], slots[0] + len(slots))
            if contiguous
            else torch.tensor(slots, device=self.device),
            mask=hiding_mask(hidden, self.dtype),
        )


def _to(device: torch.device, matrix: Matrix) -> Matrix:
    if isinstance(matrix, Int8Weight):
        return Int8Weight(matrix.values.to(device), matrix.scales.to(device))
    return matrix.to(device)
