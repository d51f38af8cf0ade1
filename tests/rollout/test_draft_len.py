"""The draft length that pays, from measured costs and measured acceptance."""

import random

import pytest

from rollout.draft_len import AdaptiveDraftLen, FixedDraftLen, LinearCost, RoundCost
from rollout.row import Row
from rollout.streams import SeededDraws
from tests.rollout.engines import request


def rows(num: int) -> list[Row]:
    return [Row(request(), SeededDraws(0, "p", i), context_len=64) for i in range(num)]


def plain_round(chooser: AdaptiveDraftLen, seconds: float, scored_tokens: int) -> None:
    chooser.observe(RoundCost(seconds, 1, 0, scored_tokens, True, (0,), (0,)))


def learn_cost(chooser: AdaptiveDraftLen, fixed: float, per_token: float) -> None:
    for scored_tokens in (1, 2, 3, 4, 8, 16):
        plain_round(chooser, fixed + per_token * scored_tokens, scored_tokens)


def learn_acceptance(
    chooser: AdaptiveDraftLen, rates: list[float], *, drafted: bool = True, num_rounds: int = 3000
) -> None:
    """Rounds of one row whose draft position i is accepted at rates[i] given those before it."""
    rng = random.Random(1)
    for _ in range(num_rounds):
        accepted = next((i for i, rate in enumerate(rates) if rng.random() >= rate), len(rates))
        length = len(rates) if drafted else 0
        chooser.observe(
            RoundCost(1.0, 1, len(rates), 0, False, (length,), (accepted if drafted else 0,))
        )


def adaptive(max_len: int = 12, **options: float) -> AdaptiveDraftLen:
    return AdaptiveDraftLen(max_len, decay=0.999, **options)  # type: ignore[arg-type]


# ---- cost ---------------------------------------------------------------------------------


def test_linear_cost_recovers_a_line() -> None:
    cost = LinearCost(decay=0.98)
    for tokens in (1, 5, 9, 30, 2, 64):
        cost.add(tokens, 0.010 + 0.002 * tokens)
    assert cost.seconds(0) == pytest.approx(0.010, abs=1e-9)
    assert cost.seconds(100) == pytest.approx(0.210, abs=1e-9)


def test_linear_cost_recovers_a_line_under_noise() -> None:
    # 500 points, effective window 1/(1 - .99) = 100, noise 5% of the fixed part
    rng, cost = random.Random(3), LinearCost(decay=0.99)
    for _ in range(500):
        tokens = rng.randint(1, 64)
        cost.add(tokens, 0.010 + 0.002 * tokens + rng.gauss(0, 0.0005))
    assert cost.seconds(0) == pytest.approx(0.010, rel=0.1)
    assert cost.seconds(50) == pytest.approx(0.110, rel=0.02)


def test_linear_cost_follows_a_machine_that_changed() -> None:
    cost = LinearCost(decay=0.9)
    for per_token in (0.002, 0.005):
        for tokens in (1, 8, 16, 32) * 40:
            cost.add(tokens, 0.010 + per_token * tokens)
    assert cost.seconds(10) == pytest.approx(0.060, abs=1e-6)


@pytest.mark.parametrize("tokens", [1, 8, 333, 2048, 2955])
def test_a_cost_seen_at_one_width_only_is_taken_as_fixed(tokens: int) -> None:
    # rounding of the sums must not be read as a slope
    rng, cost = random.Random(tokens), LinearCost(decay=0.98)
    for _ in range(300):
        cost.add(tokens, 0.2 + 0.01 * rng.random())
    assert cost.seconds(2 * tokens) == pytest.approx(cost.seconds(tokens), rel=1e-9)
    assert 0.2 < cost.seconds(tokens) < 0.21


@pytest.mark.parametrize("points", [[(1, 0.9), (10, 0.1)], [(10, 0.1), (11, 0.9)]])
def test_no_part_of_a_cost_is_negative(points: list[tuple[float, float]]) -> None:
    cost = LinearCost(decay=1.0)
    for tokens, seconds in points:
        cost.add(tokens, seconds)
    assert 0 <= cost.seconds(0) <= cost.seconds(1) <= cost.seconds(100)


# ---- best length --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "per_token", "expected"),
    [
        # rate of emission per second, fixed 1: E(k) / (1 + c(1 + k)), E = (1 - a^(k+1)) / (1 - a)
        # a=.8 c=.1: k=4 3.362/1.5=2.241, k=5 3.689/1.6=2.306, k=6 3.951/1.7=2.324,
        #            k=7 4.161/1.8=2.312
        (0.8, 0.1, 6),
        # a=.5 c=.5: k=0 1/1.5=.667, k=1 1.5/2=.75, k=2 1.75/2.5=.70
        (0.5, 0.5, 1),
        # a=.2 c=.5: k=0 .667, k=1 1.2/2=.60
        (0.2, 0.5, 0),
    ],
)
def test_best_length_maximises_expected_tokens_a_second(
    rate: float, per_token: float, expected: int
) -> None:
    chooser = adaptive()
    learn_cost(chooser, 1.0, per_token)
    chooser._accepted = [rate * 1e6] * chooser.max_len
    chooser._reached = [1e6] * chooser.max_len
    chooser._drafted = chooser._asked = [1e6] * chooser.max_len
    assert chooser.best_len(1) == expected


def test_conditional_rates_by_position_count_and_not_their_mean() -> None:
    # METHODS 6: a = (.9, .5) gives E = 1 + .9 + .45 = 2.35; at c = .5, fixed 1:
    # k=0 .667, k=1 1.9/2 = .95, k=2 2.35/2.5 = .94
    chooser = adaptive(2)
    learn_cost(chooser, 1.0, 0.5)
    learn_acceptance(chooser, [0.9, 0.5])
    assert chooser.best_len(1) == 1


def test_free_verification_drafts_as_long_as_allowed() -> None:
    chooser = adaptive(5)
    learn_cost(chooser, 1.0, 0.0)
    learn_acceptance(chooser, [0.6] * 5)
    assert chooser.choose(rows(3)) == [5, 5, 5]


@pytest.mark.parametrize(("num_rows", "drafts"), [(1, True), (64, False)])
def test_speculation_pays_for_stragglers_and_not_for_a_full_batch(
    num_rows: int, drafts: bool
) -> None:
    # fixed 1, .1 a token, a=.5: one row 1.5/1.2 > 1/1.1; 64 rows 1.5/13.8 < 1/7.4
    chooser = adaptive(4)
    learn_cost(chooser, 1.0, 0.1)
    learn_acceptance(chooser, [0.5] * 4)
    assert (chooser.best_len(num_rows) > 0) == drafts


# ---- choosing -----------------------------------------------------------------------------


def hopeless() -> AdaptiveDraftLen:
    chooser = adaptive(8, probe_every=5, probe_len=2)
    learn_cost(chooser, 0.1, 1.0)
    learn_acceptance(chooser, [0.0] * 8)
    return chooser


def test_nothing_is_drafted_while_it_does_not_pay_except_for_probes() -> None:
    chooser = hopeless()
    lengths = [chooser.choose(rows(1))[0] for _ in range(18)]
    assert lengths == [0, 0, 0, 0, 0, 2] * 3  # five without, then a probe


def test_probes_notice_a_proposer_that_has_become_good() -> None:
    chooser = hopeless()
    learn_cost(chooser, 10.0, 0.01)
    for _ in range(3000):
        length = chooser.choose(rows(1))[0]
        chooser.observe(RoundCost(10.0, 1, length, 1 + length, True, (length,), (length,)))
    assert chooser.best_len(1) > 0


def test_a_good_proposer_that_turns_bad_is_dropped() -> None:
    chooser = AdaptiveDraftLen(4, decay=0.9)
    learn_cost(chooser, 1.0, 1.0)
    learn_acceptance(chooser, [1.0] * 4, num_rounds=100)
    assert chooser.best_len(1) == 4
    learn_acceptance(chooser, [0.0] * 4, num_rounds=100)
    assert chooser.best_len(1) == 0


@pytest.mark.parametrize("max_len", [0, 1, 3])
def test_no_length_exceeds_the_maximum(max_len: int) -> None:
    chooser = AdaptiveDraftLen(max_len, probe_every=2, probe_len=9)
    for _ in range(50):
        lengths = chooser.choose(rows(2))
        assert len(lengths) == 2 and max(lengths) <= max_len
        asked = lengths[0]
        chooser.observe(RoundCost(0.1, 2, asked, 2 + 2 * asked, True, (asked,) * 2, (asked,) * 2))


def test_no_rows_need_no_lengths() -> None:
    assert adaptive().choose([]) == []
    assert FixedDraftLen(3).choose([]) == []


def test_a_fixed_length_is_the_same_for_every_row() -> None:
    assert FixedDraftLen(3).choose(rows(4)) == [3, 3, 3, 3]


def test_rounds_with_prompts_do_not_teach_the_cost_of_decoding() -> None:
    chooser = adaptive()
    chooser.observe(RoundCost(9.0, 1, 0, 500, False, (0,), (0,)))
    assert chooser.best_len(1) == 2  # nothing known yet: a probe


def test_a_good_start_is_followed_further_than_it_was_tried() -> None:
    """Nothing was drafted beyond two tokens; both were always accepted and cost next to nothing."""
    chooser = AdaptiveDraftLen(8)
    for tokens in (4, 12, 4, 12):
        chooser.observe(RoundCost(1.0, 4, 2, tokens, True, (2,) * 4, (2,) * 4))
    assert chooser.best_len(4) > 2
