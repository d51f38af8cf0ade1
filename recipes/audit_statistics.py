"""The statistics of an exactness audit: does what an engine emitted have the law it claims?

Every test is a pure function of arrays and returns one `Finding`: a p-value that holds at the small
levels an audit needs (fifty tests that raise one false alarm in a thousand audits have 2e-5 each),
what was seen in a stated unit, and the power: how likely a fault of a stated size would have been
found. A test without power that finds nothing has said nothing.

Where the textbook tail is too light it is not used:

- Pearson's statistic with cells expected five times exceeds its chi-square quantile at 1e-5 three
  to seventeen times too often. Its tail is computed under the multinomial law itself, by importance
  sampling from a wider one (Dirichlet-multinomial), to some ten per cent at 1e-5.
- Martingale differences d are bet on: the product of 1 + stake * d has expectation 1, however they
  depend on the past, so its inverse is a p-value (Ville; Waudby-Smith and Ramdas,
  arXiv:2010.09686). With heavy tails and known variances v given the past, the factors are
  exp(stake * d - stake^2 (d^2 / 6 + v / 3)), of expectation at most 1 whatever the tails (Delyon,
  Electronic Journal of Probability, 2009): nothing is bounded or clipped. Without either there is
  only the normal shape: see `mean_zero`.
- Two samples are compared given their pooled values, over all arrangements; ties are no matter.

Reference draws are seeded by the data: the same input gives the same answer. Not here: what is
compared, on which engine, how often.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Array = NDArray[np.float64]

LEAST_EXPECTED = 5.0
"""Cells expected less often are joined."""
SCREEN = 0.02
"""Above this no audit fails, and an approximate tail is returned as it is."""
MAX_SAMPLED_CELLS = 1000
"""With more cells the three-moment tail is within 12% at 1e-7, so it is not sampled."""
TAIL_DRAWS = 2000
"""Draws an importance-sampled tail takes: right to 10% at 1e-5, to a factor of 3 at 1e-10."""
SMALLEST_TAIL = 1e-12
"""A sampled tail is not followed further out (in the limit law) and never reported smaller."""
MAX_COUNTED = 10_000
"""Product of two sample sizes up to which the arrangements are counted, not bounded."""
UNIFORM_CELLS = 20
"""Equal cells a stream of uniforms is counted in, and the most cells for two samples."""
JOINT_CELLS = 4
"""Cells a stream is cut into when several are counted jointly."""
MAX_STREAMS = 8
"""The most streams that are counted jointly, in 4^8 cells."""
FEWEST_DIFFERENCES = 30
"""Non-zero differences (and their effective number) the normal shape needs."""
STAKES = 2.0 ** np.arange(3, -17, -1)
"""Sizes of bets, in inverse units of the differences, or of their bound (then those below 1)."""
SUM_TOLERANCE = 1e-5
"""How far the float32 sum of exact probabilities may be from 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one test found."""

    name: str
    p_value: float
    """Chance of data at least this extreme if the engine is exact (an upper bound of it)."""
    num_samples: int
    statistic: float
    effect: float
    """The deviation observed, in the unit that `detail` names."""
    detail: str
    power: float | None = None
    """Probability of a p-value below the level if the true deviation is `power_at`."""
    power_at: float | None = None

    def __post_init__(self) -> None:
        assert 0.0 <= self.p_value <= 1.0, f"{self.name}: p-value {self.p_value} outside [0, 1]"

    def to_json(self) -> dict[str, Any]:
        """The fields; a number that JSON has no word for (infinity, NaN) becomes null."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


def family_level(total_false_alarm_rate: float, num_tests: int) -> float:
    """The level of each of `num_tests` tests, dependent or not (Bonferroni)."""
    if not 0 < total_false_alarm_rate < 1:
        raise ValueError(
            f"total_false_alarm_rate={total_false_alarm_rate}: expected a rate in (0, 1)"
        )
    if num_tests < 1:
        raise ValueError(f"num_tests={num_tests}: expected at least one test")
    return total_false_alarm_rate / num_tests


def verdict(findings: Sequence[Finding], total_false_alarm_rate: float) -> list[str]:
    """Names of the tests that fail; an exact engine fails any with at most the given rate."""
    level = family_level(total_false_alarm_rate, len(findings))
    return [finding.name for finding in findings if finding.p_value < level]


def chi_square(
    name: str,
    counts: Mapping[Any, int] | ArrayLike,  # id -> count, or [V]
    probs: Mapping[Any, float] | ArrayLike,  # id -> probability, or [V]
    level: float,
    tv: float,
) -> Finding:
    """Whether counts are independent draws from exact probabilities; effect: total variation.

    Cells expected fewer than five times are joined, most probable first. An id of probability
    exactly 0 (or absent from `probs`) that was seen makes the p-value 0.

    Power: Pearson's statistic is then about noncentral chi-square, with noncentrality n * sum (r -
    p)^2 / p >= n * (sum |r - p|)^2 = 4 n tv^2 (Cauchy-Schwarz) for a law r at total variation `tv`
    from p over the joined cells. What moves within one joined cell is not seen.
    """
    law = _counted_law(name, counts, probs)
    num = int(law.counts.sum())
    if impossible := np.flatnonzero((law.probs == 0) & (law.counts > 0)).tolist():
        seen = (f"id {law.ids[i]} came {int(law.counts[i])} times" for i in impossible[:3])
        return Finding(
            name, 0.0, num, math.inf, float(law.counts[impossible].sum()) / num,
            f"{len(impossible)} ids of probability exactly 0 were emitted: {', '.join(seen)}",
            1.0, tv,
        )  # fmt: skip
    possible = law.probs > 0
    observed, expected = _joined(law.counts[possible], num * law.probs[possible])
    distance = float(np.abs(observed - expected).sum()) / (2 * num)
    detail = f"{num} draws in {len(expected)} cells, total variation {distance:.2g} observed"
    return Finding(
        name, _pearson_tail(observed, expected), num, float(_pearson(observed, expected)), distance,
        detail, _pearson_power(expected, 4 * num * tv**2, level), tv,
    )  # fmt: skip


def uniformity(
    name: str,
    values: ArrayLike,  # [n] in [0, 1)
    level: float,
    shift: float,
) -> Finding:
    """Whether values are independent uniforms; effect: Kolmogorov-Smirnov distance.

    Kolmogorov-Smirnov by the bound 2 exp(-2 n D^2), which holds at every n and is tight where it is
    small, and a chi-square on 20 equal cells, each at half the level.

    Power at distance `shift`: the least, over the point x where the law is off by `shift`, of the
    binomial probability that the empirical distribution is off far enough at x alone.
    """
    uniforms = _uniforms(name, values).reshape(-1)
    distance, ks_tail = _kolmogorov(uniforms)
    counted_tail = _cells_tail(uniforms[:, None], UNIFORM_CELLS)
    detail = f"{len(uniforms)} values, Kolmogorov-Smirnov distance {distance:.2g} observed"
    return Finding(
        name, min(1.0, 2 * min(ks_tail, counted_tail)), len(uniforms), distance, distance,
        detail, _kolmogorov_power(len(uniforms), shift, level / 2), shift,
    )  # fmt: skip


def mean_zero(
    name: str,
    differences: ArrayLike,  # [n]
    level: float,
    effect: float,
    *,
    bounds: tuple[float, float] | None = None,
    variances: ArrayLike | None = None,  # [n]
) -> Finding:
    """Whether each difference has mean 0 given those before it; effect: the mean difference.

    `bounds` (lowest, highest) that a difference can take, known beforehand: acceptances minus their
    probabilities (-1, 1), importance weights minus one (-1, inf). With an infinite bound only means
    away from it are looked for: a mean below 0 may always be a rare giant that did not come.
    `variances`: of each difference given those before it, which the two laws give exactly. Either
    makes the p-value valid at every level and length, whatever the tails; both bet half each.

    Approximate: with neither, the p-value is 2 exp(-z^2 / 2) with z = sum d / sqrt(sum d^2), about
    sqrt(2 pi) z / 2 times the normal one. It holds for symmetric differences; rare large ones of one
    sign break it (1000 acceptances of probability .99: 4e-5 of false alarms at any level below).
    It is 1 with fewer than 30 differences, in number or in effective number (sum d^2)^2 / sum d^4.

    Power at a mean of `effect` (either sign, where both are looked for): normal, with the observed
    second moment.
    """
    values = np.asarray(differences, np.float64).reshape(-1)
    if not len(values):
        raise ValueError(f"{name}: no differences; nothing to test")
    if not effect > 0:
        raise ValueError(f"{name}: effect={effect}; expected the size of a mean, above 0")
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        return Finding(
            name, 0.0, len(values), math.inf, math.inf,
            f"difference {bad} of {len(values)} is {values[bad]}", 1.0, effect,
        )  # fmt: skip
    num, squares = len(values), float((values**2).sum())
    z = float(values.sum()) / math.sqrt(squares) if squares else 0.0
    squares_then = squares + num * effect**2  # if the mean were `effect`
    if bounds is None and variances is None:
        p_value, how = _normal_tail(values, z)
        margin = num * effect / math.sqrt(squares_then) - math.sqrt(2 * math.log(2 / level))
        power = float(special.ndtr(margin)) if how == "normal" else 0.0
    else:
        bets = [
            *([] if bounds is None else _bounded_bets(name, values, squares_then, bounds)),
            *([] if variances is None else _variance_bets(name, values, squares_then, variances)),
        ]
        log_mean = float(special.logsumexp([bet.log_wealth for bet in bets])) - math.log(len(bets))
        p_value = math.exp(min(0.0, -log_mean))
        one_sided = len({bet.stake > 0 for bet in bets}) == 1
        how = f"{len(bets)} bets on {'one side' if one_sided else 'both sides'} of 0"
        power = _betting_power(bets, num, squares_then, level, effect)
    mean = float(values.mean())
    detail = f"{num} differences, mean {mean:.2g} observed, z {z:.2f} ({how})"
    return Finding(name, p_value, num, z, mean, detail, power, effect)


def two_sample(
    name: str,
    a: ArrayLike,  # [n]
    b: ArrayLike,  # [m]
    level: float,
    tv: float | None = None,
) -> Finding:
    """Whether two samples come from one law, ties welcome; effect: Kolmogorov-Smirnov distance.

    Kolmogorov-Smirnov (exact over all arrangements of small samples, conservative with ties and of
    large ones) and a chi-square on at most 20 cells of neighbouring values, its tail taken over the
    arrangements of the pooled sample; each at half the level.

    Power, at total variation `tv` over the cells: as for `chi_square`, with n m / (n + m) draws
    (Kolmogorov-Smirnov may add to it).
    """
    left, right = (np.asarray(sample, np.float64).reshape(-1) for sample in (a, b))
    if not len(left) or not len(right):
        raise ValueError(f"{name}: {len(left)} against {len(right)} values; nothing to compare")
    if np.isnan(left).any() or np.isnan(right).any():
        raise ValueError(f"{name}: a sample holds NaN; expected numbers that can be ordered")
    left, right = sorted((left, right), key=len)
    num, share = len(left) + len(right), len(left) / (len(left) + len(right))
    values, codes = np.unique(np.concatenate([left, right]), return_inverse=True)
    both = np.bincount(codes, minlength=len(values))  # [distinct]
    fewer = np.bincount(codes[: len(left)], minlength=len(values))  # [distinct], of the shorter
    steps = np.cumsum(fewer) / len(left) - np.cumsum(both - fewer) / len(right)
    distance = float(np.abs(steps).max())
    starts = _starts(both, max(LEAST_EXPECTED / share, num / UNIFORM_CELLS))
    both, fewer = np.add.reduceat(both, starts), np.add.reduceat(fewer, starts)  # [cells]
    tails = _two_sample_kolmogorov_tail(left, right, distance), _arrangement_tail(fewer, both)
    noncentrality = 4 * len(left) * len(right) / num * (tv or 0.0) ** 2
    return Finding(
        name, min(1.0, 2 * min(tails)), num, distance, distance,
        f"{len(left)} against {len(right)} values in {len(both)} cells, "
        f"Kolmogorov-Smirnov distance {distance:.2g} observed",
        None if tv is None else _pearson_power(both * share, noncentrality, level / 2), tv,
    )  # fmt: skip


def independence(
    name: str,
    uniforms: ArrayLike,  # [n, k]
    level: float,
    correlation: float | None = None,
) -> Finding:
    """Whether k streams are uniform and independent, of each other and of the row before.

    Uniformity of each (Kolmogorov-Smirnov), a chi-square on the 4^k joint cells, and correlations:
    of every pair in a row, and of every stream with every stream of the next row. The smallest
    p-value counts, times their number. Effect: the largest correlation in absolute value.

    A correlation is taken given one of its columns: a weighted sum of uniforms, whose tail is below
    the normal one. Power, at a correlation of `correlation` in one pair: normal.
    """
    columns = _uniforms(name, uniforms)
    if columns.ndim != 2 or columns.shape[1] > MAX_STREAMS:
        raise ValueError(
            f"{name}: uniforms of shape {columns.shape}; expected [n, k] with k <= {MAX_STREAMS}"
        )
    num, k = columns.shape
    centred = columns - 0.5  # [n, k]
    tails = {f"uniformity of stream {i}": _kolmogorov(columns[:, i])[1] for i in range(k)}
    tails["joint cells"] = _cells_tail(columns, JOINT_CELLS)
    scores = {
        f"streams {i} and {j}": _correlation_score(centred[:, i], centred[:, j])
        for i in range(k)
        for j in range(i)
    } | {
        f"stream {i} and the next row's stream {j}": _correlation_score(
            centred[:-1, i], centred[1:, j]
        )
        for i in range(k)
        for j in range(k)
    }
    tails |= {key: float(2 * special.ndtr(-abs(score))) for key, score in scores.items()}
    worst = min(tails, key=lambda key: tails[key])
    largest = max(abs(score) for score in scores.values())
    power = None
    if correlation is not None:
        needed = -float(special.ndtri(level / len(tails) / 2))
        power = float(special.ndtr(math.sqrt(num) * correlation - needed))
    return Finding(
        name, min(1.0, len(tails) * tails[worst]), num, largest, largest / math.sqrt(num),
        f"{k} streams of {num}, {len(tails)} tests, least likely: {worst}; "
        f"correlation {largest / math.sqrt(num):.2g} at most",
        power, correlation,
    )  # fmt: skip


def largest_gap(
    name: str,
    differences: ArrayLike,  # [n]
    tolerance: float,
) -> Finding:
    """Whether no difference is beyond `tolerance`; effect: the largest. No chance is involved: the
    p-value is 1 or 0, and a difference that is not finite is beyond every tolerance."""
    gaps = np.abs(np.asarray(differences, np.float64).reshape(-1))
    if not len(gaps):
        raise ValueError(f"{name}: no differences; nothing to compare")
    largest = float(gaps.max()) if np.isfinite(gaps).all() else math.inf
    return Finding(
        name, float(math.isfinite(largest) and largest <= tolerance), len(gaps), largest, largest,
        f"{len(gaps)} differences, largest {largest:.2g}, tolerance {tolerance:.2g}",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _CountedLaw:
    """Counts and exact probabilities over the ids that either names."""

    ids: list[Any]
    counts: Array  # [ids]
    probs: Array  # [ids], sums to 1


def _counted_law(
    name: str, counts: Mapping[Any, int] | ArrayLike, probs: Mapping[Any, float] | ArrayLike
) -> _CountedLaw:
    if isinstance(counts, Mapping) or isinstance(probs, Mapping):
        count_of, prob_of = _by_id(counts), _by_id(probs)
        ids = list(prob_of | count_of)
        observed = np.array([count_of.get(i, 0) for i in ids], np.float64)
        exact = np.array([prob_of.get(i, 0.0) for i in ids], np.float64)
    else:
        observed, exact = np.asarray(counts, np.float64), np.asarray(probs, np.float64)
        ids = list(range(len(exact)))
        if observed.shape != exact.shape:
            raise ValueError(f"{name}: counts {observed.shape} for probabilities {exact.shape}")
    if not (observed >= 0).all() or (observed % 1).any():
        raise ValueError(f"{name}: a count is negative or no integer")
    if not observed.sum():
        raise ValueError(f"{name}: no observations; nothing to test")
    if not (exact >= 0).all() or not abs(exact.sum() - 1) <= SUM_TOLERANCE:
        raise ValueError(
            f"{name}: probabilities sum to {exact.sum()}; expected non-negative ones that sum to 1"
        )
    return _CountedLaw(ids, observed, exact / exact.sum())


def _by_id(side: Mapping[Any, float] | ArrayLike) -> dict[Any, float]:
    if isinstance(side, Mapping):
        return dict(side)
    return dict(enumerate(np.asarray(side, np.float64).reshape(-1).tolist()))


def _uniforms(name: str, values: ArrayLike) -> Array:
    uniforms = np.asarray(values, np.float64)
    if not uniforms.size:
        raise ValueError(f"{name}: no values; nothing to test")
    if outside := uniforms[~((uniforms >= 0) & (uniforms < 1))].tolist():
        raise ValueError(f"{name}: {len(outside)} values such as {outside[0]} are not in [0, 1)")
    return uniforms


def _starts(weights: NDArray[Any], least: float) -> list[int]:
    """Where runs of neighbours of weight >= `least` begin; what is left over joins the last."""
    cumulative = np.cumsum(weights)
    starts, before = [0], 0.0
    least *= 1 - 1e-9  # n * p rounds
    while before + least <= cumulative[-1]:
        end = int(np.searchsorted(cumulative, before + least))
        before = float(cumulative[end])
        starts.append(end + 1)
    return starts[: max(1, len(starts) - 1)]


def _joined(observed: Array, expected: Array) -> tuple[Array, Array]:
    """Counts over cells expected at least five times each, most probable first."""
    order = np.argsort(-expected, kind="stable")
    starts = _starts(expected[order], LEAST_EXPECTED)
    return np.add.reduceat(observed[order], starts), np.add.reduceat(expected[order], starts)


def _pearson(observed: NDArray[Any], expected: NDArray[Any]) -> Any:
    """Pearson's statistic over the last axis, [..., cells] -> [...]."""
    return ((observed - expected) ** 2 / expected).sum(-1)


class _PearsonLaw:
    """The gamma law with the mean and variance of Pearson's statistic (Haldane, 1937) and the third
    moment of its Poisson form: its tail is up to a few times too light for few cells, right for
    many. For at least two cells."""

    def __init__(self, expected: NDArray[Any]) -> None:
        num, cells = expected.sum(), len(expected)
        variance = 2 * (cells - 1) + (1 / expected).sum() - (cells**2 + 2 * cells - 2) / num
        third = 8 * (cells - 1) + (22 / expected + 1 / expected**2).sum()
        self._shape, self._scale = 4 * variance**3 / third**2, third / (2 * variance)
        self._start = cells - 1 - self._shape * self._scale

    def tail(self, reached: float) -> float:
        scaled = max(0.0, (reached - self._start) / self._scale)
        return float(special.gammaincc(self._shape, scaled))

    def quantile(self, level: float) -> float:
        """What is exceeded with probability `level`."""
        return float(self._start + self._scale * special.gammainccinv(self._shape, level))


def _pearson_tail(observed: Array, expected: Array) -> float:
    """Chance that multinomial counts of these expectations have Pearson's statistic this large."""
    num, freedom = int(observed.sum()), len(expected) - 1
    if not freedom:
        return 1.0
    rough = _PearsonLaw(expected).tail(_pearson(observed, expected))
    if rough > SCREEN or freedom >= MAX_SAMPLED_CELLS:
        return rough

    def log_law(counts: NDArray[np.int64]) -> Array:  # [draws, cells] -> [draws]
        ways = special.gammaln(num + 1) - special.gammaln(counts + 1).sum(-1)
        return ways + special.xlogy(counts, expected / num).sum(-1)

    return _sampled_tail(observed, expected, log_law)


def _arrangement_tail(fewer: NDArray[np.int64], both: NDArray[np.int64]) -> float:
    """Chance that `fewer.sum()` of the pooled values, drawn without replacement, are spread over
    the cells [cells] as unevenly as `fewer`."""
    num, size, freedom = int(both.sum()), int(fewer.sum()), len(both) - 1
    if not freedom:
        return 1.0
    expected = both * (size / num)  # [cells]
    rest = 1 - size / num  # what drawing without replacement leaves of the variance
    rough = float(special.chdtrc(freedom, _pearson(fewer, expected) / rest))
    if rough > SCREEN:
        return rough

    def log_law(counts: NDArray[np.int64]) -> Array:  # [draws, cells] -> [draws]
        possible = (counts <= both).all(-1)
        ways = _log_choose(both, np.minimum(counts, both)).sum(-1) - _log_choose(num, size)
        return np.where(possible, ways, -np.inf)

    return _sampled_tail(fewer, expected, log_law, rest)


def _log_choose(among: ArrayLike, chosen: ArrayLike) -> Array:
    among, chosen = np.asarray(among), np.asarray(chosen)
    left = special.gammaln(chosen + 1) + special.gammaln(among - chosen + 1)
    return np.asarray(special.gammaln(among + 1) - left)


def _sampled_tail(
    observed: NDArray[Any],  # [cells]
    expected: NDArray[Any],  # [cells]
    log_law: Callable[[NDArray[np.int64]], Array],  # [draws, cells] -> [draws]
    variance: float = 1.0,
) -> float:
    """Chance of Pearson's statistic this large under a law of counts whose variances are `variance`
    times the multinomial ones.

    Drawn from the Dirichlet-multinomial law under which the statistic is about as large as here,
    and weighted by the ratio of the two laws; two standard errors are added.
    """
    num, freedom = int(observed.sum()), len(expected) - 1
    furthest = variance * float(special.chdtri(freedom, SMALLEST_TAIL))
    reached = min(float(_pearson(observed, expected)), furthest)
    wider = max(reached / freedom, 1.05)  # growth of the variance over the multinomial one
    alpha = expected / (wider - 1)  # [cells]
    generator = np.random.default_rng([int(count) for count in observed])
    counts = generator.multinomial(num, generator.dirichlet(alpha, size=TAIL_DRAWS))
    log_drawn = (
        special.gammaln(num + 1)
        + special.gammaln(alpha.sum())
        - special.gammaln(alpha.sum() + num)
        + (special.gammaln(counts + alpha) - special.gammaln(alpha)).sum(-1)
        - special.gammaln(counts + 1).sum(-1)
    )  # [draws]
    beyond = _pearson(counts, expected) >= reached * (1 - 1e-9)  # [draws]
    weights = np.exp(log_law(counts) - log_drawn) * beyond
    tail = float(weights.mean() + 2 * weights.std() / math.sqrt(TAIL_DRAWS))
    return min(1.0, max(SMALLEST_TAIL, tail))


def _pearson_power(expected: NDArray[Any], noncentrality: float, level: float) -> float:
    """Half the level, because the three-moment quantile is short of the true one for few cells."""
    freedom = len(expected) - 1
    if not freedom:
        return 0.0
    needed = _PearsonLaw(expected).quantile(level / 2)
    return float(1 - special.chndtr(needed, freedom, noncentrality))


def _kolmogorov(values: Array) -> tuple[float, float]:
    """(distance from uniform, bound of its tail at any n) of values [n] (Massart, 1990)."""
    places, num = np.sort(values), len(values)
    steps = np.arange(num + 1) / num  # [n + 1]
    distance = float(max((steps[1:] - places).max(), (places - steps[:-1]).max()))
    return distance, min(1.0, 2 * math.exp(-2 * num * distance**2))


def _two_sample_kolmogorov_tail(left: Array, right: Array, distance: float) -> float:
    """Exact where the arrangements can be counted fast, else the bound of Wei and Dudley (2012) with
    the constant e: proved for equal sizes, found to hold (with 2) for all unequal ones tried."""
    if len(left) * len(right) <= MAX_COUNTED:
        return float(stats.ks_2samp(left, right, method="exact").pvalue)
    harmonic = len(left) * len(right) / (len(left) + len(right))
    return min(1.0, math.exp(1 - 2 * harmonic * distance**2))


def _kolmogorov_power(num: int, shift: float, level: float) -> float:
    needed = math.sqrt(math.log(2 / level) / (2 * num))
    points = np.linspace(0, 1 - shift, 201)
    off = np.minimum(points + shift, 1.0)
    above = special.bdtrc(np.minimum(np.floor(num * (points + needed)), num), num, off)
    return float(above.min())


def _cells_tail(values: Array, cells: int) -> float:
    """Chi-square tail of values [n, k] in [0, 1) counted in cells^k equal boxes."""
    num, k = values.shape
    box = (values * cells).astype(np.int64) @ cells ** np.arange(k)  # [n]
    observed = np.bincount(box, minlength=cells**k).astype(np.float64)
    return _pearson_tail(*_joined(observed, np.full(cells**k, num / cells**k)))


def _correlation_score(given: Array, other: Array) -> float:
    """sum given * other over its standard deviation when `other` + 1/2 is uniform."""
    spread = math.sqrt(float((given**2).sum()) / 12)
    return float((given * other).sum()) / spread if spread else 0.0


def _normal_tail(values: Array, z: float) -> tuple[float, str]:
    """(2 exp(-z^2 / 2) or 1, why)."""
    nonzero = int(np.count_nonzero(values))
    if nonzero < FEWEST_DIFFERENCES:
        return 1.0, f"only {nonzero} are not 0: too few to say anything"
    shares = (values / np.abs(values).max()) ** 2  # [n]
    effective = float(shares.sum() ** 2 / (shares**2).sum())
    if effective < FEWEST_DIFFERENCES:
        return 1.0, f"only {effective:.0f} carry the squares: too few to say anything"
    return min(1.0, 2 * math.exp(-(z**2) / 2)), "normal"


@dataclass(frozen=True, slots=True)
class _Bet:
    """One stake on every difference: exp(log_wealth) has expectation at most 1."""

    stake: float
    log_wealth: float
    cost: float
    """log_wealth is at least stake * sum - cost, if the squares are as assumed."""


def _bounded_bets(
    name: str, values: Array, squares_then: float, bounds: tuple[float, float]
) -> list[_Bet]:
    """log(1 + stake * d), which is >= x - x^2 (-log(1 - u) - u) / u^2 for x = stake * d >= -u."""
    low, high = bounds
    if not (low <= values.min() and values.max() <= high and low < 0 < high):
        raise ValueError(
            f"{name}: differences in [{values.min()}, {values.max()}]; bounds say {bounds}"
        )
    limits = [limit for limit in (-low, -high) if math.isfinite(limit)]
    if not limits:
        raise ValueError(f"{name}: bounds {bounds} leave no side to bet on; give a finite one")
    return [
        _Bet(
            stake := float(part) / limit,
            float(np.log1p(stake * values).sum()),
            float(-np.log1p(-part) - part) * squares_then / limit**2,
        )
        for limit in limits
        for part in STAKES[STAKES < 1]
    ]


def _variance_bets(
    name: str, values: Array, squares_then: float, variances: ArrayLike
) -> list[_Bet]:
    """stake * d - stake^2 (d^2 / 6 + variance / 3)."""
    known = np.asarray(variances, np.float64).reshape(-1)
    if known.shape != values.shape or not (known >= 0).all() or not np.isfinite(known).all():
        raise ValueError(
            f"{name}: need one finite variance >= 0 for each of {len(values)} differences"
        )
    total, squares, spread = float(values.sum()), float((values**2).sum()), float(known.sum())
    return [
        _Bet(
            stake,
            stake * total - stake**2 * (squares / 6 + spread / 3),
            stake**2 * (squares_then / 6 + spread / 3),
        )
        for stake in (*STAKES.tolist(), *(-STAKES).tolist())
    ]


def _betting_power(
    bets: Sequence[_Bet], num: int, squares_then: float, level: float, effect: float
) -> float:
    """Chance that the best bet alone pays for the p-value, on the worse of the sides bet on."""
    log_needed = math.log(len(bets) / level)
    best: dict[bool, float] = {}
    for bet in bets:
        margin = num * effect - (log_needed + bet.cost) / abs(bet.stake)
        side = bet.stake > 0
        best[side] = max(margin, best.get(side, -math.inf))
    return float(special.ndtr(min(best.values()) / math.sqrt(squares_then)))
