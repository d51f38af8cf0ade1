"""What the proposers' benchmark counts, keeps and tells; it is not run here."""

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from actors.engine_spec import EngineSpec, history_salt
from recipes.recorded_rollouts import Recording, Rollout
from recipes.train_mtp import MtpOptions
from rollout.checkpoint import read_config
from rollout.mtp_weights import load_mtp, save_mtp
from rollout.request import RolloutRequest, RolloutSample, SpecCounters, Timings
from rollout.sampling import SamplingParams
from scripts import (
    bench_alone,
    bench_lossless,
    bench_makespan,
    bench_never_loses,
    bench_trained,
)
from scripts.bench_exact import Inexact
from scripts.bench_kept import Kept
from scripts.bench_never_loses import (
    ADAPTIVE,
    AGAIN,
    PLAIN,
    TURN,
    Cell,
    Decoded,
    Way,
    by_cpu,
    check_same,
    decode_in_turns,
)
from scripts.bench_ours import LoadedPolicy
from scripts.bench_trained import Trained
from tests.proposers.mtp_heads import random_head
from tests.rollout.engines import request


def sample(token_ids: tuple[int, ...], counters: SpecCounters | None = None) -> RolloutSample:
    num = len(token_ids)
    return RolloutSample(
        request("r"), token_ids, (0.0,) * num, (0.0,) * num, (1.0,) * num, ((0, num),),
        "length", "", "full", "", counters or SpecCounters(), Timings(),
    )  # fmt: skip


def took(seconds: float, cpu_s: float | None = None) -> Decoded:
    """Two tokens in two rounds, of which one was accepted of four verified; plain decoding emits one a
    second."""
    counters = SpecCounters(rounds=2, verified=4, accepted=1, corrections=1)
    cpu_s = seconds if cpu_s is None else cpu_s
    return Decoded(seconds, cpu_s, [sample((1, 2), counters)], plain_tokens=seconds)


def cell_of(**runs: list[Decoded]) -> Cell:
    return Cell(4, "low", {name.replace("_", " "): made for name, made in runs.items()})


# ---- cells --------------------------------------------------------------------------------


def test_a_ratio_is_one_of_whole_cells_over_the_repeats_that_both_had() -> None:
    cell = cell_of(
        plain=[took(1.0), took(2.0), took(9.0)],
        adaptive=[took(3.0, 0.5), took(1.0, 0.5), took(2.0, 0.5)],
        fixed_3=[took(6.0)],
    )
    assert cell.versus(PLAIN)[0] == 2.0  # 12 s / 6 s
    assert cell.versus(PLAIN, by_cpu)[0] == 8.0  # 12 s / 1.5 s
    assert cell.versus("fixed 3")[0] == 2.0  # 6 s / 3 s


def test_the_error_of_a_ratio_is_the_standard_error_over_repeats() -> None:
    cell = cell_of(plain=[took(1.0), took(2.0)], adaptive=[took(1.0), took(1.0)])
    assert cell.versus(PLAIN)[1] == pytest.approx(0.5)  # of 1 and 2
    once = cell_of(plain=[took(1.0)], adaptive=[took(1.0)])
    assert math.isnan(once.versus(PLAIN)[1])


def test_plain_decoding_beside_itself_tells_what_the_benchmark_can_tell() -> None:
    runs = {"plain": [took(1.0)], "plain_again": [took(0.8)], "adaptive": [took(2.0)]}
    told = cell_of(**runs).to_json()
    assert (told["plain_again"], told["best_fixed"]) == (1.25, PLAIN)


def test_the_best_fixed_length_may_be_none_and_is_never_the_adaptive_one() -> None:
    runs = {"plain": [took(1.0)], "adaptive": [took(0.1)], "fixed_1": [took(2.0)]}
    assert cell_of(**runs).best_fixed == PLAIN
    assert cell_of(**runs | {"fixed_1": [took(0.5)]}).best_fixed == "fixed 1"
    plain = [took(1.0), took(0.1)]  # a fast repeat that the fixed lengths did not have
    assert cell_of(**runs | {"plain": plain, "fixed_1": [took(0.5)]}).best_fixed == "fixed 1"


class Rounds:
    """An engine that counts its steps and ends a request after so many."""

    def __init__(self, name: str, num: int, log: list[str]) -> None:
        self.name, self.num, self.log, self.left = name, num, log, 0
        self.asked: list[RolloutRequest] = []
        self.rounds = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.asked)

    def load(self, weights: object, **_: Any) -> None:
        assert weights == self.name

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self.asked, self.left = list(requests), self.num

    def step(self) -> list[RolloutSample]:
        self.log.append(self.name)
        self.rounds += 1
        self.left -= 1
        if self.left or not self.asked:
            return []
        ended, self.asked = self.asked, []
        return [replace(sample((1,)), request=one) for one in ended]

    def counters(self) -> SpecCounters:
        return SpecCounters(plain=self.rounds)


def test_ways_take_turns_until_all_have_ended() -> None:
    log: list[str] = []
    lengths = {"plain": 2 * TURN, "adaptive": TURN, "fixed 1": 3 * TURN}
    ways = {name: Way(Rounds(name, num, log), name) for name, num in lengths.items()}  # type: ignore[arg-type]
    taken = decode_in_turns(ways, [[1]], SamplingParams(max_new_tokens=4), seed=1)
    assert {name: run.tokens for name, run in taken.items()} == dict.fromkeys(lengths, 1)
    timed = log[sum(lengths.values()) :]  # behind the prompts
    turns = [timed[at] for at in range(0, len(timed), TURN)]
    assert len(timed) == sum(lengths.values())
    going = [{"adaptive", "fixed 1", "plain"}, {"fixed 1", "plain"}, {"fixed 1"}]
    assert [set(turns[:3]), set(turns[3:5]), set(turns[5:])] == going


def test_no_way_always_comes_behind_the_same_one() -> None:
    log: list[str] = []
    names = ("plain", "plain again", "adaptive")
    ways = {name: Way(Rounds(name, 40 * TURN, log), name) for name in names}  # type: ignore[arg-type]
    decode_in_turns(ways, [[1]], SamplingParams(max_new_tokens=4), seed=1)
    turns = log[3 * 40 * TURN :: TURN]
    orders = Counter(tuple(turns[at : at + 3]) for at in range(0, len(turns), 3))
    assert set(orders) == set(permutations(names))


def test_a_slow_spell_of_the_machine_weighs_no_more_than_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    def now() -> float:
        """Plain rounds take 2 s, adaptive ones 1 s; ten times as much in the first ten turns."""
        cost = {"plain": 2.0, "adaptive": 1.0}
        return sum(cost[name] * (10 if at < 10 * TURN else 1) for at, name in enumerate(log))

    monkeypatch.setattr(bench_never_loses.time, "perf_counter", now)
    ways = {name: Way(Rounds(name, 20 * TURN, log), name) for name in ("plain", "adaptive")}  # type: ignore[arg-type]
    log.clear()
    taken = decode_in_turns(ways, [[1]], SamplingParams(max_new_tokens=4), seed=1)
    assert taken["plain"].plain_tokens == pytest.approx(20 * TURN)
    assert taken["adaptive"].plain_tokens == pytest.approx(10 * TURN)


def test_a_plain_turn_that_stalls_is_no_gain_of_the_turn_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    def now() -> float:
        """Every round takes 1 s, those of plain decoding's sixth turn behind the prompts 50."""
        seconds, plain = 0.0, 0
        for name in log:
            plain += name == "plain"
            stalled = name == "plain" and 17 * TURN < plain <= 18 * TURN
            seconds += 50.0 if stalled else 1.0
        return seconds

    monkeypatch.setattr(bench_never_loses.time, "perf_counter", now)
    ways = {name: Way(Rounds(name, 12 * TURN, log), name) for name in ("plain", "adaptive")}  # type: ignore[arg-type]
    taken = decode_in_turns(ways, [[1]], SamplingParams(max_new_tokens=4), seed=1)
    assert taken["plain"].seconds == 61 * TURN
    assert taken["adaptive"].plain_tokens == pytest.approx(12 * TURN)


def test_every_way_has_every_cache_in_turn() -> None:
    class Loaded:
        weights = None
        made = 0

        def beside(self) -> "Loaded":
            other = Loaded()
            other.made, self.made = self.made, self.made + 1
            return other

        def engine(self, **_: Any) -> int:
            return self.made

    turns = bench_never_loses.make_ways(Loaded(), "low", [], 4)  # type: ignore[arg-type]
    for name in turns[0]:
        assert sorted(ways[name].engine for ways in turns) == list(range(len(turns)))  # type: ignore[type-var]
    assert all(len({way.engine for way in ways.values()}) == len(ways) for ways in turns)


def test_a_cell_counts_what_its_adaptive_runs_accepted() -> None:
    plain = {"plain": [took(1.0)], "plain_again": [took(1.0)]}
    told = cell_of(**plain, adaptive=[took(1.0), took(1.0)]).to_json()
    assert (told["acceptance_rate"], told["tokens_per_target_step"]) == (0.25, 1.0)


def test_the_worst_cell_counts() -> None:
    others = {"plain": [took(1.0)], "plain_again": [took(1.0)], "fixed_1": [took(0.5)]}
    good = cell_of(**others, adaptive=[took(0.5)]).to_json()
    bad = cell_of(**others, adaptive=[took(2.0)]).to_json()
    told = bench_never_loses.summary([good, bad])
    assert (told["min_vs_plain"], told["min_vs_best_fixed"]) == (0.5, 0.25)
    assert len(bench_never_loses.text(told["cells"])) == 3


def test_other_tokens_than_plain_decoding_end_the_benchmark() -> None:
    check_same([sample((1, 2))], [sample((1, 2))], "here")
    with pytest.raises(Inexact, match="here: 1 of 1 samples differ"):
        check_same([sample((1, 2))], [sample((1, 3))], "here")


def test_fixed_lengths_that_score_too_much_are_left_out() -> None:
    class Loaded:
        weights = None

        def beside(self) -> "Loaded":
            return self

        def engine(self, **_: Any) -> None:
            pass

    def names(batch: int) -> set[str]:
        first, *others = bench_never_loses.make_ways(Loaded(), "low", [], batch)  # type: ignore[arg-type]
        assert all(set(ways) == set(first) for ways in others)
        return set(first)

    assert names(8) == {PLAIN, AGAIN, ADAPTIVE, "fixed 1", "fixed 3", "fixed 8"}
    assert names(32) == {PLAIN, AGAIN, ADAPTIVE, "fixed 1", "fixed 3"}


# ---- the other parts ----------------------------------------------------------------------


def test_whole_steps_tell_the_median_of_their_pairs() -> None:
    counters = SpecCounters(rounds=2, accepted=4, verified=8, bonuses=2)
    made = bench_makespan.Makespan([2.0, 3.0], [1.0, 1.0], counters, [3, 1])
    told = made.to_json()
    assert (told["speedup"], told["tokens_per_target_step"], told["lengths"]) == (2.5, 3, [1, 3])
    assert told["price"] is None and "chance" not in bench_makespan.text(told)[0]
    made.price = 0.8
    assert "from a chance of 0.80 on" in bench_makespan.text(made.to_json())[0]


def alone(rounds: int, accepted: int, seconds: float) -> bench_alone.Run:
    run, num = bench_alone.Run(), rounds + accepted
    counters = SpecCounters(
        rounds=rounds, accepted=accepted, verified=2 * accepted, plain=rounds,
        reached=[rounds, accepted], accepted_by_position=[accepted, 0],
    )  # fmt: skip
    run.add(seconds, sample(tuple(range(num)), counters))
    return run


def test_the_best_way_alone_is_named_by_steps_and_by_seconds() -> None:
    runs = {"plain": alone(8, 0, 2.0), "mtp 4": alone(4, 4, 4.0), "mtp": alone(6, 2, 1.0)}
    told = bench_alone.to_json(runs)
    assert (told["tokens_per_target_step_b1"], told["tokens_per_target_step_b1_way"]) == (
        2,
        "mtp 4",
    )
    assert (told["speedup_b1"], told["speedup_b1_way"]) == (2, "mtp")
    assert told["alone"]["mtp 4"]["conditional"] == [1.0, 0.0]
    assert len(bench_alone.text(told)) == 4
    assert set(bench_alone.KEYS) < set(told)


def test_every_way_alone_decodes_every_request(tiny_llama: Path, tmp_path: Path) -> None:
    save_mtp(tmp_path / "head", random_head(tiny_llama), history_salt(tiny_llama))
    spec = EngineSpec(
        str(tiny_llama), num_slots=1, context_len=64, proposer="mtp",
        mtp_head=str(tmp_path / "head"),
    )  # fmt: skip
    earlier = Recording(((5, 6, 7),), ((Rollout((8, 9, 8, 9), (-1.0,) * 4),),), 1.0, "int8_w8a16")
    asked = Trained(tiny_llama, earlier, SamplingParams(max_new_tokens=8)).requests(16, 2)
    runs = bench_alone.measure(LoadedPolicy.make(spec), earlier, asked, lambda _: None)
    assert {run.num_tokens for run in runs.values()} == {2 * 8} and len(asked) == 2
    assert len(runs["mtp 2"].counters.reached) == 2  # depths
    assert not runs["plain"].counters.drafted and runs["mixture 4"].counters.drafted


def test_a_head_is_trained_once_for_its_policy(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(tiny_llama, folder)
    of_prompt = tuple(Rollout((8, 9, 10 + i), (-1.0,) * 3) for i in range(3))
    earlier = Recording(((5, 6, 7),), (of_prompt,), 1.0, "int8_w8a16")
    trained = Trained(folder, earlier, SamplingParams(max_new_tokens=8))
    options = MtpOptions(max_steps=1)
    path, report = trained.head(options, lambda _: None)
    assert load_mtp(path, read_config(folder), history_salt(folder)) and report["steps"] == 1
    monkeypatch.delattr(bench_trained, "train_mtp")
    assert trained.head(options, lambda _: None) == (path, report)


def test_lossless_tells_the_better_format_of_each_batch_and_the_worst_mismatch() -> None:
    cells = [
        {"batch": batch, "format": format_, "speedup": speedup, "k3": k3, "k3_plain": 2 * k3,
         "tokens_per_target_step": 1.0}
        for batch, format_, speedup, k3 in ((1, "a", 2.0, 1e-9), (1, "b", 1.5, 3e-9),
                                            (2, "a", 1.1, 2e-9), (2, "b", 1.2, 1e-9))
    ]  # fmt: skip
    told = bench_lossless.summary(cells)
    assert told["speedup"] == {1: 2.0, 2: 1.2}
    assert (told["k3"], told["k3_plain"]) == (3e-9, 6e-9)
    assert len(bench_lossless.text(cells)) == 4


# ---- what is kept -------------------------------------------------------------------------


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    measured: list[int] = []

    def measure() -> dict[str, Any]:
        measured.append(1)
        return {"lengths": (1, 2)}

    for _ in range(2):
        kept = Kept(tmp_path / "new", {"tokens": 8, "batches": (1, 2)})
        assert kept.find_or("part", measure) == {"lengths": [1, 2]}
    assert len(measured) == 1
    kept.forget()
    assert kept.find("part") is None


def test_what_was_measured_otherwise_is_measured_again(tmp_path: Path) -> None:
    Kept(tmp_path, {"tokens": 8}).keep("part", 1)
    assert Kept(tmp_path, {"tokens": 8}).find("part") == 1
    assert Kept(tmp_path, {"tokens": 9}).find("part") is None
    assert Kept(tmp_path, {"tokens": 8}).find("other") is None
