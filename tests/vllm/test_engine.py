"""vLLM for real, on its CPU build: the same requests in, the same samples out."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.vllm.engine import VllmEngine
from rollout.engine import Engine, run_to_end
from rollout.errors import InvalidRequest, InvalidWeights
from rollout.grammar import Grammar
from rollout.request import RolloutRequest, RolloutSample, SpecCounters
from rollout.sampling import SamplingParams
from tests.vllm.engines import (
    CONTEXT_LEN,
    full_logprobs,
    load,
    loaded,
    make_idle,
    requests,
    spec_of,
)

PLAIN = SamplingParams(max_new_tokens=24)
LAWS = {
    "plain": PLAIN,
    "filtered": replace(PLAIN, temperature=0.7, top_p=0.9, top_k=20),
    "min_p and bias": replace(PLAIN, min_p=0.05, logit_bias=((40, 2.0), (41, -float("inf")))),
    "penalties": replace(PLAIN, repetition_penalty=1.3, presence_penalty=0.4, bad_words=((5,),)),
    "stops": replace(PLAIN, stop_token_ids=tuple(range(0, 280, 9)), min_tokens=5),
    "stop text": replace(PLAIN, stop_strings=("1", " ")),
    "greedy": replace(PLAIN, temperature=0.0),
    "own seed": replace(PLAIN, seed=99),
    "grammar": replace(PLAIN, grammar=Grammar("regex", "[0-9]+( \\+ [0-9]+)*"), eos_token_ids=(0,)),
}
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def native(folder: Path) -> Engine:
    return loaded(spec_of(folder, "native", proposer="none"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Engine:
    return loaded(spec_of(folder))


@pytest.fixture
def engine(shared: Engine, folder: Path, weights: Weights) -> Engine:
    """The history proposer's engine, idle and under version 0."""
    make_idle(shared, folder, weights)
    return shared


def mixed(name: str) -> list[RolloutRequest]:
    """Every law in one batch, two rows each, prompts of several lengths."""
    made = []
    for group, (law, sampling) in enumerate(LAWS.items()):
        prompt = tuple(range(10 + group, 20 + 3 * group))
        for member in range(2):
            ids = f"{name} {law} {member}", f"{name} {law}", law
            made.append(RolloutRequest(*ids, member, prompt, sampling, 3))
    return made


def same(one: RolloutSample, other: RolloutSample, tolerance: float = 1e-4) -> bool:
    """Tokens, end and recorded numbers."""
    numbers = zip(
        (*one.logprobs, *one.logprobs_full, *one.kept_mass),
        (*other.logprobs, *other.logprobs_full, *other.kept_mass),
        strict=True,
    )
    return (
        one.token_ids == other.token_ids
        and (one.finish_reason, one.finish_detail) == (other.finish_reason, other.finish_detail)
        and all(abs(a - b) < tolerance for a, b in numbers)
    )


@pytest.mark.parametrize("proposer", ["history", "ngram", "none"])
def test_every_law_gives_the_native_engines_samples(
    proposer: str, engine: Engine, native: Engine, folder: Path
) -> None:
    made = engine if proposer == "history" else loaded(spec_of(folder, proposer=proposer))
    expected = run_to_end(native, mixed("a"))
    for _ in range(2):  # the second time the history knows every rollout
        got = run_to_end(made, mixed("a"), max_rounds=400)
        assert [one.request.id for one, other in zip(got, expected) if not same(one, other)] == []


def test_an_engine_that_is_closed_leaves_those_beside_and_after_it_whole(
    engine: Engine, native: Engine, folder: Path
) -> None:
    expected = run_to_end(native, mixed("c"))
    closed = loaded(spec_of(folder, proposer="none"))
    assert isinstance(closed, VllmEngine)
    run_to_end(closed, mixed("c"), max_rounds=400)
    closed.close()
    for other in (engine, loaded(spec_of(folder, proposer="none"))):
        got = run_to_end(other, mixed("c"), max_rounds=400)
        assert [one.request.id for one, two in zip(got, expected) if not same(one, two)] == []


def test_other_uniforms_give_other_samples(engine: Engine, native: Engine) -> None:
    """Negative control."""
    expected = run_to_end(native, requests("u", 4, PLAIN))
    got = run_to_end(engine, requests("u", 4, PLAIN, run_seed=8))
    assert not any(same(one, other) for one, other in zip(got, expected))


def test_logprobs_are_those_of_transformers(
    engine: Engine, folder: Path, weights: Weights, others: Weights
) -> None:
    for sampling in (PLAIN, LAWS["filtered"]):
        for sample in run_to_end(engine, requests("lp", 4, sampling)):
            right = full_logprobs(folder, weights, sample, sampling.temperature)
            wrong = full_logprobs(folder, others, sample, sampling.temperature)
            assert max(abs(a - b) for a, b in zip(sample.logprobs_full, right)) < 1e-4
            assert max(abs(a - b) for a, b in zip(sample.logprobs_full, wrong)) > 0.1


def test_greedy_rows_accept_what_the_history_holds(engine: Engine) -> None:
    """Deterministic rows of one prompt: the second is drafted what the first emitted."""
    greedy = replace(PLAIN, temperature=0.0)
    first, second = (
        run_to_end(engine, [replace(request, sample_index=index)])[0]
        for index, request in enumerate(requests("greedy", 1, greedy) * 2)
    )
    assert second.token_ids == first.token_ids
    assert second.counters.accepted > 10
    assert second.counters.rounds < first.counters.rounds


def test_counters_add_up(engine: Engine) -> None:
    before = engine.counters()
    samples = run_to_end(engine, mixed("count"))
    total = SpecCounters()
    for sample in samples:
        assert sample.counters.emitted == len(sample.token_ids)
        assert sample.counters.num_reached <= sample.counters.verified <= sample.counters.drafted
        total.add(sample.counters)
    after = engine.counters()
    for name in ("rounds", "drafted", "verified", "accepted", "corrections", "bonuses", "plain"):
        assert getattr(after, name) - getattr(before, name) == getattr(total, name), name
    assert total.verified and total.accepted


def test_rows_go_on_to_the_end_of_the_context(engine: Engine, native: Engine) -> None:
    long = replace(PLAIN, max_new_tokens=10_000)
    expected = run_to_end(native, requests("long", 4, long))
    got = run_to_end(engine, requests("long", 4, long))
    assert all(map(same, got, expected))
    assert {one.finish_detail for one in got} == {"context_len"}
    assert {len(s.request.prompt_ids) + len(s.token_ids) for s in got} == {CONTEXT_LEN}


def test_no_tokens_asked_for_is_an_empty_sample(engine: Engine) -> None:
    sample = run_to_end(engine, requests("none", 1, replace(PLAIN, max_new_tokens=0)))[0]
    assert (sample.token_ids, sample.finish_reason) == ((), "length")


def test_a_bad_request_is_refused_and_none_is_queued(engine: Engine) -> None:
    good, bad = requests("bad", 2, PLAIN)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        engine.submit([good, replace(bad, prompt_ids=(10**6,))])
    assert not engine.num_unfinished


def test_an_abort_loses_no_token(engine: Engine) -> None:
    """What was generated is handed back, and it is what would have been generated."""
    asked = requests("abort", 12, PLAIN)  # more than there are slots
    whole = {sample.request.id: sample for sample in run_to_end(engine, asked)}
    engine.submit(asked)
    ended = [sample for _ in range(4) for sample in engine.step()]
    cut = engine.abort([asked[0].id, asked[11].id])
    assert [len(sample.token_ids) > 0 for sample in cut] == [False, True]
    for sample in cut:
        assert sample.finish_reason == "abort"
        assert sample.token_ids == whole[sample.request.id].token_ids[: len(sample.token_ids)]
    while engine.num_unfinished:
        ended += engine.step()
    assert len(ended) == 10
    assert all(same(sample, whole[sample.request.id]) for sample in ended)


def test_rows_go_on_under_new_weights_and_say_which_made_what(
    engine: Engine, folder: Path, weights: Weights, others: Weights
) -> None:
    asked = requests("swap", 12, PLAIN)
    engine.submit(asked)
    samples = [sample for _ in range(5) for sample in engine.step()]
    load(engine, spec_of(folder), others, 1)
    while engine.num_unfinished:
        samples += engine.step()
    assert len(samples) == 12
    crossed = [sample for sample in samples if len(sample.version_spans) == 2]
    assert len(crossed) >= 6
    for sample in crossed:
        (first, num), (second, _) = sample.version_spans
        assert (first, second) == (0, 1) and len(sample.token_ids) == 24
        old, new = (full_logprobs(folder, w, sample, 1.0) for w in (weights, others))
        expected = old[:num] + new[num:]
        assert max(abs(a - b) for a, b in zip(sample.logprobs_full, expected)) < 1e-4
        assert max(abs(a - b) for a, b in zip(sample.logprobs_full, old)) > 0.1  # control


@pytest.mark.parametrize("in_flight", ["finish", "abort"])
def test_rows_in_flight_finish_first_or_are_handed_back(
    in_flight: str, engine: Engine, folder: Path, others: Weights
) -> None:
    asked = requests(in_flight, 12, PLAIN)
    engine.submit(asked)
    samples = [sample for _ in range(3) for sample in engine.step()]
    load(engine, spec_of(folder), others, 1, in_flight)  # type: ignore[arg-type]
    while engine.num_unfinished:
        samples += engine.step()
    spans = [tuple(version for version, _ in sample.version_spans) for sample in samples]
    assert sorted(spans) == [(0,)] * 8 + [(1,)] * 4
    reasons = [sample.finish_reason for sample in samples]
    assert reasons.count("abort") == (8 if in_flight == "abort" else 0)


def test_a_refused_update_leaves_the_old_version(
    engine: Engine, folder: Path, weights: Weights
) -> None:
    asked = requests("refused", 4, PLAIN)
    expected = run_to_end(engine, asked)
    name = "model.norm.weight"
    for wrong in (weights[name] * torch.nan, weights[name][:-1]):
        with pytest.raises(InvalidWeights, match=name):
            load(engine, spec_of(folder), {**weights, name: wrong}, 1)
    assert engine.version == 0 and not engine.load_is_due
    assert all(map(same, run_to_end(engine, asked), expected))


def test_the_probe_sees_the_weights_in_force_and_disturbs_no_row(
    engine: Engine, folder: Path, weights: Weights
) -> None:
    from rollout.engine import Probing
    from tests.vllm.engines import reference_logits

    assert isinstance(engine, Probing)
    asked = requests("probe", 6, PLAIN)
    expected = run_to_end(engine, asked)
    engine.submit(asked)
    samples = [sample for _ in range(3) for sample in engine.step()]
    sequences = [list(range(30, 40)), list(range(50, 90, 3))]
    found = engine.probe(sequences)
    right = [reference_logits(folder, weights, ids)[:-1].log_softmax(-1) for ids in sequences]
    assert float((found - torch.cat(right)).abs().max()) < 1e-4
    while engine.num_unfinished:
        samples += engine.step()
    answers = {sample.request.id: sample for sample in samples}
    assert all(same(answers[one.request.id], one) for one in expected)


def test_a_small_cache_and_split_prompts_change_no_sample(
    engine: Engine, native: Engine, folder: Path
) -> None:
    """Rows are preempted where the cache is full; prompts run in parts of at most 16 tokens."""
    small = loaded(
        spec_of(folder, max_cached_tokens=4 * CONTEXT_LEN, max_round_tokens=40, num_slots=8)
    )
    asked = requests("small", 16, replace(PLAIN, max_new_tokens=60))
    expected = run_to_end(native, asked)
    got = run_to_end(small, asked, max_rounds=1000)
    assert all(map(same, got, expected))
    assert small.gauges()["count/rows_run_again"] > 0


def test_drawn_drafts_are_accepted_as_often_as_foretold(folder: Path) -> None:
    """Sampled drafts through the scheduler: tokens differ from plain, the martingale does not."""
    from rollout.watch import acceptance_p_value

    drawing = loaded(spec_of(folder, proposer="history_sampled"))
    sharp = replace(PLAIN, temperature=0.5)
    for seed in range(3):
        run_to_end(drawing, requests(f"d{seed}", 24, sharp, group_size=8, run_seed=seed))
    counters = drawing.counters()
    assert counters.verified > 100 and counters.accepted > 20
    assert (acceptance_p_value(counters) or 0.0) > 1e-3


def test_what_is_remembered_can_be_told(engine: Engine) -> None:
    run_to_end(engine, requests("tell", 2, PLAIN, run_seed=5))
    assert engine.memory is not None
    exported = engine.memory.export()
    assert exported and all(isinstance(tensor, torch.Tensor) for tensor in exported.values())
    engine.memory.merge(exported)
