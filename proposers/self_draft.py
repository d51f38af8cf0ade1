"""The policy's quantised self drafts: `lossless` mode.

Drafts come from the quantised weights of the very policy that verifies, over the one cache of both
(`rollout.lossless_policy`): a draft model that needs no checkpoint, no prompt of its own to run and no
training, and that follows every publish. Verified by blocks, what is emitted has the law of the full
precision.
"""

from collections.abc import Mapping, Sequence

from proposers.lockstep import Ahead, draft_in_lockstep
from rollout.draft import NO_DRAFT, Draft
from rollout.lossless_policy import LosslessPolicy
from rollout.row import Row
from rollout.scheduler import slot_of

MAX_PENDING = 8
"""Tokens that a row may have to run before it is drafted for. More, as after a swap of weights or a
preemption, are the target's to run first: a draft would run them twice."""


class SelfDraftProposer:
    """Drafts with the quantised weights of the engine's own policy; `num_ids` as the engine's."""

    def __init__(self, policy: LosslessPolicy, *, num_ids: int | None = None) -> None:
        self._policy = policy
        self._num_ids = policy.vocab_size if num_ids is None else num_ids
        self._num_drafted = 0

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        policy, drafts = self._policy, [NO_DRAFT] * len(rows)
        ahead: dict[int, Ahead] = {}
        for index, (row, max_len) in enumerate(zip(rows, max_lens, strict=True)):
            num_cached = policy.cached_len(slot_of(row))
            if max_len and len(row.token_ids) - num_cached <= MAX_PENDING:
                ahead[index] = Ahead(row, slot_of(row), num_cached, max_len)
        made = draft_in_lockstep(
            policy.draft, [*ahead.values()], vocab_size=policy.vocab_size, num_ids=self._num_ids
        )
        for (index, one), drafted in zip(ahead.items(), made):
            policy.forget_draft(one.slot, len(one.row.token_ids) + one.max_len)
            drafts[index] = drafted.draft
            self._num_drafted += len(drafted.draft)
        return drafts

    def observe(self, rows: Sequence[Row]) -> None:
        pass

    def finish(self, row: Row) -> None:
        pass

    def publish(self, version: int) -> None:
        pass

    def gauges(self) -> Mapping[str, float]:
        return {"self_draft/tokens": float(self._num_drafted)}
