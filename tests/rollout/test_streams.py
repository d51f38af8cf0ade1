"""A row's randomness is a function of who asks: not of neighbours, slots, order or history."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rollout.errors import InvalidRequest
from rollout.request import RolloutRequest
from rollout.sampling import SamplingParams
from rollout.streams import SeededDraws, row_key
from rollout.table_policy import random_table
from tests.rollout.engines import ScriptedProposer, drawing_proposer, request, run, table_engine

V = 4
TABLE = random_table(V, depth=2, seed=8)
DRAFT = random_table(V, depth=1, seed=9)
PURPOSES = (b"target", b"draft", b"coin", b"correction")


def seeded(seed: int | None, temperature: float = 1.0, length: int = 24) -> SamplingParams:
    return SamplingParams(seed=seed, temperature=temperature, max_new_tokens=length)


def tokens(requests: list[RolloutRequest], num_slots: int = 8) -> dict[str, tuple[int, ...]]:
    """Of a fresh engine that draws its drafts, so that every purpose of the streams is used."""
    engine = table_engine(
        TABLE, V, proposer=drawing_proposer("mixed", DRAFT), draft_len=3, num_slots=num_slots
    )
    return {name: sample.token_ids for name, sample in run(engine, requests).items()}


A = request("a", sampling=seeded(42), prompt_id="p")


def uniforms(purpose: bytes, num: int, seed: int = 5) -> np.ndarray:
    draws = SeededDraws(seed, "prompt", 0)
    return np.array([draws.uniform(purpose, 7, position) for position in range(num)])


@pytest.mark.parametrize("purpose", PURPOSES)
def test_uniforms_fill_the_unit_interval_evenly(purpose: bytes) -> None:
    """chi-square over 20 cells, 19 degrees of freedom: above 66 once in 2e6."""
    counts = np.histogram(uniforms(purpose, 10_000), bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 66


@pytest.mark.parametrize("one", range(4))
@pytest.mark.parametrize("other", range(4))
def test_purposes_are_uncorrelated(one: int, other: int) -> None:
    """|r| sqrt(n) above 5.5 once in 3e7. Shifted by one where the purpose is the same."""
    x = uniforms(PURPOSES[one], 4001)
    y = uniforms(PURPOSES[other], 4001)
    r = np.corrcoef(x[1:], y[:-1] if one == other else y[1:])[0, 1]
    assert abs(r) * math.sqrt(4000) < 5.5


def test_every_name_of_a_decision_has_its_own_uniform() -> None:
    values = {
        SeededDraws(seed, prompt, sample).uniform(purpose, start, position)
        for seed in (0, 1)
        for prompt in ("p", "q")
        for sample in (0, 1)
        for purpose in PURPOSES
        for start in (0, 1, 256)
        for position in (0, 1, 256)
    }
    assert len(values) == 2 * 2 * 2 * 4 * 3 * 3


def test_the_target_uniform_is_keyed_by_position_alone() -> None:
    class Laws:
        def pick(self, index: int, uniform: float) -> float:
            return uniform

    draws = SeededDraws(1, "p", 0)
    assert draws.target(Laws(), 0, 5) == draws.target(Laws(), 3, 5)  # type: ignore[arg-type]
    assert draws.target(Laws(), 0, 5) != draws.target(Laws(), 0, 6)  # type: ignore[arg-type]


def test_uniforms_are_below_one() -> None:
    assert max(uniforms(b"coin", 1000)) < 1 <= (2**53 - 1) * 2.0**-53 + 2.0**-53


BITS = [0, 1, -1, 16777216, 16777217, 2**32, 2**32 + 1, 7 + 2**32, 7, 2**63 - 1, -(2**63)]


def test_all_64_bits_of_the_seed_count() -> None:
    # case 50: float32 cannot tell 2^24 from 2^24 + 1, and 32 bits cannot tell s from s + 2^32
    assert len({row_key(seed, "p", 0) for seed in BITS}) == len(BITS)
    assert len({tokens([replace(A, sampling=seeded(s))])["a"] for s in BITS}) == len(BITS)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_beyond_64_bits_is_refused_by_name(seed: int) -> None:
    # case 50
    with pytest.raises(InvalidRequest, match="seed"):
        SamplingParams(seed=seed)
    with pytest.raises(InvalidRequest, match="run_seed"):
        table_engine(TABLE, V).submit([request(run_seed=seed)])


def test_a_seed_repeats_and_another_differs() -> None:
    # case 38
    hot = [replace(A, sampling=seeded(seed, temperature=2.0)) for seed in (42, 42, 42, 42, 42, 43)]
    results = [tokens([one])["a"] for one in hot]
    assert len(set(results[:5])) == 1 and results[5] != results[0]


def test_greedy_does_not_look_at_the_seed() -> None:
    # case 39
    assert len({tokens([replace(A, sampling=seeded(s, 0.0))])["a"] for s in range(5)}) == 1


def test_acceptance_probabilities_are_not_only_zero_and_one_when_sampling() -> None:
    # case 39: their sum over reached positions is not near a whole number
    engine = table_engine(TABLE, V, proposer=drawing_proposer("dense", DRAFT), draft_len=3)
    counters = run(engine, [replace(A, sampling=seeded(1, 0.8))])["a"].counters
    assert abs(counters.expected_accepted - round(counters.expected_accepted)) > 0.01
    assert 0 < counters.accepted < counters.num_reached


def test_an_unseeded_neighbour_changes_nothing() -> None:
    # case 40
    alone = tokens([A])["a"]
    for run_seed in range(4):
        neighbour = request("b", sampling=seeded(None), run_seed=run_seed)
        assert tokens([A, neighbour])["a"] == alone


def test_greedy_beside_seeded_neighbours_that_come_and_go_is_greedy() -> None:
    # case 42: two slots besides, so that neighbours change while it runs
    greedy = request("greedy", sampling=seeded(None, 0.0, length=40))
    others = [request(f"n{s}", sampling=seeded(s, length=3 + s)) for s in range(8)]
    assert tokens([greedy, *others], num_slots=3)["greedy"] == tokens([greedy])["greedy"]


def test_the_engine_may_have_served_a_hundred_others_before() -> None:
    # case 44
    engine = table_engine(TABLE, V, proposer=drawing_proposer("mixed", DRAFT), draft_len=3)
    run(engine, [request(f"n{i}", sampling=seeded(i, length=4)) for i in range(100)])
    assert run(engine, [A])["a"].token_ids == tokens([A])["a"]


def test_samples_of_one_seeded_prompt_differ_and_rerun_in_the_same_order() -> None:
    # case 46
    group = [replace(A, id=f"a{i}", sample_index=i, sampling=seeded(7)) for i in range(8)]
    first = tokens(group)
    assert len(set(first.values())) == 8
    assert tokens(group) == first
    assert tokens(group[:4]) == {name: first[name] for name in ("a0", "a1", "a2", "a3")}


def test_engines_of_one_run_make_different_samples_of_a_prompt() -> None:
    # case 48: four engines, one run seed; what differs is the sample index
    group = [replace(A, sampling=seeded(None), sample_index=i, run_seed=3) for i in range(4)]
    results = [tokens([one])["a"] for one in group]
    assert len(set(results)) == 4
    assert results == [tokens([one])["a"] for one in group]


def test_the_run_seed_counts_where_the_request_names_none() -> None:
    unseeded = [replace(A, sampling=seeded(None), run_seed=s) for s in (1, 2)]
    assert tokens(unseeded[:1]) != tokens(unseeded[1:])
    assert tokens([replace(A, run_seed=1)]) == tokens([replace(A, run_seed=2)])


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_batch_size_order_and_slots_change_nothing(order: int, num_slots: int) -> None:
    # case 51
    requests = [A, *(request(f"n{i}", sampling=seeded(i, length=5 + i)) for i in range(7))]
    shuffled = [requests[i] for i in np.random.default_rng(order).permutation(8)]
    assert tokens(shuffled, num_slots) == {r.id: tokens([r])[r.id] for r in requests}


@pytest.mark.parametrize("num_rounds", [1, 3, 6])
def test_a_row_that_loses_its_cache_goes_on_as_if_it_had_not(num_rounds: int) -> None:
    # case 51: reloading the same weights is a preemption
    engine = table_engine(TABLE, V, proposer=drawing_proposer("mixed", DRAFT), draft_len=3)
    engine.submit([A])
    for _ in range(num_rounds):
        assert not engine.step()
    engine.load(TABLE, version=1, digest="again")
    assert run(engine, [])["a"].token_ids == tokens([A])["a"]


def test_a_sample_aborted_and_asked_for_again_is_the_same_sample() -> None:
    engine = table_engine(TABLE, V, proposer=drawing_proposer("mixed", DRAFT), draft_len=3)
    engine.submit([A])
    engine.step()
    (aborted,) = engine.abort(["a"])
    whole = run(engine, [A])["a"].token_ids
    assert aborted.token_ids == whole[: len(aborted.token_ids)] and whole == tokens([A])["a"]


def test_draws_that_depend_on_the_round_are_seen() -> None:
    """Negative control: streams that are used up give other tokens beside neighbours."""

    class UsedUp(SeededDraws):
        counter = 0

        def uniform(self, purpose: bytes, start: int, position: int) -> float:
            UsedUp.counter += 1
            return super().uniform(purpose, 0, UsedUp.counter)

    def generate(requests: list[RolloutRequest]) -> tuple[int, ...]:
        UsedUp.counter = 0
        engine = table_engine(TABLE, V, draws_for=lambda _: UsedUp(1, "p", 0))
        return run(engine, requests)["a"].token_ids

    assert generate([A, request("b")]) != generate([A])


def test_drafts_and_their_acceptance_use_different_uniforms() -> None:
    asked: list[tuple[bytes, int, int]] = []

    class Recorded(SeededDraws):
        def uniform(self, purpose: bytes, start: int, position: int) -> float:
            asked.append((purpose, start, position))
            return super().uniform(purpose, start, position)

    proposer: ScriptedProposer = drawing_proposer("dense", DRAFT)
    engine = table_engine(
        TABLE, V, proposer=proposer, draft_len=3, draws_for=lambda _: Recorded(1, "p", 0)
    )
    run(engine, [A])
    assert len(set(asked)) == len(asked) > 24
