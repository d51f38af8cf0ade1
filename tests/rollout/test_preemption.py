"""A cache with less room than its slots could use: growth, preemption, admission; the same tokens."""

from collections.abc import Callable

import pytest
import torch

from proposers.history import HistoryProposer
from proposers.ngram import NgramProposer
from rollout.draft import Draft
from rollout.errors import InvalidConfig
from rollout.native_engine import NativeEngine
from rollout.policy import Window
from rollout.proposer import Proposer
from rollout.request import RolloutSample
from rollout.sampling import SamplingParams
from rollout.table_policy import TablePolicy, random_table
from tests.rollout.engines import (
    ScriptedProposer,
    TableTrees,
    drawing_proposer,
    request,
    run,
    table_engine,
)

V = 4
TABLE = random_table(V, depth=3, seed=51)
NEXT = random_table(V, depth=3, seed=52)
DRAFT = random_table(V, depth=1, seed=53)
CONTEXT = 32


def sized(length: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=length)


def capped(cap: int = CONTEXT, num_slots: int = 4) -> TablePolicy:
    return TablePolicy(
        TABLE, vocab_size=V, context_len=CONTEXT, num_slots=num_slots, max_cached_tokens=cap
    )


def capped_engine(
    cap: int = CONTEXT, proposer: Proposer | None = None, draft_len: int = 0, num_slots: int = 4
) -> NativeEngine:
    policy = capped(cap, num_slots)
    return table_engine(TABLE, V, policy=policy, proposer=proposer, draft_len=draft_len)


def tokens(samples: dict[str, RolloutSample]) -> dict[str, tuple[int, ...]]:
    return {name: sample.token_ids for name, sample in samples.items()}


def preemptions(engine: NativeEngine) -> int:
    return int(engine.gauges()["count/preemptions"])


def live(engine: NativeEngine) -> list[str]:
    return [row.request.id for row in engine._scheduler.live]


def waiting(engine: NativeEngine) -> list[str]:
    return [row.request.id for row in engine._scheduler.waiting]


# ---- the cache of the table policy --------------------------------------------------------


def test_growing_past_the_cap_is_refused_and_changes_nothing() -> None:
    policy = capped(cap=40)
    assert policy.grow(0, 30) and not policy.grow(1, 11)
    assert policy.num_entries == 30 and policy.grow(1, 10)
    assert policy.grow(0, 5) and policy.num_entries == 40  # what it has is enough


def test_a_cap_that_one_row_may_not_fit_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="max_cached_tokens=31 is less than context_len=32"):
        capped(cap=CONTEXT - 1)


def test_a_fork_shares_its_entries_and_what_follows_is_its_own() -> None:
    policy = capped()
    policy.grow(0, 10)
    policy.score([Window(0, 0, (1,) * 10, 0)])
    policy.fork(0, 1, 8)
    assert policy.num_entries == 10
    assert policy.grow(1, 12) and policy.num_entries == 14
    policy.truncate(0, 0)
    assert policy.num_entries == 12  # the 8 are still those of slot 1


def test_what_is_forgotten_is_room_again() -> None:
    policy = capped()
    policy.grow(0, 20)
    policy.score([Window(0, 0, (1,) * 6, 0)])
    policy.score([Window(0, 6, (1, 2, 3), 3, parents=(-1, -1, 1))])
    policy.compact(0, 6, (1, 2))
    assert policy.num_entries == 8
    policy.truncate(0, 5)
    assert policy.num_entries == 5
    policy.swap(NEXT)
    assert policy.num_entries == 0 and policy.grow(3, CONTEXT)


def test_a_window_outside_what_was_grown_is_an_error_under_a_cap() -> None:
    policy = capped()
    policy.grow(0, 3)
    with pytest.raises(AssertionError, match="its slot has room for 3"):
        policy.score([Window(0, 0, (1, 2, 3, 0), 1)])


# ---- the same tokens ----------------------------------------------------------------------

PROPOSERS: dict[str, Callable[[], Proposer | None]] = {
    "none": lambda: None,
    "ngram": lambda: NgramProposer(min_match=1),
    "trees": lambda: TableTrees(DRAFT),
    "mixed": lambda: drawing_proposer("mixed", DRAFT),
}


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize(("cap", "budget"), [(32, 2048), (40, 5), (60, 2048)])
def test_preempted_rows_emit_what_they_do_without_a_cap(name: str, cap: int, budget: int) -> None:
    requests = [
        request(f"r{i}", (i % 3,) * (2 + i % 5), sized(12 + i), sample_index=i) for i in range(8)
    ]
    options = {"draft_len": 4, "branching": name == "trees", "context_len": CONTEXT}
    plenty = table_engine(TABLE, V, proposer=PROPOSERS[name](), **options)
    short = table_engine(
        TABLE, V, proposer=PROPOSERS[name](), max_cached_tokens=cap, max_round_tokens=budget,
        **options,
    )  # fmt: skip
    expected, emitted = run(plenty, requests), run(short, requests)
    assert preemptions(short) > 0 and preemptions(plenty) == 0
    lengths = {r: sample.counters.emitted for r, sample in emitted.items()}
    assert lengths == {r: len(sample.token_ids) for r, sample in expected.items()}
    if (
        name != "mixed"
    ):  # whose drafts are drawn: without room for one, another token comes of a seed
        assert tokens(emitted) == tokens(expected)


def test_nobody_is_taken_out_for_a_draft() -> None:
    """Two rows of 8 tokens fit a cache of 16 entries, trees of 8 behind them do not."""
    requests = [request(f"r{i}", (i, i), sized(6), sample_index=i) for i in range(2)]
    options = {
        "proposer": TableTrees(DRAFT), "draft_len": 8, "branching": True, "context_len": 16,
    }  # fmt: skip
    short = table_engine(TABLE, V, max_cached_tokens=16, **options)
    emitted = run(short, requests)
    assert preemptions(short) == 0
    assert sum(sample.counters.verified for sample in emitted.values()) > 0
    assert tokens(emitted) == tokens(run(table_engine(TABLE, V, **options), requests))


def test_rows_with_shared_prompts_and_histories_emit_what_they_do_without_a_cap() -> None:
    group = [
        request(f"g{i}", (0, 1, 2, 1, 3), sized(20), prompt_id="p", sample_index=i)
        for i in range(9)
    ]
    short = capped_engine(cap=40, proposer=HistoryProposer(), draft_len=3)
    assert tokens(run(short, group)) == tokens(run(table_engine(TABLE, V), group))
    assert preemptions(short) > 0
    assert short.gauges()["count/forked_tokens"] > 8 * 4  # once more when one returns


def test_no_draft_is_lost_to_a_preemption() -> None:
    handed_over = 0

    def draft(row: object, max_len: int) -> Draft:
        nonlocal handed_over
        handed_over += max_len
        return Draft.of_points([1] * max_len)

    engine = capped_engine(proposer=ScriptedProposer(draft), draft_len=5)
    run(engine, [request(f"r{i}", (i,), sized(20)) for i in range(4)])
    counters = engine.counters()
    assert preemptions(engine) > 0
    assert handed_over == counters.drafted == counters.verified > 0


# ---- who goes and who stays ---------------------------------------------------------------


def test_the_rows_admitted_last_go_and_wait_ahead_of_the_others_in_order() -> None:
    # round k runs the (1 + k)-th token of each: 4 * 8 fit 32 in round 7, 3 * 10 in round 9
    engine = capped_engine()
    engine.submit([request(f"r{i}", (i % V, 1), sized(20)) for i in range(6)])
    for _ in range(7):
        engine.step()
    assert (live(engine), waiting(engine)) == (["r0", "r1", "r2", "r3"], ["r4", "r5"])
    engine.step()
    assert (live(engine), waiting(engine)) == (["r0", "r1", "r2"], ["r3", "r4", "r5"])
    for _ in range(2):
        engine.step()
    assert (live(engine), waiting(engine)) == (["r0", "r1"], ["r2", "r3", "r4", "r5"])


def test_a_row_returns_when_an_older_one_has_left_and_not_before() -> None:
    engine = capped_engine()
    engine.submit([request(f"r{i}", (i, 1), sized(20)) for i in range(4)])
    seen: list[list[str]] = []
    while engine.num_unfinished:
        engine.step()
        if live(engine) not in seen:
            seen.append(live(engine))
    # r3 goes with 7 tokens, r2 with 9, r1 with 15; when r0 has left, r1 and r2 need 18 + 12 of 32 to
    # return and r3 another 10; 3 rounds later r2 goes again; behind r1 come r2 and r3 with 15 + 10
    assert seen == [
        ["r0", "r1", "r2", "r3"], ["r0", "r1", "r2"], ["r0", "r1"], ["r0"], [],
        ["r1", "r2"], ["r1"], ["r2", "r3"], ["r2"], ["r3"],
    ]  # fmt: skip
    assert preemptions(engine) == 5


@pytest.mark.parametrize("draft_len", [0, 6])
def test_the_oldest_row_emits_in_every_round(draft_len: int) -> None:
    proposer = ScriptedProposer(lambda row, n: Draft.of_points([1] * n))
    engine = capped_engine(proposer=proposer, draft_len=draft_len)
    engine.submit([request(f"r{i}", (i % V, 1, 2), sized(29)) for i in range(7)])
    while engine.num_unfinished:
        oldest = min((*engine._scheduler.live, *engine._scheduler.waiting), key=lambda r: r.serial)
        before = oldest.num_generated
        engine.step()
        assert oldest.num_generated > before


def test_what_ended_rows_left_behind_goes_before_any_row() -> None:
    engine = capped_engine()
    run(engine, [request(f"old{i}", (i, 2, 1), sized(6)) for i in range(3)])  # 3 * 8 stay
    run(engine, [request("new", (3, 3), sized(25))])
    assert preemptions(engine) == 0
    assert engine.gauges()["count/samples"] == 4


def test_a_prompt_that_does_not_fit_waits_and_nobody_overtakes_it() -> None:
    engine = capped_engine()  # 8 + 1 and 25 + 1 are more than 32, 8 + 1 and 1 + 1 are not
    long = request("long", (1,) * 25, sized(4))
    first = request("first", (0, 1) * 4, sized(10))
    engine.submit([first, long, request("short", (2,), sized(2))])
    for _ in range(9):
        engine.step()
        assert (live(engine), waiting(engine)) == (["first"], ["long", "short"])
    assert tokens(run(engine, []))["long"] == run(table_engine(TABLE, V), [long])["long"].token_ids
    assert preemptions(engine) == 0


def test_an_aborted_row_gives_its_room_back_though_nothing_of_it_was_run() -> None:
    policy = capped()
    engine = table_engine(TABLE, V, policy=policy, max_round_tokens=1)
    engine.submit([request("a", (0, 1)), request("b", (1,) * 25)])
    engine.step()
    assert live(engine) == ["a", "b"] and policy.num_entries == 3 + 26  # with one token to come
    engine.abort(["b"])
    assert policy.num_entries == 3


def test_a_waiting_row_that_was_preempted_can_be_aborted_with_what_it_has() -> None:
    engine = capped_engine()
    engine.submit([request(f"r{i}", (i, 1), sized(20)) for i in range(4)])
    while not preemptions(engine):
        engine.step()
    counted = engine.counters()
    (sample,) = engine.abort(["r3"])
    assert len(sample.token_ids) == sample.counters.rounds == 7
    assert engine.counters() == counted
    assert sample.timings.queued_s >= 0 and sample.timings.generating_s > 0


# ---- weights ------------------------------------------------------------------------------


def preempted_then_swapped(in_flight: str) -> dict[str, RolloutSample]:
    """Four rows and a fifth that waits; new weights when r3 has just been taken out."""
    engine = capped_engine()
    engine.submit([request(f"r{i}", (i % V, 1), sized(20)) for i in range(5)])
    while not preemptions(engine):
        engine.step()
    assert waiting(engine) == ["r3", "r4"]
    engine.load(NEXT, version=1, digest="next", in_flight=in_flight)  # type: ignore[arg-type]
    return run(engine, [])


def spans(samples: dict[str, RolloutSample]) -> dict[str, tuple[tuple[int, int], ...]]:
    return {name: samples[name].version_spans for name in sorted(samples)}


def test_a_preempted_row_finishes_under_the_weights_it_began_with() -> None:
    samples = preempted_then_swapped("finish")
    old = {f"r{i}": ((0, 20),) for i in range(4)}
    assert spans(samples) == old | {"r4": ((1, 20),)}
    requests = [samples[name].request for name in old]
    plain = run(table_engine(TABLE, V), requests)
    assert {name: samples[name].token_ids for name in old} == tokens(plain)


def test_a_preempted_row_is_in_flight_for_a_swap_that_aborts_those() -> None:
    samples = preempted_then_swapped("abort")
    reasons = {name: samples[name].finish_reason for name in samples}
    assert reasons == {f"r{i}": "abort" for i in range(4)} | {"r4": "length"}
    assert spans(samples)["r3"] == ((0, 7),) and spans(samples)["r4"] == ((1, 20),)


def test_a_preempted_row_goes_on_under_the_new_weights_when_interrupted() -> None:
    samples = preempted_then_swapped("interrupt")
    assert spans(samples) == {f"r{i}": ((0, 8), (1, 12)) for i in range(3)} | {
        "r3": ((0, 7), (1, 13)), "r4": ((1, 20),),
    }  # fmt: skip


def test_a_row_whose_law_breaks_gives_its_room_back() -> None:
    def table(ids: tuple[int, ...]) -> torch.Tensor:
        broken = ids[0] == 0 and len(ids) >= 6
        return torch.full((V,), torch.nan, dtype=torch.float64) if broken else TABLE(ids)

    policy = capped()
    engine = table_engine(table, V, policy=policy)
    policy.swap(table)
    samples = run(engine, [request("bad", (0, 1), sized(20)), request("good", (1, 1), sized(28))])
    assert samples["bad"].finish_reason == "error" and len(samples["good"].token_ids) == 28
    assert policy.num_entries == 29  # all of the good row but its last token
