"""A sequence in flight: what was emitted, under which law, by which weights.

A row is written by the engine only. Proposers read `token_ids` and never touch it.
"""

import itertools
import time
from collections.abc import Callable, Sequence

from rollout.conditions import Conditions
from rollout.draft import Draft
from rollout.grammar import MaskProvider
from rollout.request import FinishReason, Mode, RolloutRequest, RolloutSample, SpecCounters, Timings
from rollout.stop_text import Decode, StopText
from rollout.streams import Draws
from rollout.verdict import Verdict

_SERIALS = itertools.count()


class Row:
    """One request being served."""

    def __init__(
        self,
        request: RolloutRequest,
        draws: Draws,
        *,
        context_len: int,
        decode: Decode | None = None,
        mask: MaskProvider | None = None,
    ) -> None:
        self.request, self.draws = request, draws
        self.conditions = Conditions(request.sampling, request.prompt_ids, mask)
        self.serial = next(_SERIALS)
        """Identity for proposers: unique in the process, also when a request id is used again."""
        self.token_ids: list[int] = list(request.prompt_ids)
        self.slot: int | None = None
        self.counters = SpecCounters()
        self.weights_digest = ""
        """Digest of the weights that verified the last token."""
        self.finish_reason: FinishReason | None = None
        self.finish_detail = ""
        prompt_len = len(request.prompt_ids)
        self.max_len = min(context_len, prompt_len + request.sampling.max_new_tokens)
        self._limit = (
            "max_new_tokens" if self.max_len < context_len else "context_len"
        )  # what a row that ends by length ran into
        self._logprobs: list[float] = []
        self._logprobs_full: list[float] = []
        self._kept_mass: list[float] = []
        self._spans: list[tuple[int, int]] = []
        stops = request.sampling.stop_strings
        self._stop_text = StopText(stops, decode) if stops and decode else None
        self._submitted_s = time.monotonic()
        self._admitted_s: float | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def logprobs(self) -> Sequence[float]:
        """Of the tokens generated, under the law that was sampled."""
        return self._logprobs

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def remaining_len(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_len - len(self.token_ids)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def begun(self) -> bool:
        """It has been in a slot."""
        return self._admitted_s is not None

    def admitted(self, slot: int) -> None:
        self.slot = slot
        if self._admitted_s is None:
            self._admitted_s = time.monotonic()

    def preempted(self) -> None:
        """Gives up the slot; what was emitted stays."""
        self.slot = None

    def emit(
        self,
        draft: Draft,
        verdict: Verdict,
        logprobs: list[float],
        logprobs_full: list[float],
        kept_mass: list[float],
        version: int,
    ) -> int:
        """Appends a round's tokens up to the first that ends the row; how many were appended.

        Stop ids come first, then stop strings, then the length limit.
        """
        num_emitted = 0
        for token in verdict.run(draft):
            self.token_ids.append(token)
            self.conditions.push(token)
            num_emitted += 1
            self._check_end(token)
            if self.done:
                break
        self._logprobs += logprobs[:num_emitted]
        self._logprobs_full += logprobs_full[:num_emitted]
        self._kept_mass += kept_mass[:num_emitted]
        self._extend_span(version, num_emitted)
        self._count(len(draft), verdict, num_emitted)
        return num_emitted

    def _check_end(self, token: int) -> None:
        sampling = self.request.sampling
        stop = self._stop_text.push(token) if self._stop_text else None
        if token in sampling.stop_ids and self.num_generated > sampling.min_tokens:
            self.finish("stop", f"token {token}")
        elif stop is not None and self.num_generated >= sampling.min_tokens:
            self.finish("stop", f"string {stop!r}")
        elif self.remaining_len <= 0:
            self.finish("length", self._limit)

    def draft_end(self) -> Callable[[int], bool]:
        """Tells, one drafted token after the other, whether the row would end with it: nothing is
        to be drafted behind that. The row stays as it is."""
        sampling, num_generated = self.request.sampling, self.num_generated
        text = self._stop_text.branch() if self._stop_text else None

        def ends(token: int) -> bool:
            nonlocal num_generated
            num_generated += 1
            stop = text.push(token) if text else None
            by_id = token in sampling.stop_ids and num_generated > sampling.min_tokens
            return by_id or (stop is not None and num_generated >= sampling.min_tokens)

        return ends

    def _extend_span(self, version: int, num: int) -> None:
        if self._spans and self._spans[-1][0] == version:
            num += self._spans.pop()[1]
        self._spans.append((version, num))

    def _count(self, draft_len: int, verdict: Verdict, num_emitted: int) -> None:
        counters = self.counters
        accepted = min(verdict.accepted_len, num_emitted)
        counters.rounds += 1
        counters.verified += draft_len
        counters.accepted += accepted
        if num_emitted > verdict.accepted_len:
            name = {"correction": "corrections", "bonus": "bonuses", "plain": "plain"}
            field = name[verdict.origin]
            setattr(counters, field, getattr(counters, field) + 1)
        counters.zero_residual_draws += verdict.zero_residual
        # A position after a stop was verified but is not counted as reached.
        num_reached = min(verdict.num_reached, accepted + (num_emitted > accepted))
        for counts in (counters.reached, counters.accepted_by_position):
            counts.extend([0] * (num_reached - len(counts)))
        for depth in range(num_reached):
            counters.reached[depth] += 1
            counters.accepted_by_position[depth] += depth < accepted
        if (foretold := verdict.foretold) is not None:
            counters.foretold_reached += verdict.num_reached
            counters.foretold_accepted += verdict.accepted_len
            counters.expected_accepted += foretold.mean
            counters.expected_variance += foretold.variance

    def finish(self, reason: FinishReason, detail: str) -> None:
        self.finish_reason, self.finish_detail = reason, detail

    def sample(self, mode: Mode) -> RolloutSample:
        assert self.finish_reason is not None, "a row has a sample once it is finished"
        now = time.monotonic()
        admitted_s = now if self._admitted_s is None else self._admitted_s
        return RolloutSample(
            request=self.request,
            token_ids=tuple(self.token_ids[self.prompt_len :]),
            logprobs=tuple(self._logprobs),
            logprobs_full=tuple(self._logprobs_full),
            kept_mass=tuple(self._kept_mass),
            version_spans=tuple(self._spans),
            finish_reason=self.finish_reason,
            finish_detail=self.finish_detail,
            mode=mode,
            weights_digest=self.weights_digest,
            counters=self.counters,
            timings=Timings(admitted_s - self._submitted_s, now - admitted_s),
        )
