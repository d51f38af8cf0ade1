"""Groups in dispatch order: paced before they are generated, handed over whole, never too old.

Pacing (the capacity rule of AReaL, arXiv:2505.24298, counted relative to the last publish so that a
restart cannot shift it): groups that are in flight, finished and not handed over, or handed over
since the last publish number at most (max_staleness + 1) * groups_per_step. So dropping is the
exception; what still comes out too old is dropped at hand-over, whole, and counted.

Age of a sample = learner version at hand-over - oldest version in the sample. Order of hand-over is
order of dispatch: speculation makes predictable rows finish first, and first come, first served
would select them.

A group whose member failed for good is dropped, or with `allow_short_groups` handed over without it.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.request import RolloutRequest, RolloutSample


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The finished rollouts of one prompt."""

    id: str
    prompt_id: str
    samples: tuple[RolloutSample, ...]
    """In order of sample index."""
    size: int
    """How many were asked for; more than `samples` in a short group."""
    failed: tuple[RolloutSample, ...] = ()
    """Members that ended as errors for good."""

    @property
    def short(self) -> bool:
        return len(self.samples) < self.size


@dataclass(slots=True)
class _Entry:
    requests: tuple[RolloutRequest, ...]
    samples: dict[str, RolloutSample] = field(default_factory=dict)
    failed: dict[str, RolloutSample] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.samples) + len(self.failed) == len(self.requests)

    def group(self) -> RolloutGroup:
        ordered = [self.samples[r.id] for r in self.requests if r.id in self.samples]
        first = self.requests[0]
        failed = tuple(self.failed.values())
        return RolloutGroup(
            first.group_id, first.prompt_id, tuple(ordered), len(self.requests), failed
        )

    def ended(self) -> list[RolloutSample]:
        """All that has come back."""
        return [*self.samples.values(), *self.failed.values()]


class GroupQueue:
    """The order of groups and what has come back for each. Knows no actors and no time."""

    def __init__(
        self, *, max_staleness: int, groups_per_step: int, allow_short_groups: bool = False
    ) -> None:
        self.max_staleness, self.groups_per_step = max_staleness, groups_per_step
        self._allow_short = allow_short_groups
        self._queued: OrderedDict[str, _Entry] = OrderedDict()
        self._open: OrderedDict[str, _Entry] = OrderedDict()  # dispatched, not handed over
        self._group_of: dict[str, str] = {}  # request id -> group id, while open
        self._taken_since_publish = 0
        self.ages: Counter[int] = Counter()
        """Samples handed over by age."""

    def add(self, requests: Sequence[RolloutRequest]) -> None:
        """Queues one group. Raises ValueError for an empty, mixed or known group."""
        ids = {request.group_id for request in requests}
        if len(ids) != 1 or not requests:
            raise ValueError(f"a group is the requests of one group id; got ids {sorted(ids)}")
        (group_id,) = ids
        if group_id in self._queued or group_id in self._open:
            raise ValueError(f"group id {group_id} is in use")
        self._queued[group_id] = _Entry(tuple(requests))

    @property
    def capacity_groups(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def room(self) -> int:
        """Groups that may still be opened before the next publish."""
        return self.capacity_groups - len(self._open) - self._taken_since_publish

    def dispatch(self) -> list[RolloutRequest]:
        """Requests whose groups may start now, in order."""
        requests: list[RolloutRequest] = []
        while self._queued and self.room > 0:
            group_id, entry = self._queued.popitem(last=False)
            self._open[group_id] = entry
            self._group_of |= {request.id: group_id for request in entry.requests}
            requests += entry.requests
        return requests

    def deliver(self, sample: RolloutSample) -> None:
        self._entry(sample.request.id).samples[sample.request.id] = sample

    def fail(self, sample: RolloutSample) -> None:
        """A member ended as an error for good. It waits for its group's end like any other."""
        self._entry(sample.request.id).failed[sample.request.id] = sample

    def _entry(self, request_id: str) -> _Entry:
        return self._open[self._group_of[request_id]]

    def drop_failed(self) -> list[RolloutSample]:
        """Removes groups that may not be handed over for want of a member; all their samples.
        Members still in flight keep the group until they have ended."""
        broken = [
            group_id
            for group_id, entry in self._open.items()
            if entry.complete and entry.failed and not (self._allow_short and entry.samples)
        ]
        return [sample for group_id in broken for sample in self._close(group_id).ended()]

    def drop_stale(self, version: int) -> list[RolloutSample]:
        """Removes complete groups that are too old to be handed over; their samples."""
        stale = [
            group_id
            for group_id, entry in self._open.items()
            if entry.complete and _age(entry, version) > self.max_staleness
        ]
        return [sample for group_id in stale for sample in self._close(group_id).ended()]

    def take(self, num_groups: int, version: int) -> list[RolloutGroup] | None:
        """The first groups in dispatch order once all of them are complete, else None.
        Call `drop_failed` and `drop_stale` first."""
        first = list(self._open.items())[:num_groups]
        if len(first) < num_groups or not all(entry.complete for _, entry in first):
            return None
        groups = []
        for group_id, entry in first:
            self.ages.update(_sample_age(s, version) for s in entry.samples.values())
            groups.append(self._close(group_id).group())
        self._taken_since_publish += num_groups
        return groups

    def _close(self, group_id: str) -> _Entry:
        entry = self._open.pop(group_id)
        for request in entry.requests:
            del self._group_of[request.id]
        return entry

    def published(self) -> None:
        """New weights are in force: what was handed over no longer counts against the capacity."""
        self._taken_since_publish = 0

    def unfinished(self) -> tuple[list[RolloutRequest], list[RolloutSample]]:
        """Everything not handed over, in dispatch order: requests of all, samples of the finished."""
        entries = [*self._open.values(), *self._queued.values()]
        requests = [request for entry in entries for request in entry.requests]
        return requests, [sample for entry in entries for sample in entry.samples.values()]

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_queued(self) -> int:
        return len(self._queued)


def _sample_age(sample: RolloutSample, version: int) -> int:
    oldest = sample.oldest_version
    return 0 if oldest is None else version - oldest


def _age(entry: _Entry, version: int) -> int:
    return max((_sample_age(s, version) for s in entry.samples.values()), default=0)
