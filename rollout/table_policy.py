"""A policy whose law is known: logits looked up by the tokens so far.

As good a policy as the transformer for everything but speed: it keeps a cache a slot and predicts
from that cache alone, so a rollback, fork or slot fault changes its answers. With a cap on what is
cached it keeps account as a paged cache does whose pages hold one entry each.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from rollout.errors import InvalidConfig, InvalidWeights
from rollout.policy import Scored, Window, num_in_place

Table = Callable[[tuple[int, ...]], torch.Tensor]
"""Tokens so far -> logits [V]."""


class TablePolicy:
    """Float64 logits from a table; `load` takes {"logits": [num_contexts, V]} for Markov tables.

    `max_cached_tokens`: entries of all slots together, those that forks share counted once; None
    lets every slot have `context_len`.
    """

    def __init__(
        self,
        table: Table,
        *,
        vocab_size: int,
        context_len: int = 64,
        num_slots: int = 8,
        max_cached_tokens: int | None = None,
    ) -> None:
        if max_cached_tokens is not None and max_cached_tokens < context_len:
            raise InvalidConfig(
                f"max_cached_tokens={max_cached_tokens} is less than context_len={context_len}, so "
                "a row may not fit; raise max_cached_tokens or lower context_len"
            )
        self.vocab_size, self.context_len, self.num_slots = vocab_size, context_len, num_slots
        self.max_cached_tokens = max_cached_tokens
        self._table = table
        self._fresh = itertools.count()
        self._cached: list[list[int]] = [[] for _ in range(num_slots)]
        self._entries: list[list[int]] = [[] for _ in range(num_slots)]
        """Names of the entries that each slot has room in; the same name in two slots is shared."""

    def sharing_cache(self, table: Table) -> "TablePolicy":
        """Another table over the same cache."""
        twin = copy.copy(self)
        twin._table = table
        return twin

    @property
    def num_entries(self) -> int:
        """Entries in use under a cap."""
        return len(set().union(*self._entries))

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        logits = []
        for window in windows:
            cached = self._cached[window.slot]
            assert len(cached) == window.start, "window does not start where the cache ends"
            num = len(window.token_ids)
            end = window.start + num
            assert end <= self.context_len, f"window ends at {end}, context {self.context_len}"
            if self.max_cached_tokens is not None:
                room = len(self._entries[window.slot])
                assert end <= room, f"window ends at {end}, its slot has room for {room}"
            for token in window.token_ids:
                assert 0 <= token < self.vocab_size, f"token {token} is not in the vocabulary"
                cached.append(token)
            for index in range(num - window.num_logits, num):
                path = [cached[window.start + i] for i in window.path(index)]
                logits.append(self._table((*cached[: window.start], *path)))
        return torch.stack(logits) if logits else torch.empty(0, self.vocab_size)  # [N, V]

    def score_hidden(self, windows: Sequence[Window], inputs: torch.Tensor | None = None) -> Scored:
        """With hidden states of one number each, of no account: a table looks at ids alone."""
        logits = self.score(windows)
        return Scored(logits, torch.zeros(len(logits), 1))

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1)

    def grow(self, slot: int, length: int) -> bool:
        num_more = length - len(self._entries[slot])
        if self.max_cached_tokens is None or num_more <= 0:
            return True
        if self.num_entries + num_more > self.max_cached_tokens:
            return False
        self._entries[slot] += itertools.islice(self._fresh, num_more)
        return True

    def truncate(self, slot: int, length: int) -> None:
        del self._cached[slot][length:], self._entries[slot][length:]

    def compact(self, slot: int, start: int, kept: Sequence[int]) -> None:
        cached = self._cached[slot]
        if num_in_place(kept) < len(kept):
            cached[start:] = [cached[start + i] for i in kept]
        self.truncate(slot, start + len(kept))

    def fork(self, source: int, target: int, length: int) -> None:
        self._cached[target] = self._cached[source][:length]
        self._entries[target] = self._entries[source][:length]

    def load(self, weights: Mapping[str, torch.Tensor]) -> Table:
        logits = weights.get("logits")
        if logits is None or logits.shape[-1] != self.vocab_size or logits.isnan().any():
            raise InvalidWeights(f"expected finite 'logits' [contexts, {self.vocab_size}]")
        return markov_table(logits.double())

    def swap(self, prepared: Table) -> None:
        self._table = prepared
        for slot in range(self.num_slots):
            self.truncate(slot, 0)


def markov_table(logits: torch.Tensor) -> Table:
    """A table [V, V] that sees the last token only."""
    return lambda tokens: logits[tokens[-1]]


def random_table(vocab_size: int, depth: int, *, seed: int, spread: float = 1.5) -> Table:
    """Independent random logits for every context of up to `depth` last tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = {
        context: spread * torch.randn(vocab_size, generator=generator, dtype=torch.float64)
        for length in range(depth + 1)
        for context in itertools.product(range(vocab_size), repeat=length)
    }
    return lambda tokens: rows[tokens[-depth:] if depth else ()]
