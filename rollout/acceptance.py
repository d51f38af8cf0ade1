"""How likely drafted tokens are to be accepted: posteriors, shared as far as they are alike.

A cell is a depth of the draft and a band of the proposer's own estimate, where it has one
(`Draft.chances`); its rate is a Beta posterior mean. Its prior is the rate of its band at all depths,
whose prior is the estimate itself: deep cells see little, and estimates are too sure of themselves.
Before a token is drafted there is no estimate: such cells learn from all tokens of a depth, and their
prior is the rate a token earlier, so a good start is followed further than it was ever tried.

What a prompt, and then a row, does better or worse than its cells is a factor, shrunk to 1 while little
was seen of it. A row that does worse than it should lowers the rate of every token. One that does
better raises only that of a first token without an estimate: an estimate knows what the row is like,
and further down its luck would count many times. Replayed rollouts of SmolLM2 (60 at T=1, four at a
time, history's chains of 8, kept where a token's chance is above a threshold) netted this many
accepted tokens a round and row beyond the threshold for each that was kept:

    threshold                                          .07   .15   .30   .45   .60
    cells whose prior is the estimate, all factors    .143  .082  .031  .008 -.005
    bands as priors, factors as above                 .152  .093  .041  .024  .010

Rates are conditional: of the times the verification got to a depth (Leviathan et al., arXiv:2211.17192,
section 3.3, with measured rates in place of one constant).

Plain numbers and no arrays: a round has few tokens, and one operation on an array takes as long as ten
on numbers. Older rounds are forgotten by counting later ones for more.
"""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

BANDS = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Edges of the bands of estimates."""
NO_ESTIMATE = len(BANDS) + 1
"""The band of tokens without one (which is NaN, the one number that is not itself)."""
DEPTHS = 64
"""Depths told apart; deeper ones count as the last."""
ESTIMATE_TRIALS = 2.0
"""What the estimate counts for beside what its band has shown."""
PRIOR_TRIALS = 8.0
"""What the band counts for beside what one of its depths has shown."""
FIRST_TRIALS = 2.0
"""What the rate a token earlier counts for where there is no estimate."""
FACTOR_TRIALS = 16.0
"""What stands for 'as the cells say' in a prompt's and a row's factor."""
FACTOR_FORGET = 0.995
FORGET = 0.99
"""Weight that a cell's evidence keeps after the next round that adds to any; a policy moves."""
MOST_WEIGHT = 1e12
"""Of a round, against the first; all counts are divided by it then."""
MOST_FACTORS = 4096
"""Prompts and rows remembered, the most recent."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one round showed of one row's draft."""

    prompt: Hashable
    row: Hashable
    chances: Sequence[float]
    """The proposer's estimates; NaN where it has none."""
    accepted: Sequence[bool]
    """Of the tokens that the verification got to, in order."""


class Acceptance:
    """Learns from rounds, predicts for drafts."""

    def __init__(self) -> None:
        self._reached = [[0.0] * DEPTHS for _ in range(len(BANDS) + 2)]
        self._accepted = [[0.0] * DEPTHS for _ in range(len(BANDS) + 2)]
        """By band, the last for tokens without an estimate, and depth."""
        self._of_band = [[0.0, 0.0] for _ in range(len(BANDS) + 2)]
        """Reached and accepted at all depths: adding them up for each token would take longer."""
        self._weight = 1.0
        """Of what the last round added; each round before it counts for FORGET as much."""
        self._prompts, self._rows = _Factors(), _Factors()
        self._unaided: list[tuple[float, float]] | None = None
        """(rate, trials) by depth where there is no estimate; None until it is asked for."""

    def chain(
        self,
        prompt: Hashable,
        row: Hashable,
        chances: Sequence[float],
        *,
        hope: float = 0.0,
        least: float = 0.0,
    ) -> list[float]:
        """The chance that a token of a row's draft and all before it are accepted, from the proposer's
        estimates, NaN where it has none. Rates are taken `hope` standard deviations above their mean;
        what follows a chance below `least` is left out."""
        factor = self._rows.factor(row, self._prompts.factor(prompt, 1.0))
        worse, reached, chain = min(factor, 1.0), 1.0, []
        for depth, chance in enumerate(chances):
            rate, trials = self._cell(depth, chance)
            if hope:
                rate += hope * math.sqrt(max(rate * (1.0 - rate), 0.0) / trials)
            reached *= min(rate * (worse if depth or chance == chance else factor), 1.0)
            chain.append(reached)
            if reached < least:
                break
        return chain

    def _cell(self, depth: int, chance: float) -> tuple[float, float]:
        """Rate and the trials that it rests on, prior included."""
        if chance != chance:
            return self._without_estimate(depth)
        band, depth = bisect_left(BANDS, chance), min(depth, DEPTHS - 1)
        weight = self._weight
        reached, accepted = self._of_band[band]
        prior = (accepted / weight + ESTIMATE_TRIALS * chance) / (
            reached / weight + ESTIMATE_TRIALS
        )
        trials = self._reached[band][depth] / weight + PRIOR_TRIALS
        return (self._accepted[band][depth] / weight + PRIOR_TRIALS * prior) / trials, trials

    def _without_estimate(self, depth: int) -> tuple[float, float]:
        """From all tokens of a depth; the prior is the rate a token earlier, 1/2 at the first."""
        if self._unaided is None:
            rate, self._unaided = 0.5, []
            for accepted, reached in zip(zip(*self._accepted), zip(*self._reached)):
                if not any(reached):  # nor was any deeper one
                    break
                trials = sum(reached) / self._weight + FIRST_TRIALS
                rate = (sum(accepted) / self._weight + FIRST_TRIALS * rate) / trials
                self._unaided.append((rate, trials))
        if depth < len(self._unaided):
            return self._unaided[depth]
        return (self._unaided[-1][0] if self._unaided else 0.5), FIRST_TRIALS

    def learn(self, evidence: Sequence[Evidence]) -> None:
        """One round."""
        evidence = [one for one in evidence if one.accepted]
        if not evidence:
            return
        for one in evidence:
            self._tell_apart(one)
        self._weight /= FORGET
        weight, self._unaided = self._weight, None
        for one in evidence:
            for depth, (chance, hit) in enumerate(zip(one.chances, one.accepted)):
                band = bisect_left(BANDS, chance) if chance == chance else NO_ESTIMATE
                depth = min(depth, DEPTHS - 1)
                self._reached[band][depth] += weight
                self._accepted[band][depth] += weight * hit
                self._of_band[band][0] += weight
                self._of_band[band][1] += weight * hit
        if weight > MOST_WEIGHT:
            self._rescale()

    def _tell_apart(self, one: Evidence) -> None:
        """How the prompt and the row did against their cells. A cell that has seen little says little
        about that: its own mistake would be taken for theirs, and outlive it."""
        expected = accepted = 0.0
        for depth, (chance, hit) in enumerate(zip(one.chances, one.accepted)):
            rate, trials = self._cell(depth, chance)
            known = 1.0 - (PRIOR_TRIALS if chance == chance else FIRST_TRIALS) / trials
            expected += known * rate
            accepted += known * hit
        if expected:
            self._prompts.learn(one.prompt, accepted, expected)
            self._rows.learn(one.row, accepted, expected)

    def _rescale(self) -> None:
        for counts in (*self._reached, *self._accepted, *self._of_band):
            counts[:] = [count / self._weight for count in counts]
        self._weight = 1.0


class _Factors:
    """Accepted against expected tokens by key, with forgetting."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def factor(self, key: Hashable, prior: float) -> float:
        accepted, expected = self._counts.get(key, (0.0, 0.0))
        return (accepted + FACTOR_TRIALS * prior) / (expected + FACTOR_TRIALS)

    def learn(self, key: Hashable, accepted: float, expected: float) -> None:
        before, expected_before = self._counts.pop(key, (0.0, 0.0))
        kept = FACTOR_FORGET
        self._counts[key] = kept * before + accepted, kept * expected_before + expected
        if len(self._counts) > MOST_FACTORS:
            self._counts.popitem(last=False)
