"""The seam between whoever wants rollouts and whatever makes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from rollout.proposer import Remembering
from rollout.request import RolloutRequest, RolloutSample, SpecCounters

InFlight = Literal["interrupt", "finish", "abort"]
"""What a weight update does to rows in flight: keep their tokens, drop their cache and go on under
the new weights; let them finish first; or end them and hand them back."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can be asked for."""

    vocab_size: int
    context_len: int
    """Longest prompt plus response, tokens."""
    can_decode: bool
    """Stop strings can be served."""
    can_constrain: bool = False
    """Grammars can be served."""


class Engine(Protocol):
    """Continuous batching: submit any time, step until idle."""

    version: int | None
    """Policy version in force; None before the first load. Nothing is generated without one."""

    @property
    def limits(self) -> "EngineLimits": ...

    def check(self, requests: Sequence[RolloutRequest]) -> None:
        """Raises InvalidRequest for the first request that cannot be served; any thread may ask."""
        ...

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
    def load_is_due(self) -> bool:
        """A swap was asked for and has not happened yet."""
        ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def memory(self) -> Remembering | None:
        """What its proposer remembers, to be used between rounds; None for one that forgets."""
        ...

    def counters(self) -> SpecCounters:
        """Speculation counts of everything emitted so far."""
        ...

    def gauges(self) -> Mapping[str, float]: ...

    def explain(self) -> str:
        """Why the last round drafted as much as it did, for people."""
        ...


@runtime_checkable
class Probing(Protocol):
    """An engine that alone can say what its weights predict, once they are in force."""

    def probe(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Log-probabilities [N, V] at every position but the last of each sequence; rows in flight
        wait meanwhile. Raises InvalidWeights where they are not numbers."""
        ...


@runtime_checkable
class Closing(Protocol):
    """An engine that holds its memory until it is told to give it back."""

    def close(self) -> None: ...


def run_to_end(
    engine: Engine, requests: Sequence[RolloutRequest], *, max_rounds: int | None = None
) -> list[RolloutSample]:
    """Submits to an idle engine and steps until it is idle again; samples in order of request.
    An engine that needs more than `max_rounds` rounds has failed: AssertionError."""
    engine.submit(requests)
    samples: dict[str, RolloutSample] = {}
    num_rounds = 0
    while engine.num_unfinished:
        if num_rounds == max_rounds:
            raise AssertionError(f"the engine did not finish {len(requests)} requests")
        samples |= {sample.request.id: sample for sample in engine.step()}
        num_rounds += 1
    return [samples[request.id] for request in requests]
