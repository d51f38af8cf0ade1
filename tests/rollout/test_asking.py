"""When drafts that cost as much as a model's are planned at all."""

from rollout.asking import FIRST_CREDIT, TRYING, Asking
from rollout.draft import Draft
from rollout.round_cost import RoundCost, Trial
from rollout.row import Row
from rollout.step_cost import StepCost
from tests.rollout.simulated_rounds import rows

STEP_S = 0.01


def known_cost() -> StepCost:
    """A step takes STEP_S, whatever is in it, nearly."""
    cost = StepCost()
    for tokens in (1, 2, 4, 8, 16, 32) * 20:
        cost.add(tokens, STEP_S)
    return cost


def asked(live: list[Row], propose_s: float, *, accepted: int) -> RoundCost:
    """A round in which every row was asked for a token and so many in all were scored and accepted."""
    trials = tuple(
        Trial(row, 1, Draft.of_points([1]), int(at < accepted), int(at < accepted), 1)
        for at, row in enumerate(live)
    )
    return RoundCost(STEP_S, propose_s, len(live) + accepted, True, trials)


def see(asking: Asking, round_: RoundCost, cost: StepCost) -> None:
    """A round whose tokens count the same and were not expected."""
    asking.observe(round_, cost, round_.num_accepted, 0.0)


def test_plans_that_lose_end_and_are_tried_again_ever_so_often() -> None:
    asking, cost, live = Asking(), known_cost(), rows(8)
    num = 0
    while asking.affords(8):
        see(asking, asked(live, 0.5 * STEP_S, accepted=0), cost)  # half a step for nothing
        num += 1
    # the first, of new rows, is not held against it; one more by rounding
    assert 1 + 2 * FIRST_CREDIT <= num <= 2 + 2 * FIRST_CREDIT
    see(asking, asked(live, 0.5 * STEP_S, accepted=0), cost)
    waited = 0
    while not asking.affords(8):
        waited += 1
    assert abs(waited - 0.5 / TRYING) <= 2  # what was lost last, paid back


def test_what_was_lost_with_many_rows_is_not_held_against_few() -> None:
    asking, cost = Asking(), known_cost()
    for _ in range(20):
        see(asking, asked(rows(8), 0.0, accepted=0), cost)
    live = rows(8)
    for _ in range(20):
        see(asking, asked(live, STEP_S, accepted=0), cost)
    assert not asking.affords(8) and not asking.affords(15)
    assert asking.affords(1) and asking.affords(16)


def test_plans_that_earn_can_afford_a_run_of_bad_luck() -> None:
    asking, cost, live = Asking(), known_cost(), rows(8)
    for _ in range(200):
        see(asking, asked(live, 0.2 * STEP_S, accepted=8), cost)  # a step's tokens more
    for _ in range(40):
        see(asking, asked(live, 0.7 * STEP_S, accepted=0), cost)
    assert asking.affords(8)


def test_the_prompts_of_new_rows_are_not_held_against_drafting() -> None:
    asking, cost, live = Asking(), known_cost(), rows(8)
    see(asking, asked(live, 100 * STEP_S, accepted=0), cost)
    assert asking.affords(8)
    see(asking, asked(live, 100 * STEP_S, accepted=0), cost)
    assert not asking.affords(8)


def test_whether_asking_is_cheap_is_known_once_it_was_timed() -> None:
    asking, cost, live = Asking(), known_cost(), rows(8)
    see(asking, asked(live, 0.5 * STEP_S, accepted=0), cost)  # of new rows: says nothing
    assert asking.cheap
    see(asking, asked(live, 0.5 * STEP_S, accepted=0), cost)
    assert not asking.cheap
