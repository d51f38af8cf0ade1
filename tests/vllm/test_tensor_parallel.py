"""A model split over two worker processes: the samples of one, and no worker outlives its engine."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.vllm import executor, ranks
from actors.vllm.engine import VllmEngine
from rollout.engine import run_to_end
from rollout.errors import ActorFailed, InvalidConfig, InvalidWeights
from tests.vllm.engines import (
    CONTEXT_LEN,
    full_logprobs,
    load,
    loaded,
    make_idle,
    requests,
    spec_of,
)
from tests.vllm.test_engine import PLAIN, Weights, mixed, same


@pytest.fixture(scope="module")
def heads() -> dict[str, int]:
    """Keys and values are split as well."""
    return {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def alone(folder: Path) -> VllmEngine:
    """One worker, in this process."""
    engine = loaded(spec_of(folder, proposer="none"))
    assert isinstance(engine, VllmEngine)
    return engine


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[VllmEngine]:
    """Rows are preempted where its cache is full, and prompts run in parts."""
    engine = split(folder, max_cached_tokens=4 * CONTEXT_LEN, max_round_tokens=48)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: VllmEngine, folder: Path, weights: Weights) -> VllmEngine:
    """Idle and under version 0."""
    make_idle(shared, folder, weights)
    return shared


def split(folder: Path, **fields: Any) -> VllmEngine:
    engine = loaded(spec_of(folder, tensor_parallel=2, **fields))
    assert isinstance(engine, VllmEngine)
    return engine


def processes(engine: VllmEngine) -> list[int]:
    """Of the workers, by rank."""
    found = engine._core.engine_core.engine_core.model_executor
    assert isinstance(found, executor.RankExecutor)
    return [worker.proc.pid for worker in found.workers]


def are_gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_every_law_gives_the_samples_of_one_worker(engine: VllmEngine, alone: VllmEngine) -> None:
    expected = run_to_end(alone, mixed("a"))
    for _ in range(2):  # the second time the history knows every rollout
        got = run_to_end(engine, mixed("a"), max_rounds=400)
        assert [one.request.id for one, other in zip(got, expected) if not same(one, other)] == []
    assert sum(sample.counters.accepted for sample in got) > 20
    assert engine.gauges()["count/rows_run_again"] > 0
    others = run_to_end(engine, requests("u", 4, PLAIN, run_seed=8))  # control
    assert not any(map(same, others, run_to_end(alone, requests("u", 4, PLAIN))))


def test_an_abort_loses_no_token(engine: VllmEngine) -> None:
    asked = requests("abort", 12, PLAIN)  # more than there are slots
    whole = {sample.request.id: sample for sample in run_to_end(engine, asked)}
    engine.submit(asked)
    ended = [sample for _ in range(4) for sample in engine.step()]
    cut = engine.abort([asked[0].id, asked[11].id])
    assert [len(sample.token_ids) > 0 for sample in cut] == [False, True]
    for sample in cut:
        assert sample.token_ids == whole[sample.request.id].token_ids[: len(sample.token_ids)]
    while engine.num_unfinished:
        ended += engine.step()
    assert len(ended) == 10 and all(same(sample, whole[sample.request.id]) for sample in ended)


def test_both_workers_swap_and_rows_go_on(
    engine: VllmEngine, folder: Path, weights: Weights, others: Weights
) -> None:
    """Half of a swap would be the law of neither version."""
    engine.submit(requests("swap", 12, PLAIN))
    samples = [sample for _ in range(5) for sample in engine.step()]
    load(engine, spec_of(folder), others, 1)
    while engine.num_unfinished:
        samples += engine.step()
    crossed = [sample for sample in samples if len(sample.version_spans) == 2]
    assert len(samples) == 12 and len(crossed) >= 6
    for sample in crossed:
        (first, num), (second, _) = sample.version_spans
        assert (first, second) == (0, 1)
        old, new = (full_logprobs(folder, w, sample, 1.0) for w in (weights, others))
        expected = old[:num] + new[num:]
        assert max(abs(a - b) for a, b in zip(sample.logprobs_full, expected)) < 1e-4
        assert max(abs(a - b) for a, b in zip(sample.logprobs_full, old)) > 0.1  # control


def test_every_worker_refuses_a_bad_update_and_the_old_version_stays(
    engine: VllmEngine, folder: Path, weights: Weights
) -> None:
    asked = requests("refused", 4, PLAIN)
    expected = run_to_end(engine, asked)
    staged = engine.prepare(dict(weights)).staged
    staged.close()
    found = engine._core.collective_rpc("check_weight_update", args=(str(staged.path),))
    assert len(found) == 2 and all("no weight update" in said for said in found)
    name = "model.norm.weight"
    with pytest.raises(InvalidWeights, match=name):
        load(engine, spec_of(folder), {**weights, name: weights[name] * torch.nan}, 1)
    assert engine.version == 0 and all(map(same, run_to_end(engine, asked), expected))


def test_updates_leave_no_memory_in_the_workers(
    engine: VllmEngine, folder: Path, weights: Weights
) -> None:
    for version in range(1, 4):
        load(engine, spec_of(folder), weights, version)
        engine.step()
    held = [Path(f"/proc/{pid}/maps").read_text() for pid in processes(engine)]
    assert not any("/dev/shm/exact-rollout-" in maps for maps in held)


def test_the_probe_sees_the_weights_of_both(
    engine: VllmEngine, alone: VllmEngine, weights: Weights
) -> None:
    sequences = [list(range(30, 40)), list(range(50, 90, 3))]
    assert float((engine.probe(sequences) - alone.probe(sequences)).abs().max()) < 1e-4


def test_what_is_remembered_travels_and_a_wrong_one_is_refused_by_name(engine: VllmEngine) -> None:
    run_to_end(engine, requests("tell", 2, PLAIN, run_seed=5))
    assert engine.memory is not None
    exported = engine.memory.export()
    assert exported and all(isinstance(tensor, torch.Tensor) for tensor in exported.values())
    engine.memory.merge(exported)
    wrong = {name: torch.zeros_like(tensor) for name, tensor in exported.items()}
    with pytest.raises(InvalidConfig, match="another"):
        engine.memory.merge(wrong)


def test_int8_weights_are_split_and_drafts_change_no_sample(folder: Path, others: Weights) -> None:
    """Activations are quantised where they are multiplied, a row-parallel matrix's in two parts: a law
    of its own, which drafts leave alone, and after a swap too. Then no process is left behind."""
    fields = {"mode": "quantised", "format": "int8_w8a8", "dtype": "bfloat16"}
    engine, asked = split(folder, **fields), requests("int8", 6, PLAIN)
    for version in (1, 2):
        engine.renew(speculative=False)
        plain = run_to_end(engine, asked)
        engine.renew(speculative=True)
        for _ in range(2):
            drafted = run_to_end(engine, asked)
        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
        assert sum(sample.counters.drafted for sample in drafted) > 0
        load(engine, spec_of(folder, tensor_parallel=2, **fields), others, version)
        engine.step()
    pids = processes(engine)
    assert not are_gone(pids)  # control
    engine.close()
    assert are_gone(pids)


def test_workers_that_fall_silent_or_die_fail_the_engine_by_name(
    folder: Path, alone: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here vLLM's own draft model drafts, on both workers."""
    engine = split(folder, proposer="vllm_draft_model", draft_model=str(folder))
    asked = requests("draft", 6, PLAIN)
    got = run_to_end(engine, asked)
    assert all(map(same, got, run_to_end(alone, asked)))
    assert sum(sample.counters.accepted for sample in got) > 10
    pids = processes(engine)
    engine.submit(asked)
    engine.step()
    os.kill(pids[1], signal.SIGSTOP)
    monkeypatch.setattr(executor, "ANSWER_S", 1.0)
    with pytest.raises(ActorFailed, match="rollout_ask timed out"):
        engine.counters()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ActorFailed, match=rf"rank 1 \(process {pids[1]}\) ended with -9"):
        while True:
            engine.step()
    with pytest.raises(ActorFailed, match="ended with -9"):
        engine.counters()
    engine.close()
    assert are_gone(pids)


# ---- parts --------------------------------------------------------------------------------


class Group:
    """Stands for vLLM's: what the first rank broadcasts is what the others are told."""

    def __init__(self, rank: int, told: Any = None) -> None:
        self.rank_in_group, self.world_size, self.told = rank, 2, told

    def broadcast_object(self, what: Any = None) -> Any:
        if self.rank_in_group == 0:
            self.told = what
        return self.told


def test_the_first_rank_decides_and_where_it_fails_none_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decide() -> list[list[int]]:
        return [[1, 2], [3]]

    def fail() -> list[list[int]]:
        raise InvalidConfig("no")

    first = Group(0)
    monkeypatch.setattr(ranks, "get_tp_group", lambda: first)
    assert ranks.emitted_by_all(decide) == first.told == [[1, 2], [3]]
    monkeypatch.setattr(ranks, "get_tp_group", lambda: Group(1, told=[[1, 2], [3]]))
    assert ranks.emitted_by_all(fail) == [[1, 2], [3]]  # it is not asked
    monkeypatch.setattr(ranks, "get_tp_group", lambda: first)
    with pytest.raises(InvalidConfig):
        ranks.emitted_by_all(fail)
    assert first.told is None
    monkeypatch.setattr(ranks, "get_tp_group", lambda: Group(1, told=first.told))
    with pytest.raises(RuntimeError, match="the first rank emitted nothing"):
        ranks.emitted_by_all(decide)


@pytest.mark.parametrize("watches", [True, False])
def test_a_worker_ends_with_a_parent_that_is_killed(watches: bool) -> None:
    """One that does not watch is the control."""
    command = [sys.executable, "-m", "tests.vllm.orphan", "watches" if watches else "sleeps"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        child = os.pidfd_open(pid)
        parent.kill()
    ended, _, _ = select.select([child], [], [], 30.0 if watches else 1.0)
    assert bool(ended) == watches
    if not watches:
        os.kill(pid, signal.SIGKILL)
    os.close(child)


def test_threads_are_shared_by_the_processes_started_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    with executor.shared_threads(4):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == ("1", "1")
    with executor.shared_threads(2):
        assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["OMP_NUM_THREADS"] == "6" and "MKL_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tensor_parallel": 3}, "4 heads, 2 key and value heads and 96 inner features"),
        ({"tensor_parallel": 2, "device": "cuda"}, "sees 0 GPUs.*on one machine"),
    ],
)
def test_a_split_that_cannot_be_is_refused_before_a_worker_starts(
    folder: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidConfig, match=named):
        loaded(spec_of(folder, **fields))
