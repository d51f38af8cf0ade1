"""The randomness of one row: a function of who asks, not a state that is used up.

Every uniform is a keyed hash (BLAKE2b) of (seed, prompt id, sample index) and of what it is for:

- `target(position)`     draws from the target law at a position of the sequence;
- `draft(start, position)`, `coin(start, position)`, `correction(start, position)`
                         draw a draft token, decide its acceptance and draw its replacement in the
                         round that began at `start`;
- `pit(position)`        looks at an emitted token and decides nothing.

So under drafts that are made without randomness a row's tokens do not depend on its slot, its actor,
its neighbours, a preemption or a restart (drawn drafts can make other tokens of the same law of them);
the four purposes are independent; and because a round never begins twice at the same position, no
uniform is ever used for two decisions. The first kind is keyed by position alone: see
`rollout.verify` for what that buys.

A prompt that is visited again must come with new sample indices. Otherwise a history proposer
would hold a rollout made with the very noise that the new one is about to use.
"""

import hashlib
import struct
from typing import Protocol

import numpy as np
import torch

from rollout.law import TargetLaws, pick_from


class Draws(Protocol):
    """Decisions by name. `SeededDraws` takes them by uniforms; `rollout.enumerate` takes all."""

    def target(self, laws: TargetLaws, index: int, position: int) -> int: ...

    def coin(self, accept_prob: float, start: int, position: int) -> bool: ...

    def correction(self, weights: torch.Tensor, start: int, position: int) -> int: ...

    def draft(
        self, weights: torch.Tensor, start: int, position: int, ends: np.ndarray | None = None
    ) -> int:
        """`ends` as of `rollout.law.pick_from`."""
        ...

    def pit(self, position: int) -> float:
        """A uniform that decides nothing (`rollout.watch`)."""
        ...


def row_key(seed: int, prompt_id: str, sample_index: int) -> bytes:
    """The 32-byte key of a row's streams; all 64 bits of the seed count."""
    digest = hashlib.blake2b(digest_size=32)
    digest.update(struct.pack("<qq", seed, sample_index))
    digest.update(prompt_id.encode())
    return digest.digest()


class SeededDraws:
    """Draws of one row by counter-based uniforms in [0, 1) with 53 bits."""

    def __init__(self, seed: int, prompt_id: str, sample_index: int) -> None:
        self._key = row_key(seed, prompt_id, sample_index)

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        counter = purpose + struct.pack("<qq", start, position)
        word = hashlib.blake2b(counter, key=self._key, digest_size=8).digest()
        return (int.from_bytes(word, "little") >> 11) * 2.0**-53

    def target(self, laws: TargetLaws, index: int, position: int) -> int:
        return laws.pick(index, self.uniform(b"target", 0, position))

    def coin(self, accept_prob: float, start: int, position: int) -> bool:
        """Strict: probability 0 is refused also when the uniform is exactly 0."""
        return self.uniform(b"coin", start, position) < accept_prob

    def correction(self, weights: torch.Tensor, start: int, position: int) -> int:
        return pick_from(weights, self.uniform(b"correction", start, position))

    def draft(
        self, weights: torch.Tensor, start: int, position: int, ends: np.ndarray | None = None
    ) -> int:
        return pick_from(weights, self.uniform(b"draft", start, position), ends)

    def pit(self, position: int) -> float:
        return self.uniform(b"pit", 0, position)
