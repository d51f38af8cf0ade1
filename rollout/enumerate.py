"""Every outcome of a sampling procedure with its exact probability, by replaying its decisions.

The procedure runs unchanged: it asks a `Draws` object for each decision, and this one answers from
a script. After a run the last decision that has another possible answer is advanced, and the
procedure runs again, until the tree of decisions is exhausted. Probabilities are the products of
those of the answers, so the result is the joint law itself, without Monte Carlo noise.

Only for small vocabularies and lengths: the cost is one run an outcome path.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from rollout.law import TargetLaws

Outcome = TypeVar("Outcome", bound=Hashable)


@dataclass(slots=True)
class _Decision:
    options: list[tuple[int, float]]  # (answer, probability > 0)
    chosen: int = 0


class EnumeratedDraws:
    """A `Draws` that answers from a script and extends it at unseen decisions."""

    def __init__(self) -> None:
        self._decisions: list[_Decision] = []
        self._next = 0
        self.probability = 1.0

    def restart(self) -> None:
        self._next, self.probability = 0, 1.0

    def advance(self) -> bool:
        """Moves to the next unexplored path; False when there is none."""
        while self._decisions:
            last = self._decisions[-1]
            if last.chosen + 1 < len(last.options):
                last.chosen += 1
                return True
            self._decisions.pop()
        return False

    def _decide(self, options: list[tuple[int, float]]) -> int:
        if self._next == len(self._decisions):
            self._decisions.append(_Decision([o for o in options if o[1] > 0]))
        decision = self._decisions[self._next]
        self._next += 1
        answer, probability = decision.options[decision.chosen]
        self.probability *= probability
        return answer

    def _token(self, weights: torch.Tensor) -> int:
        probs = (weights / weights.sum()).tolist()
        return self._decide(list(enumerate(probs)))

    def target(self, laws: TargetLaws, index: int, position: int) -> int:
        return self._token(laws.probs(index))

    def coin(self, accept_prob: float, start: int, position: int) -> bool:
        return bool(self._decide([(1, accept_prob), (0, 1.0 - accept_prob)]))

    def correction(self, weights: torch.Tensor, start: int, position: int) -> int:
        return self._token(weights)

    def draft(
        self, weights: torch.Tensor, start: int, position: int, ends: np.ndarray | None = None
    ) -> int:
        return self._token(weights)

    def pit(self, position: int) -> float:
        return 0.5  # decides nothing


def enumerate_outcomes(
    run: Callable[[EnumeratedDraws], Outcome],
) -> dict[Outcome, float]:
    """The exact law of what `run` returns; all its randomness must come from the argument."""
    draws = EnumeratedDraws()
    law: dict[Outcome, float] = defaultdict(float)
    while True:
        draws.restart()
        outcome = run(draws)
        law[outcome] += draws.probability
        if not draws.advance():
            return dict(law)


def total_variation(one: dict[Outcome, float], other: dict[Outcome, float]) -> float:
    """Half the L1 distance of two laws."""
    return 0.5 * sum(abs(one.get(o, 0.0) - other.get(o, 0.0)) for o in one.keys() | other.keys())
