"""The seam between the round and whoever guesses the next tokens."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from rollout.draft import Draft
from rollout.row import Row


class Proposer(Protocol):
    """Drafts for live rows. It reads rows and never writes to them.

    A draft may be shorter than asked for or empty: choosing none is always possible. Its laws must
    be those the tokens were drawn from.
    """

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        """One draft a row, of at most the length given for it."""
        ...

    def observe(self, rows: Sequence[Row]) -> None:
        """Called after each round, when the rows hold the tokens it emitted."""
        ...

    def finish(self, row: Row) -> None:
        """The row is complete (or gave up) and will not be seen again."""
        ...

    def publish(self, version: int) -> None:
        """New policy weights are in force."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Sizes worth watching, by metric name."""
        ...


@runtime_checkable
class TreeProposer(Proposer, Protocol):
    """A proposer that can branch (`rollout.draft_tree`)."""

    def propose_trees(
        self, rows: Sequence[Row], max_nodes: Sequence[int], max_depths: Sequence[int]
    ) -> list[Draft]:
        """One tree of point masses a row, of at most that many tokens and levels."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A proposer whose memory can be told to others of the same model, as plain tensors. Nothing of
    rows in flight is told."""

    def export(self) -> dict[str, torch.Tensor]:
        """Everything it remembers."""
        ...

    def export_new(self) -> dict[str, torch.Tensor]:
        """What it learned itself since the last call: all others are told now."""
        ...

    def export_told(self) -> dict[str, torch.Tensor]:
        """Everything but what `export_new` will hand out: where all others stand."""
        ...

    def merge(self, exported: Mapping[str, torch.Tensor]) -> None:
        """Takes in what another exported. Raises InvalidConfig for that of another model."""
        ...
