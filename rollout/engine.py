"""The seam between whoever wants rollouts and whatever makes them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from rollout.request import RolloutRequest, RolloutSample

InFlight = Literal["interrupt", "finish", "abort"]
"""What a weight update does to rows in flight: keep their tokens, drop their cache and go on under
the new weights; let them finish first; or end them and hand them back."""


class Engine(Protocol):
    """Continuous batching: submit any time, step until idle."""

    version: int | None
    """Policy version in force; None before the first load. Nothing is generated without one."""

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queues requests. Raises InvalidRequest for the first bad one and queues none."""
        ...

    def step(self) -> list[RolloutSample]:
        """One round for every live row; the samples that ended in it."""
        ...

    def abort(self, request_ids: Sequence[str]) -> list[RolloutSample]:
        """Ends the named requests now; their samples hold what was generated."""
        ...

    def prepare(self, weights: Mapping[str, Any]) -> Any:
        """Builds new weights beside the old; raises InvalidWeights and changes nothing."""
        ...

    def load(self, prepared: Any, *, version: int, digest: str, in_flight: InFlight) -> None:
        """Swaps prepared weights in before the next round."""
        ...

    @property
    def num_unfinished(self) -> int: ...

    def gauges(self) -> Mapping[str, float]: ...
