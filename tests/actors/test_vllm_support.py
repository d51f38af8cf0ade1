"""What is refused before vLLM is started, and without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from actors import member
from actors.config import ClusterConfig
from actors.engine_spec import EngineSpec
from actors.threads import MOMENT
from actors.vllm.support import check_version
from rollout.errors import InvalidConfig

FULL: dict[str, Any] = {"engine": "vllm", "mode": "full", "format": "none", "proposer": "history"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mode": "lossless", "format": "int8_w8a8", "proposer": "self_draft"}, "mode=lossless"),
        ({"mode": "quantised", "format": "int8_w8a16"}, "format=int8_w8a16"),
        ({"proposer": "mtp", "mtp_head": "head"}, "proposer=mtp"),
        ({"tree_nodes": 4}, "tree_nodes=4"),
        ({"kernels": "compiled"}, "kernels=compiled"),
        ({"proposer": "vllm_draft_model"}, "without draft_model"),
        ({"proposer": "vllm_eagle3"}, "without draft_model"),
        ({"proposer": "vllm_mtp"}, "no MTP layers.*proposer=vllm_eagle3"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    EngineSpec("folder", **FULL)
    with pytest.raises(InvalidConfig, match=named):
        EngineSpec("folder", **FULL | fields)


@pytest.mark.parametrize("engine", ["native", "vllm_stock"])
def test_only_our_vllm_engine_splits_a_model(engine: Any) -> None:
    assert EngineSpec("folder", **FULL, tensor_parallel=2).tensor_parallel == 2
    with pytest.raises(InvalidConfig, match=f"tensor_parallel=2 with engine={engine}"):
        EngineSpec("folder", **FULL | {"engine": engine}, tensor_parallel=2)
    with pytest.raises(InvalidConfig, match="tensor_parallel=0: expected at least 1"):
        EngineSpec("folder", **FULL, tensor_parallel=0)


ON_GPU: dict[str, Any] = FULL | {"device": "cuda", "weight_transfer": "nccl"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"engine": "native"},
            "weight_transfer=nccl with engine=native: it is a back-end of engine",
        ),
        ({"engine": "vllm_stock"}, "with engine=vllm_stock"),
        ({"device": "cpu"}, "weight_transfer=nccl with device=cpu: it goes from GPU to GPU"),
        (
            {"weight_transfer": "ipc", "tensor_parallel": 2},
            "weight_transfer=ipc with tensor_parallel=2: the learner shares one GPU",
        ),
    ],
)
def test_what_vllms_back_ends_cannot_bring_weights_to_is_refused(
    fields: dict[str, Any], named: str
) -> None:
    assert not EngineSpec("folder", **ON_GPU, tensor_parallel=2).keeps_weights
    assert EngineSpec("folder", **FULL).keeps_weights
    with pytest.raises(InvalidConfig, match=named):
        EngineSpec("folder", **ON_GPU | fields)


def test_memory_is_shared_with_one_actor() -> None:
    spec = EngineSpec("folder", **ON_GPU | {"weight_transfer": "ipc"})
    assert ClusterConfig(spec).num_actors == 1
    assert ClusterConfig(EngineSpec("folder", **ON_GPU), num_actors=2).num_actors == 2
    with pytest.raises(
        InvalidConfig, match="weight_transfer=ipc with num_actors=2: memory is shared"
    ):
        ClusterConfig(spec, num_actors=2)


@pytest.mark.parametrize(
    ("proposer", "instead"),
    [("vllm_draft_model", "proposer=draft_model"), ("vllm_eagle", "engine=vllm")],
)
def test_vllms_own_drafters_are_not_the_native_engines(proposer: str, instead: str) -> None:
    fields = FULL | {"proposer": proposer, "draft_model": "draft"}
    assert EngineSpec("folder", **fields).proposer == proposer
    with pytest.raises(InvalidConfig, match=f"it is vLLM that drafts; set {instead}"):
        EngineSpec("folder", **fields | {"engine": "native"})


def test_a_vllm_that_was_not_tested_is_refused() -> None:
    check_version("0.32.1")
    for version in ("0.31.2", "0.33.0", "0.320.0", "1.0"):
        with pytest.raises(InvalidConfig, match=rf"vLLM {version}.*tested with 0\.32\.x"):
            check_version(version)


@pytest.mark.parametrize(
    ("device", "workers", "gpus"), [("cpu", 2, 0), ("cuda", 1, 1), ("cuda", 4, 4)]
)
def test_an_actor_is_given_a_gpu_for_each_worker(
    device: str, workers: int, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    class Remote:
        def options(self, **options: Any) -> "Remote":
            given.update(options)
            return self

        def remote(self, *_: Any) -> None: ...

    monkeypatch.setattr(member, "RemoteRolloutActor", Remote())
    spec = EngineSpec("folder", **FULL, device=device, tensor_parallel=workers)
    member.Member.start("a", ClusterConfig(spec, cpus_per_actor=3), [])
    assert (given["num_gpus"], given["num_cpus"]) == (gpus, 3)


@pytest.mark.parametrize(("own_cores", "turns"), [(True, str(MOMENT)), (False, "0")])
def test_an_actor_begins_with_threads_that_spin_if_its_cores_are_its_own(
    own_cores: bool, turns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def options(**options: Any) -> SimpleNamespace:
        given.update(options)
        return SimpleNamespace(remote=lambda *_: None)

    monkeypatch.setattr(member, "RemoteRolloutActor", SimpleNamespace(options=options))
    config = ClusterConfig(EngineSpec("folder", **FULL), cpus_per_actor=3, own_cores=own_cores)
    member.Member.start("a", config, [])
    variables = given["runtime_env"]["env_vars"]
    assert (variables["OMP_NUM_THREADS"], variables["GOMP_SPINCOUNT"]) == ("3", turns)
