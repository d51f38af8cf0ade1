"""Sampling parameters under speculation: every proposer, both rules, greedy and sampled rows, alone
and beside rows of other laws.

Where a law is claimed it is enumerated. `in_company` puts rows beside the one that is looked at that
share its prompt, so that histories draft from them, and differ in every parameter; their own
randomness is seeded.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout.conditions import Condition, Conditions
from rollout.draft import Draft
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes, total_variation
from rollout.errors import InvalidRequest
from rollout.grammar import Grammar
from rollout.native_engine import NativeEngine, seeded_draws
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample
from rollout.sampling import SamplingParams
from rollout.streams import Draws
from rollout.table_policy import Table, random_table
from rollout.verify import Rule
from tests.rollout.engines import (
    Allowed,
    ScriptedProposer,
    grammar_named,
    plain_law,
    request,
    run,
    table_engine,
)
from tests.rollout.proposers_under_test import (
    PROPOSERS,
    certain,
    knowing,
    make,
    telling,
    with_trees,
)

V = 4
DRAFT = random_table(V, depth=1, seed=2)
SAMPLED = ("counts", "dense", "sparse", "mixed")
"""Draft by draws, so the rule of verification matters."""
PAIRS = [
    (name, rule)
    for name in PROPOSERS
    for rule in ("block", "position")
    if rule == "block" or name in SAMPLED
]
every = pytest.mark.parametrize(("name", "rule"), PAIRS)
alone_and_in_company = pytest.mark.parametrize("company", [False, True], ids=["alone", "company"])


def engine(
    name: str,
    rule: Rule,
    table: Table,
    proposer: Proposer | None = None,
    *,
    draft_len: int = 4,
    vocab_size: int = V,
    **options: Any,
) -> NativeEngine:
    proposer = proposer or make(name, DRAFT)
    made = table_engine(
        table, vocab_size, proposer=proposer, verification=rule, context_len=256, **options
    )
    return with_trees(made, name, draft_len)


def fixed(*logits: float) -> Table:
    """The same logits [len(logits)] behind every prefix."""
    row = torch.tensor(logits, dtype=torch.float64)
    return lambda tokens: row


def fixed_law(*probs: float) -> Table:
    return fixed(*(math.log(p) for p in probs))


def neighbours(prompt: Sequence[int]) -> list[RolloutRequest]:
    laws = [
        SamplingParams(temperature=0, max_new_tokens=6),
        SamplingParams(temperature=2.0, max_new_tokens=9),
        SamplingParams(max_new_tokens=5, top_k=1, presence_penalty=2.0, logit_bias=((1, 3.0),)),
        SamplingParams(max_new_tokens=7, bad_words=((1,),), stop_token_ids=(2,), min_tokens=3),
    ]
    return [request(f"n{i}", prompt, law, prompt_id="p") for i, law in enumerate(laws)]


def requests_of(
    sampling: SamplingParams, prompt: Sequence[int], company: bool
) -> list[RolloutRequest]:
    ours = request("r0", prompt, sampling, prompt_id="p")
    others = neighbours(prompt)
    return [*others[:2], ours, *others[2:]] if company else [ours]


def few_of(sampling: SamplingParams, prompt: Sequence[int], company: bool) -> list[RolloutRequest]:
    """Beside two short rows, one greedy and one hot, for enumerations."""
    short = [
        request(f"n{i}", prompt, SamplingParams(temperature=2 * i, max_new_tokens=2), prompt_id="p")
        for i in (0, 1)
    ]
    ours = request("r0", prompt, sampling, prompt_id="p")
    return [short[0], ours, short[1]] if company else [ours]


def law_of(
    made: Callable[[Callable[[RolloutRequest], Draws]], NativeEngine],
    sampling: SamplingParams,
    prompt: Sequence[int],
    company: bool,
) -> dict[tuple[int, ...], float]:
    """Of one row's tokens; `made` builds a fresh engine for the draws that it is given."""

    def generate(draws: EnumeratedDraws) -> tuple[int, ...]:
        fresh = made(lambda r: draws if r.id == "r0" else seeded_draws(r))
        return run(fresh, few_of(sampling, prompt, company))["r0"].token_ids

    return enumerate_outcomes(generate)


def only(samples: dict[str, RolloutSample], name: str = "r0") -> RolloutSample:
    """A row that went well: finite records of every token, sensible counts."""
    sample = samples[name]
    assert sample.finish_reason != "error", sample.finish_detail
    records = (*sample.logprobs, *sample.logprobs_full, *sample.kept_mass)
    assert all(math.isfinite(value) for value in records)
    assert 0 <= sample.counters.accepted <= sample.counters.verified
    assert sample.counters.emitted == len(sample.token_ids)
    return sample


# ---- filters ------------------------------------------------------------------------------


@every
@alone_and_in_company
def test_temperature_and_top_p_act_on_every_position(name: str, rule: Rule, company: bool) -> None:
    # case 19: p^2 = (.25, .09, ...)/.365, .685 + .247 > .9 keeps two: (25, 9)/34 a token
    table, prompt = fixed_law(0.5, 0.3, 0.15, 0.05), (0, 1, 2, 3, 0)
    sampling = SamplingParams(temperature=0.5, top_p=0.9, max_new_tokens=3)
    law = law_of(
        lambda draws_for: engine(name, rule, table, draft_len=2, draws_for=draws_for),
        sampling, prompt, company,
    )  # fmt: skip
    assert law.keys() <= {(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)}
    assert law[(0, 0, 0)] == pytest.approx((25 / 34) ** 3, abs=1e-12)
    assert total_variation(law, plain_law(table, prompt, sampling, V)) < 1e-12


@every
@alone_and_in_company
def test_min_p_removes_what_drafts_keep_proposing(name: str, rule: Rule, company: bool) -> None:
    # case 22: .2 * .6 = .12 keeps (.6, .3); drafts of 2 at every position, K = 4
    script = [2] * 6
    table, prompt = fixed_law(0.6, 0.3, 0.06, 0.04), telling(script)
    sampling = SamplingParams(min_p=0.2, max_new_tokens=5 - company)

    def made(draws_for: Callable[[RolloutRequest], Draws]) -> NativeEngine:
        return engine(name, rule, table, knowing(name, script, V), draws_for=draws_for)

    law = law_of(made, sampling, prompt, company)
    assert {token for outcome in law for token in outcome} == {0, 1}
    for outcome, prob in law.items():
        assert prob == pytest.approx((2 / 3) ** outcome.count(0) * (1 / 3) ** outcome.count(1))


@every
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@alone_and_in_company
def test_a_biased_token_is_absent_or_alone_at_every_position(
    name: str, rule: Rule, temperature: float, company: bool
) -> None:
    # case 23: a prompt of one token, drafted all the time; 200 tokens, bonuses among them
    script, table = [1] * 8, fixed(0.0, 3.0, 0.5, 0.2)
    for bias, forbidden, required in (((1, -100.0), {1}, set()), ((3, 100.0), set(), {3})):
        sampling = SamplingParams(
            temperature=temperature, max_new_tokens=60 if company else 200, logit_bias=(bias,)
        )  # fmt: skip
        requests = requests_of(sampling, telling(script), company)
        made = engine(name, rule, table, knowing(name, script, V))
        tokens = set(only(run(made, requests)).token_ids)
        assert not tokens & forbidden and (tokens == required or not required)
    assert name in ("none", "ngram", "history") or made.counters().drafted > 50


# ---- penalties ----------------------------------------------------------------------------

ALTERNATING, SAME = [1, 2] * 8, [1] * 16
every_script = pytest.mark.parametrize("script", [SAME, ALTERNATING], ids=["1111", "1212"])


@every
@every_script
@pytest.mark.parametrize("draft_len", [0, 1, 4, 8])
@alone_and_in_company
def test_the_frequency_penalty_counts_every_token_of_an_accepted_run(
    name: str, rule: Rule, script: list[int], draft_len: int, company: bool
) -> None:
    # case 25: (2.0, 1.9, 0) of tokens 1 2 3, each use costs .3: 2.0 1.9 | 1.7 1.9 | 1.7 1.6 | 1.4 1.6
    table = fixed(-50.0, 2.0, 1.9, 0.0)
    sampling = SamplingParams(temperature=0, frequency_penalty=0.3, max_new_tokens=8)
    made = engine(name, rule, table, knowing(name, script, V), draft_len=draft_len)
    sample = only(run(made, requests_of(sampling, telling(script), company)))
    assert sample.token_ids == (1, 2, 1, 2, 1, 2, 1, 2)
    if script is ALTERNATING and draft_len and name not in ("none", "ngram") and not company:
        assert sample.counters.corrections == 0


PENALTIES: dict[str, dict[str, float]] = {
    "generated": {"frequency_penalty": 0.7, "presence_penalty": 0.2},
    "prompt as well": {"repetition_penalty": 1.5},
}


@every
@pytest.mark.parametrize("penalty", PENALTIES)
@alone_and_in_company
def test_penalties_leave_the_law_of_plain_decoding(
    name: str, rule: Rule, penalty: str, company: bool
) -> None:
    # case 25, sampled: two usual tokens and a rare one, drafted alike and differently
    table, prompt, script = fixed(-math.inf, 1.2, 1.0, -1.0), telling([1, 1, 2]), [1, 1, 2]
    sampling = SamplingParams(max_new_tokens=3, **PENALTIES[penalty])  # type: ignore[arg-type]

    def made(draws_for: Callable[[RolloutRequest], Draws]) -> NativeEngine:
        return engine(name, rule, table, knowing(name, script, V), draws_for=draws_for)

    law = law_of(made, sampling, prompt, company)
    assert total_variation(law, plain_law(table, prompt, sampling, V)) < 1e-12


def proposing(name: str, prompt: Sequence[int], script: Sequence[int]) -> Proposer:
    """Knows that the script follows the prompt, which does not tell it."""
    proposer = make(name, lambda tokens: 1000 * torch.eye(V).double()[script[0]])
    if name in ("history", "tree", "counts"):
        proposer.remember(prompt, script)  # type: ignore[attr-defined]
    return proposer


@every
@alone_and_in_company
def test_the_second_position_sees_the_first_as_used(name: str, rule: Rule, company: bool) -> None:
    # case 27: (2.0, 1.9, 0), each used one divided by 1.2: 2.0 1.9 | 1.667 1.9 | 1.667 1.583 | ...
    table, script = fixed(-50.0, 2.0, 1.9, 0.0), [1, 1, 1, 1]
    sampling = SamplingParams(temperature=0, repetition_penalty=1.2, max_new_tokens=6)
    made = engine(name, rule, table, proposing(name, (0,), script))
    sample = only(run(made, requests_of(sampling, (0,), company)))
    assert sample.token_ids == (1, 2, 1, 1, 1, 1)
    if name not in ("none", "ngram") and not company:
        assert sample.counters.reached[1] > 0, "the window held a second position"


# ---- bans ---------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@alone_and_in_company
def test_a_phrase_drafted_in_one_window_is_broken_at_its_last_token(
    name: str, rule: Rule, temperature: float, company: bool
) -> None:
    # case 28: [5, 6] banned; target and drafts go 5 6 5 6, so 5 is accepted and 6 is not
    wide, script = 8, [5, 6] * 6
    logits = {5: 6, 6: 5}

    def table(tokens: tuple[int, ...]) -> torch.Tensor:
        row = torch.zeros(wide, dtype=torch.float64)
        row[logits.get(tokens[-1], 5)] = 9.0
        return row

    sampling = SamplingParams(temperature=temperature, bad_words=((5, 6),), max_new_tokens=40)
    made = engine(name, rule, table, knowing(name, script, wide), vocab_size=wide)
    sample = only(run(made, requests_of(sampling, telling(script), company)))
    pairs = set(zip(sample.token_ids, sample.token_ids[1:]))
    assert (5, 6) not in pairs and 5 in sample.token_ids
    assert name == "none" or sample.counters.accepted > 0


@every
def test_no_id_that_is_not_a_token_reaches_penalties_or_bans(
    name: str, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 28: what every position of every window is told
    told: list[Condition] = []
    really = Conditions.along

    def recorded(conditions: Conditions, *args: Any) -> list[Condition]:
        told.extend(found := really(conditions, *args))
        return found

    monkeypatch.setattr(Conditions, "along", recorded)
    sampling = SamplingParams(max_new_tokens=20, presence_penalty=0.5, bad_words=((1, 2),))
    requests = requests_of(sampling, (0, 1, 2, 1), company=True)
    made = engine(name, rule, random_table(V, depth=2, seed=3))
    made.submit(requests)
    made.step()
    made.load(random_table(V, depth=2, seed=4), version=1, digest="next")  # all caches are lost
    run(made, [])
    ids = [token for c in told if c.seen for token in (*c.seen.ids.tolist(), *c.banned)]
    assert ids and all(0 <= token < V for token in ids)


@every
@pytest.mark.parametrize("draft_len", [0, 1, 3, 5, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@alone_and_in_company
def test_eos_waits_for_min_tokens_at_every_offset_of_the_window(
    name: str, rule: Rule, draft_len: int, temperature: float, company: bool
) -> None:
    # case 29: EOS = 3 far above all others and drafted at every position
    script, table = [3] * 9, fixed(0.0, 1.0, 0.5, 40.0)
    sampling = SamplingParams(
        temperature=temperature, min_tokens=5, eos_token_ids=(3,), max_new_tokens=30
    )
    made = engine(name, rule, table, knowing(name, script, V), draft_len=draft_len)
    sample = only(run(made, requests_of(sampling, telling(script), company)))
    assert 3 not in sample.token_ids[:5] and sample.token_ids[5:] == (3,)
    assert sample.finish_reason == "stop"


@every
@pytest.mark.parametrize("draft_len", [0, 1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_string_before_min_tokens_is_no_stop_and_is_not_looked_at_again(
    name: str, rule: Rule, draft_len: int, temperature: float
) -> None:
    # case 30: a newline as the 2nd token and as the 25th, at least 20
    script = [1, 3, *[1, 2] * 11, 3, 1, 1]
    script[24] = 3
    made = engine(
        name, rule, certain(script, V), knowing(name, script, V), draft_len=draft_len,
        decode=lambda ids: "".join("xab\n"[token] for token in ids),
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=temperature, min_tokens=20, stop_strings=("\n",), max_new_tokens=60
    )
    sample = only(run(made, [request(prompt=telling(script), sampling=sampling)]))
    assert sample.token_ids == tuple(script[:25])
    assert (sample.finish_reason, sample.finish_detail) == ("stop", r"string '\n'")


# ---- grammars -----------------------------------------------------------------------------


def constrained(
    name: str,
    rule: Rule,
    table: Table,
    allowed: Allowed,
    proposer: Proposer | None = None,
    draft_len: int = 4,
    **options: Any,
) -> NativeEngine:
    """Its mask fails when it is asked for what it does not allow, or past EOS = 3."""
    compile_grammar = grammar_named("g", allowed, V, stop_ids=(3,))
    return engine(
        name, rule, table, proposer, draft_len=draft_len, compile_grammar=compile_grammar, **options
    )


G = SamplingParams(grammar=Grammar.named("g"), eos_token_ids=(3,), max_new_tokens=12)


@every
@pytest.mark.parametrize("draft_len", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@alone_and_in_company
def test_bonuses_and_short_drafts_are_masked(
    name: str, rule: Rule, draft_len: int, temperature: float, company: bool
) -> None:
    # case 31: only 1 is allowed; rows without a grammar and drafts of other lengths beside it
    made = constrained(name, rule, random_table(V, 2, seed=5), lambda _: (1,), draft_len=draft_len)
    sampling = replace(G, temperature=temperature)
    samples = run(made, requests_of(sampling, (0, 1, 1, 0), company))
    assert only(samples).token_ids == (1,) * 12
    assert not company or set(samples["n1"].token_ids) - {1}, "the others are not masked"


def test_a_padded_draft_ends_its_own_row_and_leaves_the_mask_of_the_others_alone() -> None:
    # case 31: [1, -1, -1] is no draft here
    proposer = ScriptedProposer(
        lambda row, n: Draft.of_points(([1, -1, -1] if row.request.id == "bad" else [1])[:n])
    )
    made = constrained("point", "block", fixed(2.0, 1.0, 0.5, 0.0), lambda _: (1,), proposer)
    samples = run(made, [request("bad", sampling=G), request("r0", sampling=G)])
    assert samples["bad"].finish_reason == "error" and "-1" in samples["bad"].finish_detail
    assert only(samples).token_ids == (1,) * 12


def words(generated: tuple[int, ...]) -> tuple[int, ...]:
    """1 and 2 begin; 1 is followed by 2 or the end, 2 by 1; complete behind two tokens."""
    if len(generated) == 2:
        return (3,)
    return (1, 2) if not generated else (2, 3) if generated[-1] == 1 else (1,)


@every
@alone_and_in_company
def test_a_grammar_leaves_the_masked_law(name: str, rule: Rule, company: bool) -> None:
    # case 31, and 33: the strict mask is asked for nothing behind EOS; drafts of what is forbidden
    table, prompt = random_table(V, depth=1, seed=6), (0, 1, 2, 1, 3, 0)
    three = replace(G, max_new_tokens=3)
    law = law_of(
        lambda draws_for: constrained(name, rule, table, words, draft_len=2, draws_for=draws_for),
        three, prompt, company,
    )  # fmt: skip
    assert total_variation(law, plain_law(table, prompt, three, V, words)) < 1e-12


@every
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_behind_the_end_of_a_grammar_are_dropped_and_the_engine_serves_on(
    name: str, rule: Rule, temperature: float
) -> None:
    # case 33: 1, EOS, then 2 2 drafted behind it; twice, so that the next row has its own matcher
    script = [1, 3, 2, 2]
    made = constrained(name, rule, certain(script, V), words, knowing(name, script, V))
    for index in range(2):
        sampling = replace(G, temperature=temperature)
        again = request("r0", telling(script), sampling, sample_index=index)
        sample = only(run(made, [again]))
        assert (sample.token_ids, sample.finish_reason) == ((1, 3), "stop")


@every
def test_a_grammar_that_fails_ends_its_own_row_only(name: str, rule: Rule) -> None:
    # the kind of case 33: a matcher that gives up in the middle
    def failing(generated: tuple[int, ...]) -> tuple[int, ...]:
        if len(generated) > 2:
            raise InvalidRequest("the matcher gave up")
        return (1, 2)

    table = random_table(V, depth=1, seed=6)
    made = constrained(name, rule, table, failing)
    requests = [request("r0", (0, 1), G, prompt_id="p"), *neighbours((0, 1))]
    samples = run(made, requests)
    assert (samples["r0"].finish_reason, samples["r0"].finish_detail) == (
        "error", "the matcher gave up",
    )  # fmt: skip
    assert all(only(samples, f"n{i}").token_ids for i in range(4))


# ---- temperature --------------------------------------------------------------------------


@every
@alone_and_in_company
def test_every_step_of_a_greedy_row_emits_and_counts_only_grow(
    name: str, rule: Rule, company: bool
) -> None:
    # case 20: K = 3; between 1 and 4 tokens a step, accepted 0 to 3
    made = engine(name, rule, random_table(V, depth=2, seed=7), draft_len=3)
    sampling = SamplingParams(temperature=0, max_new_tokens=20)
    made.submit(requests_of(sampling, (0, 1, 2, 1), company))
    row = next(row for row in made._scheduler.waiting if row.request.id == "r0")
    if company:
        made.step()  # an older row runs the prompt they share
    while not row.done:
        length, accepted = len(row.token_ids), row.counters.accepted
        made.step()
        assert 1 <= len(row.token_ids) - length <= 4
        assert 0 <= row.counters.accepted - accepted <= 3
        assert all(a <= r for a, r in zip(row.counters.accepted_by_position, row.counters.reached))
    assert only({"r0": row.sample("full")}).logprobs == (0.0,) * 20


@every
def test_sampled_rows_are_sampled_beside_greedy_ones(name: str, rule: Rule) -> None:
    # case 35: p = (.6, .4), 2000 tokens: .40 +- .04 is 3.7 deviations of .011; a greedy one has 0
    table = fixed(math.log(0.6), math.log(0.4), -math.inf, -math.inf)
    sampling = SamplingParams(max_new_tokens=100)
    rows = [request(f"r{i}", (0, 1, 0), sampling, prompt_id="p", sample_index=i) for i in range(20)]
    samples = run(engine(name, rule, table), [*rows, *neighbours((0, 1, 0))])
    tokens = [token for r in rows for token in only(samples, r.id).token_ids]
    assert len(tokens) == 2000 and set(tokens) == {0, 1}
    assert tokens.count(1) / 2000 == pytest.approx(0.4, abs=0.04)


@every
@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draft_and_target_agree_on_what_is_greedy(
    name: str, rule: Rule, temperature: float, dtype: torch.dtype
) -> None:
    # case 37: logits (10, 9); beside rows at temperature 1 and 2
    row = torch.tensor([10.0, 9.0, -5.0, -5.0], dtype=dtype)
    made = engine(name, rule, lambda _: row, make(name, lambda _: row.double()))
    sampling = SamplingParams(temperature=temperature, max_new_tokens=30)
    sample = only(run(made, requests_of(sampling, (0, 1, 0), company=True)))
    assert sample.token_ids == (0,) * 30
    assert sample.logprobs == (0.0,) * 30
    assert sample.counters.accepted > 0 or name == "none"
