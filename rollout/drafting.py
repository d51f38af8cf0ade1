"""Making a draft that verification can trust, by construction.

`Drafting` draws each token from the very law that it records, by the row's own draft stream, and a
token once drawn can only be kept. Whether to go on is decided before the next token is drawn, so
the length depends on the tokens before and on laws, never on the token it would drop: a stopping
time, for which every rule of `rollout.verify` is exact. ("Stop because the last token was unlikely,
but keep it" is possible here, "and drop it" is not: that would bend the emitted law by up to .25.)
"""

import torch

from rollout.draft import POINT_MASS, DenseLaw, Draft, DraftLaw, SparseLaw
from rollout.row import Row


class Drafting:
    """One draft being made for one row; it can grow and be finished, nothing else."""

    def __init__(self, row: Row, max_len: int) -> None:
        self._draws, self._start, self._max_len = row.draws, len(row.token_ids), max_len
        self._token_ids: list[int] = []
        self._laws: list[DraftLaw] = []

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self._max_len - len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens so far, the context of the next law."""
        return tuple(self._token_ids)

    def point(self, token: int) -> None:
        """Adds a token that was chosen without randomness."""
        self._add(token, POINT_MASS)

    def sample(self, law: SparseLaw | DenseLaw) -> int:
        """Draws the next token from `law`, adds and returns it."""
        position = self._start + len(self._token_ids)
        drawn = self._draws.draft(law.probs, self._start, position)
        token = int(law.ids[drawn]) if isinstance(law, SparseLaw) else drawn
        self._add(token, law)
        return token

    def _add(self, token: int, law: DraftLaw) -> None:
        assert self.room > 0, "the draft is as long as it may be; ask `room` first"
        self._token_ids.append(token)
        self._laws.append(law)

    def done(self) -> Draft:
        return Draft(tuple(self._token_ids), tuple(self._laws))


def sparse_law(weights: dict[int, float]) -> SparseLaw:
    """A law over a few ids from unnormalised weights > 0."""
    probs = torch.tensor(list(weights.values()), dtype=torch.float64)
    return SparseLaw(torch.tensor(list(weights)), probs / probs.sum())
