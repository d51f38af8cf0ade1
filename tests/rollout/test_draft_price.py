"""The price keeps the tokens that a search over all of them would keep."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from rollout.draft_price import FORGET, MOST_WEIGHT, NUM_BINS, DraftPrice
from rollout.step_cost import KNOTS, NUM_KNOTS, StepCost

Curve = Callable[[np.ndarray], np.ndarray]


class KnownCost(StepCost):
    """Costs by a formula, so that prices can be worked out by hand."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self._mean, self._covariance = curve(KNOTS), np.zeros((NUM_KNOTS, NUM_KNOTS))
        self.known = True


def line(fixed: float, per_token: float) -> StepCost:
    return KnownCost(lambda tokens: fixed + per_token * tokens)


def knee(at: float) -> StepCost:
    return KnownCost(lambda tokens: 1.0 + 0.1 * np.maximum(0.0, tokens - at))


def test_with_nothing_offered_the_price_is_what_a_token_costs_in_tokens() -> None:
    # 4 rows, 1 + .1 n: a token adds .1 s, in which 4 / 1.4 tokens a second are .286
    price, speedup = DraftPrice().price(4, line(1.0, 0.1))
    assert price == pytest.approx(0.1 * 4 / 1.4)
    assert speedup == 1.0


def test_the_price_rises_with_the_batch_to_the_mean_cost_of_a_token() -> None:
    prices = [DraftPrice().price(rows, line(1.0, 0.1))[0] for rows in (1, 2, 8, 32, 128)]
    assert prices == sorted(prices) and prices[0] < 0.1 and 0.9 < prices[-1] < 1.0


def test_constant_acceptance_is_drafted_as_far_as_the_rule_says() -> None:
    # a = .8, a step of .9 + .1 n: S(k) = (1 - .8^(k+1)) / .2 / (1 + .1 k) is largest at k = 6, 2.4697
    price = DraftPrice()
    chain = 0.8 ** np.arange(1, 13)
    price.offered(chain, 1)
    at, speedup = price.price(1, line(0.9, 0.1))
    assert (chain >= at).sum() == 6
    assert speedup == pytest.approx(3.951424 / 1.6, abs=0.01)


@pytest.mark.parametrize("seed", range(30))
def test_no_set_of_tokens_beats_those_above_the_price(seed: int) -> None:
    rng = random.Random(seed)
    num_rows = rng.choice([1, 2, 4, 8, 16])
    cost = rng.choice([line(1.0, rng.random() / 4), line(0.1, 0.2), knee(16), knee(64)])
    chances = np.array([rng.random() ** rng.choice([0.3, 3]) for _ in range(8 * num_rows)])
    price = DraftPrice()
    price.offered(chances, num_rows)
    kept = np.sort(chances[chances >= price.price(num_rows, cost)[0]])
    ranked = np.sort(chances)[::-1]
    rates = (num_rows + np.concatenate([[0.0], ranked.cumsum()])) / cost.seconds.at(
        num_rows + np.arange(len(ranked) + 1)
    )
    rate = (num_rows + kept.sum()) / cost.seconds(num_rows + len(kept))
    # chances are told apart to 1 / NUM_BINS: behind a sharp knee one token too many costs 5%
    assert rate >= 0.94 * rates.max()


def test_equal_chances_do_not_flap_at_a_knee() -> None:
    """16 rows, steps free up to 64 tokens: three tokens a row are kept round after round, since the
    price lies between the third and the fourth whatever the slope is on either side."""
    price, kept = DraftPrice(), []
    chain = np.tile(0.9 ** np.arange(1, 9), 16)
    for _ in range(20):
        at, _ = price.price(16, knee(64))
        kept.append(int((chain >= at).sum()) / 16)
        price.offered(chain, 16)
    assert set(kept[2:]) == {3.0}


def test_offers_are_forgotten() -> None:
    price = DraftPrice()
    price.offered(np.full(8, 0.99), 1)
    assert price.price(1, line(1.0, 0.1))[1] > 2
    for _ in range(100):
        price.offered(np.zeros(0), 1)
    assert price.price(1, line(1.0, 0.1))[1] == pytest.approx(1.0, abs=0.01)


def test_prices_do_not_depend_on_how_long_ago_counting_began() -> None:
    """Weights grow without end, so counts are divided now and then."""
    price, chain, seen = DraftPrice(), 0.8 ** np.arange(1, 13), []
    for _ in range(2 + int(math.log(MOST_WEIGHT) / -math.log(FORGET))):
        price.offered(chain, 1)
        seen.append(price.price(1, line(0.9, 0.1)))
    assert seen[100:] == [pytest.approx(seen[100])] * len(seen[100:])


def test_chances_beyond_one_count_as_certain() -> None:
    price = DraftPrice()
    price.offered(np.array([3.0, 0.0, 1.0]), 1)
    assert price.price(1, line(1.0, 0.1))[1] == pytest.approx(3 / (1.3 / 1.1), rel=1e-6)
    assert NUM_BINS > 10
