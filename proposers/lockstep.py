"""Drafting by a model: all rows go one token a forward, together.

Each token is drawn from the model's law under the row's own sampling (temperature, filters, penalties,
bans, grammar), with the penalties and masks of what was drafted before it, and handed over with the
very tensor it was drawn from; greedy rows name the first argmax. A row drops out when its draft is as
long as it may be, when a drafted token would end it, or when the model has no law to go on with. The
last two are decided by what is in the draft already: stopping times, which verification allows.

Memory: a law of V float32 a drafted token, 50 MB for 256 tokens of a vocabulary of 49,152.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout.conditions import Condition
from rollout.draft import Draft
from rollout.drafting import Drafting
from rollout.errors import InvalidRequest
from rollout.law import TargetLaws
from rollout.policy import Policy, Window
from rollout.row import Row


@dataclass(frozen=True, slots=True)
class Ahead:
    """A row to draft for."""

    row: Row
    slot: int
    """Of the drafting policy."""
    num_cached: int
    """Tokens of the row that the slot holds; the others are run with the first forward."""
    max_len: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """What came of one."""

    draft: Draft
    num_cached: int
    """Tokens of the row and its draft that the slot holds now."""


@torch.inference_mode()
def draft_in_lockstep(
    policy: Policy, rows: Sequence[Ahead], *, vocab_size: int, num_ids: int
) -> list[Drafted]:
    """A draft a row, of at most its length. `vocab_size` is the target's, which laws are over;
    `num_ids` counts the ids that stand for a token in both models. The slots have room for all of
    a row and its draft but the last drafted token."""
    chains = [_Chain(row) for row in rows]
    live = [chain for chain in chains if chain.goes_on]
    while live:
        logits = policy.score([chain.window for chain in live])  # [B, V of the drafting model]
        laws = TargetLaws(_over(logits, vocab_size, num_ids), [chain.condition for chain in live])
        for index, chain in enumerate(live):
            chain.add(laws, index)
        live = [chain for chain in live if chain.goes_on]
    return [Drafted(chain.drafting.done(), chain.num_cached) for chain in chains]


class _Chain:
    """One row's draft as it grows."""

    window: Window
    """What is run next, and the condition of the token behind it."""
    condition: Condition

    def __init__(self, ahead: Ahead) -> None:
        self._row, self._slot, self.num_cached = ahead.row, ahead.slot, ahead.num_cached
        self._ends = ahead.row.draft_end()
        self.drafting = Drafting(ahead.row, ahead.max_len)
        self.goes_on = self._go_on(ahead.row.token_ids[ahead.num_cached :])

    def _go_on(self, run: Sequence[int]) -> bool:
        """Sets what is run next; False where no further token may be drafted."""
        if not self.drafting.room:
            return False
        try:
            self.condition = self._row.conditions.behind(self.drafting.token_ids)
        except InvalidRequest:
            return False  # the engine meets the same error and gives it to the row
        self.window = Window(self._slot, self.num_cached, tuple(run), num_logits=1)
        return True

    def add(self, laws: TargetLaws, index: int) -> None:
        """Adds a token of the law behind the window, which was run."""
        self.num_cached += len(self.window.token_ids)
        self.goes_on = laws.valid(index)
        if not self.goes_on:
            return
        if self._row.request.sampling.greedy:
            token = laws.pick(index, 0.0)
            self.drafting.point(token)
        else:
            token = self.drafting.sample_at(laws, index)
        self.goes_on = not self._ends(token) and self._go_on([token])


def _over(logits: torch.Tensor, vocab_size: int, num_ids: int) -> torch.Tensor:
    """Logits [B, vocab_size] whose ids from `num_ids` on are impossible: padding of either head."""
    if logits.shape[-1] == vocab_size:
        if num_ids < vocab_size:
            logits[:, num_ids:] = -torch.inf
        return logits
    fitted = logits.new_full((logits.shape[0], vocab_size), -torch.inf)
    fitted[:, :num_ids] = logits[:, :num_ids]
    return fitted
