"""The decoder on compiled CPU kernels, over a paged cache: what `TransformerPolicy` computes, faster.

One call of csrc/decoder.cpp a forward. Windows of any lengths run as one flat batch without padding.
A token's logits depend on the tokens before it alone, bit for bit: not on its neighbours in the
batch, nor on the window it is scored in (trees apart, whose entries lie elsewhere until they are
compacted). So in every format plain decoding and verification see the same law, and a row is the same
alone and among others.
"""

import copy
import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from quant.formats import Format
from quant.int8 import Int8Weight
from rollout.compiled_weights import CompiledWeights, compile_weights, runs_compiled
from rollout.decoder import DecoderConfig
from rollout.decoder_weights import rotations
from rollout.errors import KernelsUnavailable
from rollout.kernels import PHASES, Batch, Cache, find_kernels, pointer
from rollout.kernels import Window as KernelWindow
from rollout.packing import unpack
from rollout.paged_cache import PAGE, PagedCache, pages_for
from rollout.policy import Scored, Window, ancestors, num_in_place


class CompiledPolicy:
    """Runs one model for `num_slots` rows of up to `context_len` tokens each.

    `max_cached_tokens` caps the cache (at least `context_len`), shared prompts counted once, the
    cap and every row rounded up to whole pages of 16; None gives every slot its whole context.
    Raises KernelsUnavailable where the kernels cannot be built or cannot run the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        format_: Format,
        *,
        num_slots: int,
        context_len: int,
        dtype: torch.dtype,
        max_cached_tokens: int | None = None,
    ) -> None:
        if why := runs_compiled(config):
            raise KernelsUnavailable(why)
        self._kernels = find_kernels()
        self.config, self.format, self.dtype = config, format_, dtype
        self.vocab_size, self.num_slots = config.vocab_size, num_slots
        self.context_len = min(context_len, config.max_context_len)
        self.weights: CompiledWeights | None = None
        num_pages = num_slots * pages_for(self.context_len)
        if max_cached_tokens is not None:
            num_pages = min(num_pages, pages_for(max_cached_tokens))
        size = config.num_kv_heads * config.head_dim * PAGE
        # Zeros that nobody has written take no memory yet.
        self._keys = torch.zeros(
            config.num_layers, num_pages, size, dtype=format_.cache_dtype(dtype)
        )
        self._values = torch.zeros_like(self._keys)
        self._forward = self._kernels.library.er_forward_bf16
        if self._keys.dtype == torch.float32:
            self._forward = self._kernels.library.er_forward_float
        self.cache = PagedCache(
            num_slots=num_slots,
            context_len=self.context_len,
            num_pages=num_pages,
            copy=self._copy_page,
        )
        self._kernel_cache = Cache(
            pointer(self._keys), pointer(self._values), num_pages, config.num_kv_heads,
            config.head_dim,
        )  # fmt: skip
        self._cos, self._sin = rotations(config, self.context_len)  # [context_len, D / 2]
        self._scratch = ctypes.c_void_p(self._kernels.library.er_scratch())
        self._seconds = np.zeros(len(PHASES))

    def sharing_cache(self, format_: Format) -> "CompiledPolicy":
        """Another model of the same sizes over the same cache, without weights: each sees what the
        other has written."""
        twin = copy.copy(self)
        twin.format, twin.weights = format_, None
        twin._scratch = ctypes.c_void_p(self._kernels.library.er_scratch())
        twin._seconds = np.zeros(len(PHASES))
        return twin

    def __del__(self) -> None:
        if hasattr(self, "_scratch"):
            self._kernels.library.er_free(self._scratch)

    # ---- weights --------------------------------------------------------------------------

    def load(self, weights: Mapping[str, torch.Tensor]) -> CompiledWeights:
        """Builds runnable weights from a packed update (`rollout.packing`)."""
        return self.build(unpack(weights, self.config, self.format, self.dtype))

    def build(self, tensors: Mapping[str, torch.Tensor | Int8Weight]) -> CompiledWeights:
        """Runnable weights from tensors that are known to be complete and of the right shapes."""
        return compile_weights(tensors, self.config, self.format.name, self._kernels)

    def swap(self, prepared: CompiledWeights) -> None:
        self.weights = prepared
        self.cache.clear()

    # ---- cache ----------------------------------------------------------------------------

    def grow(self, slot: int, length: int) -> bool:
        return self.cache.grow(slot, length)

    def truncate(self, slot: int, length: int) -> None:
        self.cache.truncate(slot, length)

    def compact(self, slot: int, start: int, kept: Sequence[int]) -> None:
        first = num_in_place(kept)
        if first < len(kept):
            source = self._entries(slot, [start + index for index in kept[first:]])
            target = self._entries(slot, list(range(start + first, start + len(kept))))
            keys, values = self._by_entry()
            keys[:, target[0], :, :, target[1]] = keys[:, source[0], :, :, source[1]]
            values[:, target[0], :, target[1]] = values[:, source[0], :, source[1]]
        self.cache.truncate(slot, start + len(kept))

    def fork(self, source: int, target: int, length: int) -> None:
        self.cache.fork(source, target, length)

    def cache_bytes(self) -> int:
        """Of a cache filled to its cap."""
        return self._keys.nbytes + self._values.nbytes

    def _entries(self, slot: int, entries: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(page, place in the page) of each."""
        at = torch.tensor(entries)
        return torch.from_numpy(self.cache.tables[slot]).long()[at // PAGE], at % PAGE

    def _by_entry(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [layers, pages, J, D, PAGE] and values [layers, pages, J, PAGE, D]."""
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        keys = self._keys.unflatten(-1, (heads, dim, PAGE))
        return keys, self._values.unflatten(-1, (heads, PAGE, dim))

    def _copy_page(self, source: int, target: int) -> None:
        for cached in (self._keys, self._values):
            cached[:, target] = cached[:, source]

    # ---- forward --------------------------------------------------------------------------

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        return self._run(windows)

    def score_hidden(self, windows: Sequence[Window], inputs: torch.Tensor | None = None) -> Scored:
        num_scored = sum(window.num_logits for window in windows)
        hidden = torch.empty(num_scored, self.config.hidden_size)
        return Scored(self._run(windows, inputs, hidden), hidden)

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        assert self.weights is not None, "no weights are in force"
        ids = np.array(token_ids, dtype=np.int32)
        embedded = torch.empty(len(ids), self.config.hidden_size)
        embed = self._kernels.library.er_embed
        embed(self.weights.model, ids.ctypes.data, len(ids), pointer(embedded))
        return embedded

    def _run(
        self,
        windows: Sequence[Window],
        inputs: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [M, V] of the windows; fills `hidden` [M, H], runs `inputs` [N, H] where given."""
        assert self.weights is not None, "no weights are in force"
        ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        masks: list[np.ndarray] = []
        kernel_windows = (KernelWindow * len(windows))()
        for index, window in enumerate(windows):
            first, length = len(ids), len(window.token_ids)
            end = window.start + length
            assert end <= self.context_len, f"window ends at {end}, context {self.context_len}"
            assert self.cache.length(window.slot) == window.start, "starts where the cache ends"
            grown = self.cache.grow(window.slot, end)
            assert grown, "the cache is full: grow the slot first"
            ids += window.token_ids
            positions += (window.start + depth for depth in window.depths)
            wanted += range(first + length - window.num_logits, first + length)
            visible = None
            if not window.is_chain:
                masks.append(ancestors([window])[0].numpy())
                visible = masks[-1].ctypes.data
            table = self.cache.tables[window.slot].ctypes.data
            kernel_windows[index] = KernelWindow(first, length, window.start, 0, table, visible)
        assert inputs is None or (inputs.shape, inputs.dtype) == (
            (len(ids), self.config.hidden_size),
            torch.float32,
        ), "one float32 input a token"
        logits = torch.empty(len(wanted), self.vocab_size)
        flat = [np.array(numbers, dtype=np.int32) for numbers in (ids, positions, wanted)]
        if ids:
            batch = Batch(
                len(ids), len(windows), len(wanted), torch.get_num_threads(),
                flat[0].ctypes.data, flat[1].ctypes.data, ctypes.addressof(kernel_windows),
                flat[2].ctypes.data, pointer(self._cos), pointer(self._sin), pointer(inputs),
                pointer(logits), pointer(hidden), self._seconds.ctypes.data,
            )  # fmt: skip
            self._forward(self.weights.model, self._kernel_cache, batch, self._scratch)
        for window in windows:
            self.cache.written(window.slot, window.start + len(window.token_ids))
        return logits

    def seconds(self) -> dict[str, float]:
        """Time spent so far in each step of the forward, barriers included."""
        return dict(zip(PHASES, self._seconds.tolist()))
