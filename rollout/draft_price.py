"""The price of a drafted token: the chance of being accepted at which it is worth scoring.

From what rows were offered lately, a histogram of chances, and what steps cost follows which tokens the
best round would score: those above the price at which emitted tokens a second are most. There,

    price = seconds that one more scored token adds * tokens a second of the round

(Dinkelbach's condition for a ratio of sums; with one row and equal chances a it says to extend a draft
of k tokens while a^(k+1) > c S, c the cost of a token and S the speedup). Where costs have a knee the
best round ends at it whatever the next token costs, so the price is looked for over the whole curve and
then lies between the last token scored and the first that is not.

Only ratios of what is counted are used, so older rounds are forgotten by counting later ones for more.
"""

from array import array
from collections.abc import Iterable

import numpy as np

from rollout.step_cost import StepCost

NUM_BINS = 250
FORGET = 0.9
"""Weight that earlier rounds keep after the next."""
MOST_WEIGHT = 1e12
"""Of a round; all counts are divided by it then."""


class DraftPrice:
    """Learns what is offered; prices it for a batch."""

    def __init__(self) -> None:
        self._weight = 1.0
        """Of the next round."""
        self._num_rows = 0.0
        self._tokens, self._gains = (array("d", bytes(8 * (NUM_BINS + 2))) for _ in range(2))
        """Tokens offered and their summed chances, by chance from 1 to 0; behind a 0 each."""

    def offered(self, chances: Iterable[float], num_rows: int) -> None:
        """One round: the chances >= 0 of all tokens offered to so many rows."""
        if self._weight > MOST_WEIGHT:
            self._rescale()
        weight, tokens, gains = self._weight, self._tokens, self._gains
        self._num_rows += weight * num_rows
        for chance in chances:
            clipped = min(chance, 1.0)
            bin_ = 1 + int(NUM_BINS * (1.0 - clipped))
            tokens[bin_] += weight
            gains[bin_] += weight * clipped
        self._weight /= FORGET

    def _rescale(self) -> None:
        for counts in (self._tokens, self._gains):
            np.frombuffer(counts)[:] /= self._weight
        self._num_rows /= self._weight
        self._weight = 1.0

    def price(self, num_rows: int, cost: StepCost) -> tuple[float, float]:
        """(price, expected rate over that of plain decoding) for a batch of rows."""
        tokens, gains = np.frombuffer(self._tokens), np.frombuffer(self._gains)
        share = num_rows / max(self._num_rows, 1e-9)
        scored = num_rows + share * tokens.cumsum()
        rates = (num_rows + share * gains.cumsum()) / cost.hoped.at(scored)
        best = int(rates.argmax())  # bins scored
        highest = 1.0 - best / NUM_BINS if best else np.inf  # what the last bin kept still holds
        dropped = np.flatnonzero(tokens[best + 1 :])
        lowest = 1.0 - (best + dropped[0]) / NUM_BINS if len(dropped) else 0.0
        marginal = cost.slope(float(scored[best])) * float(rates[best])
        price = float(min(max(marginal, lowest), highest))
        return price, float(rates[best] / rates[0])
