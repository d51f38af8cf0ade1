"""The native engine: rounds of draft, score, verify, commit over a ragged batch of rows.

Continuous batching over the policy's cache slots: a row that ends frees its slot for the next round.
Each round is one forward: the windows of the rows that decode and chunks of the prompts of others
(`rollout.scheduler`). Weights change between rounds only, so every token has exactly one version: that
of the weights whose forward verified it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rollout.admission import check_request
from rollout.conditions import Condition, checked_mask
from rollout.draft import NO_DRAFT, Draft
from rollout.draft_len import DraftLen
from rollout.engine import EngineLimits, InFlight
from rollout.grammar import CompileGrammar, MaskProvider
from rollout.law import TargetLaws
from rollout.policy import Policy, Window
from rollout.proposer import Proposer, Remembering, TreeProposer
from rollout.request import Mode, RolloutRequest, RolloutSample, SpecCounters
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
from rollout.scheduler import MAX_ROUND_TOKENS, Scheduler, slot_of
from rollout.stop_text import Decode
from rollout.streams import Draws, SeededDraws
from rollout.verdict import Verdict
from rollout.verify import Rule, verify
from rollout.watch import foretells


def seeded_draws(request: RolloutRequest) -> Draws:
    """The row's streams: its own seed if it names one, else the run's."""
    seed = request.sampling.seed
    return SeededDraws(
        request.run_seed if seed is None else seed, request.prompt_id, request.sample_index
    )


@dataclass(slots=True)
class _Phase:
    """How long a part of a round took, once it is over."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Load:
    prepared: Any
    version: int
    digest: str
    in_flight: InFlight


class NativeEngine:
    """Policy + proposer + verification + draft length; see `rollout.engine.Engine`.

    `num_ids`: ids that stand for a token; logits behind them are padding and never emitted. None
    takes all. `max_round_tokens`: tokens of one forward, as far as `rollout.scheduler` can keep to it.
    """

    def __init__(
        self,
        policy: Policy,
        proposer: Proposer,
        draft_len: DraftLen,
        *,
        mode: Mode = "full",
        verification: Rule = "block",
        decode: Decode | None = None,
        compile_grammar: CompileGrammar | None = None,
        num_ids: int | None = None,
        max_round_tokens: int = MAX_ROUND_TOKENS,
        draws_for: Callable[[RolloutRequest], Draws] = seeded_draws,
    ) -> None:
        self.policy, self.proposer, self.draft_len = policy, proposer, draft_len
        self.verification = verification
        self._num_ids = policy.vocab_size if num_ids is None else num_ids
        self.version: int | None = None
        self._digest, self._mode = "", mode
        self._decode, self._compile_grammar, self._draws_for = decode, compile_grammar, draws_for
        self._scheduler = Scheduler(policy, max_round_tokens)
        self._ended: list[Row] = []
        self._due: _Load | None = None
        self._finished_counters = SpecCounters()
        self._seconds = dict.fromkeys(("plan", "propose", "score", "verify", "commit"), 0.0)
        self._learning_s = 0.0
        """What choosing lengths learnt from the last round for."""
        self._counts = {"rounds": 0, "samples": 0}

    # ---- requests -------------------------------------------------------------------------

    @property
    def limits(self) -> EngineLimits:
        """What requests must fit."""
        policy = self.policy
        return EngineLimits(
            policy.vocab_size,
            policy.context_len,
            can_decode=self._decode is not None,
            can_constrain=self._compile_grammar is not None,
        )

    @property
    def num_unfinished(self) -> int:
        scheduler = self._scheduler
        return len(scheduler.waiting) + len(scheduler.live) + len(self._ended)

    @property
    def memory(self) -> Remembering | None:
        return self.proposer if isinstance(self.proposer, Remembering) else None

    def check(self, requests: Sequence[RolloutRequest]) -> None:
        """Raises InvalidRequest for the first request that cannot be served."""
        for request in requests:
            self._checked(request)

    def _checked(self, request: RolloutRequest) -> MaskProvider | None:
        """The masks of its grammar, for a request that can be served."""
        check_request(request, self.limits)
        grammar = request.sampling.grammar
        if grammar is None or self._compile_grammar is None:
            return None
        return checked_mask(self._compile_grammar(grammar), self.policy.vocab_size)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        masks = [self._checked(request) for request in requests]
        for request, mask in zip(requests, masks):
            row = Row(
                request,
                self._draws_for(request),
                context_len=self.policy.context_len,
                decode=self._decode,
                mask=mask,
            )
            if row.remaining_len <= 0:
                row.finish("length", "max_new_tokens")
                self._ended.append(row)
            else:
                self._scheduler.waiting.append(row)

    def abort(self, request_ids: Sequence[str]) -> list[RolloutSample]:
        named = set(request_ids)
        for row in (*self._scheduler.waiting, *self._scheduler.live):
            if row.request.id in named:
                row.finish("abort", "by request")
        return [self._retire(row) for row in self._scheduler.take_ended()]

    # ---- weights --------------------------------------------------------------------------

    def prepare(self, weights: Mapping[str, torch.Tensor]) -> Any:
        return self.policy.load(weights)

    def load(
        self, prepared: Any, *, version: int, digest: str, in_flight: InFlight = "interrupt"
    ) -> None:
        self._due = _Load(prepared, version, digest, in_flight)

    @property
    def load_is_due(self) -> bool:
        """A swap was asked for and has not happened yet."""
        return self._due is not None

    def _swap_if_due(self) -> None:
        due = self._due
        if due is None or (due.in_flight == "finish" and self._scheduler.begun):
            return
        self.policy.swap(due.prepared)
        self._scheduler.void()
        self.version, self._digest, self._due = due.version, due.digest, None
        self.proposer.publish(due.version)
        if due.in_flight == "abort":
            for row in self._scheduler.begun:
                row.finish("abort", f"weights changed to version {due.version}")
            self._ended += self._scheduler.take_ended()

    # ---- the round ------------------------------------------------------------------------

    def step(self) -> list[RolloutSample]:
        self._swap_if_due()
        if self.version is not None:
            self._scheduler.admit(begun_only=self.load_is_due)
        if live := self._scheduler.live:
            started = time.perf_counter()
            with self._timed("plan") as choosing:
                draining = not self._scheduler.waiting
                asked = self.draft_len.choose(live, can_branch=self._can_branch, draining=draining)
            with self._timed("plan"):
                plan = self._scheduler.plan(self._max_lens(live, asked), trees=self._branches)
                rows = plan.rows
            with self._timed("propose") as proposing:
                proposed = self._propose(rows, plan.max_lens)
            with self._timed("plan") as keeping:
                kept = self.draft_len.keep(rows, proposed)
                drafts = checked_drafts(rows, kept, self.policy.vocab_size)
            with self._timed("score"):
                windows = [self._window(row, draft) for row, draft in zip(rows, drafts)]
                logits = self.policy.score([*windows, *plan.chunks])  # [N, V]
                for chunk in plan.chunks:
                    self._scheduler.cache(chunk.slot, chunk.token_ids)
            self._counts["rounds"] += 1
            if rows:
                with self._timed("verify"):
                    laws = self._laws(logits, rows, drafts)
                    verdicts = self._verify(rows, drafts, laws)
                with self._timed("commit"):
                    self._commit(rows, drafts, windows, laws, verdicts)
                    self.proposer.observe(rows)
                drafting_s = choosing.seconds + proposing.seconds + keeping.seconds
                seconds = time.perf_counter() - started - drafting_s
                with self._timed("plan") as learning:
                    trials = trials_of(rows, plan.max_lens, proposed, drafts, verdicts)
                    drafting_s += self._learning_s
                    self.draft_len.observe(
                        _round_cost(seconds, drafting_s, windows, plan.chunks, trials)
                    )
                self._learning_s = learning.seconds
        return self._drain()

    @cached_property  # asking a protocol takes as long as planning a round
    def _can_branch(self) -> bool:
        return isinstance(self.proposer, TreeProposer)

    @property
    def _branches(self) -> bool:
        """The drafts of this round are trees."""
        return self.draft_len.branching and self._can_branch

    def _max_lens(self, rows: Sequence[Row], asked: Sequence[int]) -> list[int]:
        """The longest draft of each row that leaves room for the token after it."""
        if not self._branches:
            return [min(k, _max_depth(row)) for k, row in zip(asked, rows, strict=True)]
        room = [self.policy.context_len - len(row.token_ids) for row in rows]
        return [min(k, r) if _max_depth(row) else 0 for k, r, row in zip(asked, room, rows)]

    def _propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        """Drafts of up to the given lengths."""
        if not any(max_lens):
            return [NO_DRAFT] * len(rows)
        if self._branches and isinstance(self.proposer, TreeProposer):
            depths = [_max_depth(row) for row in rows]
            proposed = self.proposer.propose_trees(rows, max_lens, depths)
        else:
            proposed = self.proposer.propose(rows, max_lens)
        return bounded_drafts(rows, proposed, max_lens)

    def _window(self, row: Row, draft: Draft) -> Window:
        """The row's tokens that are not cached yet, then the draft."""
        start = self._scheduler.num_cached(row)
        ids = (*row.token_ids[start:], *draft.token_ids)
        num_pending = len(ids) - len(draft)
        parents = None
        if draft.parents is not None:  # relative to the window; the root is the last pending token
            nodes = (parent + num_pending for parent in draft.parents)
            parents = (*range(-1, num_pending - 1), *nodes)
        return Window(slot_of(row), start, ids, num_logits=1 + len(draft), parents=parents)

    def _laws(
        self, logits: torch.Tensor, rows: Sequence[Row], drafts: Sequence[Draft]
    ) -> TargetLaws:
        """The law of every scored position; a row whose grammar fails ends as an error."""
        conditions = conditions_of(rows, drafts, self._conditions)
        if self._num_ids < self.policy.vocab_size:
            with torch.inference_mode():
                logits[:, self._num_ids :] = -torch.inf
        return TargetLaws(logits, conditions)

    def _conditions(self, row: Row, draft: Draft) -> list[Condition]:
        return row.conditions.along(draft.token_ids, draft.parents)

    def _verify(
        self, rows: Sequence[Row], drafts: Sequence[Draft], laws: TargetLaws
    ) -> list[Verdict | None]:
        """A verdict a row; None where the row has no law to go on and ends as an error."""

        def judge(row: Row, draft: Draft, first: int) -> Verdict:
            return self._verdict(row, draft, laws, first)

        return verdicts_of(rows, drafts, judge)

    def _verdict(self, row: Row, draft: Draft, laws: TargetLaws, first: int) -> Verdict:
        start, rule = len(row.token_ids), self.verification
        return verify(laws, first, draft, row.draws, start, rule=rule, foretell=foretells(start))

    def _commit(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Draft],
        windows: Sequence[Window],
        laws: TargetLaws,
        verdicts: Sequence[Verdict | None],
    ) -> None:
        """Emits each verdict's tokens with their logprobs and rolls the caches back to them."""
        assert self.version is not None, "a round runs under a version"
        emit(rows, drafts, verdicts, laws, version=self.version, digest=self._digest)
        for row, draft, window, verdict in zip(rows, drafts, windows, verdicts):
            if verdict is None:
                self._scheduler.truncate(slot_of(row), 0)
            else:
                self._keep(row, draft, window, verdict)
        self._ended += self._scheduler.take_ended()

    def _keep(self, row: Row, draft: Draft, window: Window, verdict: Verdict) -> None:
        """Rolls the row's cache back to what was accepted."""
        num_pending = len(window.token_ids) - len(draft)
        kept = (*range(num_pending), *(num_pending + node for node in verdict.accepted))
        if draft.parents is not None:
            self.policy.compact(window.slot, window.start, kept)
        else:  # also without a refusal: the draft may be shorter than the room made for it
            self.policy.truncate(window.slot, window.start + len(kept))
        self._scheduler.cache(window.slot, [window.token_ids[index] for index in kept])

    # ---- results --------------------------------------------------------------------------

    def _drain(self) -> list[RolloutSample]:
        ended, self._ended = self._ended, []
        return [self._retire(row) for row in ended]

    def _retire(self, row: Row) -> RolloutSample:
        self.proposer.finish(row)
        self._finished_counters.add(row.counters)
        self._counts["samples"] += 1
        return row.sample(self._mode)

    @contextmanager
    def _timed(self, phase: str) -> Iterator["_Phase"]:
        timed, started = _Phase(), time.perf_counter()
        yield timed
        timed.seconds = time.perf_counter() - started
        self._seconds[phase] += timed.seconds

    def counters(self) -> SpecCounters:
        """Speculation counts of everything this engine has emitted so far."""
        total = SpecCounters()
        for counters in (self._finished_counters, *(row.counters for row in self._scheduler.begun)):
            total.add(counters)
        return total

    def gauges(self) -> Mapping[str, float]:
        """Lifetime sums (seconds by phase, counts) and current occupancy."""
        counts = self._counts | self._scheduler.counts
        return {
            **{f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()},
            **{f"count/{name}": float(count) for name, count in counts.items()},
            "rows/live": float(len(self._scheduler.live)),
            "rows/waiting": float(len(self._scheduler.waiting)),
            **self.draft_len.gauges(),
            **self.proposer.gauges(),
        }

    def explain(self) -> str:
        return self.draft_len.explain()


def _max_depth(row: Row) -> int:
    """Drafted tokens that can be emitted and followed by one more."""
    return max(0, row.remaining_len - 1)


def _round_cost(
    seconds: float,
    propose_seconds: float,
    windows: Sequence[Window],
    chunks: Sequence[Window],
    trials: tuple[Trial, ...],
) -> RoundCost:
    scored = sum(len(window.token_ids) for window in (*windows, *chunks))
    return RoundCost(
        seconds=seconds,
        propose_seconds=propose_seconds,
        scored_tokens=scored,
        plain_tokens=scored == sum(window.num_logits for window in windows),
        trials=trials,
        branched=any(trial.draft.parents is not None for trial in trials),
    )
