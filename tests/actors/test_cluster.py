"""Real Ray, real actors, a tiny model: publishing, handing over, dying, refusing."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray._private.worker import global_worker

from actors.cluster import Prompt, RolloutCluster
from actors.config import ClusterConfig
from actors.controller import Controller
from actors.engine_spec import EngineSpec
from actors.group_queue import RolloutGroup
from actors.ray_session import ray_session
from rollout.checkpoint import read_weights
from rollout.errors import InvalidConfig, InvalidRequest, InvalidWeights, RolloutTimeout
from rollout.sampling import SamplingParams

LIMIT_S = 120.0
SAMPLING = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """Room for the shared cluster and one actor more: the tests that launch a cluster of their own
    start only because those before them gave everything back (case 181)."""
    with ray_session(num_cpus=3):
        yield


def config_for(folder: Path, **changes: object) -> ClusterConfig:
    spec = EngineSpec(str(folder), num_slots=8, context_len=64, dtype="float32")
    return replace(ClusterConfig(spec, groups_per_step=2), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path) -> Iterator[RolloutCluster]:
    """Two actors at version 0, shared by tests that leave it idle; versions go up through it."""
    with RolloutCluster.launch(config_for(tiny_llama, num_actors=2)) as launched:
        launched.publish(0, read_weights(tiny_llama).items())
        yield launched


def prompts(name: str, num: int) -> list[Prompt]:
    return [Prompt(f"{name}{i}", f"prompt {name}{i}", [5 + i, 6, 7]) for i in range(num)]


def take(cluster: RolloutCluster, num: int) -> list[RolloutGroup]:
    groups = cluster.next_groups(num, timeout_s=LIMIT_S)
    cluster.accept(groups)
    return groups


def next_version(cluster: RolloutCluster, weights: dict[str, torch.Tensor]) -> int:
    published = cluster.metrics().publication
    assert published is not None
    return cluster.publish(published.version + 1, weights.items()).version


def assert_fates_add_up(cluster: RolloutCluster) -> dict[str, int]:
    ledger = cluster.metrics().ledger
    ended = sum(n for name, n in ledger.items() if name not in ("generated", "in_flight"))
    assert ended == ledger["generated"], ledger
    return ledger


def test_groups_come_whole_in_order_and_versioned(
    cluster: RolloutCluster, tiny_llama: Path
) -> None:
    cluster.submit(prompts("order", 2), SAMPLING, group_size=4)
    groups = take(cluster, 2)
    assert [g.id for g in groups] == ["order0", "order1"]
    for group in groups:
        assert [s.request.sample_index for s in group.samples] == [0, 1, 2, 3]
        for sample in group.samples:
            assert sum(num for _, num in sample.version_spans) == len(sample.token_ids)
            assert len({s.token_ids for s in group.samples}) > 1  # n streams, not one n times
    next_version(cluster, read_weights(tiny_llama))


def test_a_publish_reports_drift_bytes_and_the_kernel_that_ran(
    cluster: RolloutCluster, tiny_llama: Path
) -> None:
    next_version(cluster, read_weights(tiny_llama))
    published = cluster.metrics().publication
    assert published is not None
    assert 0 < published.drift.kl < 0.1 and published.drift.abs_logp > 0
    assert published.weights_bytes > 0 and "int8" in published.kernels["blocks"]


def test_bad_prompts_are_refused_and_nothing_of_the_call_is_queued(
    cluster: RolloutCluster,
) -> None:
    bad = {
        "empty prompt": Prompt("e", "e", []),
        "leaves no room": Prompt("l", "l", [5] * 64),
        "outside the vocabulary": Prompt("v", "v", [10**6]),
    }
    for message, prompt in bad.items():
        with pytest.raises(InvalidRequest, match=message):
            cluster.submit([*prompts("never", 1), prompt], SAMPLING, group_size=2)
    with pytest.raises(InvalidRequest, match="only 0 groups"):
        cluster.next_groups(1, timeout_s=LIMIT_S)
    with pytest.raises(InvalidRequest, match="used once"):
        cluster.submit(prompts("order", 1), SAMPLING, group_size=2)


def test_nan_weights_are_refused_and_the_old_version_stays(
    cluster: RolloutCluster, tiny_llama: Path
) -> None:  # cases 147, 157
    before = cluster.metrics().publication
    assert before is not None
    weights = read_weights(tiny_llama)
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    with pytest.raises(InvalidWeights, match=r"layers\.0\.mlp\.up_proj"):
        cluster.publish(before.version + 1, weights.items())
    del weights["model.norm.weight"]
    with pytest.raises(InvalidWeights, match="missing"):
        cluster.publish(before.version + 1, weights.items())
    with pytest.raises(InvalidWeights, match="above"):
        cluster.publish(before.version, read_weights(tiny_llama).items())
    cluster.submit(prompts("after", 1), SAMPLING, group_size=2)
    (group,) = take(cluster, 1)
    assert {s.version_spans[0][0] for s in group.samples} == {before.version}
    assert {s.weights_digest for s in group.samples} == {before.digest}


def test_waiting_for_groups_ends_by_its_limit(cluster: RolloutCluster, tiny_llama: Path) -> None:
    next_version(cluster, read_weights(tiny_llama))
    cluster.submit(prompts("slow", 2), SAMPLING, group_size=2)
    with pytest.raises(RolloutTimeout, match="no 2 whole groups in 0"):
        cluster.next_groups(2, timeout_s=0.0)
    assert len(take(cluster, 2)) == 2  # nothing was lost by asking too early


# ---- what proposers remember ----------------------------------------------------------------


def test_actors_tell_each_other_at_a_publish_and_one_that_replaces_another_is_told(
    cluster: RolloutCluster, tiny_llama: Path
) -> None:
    """One of two dies as it is asked; the other is not taken for dead with it."""
    new = rollouts_of_a_step(cluster, tiny_llama, "told")
    one, other = memories(cluster)
    assert one == other and one >= new and new.total() == 4

    assert in_controller(cluster, kill_one_and_share) == ["rollout-1"]
    assert in_controller(cluster, wait_for_two)
    assert cluster.metrics().restarts == 1 and "rollout-0" in cluster.metrics().last_loss
    assert memories(cluster) == [one, one]
    new = rollouts_of_a_step(cluster, tiny_llama, "told again")
    assert memories(cluster) == [one + new, one + new]
    assert rollouts_in(cluster.history()) == one + new


def test_a_loaded_history_is_remembered_by_every_actor_and_not_passed_on(
    cluster: RolloutCluster, tiny_llama: Path
) -> None:
    rollouts_of_a_step(cluster, tiny_llama, "loaded")
    history, (before, _) = cluster.history(), memories(cluster)
    assert history is not None
    salt = torch.tensor(list(b"another model"), dtype=torch.uint8)
    with pytest.raises(InvalidConfig, match="another model"):
        cluster.load_history(history | {"salt": salt})
    assert memories(cluster) == [before, before]
    cluster.load_history(history)
    next_version(cluster, read_weights(tiny_llama))
    assert memories(cluster) == [before + before, before + before]


def rollouts_of_a_step(
    cluster: RolloutCluster, folder: Path, name: str
) -> Counter[tuple[int, ...]]:
    """Of two groups, one an actor, and a publish."""
    cluster.submit(prompts(name, 2), SAMPLING, group_size=2)
    groups = take(cluster, 2)
    next_version(cluster, read_weights(folder))
    return Counter(sample.token_ids for group in groups for sample in group.samples)


def rollouts_in(history: Mapping[str, Any] | None) -> Counter[tuple[int, ...]]:
    assert history is not None
    lens = [int(length) for length in history["token_lens"]]
    ends = [sum(lens[: index + 1]) for index in range(len(lens))]
    ids = history["token_ids"].tolist()
    return Counter(tuple(ids[end - length : end]) for end, length in zip(ends, lens))


def memories(cluster: RolloutCluster) -> list[Counter[tuple[int, ...]]]:
    """The rollouts that each actor remembers."""
    return [rollouts_in(arrays) for arrays in in_controller(cluster, all_exports)]


def in_controller(cluster: RolloutCluster, look: Callable[[Controller], Any]) -> Any:
    return cluster._ask(cluster._controller.__ray_call__.remote(look), LIMIT_S)


def all_exports(controller: Controller) -> list[dict[str, Any]]:
    calls = [m.handle.export_history.remote("all", LIMIT_S) for m in controller._serving()]
    return [arrays for _, arrays in ray.get(calls, timeout=LIMIT_S)]


def kill_one_and_share(controller: Controller) -> list[str]:
    """The names of those that serve on."""
    members = controller._serving()
    assert members[0].info is not None
    with controller._publishing:
        os.kill(members[0].info.pid, signal.SIGKILL)
        controller._histories.share(members)
        return [member.name for member in controller._serving()]


def wait_for_two(controller: Controller) -> bool:
    with controller._changed:
        return controller._changed.wait_for(lambda: len(controller._serving()) == 2, LIMIT_S)


# ---- pacing, weights, deaths --------------------------------------------------------------


def test_pacing_that_can_never_be_met_is_refused(cluster: RolloutCluster) -> None:
    cluster.submit(prompts("many", 6), SAMPLING, group_size=1)
    with pytest.raises(InvalidRequest, match="keeps at most 4 groups open"):
        cluster.next_groups(6, timeout_s=LIMIT_S)


def test_old_weights_are_let_go(cluster: RolloutCluster, tiny_llama: Path) -> None:
    """case 184: ten publishes more, with what actors tell each other at each, leave no more objects
    referenced, in this process and in the controller's. Counts lag by a call or two; a leak would add
    ten."""
    weights = read_weights(tiny_llama)
    counts = []
    for _ in range(2):
        for _ in range(10):
            next_version(cluster, weights)
        held = _num_references()
        counts.append(
            (held, cluster._ask(cluster._controller.__ray_call__.remote(_num_references)))
        )
    (mine, theirs), (mine_later, theirs_later) = counts
    assert mine_later <= mine + 3 and theirs_later <= theirs + 3


def _num_references(_: object = None) -> int:
    """Objects that this process keeps alive."""
    return len(global_worker.core_worker.get_all_reference_counts())


def test_a_killed_actor_is_replaced_and_no_sample_is_lost_or_doubled(tiny_llama: Path) -> None:
    """cases 160, 187, 190, 191: the process is killed while it holds unfinished requests."""
    sampling = SamplingParams(max_new_tokens=48)
    with RolloutCluster.launch(config_for(tiny_llama, groups_per_step=6)) as cluster:
        cluster.publish(7, read_weights(tiny_llama).items())
        (victim,) = cluster.actors()
        cluster.submit(prompts("k", 6), sampling, group_size=8)
        os.kill(victim.pid, signal.SIGKILL)
        groups = take(cluster, 6)
        ids = [s.request.id for g in groups for s in g.samples]
        assert len(ids) == len(set(ids)) == 48
        assert {v for g in groups for s in g.samples for v, _ in s.version_spans} == {7}
        (replacement,) = cluster.actors()
        assert replacement.pid != victim.pid and cluster.metrics().restarts == 1
        assert replacement.threads == 1  # as many as the cores it was given
        assert assert_fates_add_up(cluster)["accepted"] == 48


def test_a_request_whose_actors_keep_dying_is_failed_and_the_rest_go_on(tiny_llama: Path) -> None:
    """The limit is 0 here: a request that was lost with one actor is taken for the cause."""
    config = config_for(tiny_llama, groups_per_step=1, max_reissues=0)
    with RolloutCluster.launch(config) as cluster:
        cluster.publish(0, read_weights(tiny_llama).items())
        (victim,) = cluster.actors()
        cluster.submit(prompts("poison", 1), SamplingParams(max_new_tokens=48), group_size=8)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(InvalidRequest, match="only 0 groups"):  # it was dropped while waiting
            cluster.next_groups(1, timeout_s=LIMIT_S)
        cluster.submit(prompts("sound", 1), SAMPLING, group_size=2)
        assert [g.id for g in take(cluster, 1)] == ["sound0"]
        retired = cluster.retired()
        assert {r.fate for r in retired} == {"failed"} and len(retired) == 8
        lost = [r.sample for r in retired if r.sample.finish_reason == "error"]
        assert lost and "lost with 1 actors" in lost[0].finish_detail
        assert assert_fates_add_up(cluster)["failed"] == 8
        assert "rollout-0" in cluster.metrics().last_loss


def test_a_resumed_cluster_repeats_and_loses_nothing(tiny_llama: Path) -> None:
    """case 175: of 4 groups, 2 are trained, 2 are on their way when the state is taken."""
    config = config_for(tiny_llama)
    weights = read_weights(tiny_llama)
    with RolloutCluster.launch(config) as first:
        first.publish(0, weights.items())
        first.submit(prompts("r", 4), SAMPLING, group_size=2)
        trained = take(first, 2)
        state = first.boundary().state
    names = {id_.partition("/")[0] for id_ in state["unfinished"]}
    assert names == {"r2", "r3"}
    with RolloutCluster.launch(config) as second:
        second.restore(state)
        second.publish(1, weights.items())
        with pytest.raises(InvalidRequest, match="used once"):
            second.submit(prompts("r", 1), SAMPLING, group_size=2)
        second.submit(prompts("r", 4)[2:], SAMPLING, group_size=2)
        rest = take(second, 2)
        ids = [s.request.id for g in (*trained, *rest) for s in g.samples]
        assert sorted(ids) == [f"r{g}/{i}" for g in range(4) for i in range(2)]
        assert assert_fates_add_up(second)["accepted"] == 8
