"""The two statistics that are watched: silent for the right engine, loud for wrong ones, and what
each alarm is worth.

An alarm is a p-value below 1e-6. What a right engine does is computed where it can be and simulated,
seeded, where it cannot; wrong engines are the real one with one fault."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2, norm

import rollout.watch
from rollout.conditions import Condition
from rollout.draft import DenseLaw, Draft
from rollout.draft_len import FixedDraftLen
from rollout.law import TargetLaws
from rollout.native_engine import NativeEngine, seeded_draws
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, SpecCounters
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import Draws, SeededDraws
from rollout.table_policy import TablePolicy, random_table
from rollout.verdict import Verdict
from rollout.verify import Rule, verify
from rollout.watch import (
    ALARM_LEVEL,
    FORETELL_EVERY,
    PIT_BINS,
    PIT_EVERY,
    acceptance_p_value,
    alarm,
    foretells,
    looks_at,
    pit_bin,
    pit_p_value,
)
from tests.rollout.engines import ScriptedProposer, drawing_proposer, request, run

V = 4
TARGET, DRAFT = random_table(V, depth=2, seed=1), random_table(V, depth=1, seed=2)
RULES: tuple[Rule, ...] = ("block", "position")
by_rule = pytest.mark.parametrize("rule", RULES)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round is foretold and every token looked at: as much is seen in an eighth of the time."""
    monkeypatch.setattr(rollout.watch, "FORETELL_EVERY", 1)
    monkeypatch.setattr(rollout.watch, "PIT_EVERY", 1)


def counted(
    proposer: Proposer,
    rule: Rule = "block",
    *,
    num_rows: int = 64,
    draft_len: int = 3,
    prompt_len: int = 1,
    draws_for: Callable[[RolloutRequest], Draws] = seeded_draws,
    engine_class: type[NativeEngine] = NativeEngine,
    **sampling: Any,
) -> SpecCounters:
    """Counters of rows of 40 tokens."""
    policy = TablePolicy(TARGET, vocab_size=V, num_slots=64)
    engine = engine_class(
        policy, proposer, FixedDraftLen(draft_len), verification=rule, draws_for=draws_for
    )
    engine.load(TARGET, version=0, digest="table")
    law = SamplingParams(max_new_tokens=40, **sampling)
    prompt = (0,) * prompt_len
    run(
        engine,
        [
            request(str(i), prompt, law, prompt_id="p", sample_index=i) for i in range(num_rows)
        ],
    )  # fmt: skip
    return engine.counters()


# ---- where it is looked -------------------------------------------------------------------


@pytest.mark.parametrize(("chosen", "every"), [(foretells, FORETELL_EVERY), (looks_at, PIT_EVERY)])
def test_one_position_of_eight_is_looked_at_in_every_step_of_rounds(
    chosen: Callable[[int], bool], every: int
) -> None:
    """Of the positions a, a + r, a + 2r, ... of rounds of r tokens, for every a and r."""
    for round_len in range(1, 40):
        for first in range(round_len):
            seen = sum(chosen(p) for p in range(first, 1000 * round_len, round_len))
            assert seen == pytest.approx(1000 / every, rel=0.2)


def test_every_position_can_be_looked_at(everywhere: None) -> None:
    assert all(foretells(p) and looks_at(p) for p in range(2000))


@pytest.mark.parametrize("kind", ["dense", "point"])
def test_sampled_drafts_are_foretold_at_some_starts_and_point_masses_at_all(kind: str) -> None:
    counters = counted(drawing_proposer(kind, DRAFT), num_rows=16)
    share = counters.foretold_reached / counters.num_reached
    assert share == 1 if kind == "point" else 0.05 < share < 0.25


def test_tokens_are_looked_at_by_their_position_alone() -> None:
    # prompt of 1, tokens at positions 1..40 of each of 16 rows; another draft, the same count
    num = sum(looks_at(position) for position in range(1, 41))
    for kind in ("dense", "point"):
        assert sum(counted(drawing_proposer(kind, DRAFT), num_rows=16).pit_counts) == 16 * num


def test_greedy_rows_are_not_looked_at(everywhere: None) -> None:
    # they would fall anywhere in cells of width 1, which says nothing
    counters = counted(drawing_proposer("point", DRAFT), num_rows=2, temperature=0)
    assert counters.pit_counts == []


# ---- the transform ------------------------------------------------------------------------


class Uniform(SeededDraws):
    def __init__(self, value: float) -> None:
        self._value = value

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        return self._value


def laws_of(probs: Sequence[float], **sampling: Any) -> TargetLaws:
    logits = torch.tensor([probs], dtype=torch.float64).log()
    return TargetLaws(logits, [Condition(SamplingParams(**sampling))])


@pytest.mark.parametrize(
    ("token", "uniform", "expected"),
    # cells [0, .5) [.5, .8) [.8, 1): 16 * .25 = 4, 16 * .65 = 10.4, 16 * .9 = 14.4
    [(0, 0.5, 4), (1, 0.5, 10), (2, 0.5, 14), (0, 0.0, 0), (2, 1 - 2.0**-53, 15)],
)
def test_a_token_falls_where_its_cell_lies(token: int, uniform: float, expected: int) -> None:
    assert pit_bin(laws_of((0.5, 0.3, 0.2)), 0, token, Uniform(uniform), 8) == expected


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"temperature": 2.0, "min_p": 0.2}])
def test_tokens_drawn_from_the_law_fall_into_every_bin_alike(sampling: dict[str, float]) -> None:
    """Mass of each bin, over the law's tokens and 1600 uniforms in the middle of their cells."""
    laws = laws_of((0.37, 0.03, 0.21, 0.39), **sampling)
    mass = [0.0] * PIT_BINS
    for token, prob in enumerate(laws.probs(0).tolist()):
        for step in range(1600):
            at = pit_bin(laws, 0, token, Uniform((step + 0.5) / 1600), 8)
            mass[at] += prob / 1600
    assert mass == pytest.approx([1 / PIT_BINS] * PIT_BINS, abs=1e-3)


# ---- what a p-value is worth --------------------------------------------------------------


def foretold(accepted: float, expected: float, variance: float, length: int = 1) -> SpecCounters:
    return SpecCounters(
        reached=[1] * length,
        foretold_reached=1,
        foretold_accepted=accepted,  # type: ignore[arg-type]
        expected_accepted=expected,
        expected_variance=variance,
    )


def test_nothing_is_said_before_anything_was_seen() -> None:
    empty = SpecCounters()
    assert acceptance_p_value(empty) is None and pit_p_value(empty) is None and not alarm(empty)
    assert pit_p_value(SpecCounters(pit_counts=[19] * PIT_BINS)) is None  # below 20 a bin
    assert pit_p_value(SpecCounters(pit_counts=[20] * PIT_BINS)) == 1.0


def test_the_bound_is_freedmans() -> None:
    # s = 30, V = 100, b = 4: 2 exp(-900 / (2 (100 + 40))) = 2 e^-3.214
    value = acceptance_p_value(foretold(130, 100, 100, length=4))
    assert value == pytest.approx(2 * math.exp(-900 / 280))
    assert acceptance_p_value(foretold(70, 100, 100, length=4)) == value
    assert acceptance_p_value(foretold(5, 5, 0)) == 1.0


@pytest.mark.parametrize("num", [1, 10, 100, 1000, 10_000])
@pytest.mark.parametrize("prob", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_p_values_of_independent_tokens_are_conservative(num: int, prob: float) -> None:
    """Exactly: P(p-value <= t) <= t for every t it can take, by the binomial law."""
    accepted = np.arange(num + 1)
    variance = num * prob * (1 - prob)
    values = np.array(
        [acceptance_p_value(foretold(float(k), num * prob, variance)) for k in accepted]
    )
    order = np.argsort(values)
    below = np.cumsum(binom.pmf(accepted, num, prob)[order])
    last = np.append(np.diff(values[order]) > 0, True)
    assert np.all(below[last] <= values[order][last] + 1e-12)


def test_a_normalised_sum_would_cry_wolf_where_the_bound_does_not() -> None:
    # one refusal in ten tokens of probability .999: s = .99, V = .00999, z = 9.9, once in 100 looks
    num, prob = 10, 0.999
    counters = foretold(num - 1, num * prob, num * prob * (1 - prob))
    z = 0.99 / math.sqrt(num * prob * (1 - prob))
    assert 2 * norm.sf(z) < 1e-20 and binom.cdf(num - 1, num, prob) > 0.0099
    assert (acceptance_p_value(counters) or 0) > 0.3 and not alarm(counters)


def test_skewed_acceptance_raises_no_alarm_in_an_engine(everywhere: None) -> None:
    """Drafts accepted with probability .999, many short runs as one look each; a normal p-value of
    the same sums is below the level for some of them."""
    logits = torch.tensor([0.999, 0.0005, 0.0003, 0.0002], dtype=torch.float64).log()
    normal = []
    for seed in range(300):
        laws = TargetLaws(logits.expand(9, V), [Condition(SamplingParams())] * 9)
        verdict = verify(laws, 0, Draft.of_points([0] * 8), SeededDraws(seed, "p", 0), 1)
        assert verdict.foretold is not None
        mean, variance = verdict.foretold.mean, verdict.foretold.variance
        assert not alarm(foretold(verdict.accepted_len, mean, variance, 8))
        normal.append(2 * norm.sf(abs(verdict.accepted_len - mean) / math.sqrt(variance)))
    assert min(normal) < ALARM_LEVEL


@by_rule
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_p_values_of_sampled_drafts_are_conservative(rule: Rule, spread: float) -> None:
    """120 looks at 12 rounds each, close and far drafts: as few are below t as t says, with a
    slack that a right engine exceeds once in 1e6."""
    values = []
    for seed in range(120):
        target = random_table(3, depth=1, seed=seed, spread=spread)
        draft_table = random_table(3, depth=1, seed=5000 + seed, spread=spread)
        total = SpecCounters()
        for round_ in range(12):
            total.add(one_round(target, draft_table, SeededDraws(seed, "p", round_), rule))
        values.append(acceptance_p_value(total) or 0.0)
    for level in (0.05, 0.2, 0.5):
        assert sum(value <= level for value in values) <= binom.isf(1e-6, len(values), level)


def one_round(target: Any, draft_table: Any, draws: SeededDraws, rule: Rule) -> SpecCounters:
    tokens, laws = [0], []
    for depth in range(3):
        law = DenseLaw(draft_table((tokens[-1],)).softmax(-1))
        laws.append(law)
        tokens.append(draws.draft(law.probs, 1, 1 + depth))
    logits = torch.stack([target((token,)) for token in tokens])
    conditions = [Condition(SamplingParams())] * 4
    draft = Draft(tuple(tokens[1:]), tuple(laws))
    verdict = verify(TargetLaws(logits, conditions), 0, draft, draws, 1, rule=rule)
    assert verdict.foretold is not None
    return foretold(verdict.accepted_len, verdict.foretold.mean, verdict.foretold.variance, 3)


@pytest.mark.parametrize("num", [80, 1000])
def test_the_tail_of_the_bins_is_what_it_says_within_a_factor_of_two(num: int) -> None:
    """Simulated, 400,000 looks: chi-square from five a bin on is a little too eager. At 1e-4 it is
    true 1.6 times as often with five a bin, 1.05 times with sixty."""
    rng = np.random.default_rng(0)
    counts = rng.multinomial(num, [1 / PIT_BINS] * PIT_BINS, size=400_000)
    distances = ((counts - num / PIT_BINS) ** 2).sum(1)
    critical = chi2.isf(1e-4, PIT_BINS - 1) * num / PIT_BINS
    assert 0.5e-4 < (distances >= critical).mean() < 2.5e-4


def test_the_p_value_of_the_bins_is_the_chi_square_tail() -> None:
    # 480 in 16 bins, two of them 40 and 20: (100 + 100) / 30
    counts = [40, 20, *[30] * 14]
    assert pit_p_value(SpecCounters(pit_counts=counts)) == pytest.approx(chi2.sf(200 / 30, 15))


# ---- the right engine ---------------------------------------------------------------------


@by_rule
@pytest.mark.parametrize("kind", ["dense", "sparse", "point", "mixed"])
def test_the_right_engine_raises_no_alarm(rule: Rule, kind: str, everywhere: None) -> None:
    """1,600 tokens in some 900 rounds. A right engine fails here with one seed in 500 (the level of
    .001 for each of two), raises the alarm with one in 500,000."""
    counters = counted(drawing_proposer(kind, DRAFT), rule, num_rows=40)
    assert sum(counters.pit_counts) == 40 * 40
    assert not alarm(counters)
    assert (pit_p_value(counters) or 0) > 1e-3 and (acceptance_p_value(counters) or 0) > 1e-3


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.7}, {"top_k": 2, "temperature": 1.5}, {"min_p": 0.3},
        {"frequency_penalty": 0.4, "repetition_penalty": 1.2},
        {"bad_words": ((1, 2),), "logit_bias": ((0, 1.0),)},
    ],
)  # fmt: skip
def test_the_right_engine_raises_no_alarm_under_filters_and_edits(
    sampling: dict[str, Any], everywhere: None
) -> None:
    counters = counted(drawing_proposer("mixed", DRAFT), num_rows=40, **sampling)
    assert (pit_p_value(counters) or 0) > 1e-3 and (acceptance_p_value(counters) or 0) > 1e-3


# ---- wrong engines ------------------------------------------------------------------------


class Welcoming(SeededDraws):
    """Fault: every sampled token is accepted."""

    def coin(self, accept_prob: float, start: int, position: int) -> bool:
        return True


def welcoming(request: RolloutRequest) -> Draws:
    return Welcoming(0, request.prompt_id, request.sample_index)


def cold(row: Row, max_len: int) -> Draft:
    """Fault: drawn at temperature 1/3, reported as drawn at 1."""
    tokens, start = list(row.token_ids), len(row.token_ids)
    laws = []
    for position in range(start, start + max_len):
        logits = DRAFT(tuple(tokens))
        tokens.append(row.draws.draft((3 * logits).softmax(-1), start, position))
        laws.append(DenseLaw(logits.softmax(-1)))
    return Draft(tuple(tokens[start:]), tuple(laws))


class FiltersOnBonusOnly(NativeEngine):
    """Fault: drafts are verified against the law before the filters."""

    def _verdict(self, row: Row, draft: Draft, laws: TargetLaws, first: int) -> Verdict:
        raw = TargetLaws(laws._logits, [Condition(SamplingParams())] * len(laws._conditions))
        start = len(row.token_ids)
        verdict = verify(raw, first, draft, row.draws, start, rule=self.verification)
        if verdict.origin == "correction":
            return verdict
        end = verdict.accepted_len
        return replace(verdict, next_token=row.draws.target(laws, first + end, start + end))


class CorrectionsFromTheTarget(NativeEngine):
    """Fault: what was refused may come back in its place."""

    def _verdict(self, row: Row, draft: Draft, laws: TargetLaws, first: int) -> Verdict:
        verdict = super()._verdict(row, draft, laws, first)
        if verdict.origin != "correction":
            return verdict
        index, position = first + verdict.accepted_len, len(row.token_ids) + verdict.accepted_len
        return replace(verdict, next_token=row.draws.target(laws, index, position))


DENSE = drawing_proposer("dense", DRAFT)


@by_rule
def test_accepting_everything_is_seen_by_both_within_160_rounds(
    rule: Rule, everywhere: None
) -> None:
    # 16 rows of 40 tokens, four a round
    counters = counted(DENSE, rule, num_rows=16, draws_for=welcoming)
    assert counters.rounds == 160
    assert (acceptance_p_value(counters) or 0) < ALARM_LEVEL
    assert (pit_p_value(counters) or 0) < ALARM_LEVEL


@pytest.mark.parametrize("prompt_len", [1, 2])
@pytest.mark.parametrize("draft_len", range(1, 9))
def test_accepting_everything_is_seen_whatever_the_period_of_the_rounds(
    prompt_len: int, draft_len: int
) -> None:
    """With one position of eight looked at: 128 rows that are in step, 2,560 to 640 rounds."""
    counters = counted(
        DENSE, num_rows=128, draft_len=draft_len, prompt_len=prompt_len, draws_for=welcoming
    )
    assert counters.corrections == 0 and alarm(counters)


@by_rule
def test_a_law_that_was_not_drawn_from_is_seen_within_3500_rounds(
    rule: Rule, everywhere: None
) -> None:
    counters = counted(ScriptedProposer(cold), rule, num_rows=160)
    assert counters.rounds < 3500 and alarm(counters)


@by_rule
def test_filters_on_the_bonus_only_are_seen_within_700_rounds(rule: Rule, everywhere: None) -> None:
    """By where the tokens fall; how many were accepted is what the unfiltered law foretells."""
    counters = counted(DENSE, rule, num_rows=30, engine_class=FiltersOnBonusOnly, top_p=0.7)
    assert counters.rounds < 700
    assert (pit_p_value(counters) or 0) < ALARM_LEVEL
    assert (acceptance_p_value(counters) or 0) > 1e-3


@by_rule
def test_corrections_from_the_target_are_seen_within_4500_rounds(
    rule: Rule, everywhere: None
) -> None:
    counters = counted(DENSE, rule, num_rows=192, engine_class=CorrectionsFromTheTarget)
    assert counters.rounds < 4500 and (pit_p_value(counters) or 0) < ALARM_LEVEL


def test_alarms_are_raised_for_sums_over_actors() -> None:
    """Neither of two halves is enough; together they are."""
    half = foretold(40, 10, 40, 2)
    both = SpecCounters()
    both.add(half)
    both.add(half)
    assert not alarm(half) and alarm(both)
