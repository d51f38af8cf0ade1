"""Making a draft that verification can trust, by construction.

`Drafting` draws each token from the very law that it records, by the row's own draft stream, and a
token once drawn can only be kept. Whether to go on is decided before the next token is drawn, so
the length depends on the tokens before and on laws, never on the token it would drop: a stopping
time, for which every rule of `rollout.verify` is exact. ("Stop because the last token was unlikely,
but keep it" is possible here, "and drop it" is not: that would bend the emitted law by up to .25.)
"""

import math
from collections.abc import Sequence

import torch

from rollout.draft import POINT_MASS, DenseLaw, Draft, DraftLaw, SparseLaw
from rollout.law import TargetLaws
from rollout.row import Row


class Drafting:
    """One draft being made for one row; it can grow and be finished, nothing else."""

    def __init__(self, row: Row, max_len: int) -> None:
        self._draws, self._start, self._max_len = row.draws, len(row.token_ids), max_len
        self._token_ids: list[int] = []
        self._laws: list[DraftLaw] = []
        self._chances: list[float] = []

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self._max_len - len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens so far, the context of the next law."""
        return tuple(self._token_ids)

    def point(self, token: int, chance: float = math.nan) -> None:
        """Adds a token that was chosen without randomness; `chance` is the estimate that it will be
        accepted, NaN for none."""
        self._add(token, POINT_MASS, chance)

    def points(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """Adds several as `point` does."""
        assert len(tokens) == len(chances) and len(tokens) <= self.room, "one chance each, and room"
        self._token_ids += tokens
        self._laws += [POINT_MASS] * len(tokens)
        self._chances += chances

    def sample(self, law: SparseLaw | DenseLaw, chance: float = math.nan) -> int:
        """Draws the next token from `law`, adds and returns it; `chance` is the estimate, made before
        the draw, that whatever is drawn will be accepted."""
        position = self._start + len(self._token_ids)
        drawn = self._draws.draft(law.probs, self._start, position)
        token = int(law.ids[drawn]) if isinstance(law, SparseLaw) else drawn
        self._add(token, law, chance)
        return token

    def sample_at(self, laws: TargetLaws, index: int) -> int:
        """Draws the next token from the law at position `index` of a drafting model's, adds and returns
        it: as `sample`, by sums that are known already."""
        position = self._start + len(self._token_ids)
        law = laws.drawable(index)
        token = self._draws.draft(law.weights, self._start, position, laws.block_ends(index))
        self._add(token, law, math.nan)
        return token

    def _add(self, token: int, law: DraftLaw, chance: float) -> None:
        assert self.room > 0, "the draft is as long as it may be; ask `room` first"
        self._token_ids.append(token)
        self._laws.append(law)
        self._chances.append(chance)

    def done(self) -> Draft:
        unsaid = all(chance != chance for chance in self._chances)  # NaN is not itself
        chances = None if unsaid else tuple(self._chances)
        return Draft(tuple(self._token_ids), tuple(self._laws), chances=chances)


def sparse_law(weights: dict[int, float]) -> SparseLaw:
    """A law over a few ids from unnormalised weights > 0."""
    probs = torch.tensor(list(weights.values()), dtype=torch.float64)
    return SparseLaw(torch.tensor(list(weights)), probs / probs.sum())
