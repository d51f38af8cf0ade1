"""Order, pacing, staleness and short groups, without actors."""

import random

import pytest

from actors.group_queue import GroupQueue
from rollout.request import RolloutRequest, RolloutSample, SpecCounters, Timings
from rollout.sampling import SamplingParams


def group(name: str, size: int = 2) -> list[RolloutRequest]:
    return [
        RolloutRequest(f"{name}/{i}", name, f"prompt {name}", i, (1,), SamplingParams())
        for i in range(size)
    ]


def sample(request: RolloutRequest, *versions: int) -> RolloutSample:
    """One token a version."""
    zeros = (0.0,) * len(versions)
    return RolloutSample(
        request, (7,) * len(versions), zeros, zeros, (1.0,) * len(versions),
        tuple((v, 1) for v in versions), "stop", "", "full", "d", SpecCounters(), Timings(),
    )  # fmt: skip


def queue_of(num_groups: int, *, size: int = 2, **options: int) -> GroupQueue:
    queue = GroupQueue(**{"max_staleness": 1, "groups_per_step": 2} | options)  # type: ignore[arg-type]
    for number in range(num_groups):
        queue.add(group(f"g{number}", size))
    return queue


def test_at_most_staleness_plus_one_steps_of_groups_are_open() -> None:
    queue = queue_of(10, max_staleness=1, groups_per_step=2)
    assert len(queue.dispatch()) == 4 * 2  # (1 + 1) * 2 groups of 2
    assert queue.dispatch() == []


def test_handing_over_makes_no_room_before_the_next_publish() -> None:
    queue = queue_of(10)
    for request in queue.dispatch():
        queue.deliver(sample(request, 0))
    assert queue.take(2, version=0) is not None
    assert queue.dispatch() == []  # 2 open + 2 handed over = 4
    queue.published()
    assert len(queue.dispatch()) == 2 * 2


def test_pacing_does_not_depend_on_the_version_number() -> None:  # case 170
    queue = queue_of(1000, size=1, max_staleness=2, groups_per_step=8)
    assert len(queue.dispatch()) == 24  # (2 + 1) * 8, also when the version restored is 100
    queue.published()
    assert queue.dispatch() == []


def test_groups_come_in_dispatch_order_however_they_finish() -> None:
    queue = queue_of(4)
    requests = queue.dispatch()
    for request in reversed(requests[2:]):
        queue.deliver(sample(request, 0))
    assert queue.take(1, version=0) is None  # g0 is not complete, later ones are
    for request in requests[:2]:
        queue.deliver(sample(request, 0))
    taken = queue.take(3, version=0)
    assert taken is not None and [g.id for g in taken] == ["g0", "g1", "g2"]


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_sample_is_stale_beyond_the_limit_and_not_at_it(limit: int, beyond: int) -> None:
    """case 168: age is learner version at hand-over minus the oldest version in the sample."""
    queue = queue_of(1, size=1, max_staleness=limit)
    (request,) = queue.dispatch()
    age = limit + beyond
    queue.deliver(sample(request, 10 - age, 10))
    assert len(queue.drop_stale(version=10)) == (1 if beyond > 0 else 0)


def test_limit_zero_forbids_a_swap_inside_a_sample() -> None:  # case 168
    queue = queue_of(1, size=1, max_staleness=0)
    queue.deliver(sample(queue.dispatch()[0], 4, 5))
    assert len(queue.drop_stale(version=5)) == 1


def test_when_everything_is_stale_there_is_nothing_and_then_the_next() -> None:  # case 173
    queue = queue_of(4, size=1, max_staleness=0, groups_per_step=2)
    for request in queue.dispatch():
        queue.deliver(sample(request, 0))
    assert len(queue.drop_stale(version=3)) == 2
    assert queue.take(1, version=3) is None
    (first, _) = queue.dispatch()
    queue.deliver(sample(first, 3))
    taken = queue.take(1, version=3)
    assert taken is not None and taken[0].id == "g2"


def test_a_group_that_lost_a_member_is_dropped_whole() -> None:  # case 178
    queue = queue_of(2, size=3)
    requests = queue.dispatch()
    queue.deliver(sample(requests[0], 0))
    queue.deliver(sample(requests[1], 0))
    assert queue.drop_failed() == []  # the third is still in flight
    queue.fail(sample(requests[2]))
    assert [s.request.id for s in queue.drop_failed()] == ["g0/0", "g0/1", "g0/2"]


def test_a_short_group_is_handed_over_only_when_allowed_and_says_so() -> None:  # case 179
    queue = GroupQueue(max_staleness=1, groups_per_step=1, allow_short_groups=True)
    queue.add(group("g", 4))
    requests = queue.dispatch()
    for request in requests[:3]:
        queue.deliver(sample(request, 0))
    queue.fail(sample(requests[3]))
    assert queue.drop_failed() == []
    taken = queue.take(1, version=0)
    assert taken is not None and taken[0].short and len(taken[0].samples) == 3
    assert [s.request.id for s in taken[0].failed] == ["g/3"]


def test_a_group_without_any_member_is_dropped_even_when_short_ones_are_allowed() -> None:
    queue = GroupQueue(max_staleness=1, groups_per_step=1, allow_short_groups=True)
    queue.add(group("g", 1))
    queue.fail(sample(queue.dispatch()[0]))
    queue.drop_failed()
    assert queue.num_open == 0


def test_groups_with_a_known_or_mixed_id_are_refused() -> None:
    queue = queue_of(1)
    with pytest.raises(ValueError, match="in use"):
        queue.add(group("g0"))
    with pytest.raises(ValueError, match="one group id"):
        queue.add([*group("a"), *group("b")])


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_leaves_the_queue_exactly_once(seed: int) -> None:
    """Conservation over random deliveries, failures, publishes and takes."""
    chance = random.Random(seed)
    queue = queue_of(12, size=3, max_staleness=1, groups_per_step=2)
    version, out = 0, []
    in_flight: list[RolloutRequest] = []
    while queue.num_open or queue.num_queued:
        in_flight += queue.dispatch()
        chance.shuffle(in_flight)
        for request in [in_flight.pop() for _ in range(min(len(in_flight), chance.randrange(4)))]:
            if chance.random() < 0.1:
                queue.fail(sample(request))
            else:
                queue.deliver(sample(request, version))
        out += queue.drop_failed() + queue.drop_stale(version)
        for taken in queue.take(1, version) or []:
            out += taken.samples
        if chance.random() < 0.3:
            version += 1
            queue.published()
    ids = [s.request.id for s in out]
    assert len(ids) == len(set(ids)) == 12 * 3
