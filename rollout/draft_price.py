"""The price of a drafted token: the chance of being accepted at which it is worth scoring.

From what rows were offered lately, a histogram of chances, and what steps cost follows which tokens the
best round would score: those above the price at which emitted tokens a second are most. There,

    price = seconds that one more scored token adds * tokens a second of the round

(Dinkelbach's condition for a ratio of sums; with one row and equal chances a it says to extend a draft
of k tokens while a^(k+1) > c S, c the cost of a token and S the speedup). Where costs have a knee the
best round ends at it whatever the next token costs, so the price is looked for over the whole curve and
then lies between the last token scored and the first that is not.
"""

import numpy as np

from rollout.step_cost import StepCost

NUM_BINS = 250
FORGET = 0.9
"""Weight that earlier rounds keep after the next."""


class DraftPrice:
    """Learns what is offered; prices it for a batch."""

    def __init__(self) -> None:
        self._num_rows = 0.0
        self._tokens = np.zeros(NUM_BINS)
        self._gains = np.zeros(NUM_BINS)
        """Tokens offered and their summed chances, by chance, high ones first."""

    def offered(self, chances: np.ndarray, num_rows: int) -> None:
        """One round: the chances [n] of all tokens offered to so many rows."""
        clipped = np.clip(chances, 0.0, 1.0)
        bins = np.minimum((NUM_BINS * (1.0 - clipped)).astype(int), NUM_BINS - 1)
        self._num_rows = FORGET * self._num_rows + num_rows
        self._tokens = FORGET * self._tokens + np.bincount(bins, minlength=NUM_BINS)
        self._gains = FORGET * self._gains + np.bincount(bins, clipped, NUM_BINS)

    def price(self, num_rows: int, cost: StepCost) -> tuple[float, float]:
        """(price, expected rate over that of plain decoding) for a batch of rows."""
        a_row = 1.0 / max(self._num_rows, 1e-9)
        scored = num_rows * (1.0 + a_row * np.concatenate([[0.0], self._tokens.cumsum()]))
        emitted = num_rows * (1.0 + a_row * np.concatenate([[0.0], self._gains.cumsum()]))
        rates = emitted / cost.hoped(scored)  # [NUM_BINS + 1] of scoring so many bins
        best = int(rates.argmax())
        dropped = np.flatnonzero(self._tokens[best:])
        highest = 1.0 - best / NUM_BINS if best else np.inf  # what the last bin kept still holds
        lowest = 1.0 - (best + dropped[0]) / NUM_BINS if len(dropped) else 0.0
        marginal = cost.slope(float(scored[best])) * float(rates[best])
        return min(max(marginal, lowest), highest), float(rates[best] / rates[0])
