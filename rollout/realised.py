"""Whether drafting pays by the clock alone, whatever chances and costs were believed.

Lengths are chosen by a model of costs (`rollout.step_cost`) that learns from what is tried. Where every
round drafts, plain rounds are not, and a model that takes them for dearer than they are is never put
right. So a plain round is put in now and then and compared with those that draft around it, since
machines are now fast and now slow:

    (1 + what a round gained a row) * seconds of a plain round / seconds of one that drafts

Rounds of about as many rows, of as many binary digits, are judged together. Their seconds count in
units of what a plain one of their rows is believed to take, a belief that cancels unless rows end
between two rounds that are compared. Where drafting has lost by more than may be chance, it rests,
twice as long each time.
"""

import math
from dataclasses import dataclass

from rollout.round_cost import RoundCost

PLAIN_EVERY = 64
"""Rounds that draft before a plain one is put in, while it is certain that they gain; else TRIED, which
costs a sixteenth of what is little then."""
TRIED = 16
TOGETHER = 8
"""Rounds that draft which a comparison needs."""
MARGIN = 0.02
"""Loss that passes for none, relative."""
NOISE = 0.07
"""Of one comparison, relative; a loss is certain where it exceeds the standard error of their mean."""
REST, MOST_PATIENT = 64, 5
"""Rounds that drafting rests after it has lost, and how often that may double."""
MEMORY, MEMORY_PLAIN = 16, 4
"""Comparisons, and plain rounds of one, that a mean reaches back."""
TIMING = "to time a plain step"
"""The objection that holds for one round."""
STALL = 3.0
"""A round counts as at most this many times the mean: a machine that stood still says nothing."""


@dataclass(slots=True)
class _Mean:
    """Of the last values."""

    memory: int
    num: int = 0
    value: float = 0.0

    def add(self, value: float) -> None:
        self.num = min(self.num + 1, self.memory)
        self.value += (value - self.value) / self.num

    def add_seconds(self, seconds: float) -> None:
        self.add(min(seconds, STALL * self.value) if self.num else seconds)


class _Rounds:
    """All of about as many rows."""

    def __init__(self) -> None:
        self.since_plain = self.rest = self.patience = 0
        self.begin()
        self.compare()

    def begin(self) -> None:
        """Forgets all comparisons."""
        self.faster = _Mean(MEMORY)
        """Log of drafting's speed over plain decoding's."""
        self.wait = TRIED
        """Rounds that draft before a plain one is put in."""

    def compare(self) -> None:
        """Begins the next comparison."""
        self.plain, self.drafted = _Mean(MEMORY_PLAIN), _Mean(PLAIN_EVERY)
        """Seconds of plain rounds and of those that drafted, in plain rounds."""
        self.gained = _Mean(PLAIN_EVERY)
        """What those gained a row."""


class Realised:
    """Learns from rounds, objects to drafting."""

    def __init__(self) -> None:
        self._by_size: dict[int, _Rounds] = {}

    def objection(self, num_rows: int, rounds: int = 1) -> str | None:
        """Why the next round of so many rows must not draft; None: it may. Counts the rounds since the
        last question."""
        found = self._by_size.get(num_rows.bit_length())
        if found is None:
            return None
        if found.rest:
            found.rest = max(0, found.rest - rounds)
            return "drafting has lost by the clock"
        if found.since_plain >= found.wait:
            return TIMING
        return None

    def observe(self, round_: RoundCost, plain_s: float, kept: int, gained: float) -> None:
        """Takes in a round of rows that decode, without a prompt. `plain_s`: what a plain one is
        believed to take; `kept`: drafted tokens that it scored; `gained`: what those accepted count."""
        size = round_.num_rows.bit_length()
        found = self._by_size.get(size)
        if found is None:
            found = self._by_size[size] = _Rounds()
        if kept:
            found.since_plain += 1
            found.gained.add(gained / round_.num_rows)
            found.drafted.add_seconds((round_.seconds + round_.propose_seconds) / plain_s)
        else:
            found.since_plain = 0
            found.plain.add_seconds(round_.seconds / plain_s)
        if found.plain.num and found.drafted.num >= TOGETHER:
            slower = found.drafted.value / found.plain.value
            found.faster.add(math.log((1.0 + found.gained.value) / slower))
            found.compare()
            self._judge(found)

    def _judge(self, found: _Rounds) -> None:
        faster = found.faster
        error = NOISE / math.sqrt(faster.num)
        gains = faster.value > error
        found.wait = PLAIN_EVERY if gains else TRIED
        if gains:
            found.patience = 0
        elif faster.value < -MARGIN - error:
            found.rest = REST << found.patience
            found.patience = min(found.patience + 1, MOST_PATIENT)
            found.begin()
