"""Whether asking the proposer is worth its seconds, and whom to ask while it is not.

Where asking every row takes next to nothing of a step, everybody is asked. A proposer that then costs
more than what is kept of its drafts saves is asked for a few rows in turn, so that its becoming good is
noticed. What runs a model costs more than that: its lengths are planned (`rollout.draft_len`), as long
as what such plans have lost, in rounds of about as many rows, stays within bounds.

A row that is asked for the first time may have a prompt to be run by the proposer, so rounds with many
such rows say nothing about what asking costs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.round_cost import RoundCost, Trial
from rollout.step_cost import StepCost

CHEAP = 0.1
"""Share of a plain step that asking every row may take for a proposer to be asked always."""
IDLE = 0.002
"""Share of a plain step that asking takes while it does not pay."""
SMOOTH = 0.1
"""Weight of the last round in running means."""
MOST_PATIENT = 4
"""Doublings of the time between probes that find nothing."""
TIME_EVERY, LATER_EVERY, EARLY = 4, 16, 64
"""Rounds with asking, of which one is taken into account for what asking costs; so many from the
EARLY-th on."""
MOST_NEW = 0.25
"""Share of rows asked for the first time in a round that says what asking costs."""
DRAFT_SLOPE = 0.1
"""What drafting for a further row is believed to add, before it was tried, in shares of one row."""
FIRST_CREDIT, LEAST_CREDIT, MOST_CREDIT = 4.0, -4.0, 32.0
"""What planned drafts may lose before they have earned anything, and the bounds of what is remembered,
in plain steps."""
TRYING = 0.05
"""Plain steps that they may lose each time a plan is due that they cannot afford."""
MOST_ASKED = 4096
"""Rows remembered as asked before, those asked last for the first time."""


class Asking:
    """Costs and earnings of a proposer."""

    def __init__(self) -> None:
        self.draft_step = StepCost(DRAFT_SLOPE)
        """Seconds of one drafted token a row, by rows."""
        self._ask = StepCost()
        """Seconds of asking, by rows."""
        self._earned, self._paid = _Running(), _Running()
        """Seconds a round that was kept saved, and that were spent on asking."""
        self._credit_by_rows: dict[int, float] = {}
        """What was saved beyond what was spent, in plain steps, by the binary digits of the rows."""
        self._asked: dict[int, None] = {}
        self._rounds = 0
        self.cheap = True
        """Asking every row takes next to nothing of a round."""
        self._rows_a_round = math.inf
        self._credit, self._turn = 0.0, 0
        """Rows that may be asked though asking does not pay: how many more with each round, how many
        now, and whose turn it is."""
        self._num_asked = 1
        """Rows in the last round in which any were."""

    def weigh(self, num_rows: int, plain_s: float) -> None:
        """Works out what asking means for rounds of so many rows and seconds."""
        if not self._ask.known:
            return
        self.cheap = self._ask.seconds(num_rows) <= CHEAP * plain_s
        of_a_row = self._ask.seconds(self._num_asked) / self._num_asked
        self._rows_a_round = IDLE * plain_s / max(of_a_row, 1e-9)

    @property
    def pays(self) -> bool:
        return self._earned.value >= self._paid.value

    def affords(self, num_rows: int) -> bool:
        """Plans for so many rows have not lost more than they may."""
        size = num_rows.bit_length()
        credit = self._credit_by_rows.setdefault(size, FIRST_CREDIT)
        if credit <= 0:
            self._credit_by_rows[size] = credit + TRYING
        return credit > 0

    def turns(self, num_rows: int, rounds: int = 1) -> Sequence[int]:
        """The rows, by index, that are asked in this round though asking does not pay; `rounds`: since
        the last question."""
        credit = self._credit + rounds * self._rows_a_round
        few = int(min(credit, num_rows))
        self._credit = min(credit - few, 1.0)
        if not few:
            return ()
        self._turn += few
        return [(self._turn + index) % num_rows for index in range(few)]

    def observe(self, round_: RoundCost, cost: StepCost, gained: float, expected: float) -> None:
        """Takes in a round in which somebody was asked. `gained`: what its accepted tokens count;
        `expected`: what was expected, which says what drafts are worth with less noise."""
        asked = round_.asked
        num_asked = self._num_asked = len(asked)
        self._rounds += 1
        every = TIME_EVERY if self._rounds < EARLY else LATER_EVERY
        timed = not self._ask.known or self._rounds % every == 0
        many_new = self._num_new(asked) > MOST_NEW * num_asked
        usual_s = self._ask.seconds(num_asked) if self._ask.known else 0.0
        paid = round_.propose_seconds
        if timed and not many_new:
            self._ask.add(num_asked, paid)
            if cost.known:
                self.weigh(round_.num_rows, cost.seconds(round_.num_rows))
            if steps := max(len(trial.draft) for trial in asked):
                self.draft_step.add(round_.num_drafted / steps, paid / steps)
        if cost.known:
            num_rows, kept = round_.num_rows, round_.num_kept
            plain_s = cost.seconds(num_rows)
            saved = hoped = 0.0
            if kept:
                drafting_s = cost.seconds(num_rows + kept)
                saved = plain_s * (num_rows + gained) / num_rows - drafting_s
                hoped = plain_s * (num_rows + expected) / num_rows - drafting_s
            self._earned.add(hoped)
            self._paid.add(paid)
            if many_new:  # what is paid once for a row is not held against drafting
                paid = min(paid, usual_s)
            self._settle(num_rows, (saved - paid) / plain_s)

    def _num_new(self, asked: Sequence[Trial]) -> int:
        """Rows that are asked for the first time; remembers them."""
        before, num = self._asked, 0
        for trial in asked:
            serial = trial.row.serial
            if serial not in before:
                before[serial] = None
                num += 1
        while len(before) > MOST_ASKED:
            del before[next(iter(before))]
        return num

    def _settle(self, num_rows: int, gain: float) -> None:
        size = num_rows.bit_length()
        credit = self._credit_by_rows.get(size, FIRST_CREDIT) + gain
        self._credit_by_rows[size] = min(max(credit, LEAST_CREDIT), MOST_CREDIT)


@dataclass(slots=True)
class Probes:
    """When to try again what does not pay: after `every` rounds, then twice that, and so on."""

    every: int
    turn: int = 0
    """Whose turn it is to be tried."""
    _waited: int = 0
    _patience: int = 0

    def due(self, rounds: int = 1) -> bool:
        """Counts rounds in which nothing was scored."""
        self._waited += rounds
        if self._waited <= self.every << self._patience:
            return False
        self._waited, self._patience = 0, min(self._patience + 1, MOST_PATIENT)
        self.turn += 1
        return True

    def found(self) -> None:
        """Something was accepted."""
        self._waited = self._patience = 0


@dataclass(slots=True)
class _Running:
    """A running mean."""

    value: float = 0.0
    _known: bool = False

    def add(self, value: float) -> None:
        self.value += (value - self.value) * (SMOOTH if self._known else 1.0)
        self._known = True
