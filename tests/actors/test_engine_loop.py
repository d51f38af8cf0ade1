"""The engine in its thread: work in, samples out, swaps between rounds, failures told."""

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch

from actors import engine_loop
from actors.engine_loop import EngineLoop
from rollout.errors import InvalidRequest, RolloutTimeout
from rollout.request import RolloutSample
from rollout.sampling import SamplingParams
from rollout.table_policy import TablePolicy, markov_table, random_table
from tests.rollout.engines import request, table_engine

V = 5
LIMIT_S = 20.0


def loop_of(engine: object = None) -> EngineLoop:
    return EngineLoop(engine or table_engine(random_table(V, 1, seed=0), V))  # type: ignore[arg-type]


def collect(loop: EngineLoop, num: int) -> list[RolloutSample]:
    samples: list[RolloutSample] = []
    while len(samples) < num:
        report = loop.collect(LIMIT_S)
        assert report.samples, "nothing came within the limit"
        samples += report.samples
    return samples


def test_what_is_submitted_comes_back_once() -> None:
    loop = loop_of()
    loop.submit([request(f"r{i}") for i in range(20)])
    samples = collect(loop, 20)
    assert sorted(s.request.id for s in samples) == sorted(f"r{i}" for i in range(20))
    loop.stop()


def test_a_bad_request_is_refused_and_the_others_go_on() -> None:  # case 63
    loop = loop_of()
    loop.submit([request("good")])
    with pytest.raises(InvalidRequest, match="empty prompt"):
        loop.submit([request("bad", prompt=())])
    assert [s.request.id for s in collect(loop, 1)] == ["good"]
    loop.stop()


def test_a_swap_in_mid_flight_falls_between_rounds() -> None:
    """The table waits at its third lookup until the swap was asked for; two tables that each know
    one token tell by the tokens which weights were in force."""
    asked, reached = threading.Event(), threading.Event()
    always = {t: torch.full((V,), -1e9, dtype=torch.float64).index_fill(0, torch.tensor(t), 0.0)
              for t in (1, 2)}  # fmt: skip

    def old(tokens: tuple[int, ...]) -> torch.Tensor:
        if len(tokens) == 3:
            reached.set()
            assert asked.wait(LIMIT_S)
        return always[1]

    loop = loop_of(table_engine(old, V))
    put = loop._put

    def put_and_tell(action: Callable[[], None]) -> None:
        put(action)
        asked.set()

    loop.submit([request(sampling=SamplingParams(max_new_tokens=6))])
    assert reached.wait(LIMIT_S)
    loop._put = put_and_tell  # type: ignore[method-assign]
    loop.load(lambda _: always[2], version=1, digest="b", in_flight="interrupt", timeout_s=LIMIT_S)
    (sample,) = collect(loop, 1)
    assert sample.token_ids == (1, 1, 1, 2, 2, 2)
    assert sample.version_spans == ((0, 3), (1, 3))
    assert sample.weights_digest == "b"
    loop.stop()


def test_an_engine_that_fails_is_told_by_every_later_call() -> None:
    class Failing(TablePolicy):
        def score(self, windows: object) -> torch.Tensor:
            raise MemoryError("no memory left")

    table = markov_table(torch.zeros(V, V))
    loop = loop_of(table_engine(table, V, policy=Failing(table, vocab_size=V)))
    loop.submit([request()])
    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory left"):
            loop.collect(LIMIT_S)
    with pytest.raises(MemoryError):
        loop.submit([request("r1")])


def test_a_swap_that_cannot_happen_in_time_says_so() -> None:
    """`finish` waits for a row that never ends."""
    gate, reached = threading.Event(), threading.Event()

    def stuck(tokens: tuple[int, ...]) -> torch.Tensor:
        if len(tokens) > 1:
            reached.set()
            gate.wait(LIMIT_S)
        return torch.zeros(V, dtype=torch.float64)

    loop = loop_of(table_engine(stuck, V))
    loop.submit([request()])
    assert reached.wait(LIMIT_S)
    with pytest.raises(RolloutTimeout, match="version 1 not in force"):
        loop.load(stuck, version=1, digest="b", in_flight="finish", timeout_s=0.05)
    gate.set()
    loop.stop()


def test_aborted_requests_hand_back_what_they_have() -> None:
    loop = loop_of(table_engine(random_table(V, 1, seed=0), V, num_slots=1))
    loop.submit([request(f"r{i}", sampling=SamplingParams(max_new_tokens=40)) for i in range(5)])
    loop.abort(["r4"])
    by_id = {s.request.id: s for s in collect(loop, 5)}
    assert by_id["r4"].finish_reason == "abort"
    assert len(by_id["r0"].token_ids) == 40
    loop.stop()


def test_the_report_of_a_sample_counts_all_of_its_tokens() -> None:
    loop = loop_of()
    loop.submit([request(sampling=SamplingParams(max_new_tokens=30))])
    report = loop.collect(LIMIT_S)
    assert [len(sample.token_ids) for sample in report.samples] == [30]
    assert report.counters.emitted == 30 and report.gauges["count/rounds"] == 30
    loop.stop()


def test_reports_are_not_worked_out_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "TELL_EVERY_S", 1e9)
    engine, told = table_engine(random_table(V, 1, seed=0), V), []
    explain = engine.explain
    engine.explain = lambda: told.append(1) or explain()  # type: ignore[func-returns-value, method-assign]
    loop = loop_of(engine)
    loop.submit([request(sampling=SamplingParams(max_new_tokens=50))])
    loop.collect(LIMIT_S)
    assert engine.gauges()["count/rounds"] == 50
    assert len(told) == 2  # behind the first round and behind the one in which the sample ended
    loop.stop()


def test_work_between_rounds_answers_its_caller_and_its_errors_spare_the_loop() -> None:
    loop = loop_of()
    assert loop.call(threading.current_thread, LIMIT_S) is loop._thread
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0, LIMIT_S)
    loop.submit([request()])
    assert len(collect(loop, 1)) == 1
    loop.stop()


def test_the_loop_computes_with_the_threads_of_its_process() -> None:
    open_mp = ctypes.CDLL(None).omp_get_max_threads
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        loop = loop_of()
        assert loop.call(open_mp, LIMIT_S) == before + 2
        loop.stop()
    finally:
        torch.set_num_threads(before)
