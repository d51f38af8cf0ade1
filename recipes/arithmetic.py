"""Short sums with a verifiable reward.

The prompt shows two solved sums and asks for a third in the same form; the reward is 1 when the
response's first line is the right equation, to the letter, else 0. The problems are drawn once from
the run's seed and come again in a new order every epoch, as prompts do in RL post-training.
"""

import random
from dataclasses import dataclass

SHOTS = "2 + 3: 2 + 3 = 5\n17 + 4: 17 + 4 = 21\n"


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum."""

    id: str
    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{SHOTS}{self.left} + {self.right}:"

    @property
    def answer(self) -> str:
        return f" {self.left} + {self.right} = {self.left + self.right}\n"


def reward(problem: Problem, response: str) -> float:
    """1 for the right equation on the first line, else 0."""
    return float(response.split("\n")[0].strip() == problem.answer.strip())


class ArithmeticTask:
    """An endless, seeded sequence of problems out of a fixed set."""

    def __init__(self, *, num_problems: int, max_operand: int, seed: int) -> None:
        generator = random.Random(f"problems {seed}")
        pairs = [(a, b) for a in range(1, max_operand + 1) for b in range(1, max_operand + 1)]
        chosen = generator.sample(pairs, min(num_problems, len(pairs)))
        self.problems = [Problem(f"{a}+{b}", a, b) for a, b in chosen]
        self._seed = seed

    def problem(self, index: int) -> tuple[Problem, int]:
        """The index-th prompt of the run and how often it came before."""
        epoch, place = divmod(index, len(self.problems))
        order = list(range(len(self.problems)))
        random.Random(f"epoch {epoch} of {self._seed}").shuffle(order)
        return self.problems[order[place]], epoch
