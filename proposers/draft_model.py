"""A smaller checkpoint of the same vocabulary drafts.

It has weights, cache and slots of its own. Each row keeps a slot from its first draft to its end; what
the slot holds beyond the row's tokens (refused drafts, an earlier row) is cut off before every draft,
and what it lacks is run: a token or two within the first forward of the draft, more (a prompt, rounds
in which nothing was drafted) before it, unless another slot holds it and is forked. So a row that was
preempted, swapped or taken up late is drafted for as if nothing had happened.

Its weights stay what they were: a publish of the policy does not change them, and acceptance falls as
the policy moves away from them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proposers.lockstep import Ahead, draft_in_lockstep
from rollout.draft import NO_DRAFT, Draft
from rollout.policy import Policy, Window
from rollout.row import Row
from rollout.scheduler import MAX_ROUND_TOKENS

MAX_PENDING = 8
"""Tokens that are run within the first forward of a draft; more go before it, without logits."""


@dataclass(slots=True)
class _Seat:
    """Where a row is cached."""

    slot: int
    num_agreed: int = 0
    """First tokens of the row that the slot is known to hold."""


class DraftModelProposer:
    """Drafts with a policy of its own, whose weights are in force and which has a slot for every row
    of the engine.

    `vocab_size` is the target's; `num_ids` counts the ids that stand for a token in both models. A
    row with another id, or longer than the draft model's context, is not drafted for.
    `max_catch_up`: tokens run in one round for rows that are behind; the others wait.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        vocab_size: int,
        num_ids: int,
        max_catch_up: int = MAX_ROUND_TOKENS,
    ) -> None:
        self._policy, self._vocab_size, self._num_ids = policy, vocab_size, num_ids
        self._max_catch_up = max_catch_up
        self._seats: dict[int, _Seat] = {}
        """By row serial."""
        self._held: list[list[int]] = [[] for _ in range(policy.num_slots)]
        """Tokens that each slot caches, also behind the end of its row: others may share them."""
        self._counts = {"tokens": 0, "catch_up_tokens": 0}

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        ahead = self._prepare(rows, max_lens)
        made = draft_in_lockstep(
            self._policy, [*ahead.values()], vocab_size=self._vocab_size, num_ids=self._num_ids
        )
        drafts = [NO_DRAFT] * len(rows)
        for (index, one), drafted in zip(ahead.items(), made):
            tokens = [*one.row.token_ids, *drafted.draft.token_ids]
            self._held[one.slot] = tokens[: drafted.num_cached]
            drafts[index] = drafted.draft
            self._counts["tokens"] += len(drafted.draft)
        return drafts

    def _prepare(self, rows: Sequence[Row], max_lens: Sequence[int]) -> dict[int, Ahead]:
        """The rows that can be drafted for, by index, their slots caught up and grown."""
        ahead: dict[int, Ahead] = {}
        left, busy = self._max_catch_up, {row.serial for row in rows}
        for index, (row, max_len) in enumerate(zip(rows, max_lens, strict=True)):
            max_len = min(max_len, self._policy.context_len + 1 - len(row.token_ids))
            if max_len > 0 and max(row.token_ids) < self._num_ids:
                slot = self._seat(row, busy).slot
                left -= self._catch_up(slot, row, left)
                ahead[index] = Ahead(row, slot, len(self._held[slot]), max_len)
        return {
            index: one
            for index, one in ahead.items()
            if len(one.row.token_ids) - one.num_cached <= MAX_PENDING
            and self._policy.grow(one.slot, len(one.row.token_ids) + one.max_len - 1)
        }

    # ---- slots ----------------------------------------------------------------------------

    def _seat(self, row: Row, busy: set[int]) -> _Seat:
        """The row's seat; its slot holds tokens of the row and nothing else, the last one never."""
        tokens = row.token_ids[:-1]
        seat = self._seats.get(row.serial)
        if seat is None:
            seat = self._seats[row.serial] = _Seat(self._free_slot(tokens, busy))
        held, agreed = self._held[seat.slot], seat.num_agreed
        seat.num_agreed += common_len(held[agreed:], tokens[agreed:])
        self._policy.truncate(seat.slot, seat.num_agreed)
        del held[seat.num_agreed :]
        if len(tokens) - seat.num_agreed >= MAX_PENDING:
            self._borrow(seat, tokens)
        return seat

    def _free_slot(self, tokens: Sequence[int], busy: set[int]) -> int:
        """The free slot that holds most of some tokens. With none free, that of a row which is not
        drafted for in this round: it starts anew when it is."""
        taken = {seat.slot for seat in self._seats.values()}
        free = [slot for slot in range(self._policy.num_slots) if slot not in taken]
        if not free:
            idle = next(serial for serial in self._seats if serial not in busy)
            return self._seats.pop(idle).slot
        return max(free, key=lambda slot: common_len(self._held[slot], tokens))

    def _borrow(self, seat: _Seat, tokens: list[int]) -> None:
        """Forks the slot that holds most of the tokens, if that is more than the seat has."""
        shared = [common_len(held, tokens) for held in self._held]
        source = shared.index(max(shared))
        if shared[source] > seat.num_agreed:
            seat.num_agreed = shared[source]
            self._policy.fork(source, seat.slot, seat.num_agreed)
            self._held[seat.slot] = tokens[: seat.num_agreed]

    def _catch_up(self, slot: int, row: Row, max_tokens: int) -> int:
        """Runs what a slot lacks of a row beyond what a draft runs itself, up to some tokens; how
        many were run."""
        held = self._held[slot]
        run = row.token_ids[len(held) : -1]
        if len(run) < MAX_PENDING:
            return 0
        run = run[: max(0, max_tokens)]
        if not run or not self._policy.grow(slot, len(held) + len(run)):
            return 0
        self._policy.score([Window(slot, len(held), tuple(run), num_logits=0)])
        held += run
        self._counts["catch_up_tokens"] += len(run)
        return len(run)

    # ---- the protocol ---------------------------------------------------------------------

    def observe(self, rows: Sequence[Row]) -> None:
        pass

    def finish(self, row: Row) -> None:
        self._seats.pop(row.serial, None)

    def publish(self, version: int) -> None:
        pass

    def gauges(self) -> Mapping[str, float]:
        counts = {f"draft_model/{name}": float(count) for name, count in self._counts.items()}
        return counts | {"draft_model/rows": float(len(self._seats))}


def common_len(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two sequences share."""
    pairs = zip(one, other)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
