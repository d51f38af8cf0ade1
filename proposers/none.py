"""No drafts: every round is a plain decode step."""

from collections.abc import Mapping, Sequence

from rollout.draft import NO_DRAFT, Draft
from rollout.row import Row


class NoProposer:
    """The proposer of `proposer=none`."""

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        return [NO_DRAFT] * len(rows)

    def observe(self, rows: Sequence[Row]) -> None:
        pass

    def finish(self, row: Row) -> None:
        pass

    def publish(self, version: int) -> None:
        pass

    def gauges(self) -> Mapping[str, float]:
        return {}
