"""The task: seeded problems, a reward to the letter."""

import pytest

from recipes.arithmetic import ArithmeticTask, Problem, reward

PROBLEM = Problem("12+7", 12, 7)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (" 12 + 7 = 19\n", 1.0),
        (" 12 + 7 = 19", 1.0),
        (" 12 + 7 = 19\nand more", 1.0),
        (" 12 + 7 = 18\n", 0.0),
        (" 19\n", 0.0),
        (" 12 + 7 = 190\n", 0.0),
        ("\n12 + 7 = 19", 0.0),
        ("", 0.0),
    ],
)
def test_reward_is_the_right_equation_on_the_first_line(response: str, value: float) -> None:
    assert reward(PROBLEM, response) == value


def test_its_own_answer_is_right() -> None:
    assert reward(PROBLEM, PROBLEM.answer) == 1.0


def test_every_problem_comes_once_an_epoch_and_knows_how_often_it_came() -> None:
    task = ArithmeticTask(num_problems=7, max_operand=5, seed=3)
    first = [task.problem(i) for i in range(7)]
    second = [task.problem(i) for i in range(7, 14)]
    assert {p.id for p, _ in first} == {p.id for p, _ in second} == {p.id for p in task.problems}
    assert {visit for _, visit in first} == {0} and {visit for _, visit in second} == {1}


def test_the_order_is_a_function_of_the_seed() -> None:
    def order(seed: int) -> list[str]:
        task = ArithmeticTask(num_problems=20, max_operand=20, seed=seed)
        return [task.problem(i)[0].id for i in range(40)]

    assert order(1) == order(1) != order(2)
