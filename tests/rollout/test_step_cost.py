"""The cost of a step is learnt from timings, where it is looked for and whatever its shape."""

import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from rollout.step_cost import StepCost, rising

Curve = Callable[[float], float]


def on_cpu(tokens: float) -> float:
    return 0.008 + 0.0016 * tokens


def on_gpu(tokens: float) -> float:
    return 0.010 + 0.0001 * max(0.0, tokens - 64)


def learnt(curve: Curve, tokens: Iterable[int], *, noise: float = 0.05, seed: int = 0) -> StepCost:
    rng, cost = random.Random(seed), StepCost()
    for num in tokens:
        cost.add(num, curve(num) * max(0.1, 1 + noise * rng.gauss(0, 1)))
    return cost


def mixed(*choices: int, num: int = 400) -> list[int]:
    return random.Random(5).choices(choices, k=num)


@pytest.mark.parametrize("curve", [on_cpu, on_gpu])
def test_a_curve_is_recovered_where_it_was_measured(curve: Curve) -> None:
    measured = (1, 2, 3, 5, 9, 32, 96, 200)
    cost = learnt(curve, mixed(*measured, num=800))
    for tokens in measured:
        assert cost.seconds(tokens) == pytest.approx(curve(tokens), rel=0.06), tokens


def test_nothing_is_known_before_the_first_timing_and_the_level_behind_it() -> None:
    cost = StepCost()
    assert not cost.known
    cost.add(7, 0.25)
    assert cost.known
    assert cost.seconds(7) == pytest.approx(0.25)


def test_what_was_never_tried_is_believed_to_be_cheap() -> None:
    cost = learnt(on_cpu, [1] * 50)
    assert cost.seconds(9) < 1.3 * cost.seconds(1)  # truly 2.3 times as long


def test_a_rare_wider_step_tells_what_a_token_adds() -> None:
    cost = learnt(on_cpu, [34 if step % 24 == 0 else 32 for step in range(1000)])
    assert cost.slope(32) == pytest.approx(0.0016, rel=0.35)
    assert cost.slope(32) > 0.0008  # not lost among thousands of equal steps


def test_a_full_batch_does_not_decide_for_its_last_row() -> None:
    """On a GPU a token more is free for one row, however steep it was at the full batch."""
    cost = learnt(on_gpu, [*mixed(256, 384, 512), *mixed(1, 2, 5, num=60)])
    assert cost.slope(1) < 0.1 * cost.slope(300)
    assert cost.seconds(512) == pytest.approx(on_gpu(512), rel=0.2)


def test_a_machine_that_slows_down_slows_every_width() -> None:
    cost = learnt(on_cpu, mixed(1, 8, 32))
    before = cost.seconds(8)
    for _ in range(60):
        cost.add(32, 2 * on_cpu(32))
    assert cost.seconds(32) == pytest.approx(2 * on_cpu(32), rel=0.1)
    assert cost.seconds(8) > 1.5 * before  # never timed since


def test_no_width_is_free_because_it_is_large() -> None:
    cost = learnt(on_cpu, mixed(1, 8, 4000, 9000))
    assert cost.slope(9000) > 0.1 * 0.0016


@pytest.mark.parametrize("slower", [0.3, 3.0, 20.0])
def test_a_machine_of_another_speed_is_noticed_within_a_dozen_timings(slower: float) -> None:
    cost = learnt(lambda tokens: slower * on_cpu(tokens), mixed(4, 8, 12, num=50))
    for tokens in (4, 8, 12, 8) * 3:
        cost.add(tokens, on_cpu(tokens))
    for tokens in (4, 8, 12):
        assert cost.seconds(tokens) == pytest.approx(on_cpu(tokens), rel=0.1), tokens


def test_one_stall_changes_little() -> None:
    cost = learnt(on_cpu, mixed(1, 8, 32))
    cost.add(8, 100 * on_cpu(8))
    assert cost.seconds(8) < 1.3 * on_cpu(8)


def test_one_number_costs_what_it_costs_among_many() -> None:
    """The fast way to ask against numpy's."""
    cost = learnt(on_cpu, mixed(1, 8, 32, 200, num=50))
    tokens = [0.5, 1, 1.5, 2, 3, 33.3, 131_071, 131_072, 1e6]
    for curve in (cost.seconds, cost.hoped):
        assert [curve(num) for num in tokens] == pytest.approx(curve.at(np.array(tokens)).tolist())


def test_narrow_steps_that_were_never_timed_do_not_lift_those_that_were() -> None:
    """A slow first step scales all beliefs; what is timed then falls further than its neighbours."""
    cost = StepCost()
    for tokens, seconds in ((8, 0.1), *((8, 0.005), (12, 0.006)) * 100):
        cost.add(tokens, seconds)
    for believed in (cost.seconds, cost.hoped):
        assert believed(8) == pytest.approx(0.005, rel=0.03)
        assert believed(12) == pytest.approx(0.006, rel=0.03)


def test_of_values_that_fall_the_better_known_one_holds() -> None:
    assert rising(np.array([3.0, 1.0, 4.0]), np.array([1.0, 1.0, 1.0])) == [2.0, 2.0, 4.0]
    known = rising(np.array([3.0, 1.0, 4.0, 0.0]), np.array([1e6, 1e-6, 1e-6, 1e6]))
    assert known == pytest.approx([1.0, 1.0, 4.0, 4.0])


def test_a_timing_changes_what_was_asked_before() -> None:
    cost = learnt(on_cpu, [1] * 5)
    before, hoped = cost.seconds(1), cost.hoped(1)
    cost.add(1, 2 * before)
    assert cost.seconds(1) > before and cost.hoped(1) > hoped


@pytest.mark.parametrize("seed", range(20))
def test_a_wider_step_never_costs_less(seed: int) -> None:
    rng = random.Random(seed)
    cost = StepCost()
    for _ in range(200):
        cost.add(rng.randint(1, 9000), rng.random())
    seconds = [cost.seconds(tokens) for tokens in (1, 2, 3, 7, 40, 500, 4000, 10_000)]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert all(cost.slope(tokens) >= 0 for tokens in (1, 6, 33, 800))
