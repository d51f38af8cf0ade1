"""The seam between the algorithm and a model: score windows, roll a cache back, take new weights.

A window is a chain of tokens or a tree of them: several continuations that share their beginnings,
run in one forward (SpecInfer, arXiv:2305.09781; Medusa, arXiv:2401.10774). Every token of a tree is
scored behind its own path, as if that path alone had been run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

ROOT = -1
"""The parent of a token that follows what is cached."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens to run for one slot behind what its cache holds already."""

    slot: int
    start: int
    """Cached length; the first token of the window sits at this position."""
    token_ids: tuple[int, ...]
    num_logits: int
    """The last `num_logits` tokens return logits; 0 only fills the cache."""
    parents: tuple[int, ...] | None = None
    """Window index of each token's parent, an earlier token; -1 (ROOT) = the last cached position.
    None is a chain, each token the parent of the next."""

    def __post_init__(self) -> None:
        if self.parents is None:
            return
        num, num_parents = len(self.token_ids), len(self.parents)
        assert num == num_parents, f"window of {num} tokens with {num_parents} parents: one each"
        for index, parent in enumerate(self.parents):
            assert ROOT <= parent < index, f"parent {parent} of token {index} is not an earlier one"

    @property
    def is_chain(self) -> bool:
        """Whether each token's parent is the token before it."""
        return self.parents is None or self.parents == tuple(range(ROOT, len(self.parents) - 1))

    @property
    def depths(self) -> Sequence[int]:
        """How many ancestors each token has in the window; it sits at position start + depth."""
        if self.parents is None:
            return range(len(self.token_ids))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    def path(self, index: int) -> tuple[int, ...]:
        """Window indices from the root to a token, itself included."""
        if self.parents is None:
            return tuple(range(index + 1))
        path = [index]
        while (parent := self.parents[path[-1]]) != ROOT:
            path.append(parent)
        return tuple(reversed(path))


class Policy(Protocol):
    """A causal language model with one cache slot a row.

    A slot has `context_len` cache entries and a token takes one each, also a token of a tree. So a
    tree can have more tokens than positions are left: the caller keeps start + len(token_ids) <=
    context_len for every window, whatever its shape. Positions, start + depth, are then in range.

    The cache may have room for fewer entries than all slots together could use, but always for the
    `context_len` of one slot. The caller asks `grow` before a window is run.
    """

    vocab_size: int
    context_len: int
    num_slots: int

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        """Runs the windows and caches their tokens. Returns logits [sum of num_logits, V] in
        window order; the k-th of a window is the prediction after its k-th scored token.

        A token sees what is cached before `start`, its ancestors in the window and itself. The
        tokens take the entries start, start + 1, ... in window order, so behind a tree comes
        `compact`, or `truncate` to its start, before the slot is scored again."""
        ...

    def grow(self, slot: int, length: int) -> bool:
        """Makes sure that a slot can hold `length` entries. False when the cache has no room for
        that; nothing has changed then."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forgets what slot `slot` caches from position `length` on, and gives back the room that
        `grow` had made there."""
        ...

    def compact(self, slot: int, start: int, kept: Sequence[int]) -> None:
        """Keeps a path of a tree: of the entries from `start` on, those at start + kept[0],
        start + kept[1], ... move to start, start + 1, ...; the others are forgotten and their room
        is given back.

        `kept` is strictly increasing. It is a path from the root, so the token of depth d comes to
        lie at entry start + d, the position it was run at."""
        ...

    def fork(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` cached positions of one slot to another, in place of what that
        held. It takes no room: where room is short, the two share these entries."""
        ...

    def load(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """Prepares new weights beside the old ones; raises InvalidWeights and changes nothing."""
        ...

    def swap(self, prepared: Any) -> None:
        """Puts prepared weights in force; every cached position is void afterwards, its room free."""
        ...


@dataclass(frozen=True, slots=True)
class Scored:
    """The scored tokens of a forward."""

    logits: torch.Tensor  # [M, V]
    hidden: torch.Tensor  # [M, H] float32: behind the final norm, what the output head reads


class HiddenPolicy(Policy, Protocol):
    """A policy that shows its hidden states, of H numbers, and can be run on others than its own
    embeddings."""

    def score_hidden(self, windows: Sequence[Window], inputs: torch.Tensor | None = None) -> Scored:
        """As `score`, with the hidden states. `inputs` [tokens of all windows, H] stand in place of the
        embeddings of their ids."""
        ...

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Embeddings [n, H] float32 of ids under the weights in force."""
        ...


def num_in_place(kept: Sequence[int]) -> int:
    """How many of the entries that `Policy.compact` keeps need not move; checks their order."""
    steps = zip((ROOT, *kept), kept)
    assert all(one < next_ for one, next_ in steps), f"kept {kept}: expected to be increasing"
    return sum(index == entry for index, entry in enumerate(kept))


def ancestors(windows: Sequence[Window]) -> torch.Tensor:
    """[B, n, n]: which tokens of its window a token descends from, itself included."""
    length = len(windows[0].token_ids)
    chain = range(ROOT, length - 1)
    parents = torch.tensor([window.parents or chain for window in windows])  # [B, n]
    rows = torch.arange(len(windows))
    seen = torch.eye(length + 1, length, dtype=torch.bool).repeat(len(windows), 1, 1)
    for token in range(length):  # the last line of `seen` is empty: that of ROOT
        seen[:, token] |= seen[rows, parents[:, token]]
    return seen[:, :length]
