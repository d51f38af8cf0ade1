"""How likely drafted tokens are to be accepted: posteriors, shared as far as they are alike.

A cell is a depth of the draft and a band of the proposer's own estimate, where it has one
(`Draft.chances`); its rate is a Beta posterior mean whose prior is the estimate itself. Before a token
is drafted there is no estimate: such cells learn from all tokens of a depth, and their prior is the
rate a token earlier, so a good start is followed further than it was ever tried. What a prompt, and
then a row, does better or worse than its cells is a factor, shrunk to 1 while little was seen of it.

Rates are conditional: of the times the verification got to a depth (Leviathan et al., arXiv:2211.17192,
section 3.3, with measured rates in place of one constant).

Shapes: B rows, n depths.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np

BANDS = np.array([0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95])
"""Edges of the bands of estimates."""
UNAIDED = len(BANDS) + 1
"""The band of all tokens, for where there is no estimate."""
DEPTHS = 64
"""Depths told apart; deeper ones count as the last."""
PRIOR_TRIALS = 2.0
FACTOR_TRIALS = 16.0
"""What stands for 'as the cells say' in a prompt's and a row's factor."""
FACTOR_FORGET = 0.995
FORGET = 0.98
"""Weight that a cell's evidence keeps after the next round that adds to any; a policy moves."""
MOST_FACTORS = 4096
"""Prompts and rows remembered, the most recent."""


class Acceptance:
    """Learns from rounds, predicts for drafts."""

    def __init__(self) -> None:
        self._reached = np.zeros((UNAIDED + 1, DEPTHS))
        self._accepted = np.zeros((UNAIDED + 1, DEPTHS))
        self._prompts, self._rows = _Factors(), _Factors()
        self._unaided = np.full(DEPTHS, 0.5)

    def rates(self, chances: np.ndarray, hope: float = 0.0) -> np.ndarray:
        """The proposer's estimates [B, n] at depths 0..n-1, NaN where it has none -> rates [B, n];
        each `hope` standard deviations above its mean."""
        return self._rates(_cells(chances), chances, hope)

    def _rates(
        self, cells: tuple[np.ndarray, np.ndarray], chances: np.ndarray, hope: float = 0.0
    ) -> np.ndarray:
        bands, depths = cells
        prior = np.where(bands == UNAIDED, self._unaided[depths], chances)
        trials = self._reached[bands, depths] + PRIOR_TRIALS
        rates: np.ndarray = (self._accepted[bands, depths] + PRIOR_TRIALS * prior) / trials
        if hope:
            rates += hope * np.sqrt(np.maximum(rates * (1.0 - rates), 0.0) / trials)
        return rates

    def _learn_unaided(self) -> None:
        """The prior without an estimate: the rate at the depth before; 1/2 at the first."""
        rate, prior = 0.5, []
        counts = zip(self._accepted[UNAIDED].tolist(), self._reached[UNAIDED].tolist())
        for accepted, reached in counts:
            prior.append(rate)
            if reached:
                rate = (accepted + PRIOR_TRIALS * rate) / (reached + PRIOR_TRIALS)
        self._unaided = np.array(prior)

    def factors(self, prompts: Sequence[Hashable], rows: Sequence[Hashable]) -> np.ndarray:
        """[B] what a row's rates are to be multiplied by."""
        pairs = zip(prompts, rows, strict=True)
        return np.array(
            [self._rows.factor(row, self._prompts.factor(prompt, 1.0)) for prompt, row in pairs]
        )

    def learn(
        self,
        prompts: Sequence[Hashable],
        rows: Sequence[Hashable],
        chances: np.ndarray,
        reached: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """One round: estimates [B, n] and, as 0 and 1, where the verification got to [B, n] and what
        it accepted there [B, n]."""
        if not reached.any():
            return
        cells = _cells(chances)
        expected = (self._rates(cells, chances) * reached).sum(-1)
        got = (accepted * reached).sum(-1)
        self._reached *= FORGET
        self._accepted *= FORGET
        unaided = np.full_like(cells[0], UNAIDED), cells[1]
        estimated = reached * (cells[0] != UNAIDED)
        for into, counted in ((cells, estimated), (unaided, reached)):
            np.add.at(self._reached, into, counted)
            np.add.at(self._accepted, into, accepted * counted)
        self._learn_unaided()
        for prompt, row, hits, hoped in zip(prompts, rows, got.tolist(), expected.tolist()):
            if hoped:
                self._prompts.learn(prompt, hits, hoped)
                self._rows.learn(row, hits, hoped)


def _cells(chances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(band, depth) [B, n] of each."""
    bands = np.where(np.isnan(chances), UNAIDED, np.searchsorted(BANDS, chances))
    depths = np.minimum(np.arange(chances.shape[1]), DEPTHS - 1)
    return bands, depths[None].repeat(len(chances), 0)


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
