"""The native engine: rounds of draft, score, verify, commit over a ragged batch of rows.

Continuous batching over the policy's cache slots: a row that ends frees its slot for the next round.
A prompt is prefilled once for all rows that share it (a group, or a later sample of the same prompt
whose slot still holds it) and copied to their slots. Weights change between rounds only, so every
token has exactly one version: that of the weights whose forward verified it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rollout.admission import check_request
from rollout.conditions import Condition, checked_mask
from rollout.draft import NO_DRAFT, Draft, check_draft
from rollout.draft_len import DraftLen, RoundCost
from rollout.engine import EngineLimits, InFlight
from rollout.errors import InvalidDraft, InvalidLogits, InvalidRequest
from rollout.grammar import CompileGrammar, MaskProvider
from rollout.law import TargetLaws
from rollout.policy import Policy, Window
from rollout.proposer import Proposer, TreeProposer
from rollout.request import Mode, RolloutRequest, RolloutSample, SpecCounters
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.stop_text import Decode
from rollout.streams import Draws, SeededDraws
from rollout.verdict import Verdict
from rollout.verify import Rule, verify
from rollout.watch import PIT_BINS, foretells, looks_at, pit_bin

MAX_PREFILL_TOKENS = 2048
"""Tokens of prompts and re-prefills run in one forward; bounds its activations."""


NO_CONDITION = Condition(SamplingParams())


def seeded_draws(request: RolloutRequest) -> Draws:
    """The row's streams: its own seed if it names one, else the run's."""
    seed = request.sampling.seed
    return SeededDraws(
        request.run_seed if seed is None else seed, request.prompt_id, request.sample_index
    )


@dataclass(frozen=True, slots=True)
class _Load:
    prepared: Any
    version: int
    digest: str
    in_flight: InFlight


class NativeEngine:
    """Policy + proposer + verification + draft length; see `rollout.engine.Engine`.

    `num_ids`: ids that stand for a token; logits behind them are padding and never emitted. None
    takes all.
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
        draws_for: Callable[[RolloutRequest], Draws] = seeded_draws,
    ) -> None:
        self.policy, self.proposer, self.draft_len = policy, proposer, draft_len
        self.verification = verification
        self._num_ids = policy.vocab_size if num_ids is None else num_ids
        self.version: int | None = None
        self._digest, self._mode = "", mode
        self._decode, self._compile_grammar, self._draws_for = decode, compile_grammar, draws_for
        self._waiting: deque[Row] = deque()
        self._live: list[Row] = []
        self._ended: list[Row] = []
        self._cached: list[list[int]] = [[] for _ in range(policy.num_slots)]
        self._due: _Load | None = None
        self._finished_counters = SpecCounters()
        self._seconds = dict.fromkeys(("prefill", "propose", "score", "verify", "commit"), 0.0)
        self._counts = dict.fromkeys(
            ("rounds", "prefill_tokens", "refill_tokens", "forked_tokens", "samples"), 0
        )

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
        return len(self._waiting) + len(self._live) + len(self._ended)

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
                self._waiting.append(row)

    def abort(self, request_ids: Sequence[str]) -> list[RolloutSample]:
        named = set(request_ids)
        rows = [row for row in (*self._waiting, *self._live) if row.request.id in named]
        for row in rows:
            row.finish("abort", "by request")
        self._waiting = deque(row for row in self._waiting if not row.done)
        self._live = [row for row in self._live if not row.done]
        return [self._retire(row) for row in rows]

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
        if due is None or (due.in_flight == "finish" and self._live):
            return
        self.policy.swap(due.prepared)
        self._cached = [[] for _ in range(self.policy.num_slots)]
        self.version, self._digest, self._due = due.version, due.digest, None
        self.proposer.publish(due.version)
        if due.in_flight == "abort":
            for row in self._live:
                row.finish("abort", f"weights changed to version {due.version}")
            self._ended += self._live
            self._live = []

    # ---- the round ------------------------------------------------------------------------

    def step(self) -> list[RolloutSample]:
        self._swap_if_due()
        self._admit()
        if rows := self._live:
            started = time.perf_counter()
            with self._timed("prefill"):
                prefilled = self._share_prompts(rows)
            with self._timed("propose"):
                can_branch = isinstance(self.proposer, TreeProposer)
                asked = self.draft_len.choose(rows, can_branch=can_branch)
                drafts = self._propose(rows, asked)
            with self._timed("score"):
                windows = [self._window(row, draft) for row, draft in zip(rows, drafts)]
                logits = self.policy.score(windows)  # [N, V]
            with self._timed("verify"):
                laws = self._laws(logits, rows, drafts)
                verdicts = self._verify(rows, drafts, laws)
            with self._timed("commit"):
                self._commit(rows, drafts, windows, laws, verdicts)
                self.proposer.observe(rows)
            self._counts["rounds"] += 1
            self.draft_len.observe(
                _round_cost(started, windows, asked, drafts, verdicts, prefilled)
            )
        return self._drain()

    def _admit(self) -> None:
        """Fills free slots in order of submission, preferring one that holds the prompt already."""
        if self.version is None or self._due is not None:
            return
        taken = {row.slot for row in self._live}
        free = [slot for slot in range(self.policy.num_slots) if slot not in taken]
        while free and self._waiting:
            row = self._waiting.popleft()
            slot = next((s for s in free if self._holds_prompt(s, row)), free[0])
            free.remove(slot)
            if self._holds_prompt(slot, row):
                self._forget(slot, row.prompt_len - 1)  # what the row before it added
            row.admitted(slot)
            self._live.append(row)

    def _holds_prompt(self, slot: int, row: Row) -> bool:
        """All but the last prompt token are cached; the last is scored with the first round."""
        shared = row.prompt_len - 1
        return self._cached[slot][:shared] == row.token_ids[:shared]

    def _share_prompts(self, rows: Sequence[Row]) -> int:
        """Brings every row's prompt into its slot, running each distinct prompt at most once.
        Returns how many tokens were run."""
        cold = [row for row in rows if not self._holds_prompt(_slot(row), row)]
        leaders: dict[tuple[int, ...], Row] = {}
        for row in cold:
            self._forget(_slot(row), 0)
            donors = (s for s in range(self.policy.num_slots) if self._holds_prompt(s, row))
            if (donor := next(donors, None)) is not None:
                self._fork(donor, row)
            else:
                leaders.setdefault(row.request.prompt_ids, row)
        wanted = [(row, row.prompt_len - 1) for row in leaders.values()]
        num_tokens = self._prefill(wanted, "prefill_tokens")
        for row in cold:
            if not self._holds_prompt(_slot(row), row):
                self._fork(_slot(leaders[row.request.prompt_ids]), row)
        # Rows that were interrupted run what they had emitted, all but the last token, once more.
        emitted = [(row, len(row.token_ids) - 1) for row in rows]
        return num_tokens + self._prefill(emitted, "refill_tokens")

    def _prefill(self, wanted: Sequence[tuple[Row, int]], counted_as: str) -> int:
        """Caches each row's tokens up to a length, MAX_PREFILL_TOKENS a forward; tokens run."""
        windows: list[Window] = []
        num_tokens, room = 0, MAX_PREFILL_TOKENS
        for row, length in wanted:
            cached = self._cached[_slot(row)]
            while len(cached) < length:
                ids = tuple(row.token_ids[len(cached) : min(length, len(cached) + room)])
                windows.append(Window(_slot(row), len(cached), ids, num_logits=0))
                cached += ids
                num_tokens += len(ids)
                room -= len(ids)
                if not room:
                    self.policy.score(windows)
                    windows, room = [], MAX_PREFILL_TOKENS
        if windows:
            self.policy.score(windows)
        self._counts[counted_as] += num_tokens
        return num_tokens

    def _fork(self, source: int, row: Row) -> None:
        shared = row.prompt_len - 1
        self.policy.fork(source, _slot(row), shared)
        self._cached[_slot(row)] = row.token_ids[:shared]
        self._counts["forked_tokens"] += shared

    def _propose(self, rows: Sequence[Row], asked: Sequence[int]) -> list[Draft]:
        """Drafts that leave room for the token after them; a row's bad draft ends that row only."""
        depths = [max(0, row.remaining_len - 1) for row in rows]
        if self.draft_len.branching and isinstance(self.proposer, TreeProposer):
            room = [self.policy.context_len - len(row.token_ids) for row in rows]
            max_lens = [min(k, r) if depth else 0 for k, r, depth in zip(asked, room, depths)]
            if not any(max_lens):
                return [NO_DRAFT] * len(rows)
            proposed = self.proposer.propose_trees(rows, max_lens, depths)
        else:
            max_lens = [min(k, depth) for k, depth in zip(asked, depths)]
            if not any(max_lens):
                return [NO_DRAFT] * len(rows)
            proposed = self.proposer.propose(rows, max_lens)
        drafts = []
        for row, draft, max_len in zip(rows, proposed, max_lens, strict=True):
            draft = _until_stop(draft.truncated(max_len), row)
            try:
                draft = check_draft(draft, self.policy.vocab_size)
            except InvalidDraft as error:
                row.finish("error", str(error))
                draft = NO_DRAFT
            row.counters.drafted += len(draft)
            drafts.append(draft)
        return drafts

    def _window(self, row: Row, draft: Draft) -> Window:
        """The row's tokens that are not cached yet, then the draft."""
        start = len(self._cached[_slot(row)])
        ids = (*row.token_ids[start:], *draft.token_ids)
        num_pending = len(ids) - len(draft)
        parents = None
        if draft.parents is not None:  # relative to the window; the root is the last pending token
            nodes = (parent + num_pending for parent in draft.parents)
            parents = (*range(-1, num_pending - 1), *nodes)
        return Window(_slot(row), start, ids, num_logits=1 + len(draft), parents=parents)

    def _laws(
        self, logits: torch.Tensor, rows: Sequence[Row], drafts: Sequence[Draft]
    ) -> TargetLaws:
        """The law of every scored position; a row whose grammar fails ends as an error."""
        conditions: list[Condition] = []
        for row, draft in zip(rows, drafts):
            try:
                conditions += self._conditions(row, draft)
            except InvalidRequest as error:
                row.finish("error", str(error))
                conditions += [NO_CONDITION] * (len(draft) + 1)
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
        verdicts: list[Verdict | None] = []
        first = 0
        for row, draft in zip(rows, drafts):
            verdict = None
            if not row.done:
                try:
                    verdict = self._verdict(row, draft, laws, first)
                except InvalidLogits as error:
                    row.finish("error", str(error))
            verdicts.append(verdict)
            first += len(draft) + 1
        return verdicts

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
        indices: list[int] = []
        tokens: list[int] = []
        first = 0
        for draft, verdict in zip(drafts, verdicts):
            if verdict is not None:
                indices += (first, *(first + 1 + node for node in verdict.accepted))
                tokens += verdict.run(draft)
            first += len(draft) + 1
        logprobs, full, kept = laws.logprobs(indices, tokens)
        at = 0
        for row, draft, window, verdict in zip(rows, drafts, windows, verdicts):
            if verdict is None:
                self._forget(_slot(row), 0)
                continue
            part = slice(at, at + verdict.accepted_len + 1)
            num = row.emit(draft, verdict, logprobs[part], full[part], kept[part], self.version)
            row.weights_digest = self._digest
            self._look_at(row, laws, indices[at : at + num])
            self._keep(row, draft, window, verdict)
            at = part.stop
        self._ended += [row for row in rows if row.done]
        self._live = [row for row in rows if not row.done]

    def _look_at(self, row: Row, laws: TargetLaws, indices: Sequence[int]) -> None:
        """Counts where some of the tokens just emitted fell in their laws (`rollout.watch`)."""
        if row.request.sampling.greedy:
            return
        counts = row.counters.pit_counts
        first = len(row.token_ids) - len(indices)
        for position, index in enumerate(indices, start=first):
            if looks_at(position):
                counts.extend([0] * (PIT_BINS - len(counts)))
                token = row.token_ids[position]
                counts[pit_bin(laws, index, token, row.draws, position)] += 1

    def _keep(self, row: Row, draft: Draft, window: Window, verdict: Verdict) -> None:
        """Rolls the row's cache back to what was accepted."""
        slot, num_pending = _slot(row), len(window.token_ids) - len(draft)
        kept = (*range(num_pending), *(num_pending + node for node in verdict.accepted))
        self._cached[slot] += [window.token_ids[index] for index in kept]
        if draft.parents is not None:
            self.policy.compact(slot, window.start, kept)
        elif verdict.accepted_len < len(draft):
            self.policy.truncate(slot, window.start + len(kept))

    def _forget(self, slot: int, length: int) -> None:
        self.policy.truncate(slot, length)
        del self._cached[slot][length:]

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
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - started

    def counters(self) -> SpecCounters:
        """Speculation counts of everything this engine has emitted so far."""
        total = SpecCounters()
        for counters in (self._finished_counters, *(row.counters for row in self._live)):
            total.add(counters)
        return total

    def gauges(self) -> Mapping[str, float]:
        """Lifetime sums (seconds by phase, counts) and current occupancy."""
        return {
            **{f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()},
            **{f"count/{name}": float(count) for name, count in self._counts.items()},
            "rows/live": float(len(self._live)),
            "rows/waiting": float(len(self._waiting)),
            **self.proposer.gauges(),
        }


def _slot(row: Row) -> int:
    assert row.slot is not None, "a live row has a slot"
    return row.slot


def _until_stop(draft: Draft, row: Row) -> Draft:
    """Cuts a chain behind its first stop id: what follows could never be emitted."""
    stop_ids = row.request.sampling.stop_ids
    for depth, token in enumerate(draft.token_ids):
        if draft.parents is None and token in stop_ids:
            return draft.truncated(depth + 1)
    return draft


def _round_cost(
    started: float,
    windows: Sequence[Window],
    asked: Sequence[int],
    drafts: Sequence[Draft],
    verdicts: Sequence[Verdict | None],
    prefilled: int,
) -> RoundCost:
    scored = sum(len(window.token_ids) for window in windows)
    return RoundCost(
        seconds=time.perf_counter() - started,
        num_rows=len(windows),
        asked_len=max(asked, default=0),
        scored_tokens=scored + prefilled,
        plain_tokens=scored == sum(w.num_logits for w in windows) and not prefilled,
        drafted=tuple(len(draft) for draft in drafts),
        accepted=tuple(verdict.accepted_len if verdict else 0 for verdict in verdicts),
        branched=any(draft.parents is not None for draft in drafts),
    )
