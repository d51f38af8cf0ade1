"""Prompt lookup: continue as the row itself did after the same last tokens.

The longest suffix of at most `max_match` tokens that occurred earlier in the row (prompt included)
is looked up, its most recent earlier occurrence wins, and what followed it is the draft, a point
mass (prompt lookup decoding; the n-gram mode of common engines). The index is the row's alone and
grows by the tokens that were emitted: no row sees another's text.
"""

from collections.abc import Mapping, Sequence

from rollout.draft import NO_DRAFT, Draft
from rollout.row import Row


class _RowIndex:
    """Where each n-gram of a row last ended, one round behind for the row's own suffix."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._lengths = range(max_match, min_match - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def follow(self, tokens: Sequence[int]) -> int | None:
        """Position behind the latest earlier occurrence of the longest known suffix."""
        for end in range(self._indexed + 1, len(tokens)):  # every n-gram but those that end here
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
        for length in self._lengths:
            if length < len(tokens):
                position = self._ends.get(tuple(tokens[-length:]))
                if position is not None:
                    return position
        return None


class NgramProposer:
    """Drafts from the row's own tokens."""

    def __init__(self, *, min_match: int = 2, max_match: int = 4) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._indices: dict[int, _RowIndex] = {}

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        return [self._draft(row, max_len) for row, max_len in zip(rows, max_lens, strict=True)]

    def _draft(self, row: Row, max_len: int) -> Draft:
        if not max_len:
            return NO_DRAFT
        index = self._indices.setdefault(row.serial, _RowIndex(self._min_match, self._max_match))
        position = index.follow(row.token_ids)
        if position is None:
            return NO_DRAFT
        return Draft.of_points(row.token_ids[position : position + max_len])

    def observe(self, rows: Sequence[Row]) -> None:
        pass

    def finish(self, row: Row) -> None:
        self._indices.pop(row.serial, None)

    def publish(self, version: int) -> None:
        pass

    def gauges(self) -> Mapping[str, float]:
        return {"ngram/rows": float(len(self._indices))}
