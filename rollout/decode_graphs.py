"""Decode rounds by replay: one recorded forward a shape, over memory that stays where it is.

A forward of few tokens is several hundred small kernels, and starting them takes longer than running
them. A recording starts all of them at once, but knows addresses and shapes only
(`rollout.graph_capture`). So a round is padded to a shape that comes again, its numbers are copied
into the shape's buffer of inputs, and the logits out of one buffer that all shapes share. Weights,
cache and rotary tables are read where they are: an update of the weights must be copied into the
tensors that were recorded.

A round is replayed when every window is a chain of up to `max_len` tokens that asks for logits: a
plain decode step, or the verification of drafts. Windows are padded to the longest of them, rows to 1,
2, 4, 8, 16, 32 and then multiples of 16, attention to a power of two of entries. That is done while
the padded tokens are at most FREE_TOKENS or twice the real ones, and at most MAX_TOKENS; beyond that,
and for prompts and trees, the caller runs the round as it is.

Padding is token 0 at entry 0 of a slot that no row has (`scratch`): it writes there alone, and is seen
by nothing but itself. Padding of a real row looks at entry 0 of the row's slot, which is always filled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rollout.decoder_forward import Bucket, Step, hiding_mask
from rollout.graph_capture import Capture
from rollout.policy import Scored, Window

FREE_TOKENS = 128
"""A forward of so few tokens waits for weights, not for arithmetic: the ratio of the two in bf16 is 153
tokens on an A100 (80 GB) and more on later GPUs, by their data sheets; not measured."""
MAX_TOKENS = 512
"""Arithmetic hides the launches of larger forwards; bounds the buffer of logits."""
MAX_GRAPHS = 64
"""Recordings kept; the one replayed longest ago goes."""
MIN_ATTENDED = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """What a recording is made for."""

    rows: int
    length: int
    """Tokens a row."""
    attended: int
    """Cache entries that attention runs over."""

    @property
    def num_tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: torch.Tensor  # [3 * rows * length + rows]
    replay: Callable[[], None]


class DecodeGraphs:
    """The recordings of one policy. `forward` runs a step on its weights and cache; slot `scratch`, one
    beyond those that rows have, is part of that cache."""

    def __init__(
        self,
        forward: Callable[[Step], tuple[Scored, torch.Tensor]],
        capture: Capture,
        *,
        scratch: int,
        context_len: int,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        self._forward, self._capture = forward, capture
        self._scratch, self._context_len, self._dtype = scratch, context_len, dtype
        self._device, self._max_len, self._max_graphs = device, max_len, max_graphs
        num_tokens = min(MAX_TOKENS, padded_rows(scratch) * max_len)
        self._logits = torch.empty(num_tokens, vocab_size, device=device)
        self._hidden = torch.empty(num_tokens, hidden_size, device=device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._graphs: dict[Shape, _Graph] = {}
        """In order of their last use."""
        self._counts = dict.fromkeys(("captured", "replayed", "eager"), 0)

    def gauges(self) -> Mapping[str, float]:
        """Lifetime counts of rounds, and how many recordings are kept."""
        counts = {f"graphs/{name}": float(count) for name, count in self._counts.items()}
        return counts | {"graphs/kept": float(len(self._graphs))}

    def score(self, windows: Sequence[Window]) -> tuple[Scored, torch.Tensor] | None:
        """What `forward` returns for the windows, as copies; None where they fit no shape."""
        shape = self.shape(windows)
        if shape is None:
            self._counts["eager"] += 1
            return None
        graph = self._graph(shape)
        graph.inputs.copy_(self._inputs(windows, shape))
        graph.replay()
        self._counts["replayed"] += 1
        scored = torch.tensor(_scored(windows, shape.length), device=self._device)
        return Scored(self._logits[scored], self._hidden[scored]), self._finite

    def shape(self, windows: Sequence[Window]) -> Shape | None:
        """The shape that windows are padded to; None where they are not replayed."""
        lengths = [len(window.token_ids) for window in windows]
        length = max(lengths, default=0)
        decoding = all(window.is_chain and window.num_logits for window in windows)
        if not decoding or not 0 < length <= self._max_len:
            return None
        rows = padded_rows(len(windows))
        if rows * length > min(MAX_TOKENS, max(FREE_TOKENS, 2 * sum(lengths))):
            return None
        end = max(window.start + num for window, num in zip(windows, lengths))
        return Shape(rows, length, padded_entries(end, self._context_len))

    def _graph(self, shape: Shape) -> _Graph:
        graph = self._graphs.pop(shape, None)
        if graph is None:
            if len(self._graphs) == self._max_graphs:
                del self._graphs[next(iter(self._graphs))]
            graph = self._captured(shape)
        self._graphs[shape] = graph
        return graph

    def _captured(self, shape: Shape) -> _Graph:
        """Recorded over rows of padding, so that no slot of a row is touched."""
        inputs = self._inputs((), shape).to(self._device)

        def run() -> None:
            scored, finite = self._forward(decode_step(inputs, shape, self._dtype))
            self._logits[: shape.num_tokens] = scored.logits
            self._hidden[: shape.num_tokens] = scored.hidden
            self._finite.copy_(finite)

        self._counts["captured"] += 1
        return _Graph(inputs, self._capture(run))

    def _inputs(self, windows: Sequence[Window], shape: Shape) -> torch.Tensor:
        """What `decode_step` reads, on the host."""
        ids: list[int] = []
        slots: list[int] = []
        entries: list[int] = []
        for window in windows:
            num = len(window.token_ids)
            missing = [0] * (shape.length - num)
            ids += (*window.token_ids, *missing)
            slots += (*[window.slot] * num, *[self._scratch] * len(missing))
            entries += (*range(window.start, window.start + num), *missing)
        missing = [0] * (shape.num_tokens - len(ids))
        nowhere = [self._scratch] * len(missing)
        row_slots = [window.slot for window in windows]
        row_slots += [self._scratch] * (shape.rows - len(windows))
        return torch.tensor([*ids, *missing, *slots, *nowhere, *entries, *missing, *row_slots])


def decode_step(inputs: torch.Tensor, shape: Shape, dtype: torch.dtype) -> Step:
    """A round of equally long chains from one buffer: ids, slots and entries of its tokens, then the
    slot of every row."""
    tokens, row_slots = inputs[: 3 * shape.num_tokens], inputs[3 * shape.num_tokens :]
    ids, slots, entries = tokens.view(3, shape.num_tokens)
    last_visible = entries.view(shape.rows, shape.length, 1)
    hidden = torch.arange(shape.attended, device=inputs.device) > last_visible  # [B, n, T]
    bucket = Bucket(slice(None), row_slots, hiding_mask(hidden, dtype))
    return Step(ids, slots, entries, positions=entries, buckets=(bucket,), scored=None)


def padded_rows(num: int) -> int:
    """The next of 1, 2, 4, 8, 16, 32, 48, 64, 80, ..."""
    return 1 << (num - 1).bit_length() if num <= 32 else -(-num // 16) * 16


def padded_entries(end: int, context_len: int) -> int:
    """The next of 256, 512, 1024, ..., up to the context."""
    return min(context_len, max(MIN_ATTENDED, 1 << (end - 1).bit_length()))


def _scored(windows: Sequence[Window], length: int) -> list[int]:
    """Where the tokens whose predictions are asked for stand among the padded ones."""
    scored: list[int] = []
    for row, window in enumerate(windows):
        end = row * length + len(window.token_ids)
        scored += range(end - window.num_logits, end)
    return scored
