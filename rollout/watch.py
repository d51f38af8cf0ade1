"""Watching exactness in production: two statistics that are free of assumptions about the model.

- *Observed minus expected accepted length* (`rollout.verify`): a martingale, so its sum S over rounds
  with foreseeable variance V and steps of at most b exceeds s with probability at most
  2 exp(-s^2 / 2(V + b s / 3)) (Freedman, Ann. Probab. 3, 1975; here V is what was foreseen so far and
  b the deepest position reached: conservative in simulation, not the theorem to the letter). Sees
  drafts that were not drawn from the law handed over, and acceptance by another rule. Point masses:
  every round; sampled drafts, for which it costs rows of the vocabulary: at one start position of
  FORETELL_EVERY.
- *Randomised probability integral transform* of emitted tokens (Smith, J. Forecasting 4, 1985): with F
  the cumulative law of the position and v a uniform of its own, F(y - 1) + v p(y) is uniform and
  independent of the past if y was drawn from p. Sees any other law of the emitted tokens. At one
  position of PIT_EVERY, by position alone: choosing tokens by what became of them ("the
  corrections") would have another law.

Both are counts that add up over rows, actors and steps. They judge what is emitted against the law
that the verifying forward computed; a forward that computes a wrong law is beyond them and is what
`rollout audit` recomputes.
"""

import math
from collections.abc import Sequence

import torch

from rollout.law import TargetLaws
from rollout.request import SpecCounters
from rollout.row import Row
from rollout.streams import Draws

FORETELL_EVERY = 8
PIT_EVERY = 8
PIT_BINS = 16
ALARM_LEVEL = 1e-6
"""Chance that a correct engine raises the alarm at one look."""
GOLDEN = 0x9E3779B9
"""2^32 over the golden ratio."""
SMALLEST_BIN = 20.0
"""Expected count of a bin below which the chi-square approximation is not used."""


def foretells(start: int) -> bool:
    """Whether the round that begins at sequence position `start` is foretold."""
    return _one_in(FORETELL_EVERY, start)


def looks_at(position: int) -> bool:
    """Whether the token emitted at a sequence position is transformed."""
    return _one_in(PIT_EVERY, position)


def _one_in(every: int, position: int) -> bool:
    """Multiples of the golden ratio near an integer. No period of rounds keeps step with them, as it
    would with every eighth position: rounds of four tokens would show their bonus and nothing else."""
    return (position * GOLDEN + 2**31 // every) % 2**32 < 2**32 // every


def pit_bin(laws: TargetLaws, index: int, token: int, draws: Draws, position: int) -> int:
    """Bin of the transformed token."""
    value = laws.below(index, token) + draws.pit(position) * laws.prob(index, token)
    return min(int(value * PIT_BINS), PIT_BINS - 1)


def look_at(row: Row, laws: TargetLaws, indices: Sequence[int]) -> None:
    """Counts where some of the tokens that a row emitted last, by the positions `indices` of the laws,
    fell in these."""
    if row.request.sampling.greedy:
        return
    counts = row.counters.pit_counts
    for position, index in enumerate(indices, start=len(row.token_ids) - len(indices)):
        if looks_at(position):
            counts.extend([0] * (PIT_BINS - len(counts)))
            counts[pit_bin(laws, index, row.token_ids[position], row.draws, position)] += 1


def acceptance_p_value(counters: SpecCounters) -> float | None:
    """Bound on the chance of so large a difference between observed and expected accepted length;
    None before anything was foretold."""
    if not counters.foretold_reached:
        return None
    surprise = abs(counters.foretold_accepted - counters.expected_accepted)
    step = max(1, len(counters.reached))  # the longest draft so far
    spread = counters.expected_variance + step * surprise / 3
    return min(1.0, 2 * math.exp(-(surprise**2) / (2 * spread))) if spread else 1.0


def pit_p_value(counters: SpecCounters) -> float | None:
    """Chi-square tail of the bins against uniform; None while they are too empty to tell."""
    mean = sum(counters.pit_counts) / PIT_BINS
    if mean < SMALLEST_BIN:
        return None
    distance = sum((count - mean) ** 2 for count in counters.pit_counts) / mean
    half = torch.tensor([(PIT_BINS - 1) / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def alarm(counters: SpecCounters) -> bool:
    """One of the two is beyond ALARM_LEVEL."""
    p_values = (acceptance_p_value(counters), pit_p_value(counters))
    return any(p is not None and p < ALARM_LEVEL for p in p_values)
