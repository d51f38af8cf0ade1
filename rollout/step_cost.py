"""What a forward costs by its number of tokens, learnt from the engine's own timings.

A table over powers of two, straight in between. On a GPU a step costs the same up to hundreds of tokens
and then grows in proportion; on a CPU it grows from the first: no line fits both ends, and what was
measured at a full batch must not decide for its last row.

The entries are tracked by a Kalman filter. A timing moves the entries around it by as much as they are
uncertain; all entries may change together, by a machine that others use too and by contexts that grow;
and an entry that was never near a timing follows its neighbours, a little above them.
"""

import numpy as np

KNOTS = 2.0 ** np.arange(18)
"""1 to 131,072 tokens."""
DIAGONAL = np.diag_indices(len(KNOTS))
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


class StepCost:
    """Seconds of a step by the tokens in it, a non-decreasing function."""

    def __init__(self) -> None:
        self._mean = 1.0 + FREE_SLOPE * KNOTS  # seconds, once something was measured
        rises = np.concatenate([[1.0], self._mean[1:]])  # each as uncertain as it is high
        steps = np.tril(np.ones((len(KNOTS), len(KNOTS)))) * rises
        self._covariance = steps @ steps.T
        self.known = False
        """Something was measured."""

    def add(self, tokens: float, seconds: float) -> None:
        """Takes in a measured step."""
        near = self._near(tokens)
        if not self.known:
            scale = seconds / float(near @ self._mean)
            self._mean, self._covariance = scale * self._mean, scale**2 * self._covariance
            self.known = True
        mean, expected = self._mean, float(near @ self._mean)
        covariance = self._covariance + (TOGETHER * mean)[:, None] * (TOGETHER * mean)
        covariance[DIAGONAL] += (APART * mean) ** 2
        gain = covariance @ near
        variance = float(near @ gain) + (TIMING_NOISE * expected) ** 2
        most = OUTLIER * variance**0.5
        error = min(max(seconds - expected, -most), most)
        self._mean = np.maximum(mean + gain * (error / variance), 1e-9)
        self._covariance = covariance - gain[:, None] * (gain / variance)

    def seconds(self, tokens: float | np.ndarray) -> np.ndarray:
        """Predicted seconds, the shape of `tokens`; of no meaning before anything was measured."""
        return np.interp(np.asarray(tokens, float), KNOTS, np.maximum.accumulate(self._mean))

    def hoped(self, tokens: float | np.ndarray) -> np.ndarray:
        """Seconds at the cheap end of what was measured. What seems to pay by these is tried, and then
        known (optimism in the face of uncertainty)."""
        deviation = np.sqrt(np.maximum(np.diag(self._covariance), 0.0))
        low = np.maximum(self._mean - HOPE * deviation, 0.05 * self._mean)
        return np.interp(np.asarray(tokens, float), KNOTS, np.maximum.accumulate(low))

    def slope(self, tokens: float) -> float:
        """Hoped seconds that one more token adds, over the next quarter as many."""
        step = max(1.0, tokens / 4)
        here, there = self.hoped(np.array([tokens, tokens + step]))
        return float(there - here) / step

    def _near(self, tokens: float) -> np.ndarray:
        """[KNOTS] weights of the entries around a number of tokens, sum 1."""
        below = min(int(np.log2(max(tokens, 1.0))), len(KNOTS) - 2)
        share = min((tokens - KNOTS[below]) / KNOTS[below], 1.0)
        near = np.zeros(len(KNOTS))
        near[below], near[below + 1] = 1.0 - share, share
        return near
