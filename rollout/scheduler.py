"""Who runs what in a round: admission, shared prompts, room in the cache, a budget of tokens.

Rows wait in order of submission and live, in a cache slot each, in order of admission. A prompt is run
once for all rows that share it: by the oldest of them, or not at all while a slot still holds it; the
others fork it. Long prompts are run in chunks beside the rows that decode (Sarathi-Serve,
arXiv:2403.02310), so that a decoding row never waits for more than a round's budget.

Where the cache cannot hold what a round needs, what ended rows left goes first, then drafts, then the
rows admitted last: they wait again, ahead of the others, with all they have emitted, and run it once
more when they return. The oldest row is never taken out, so every round makes progress; and as what is
free then is what the older rows grow into, nobody is admitted until one of them has left. All this is
settled before anything is drafted: nobody has looked at a token that is dropped.

The budget counts drafts at the longest they may be. It is exceeded by decoding rows alone, which never
wait, and by one token of a prompt, which never waits for ever.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from rollout.errors import InvalidConfig
from rollout.policy import Policy, Window
from rollout.row import Row

MAX_ROUND_TOKENS = 2048
"""Tokens run in one forward; bounds its activations and how long decoding rows wait for prompts."""

MAX_BEFORE_TREE = 64
"""Tokens that a row may have to run before its tree in one window, which masks every pair of them."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What is run in one round; the cache has room for it."""

    rows: list[Row] = field(default_factory=list)
    """Rows that decode: everything they have is cached once this round has run."""
    max_lens: list[int] = field(default_factory=list)
    """Tokens that the draft of each may have."""
    chunks: list[Window] = field(default_factory=list)
    """Parts of what other rows have to run before they decode."""


class Scheduler:
    """The rows of an engine that have not ended, and what the policy's slots hold of them."""

    def __init__(self, policy: Policy, max_round_tokens: int = MAX_ROUND_TOKENS) -> None:
        if max_round_tokens < 1:
            raise InvalidConfig(f"max_round_tokens={max_round_tokens}: expected at least 1")
        self._policy, self._max_round_tokens = policy, max_round_tokens
        self.waiting: deque[Row] = deque()
        self.live: list[Row] = []
        """In order of admission."""
        self._max_live = policy.num_slots
        """Rows admitted at most; after a preemption those that were left, until one of them goes."""
        self._cached: list[list[int]] = [[] for _ in range(policy.num_slots)]
        self.counts = dict.fromkeys(
            ("prefill_tokens", "refill_tokens", "forked_tokens", "preemptions"), 0
        )

    @property
    def begun(self) -> list[Row]:
        """Rows in flight: live ones, and preempted ones, which wait ahead of all others."""
        return [*self.live, *takewhile(lambda row: row.begun, self.waiting)]

    def take_ended(self) -> list[Row]:
        """Takes out the rows that are done; their slots keep what is cached, and only that."""
        ended = [row for row in (*self.waiting, *self.live) if row.done]
        if ended:
            for row in self.live:
                if row.done:
                    self.truncate(slot_of(row), self.num_cached(row))
            self.waiting = deque(row for row in self.waiting if not row.done)
            self.live = [row for row in self.live if not row.done]
        return ended

    # ---- admission ------------------------------------------------------------------------

    def admit(self, *, begun_only: bool) -> None:
        """Fills free slots in order of submission, preferring one that holds the prompt already,
        while there is room for all that a row has and its next token. `begun_only`: no new rows."""
        if len(self.live) >= self._max_live:
            return
        self._max_live = self._policy.num_slots
        free = self._free_slots()
        for row in list(islice(self.waiting, len(free))):
            if begun_only and not row.begun:
                return
            slot = next((s for s in free if self._holds_prompt(s, row)), free[0])
            if not self._fits(row, slot):
                assert self.live, "the cache has room for one row of context_len tokens"
                return
            free.remove(slot)
            self.waiting.popleft()
            row.admitted(slot)
            self.live.append(row)

    def _fits(self, row: Row, slot: int) -> bool:
        if self._holds_prompt(slot, row):
            self.truncate(slot, row.prompt_len - 1)  # what the row before it added
        else:
            self.truncate(slot, 0)
            self._fork_prompt(row, slot)
        return self._grow(slot, len(row.token_ids) + 1)

    def _free_slots(self) -> list[int]:
        taken = {row.slot for row in self.live}
        return [slot for slot in range(self._policy.num_slots) if slot not in taken]

    # ---- the round ------------------------------------------------------------------------

    def plan(self, max_lens: Sequence[int], *, trees: bool = False) -> RoundPlan:
        """Splits a round among the live rows, whose drafts will have up to `max_lens` tokens, and
        makes room for it, the oldest row first."""
        rows = list(self.live)
        pending = self._share_prompts()
        if trees:
            behind_few = [num <= MAX_BEFORE_TREE for num in pending]
            max_lens = [max_len if few else 0 for few, max_len in zip(behind_few, max_lens)]
        shares = split_budget(pending, max_lens, self._max_round_tokens)
        plan = RoundPlan()
        for row, share, num_pending, max_len in zip(rows, shares, pending, max_lens, strict=True):
            if row.slot is None:
                break  # preempted for an older row, and so were those behind it
            decodes = share == num_pending
            end = self.num_cached(row) + share
            if not share or not self._make_room(row, end):
                continue
            self._count(row, end)
            if decodes:
                plan.rows.append(row)
                plan.max_lens.append(max_len)
            else:
                plan.chunks.append(self._chunk(row, end))
        for index, row in enumerate(plan.rows):
            if not self._grow(slot_of(row), len(row.token_ids) + plan.max_lens[index]):
                plan.max_lens[index] = 0  # nobody is taken out for a draft
        return plan

    def _share_prompts(self) -> list[int]:
        """Forks prompts to rows that lack theirs. Returns how many tokens each row has to run; none
        while an older row is running the prompt they share."""
        pending: list[int] = []
        running: set[tuple[int, ...]] = set()
        for row in self.live:
            prompt = row.request.prompt_ids
            lacks_it = self.num_cached(row) < row.prompt_len - 1
            if lacks_it and prompt in running:
                pending.append(0)
                continue
            if lacks_it and not self._fork_prompt(row, slot_of(row)):
                running.add(prompt)
            pending.append(len(row.token_ids) - self.num_cached(row))
        return pending

    def _chunk(self, row: Row, end: int) -> Window:
        start = self.num_cached(row)
        return Window(slot_of(row), start, tuple(row.token_ids[start:end]), num_logits=0)

    def _count(self, row: Row, end: int) -> None:
        """Tokens run besides the last one of the row: of its prompt, or emitted before."""
        start, end = self.num_cached(row), min(end, len(row.token_ids) - 1)
        of_prompt = max(0, min(end, row.prompt_len - 1) - start)
        self.counts["prefill_tokens"] += of_prompt
        self.counts["refill_tokens"] += end - start - of_prompt

    # ---- room -----------------------------------------------------------------------------

    def _make_room(self, row: Row, length: int) -> bool:
        """Grows the row's slot, taking out the youngest rows if need be; False once it is the
        row's own turn to go."""
        while not self._grow(slot_of(row), length):
            youngest = self.live[-1]
            self._preempt(youngest)
            if youngest is row:
                return False
        return True

    def _grow(self, slot: int, length: int) -> bool:
        """Grows a slot, dropping what free slots hold if need be."""
        while not self._policy.grow(slot, length):
            held = (s for s in self._free_slots() if s != slot and self._cached[s])
            if (dropped := next(held, None)) is None:
                return False
            self.truncate(dropped, 0)
        return True

    def _preempt(self, row: Row) -> None:
        assert len(self.live) > 1, "the cache has room for one row of context_len tokens"
        self.live.pop()
        self._max_live = len(self.live)
        self.truncate(slot_of(row), 0)
        row.preempted()
        self.waiting.appendleft(row)
        self.counts["preemptions"] += 1

    # ---- what slots hold ------------------------------------------------------------------

    def num_cached(self, row: Row) -> int:
        """How many of a live row's tokens its slot holds."""
        return len(self._cached[slot_of(row)])

    def cache(self, slot: int, token_ids: Sequence[int]) -> None:
        """Notes tokens that were run and kept."""
        self._cached[slot] += token_ids

    def truncate(self, slot: int, length: int) -> None:
        """Forgets what a slot holds from a position on, and gives back its room there."""
        self._policy.truncate(slot, length)
        del self._cached[slot][length:]

    def void(self) -> None:
        """Notes that new weights have emptied every slot."""
        self._cached = [[] for _ in self._cached]

    def _holds_prompt(self, slot: int, row: Row) -> bool:
        """All but the last prompt token are cached; the last is scored with the first round."""
        shared = row.prompt_len - 1
        return self._cached[slot][:shared] == row.token_ids[:shared]

    def _fork_prompt(self, row: Row, slot: int) -> bool:
        """Copies the row's prompt to a slot from one that holds it; False when none does."""
        slots = range(self._policy.num_slots)
        source = next((s for s in slots if s != slot and self._holds_prompt(s, row)), None)
        if source is None:
            return False
        shared = row.prompt_len - 1
        self._policy.fork(source, slot, shared)
        self._cached[slot] = row.token_ids[:shared]
        self.counts["forked_tokens"] += shared
        return True


def slot_of(row: Row) -> int:
    assert row.slot is not None, "a live row has a slot"
    return row.slot


def split_budget(pending: Sequence[int], max_lens: Sequence[int], max_tokens: int) -> list[int]:
    """How many of the tokens that each row has to run are run in this round.

    Rows with one token to go decode; what they and their drafts leave of `max_tokens` goes to the
    others in order. One of those decodes if all it has and its draft fit, else it runs a chunk of
    what comes before its last token."""
    decoding = (1 + max_len for num, max_len in zip(pending, max_lens) if num == 1)
    left = max(1, max_tokens - sum(decoding))
    shares: list[int] = []
    for num, max_len in zip(pending, max_lens, strict=True):
        if num <= 1:
            shares.append(num)
        elif num + max_len <= left:
            shares.append(num)
            left -= num + max_len
        else:
            shares.append(min(num - 1, left))
            left -= shares[-1]
    return shares
