"""Chances of acceptance: right in the long run, careful in the short, told apart where it matters."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from rollout.acceptance import FORGET, MOST_WEIGHT, Acceptance, Evidence

NONE = [math.nan] * 4


def rates(acceptance: Acceptance, chances: Sequence[float], who: str = "a new one") -> list[float]:
    """What each token is accepted with once those before it were."""
    chain = [1.0, *acceptance.chain(who, f"{who}'s row", chances)]
    return [after / before for before, after in pairwise(chain)]


def factor(
    acceptance: Acceptance, prompt: str, row: str, chance: float = math.nan, depth: int = 0
) -> float:
    """What a prompt and row change about a token's rate; small rates, so that nothing is cut at 1."""
    chances = [chance] * (depth + 1)
    chain, new = (
        [1.0, *acceptance.chain(*who, chances)] for who in ((prompt, row), ("new", "new"))
    )
    return (chain[-1] / chain[-2]) / (new[-1] / new[-2])


def learn(
    acceptance: Acceptance,
    true: Sequence[float],
    *,
    said: Sequence[float] | None = None,
    num: int = 400,
    who: str = "p",
    seed: int = 0,
) -> None:
    """Rounds of one row whose token at depth i is accepted at true[i] given those before it."""
    rng = random.Random(seed)
    chances = said or [math.nan] * len(true)
    for _ in range(num):
        accepted: list[bool] = []
        while len(accepted) < len(true) and all(accepted):
            accepted.append(rng.random() < true[len(accepted)])
        acceptance.learn([Evidence(who, f"{who}'s row", chances, accepted)])


def test_without_evidence_an_estimate_is_taken_at_its_word_and_no_estimate_is_a_coin() -> None:
    acceptance = Acceptance()
    assert rates(acceptance, [0.9, 0.1, 0.42]) == pytest.approx([0.9, 0.1, 0.42])
    assert rates(acceptance, NONE) == pytest.approx([0.5] * 4)


def test_conditional_rates_are_learnt_by_depth() -> None:
    acceptance = Acceptance()
    learn(acceptance, [0.9, 0.5, 0.8])
    found = rates(acceptance, NONE)
    # about 100 rounds count: three standard errors at depth 1 are .15
    assert found[:3] == pytest.approx([0.9, 0.5, 0.8], abs=0.16)


def test_a_good_start_is_followed_further_than_it_was_tried() -> None:
    acceptance = Acceptance()
    learn(acceptance, [1.0, 1.0])
    assert rates(acceptance, NONE)[3] > 0.9


def test_estimates_are_corrected_by_what_they_were_worth() -> None:
    boastful = Acceptance()
    learn(boastful, [0.1], said=[0.97])
    assert rates(boastful, [0.97])[0] == pytest.approx(0.1, abs=0.15)
    assert rates(boastful, [0.4])[0] == pytest.approx(0.4)  # another band


def test_a_depth_that_was_seldom_reached_goes_by_what_its_band_was_worth() -> None:
    """Not by the estimate; what the depth itself has shown counts once there is some of it."""
    acceptance = Acceptance()
    learn(acceptance, [0.3], said=[0.6])
    assert rates(acceptance, [0.6] * 3) == pytest.approx([0.3] * 3, abs=0.15)
    learn(acceptance, [0.3, 0.9], said=[0.6] * 2)
    shallow, deep = rates(acceptance, [0.6] * 2)
    assert shallow < 0.45 < 0.7 < deep


def test_what_estimated_tokens_did_is_also_known_of_their_depth() -> None:
    acceptance = Acceptance()
    learn(acceptance, [0.95], said=[0.3])
    assert rates(acceptance, NONE)[0] > 0.8


def test_a_prompt_and_a_row_that_do_better_are_told_from_others() -> None:
    acceptance = Acceptance()
    for round_ in range(60):
        learn(acceptance, [0.6], num=1, who="easy", seed=round_)
        learn(acceptance, [0.1], num=1, who="hard", seed=round_)
    easy, hard = (factor(acceptance, who, f"{who}'s row") for who in ("easy", "hard"))
    new = factor(acceptance, "other", "new row")
    sibling = factor(acceptance, "easy", "new row of easy")
    assert hard < 0.6 < new == 1.0 < easy
    assert sibling == pytest.approx(factor(acceptance, "easy", "unseen"))
    assert 1.0 < sibling < easy * 1.1


def test_a_row_that_does_worse_lowers_every_token_one_that_does_better_the_first_alone() -> None:
    """Raises, the latter, and where no estimate knows what the row is like."""
    acceptance = Acceptance()
    for round_ in range(60):
        learn(acceptance, [0.6], num=1, who="easy", seed=round_)
        learn(acceptance, [0.1], num=1, who="hard", seed=round_)
    easy, hard = ((who, f"{who}'s row") for who in ("easy", "hard"))
    assert factor(acceptance, *easy) > 1.2
    assert factor(acceptance, *easy, depth=1) == pytest.approx(1.0)
    assert factor(acceptance, *easy, chance=0.1) == pytest.approx(1.0)
    assert factor(acceptance, *hard, depth=1) < 0.6
    assert factor(acceptance, *hard, chance=0.1) == pytest.approx(factor(acceptance, *hard))


def test_what_the_estimates_got_wrong_is_not_taken_for_a_prompt_that_does_better() -> None:
    acceptance = Acceptance()
    for seed, who in enumerate("abcd"):
        learn(acceptance, [0.9] * 4, said=[0.3] * 4, num=30, who=who, seed=seed)
    factors = [factor(acceptance, who, f"{who}'s row") for who in "abcd"]
    assert factors == pytest.approx([1.0] * 4, abs=0.15)


@pytest.mark.parametrize("said", [math.nan, 0.3])
def test_what_was_seen_once_says_nothing_of_its_row(said: float) -> None:
    acceptance = Acceptance()
    acceptance.learn([Evidence("p", "r", [said], [False])])
    assert factor(acceptance, "p", "r") == factor(acceptance, "p", "r", chance=0.1) == 1.0


def test_a_policy_that_changed_is_noticed_within_two_hundred_rounds() -> None:
    acceptance = Acceptance()
    learn(acceptance, [1.0], num=1000)
    learn(acceptance, [0.0], num=200)
    assert rates(acceptance, NONE)[0] < 0.2


def test_a_draft_that_was_not_reached_teaches_nothing() -> None:
    acceptance = Acceptance()
    acceptance.learn([Evidence("p", "r", NONE, [])])
    acceptance.learn([])
    assert rates(acceptance, NONE) == pytest.approx([0.5] * 4)
    assert factor(acceptance, "p", "r") == 1.0
    assert rates(acceptance, []) == []


def test_what_follows_a_hopeless_token_is_left_out() -> None:
    acceptance = Acceptance()
    whole = acceptance.chain("p", "r", [0.9, 0.1, 0.9, 0.9])
    assert acceptance.chain("p", "r", [0.9, 0.1, 0.9, 0.9], least=0.5) == whole[:2]
    assert acceptance.chain("p", "r", [0.9, 0.1, 0.9, 0.9], least=0.01) == whole


def test_hope_is_larger_the_less_was_seen() -> None:
    acceptance = Acceptance()
    learn(acceptance, [0.5], num=100)
    seen, unseen = (acceptance.chain("n", "n", NONE, hope=1.0)[0], Acceptance())
    assert rates(acceptance, NONE)[0] < seen < unseen.chain("n", "n", NONE, hope=1.0)[0]


def test_what_was_learnt_long_ago_is_not_lost_to_rounding() -> None:
    """Weights grow without end, so counts are divided now and then."""
    acceptance, num = Acceptance(), int(math.log(MOST_WEIGHT) / -math.log(FORGET))
    estimated = Acceptance()
    for before in (num - 1, 1, 1, num):  # just below the limit, beyond it, and once again
        learn(acceptance, [1.0, 0.0], num=before)
        learn(estimated, [1.0, 0.0], said=[0.4, 0.4], num=before)
        # a band has 100 tokens of each depth, a depth half of them beside the prior of 8 at 1/2
        assert rates(estimated, [0.4] * 2) == pytest.approx([104 / 108, 4 / 108], abs=0.003)
        # 1 / (1 - FORGET) = 100 rounds count beside the prior of 2 trials at 1/2
        assert rates(acceptance, NONE)[:2] == pytest.approx([101 / 102, 0.99 * 2 / 102], abs=0.003)


def test_a_band_goes_on_learning_when_counts_were_divided() -> None:
    acceptance, num = Acceptance(), int(math.log(MOST_WEIGHT) / -math.log(FORGET))
    learn(acceptance, [1.0], said=[0.4], num=num + 1)
    learn(acceptance, [0.0], said=[0.4], num=300)
    assert rates(acceptance, [0.4] * 3)[2] < 0.1  # a depth that was never reached


@pytest.mark.parametrize("seed", range(5))
def test_counts_equal_those_that_are_multiplied_down_each_round(seed: int) -> None:
    """The slow way to forget, cell by cell: every count shrinks before a round is added."""
    rng, acceptance = random.Random(seed), Acceptance()
    reached, accepted = [0.0] * 3, [0.0] * 3
    for _ in range(100):
        hits = [rng.random() < 0.7 for _ in range(rng.randint(1, 3))]
        acceptance.learn([Evidence("p", "r", NONE, hits)])
        for depth in range(3):
            reached[depth] = FORGET * reached[depth] + (depth < len(hits))
            accepted[depth] = FORGET * accepted[depth] + (depth < len(hits) and hits[depth])
    rate = 0.5
    for depth in range(3):
        rate = (accepted[depth] + 2 * rate) / (reached[depth] + 2)
        assert rates(acceptance, NONE)[depth] == pytest.approx(rate, rel=1e-9)
