"""What one round did and took, as told to whoever chooses draft lengths."""

from dataclasses import dataclass
from functools import cached_property

from rollout.draft import Draft
from rollout.row import Row


@dataclass(frozen=True, slots=True)
class Trial:
    """One row's draft in one round."""

    row: Row
    asked_len: int
    draft: Draft
    """As it was proposed."""
    kept_len: int
    """Of its first tokens, how many were scored."""
    accepted_len: int
    next_token: int | None
    """Emitted behind the accepted tokens; None where the row failed."""


@dataclass(frozen=True)
class RoundCost:
    """One round of rows that decode."""

    seconds: float
    """All but what follows."""
    propose_seconds: float
    """What drafts took besides being scored: choosing lengths, proposing, choosing what of it to keep,
    and learning from the round before."""
    scored_tokens: int
    """Tokens run through the target, prompts and re-prefills included."""
    plain_tokens: bool
    """No prompt or re-prefill was in the round, so its time says what decoding costs."""
    trials: tuple[Trial, ...]
    branched: bool = False
    """The drafts were trees."""

    @cached_property
    def num_rows(self) -> int:
        return len(self.trials)

    @cached_property
    def asked(self) -> tuple[Trial, ...]:
        """Those that were asked for a draft."""
        return tuple(trial for trial in self.trials if trial.asked_len)

    @cached_property
    def num_kept(self) -> int:
        return sum(trial.kept_len for trial in self.trials)

    @cached_property
    def num_accepted(self) -> int:
        return sum(trial.accepted_len for trial in self.trials)

    @cached_property
    def num_drafted(self) -> int:
        return sum(len(trial.draft) for trial in self.trials)
