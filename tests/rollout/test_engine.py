"""Cache rollback, weight swaps, shared prompts and accounting of the native engine."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from proposers.history import HistoryProposer
from proposers.ngram import NgramProposer
from rollout.draft import Draft
from rollout.draft_len import FixedDraftLen
from rollout.errors import InvalidWeights
from rollout.native_engine import NativeEngine
from rollout.policy import Window
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample, SpecCounters
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import SeededDraws
from rollout.table_policy import Table, TablePolicy, random_table
from rollout.verify import Rule
from tests.rollout.engines import (
    ScriptedProposer,
    drawing_proposer,
    plain_law,
    request,
    run,
    table_engine,
)

V = 4
TABLE = random_table(V, depth=3, seed=21)
NEXT = random_table(V, depth=3, seed=22)
DRAFT = random_table(V, depth=1, seed=23)
KINDS = ("point", "sparse", "dense", "mixed")


def tokens(samples: dict[str, RolloutSample]) -> dict[str, tuple[int, ...]]:
    return {name: sample.token_ids for name, sample in samples.items()}


def greedy(length: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=length)


def argmax_proposer(table: Table, right_for: int | None = None) -> ScriptedProposer:
    """Drafts the greedy continuation, wrong from the `right_for`-th token on."""

    def draft(row: Row, max_len: int) -> Draft:
        ids = list(row.token_ids)
        for depth in range(max_len):
            best = int(table(tuple(ids)).argmax())
            ids.append(best if right_for is None or depth < right_for else (best + 1) % V)
        return Draft.of_points(ids[len(row.token_ids) :])

    return ScriptedProposer(draft)


# ---- rollback and bookkeeping -------------------------------------------------------------


@pytest.mark.parametrize("draft_len", [1, 2, 4, 8])
def test_a_draft_equal_to_greedy_is_accepted_whole_in_every_round(draft_len: int) -> None:
    # case 71
    engine = table_engine(TABLE, V, proposer=argmax_proposer(TABLE), draft_len=draft_len)
    counters = run(engine, [request(sampling=greedy(40))])["r0"].counters
    assert counters.accepted == counters.verified > 0
    assert counters.corrections == 0


@pytest.mark.parametrize("sampling", [greedy(50), SamplingParams(max_new_tokens=50)])
def test_rows_that_accept_different_lengths_equal_their_plain_runs(
    sampling: SamplingParams,
) -> None:
    # case 72: of 4 drafted tokens at most 0, 2, 4 are right
    requests = [request(f"r{n}", [1] * (1 + n), sampling) for n in (0, 2, 4)]
    right = {r.id: argmax_proposer(TABLE, right_for=n) for r, n in zip(requests, (0, 2, 4))}
    proposer = ScriptedProposer(lambda row, n: right[row.request.id]._draft(row, n))
    drafted = run(table_engine(TABLE, V, proposer=proposer, draft_len=4), requests)
    assert tokens(drafted) == tokens(run(table_engine(TABLE, V), requests))
    assert drafted["r0"].counters.accepted < drafted["r4"].counters.accepted


@pytest.mark.parametrize("draft_len", [1, 3])
def test_the_token_after_a_refusal_is_conditioned_on_its_replacement(draft_len: int) -> None:
    # case 77: after 0 comes 2, after 1 comes 3; the last drafted token is always refused
    follow = {0: 2, 1: 3, 2: 1, 3: 1}

    def table(ids: tuple[int, ...]) -> torch.Tensor:
        return 100.0 * torch.nn.functional.one_hot(torch.tensor(follow[ids[-1]]), V).double()

    proposer = argmax_proposer(table, right_for=draft_len - 1)
    engine = table_engine(table, V, proposer=proposer, draft_len=draft_len)
    sample = run(engine, [request(sampling=greedy(9))])["r0"]
    assert sample.token_ids == (2, 1, 3, 1, 3, 1, 3, 1, 3)
    assert sample.counters.corrections > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_row_tokens_do_not_depend_on_batch_neighbours(kind: str, num_slots: int) -> None:
    # cases 15, 78: rows with and without drafts end and are admitted all the time
    proposer = drawing_proposer(kind, DRAFT)
    some = ScriptedProposer(
        lambda row, n: Draft() if row.request.sample_index % 3 == 1 else proposer._draft(row, n)
    )
    requests = [
        request(f"r{i}", (i % V, 1), SamplingParams(max_new_tokens=3 + 2 * i), sample_index=i)
        for i in range(7)
    ]
    engine = table_engine(TABLE, V, proposer=some, draft_len=3, num_slots=num_slots)
    alone = [run(table_engine(TABLE, V, proposer=some, draft_len=3), [r]) for r in requests]
    assert tokens(run(engine, requests)) == {
        r.id: a[r.id].token_ids for r, a in zip(requests, alone)
    }


@pytest.mark.parametrize("prompt", [(0,), (0, 1, 2), (0, 1, 3), (0, 1, 2, 3), (3, 3)])
@pytest.mark.parametrize("proposer", ["ngram", "history", "dense"])
def test_a_slot_that_was_used_before_is_as_good_as_new(
    prompt: tuple[int, ...], proposer: str
) -> None:
    # case 79: the same prompt, one that shares all but its last token, a longer one, another one
    def engine() -> NativeEngine:
        made: Proposer = {
            "ngram": NgramProposer(min_match=1),
            "history": HistoryProposer(),
            "dense": drawing_proposer("dense", DRAFT),
        }[proposer]
        return table_engine(TABLE, V, proposer=made, draft_len=3, num_slots=1)

    second = request("second", prompt, prompt_id="other")
    used = engine()
    run(used, [request("first", (0, 1, 2))])
    assert run(used, [second])["second"].token_ids == run(engine(), [second])["second"].token_ids


def test_a_prompt_seen_before_accepts_as_much_as_the_first_time() -> None:
    # case 85: same tokens, hence the same drafts and the same counts
    engine = table_engine(TABLE, V, proposer=NgramProposer(min_match=1), draft_len=4)
    one, other = (
        run(engine, [request("r", (0, 1, 2, 1), SamplingParams(max_new_tokens=30))])["r"]
        for _ in range(2)
    )
    assert one.counters == other.counters and one.token_ids == other.token_ids
    assert engine.gauges()["count/prefill_tokens"] == 3


def test_a_request_id_may_be_used_twice_at_once() -> None:
    # case 115: the engine keeps rows apart by identity, not by id
    engine = table_engine(TABLE, V, proposer=NgramProposer(min_match=1), draft_len=3)
    engine.submit([request("same", (0, 1)), request("same", (2, 3))])
    ended: list[RolloutSample] = []
    while engine.num_unfinished:
        ended += engine.step()
    for sample in ended:
        alone = run(table_engine(TABLE, V), [sample.request])["same"]
        assert sample.token_ids == alone.token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_in_a_mixed_batch_is_the_argmax_with_the_first_of_ties(kind: str) -> None:
    # cases 20, 108
    def table(ids: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0.0, 1.0, 1.0, -1.0], dtype=torch.float64)

    requests = [request("g", sampling=greedy(12)), *(request(f"n{i}") for i in range(3))]
    engine = table_engine(table, V, proposer=drawing_proposer(kind, DRAFT), draft_len=3)
    sample = run(engine, requests)["g"]
    assert sample.token_ids == (1,) * 12
    assert sample.logprobs == sample.logprobs_full == (0.0,) * 12
    assert all(
        0 <= a <= r for a, r in zip(sample.counters.accepted_by_position, sample.counters.reached)
    )


# ---- prompts ------------------------------------------------------------------------------


def test_the_prompt_of_a_group_is_prefilled_once_and_forked_to_its_members() -> None:
    engine = table_engine(TABLE, V)
    group = [request(f"g{i}", (0, 1, 2, 3, 0), prompt_id="p", sample_index=i) for i in range(5)]
    run(engine, group)
    # all but the last of 5 prompt tokens, once, and a copy for each of the 4 others
    assert engine.gauges()["count/prefill_tokens"] == 4
    assert engine.gauges()["count/forked_tokens"] == 4 * 4


def test_a_group_larger_than_the_engine_is_still_prefilled_once() -> None:
    engine = table_engine(TABLE, V, num_slots=2)
    group = [request(f"g{i}", (0, 1, 2), prompt_id="p", sample_index=i) for i in range(9)]
    samples = run(engine, group)
    assert engine.gauges()["count/prefill_tokens"] == 2
    assert all(
        tokens(run(table_engine(TABLE, V), [r]))[r.id] == samples[r.id].token_ids for r in group
    )


def test_prompts_of_different_groups_are_not_mixed_up() -> None:
    prompts = [(0, 1, 2), (0, 1, 3), (0, 1), (1, 1, 2), (2,), (0, 1, 2, 3)]
    requests = [request(f"r{i}", p, prompt_id="same id") for i, p in enumerate(prompts * 2)]
    engine = table_engine(TABLE, V, num_slots=4)
    for name, sample in run(engine, requests).items():
        assert sample.token_ids == run(table_engine(TABLE, V), [sample.request])[name].token_ids


def test_a_weight_swap_prefills_the_prompt_of_a_group_once_more() -> None:
    # case 151: what old weights cached is void
    engine = table_engine(TABLE, V)
    group = [request(f"g{i}", (0, 1, 2), prompt_id="p", sample_index=i) for i in range(4)]
    engine.submit(group)
    engine.step()
    engine.load(NEXT, version=1, digest="next")
    run(engine, [])
    assert engine.gauges()["count/prefill_tokens"] == 2 + 2


# ---- weights ------------------------------------------------------------------------------


def teacher_forced(sample: RolloutSample, tables: Sequence[Table]) -> list[float]:
    """Full-vocabulary log-probability of every token under the version its span names."""
    prompt, ids = sample.request.prompt_ids, sample.token_ids
    versions = [version for version, num in sample.version_spans for _ in range(num)]
    temperature = sample.request.sampling.temperature
    return [
        float((tables[v]((*prompt, *ids[:n])) / temperature).log_softmax(-1)[token])
        for n, (v, token) in enumerate(zip(versions, ids, strict=True))
    ]


def swapped(
    in_flight: str, num_rounds: int, *, proposer: Proposer | None = None, length: int = 20
) -> tuple[dict[str, RolloutSample], NativeEngine]:
    """Two groups on three slots, new weights after some rounds."""
    engine = table_engine(
        TABLE, V, proposer=proposer or drawing_proposer("mixed", DRAFT), draft_len=3, num_slots=3
    )
    sampling = SamplingParams(max_new_tokens=length)
    engine.submit([request(f"r{i}", (i % 2, 1), sampling, sample_index=i) for i in range(5)])
    ended = [sample for _ in range(num_rounds) for sample in engine.step()]
    engine.load(NEXT, version=1, digest="next", in_flight=in_flight)  # type: ignore[arg-type]
    return {s.request.id: s for s in ended} | run(engine, []), engine


@pytest.mark.parametrize("in_flight", ["interrupt", "finish", "abort"])
@pytest.mark.parametrize("num_rounds", [0, 1, 2, 5, 9])
def test_every_token_carries_the_version_that_verified_it(in_flight: str, num_rounds: int) -> None:
    # cases 164, 166: the recorded log-probabilities are those of the version in the span
    samples, _ = swapped(in_flight, num_rounds)
    assert len(samples) == 5
    for sample in samples.values():
        assert sum(num for _, num in sample.version_spans) == len(sample.token_ids)
        assert sample.logprobs_full == pytest.approx(
            teacher_forced(sample, (TABLE, NEXT)), abs=1e-9
        )


def test_interrupted_rows_keep_their_tokens_and_go_on_under_the_new_weights() -> None:
    # case 166: spans in order, each version once
    samples, _ = swapped("interrupt", 2)
    spans = [sample.version_spans for sample in samples.values()]
    assert {tuple(v for v, _ in span) for span in spans} == {(0, 1), (1,)}
    assert all(len(sample.token_ids) == 20 for sample in samples.values())
    assert {sample.weights_digest for sample in samples.values()} == {"next"}


def test_rows_that_finish_first_have_one_version_and_nobody_is_admitted_meanwhile() -> None:
    # case 168 with limit 0
    samples, _ = swapped("finish", 2)
    versions = {name: [v for v, _ in sample.version_spans] for name, sample in samples.items()}
    assert versions == {"r0": [0], "r1": [0], "r2": [0], "r3": [1], "r4": [1]}
    assert samples["r0"].weights_digest == "table" and samples["r3"].weights_digest == "next"


def test_aborted_rows_hold_what_the_old_weights_made_and_name_those() -> None:
    samples, _ = swapped("abort", 2)
    for name in ("r0", "r1", "r2"):
        sample = samples[name]
        assert sample.finish_reason == "abort" and "version 1" in sample.finish_detail
        assert [v for v, _ in sample.version_spans] == [0] and sample.weights_digest == "table"
    assert samples["r3"].version_spans == ((1, 20),)


def test_a_long_row_is_split_at_the_token_where_the_weights_changed() -> None:
    # case 166
    engine = table_engine(TABLE, V, context_len=128)
    engine.submit([request(sampling=SamplingParams(max_new_tokens=100))])
    for _ in range(40):
        engine.step()
    engine.load(NEXT, version=8, digest="next")
    assert run(engine, [])["r0"].version_spans == ((0, 40), (8, 60))


def test_the_same_version_twice_is_one_span() -> None:
    engine = table_engine(TABLE, V)
    engine.submit([request()])
    engine.step()
    engine.load(TABLE, version=0, digest="table")
    assert run(engine, [])["r0"].version_spans == ((0, 8),)


def test_nothing_is_generated_before_the_first_weights() -> None:
    # case 160
    policy = TablePolicy(TABLE, vocab_size=V)
    engine = NativeEngine(policy, drawing_proposer("dense", DRAFT), FixedDraftLen(2))
    engine.submit([request()])
    assert engine.step() == [] and engine.gauges()["count/rounds"] == 0
    engine.load(TABLE, version=3, digest="d")
    assert run(engine, [])["r0"].version_spans == ((3, 8),)


def test_weights_that_cannot_be_prepared_leave_the_old_version_whole() -> None:
    # case 157
    engine = table_engine(TABLE, V)
    engine.submit([request()])
    engine.step()
    with pytest.raises(InvalidWeights):
        engine.prepare({"logits": torch.full((V, V), torch.nan)})
    assert not engine.load_is_due
    assert tokens(run(engine, [])) == tokens(run(table_engine(TABLE, V), [request()]))


def test_new_weights_change_the_greedy_answer_at_once() -> None:
    # case 151
    engine = table_engine(TABLE, V, proposer=HistoryProposer(), draft_len=3)
    old = run(engine, [request(sampling=greedy(12))])["r0"]
    engine.load(NEXT, version=1, digest="next")
    new = run(engine, [request(sampling=greedy(12))])["r0"]
    cold = run(table_engine(NEXT, V), [request(sampling=greedy(12))])["r0"]
    assert new.token_ids == cold.token_ids != old.token_ids


# ---- broken rows --------------------------------------------------------------------------


def broken_at(num_tokens: int, first: int) -> Table:
    """NaN logits after `num_tokens` tokens of the row whose prompt starts with `first`."""

    def table(ids: tuple[int, ...]) -> torch.Tensor:
        broken = ids[0] == first and len(ids) >= num_tokens
        return torch.full((V,), torch.nan, dtype=torch.float64) if broken else TABLE(ids)

    return table


@pytest.mark.parametrize("draft_len", [0, 1, 4])
def test_a_nan_row_ends_its_sample_as_an_error_and_its_siblings_are_fine(draft_len: int) -> None:
    # case 105: the 10th token is the first that has no law
    requests = [request(f"r{i}", (i,), SamplingParams(max_new_tokens=20)) for i in range(3)]
    proposer = argmax_proposer(TABLE)
    table = broken_at(10, first=1)
    samples = run(table_engine(table, V, proposer=proposer, draft_len=draft_len), requests)
    plain = tokens(run(table_engine(TABLE, V), requests))
    assert samples["r1"].finish_reason == "error" and "NaN" in samples["r1"].finish_detail
    assert all(math.isfinite(x) for x in (*samples["r1"].logprobs, *samples["r1"].logprobs_full))
    assert samples["r1"].token_ids == plain["r1"][: len(samples["r1"].token_ids)]
    assert 9 - draft_len <= len(samples["r1"].token_ids) <= 9
    assert (samples["r0"].token_ids, samples["r2"].token_ids) == (plain["r0"], plain["r2"])


def test_a_nan_row_alone_in_the_engine_is_an_error_and_the_slot_serves_on() -> None:
    # case 105
    engine = table_engine(broken_at(3, first=1), V, num_slots=1)
    assert run(engine, [request("bad", (1,))])["bad"].finish_reason == "error"
    good = request("good", (2, 1))
    assert tokens(run(engine, [good])) == tokens(run(table_engine(TABLE, V), [good]))


def test_a_nan_row_that_verification_does_not_reach_is_harmless() -> None:
    wrong = argmax_proposer(TABLE, right_for=0)
    engine = table_engine(broken_at(9, first=0), V, proposer=wrong, draft_len=4)
    sample = run(engine, [request(sampling=greedy(8))])["r0"]
    assert sample.finish_reason == "length" and len(sample.token_ids) == 8


def test_an_aborted_request_hands_back_what_it_has_and_frees_its_slot() -> None:
    engine = table_engine(TABLE, V, num_slots=1)
    engine.submit([request("a"), request("b")])
    engine.step()
    (sample,) = engine.abort(["a", "unknown"])
    assert (sample.finish_reason, len(sample.token_ids)) == ("abort", 1)
    assert sample.weights_digest == "table"
    assert tokens(run(engine, [])) == tokens(run(table_engine(TABLE, V), [request("b")]))


def test_a_waiting_request_can_be_aborted() -> None:
    engine = table_engine(TABLE, V, num_slots=1)
    engine.submit([request("a"), request("b")])
    engine.step()
    (sample,) = engine.abort(["b"])
    assert (sample.token_ids, sample.weights_digest) == ((), "")
    assert set(run(engine, [])) == {"a"}


# ---- recorded log-probabilities -----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_full_logprobs_are_those_of_a_teacher_forced_pass(kind: str, temperature: float) -> None:
    # cases 98, 101: accepted, correction and bonus tokens alike
    sampling = SamplingParams(max_new_tokens=40, temperature=temperature, top_p=0.9)
    engine = table_engine(TABLE, V, proposer=drawing_proposer(kind, DRAFT), draft_len=1)
    sample = run(engine, [request(sampling=sampling)])["r0"]
    counters = sample.counters
    assert min(counters.accepted, counters.corrections, counters.bonuses) > 0
    assert sample.logprobs_full == pytest.approx(teacher_forced(sample, (TABLE,)), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_logprobs_are_those_of_the_filtered_law(kind: str) -> None:
    # cases 98, 103: against a law written without the library's
    sampling = SamplingParams(
        max_new_tokens=5, temperature=1.3, top_k=3, top_p=0.9, min_p=0.1,
        min_tokens=3, stop_token_ids=(2,),
    )  # fmt: skip
    requests = [request(f"r{i}", sampling=sampling) for i in range(20)]
    engine = table_engine(TABLE, V, proposer=drawing_proposer(kind, DRAFT), draft_len=2)
    law = plain_law(TABLE, (0,), sampling, V)
    for sample in run(engine, requests).values():
        assert sum(sample.logprobs) == pytest.approx(math.log(law[sample.token_ids]), abs=1e-9)
        assert sample.logprobs == pytest.approx(
            [f - math.log(k) for f, k in zip(sample.logprobs_full, sample.kept_mass)], abs=1e-9
        )


def test_logprobs_of_one_law_do_not_depend_on_where_a_token_came_from() -> None:
    # case 98: ln .3 = -1.204 as accepted draft, as correction, as bonus and as plain token
    def table(ids: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()

    for draft_ids in ([], [0], [1], [0, 1], [1, 1, 1]):
        proposer = ScriptedProposer(lambda row, n, ids=draft_ids: Draft.of_points(ids))
        engine = table_engine(table, V, proposer=proposer, draft_len=len(draft_ids))
        sample = run(engine, [request(sampling=SamplingParams(max_new_tokens=60))])["r0"]
        ones = [lp for token, lp in zip(sample.token_ids, sample.logprobs) if token == 1]
        assert len(ones) > 5 and ones == pytest.approx([-1.2040] * len(ones), abs=1e-4)


def test_recording_logprobs_does_not_switch_speculation_off() -> None:
    # case 100: they are always recorded
    engine = table_engine(TABLE, V, proposer=argmax_proposer(TABLE), draft_len=3)
    sample = run(engine, [request()])["r0"]
    assert sample.counters.drafted > 0 and len(sample.logprobs) == len(sample.token_ids)


# ---- conservation -------------------------------------------------------------------------


def random_request(index: int, generator: torch.Generator) -> RolloutRequest:
    def below(n: int) -> int:
        return int(torch.randint(n, (1,), generator=generator))

    length = below(20)
    sampling = SamplingParams(
        max_new_tokens=length,
        min_tokens=below(length + 1),
        temperature=(0.0, 0.7, 1.0, 1.5)[below(4)],
        top_k=below(V + 1),
        top_p=(1.0, 0.8)[below(2)],
        stop_token_ids=((), (2,), (1, 3))[below(3)],
    )
    prompt = [below(V) for _ in range(1 + below(5))]
    return request(f"r{index}", prompt, sampling, sample_index=index)


@pytest.mark.parametrize("seed", range(12))
def test_counts_and_lengths_are_conserved_on_random_cases(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    requests = [random_request(index, generator) for index in range(12)]
    proposer = [
        drawing_proposer(KINDS[seed % 4], DRAFT),
        NgramProposer(min_match=1),
        HistoryProposer(),
    ]
    engine = table_engine(
        TABLE, V, proposer=proposer[seed % 3], draft_len=1 + seed % 5, num_slots=1 + seed % 4
    )
    samples = run(engine, requests)
    assert samples.keys() == {r.id for r in requests}
    total = SpecCounters()
    for sample in samples.values():
        total.add(sample.counters)
        check_conservation(sample)
    assert total == engine.counters() and engine.gauges()["count/samples"] == 12


def check_conservation(sample: RolloutSample) -> None:
    counters, sampling = sample.counters, sample.request.sampling
    assert counters.emitted == len(sample.token_ids) <= sampling.max_new_tokens
    assert counters.accepted + counters.corrections + counters.bonuses + counters.plain == (
        counters.emitted
    )
    assert counters.accepted <= counters.verified <= counters.drafted
    assert sum(counters.accepted_by_position) == counters.accepted
    # what is reached is accepted or corrected
    assert counters.num_reached == counters.accepted + counters.corrections
    # position i + 1 is reached only after i was accepted
    assert all(
        n <= a for n, a in zip(counters.reached[1:], counters.accepted_by_position, strict=False)
    )
    assert 0 <= counters.rounds - counters.corrections - counters.bonuses - counters.plain <= 1
    assert all(math.isfinite(lp) and lp <= 0 for lp in (*sample.logprobs, *sample.logprobs_full))
    stops = [n for n, t in enumerate(sample.token_ids) if t in sampling.stop_token_ids]
    assert all(n >= sampling.min_tokens and n == len(sample.token_ids) - 1 for n in stops)
    assert (sample.finish_reason == "stop") == bool(stops)


def deviations(kind: str, rule: Rule, **how: Any) -> float:
    """Observed less expected accepted tokens of the rounds that were foretold, in standard
    deviations as foretold (their upper bound), over 120 rows of 60 tokens."""
    requests = [request(f"r{i}", sampling=SamplingParams(max_new_tokens=60)) for i in range(120)]
    engine = table_engine(TABLE, V, proposer=drawing_proposer(kind, DRAFT), draft_len=3, num_slots=64,
                          verification=rule, **how)  # fmt: skip
    run(engine, requests)
    counters = engine.counters()
    assert counters.foretold_reached > 400
    assert kind != "point" or counters.foretold_accepted == counters.accepted
    difference = counters.foretold_accepted - counters.expected_accepted
    return difference / math.sqrt(counters.expected_variance)


@pytest.mark.parametrize(
    ("kind", "rule"), [("point", "block"), ("mixed", "block"), ("mixed", "position")]
)
def test_expected_acceptance_equals_observed_acceptance(kind: str, rule: Rule) -> None:
    """A sum of many martingale differences: beyond 5 deviations once in 2e6 seeds."""
    assert abs(deviations(kind, rule)) < 5


@pytest.mark.parametrize("rule", ["block", "position"])
def test_accepting_everything_is_not_what_was_expected(rule: Rule) -> None:
    """Negative control."""

    class Welcoming(SeededDraws):
        def coin(self, accept_prob: float, start: int, position: int) -> bool:
            return True

    assert deviations("dense", rule, draws_for=lambda r: Welcoming(0, r.prompt_id, 0)) > 10


class RecordingPolicy(TablePolicy):
    """Keeps the windows it was asked to score."""

    def __init__(self) -> None:
        super().__init__(TABLE, vocab_size=V)
        self.windows: list[Window] = []

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        self.windows += windows
        return super().score(windows)


def test_no_id_outside_the_vocabulary_reaches_the_policy() -> None:
    # cases 28, 81: also after the cache was lost in mid flight
    policy = RecordingPolicy()
    engine = NativeEngine(policy, drawing_proposer("mixed", DRAFT), FixedDraftLen(3))
    engine.load(TABLE, version=0, digest="d")
    engine.submit([request(f"r{i}", (i % V, 2)) for i in range(4)])
    engine.step()
    engine.load(TABLE, version=1, digest="d")
    run(engine, [])
    assert policy.windows and all(0 <= t < V for w in policy.windows for t in w.token_ids)


def test_a_round_without_drafts_scores_one_token_a_row() -> None:
    policy = RecordingPolicy()
    engine = NativeEngine(policy, drawing_proposer("dense", DRAFT), FixedDraftLen(0))
    engine.load(TABLE, version=0, digest="d")
    counters = run(engine, [request()])["r0"].counters
    assert [len(w.token_ids) for w in policy.windows] == [1] * 8
    assert (counters.plain, counters.rounds, counters.drafted) == (8, 8, 0)
