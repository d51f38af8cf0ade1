"""What a forward costs by its number of tokens, learnt from the engine's own timings.

A table over powers of two, straight in between. On a GPU a step costs the same up to hundreds of tokens
and then grows in proportion; on a CPU it grows from the first: no line fits both ends, and what was
measured at a full batch must not decide for its last row.

The entries are tracked by a Kalman filter. A timing moves the entries around it by as much as they are
uncertain; all entries may change together, by a machine that others use too and by contexts that grow;
and an entry that was never near a timing follows its neighbours, a little above them.

Asking is cheap and done hundreds of times a second: what a timing changes is worked out at the first
question behind it.
"""

import numpy as np

NUM_KNOTS = 18
KNOTS = 2.0 ** np.arange(NUM_KNOTS)
"""1 to 131,072 tokens."""
FREE_SLOPE = 0.02
"""Before it was tried each further token is believed to add this share of a one-token step: too little
rather than too much, since only what seems to pay is ever tried."""
TIMING_NOISE = 0.05
"""Of one timing, relative."""
TOGETHER = 0.02
APART = 0.0005
"""How far all entries, and each of them, may drift from one timing to the next, relative."""
HOPE = 0.5
"""Standard deviations that an uncertain entry is believed to be cheaper than its estimate."""
OUTLIER = 3.0
"""A timing counts as at most this many standard deviations from what was expected."""


class Curve:
    """A non-decreasing function of a number of tokens, straight between KNOTS and level beyond."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = np.maximum.accumulate(values)  # [NUM_KNOTS]
        self._floats: list[float] = self._values.tolist()

    def __call__(self, tokens: float) -> float:
        below, share = _between(tokens)
        low = self._floats[below]
        return low + share * (self._floats[below + 1] - low)

    def at(self, tokens: np.ndarray) -> np.ndarray:
        """The same for many numbers, in their shape."""
        return np.interp(tokens, KNOTS, self._values)


class StepCost:
    """Seconds of a step by the tokens in it; `free_slope` as FREE_SLOPE."""

    def __init__(self, free_slope: float = FREE_SLOPE) -> None:
        self._mean = 1.0 + free_slope * KNOTS  # seconds, once something was measured
        rises = np.concatenate([[1.0], self._mean[1:]])  # each as uncertain as it is high
        steps = np.tril(np.ones((NUM_KNOTS, NUM_KNOTS))) * rises
        self._covariance = steps @ steps.T
        self.known = False
        """Something was measured."""
        self._seconds: Curve | None = None
        self._hoped: Curve | None = None

    def add(self, tokens: float, seconds: float) -> None:
        """Takes in a measured step."""
        below, share = _between(tokens)
        entries, weights = slice(below, below + 2), np.array([1.0 - share, share])
        if not self.known:
            scale = seconds / float(weights @ self._mean[entries])
            self._mean, self._covariance = scale * self._mean, scale**2 * self._covariance
            self.known = True
        mean, covariance = self._mean, self._covariance
        expected = float(weights @ mean[entries])
        together = TOGETHER * mean
        covariance += together[:, None] * together
        covariance.flat[:: NUM_KNOTS + 1] += (APART * mean) ** 2  # the diagonal
        gain = covariance[:, entries] @ weights
        variance = float(weights @ gain[entries]) + (TIMING_NOISE * expected) ** 2
        most = OUTLIER * variance**0.5
        error = min(max(seconds - expected, -most), most)
        self._mean = np.maximum(mean + gain * (error / variance), 1e-9)
        covariance -= gain[:, None] * (gain / variance)
        self._seconds = self._hoped = None

    @property
    def seconds(self) -> Curve:
        """Predicted seconds; of no meaning before anything was measured."""
        if self._seconds is None:
            self._seconds = Curve(self._mean)
        return self._seconds

    @property
    def hoped(self) -> Curve:
        """Seconds at the cheap end of what was measured. What seems to pay by these is tried, and then
        known (optimism in the face of uncertainty)."""
        if self._hoped is None:
            deviation = np.sqrt(np.maximum(self._covariance.diagonal(), 0.0))
            self._hoped = Curve(np.maximum(self._mean - HOPE * deviation, 0.05 * self._mean))
        return self._hoped

    def slope(self, tokens: float) -> float:
        """Hoped seconds that one more token adds, over the next quarter as many."""
        step = max(1.0, tokens / 4)
        return (self.hoped(tokens + step) - self.hoped(tokens)) / step


def _between(tokens: float) -> tuple[int, float]:
    """The entry at or below a number of tokens and how far it is on the way to the next, 0 to 1."""
    below = min(max(int(tokens), 1).bit_length(), NUM_KNOTS - 1) - 1
    at = 1 << below
    return below, min(max((tokens - at) / at, 0.0), 1.0)
