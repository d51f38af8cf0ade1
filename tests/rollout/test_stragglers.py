"""Whose tokens count while a step waits for its last row."""

import math

import pytest

from rollout.draft import Draft
from rollout.round_cost import Trial
from rollout.row import Row
from rollout.stragglers import LUCK, Stragglers
from tests.rollout.simulated_rounds import rows


def of_lengths(*left: int) -> list[Row]:
    return [rows(1, max_new_tokens=num)[0] for num in left]


def worths(stragglers: Stragglers, live: list[Row], own_share: float) -> list[float]:
    by_serial = stragglers.worth(live, own_share)
    return [by_serial[row.serial] for row in live]


@pytest.mark.parametrize("own", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("left", [(5, 5), (1, 40), (64, 63, 50, 12), (0, 3)])
def test_a_token_counts_one_in_the_mean_but_for_luck(left: tuple[int, ...], own: float) -> None:
    """What rows share of a step is saved by the unluckiest of them alone."""
    found = worths(Stragglers(), of_lengths(*left), own)
    shared = 1.0 - min(own, 1.0)
    assert sum(found) == pytest.approx(len(left) * (1.0 - LUCK * shared))
    assert found == sorted(found) or found == sorted(found, reverse=True)


def test_a_row_that_is_ahead_counts_its_own_share_and_the_last_one_what_all_share() -> None:
    ahead, last = worths(Stragglers(), of_lengths(4, 40), 0.3)
    assert ahead == pytest.approx(0.3, abs=1e-3)
    assert last == pytest.approx(0.3 + 0.7 * (1 - LUCK) * 2, abs=1e-3)


def test_where_a_step_is_all_arithmetic_every_token_counts_the_same() -> None:
    assert worths(Stragglers(), of_lengths(4, 40), 1.0) == [1.0, 1.0]


def test_being_ahead_says_little_where_rows_stop_by_themselves() -> None:
    stopping, limited = Stragglers(), Stragglers()
    for _ in range(1000):
        row, stopped = of_lengths(64, 64)
        stopped.finish("stop", "end of text")
        limited.observe([Trial(row, 0, Draft(), 0, 9, 1)])
        stopping.observe([Trial(stopped, 0, Draft(), 0, 9, 1)])  # every tenth token
    behind = of_lengths(64, 56)
    assert worths(limited, behind, 0.0)[1] < 0.3
    assert worths(stopping, behind, 0.0)[1] > 0.95


def test_limits_that_nobody_will_ever_reach_tell_no_rows_apart() -> None:
    stopping = Stragglers()
    for _ in range(1000):
        stopped = of_lengths(64)[0]
        stopped.finish("stop", "end of text")
        stopping.observe([Trial(stopped, 0, Draft(), 0, 9, 1)])  # every tenth token
    assert worths(stopping, of_lengths(32_768, 30_000), 0.0) == [1.0, 1.0]


def test_how_often_rows_stop_is_forgotten() -> None:
    stragglers = Stragglers()
    for stops, expected in ((True, 1.0), (False, 0.0)):
        for _ in range(400):
            row = of_lengths(64)[0]
            row.finish("stop" if stops else "length", "")
            stragglers.observe([Trial(row, 0, Draft(), 0, 999, 1)])
        live = of_lengths(600, 500)
        ahead = worths(stragglers, live, 0.0)[1]
        stop_rate = expected / 1000
        limited = math.exp(-stop_rate * 600)
        lead = 0.25 * math.sqrt(600) * (1 + 1 / (2 * limited))
        expected_worth = (1 - LUCK * limited) * 2 / (1 + math.exp(100 / lead))
        assert ahead == pytest.approx(expected_worth, rel=0.1)
