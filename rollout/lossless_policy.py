"""Two models over one cache: quantised weights draft for the full-precision ones they came from.

A model drafts for itself, as in self-speculation that leaves out layers (Zhang et al.,
arXiv:2309.08168); here every layer runs, in fewer bits. What rows have committed is cached once, under
the target's weights, and read by both. A draft puts its own entries behind it; they are forgotten
before the target runs the same positions and writes them anew, so nothing of a draft is left in what
the target sees: its logits are, bit for bit, those of a run without drafts.

The draft's weights are quantised here, from the update that the target gets: they change together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout.policy import Policy, Window

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TwinWeights:
    """Weights of both, ready to run."""

    target: Any
    draft: Any

    def bytes(self) -> int:
        """Storage of both."""
        return int(self.target.bytes() + self.draft.bytes())

    def kernels(self) -> dict[str, str]:
        """Which kernel runs which class of matrix; the draft's by names of their own."""
        drafting = {f"draft {name}": kernel for name, kernel in self.draft.kernels().items()}
        return {**self.target.kernels(), **drafting}


class LosslessPolicy:
    """The target as any policy, and a twin to draft with.

    `draft` shares the target's cache; `quantise` makes the draft's update of the target's. Whoever
    drafts begins behind `cached_len` and ends with `forget_draft`.
    """

    def __init__(
        self, target: Policy, draft: Policy, quantise: Callable[[Weights], Weights]
    ) -> None:
        self.target, self.draft, self._quantise = target, draft, quantise
        self.vocab_size, self.num_slots = target.vocab_size, target.num_slots
        self.context_len = target.context_len
        self._lengths = [0] * self.num_slots

    def cached_len(self, slot: int) -> int:
        """Entries of the slot that the target has run."""
        return self._lengths[slot]

    def forget_draft(self, slot: int, room: int) -> None:
        """Forgets what was drafted for a slot, which keeps room for `room` entries, as it had when
        drafting began."""
        self.draft.truncate(slot, self._lengths[slot])
        grown = self.target.grow(slot, room)
        assert grown, "nothing has taken the room that the draft gave back"

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        logits = self.target.score(windows)
        for window in windows:
            self._lengths[window.slot] = window.start + len(window.token_ids)
        return logits

    def grow(self, slot: int, length: int) -> bool:
        return self.target.grow(slot, length)

    def truncate(self, slot: int, length: int) -> None:
        self.target.truncate(slot, length)
        self._lengths[slot] = min(self._lengths[slot], length)

    def compact(self, slot: int, start: int, kept: Sequence[int]) -> None:
        self.target.compact(slot, start, kept)
        self._lengths[slot] = start + len(kept)

    def fork(self, source: int, target: int, length: int) -> None:
        self.target.fork(source, target, length)
        self._lengths[target] = length

    def load(self, weights: Weights) -> TwinWeights:
        prepared = self.target.load(weights)  # first: it says what is wrong with an update
        return TwinWeights(prepared, self.draft.load(self._quantise(weights)))

    def swap(self, prepared: TwinWeights) -> None:
        self.draft.swap(prepared.draft)
        self.target.swap(prepared.target)
        self._lengths = [0] * self.num_slots
