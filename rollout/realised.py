"""Whether drafting pays by the clock alone, whatever chances and costs were believed.

Lengths are chosen by a model of costs (`rollout.step_cost`) that learns from what is tried. Where every
round drafts, plain rounds are not, and a model that takes them for dearer than they are is never put
right. So for each number of rows the seconds a token of rounds that drafted, drafting included, stand
beside those of plain rounds, of which one is put in now and then; where drafting has lost, it rests,
twice as long each time.
"""

from dataclasses import dataclass

from rollout.round_cost import RoundCost

PLAIN_EVERY = 64
"""Rounds that draft before a plain one is put in; the first time after TRIED."""
TRIED, FEW_TRIED = 16, 8
"""Rounds that drafted before they are judged, and before those that are far too slow are."""
MARGIN, FAR = 1.02, 1.5
"""Seconds a token over those of plain rounds that pass for as good, and that are far too slow."""
REST, MOST_PATIENT = 64, 5
"""Rounds that drafting rests after it has lost, and how often that may double."""
MEMORY_DRAFTED, MEMORY_PLAIN = 32, 8
"""Rounds that a mean reaches back."""
STALL = 3.0
"""A round counts as at most this many times the mean: a machine that stood still says nothing."""


@dataclass(slots=True)
class _Mean:
    """Of seconds a token, over the last rounds."""

    memory: int
    num: int = 0
    value: float = 0.0

    def add(self, value: float) -> None:
        if self.num:
            value = min(value, STALL * self.value)
        self.num += 1
        self.value += (value - self.value) / min(self.num, self.memory)


class _Rounds:
    """All of one number of rows."""

    def __init__(self) -> None:
        self.drafted, self.plain = _Mean(MEMORY_DRAFTED), _Mean(MEMORY_PLAIN)
        self.since_plain = self.rest = self.patience = 0


class Realised:
    """Learns from rounds, objects to drafting."""

    def __init__(self) -> None:
        self._by_rows: dict[int, _Rounds] = {}

    def objection(self, num_rows: int) -> str | None:
        """Why the next round of so many rows must not draft; None: it may. Counts the round."""
        found = self._by_rows.get(num_rows)
        if found is None:
            return None
        if found.rest:
            found.rest -= 1
            return "drafting has lost by the clock"
        if found.since_plain >= (PLAIN_EVERY if found.plain.num else TRIED):
            return "to time a plain step"
        return None

    def observe(self, round_: RoundCost, kept: int, gained: float) -> None:
        """Takes in a round of rows that decode, without a prompt; `kept`: drafted tokens that it
        scored, `gained`: what those accepted count."""
        num_rows = round_.num_rows
        found = self._by_rows.get(num_rows)
        if found is None:
            found = self._by_rows[num_rows] = _Rounds()
        if not kept:
            found.since_plain = 0
            found.plain.add(round_.seconds / num_rows)
            return
        found.since_plain += 1
        seconds = round_.seconds + round_.propose_seconds
        found.drafted.add(seconds / (num_rows + gained))
        if found.plain.num and found.drafted.num >= FEW_TRIED:
            self._judge(found)

    def _judge(self, found: _Rounds) -> None:
        tried_enough = found.drafted.num >= TRIED
        if found.drafted.value <= (MARGIN if tried_enough else FAR) * found.plain.value:
            if tried_enough:
                found.patience = 0
            return
        found.rest = REST << found.patience
        found.patience = min(found.patience + 1, MOST_PATIENT)
        found.drafted = _Mean(MEMORY_DRAFTED)
