"""A fixed batch of tokens on which every published model is compared with full precision.

It runs in cache slots of its own, so it disturbs no row in flight, and on prepared weights that are
not in force yet, so an update can be judged before it is used.
"""

from collections.abc import Sequence
from typing import Any

import torch

from rollout.policy import Policy, Window


class DriftProbe:
    """Logits of a model on fixed sequences."""

    def __init__(self, policy: Policy, sequences: Sequence[Sequence[int]]) -> None:
        assert policy.num_slots >= len(sequences), "one slot a probed sequence"
        self._policy = policy
        self._windows = [
            Window(slot, 0, tuple(ids[:-1]), num_logits=len(ids) - 1)
            for slot, ids in enumerate(sequences)
        ]
        self.next_tokens = torch.tensor([token for ids in sequences for token in ids[1:]])

    def logits(self, prepared: Any) -> torch.Tensor:
        """Predictions of every position but the last of each sequence, [N, V] float32 on the CPU."""
        self._policy.swap(prepared)
        return self._policy.score(self._windows).cpu()
