"""Rounds of rows over vLLM's steps: what a worker holds from one forward to the next.

vLLM schedules, computes and caches. At the end of each forward it hands the logits of the positions
that count over (`actors.vllm.verifier`), then asks for the drafts of the next one
(`actors.vllm.proposer`); both come here, where every request has its `rollout.row.Row`. So conditions,
law, verification, randomness, counters, stops and draft lengths are those of the native engine, and a
request draws with its own keyed streams whoever its neighbours are.

What the scheduler does to a draft, cutting it for want of room or dropping it with a preempted request,
looks at no token, so what is left of it is verified exactly. A draft that was not made here is vLLM's
own: named tokens, or tokens drawn from the dense laws that come with them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from actors.vllm.scheduled import Scheduled, foreign_draft, our_logits
from rollout.conditions import checked_mask
from rollout.draft import NO_DRAFT, Draft
from rollout.draft_len import DraftLen
from rollout.engine import EngineLimits
from rollout.grammar import CompileGrammar
from rollout.law import TargetLaws
from rollout.native_engine import seeded_draws
from rollout.proposer import Proposer
from rollout.request import FinishReason, Mode, RolloutRequest, RolloutSample, SpecCounters
from rollout.round_cost import RoundCost, Trial
from rollout.row import Row
from rollout.row_round import (
    bounded_drafts,
    checked_drafts,
    conditions_of,
    emit,
    trials_of,
    verdicts_of,
)
from rollout.stop_text import Decode
from rollout.streams import Draws
from rollout.verdict import Verdict
from rollout.verify import Rule, verify
from rollout.watch import foretells

ENDED = 0
"""Stands for a token that nobody reads: of a row that ended as an error, of a part of a prompt."""


@dataclass(slots=True)
class _Drafted:
    """A draft until it is scored."""

    asked_len: int
    proposed: Draft
    kept: Draft


@dataclass(slots=True)
class _Round:
    """The round in progress, as far as its cost is concerned."""

    started_s: float = 0.0
    draining: bool = False
    drafting_s: float = 0.0
    """Spent on the drafts that it scores."""
    trials: tuple[Trial, ...] = ()
    scored_tokens: int = 0
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """What rounds are made of."""

    proposer: Proposer
    draft_len: DraftLen
    verification: Rule
    mode: Mode
    limits: EngineLimits
    num_ids: int
    max_draft_len: int
    decode: Decode | None
    compile_grammar: CompileGrammar | None
    draws_for: Callable[[RolloutRequest], Draws] = seeded_draws


@dataclass(slots=True)
class Rounds:
    """The rows of one worker, by ticket: the number under which the engine handed a request over."""

    parts: Parts
    version: int | None = None
    _digest: str = ""
    _rows: dict[int, Row] = field(default_factory=dict)
    _drafted: dict[int, _Drafted] = field(default_factory=dict)
    _scheduled: list[int] = field(default_factory=list)
    """Tickets of the rows that the last forward gave tokens."""
    _round: _Round = field(default_factory=_Round)
    _finished: SpecCounters = field(default_factory=SpecCounters)
    _seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("forward", "verify", "commit", "propose"), 0.0)
    )
    _counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("rounds", "samples", "rows_run_again"), 0)
    )

    # ---- requests -------------------------------------------------------------------------

    def add(self, ticket: int, request: RolloutRequest) -> None:
        """A request that can be served; it is generated once vLLM schedules it."""
        parts, grammar = self.parts, request.sampling.grammar
        mask = None
        if grammar is not None and parts.compile_grammar is not None:
            mask = checked_mask(parts.compile_grammar(grammar), parts.limits.vocab_size)
        self._rows[ticket] = Row(
            request,
            parts.draws_for(request),
            context_len=parts.limits.context_len,
            decode=parts.decode,
            mask=mask,
        )

    def token_ids(self, ticket: int) -> list[int]:
        """Prompt and everything generated."""
        return list(self._rows[ticket].token_ids)

    def end(self, ticket: int, reason: FinishReason, detail: str) -> RolloutSample:
        """Ends a row before its time; its sample holds what was generated."""
        self._rows[ticket].finish(reason, detail)
        return self._retire(ticket)

    def take_ended(self) -> list[tuple[int, RolloutSample]]:
        """Tickets and samples of the rows that ended in the last round."""
        ended = [ticket for ticket in self._scheduled if self._rows[ticket].done]
        self._scheduled = []
        return [(ticket, self._retire(ticket)) for ticket in ended]

    def _retire(self, ticket: int) -> RolloutSample:
        row = self._rows.pop(ticket)
        self._drafted.pop(ticket, None)
        self.parts.proposer.finish(row)
        self._finished.add(row.counters)
        self._counts["samples"] += 1
        return row.sample(self.parts.mode)

    def publish(self, version: int, digest: str) -> None:
        """Other weights are in force from the next forward on."""
        self.version, self._digest = version, digest
        self.parts.proposer.publish(version)

    # ---- verification ---------------------------------------------------------------------

    def begin(self, *, draining: bool) -> None:
        """A step begins; `draining`: no request waits for room."""
        drafting_s = self._round.drafting_s
        self._round = _Round(time.perf_counter(), draining, drafting_s)

    def verify(self, batch: Sequence[Scheduled], logits: torch.Tensor) -> list[list[int]]:
        """Emits what a forward allows. Its logits [N, V] hold the rows of each request in order: one,
        and one for every drafted or padded token. Returns the tokens of each; of one that is not ours
        any token."""
        started = time.perf_counter()
        self._seconds["forward"] += started - self._round.started_s
        whole = {one.ticket: one for one in batch if one.ticket is not None and not one.partial}
        if not whole:
            return [[ENDED] for _ in batch]
        rows = [self._rows[ticket] for ticket in whole]
        for one, row in zip(whole.values(), rows):
            assert one.num_known == len(row.token_ids), (
                f"vLLM holds {one.num_known} tokens of a row of {len(row.token_ids)}"
            )
            if not row.begun:
                row.admitted(0)  # vLLM's slots are its own
            elif not one.decodes:  # its cache was given up
                self._counts["rows_run_again"] += 1
        drafted = [self._take_draft(ticket, one) for ticket, one in whole.items()]
        drafts = [one.kept for one in drafted]
        self._scheduled = list(whole)
        starts = [len(row.token_ids) for row in rows]
        laws = self._laws(our_logits(batch, logits), rows, drafts)
        verdicts = self._verdicts(rows, drafts, laws)
        verified = time.perf_counter()
        self._seconds["verify"] += verified - started
        assert self.version is not None, "a round runs under a version"
        emit(rows, drafts, verdicts, laws, version=self.version, digest=self._digest)
        self.parts.proposer.observe(rows)
        self._seconds["commit"] += time.perf_counter() - verified
        self._counts["rounds"] += 1
        asked_lens = [one.asked_len for one in drafted]
        proposed = [one.proposed for one in drafted]
        self._note(batch, trials_of(rows, asked_lens, proposed, drafts, verdicts))
        emitted = iter([row.token_ids[at:] or [ENDED] for row, at in zip(rows, starts)])
        return [next(emitted) if one.ours else [ENDED] for one in batch]

    def _take_draft(self, ticket: int, one: Scheduled) -> _Drafted:
        """What was scored of the row's draft, with its laws."""
        drafted = self._drafted.pop(ticket, None)
        if drafted is None:
            draft = foreign_draft(one)
            self._rows[ticket].counters.drafted += len(draft)
            return _Drafted(len(draft), draft, draft)
        kept = drafted.kept.truncated(len(one.draft_ids))
        assert kept.token_ids == one.draft_ids, (
            "the scheduler scored another draft than it was given"
        )
        return replace(drafted, kept=kept)

    def _laws(
        self, logits: torch.Tensor, rows: Sequence[Row], drafts: Sequence[Draft]
    ) -> TargetLaws:
        conditions = conditions_of(rows, drafts, lambda row, d: row.conditions.along(d.token_ids))
        if self.parts.num_ids < logits.shape[1]:
            logits[:, self.parts.num_ids :] = -torch.inf
        return TargetLaws(logits, conditions)

    def _verdicts(
        self, rows: Sequence[Row], drafts: Sequence[Draft], laws: TargetLaws
    ) -> list[Verdict | None]:
        rule = self.parts.verification

        def judge(row: Row, draft: Draft, first: int) -> Verdict:
            start = len(row.token_ids)
            return verify(
                laws, first, draft, row.draws, start, rule=rule, foretell=foretells(start)
            )

        return verdicts_of(rows, drafts, judge)

    def _note(self, batch: Sequence[Scheduled], trials: tuple[Trial, ...]) -> None:
        self._round.trials = trials
        self._round.scored_tokens = sum(one.num_tokens for one in batch)
        self._round.plain = all(one.decodes and not one.num_padded for one in batch)

    # ---- drafting -------------------------------------------------------------------------

    def draft(self) -> list[tuple[int, tuple[int, ...]]]:
        """Tickets and draft ids for the next forward, of the rows that the last one gave tokens."""
        started = time.perf_counter()
        self._observe()
        tickets = [ticket for ticket in self._scheduled if not self._rows[ticket].done]
        rows = [self._rows[ticket] for ticket in tickets]
        asked = self.parts.draft_len.choose(rows, can_branch=False, draining=self._round.draining)
        longest = self.parts.max_draft_len
        lens = [min(k, longest, max(0, row.remaining_len - 1)) for k, row in zip(asked, rows)]
        proposed = self._propose(rows, lens)
        kept = checked_drafts(
            rows, self.parts.draft_len.keep(rows, proposed), self.parts.limits.vocab_size
        )
        for ticket, asked_len, whole, scored in zip(tickets, lens, proposed, kept):
            self._drafted[ticket] = _Drafted(asked_len, whole, scored)
        self._round.drafting_s = time.perf_counter() - started
        self._seconds["propose"] += self._round.drafting_s
        return [
            (ticket, draft.token_ids)
            for ticket, row, draft in zip(tickets, rows, kept)
            if not row.done
        ]

    def _observe(self) -> None:
        """Tells the draft lengths what the round cost that ends here, but for the scheduler's own
        bookkeeping behind it."""
        round_ = self._round
        if not round_.trials:
            return
        self.parts.draft_len.observe(
            RoundCost(
                seconds=time.perf_counter() - round_.started_s,
                propose_seconds=round_.drafting_s,
                scored_tokens=round_.scored_tokens,
                plain_tokens=round_.plain,
                trials=round_.trials,
            )
        )

    def _propose(self, rows: Sequence[Row], lens: Sequence[int]) -> list[Draft]:
        if not any(lens):
            return [NO_DRAFT] * len(rows)
        return bounded_drafts(rows, self.parts.proposer.propose(rows, lens), lens)

    # ---- results --------------------------------------------------------------------------

    def counters(self) -> SpecCounters:
        total = SpecCounters()
        for counters in (self._finished, *(row.counters for row in self._rows.values())):
            total.add(counters)
        return total

    def gauges(self) -> Mapping[str, float]:
        return {
            **{f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()},
            **{f"count/{name}": float(count) for name, count in self._counts.items()},
            **self.parts.draft_len.gauges(),
            **self.parts.proposer.gauges(),
        }

    def explain(self) -> str:
        return self.parts.draft_len.explain()
