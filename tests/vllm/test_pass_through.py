"""vLLM's NCCL and IPC back-ends, both ends of them as they are, but for what they call of NCCL and CUDA
(tests/vllm/stand_ins.py): what they bring is in force whole, or not at all, or its actor fails."""

import dataclasses
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightTransferEngine
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerInitInfo,
    IPCTrainerWeightTransferEngine,
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from actors.engine_spec import EngineSpec
from actors.rollout_actor import Committed, RolloutActor
from actors.vllm import pass_through
from actors.vllm.engine import VllmEngine
from actors.vllm.executor import RankExecutor
from actors.vllm.pass_through import CommitClient, WeightSender, check_joined, free_port
from actors.weights import WeightPublisher
from rollout.errors import ActorFailed, FleetDead, InvalidConfig, InvalidWeights, RolloutTimeout
from rollout.request import RolloutRequest, RolloutSample
from rollout.sampling import SamplingParams
from tests.vllm import stand_ins
from tests.vllm.conftest import Weights
from tests.vllm.engines import full_logprobs, requests, spec_of

HOST = "127.0.0.1"
PROBE = [list(range(30, 44)), list(range(60, 90, 3))]
WAIT_S = 60.0
PLAIN = SamplingParams(max_new_tokens=24)
CURRENT_GPU = pass_through.current_gpu
Info = dict[str, Any]


def as_on_a_gpu(spec: EngineSpec, way: str) -> EngineSpec:
    """A spec that is refused where there is no GPU."""
    object.__setattr__(spec, "weight_transfer", way)
    return spec


class Learner:
    """What `RolloutCluster.publish` does, without Ray: the actor is in this process."""

    def __init__(self, spec: EngineSpec) -> None:
        self.actor = RolloutActor("a", spec, 1, PROBE)
        self.publisher = WeightPublisher(spec, PROBE)
        self.asked: list[Info] = []
        self.spec, self.sender = spec, self.opened(spec)

    def opened(self, spec: EngineSpec) -> WeightSender:
        def join(infos: list[Info]) -> None:
            self.asked += infos
            self.actor.join(infos[0], WAIT_S)

        return opened(spec, join, gpus=self.actor.info().gpus)

    def publish(
        self, version: int, weights: Weights, rows: Sequence[RolloutRequest] = ()
    ) -> Committed:
        """`rows` are in flight when it is committed."""
        update = self.publisher.pack(version, weights.items())
        reference = self.publisher.reference(weights.items())
        self.actor.begin(update.announced(), WAIT_S)

        def commit(sent: Info) -> Committed:
            self.asked.append(sent)
            if rows:
                begun = after_rounds(self.actor, 5)
                self.actor.submit(rows)
                assert begun.wait(WAIT_S)
            return self.actor.commit(version, reference, "interrupt", WAIT_S, sent)

        committed: Committed = self.sender.send(update.views(), commit)
        return committed

    def collect(self, num: int) -> list[RolloutSample]:
        samples: list[RolloutSample] = []
        while len(samples) < num:
            got = self.actor.collect(WAIT_S).samples
            assert got, f"{len(samples)} of {num} samples in {WAIT_S} s"
            samples += got
        return samples

    def close(self) -> None:
        self.sender.close()
        self.actor._loop.stop()
        engine = self.actor._engine
        assert isinstance(engine, VllmEngine)
        engine.close()


def opened(
    spec: EngineSpec,
    join: Callable[[list[Info]], None],
    *,
    gpus: Sequence[str] = ("GPU-1",),
    host: str = HOST,
    limit_s: float = WAIT_S,
) -> WeightSender:
    return WeightSender(spec, 1, host=host, gpus=gpus, join=join, limit_s=limit_s)


def after_rounds(actor: RolloutActor, num: int) -> threading.Event:
    """Is set when the engine has made so many."""
    done, left, step = threading.Event(), itertools.count(num - 1, -1), actor._engine.step

    def counted() -> list[RolloutSample]:
        samples = step()
        if next(left) == 0:
            done.set()
        return samples

    actor._engine.step = counted  # type: ignore[method-assign]
    return done


@pytest.fixture(scope="module", params=["nccl", "ipc"])
def learner(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Learner]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(stand_ins.HANDLES, str(tmp_path_factory.mktemp("handles")))
        stand_ins.install(patched.setattr, one_gpu=request.param == "ipc")
        learner = Learner(as_on_a_gpu(spec_of(folder), request.param))
        yield learner
        learner.close()


@pytest.fixture
def on_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.install(monkeypatch.setattr)


def error(sample: RolloutSample, folder: Path, by_version: dict[int, Weights]) -> float:
    """Largest of the recorded log-probabilities against the version that each token names."""
    start, worst = 0, 0.0
    for version, end in sample.version_spans:
        law = full_logprobs(folder, by_version[version], sample, 1.0)[start:end]
        named = sample.logprobs_full[start:end]
        worst = max([worst, *(abs(a - b) for a, b in zip(law, named, strict=True))])
        start = end
    return worst


def test_rows_go_on_exactly_under_what_was_sent(
    learner: Learner, folder: Path, weights: Weights, others: Weights
) -> None:
    assert learner.publish(0, weights).drift.abs_logp < 1e-4
    before = requests("before", 12, SamplingParams(max_new_tokens=60))
    committed = learner.publish(1, others, rows=before)
    assert abs(committed.drift.kl) < 1e-6 and committed.drift.abs_logp < 1e-4
    learner.actor.submit(requests("after", 4, PLAIN))
    samples = learner.collect(16)
    by_version = {0: weights, 1: others}
    assert sum(len(sample.version_spans) == 2 for sample in samples) >= 6
    assert max(error(sample, folder, by_version) for sample in samples) < 1e-4
    assert max(error(s, folder, {0: others, 1: weights}) for s in samples) > 0.1  # control
    after = [s for s in samples if s.request.id.startswith("after")]
    assert [s.version_spans for s in after] == [((1, 24),)] * 4
    again = learner.publish(2, weights)
    assert abs(again.drift.kl) < 1e-6 and again.drift.abs_logp < 1e-4


def test_one_publish_is_one_message_to_the_actor(learner: Learner, weights: Weights) -> None:
    """So that start, receive and finish fall between the same two steps."""
    learner.publish(3, weights)
    learner.asked.clear()
    learner.publish(4, weights)
    [sent] = learner.asked
    assert sent["names"] == list(learner.publisher.pack(4, weights.items()).arrays)


def meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


NORM = "model.norm.weight"
CHANGES: dict[str, Callable[[Weights], Weights]] = {
    "another shape": lambda t: {**t, NORM: meta(torch.float32, 3)},
    "another dtype": lambda t: {**t, NORM: meta(torch.int8, *t[NORM].shape)},
    "part of a module": lambda t: {n: v for n, v in t.items() if "layers.1.mlp.up_proj" not in n},
    "unknown name": lambda t: {**t, "model.extra": meta(torch.float32, 1)},
}
SAID = {
    "another shape": r"model.norm.weight: got float32 \[3\]",
    "another dtype": "model.norm.weight: got int8",
    "part of a module": "gate_up_proj in part, without .*up_proj",
    "unknown name": "unknown tensors, first model.extra",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_update_is_refused_when_announced_and_leaves_the_old_version(
    change: str, learner: Learner, folder: Path, weights: Weights, others: Weights
) -> None:
    learner.publish(5, weights)
    announced = learner.publisher.pack(6, others.items()).announced()
    wrong = replace(announced, described=CHANGES[change](announced.described))
    with pytest.raises(InvalidWeights, match=SAID[change]):
        learner.actor.begin(wrong, WAIT_S)
    learner.actor.submit(requests("old", 2, PLAIN))
    for sample in learner.collect(2):
        assert sample.version_spans == ((5, 24),) and error(sample, folder, {5: weights}) < 1e-4


def test_weights_in_w8a8_arrive_too(
    on_two_gpus: None, folder: Path, weights: Weights, others: Weights
) -> None:
    """Compared with the same weights through shared memory."""
    spec = spec_of(folder, mode="quantised", format="int8_w8a8")
    shared = RolloutActor("shared", spec, 1, PROBE)
    publisher = WeightPublisher(spec, PROBE)
    learner = Learner(as_on_a_gpu(spec_of(folder, mode="quantised", format="int8_w8a8"), "nccl"))
    for version, named in enumerate((weights, others, weights)):
        shared.begin(publisher.pack(version, named.items()), WAIT_S)
        reference = publisher.reference(named.items())
        expected = shared.commit(version, reference, "interrupt", WAIT_S).drift
        assert learner.publish(version, named).drift == expected and expected.kl > 0
    learner.close()


def test_every_worker_of_a_split_model_gets_its_part(
    on_two_gpus: None, folder: Path, weights: Weights, others: Weights, monkeypatch: Any
) -> None:
    start = RankExecutor._init_executor

    def started(self: RankExecutor) -> None:
        start(self)
        self.collective_rpc(stand_ins.install_in_worker)

    monkeypatch.setattr(RankExecutor, "_init_executor", started)
    learner = Learner(as_on_a_gpu(spec_of(folder, tensor_parallel=2), "nccl"))
    assert learner.asked[0]["world_size"] == 3
    for version, named in enumerate((weights, others)):
        assert learner.publish(version, named).drift.abs_logp < 1e-4
    learner.actor.submit(requests("split", 4, PLAIN))
    for sample in learner.collect(4):
        assert sample.version_spans == ((1, 24),) and error(sample, folder, {1: others}) < 1e-4
    learner.close()


# ---- what breaks --------------------------------------------------------------------------


def test_a_sender_that_dies_half_way_ends_its_actor_by_name(
    on_two_gpus: None, folder: Path, weights: Weights, others: Weights
) -> None:
    learner = Learner(as_on_a_gpu(spec_of(folder), "nccl"))
    learner.publish(0, weights)
    update = learner.publisher.pack(1, others.items())
    learner.actor.begin(update.announced(), WAIT_S)
    reference = learner.publisher.reference(others.items())
    sent = learner.asked[-1]
    with pytest.raises(RolloutTimeout, match=r"version 1 not in force after 1\.0 s"):
        learner.actor.commit(1, reference, "interrupt", 1.0, sent)  # nobody sends
    with pytest.raises(RolloutTimeout, match="no round ended"):
        learner.actor.begin(update.announced(), 0.5)
    learner.sender.close()  # its end of the connection is gone
    with pytest.raises(ActorFailed, match=r"version 1 broke off.*neither it nor the one before"):
        while True:
            learner.actor.collect(WAIT_S)
    with pytest.raises(ActorFailed, match="version 1 broke off"):
        learner.actor.submit(requests("late", 1, PLAIN))
    learner.close()


def test_an_actor_that_fails_ends_the_senders_wait_at_once(
    on_two_gpus: None, folder: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's sender would wait in its broadcast for the actor that is gone."""
    learner = Learner(as_on_a_gpu(spec_of(folder), "nccl"))
    learner.publish(0, weights)

    def lost(self: Any, update_info: Info) -> None:
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(WeightTransferEngine, "update_weights", lost)
    with pytest.raises(ActorFailed, match=r"version 1 broke off.*no such GPU"):
        learner.publish(1, weights)
    assert not learner.sender.is_open
    learner.close()


def test_a_sender_that_fails_says_so_and_one_that_waits_too_long_too(
    on_two_gpus: None, folder: Path
) -> None:
    spec = as_on_a_gpu(spec_of(folder), "nccl")
    with pytest.raises(RolloutTimeout, match=r"weight_transfer=nccl: not done after 0\.5 s"):
        opened(spec, lambda infos: None, limit_s=0.5)  # the actor never comes
    with pytest.raises(FleetDead, match=r"nccl failed in the sender: .*assign"):
        opened(spec, lambda infos: None, host="192.0.2.1")  # not an address of this machine
    with pytest.raises(InvalidConfig, match="of the actor"):
        opened(spec, _refuse)  # at once, though the sender waits for the actor


def _refuse(infos: list[Info]) -> None:
    raise InvalidConfig("of the actor")


@pytest.mark.parametrize(
    ("way", "gpus", "said"),
    [
        ("nccl", ["GPU-3", "GPU-0"], "both on GPU-0, and NCCL takes one process a GPU"),
        ("ipc", ["GPU-3"], "the learner is on GPU-0 and the actor on GPU-3"),
    ],
)
def test_gpus_that_a_back_end_cannot_use_are_refused_before_anything_is_opened(
    way: str, gpus: list[str], said: str, on_two_gpus: None, folder: Path
) -> None:
    spec = as_on_a_gpu(spec_of(folder), way)
    with pytest.raises(InvalidConfig, match=said):
        opened(spec, lambda infos: pytest.fail("the actor was asked"), gpus=gpus)


def test_a_process_without_a_gpu_cannot_send(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_through, "current_gpu", CURRENT_GPU)
    with pytest.raises(InvalidConfig, match=r"weight_transfer=nccl: this process.*sees no GPU"):
        opened(as_on_a_gpu(spec_of(folder), "nccl"), _refuse)


def test_a_communicator_that_carries_nothing_is_refused() -> None:
    """Without NCCL vLLM makes one that does not complain: weights would be what lay in memory."""
    group = StatelessProcessGroup(rank=0, world_size=2, store=None)  # type: ignore[arg-type]
    real = PyNcclCommunicator(group, device=0)
    real.broadcast(torch.zeros(1), src=0)
    with pytest.raises(InvalidConfig, match="communicator is disabled"):
        check_joined(SimpleNamespace(model_update_group=real))
    check_joined(SimpleNamespace())  # IPC has none


# ---- the group ----------------------------------------------------------------------------


def test_a_group_listens_on_its_address_only_and_is_left_and_made_again(
    on_two_gpus: None, folder: Path, weights: Weights, others: Weights
) -> None:
    before = listening()
    learner = Learner(as_on_a_gpu(spec_of(folder), "nccl"))
    learner.publish(0, weights)
    [port] = {learner.asked[0]["master_port"]}
    assert listening() - before == {(HOST, port)}
    old = stand_ins.StoreCommunicator.made[-2:]
    learner.sender.close()
    assert listening() == before
    learner.sender = learner.opened(learner.spec)
    assert learner.publish(1, others).drift.abs_logp < 1e-4
    assert all(one.group is None for one in old)  # both ends of the old one were left
    learner.close()
    assert listening() == before


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_ports_are_free_ones() -> None:
    assert len({free_port(HOST) for _ in range(8)}) > 1


# ---- what is taken for granted of vLLM ----------------------------------------------------


def fields_of(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_the_messages_of_the_back_ends_have_the_fields_that_are_used() -> None:
    assert {"master_address", "master_port", "world_size", "rank"} <= fields_of(NCCLTrainerInitInfo)
    assert {"rank_offset", "world_size"} <= fields_of(NCCLWeightTransferInitInfo)
    assert "rank_offset" not in fields_of(IPCTrainerInitInfo)
    for kind in (NCCLWeightTransferUpdateInfo, IPCWeightTransferUpdateInfo):
        assert {"names", "dtype_names", "shapes"} <= fields_of(kind)
    assert NCCLTrainerInitInfo(HOST, 1, 2, rank=0).is_sender
    assert not IPCTrainerInitInfo(rank=0).packed  # packed would be several messages an update


def test_the_client_is_what_vllms_senders_ask() -> None:
    assert isinstance(CommitClient(), VLLMWeightSyncClient)
    for name in ("nccl", "ipc"):
        assert name in WeightTransferTrainerFactory._registry
    for sender in (NCCLTrainerWeightTransferEngine, IPCTrainerWeightTransferEngine):
        code = inspect.getsource(sender.send_weights)
        order = [code.find(f"client.{n}_weight_update(") for n in ("start", "finish")]
        assert -1 < order[0] < order[1]
    for receiver in (NCCLWeightTransferEngine, IPCWeightTransferEngine):
        assert "initialize_layerwise_reload" in inspect.getsource(receiver.start_weight_update)
        assert "finalize_layerwise_reload" in inspect.getsource(receiver.finish_weight_update)
