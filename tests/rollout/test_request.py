"""Requests, samples and counters as values: sums, ratios, edges, the way to JSON and back."""

import json
from dataclasses import replace

import pytest

from rollout.errors import InvalidRequest, RolloutError
from rollout.request import RolloutSample, SpecCounters
from rollout.sampling import SamplingParams
from rollout.table_policy import random_table
from tests.rollout.engines import drawing_proposer, request, run, table_engine

TABLE = random_table(3, depth=1, seed=2)


def a_sample() -> RolloutSample:
    sampling = SamplingParams(
        temperature=0.7, top_k=2, stop_token_ids=(2,), stop_strings=("END",), seed=5
    )
    engine = table_engine(
        TABLE, 3, proposer=drawing_proposer("mixed", TABLE), draft_len=2, decode=lambda ids: ""
    )
    return run(engine, [request("r", (0, 1), sampling, sample_index=3, run_seed=9)])["r"]


# ---- counters -----------------------------------------------------------------------------


@pytest.mark.parametrize(("accepted", "rate"), [(0, 0.0), (2, 0.5), (4, 1.0)])
def test_the_bonus_token_is_in_no_acceptance_rate(accepted: int, rate: float) -> None:
    # case 193
    counters = SpecCounters(rounds=1, drafted=4, verified=4, accepted=accepted, bonuses=1)
    assert counters.acceptance_rate == rate


def test_ratios_without_a_denominator_are_none() -> None:
    # case 195: neither NaN nor 0
    assert SpecCounters().acceptance_rate is None
    assert SpecCounters().tokens_per_target_step is None
    assert SpecCounters(rounds=3, plain=3).acceptance_rate is None
    assert SpecCounters(rounds=3, plain=3).tokens_per_target_step == 1.0


def test_what_was_drafted_and_not_verified_does_not_lower_the_rate() -> None:
    # case 197: 30 of the 60 that were tested, of 100 drafted
    assert SpecCounters(drafted=100, verified=60, accepted=30).acceptance_rate == 0.5


@pytest.mark.parametrize(
    ("one", "other", "pooled"), [((2, 10), (4, 5), 0.4), ((1, 1), (0, 9), 0.1)]
)
def test_pooled_rates_are_sums_over_sums(
    one: tuple[int, int], other: tuple[int, int], pooled: float
) -> None:
    # case 199: not the means of the rates, .50 twice
    total = SpecCounters(accepted=one[0], verified=one[1])
    total.add(SpecCounters(accepted=other[0], verified=other[1]))
    assert total.acceptance_rate == pytest.approx(pooled)


def test_adding_counters_adds_every_field_and_leaves_the_other_alone() -> None:
    one = SpecCounters(1, 2, 3, 4, 5, 6, 7, [1], [1], 0.5, 8)
    other = SpecCounters(10, 20, 30, 40, 50, 60, 70, [10, 5], [10, 0], 1.5, 80)
    one.add(other)
    assert one == SpecCounters(11, 22, 33, 44, 55, 66, 77, [11, 5], [11, 0], 2.0, 88)
    assert other == SpecCounters(10, 20, 30, 40, 50, 60, 70, [10, 5], [10, 0], 1.5, 80)
    assert one.emitted == 44 + 55 + 66 + 77 and one.num_reached == 16


def test_counters_of_two_objects_share_no_lists() -> None:
    SpecCounters().reached.append(1)
    assert SpecCounters().reached == []


# ---- samples ------------------------------------------------------------------------------


def test_a_sample_survives_json() -> None:
    sample = a_sample()
    assert sample.token_ids and sample.counters.drafted
    assert RolloutSample.from_json(json.loads(json.dumps(sample.to_json()))) == sample


def test_an_empty_sample_survives_json() -> None:
    empty = request(sampling=SamplingParams(max_new_tokens=0))
    sample = run(table_engine(TABLE, 3), [empty])["r0"]
    assert RolloutSample.from_json(json.loads(json.dumps(sample.to_json()))) == sample


def test_lists_of_different_lengths_are_not_a_sample() -> None:
    with pytest.raises(AssertionError, match="differ in length"):
        replace(a_sample(), logprobs=())
    with pytest.raises(AssertionError, match="differ in length"):
        replace(a_sample(), version_spans=((0, 1), (1, 100)))


def test_the_oldest_version_ages_the_sample() -> None:
    sample = a_sample()
    num = len(sample.token_ids)
    assert replace(sample, version_spans=((4, 1), (7, num - 1))).oldest_version == 4


# ---- sampling parameters ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("min_tokens", -1),
        ("max_new_tokens", -1),
        ("seed", 2**63),
        ("stop_strings", ("END", "")),
        ("stop_token_ids", (2, -1)),
        ("min_tokens", 257),
    ],
)
def test_a_value_without_a_meaning_is_refused_by_name(name: str, value: object) -> None:
    # case 106
    with pytest.raises(InvalidRequest, match=f"^{name}=.*: expected ") as refused:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert isinstance(refused.value, RolloutError) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, min_tokens=0, max_new_tokens=0),
        SamplingParams(temperature=1e-300, top_p=1e-300, min_p=1),
        SamplingParams(seed=-(2**63)),
        SamplingParams(seed=2**63 - 1),
        SamplingParams(min_tokens=256),
    ],
)
def test_every_edge_value_is_served(sampling: SamplingParams) -> None:
    sample = run(table_engine(TABLE, 3), [request(sampling=sampling)])["r0"]
    assert len(sample.token_ids) == min(sampling.max_new_tokens, 63)


def test_only_temperature_zero_is_greedy() -> None:
    # case 37
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-300).greedy
