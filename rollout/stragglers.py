"""What a token of each row is worth while a batch drains: a step ends when its longest row ends.

While rows wait for room, every accepted token counts the same. Once none waits, one that brings a row
ahead of the others saves no more than its own row's share of a later step; what all rows share of a
step, its weights above all, is saved by the row that ends last. With c the share of a step's seconds
that grows with its rows, a token of row i among R is worth

    c + (1 - c) (1 - l) R P(row i ends last)

tokens: no drafts for rows that are ahead, unless a step is all arithmetic (c = 1).

Who ends last is guessed from how many tokens a row may still emit, as far as rows run into their
limits: where they stop by themselves, as often per token as was seen, being ahead says little. Rows of
one limit are parted by luck alone, and the unluckiest, whose drafts gained less than others', ends the
step. That is l: LUCK, as far as rows run into their limits.
"""

import math
from collections.abc import Sequence

from rollout.round_cost import Trial
from rollout.row import Row

LEAD = 0.25
"""Of the square root of the most tokens left: a lead of so many makes it 2.7 times less likely that a
row ends last."""
LUCK = 0.25
"""Of what accepted tokens would save if all rows had the same luck. Simulated steps of 64 tokens, 4, 8
and 16 rows, on two machines: 1.127 1.046 .988 and 1.105 .989 .996 of plain decoding without it, 1.128
1.047 .994 and 1.110 .992 .996 with it; .5 takes drafts from few rows."""
UNSEEN_TOKENS = 256
"""Tokens without a stop that stand for what was not seen yet."""
MOST_STOPS = 100.0
"""Expected in the tokens that are left, above which nobody runs into a limit."""
MEMORY = 65_536
"""Tokens after which earlier ones count half: a policy moves."""


class Stragglers:
    """Learns how often rows stop, weighs those that are left."""

    def __init__(self) -> None:
        self._tokens = self._stops = 0.0

    def observe(self, trials: Sequence[Trial]) -> None:
        """Takes in a round."""
        for trial in trials:
            self._tokens += trial.accepted_len + 1
            self._stops += trial.row.finish_reason == "stop"
        if self._tokens > MEMORY:
            self._tokens, self._stops = self._tokens / 2, self._stops / 2

    def worth(self, rows: Sequence[Row], own_share: float) -> dict[int, float]:
        """By serial, what a token of each row counts; `own_share`: c."""
        left = [row.remaining_len for row in rows]
        longest, own = max(1, *left), min(own_share, 1.0)
        stop_rate = self._stops / (self._tokens + UNSEEN_TOKENS)
        limited = math.exp(-min(stop_rate * longest, MOST_STOPS))  # share that reach their limits
        lead = LEAD * math.sqrt(longest) * (1.0 + 1.0 / (limited * len(rows)))
        chances = [math.exp((num - longest) / lead) for num in left]
        scale = (1.0 - own) * (1.0 - LUCK * limited) * len(rows) / sum(chances)
        return {row.serial: own + scale * chance for row, chance in zip(rows, chances)}
