"""Weights from a learner to vLLM actors by vLLM's NCCL back-end, over real Ray, with the stand-ins of
tests/vllm/stand_ins.py in every process."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from actors.cluster import Prompt, RolloutCluster
from actors.config import ClusterConfig
from actors.ray_session import LOOPBACK, ray_session
from actors.vllm import pass_through
from rollout.errors import FleetDead, InvalidWeights
from rollout.request import RolloutSample
from rollout.sampling import SamplingParams
from tests.vllm import stand_ins
from tests.vllm.conftest import Weights
from tests.vllm.engines import full_logprobs, spec_of
from tests.vllm.test_pass_through import as_on_a_gpu, listening

LIMIT_S = 240.0
SAMPLING = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """Whose processes all have the stand-ins."""
    hook = {"worker_process_setup_hook": "tests.vllm.stand_ins.install_in_ray"}
    init = ray.init
    with pytest.MonkeyPatch.context() as patched:
        stand_ins.install(patched.setattr)
        patched.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # for the hook to be found
        patched.setattr(ray, "init", lambda **options: init(**options, runtime_env=hook))
        with ray_session(num_cpus=2):
            yield


def launch(folder: Path, num_actors: int) -> RolloutCluster:
    spec = as_on_a_gpu(spec_of(folder), "nccl")
    config = ClusterConfig(
        spec,
        num_actors=num_actors,
        groups_per_step=4,
        start_timeout_s=LIMIT_S,
        publish_timeout_s=LIMIT_S,
    )
    return RolloutCluster.launch(config)


def generated(cluster: RolloutCluster, name: str) -> list[RolloutSample]:
    prompts = [Prompt(f"{name}{i}", f"prompt {i}", [5 + i, 6, 7]) for i in range(4)]
    cluster.submit(prompts, SAMPLING, group_size=4)
    groups = cluster.next_groups(4, timeout_s=LIMIT_S)
    cluster.accept(groups)
    return [sample for group in groups for sample in group.samples]


def test_two_actors_get_what_was_sent_and_a_lost_one_ends_the_cluster(
    folder: Path, weights: Weights, others: Weights
) -> None:
    before = listening()
    with launch(folder, 2) as cluster:
        for version, named in enumerate((weights, others)):
            publication = cluster.publish(version, named.items())
            assert publication.version == version and publication.drift.abs_logp < 1e-4
            assert publication.weights_bytes == sum(t.nbytes for t in named.values())
            for sample in generated(cluster, f"v{version}-"):
                assert sample.version_spans == ((version, 12),)
                law = full_logprobs(folder, named, sample, 1.0)
                assert max(abs(a - b) for a, b in zip(law, sample.logprobs_full)) < 1e-4
        assert {host for host, _ in listening() - before} == {LOOPBACK}
        spoilt = {**weights, "model.norm.weight": torch.zeros(3)}
        with pytest.raises(InvalidWeights, match=r"model\.norm\.weight"):
            cluster.publish(2, spoilt.items())
        with pytest.raises(InvalidWeights, match="only the policy's are sent"):
            cluster.publish(2, weights.items(), draft=weights)
        assert all(s.version_spans == ((1, 12),) for s in generated(cluster, "kept-"))
        cluster.publish(2, weights.items())
        long = SamplingParams(max_new_tokens=80)
        cluster.submit([Prompt("lost", "lost", [5, 6])], long, group_size=64)
        os.kill(cluster.actors()[0].pid, signal.SIGKILL)
        with pytest.raises(FleetDead, match=r"rollout-0: .*nobody keeps weights"):
            cluster.next_groups(1, timeout_s=LIMIT_S)
        with pytest.raises(FleetDead, match="resume from the run's checkpoint"):
            cluster.publish(3, weights.items())
    assert listening() == before


def test_a_sender_that_breaks_half_way_says_so_and_ends_the_cluster(
    folder: Path, weights: Weights, others: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pass_through.PackedSource.__iter__

    def torn(self: pass_through.PackedSource) -> Iterator[tuple[str, torch.Tensor]]:
        yield next(whole(self))
        raise RuntimeError("the learner's GPU is gone")

    with launch(folder, 1) as cluster:
        cluster.publish(0, weights.items())
        monkeypatch.setattr(pass_through.PackedSource, "__iter__", torn)
        with pytest.raises(
            FleetDead, match=r"nccl failed in the sender: the learner's GPU is gone"
        ):
            cluster.publish(1, others.items())
        monkeypatch.undo()
        with pytest.raises(FleetDead, match=r"rollout-0: .*version 1.*nobody keeps weights"):
            cluster.publish(2, weights.items())
