"""What a forward costs by its number of tokens, learnt from the engine's own timings.

A table over powers of two, from 8 on with a middle between two of them, straight in between. On a GPU a
step costs the same up to hundreds of tokens and then grows in proportion; on a CPU it grows from the
first, faster where a tile of the kernels is full: no line fits both ends, and what was measured at a
full batch must not decide for its last row.

The entries are tracked by a Kalman filter. A timing moves the entries around it by as much as they are
uncertain; all entries may change together, by a machine that others use too and by contexts that grow;
and an entry that was never near a timing follows its neighbours, a little above them.

Asking is cheap and done hundreds of times a second: what a timing changes is worked out at the first
question behind it.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

KNOTS = np.array(sorted({2.0**n for n in range(18)} | {3.0 * 2.0**n for n in range(2, 16)}))
"""1, 2, 4, 8, 12, 16, 24, ... 131,072 tokens."""
_KNOTS: list[float] = KNOTS.tolist()
NUM_KNOTS = len(KNOTS)
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
SMALLEST_VARIANCE = 1e-18
OUTLIER = 3.0
"""A timing counts as at most this many standard deviations from what was expected."""
NEW_LEVEL = 2
"""So many that went further in a row say that the machine has changed, or one entry if they are those
of one entry: then they may move by as much as the next timing says. Else a slow first step is believed
for hundreds of timings."""
MOST_MOVED = 4.0
"""That much at most, relative."""


class Curve:
    """A non-decreasing function of a number of tokens, straight between KNOTS and level beyond."""

    def __init__(self, values: Sequence[float]) -> None:
        self._floats = values  # [NUM_KNOTS]
        self._values = np.array(values)

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
        octaves = np.log2(KNOTS[1:] / KNOTS[:-1])
        rises = np.concatenate([[1.0], self._mean[1:] * octaves**0.5])  # as uncertain as it is high
        steps = np.tril(np.ones((NUM_KNOTS, NUM_KNOTS))) * rises
        self._covariance = steps @ steps.T
        self._surprises, self._surprises_at = 0, [0] * NUM_KNOTS
        """Timings in a row that counted for less than they said: of all, and by entry."""
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
        error = seconds - expected
        together, apart = TOGETHER * mean, APART * mean
        if self._surprises >= NEW_LEVEL:
            together = mean * min(abs(error) / expected, MOST_MOVED)
        elif self._surprises_at[below] >= NEW_LEVEL:
            apart[entries] = error
        covariance += together[:, None] * together
        covariance.flat[:: NUM_KNOTS + 1] += apart**2  # the diagonal
        gain = covariance[:, entries] @ weights
        variance = max(float(weights @ gain[entries]), 0.0) + (TIMING_NOISE * expected) ** 2
        most = OUTLIER * variance**0.5
        surprising = abs(error) > most
        self._surprises = self._surprises + 1 if surprising else 0
        self._surprises_at[below] = self._surprises_at[below] + 1 if surprising else 0
        error = min(max(error, -most), most)
        self._mean = np.maximum(mean + gain * (error / variance), 1e-9)
        covariance -= gain[:, None] * (gain / variance)
        self._seconds = self._hoped = None

    @property
    def seconds(self) -> Curve:
        """Predicted seconds; of no meaning before anything was measured."""
        if self._seconds is None:
            self._seconds = Curve(rising(self._mean, self._covariance.diagonal()))
        return self._seconds

    @property
    def hoped(self) -> Curve:
        """Seconds at the cheap end of what was measured. What seems to pay by these is tried, and then
        known (optimism in the face of uncertainty)."""
        if self._hoped is None:
            variance = self._covariance.diagonal()
            hoped = self._mean - HOPE * np.sqrt(np.maximum(variance, 0.0))
            self._hoped = Curve(rising(np.maximum(hoped, 0.05 * self._mean), variance))
        return self._hoped

    def slope(self, tokens: float) -> float:
        """Hoped seconds that one more token adds, over the next quarter as many."""
        step = max(1.0, tokens / 4)
        return (self.hoped(tokens + step) - self.hoped(tokens)) / step


def rising(values: np.ndarray, variances: np.ndarray) -> list[float]:
    """The non-decreasing values nearest to these, each deviation squared over its variance (pool
    adjacent violators): where two contradict each other the better known one holds. Entries that were
    never near a timing fall behind those that were, and must not lift them: plain steps were believed
    to be 12% dearer than they were."""
    runs: list[tuple[float, float, int]] = []  # (value, weight, how many)
    for value, variance in zip(values.tolist(), variances.tolist()):
        weight, num = 1.0 / max(variance, SMALLEST_VARIANCE), 1
        while runs and runs[-1][0] > value:
            before, its_weight, its_num = runs.pop()
            value = (before * its_weight + value * weight) / (its_weight + weight)
            weight, num = weight + its_weight, num + its_num
        runs.append((value, weight, num))
    return [value for value, _, num in runs for _ in range(num)]


def _between(tokens: float) -> tuple[int, float]:
    """The entry at or below a number of tokens and how far it is on the way to the next, 0 to 1."""
    below = min(max(bisect_right(_KNOTS, tokens), 1), NUM_KNOTS - 1) - 1
    at, after = _KNOTS[below], _KNOTS[below + 1]
    return below, min(max((tokens - at) / (after - at), 0.0), 1.0)
