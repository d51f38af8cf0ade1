"""The audit's statistics: false-alarm rates by enumeration, then by seeded simulation; power; faults.

Toy laws: target P, draft Q, one drafted token. Two known faults of its acceptance are replayed.
"""

import json
import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from recipes.audit_statistics import (
    Finding,
    chi_square,
    family_level,
    independence,
    largest_gap,
    mean_zero,
    two_sample,
    uniformity,
    verdict,
)

Array = NDArray[np.float64]

P = np.array([0.10, 0.40, 0.30, 0.20])
Q = np.array([0.60, 0.25, 0.10, 0.05])
RESIDUAL = np.array([0.0, 0.3, 0.4, 0.3])  # (0, .15, .20, .15) / .5
LEVEL = 1e-4
LEVELS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8)


# False alarms, enumerated.


def compositions(num: int, cells: int) -> Iterator[tuple[int, ...]]:
    if cells == 1:
        yield (num,)
        return
    for first in range(num + 1):
        yield from ((first, *rest) for rest in compositions(num - first, cells - 1))


def false_alarm_rates(chances: Array, p_values: Array) -> Array:
    """P(p <= level) / level for each of LEVELS."""
    return np.array([chances[p_values <= level].sum() / level for level in LEVELS])


SPARSE = [(20, (0.25,) * 4), (60, (0.09, 0.09, 0.82)), (100, (0.05, 0.06, 0.89))]


@pytest.mark.parametrize(("num", "probs"), SPARSE)
def test_chi_square_keeps_every_level_where_cells_are_expected_five_times(
    num: int, probs: tuple[float, ...]
) -> None:
    law = stats.multinomial(num, probs)
    outcomes = np.array(list(compositions(num, len(probs))))
    outcomes = outcomes[law.pmf(outcomes) > 1e-14]
    p_values = np.array([chi_square("x", c, probs, LEVEL, 0.1).p_value for c in outcomes])
    assert false_alarm_rates(law.pmf(outcomes), p_values).max() <= 1


def test_the_textbook_tail_would_not_keep_them() -> None:
    """Negative control: the limit law of the same statistic."""
    num, probs = SPARSE[2]
    outcomes = np.array(list(compositions(num, 3)))
    p_values = stats.chisquare(outcomes, num * np.array(probs), axis=1).pvalue
    rates = false_alarm_rates(stats.multinomial(num, probs).pmf(outcomes), p_values)
    assert rates[2] > 4 and rates[3] > 10


BINARY = [(0.5, 60), (0.9, 60), (0.99, 1000), (0.001, 300)]


def binary_false_alarm_rates(prob: float, num: int, kind: str, scale: float = 1.0) -> Array:
    """P(p <= level) / level, over `num` draws of scale * ((one or zero) - prob)."""
    ones = np.arange(num + 1)
    chances = stats.binom.pmf(ones, num, prob)
    likely = ones[chances > 1e-14]
    bounds = {"two bounds": (-scale, scale), "one bound": (-scale * prob, math.inf)}.get(kind)
    variances = np.full(num, scale**2 * prob * (1 - prob)) if kind == "variances" else None
    p_values = []
    for count in likely:
        values = scale * (np.r_[np.ones(count), np.zeros(num - count)] - prob)
        finding = mean_zero("x", values, LEVEL, 0.1, bounds=bounds, variances=variances)
        p_values.append(finding.p_value)
    return false_alarm_rates(chances[likely], np.array(p_values))


@pytest.mark.parametrize(("prob", "num"), BINARY)
@pytest.mark.parametrize("kind", ["two bounds", "one bound", "variances"])
def test_bets_keep_every_level_however_rare_the_event(kind: str, prob: float, num: int) -> None:
    assert binary_false_alarm_rates(prob, num, kind).max() <= 1


@pytest.mark.parametrize("kind", ["one bound", "variances"])
def test_bets_keep_every_level_for_weights_that_are_a_thousand_or_nothing(kind: str) -> None:
    """w = 1000 with probability .001, else 0: E w = 1, and w - 1 is what is tested."""
    assert binary_false_alarm_rates(1e-3, 300, kind, scale=1000).max() <= 1


def test_the_normal_shape_would_not_keep_them() -> None:
    """Negative control: no giant among 300 has chance .999^300 = .74, and z = -sqrt(300)."""
    assert mean_zero("x", np.full(300, -1.0), LEVEL, 0.1).p_value < 1e-50


@pytest.mark.parametrize(("num", "both"), [(20, (14, 13, 13)), (12, (20, 25, 50)), (5, (10, 15))])
def test_two_sample_keeps_every_level_with_ties(num: int, both: tuple[int, ...]) -> None:
    """`num` of the pooled values are one sample: arrangements are hypergeometric."""
    tables = np.array([c for c in compositions(num, len(both)) if (np.array(c) <= both).all()])
    chances = stats.multivariate_hypergeom(both, num).pmf(tables)
    values = np.arange(len(both))
    p_values = [
        two_sample("x", values.repeat(table), values.repeat(both - table), LEVEL).p_value
        for table in tables
    ]
    assert false_alarm_rates(chances, np.array(p_values)).max() <= 1


# False alarms, simulated.


def martingale(rng: np.random.Generator, num: int, *, bias: float = 0.0) -> tuple[Array, Array]:
    """(accepted - probability, variances): the probability depends on the last acceptance."""
    differences, variances, prob = np.empty(num), np.empty(num), 0.5
    for i, uniform in enumerate(rng.random(num)):
        accepted = uniform < prob + bias
        differences[i], variances[i] = accepted - prob, prob * (1 - prob)
        prob = 0.8 if accepted else 0.3
    return differences, variances


def integers(rng: np.random.Generator, num: int) -> Array:
    return rng.geometric(0.1, num).clip(max=30).astype(float)


ZIPF = 1 / np.arange(1, 401)
ZIPF /= ZIPF.sum()
NULLS: dict[str, Callable[[np.random.Generator], Finding]] = {
    "chi_square": lambda r: chi_square("x", r.multinomial(2000, P), P, LEVEL, 0.1),
    "chi_square, long tail": lambda r: chi_square("x", r.multinomial(300, ZIPF), ZIPF, LEVEL, 0.1),
    "uniformity": lambda r: uniformity("x", r.random(200), LEVEL, 0.1),
    "mean_zero, bounds": lambda r: mean_zero("x", martingale(r, 60)[0], LEVEL, 0.1, bounds=(-1, 1)),
    "mean_zero, normal": lambda r: mean_zero("x", martingale(r, 100)[0], LEVEL, 0.1),
    "two_sample, ties": lambda r: two_sample("x", integers(r, 100), integers(r, 150), LEVEL),
    "two_sample, floats": lambda r: two_sample("x", r.normal(size=40), r.normal(size=30), LEVEL),
    "independence": lambda r: independence("x", r.random((330, 3)), LEVEL),
}


@cache
def null_p_values(name: str, repeats: int) -> Array:
    rng = np.random.default_rng(1)
    return np.array([NULLS[name](rng).p_value for _ in range(repeats)])


@pytest.mark.parametrize("level", [0.05, 1e-3])
@pytest.mark.parametrize("name", NULLS)
def test_false_alarms_of_an_exact_engine_are_as_rare_as_the_level(name: str, level: float) -> None:
    """2,000 exact runs: at most 139 of 100 expected, or 7 of 2 expected (four deviations)."""
    repeats = 2000
    most = level * repeats + 4 * math.sqrt(level * (1 - level) * repeats)
    assert (null_p_values(name, repeats) < level).sum() <= most


@pytest.mark.parametrize("name", [name for name in NULLS if "mean" not in name])
def test_a_test_that_never_fires_would_be_noticed(name: str) -> None:
    """Not too rare either: at least a third of the false alarms that the level allows. (Bets, good
    under any dependence, allow themselves fewer; their power is tested below.)"""
    assert (null_p_values(name, 2000) < 0.05).mean() > 0.05 / 3


# Power.

POWER_LEVEL = 1e-3


def shifted(tv: float) -> Array:
    """P with tv moved from {2, 3} to {0, 1}, in proportion: the least visible way to move it."""
    return P * np.where(np.arange(4) < 2, 1 + 2 * tv, 1 - 2 * tv)


def off_by(rng: np.random.Generator, shift: float) -> Array:
    """Uniforms but for `shift` of their mass, moved from just above 1/2 to just below it."""
    values = rng.random(2000)
    return np.where((values >= 0.5) & (values < 0.5 + shift), values - shift, values)


def correlated(rng: np.random.Generator, num: int, reused_rate: float) -> Array:
    """Three streams; the second repeats the first in a share of rows: that is its correlation."""
    streams = rng.random((num, 3))
    reused = rng.random(num) < reused_rate
    streams[reused, 1] = streams[reused, 0]
    return streams


def biased(rng: np.random.Generator, kind: str) -> Finding:
    differences, variances = martingale(rng, 2000, bias=0.06)
    if kind == "bounds":
        return mean_zero("x", differences, POWER_LEVEL, 0.06, bounds=(-1, 1))
    return mean_zero("x", differences, POWER_LEVEL, 0.06, variances=variances if kind else None)


FAULTY: dict[str, Callable[[np.random.Generator], Finding]] = {
    "chi_square": lambda r: chi_square(
        "x", r.multinomial(3000, shifted(0.05)), P, POWER_LEVEL, 0.05
    ),
    "uniformity": lambda r: uniformity("x", off_by(r, 0.06), POWER_LEVEL, 0.06),
    "mean_zero, bounds": lambda r: biased(r, "bounds"),
    "mean_zero, variances": lambda r: biased(r, "variances"),
    "mean_zero, normal": lambda r: biased(r, ""),
    "two_sample": lambda r: two_sample(
        "x", r.choice(4, 6000, p=shifted(0.05)), r.choice(4, 9000, p=P), POWER_LEVEL, 0.05
    ),
    "independence": lambda r: independence("x", correlated(r, 500, 0.25), POWER_LEVEL, 0.25),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_of_the_stated_size_is_found_as_often_as_stated(name: str) -> None:
    rng, repeats = np.random.default_rng(2), 100
    findings = [FAULTY[name](rng) for _ in range(repeats)]
    stated = float(np.mean([finding.power for finding in findings]))
    found = np.mean([finding.p_value < POWER_LEVEL for finding in findings])
    assert 0.5 < stated < 0.999
    assert found >= stated - 4 * math.sqrt(stated * (1 - stated) / repeats)


def test_power_grows_with_samples_and_is_nothing_without_them() -> None:
    powers = [chi_square("x", (n * P).round(), P, LEVEL, 0.02).power for n in (5, 500, 50_000)]
    assert powers[0] == 0 and powers[1] < 0.1 and powers[2] > 0.999  # type: ignore[operator]


# Faults.


def race(rng: np.random.Generator, num: int, *, reuse: bool) -> NDArray[np.int64]:
    """Tokens of one drafted position by exponential races; `reuse` runs the second race on the
    noise of the first. Only token 0 has p < q: it is kept with probability .1 / .6."""
    noise = rng.exponential(size=(num, 4))
    draft = (Q / noise).argmax(1)
    refused = (draft == 0) & (rng.random(num) >= 1 / 6)
    second = noise if reuse else rng.exponential(size=(num, 4))
    return np.where(refused, (RESIDUAL / second).argmax(1), draft)


def counted(tokens: NDArray[np.int64]) -> dict[int, int]:
    return dict(enumerate(np.bincount(tokens, minlength=4).tolist()))


# case 1
def test_noise_that_is_used_twice_is_found_in_the_emitted_law() -> None:
    """TV of (.10, .355, .318, .226) from P is .045; power says that 20,000 tokens are plenty."""
    rng = np.random.default_rng(3)
    right = chi_square("x", counted(race(rng, 20_000, reuse=False)), P, LEVEL, 0.045)
    wrong = chi_square("x", counted(race(rng, 20_000, reuse=True)), P, LEVEL, 0.045)
    assert right.power is not None and right.power > 0.999
    assert right.p_value > LEVEL > wrong.p_value
    assert wrong.effect == pytest.approx(0.045, abs=0.01)


# case 1
def test_noise_that_is_used_twice_is_found_in_the_streams() -> None:
    draft, coin, correction = np.random.default_rng(4).random((3, 200))
    assert independence("x", np.stack([draft, coin, correction], 1), LEVEL).p_value > LEVEL
    reused = np.stack([draft, coin, draft], 1)
    assert independence("x", reused, LEVEL).p_value < 1e-20


def test_noise_that_the_next_round_uses_again_is_found_in_the_streams() -> None:
    draft, coin = np.random.default_rng(5).random((2, 200))
    finding = independence("x", np.stack([draft, coin, np.roll(coin, 1)], 1), LEVEL)
    assert finding.p_value < 1e-20 and "stream 1 and the next row's stream 2" in finding.detail


def test_streams_that_depend_only_jointly_are_found() -> None:
    """The third is the sum of two modulo 1: every pair is independent."""
    first, second = np.random.default_rng(6).random((2, 2000))
    finding = independence("x", np.stack([first, second, (first + second) % 1], 1), LEVEL)
    assert finding.p_value < LEVEL and "joint cells" in finding.detail


# case 3
def test_a_softmaxed_residual_is_found_in_the_emitted_law() -> None:
    """TV of (.21, .378, .234, .178) from P is .11: 2,000 tokens."""
    fault = np.array([0.21, 0.378, 0.234, 0.178])
    counts = np.random.default_rng(7).multinomial(2000, fault)
    finding = chi_square("x", counts, P, LEVEL, 0.11)
    assert finding.power is not None and finding.power > 0.999 and finding.p_value < LEVEL


# case 3
def test_a_softmaxed_residual_is_found_in_the_tokens_places_in_the_law() -> None:
    """A token's place, uniform within its cell of P, is uniform when P is its law; here it is off
    by .11 after token 0."""
    rng = np.random.default_rng(8)
    starts = np.cumsum(P) - P
    places = {}
    for name, law in {"right": P, "wrong": np.array([0.21, 0.378, 0.234, 0.178])}.items():
        tokens = rng.choice(4, 2000, p=law)
        places[name] = uniformity(name, starts[tokens] + rng.random(2000) * P[tokens], LEVEL, 0.1)
    assert verdict(list(places.values()), 2 * LEVEL) == ["wrong"]
    assert places["wrong"].effect == pytest.approx(0.11, abs=0.03)


# case 3
@pytest.mark.parametrize("as_arrays", [True, False])
def test_one_token_of_probability_zero_is_enough(as_arrays: bool) -> None:
    """p = (.5, .5, 0, 0), and token 2 came once."""
    probs, counts = [0.5, 0.5, 0.0, 0.0], [5000, 4999, 1, 0]
    if as_arrays:
        finding = chi_square("x", counts, probs, LEVEL, 0.1)
    else:
        finding = chi_square("x", dict(enumerate(counts)), {0: 0.5, 1: 0.5}, LEVEL, 0.1)
    assert finding.p_value == 0 and "id 2 came 1 times" in finding.detail
    assert json.loads(json.dumps(finding.to_json(), allow_nan=False))["statistic"] is None


# case 7
def test_a_verifier_that_accepts_everything_is_found() -> None:
    """Expected .5, observed 1 a hundred times: every difference is .5."""
    differences, variances = np.full(100, 0.5), np.full(100, 0.25)
    assert mean_zero("x", differences, LEVEL, 0.1, bounds=(-1, 1)).p_value < LEVEL
    assert mean_zero("x", differences, LEVEL, 0.1, variances=variances).p_value < LEVEL
    assert mean_zero("x", differences, LEVEL, 0.1).p_value < LEVEL


def test_importance_weights_of_the_wrong_law_are_found_either_way() -> None:
    """Weights p / q of tokens that are said to be from q: mean 1 if so, 2.357 = .0167 + .64 +
    .9 + .8 of tokens that are from p, .572 = .1417 + .43 of tokens from r."""
    rng, weights = np.random.default_rng(9), P / Q
    variance = float((P**2 / Q).sum() - 1)
    findings = []
    for name, law in {"q": Q, "p": P, "r": np.array([0.85, 0.05, 0.05, 0.05])}.items():
        drawn = weights[rng.choice(4, 2000, p=law)] - 1
        findings.append(mean_zero(name, drawn, LEVEL, 0.2, variances=np.full(2000, variance)))
    assert verdict(findings, 3 * LEVEL) == ["p", "r"]


def test_an_infinite_weight_is_a_failure_and_not_a_crash() -> None:
    finding = mean_zero("x", [0.1, math.inf], LEVEL, 0.1, bounds=(-1, math.inf))
    assert finding.p_value == 0 and "difference 1 of 2 is inf" in finding.detail


def test_lengths_that_are_one_longer_are_found() -> None:
    rng = np.random.default_rng(10)
    right = two_sample("right", integers(rng, 3000), integers(rng, 3000), LEVEL)
    wrong = two_sample("wrong", integers(rng, 3000) + 2, integers(rng, 3000), LEVEL)
    assert verdict([right, wrong], 2 * LEVEL) == ["wrong"]


# Small things.


def test_separated_samples_have_the_exact_permutation_tail() -> None:
    """Of C(6, 3) = 20 arrangements two are as far apart; two tests share the level: 2 * 2 / 20."""
    finding = two_sample("x", [1, 2, 3], [4, 5, 6], LEVEL)
    assert finding.p_value == pytest.approx(0.2) and finding.effect == 1


def test_tied_samples_have_the_hypergeometric_tail() -> None:
    """17 of the 50 ones are among the first 50 of 500 values, where 5 are expected (or, as far the
    other way, -7, which none can be); two tests share the level."""
    a, b = np.arange(50) < 17, np.arange(450) < 33
    tail = stats.hypergeom(500, 50, 50).sf(16)
    assert 2 * tail < two_sample("x", a, b, LEVEL).p_value < 4 * tail
    assert stats.chi2_contingency([[17, 33], [33, 417]], correction=False).pvalue < tail / 10


def test_effects_are_in_their_units() -> None:
    """(60, 40) of 100 against (.5, .5): TV .1. Two values below .25: distance .75 at .25."""
    assert chi_square("x", [60, 40], [0.5, 0.5], LEVEL, 0.1).effect == pytest.approx(0.1)
    assert uniformity("x", [0.25, 0.25], LEVEL, 0.1).effect == pytest.approx(0.75)
    assert mean_zero("x", [0.5, -0.1], LEVEL, 0.1, bounds=(-1, 1)).effect == pytest.approx(0.2)


def test_same_data_give_the_same_p_value() -> None:
    findings = [chi_square("x", [130, 370, 300, 200], P, LEVEL, 0.1) for _ in range(2)]
    assert findings[0] == findings[1]


def test_rare_ids_are_joined_and_the_rest_joins_the_last() -> None:
    """100 draws; expected (60, 20, 4, 4, 4, 4, 4): cells 60, 20, 4 + 4, 4 + 4 + 4. Of them came 60,
    24, 0 + 4, 12: 4^2 / 20 + 4^2 / 8 = 2.8."""
    probs = [0.6, 0.2] + [0.04] * 5
    finding = chi_square("x", [60, 24, 0, 4, 4, 4, 4], probs, LEVEL, 0.1)
    assert "4 cells" in finding.detail and finding.statistic == pytest.approx(2.8)


def test_wealth_is_the_mean_over_stakes_of_both_signs() -> None:
    """d = (1, 1), bounds (-1, 1), stakes u = 1/2 .. 2^-16: the mean of ((1 + u)^2 + (1 - u)^2) / 2
    is 1 + (1/4 + 1/16 + ..) / 16 = 1 + 1/48, and p its inverse."""
    finding = mean_zero("x", [1, 1], LEVEL, 0.1, bounds=(-1, 1))
    assert finding.p_value == pytest.approx(48 / 49, abs=1e-9)


def test_few_differences_say_nothing_without_bounds() -> None:
    few = mean_zero("x", [1.0] * 29 + [0.0] * 100, LEVEL, 0.5)
    lonely = mean_zero("x", [0.01] * 100 + [50.0], LEVEL, 0.5)
    assert few.p_value == lonely.p_value == 1 and few.power == lonely.power == 0
    assert "only 29 are not 0" in few.detail and "only 1 carry the squares" in lonely.detail


def test_a_mean_is_looked_for_on_the_bounded_side_only() -> None:
    """A hundred weights of 0: a giant may have stayed away. A hundred of 2: no law of mean 1."""
    light, heavy = (
        mean_zero("x", np.full(100, d), LEVEL, 0.5, bounds=(-1, math.inf)) for d in (-1.0, 1.0)
    )
    assert light.p_value == 1 and heavy.p_value < LEVEL and "one side" in light.detail


def test_the_normal_shape_misses_its_level_by_what_its_docstring_says() -> None:
    """.99^1000 = 4.3e-5: no refusal at all, and every difference is .01."""
    assert mean_zero("x", np.full(1000, 0.01), LEVEL, 0.1).p_value < 1e-9
    assert 4.2e-5 < 0.99**1000 < 4.4e-5


def test_a_gap_passes_up_to_its_tolerance() -> None:
    assert largest_gap("x", [0.5, -0.25], 0.5).p_value == 1
    assert largest_gap("x", [0.25, -0.5], 0.4).p_value == 0
    assert largest_gap("x", [0.25, -0.5], 0.4).effect == 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gap_that_is_not_finite_never_passes(bad: float) -> None:
    finding = largest_gap("x", [0.0, bad], math.inf if bad != bad else 1e9)
    assert finding.p_value == 0 and finding.to_json()["effect"] is None


def test_the_total_rate_is_shared_by_all_tests() -> None:
    assert family_level(1e-3, 50) == pytest.approx(2e-5)
    findings = [Finding(str(p), p, 1, 0.0, 0.0, "") for p in (0.02, 0.0049, 0.0, 1.0)]
    assert verdict(findings, 0.02) == ["0.0049", "0.0"]


REFUSED: dict[str, Callable[[], object]] = {
    "lengths: no observations": lambda: chi_square("lengths", {}, {0: 1.0}, LEVEL, 0.1),
    "lengths: probabilities sum to 0.9": lambda: chi_square("lengths", [1], [0.9], LEVEL, 0.1),
    "lengths: probabilities sum to nan": lambda: chi_square("lengths", [1], [math.nan], LEVEL, 0.1),
    r"lengths: counts \(1,\) for probabilities \(2,\)": lambda: chi_square(
        "lengths", [1], [0.5, 0.5], LEVEL, 0.1
    ),
    "lengths: a count is negative": lambda: chi_square("lengths", [-1], [1.0], LEVEL, 0.1),
    "pit: no values": lambda: uniformity("pit", [], LEVEL, 0.1),
    "pit: 1 values such as 1.0": lambda: uniformity("pit", [0.5, 1.0], LEVEL, 0.1),
    "pit: 1 values such as nan": lambda: uniformity("pit", [0.5, math.nan], LEVEL, 0.1),
    "accepted: no differences": lambda: mean_zero("accepted", [], LEVEL, 0.1),
    "accepted: effect=0": lambda: mean_zero("accepted", [1], LEVEL, 0),
    "accepted: differences in": lambda: mean_zero("accepted", [2], LEVEL, 0.1, bounds=(-1, 1)),
    "accepted: need one finite": lambda: mean_zero("accepted", [1], LEVEL, 0.1, variances=[1, 1]),
    "leave no side": lambda: mean_zero("x", [1], LEVEL, 0.1, bounds=(-math.inf, math.inf)),
    "lengths: 0 against 1": lambda: two_sample("lengths", [], [1], LEVEL),
    "lengths: a sample holds NaN": lambda: two_sample("lengths", [math.nan], [1], LEVEL),
    "streams: no values": lambda: independence("streams", np.empty((0, 3)), LEVEL),
    r"streams: uniforms of shape \(1, 9\)": lambda: independence("streams", [[0.1] * 9], LEVEL),
    r"streams: uniforms of shape \(2,\)": lambda: independence("streams", [0.1, 0.2], LEVEL),
    "logprobs: no differences": lambda: largest_gap("logprobs", [], 0.1),
    "num_tests=0": lambda: verdict([], 1e-3),
    "total_false_alarm_rate=1": lambda: family_level(1, 3),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_tested_is_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_p_values_are_probabilities() -> None:
    with pytest.raises(AssertionError, match="outside"):
        Finding("x", 1.5, 1, 0.0, 0.0, "")
