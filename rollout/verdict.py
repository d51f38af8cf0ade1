"""What a verification decides for one row and round."""

from dataclasses import dataclass
from typing import Literal

from rollout.draft import Draft

Origin = Literal["correction", "bonus", "plain"]
"""Of the token behind the accepted ones: drawn after a refusal, after a whole draft was accepted, or
without a draft."""


@dataclass(frozen=True, slots=True)
class Foretold:
    """Expected accepted length of a draft: observed minus `mean` has mean zero."""

    mean: float
    variance: float
    """Upper bound of the variance of observed minus mean."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round emits for one row: the accepted draft tokens, then `next_token`."""

    accepted: tuple[int, ...]
    """Indices into the draft; 0, 1, ... for a chain, a path from the root for a tree."""
    next_token: int
    origin: Origin
    foretold: Foretold | None = None
    """None where it was not worked out."""
    num_reached: int = 0
    """Draft positions at which the verification decided."""
    zero_residual: bool = False

    @property
    def accepted_len(self) -> int:
        return len(self.accepted)

    def run(self, draft: Draft) -> tuple[int, ...]:
        """The tokens emitted, in order, if nothing among them ends the row."""
        return (*(draft.token_ids[node] for node in self.accepted), self.next_token)
