"""The seam between the algorithm and a model: score windows, roll a cache back, take new weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens to run for one slot behind what its cache holds already."""

    slot: int
    start: int
    """Cached length; the first token of the window sits at this position."""
    token_ids: tuple[int, ...]
    num_logits: int
    """The last `num_logits` positions return logits; 0 only fills the cache."""


class Policy(Protocol):
    """A causal language model with one cache slot a row."""

    vocab_size: int
    context_len: int
    num_slots: int

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        """Runs the windows and caches their tokens. Returns logits [sum of num_logits, V] in
        window order; the k-th of a window is the prediction after its k-th scored token."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forgets what slot `slot` caches from position `length` on."""
        ...

    def fork(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` cached positions of one slot to another."""
        ...

    def load(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """Prepares new weights beside the old ones; raises InvalidWeights and changes nothing."""
        ...

    def swap(self, prepared: Any) -> None:
        """Puts prepared weights in force; every cached position is void afterwards."""
        ...
