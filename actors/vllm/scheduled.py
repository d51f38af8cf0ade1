"""What vLLM ran of each request in one forward, and which of its logits are of rows of ours."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout.draft import DenseLaw, Draft


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What one request had in a forward."""

    ticket: int | None
    """None: not of ours, a probe's."""
    num_tokens: int
    """Tokens that the forward ran."""
    num_known: int
    """Tokens of the request as vLLM holds them, drafts not counted."""
    draft_ids: tuple[int, ...] = ()
    draft_probs: torch.Tensor | None = None  # [K, V] of the laws of vLLM's own drafts
    num_padded: int = 0
    """Rows of logits behind those of the draft that mean nothing: vLLM fills a request that joins by
    one token up to the longest draft."""
    partial: bool = False
    """A part of a prompt: the logits are of no position that counts."""

    @property
    def ours(self) -> bool:
        """A row goes on by it."""
        return self.ticket is not None and not self.partial

    @property
    def decodes(self) -> bool:
        """The forward ran nothing but the last token and what follows it."""
        return self.num_tokens == 1 + len(self.draft_ids) + self.num_padded


def our_logits(batch: Sequence[Scheduled], logits: torch.Tensor) -> torch.Tensor:
    """The logits [N, V] of our rows."""
    if all(one.ours and not one.num_padded for one in batch):
        return logits
    keep: list[bool] = []
    for one in batch:
        keep += [one.ours] * (1 + len(one.draft_ids)) + [False] * one.num_padded
    return logits[torch.tensor(keep, device=logits.device)]


def foreign_draft(one: Scheduled) -> Draft:
    """A draft of vLLM's own."""
    if one.draft_probs is None:
        return Draft.of_points(one.draft_ids)
    return Draft(one.draft_ids, tuple(map(DenseLaw, one.draft_probs)))
