"""Chances of acceptance: right in the long run, careful in the short, told apart where it matters."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from rollout.acceptance import Acceptance

NONE = np.full((1, 4), np.nan)


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
    rng, n = random.Random(seed), len(true)
    chances = np.array([said]) if said else np.full((1, n), np.nan)
    for _ in range(num):
        taken = next((i for i, rate in enumerate(true) if rng.random() >= rate), n)
        accepted = np.arange(n)[None] < taken
        reached = np.arange(n)[None] <= taken
        acceptance.learn([who], [f"{who}'s row"], chances, reached * 1.0, accepted * 1.0)


def test_without_evidence_an_estimate_is_taken_at_its_word_and_no_estimate_is_a_coin() -> None:
    acceptance = Acceptance()
    assert acceptance.rates(np.array([[0.9, 0.1, 0.42]])).tolist() == [
        [pytest.approx(0.9), pytest.approx(0.1), pytest.approx(0.42)]
    ]
    assert acceptance.rates(NONE).tolist() == [[pytest.approx(0.5)] * 4]


def test_conditional_rates_are_learnt_by_depth() -> None:
    acceptance = Acceptance()
    learn(acceptance, [0.9, 0.5, 0.8])
    rates = acceptance.rates(NONE)[0]
    # about 50 rounds count: three standard errors at depth 1 are .2
    assert rates[:3] == pytest.approx([0.9, 0.5, 0.8], abs=0.21)


def test_a_good_start_is_followed_further_than_it_was_tried() -> None:
    acceptance = Acceptance()
    learn(acceptance, [1.0, 1.0])
    assert acceptance.rates(NONE)[0, 3] > 0.9


def test_estimates_are_corrected_by_what_they_were_worth() -> None:
    boastful = Acceptance()
    learn(boastful, [0.1], said=[0.97])
    assert boastful.rates(np.array([[0.97]]))[0, 0] == pytest.approx(0.1, abs=0.15)
    assert boastful.rates(np.array([[0.4]]))[0, 0] == pytest.approx(0.4)  # another band


def test_what_estimated_tokens_did_is_also_known_of_their_depth() -> None:
    acceptance = Acceptance()
    learn(acceptance, [0.95], said=[0.3])
    assert acceptance.rates(NONE)[0, 0] > 0.8


def test_a_prompt_and_a_row_that_do_better_are_told_from_others() -> None:
    acceptance = Acceptance()
    for round_ in range(60):
        learn(acceptance, [0.9], num=1, who="easy", seed=round_)
        learn(acceptance, [0.1], num=1, who="hard", seed=round_)
    rows = ["easy's row", "hard's row", "new row", "new row of easy"]
    easy, hard, new, sibling = acceptance.factors(["easy", "hard", "other", "easy"], rows)
    assert hard < 0.6 < new == 1.0 < easy
    assert sibling == pytest.approx(acceptance.factors(["easy"], ["unseen"])[0])
    assert 1.0 < sibling < easy * 1.1


def test_a_policy_that_changed_is_noticed_within_a_hundred_rounds() -> None:
    acceptance = Acceptance()
    learn(acceptance, [1.0], num=1000)
    learn(acceptance, [0.0], num=100)
    assert acceptance.rates(NONE)[0, 0] < 0.2


def test_positions_that_were_not_reached_teach_nothing() -> None:
    acceptance, nothing = Acceptance(), np.zeros((1, 3))
    acceptance.learn(["p"], ["r"], np.full((1, 3), np.nan), nothing, nothing)
    assert acceptance.rates(NONE).tolist() == [[pytest.approx(0.5)] * 4]
    assert acceptance.factors(["p"], ["r"]).tolist() == [1.0]


def test_an_empty_round_is_no_error() -> None:
    acceptance = Acceptance()
    empty = np.zeros((0, 0))
    acceptance.learn([], [], empty, empty, empty)
    assert acceptance.rates(np.zeros((2, 0))).shape == (2, 0)
