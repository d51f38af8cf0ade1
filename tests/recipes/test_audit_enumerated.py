"""The enumerated part of the audit: the right engine passes, and the reference is right by hand."""

import ast
import inspect
import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import recipes.audit_enumerated as audit
from recipes.audit_enumerated import (
    ALONE,
    BATCHES,
    BOTH,
    LAWS,
    PROMPT,
    PROPOSERS,
    TOY_DRAFT,
    TOY_TARGET,
    Case,
    Cell,
    examine,
    grid,
    next_probs,
    plain_law,
    toy_law,
)
from rollout.draft import DenseLaw, Draft, PointMass, SparseLaw
from rollout.enumerate import total_variation
from rollout.law import TargetLaws
from rollout.native_engine import NativeEngine
from rollout.request import Mode, RolloutSample, SpecCounters
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import SeededDraws
from rollout.verdict import Verdict

CELL = Cell("dense", "plain", "block", 3, 2, 0.0, 0.0, 129, 27, 1.2)


def law_of(name: str) -> dict[audit.RowOutcome, float]:
    """Probabilities of three tokens behind the prompt."""
    [(prompt, sampling)] = Case("none", name).rows
    return {outcome: exact.prob for outcome, exact in plain_law(prompt, sampling).items()}


def logits_of(monkeypatch: pytest.MonkeyPatch, *logits: float) -> None:
    """The reference sees these logits whatever came before."""
    monkeypatch.setattr(audit, "target_table", lambda _: torch.tensor(logits, dtype=torch.float64))


def probs(monkeypatch: pytest.MonkeyPatch, *law: float, **sampling: Any) -> list[float]:
    """What the reference makes of a law behind no token but the prompt (0,)."""
    logits_of(monkeypatch, *map(math.log, law))
    params = replace(SamplingParams(), **sampling)
    return [round(p, 12) for p in next_probs((0,), (), params)[0]]


# ---- the right engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("proposer", ALONE)
def test_every_proposer_leaves_the_law_and_its_records_alone(proposer: str) -> None:
    """Filters, penalties, a bias, bad words and stops at once; and something was speculated."""
    cell = examine(Case(proposer, "everything", draft_len=4 if "tree" in proposer else 2))
    assert cell.exact, cell
    assert (cell.accepted > 0) == (proposer != "none")


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rule", BOTH)
def test_every_law_is_emitted_by_both_rules(law: str, rule: audit.Rule) -> None:
    cell = examine(Case("stopping_time", law, rule))
    assert cell.exact and cell.accepted > 0, cell


@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_emitted_from_trees(law: str) -> None:
    cell = examine(Case("table_tree", law, draft_len=4))
    assert cell.exact and cell.accepted > 0, cell


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("proposer", ["siblings", "siblings_sampled", "history_tree"])
def test_rows_in_flight_together_keep_their_joint_law(proposer: str, rows: str) -> None:
    cell = examine(Case(proposer, rows, num_tokens=2 if rows.startswith("greedy") else 3))
    assert cell.exact, cell


def test_siblings_draft_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows have more than twice the accepted tokens of one alone: expectations, not samples."""
    pair = "two rows of one prompt"
    monkeypatch.setitem(BATCHES, "one row", BATCHES[pair][:1])
    alone, together = (examine(Case("siblings", r, num_tokens=4)) for r in ("one row", pair))
    assert together.accepted > 2 * alone.accepted + 0.02 and alone.accepted > 0


# ---- a wrong engine -----------------------------------------------------------------------------


class AcceptsAll(NativeEngine):
    """Takes every token as accepted that was drafted."""

    def _verdict(self, row: Row, draft: Draft, laws: TargetLaws, first: int) -> Verdict:
        verdict = super()._verdict(row, draft, laws, first)
        return replace(verdict, accepted=tuple(range(len(draft))))


def test_a_wrong_engine_has_no_exact_cell() -> None:
    """Negative control; `recipes.audit_faults` has the others."""
    cell = examine(Case("dense", "plain"), engine_class=AcceptsAll)
    assert not cell.exact and cell.total_variation > 0.1


def test_an_outcome_without_probability_is_an_infinite_error() -> None:
    cell = examine(Case("dense", "greedy"), engine_class=AcceptsAll)
    assert cell.logprob_error == math.inf and not cell.exact
    assert json.loads(json.dumps(cell.to_json(), allow_nan=False))["logprob_error"] is None


def test_a_wrong_record_is_an_error_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept mass short by 1e-6: the law is right, the record is not."""
    right = Row.sample

    def wrong(row: Row, mode: Mode) -> RolloutSample:
        sample = right(row, mode)
        return replace(sample, kept_mass=tuple(mass - 1e-6 for mass in sample.kept_mass))

    monkeypatch.setattr(Row, "sample", wrong)
    cell = examine(Case("ngram", "top-k"))
    assert cell.total_variation < 1e-12 and cell.logprob_error == pytest.approx(1e-6, abs=1e-9)
    assert not cell.exact


def test_an_engine_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeEngine, "step", lambda _: [])
    with pytest.raises(AssertionError, match="did not finish 1 requests"):
        examine(Case("none", "plain"))


@pytest.mark.parametrize(
    ("changed", "exact"),
    [({}, True), ({"total_variation": 2e-12}, False), ({"logprob_error": 2e-9}, False)],
)
def test_a_cell_is_exact_within_both_tolerances(changed: dict[str, float], exact: bool) -> None:
    cell = replace(CELL, **changed)  # type: ignore[arg-type]
    assert cell.exact is exact and cell.to_json()["exact"] is exact


# ---- the grid -----------------------------------------------------------------------------------


@pytest.mark.parametrize("thorough", [False, True])
def test_the_grid_is_every_proposer_times_every_law(thorough: bool) -> None:
    cases = grid(thorough=thorough)
    pairs = {(case.proposer, case.law) for case in cases}
    assert pairs >= {(proposer, law) for proposer in ALONE for law in LAWS}
    assert {case.law for case in cases} == {*LAWS, *BATCHES}
    assert {case.proposer for case in cases} == set(PROPOSERS)
    assert len(cases) == len(set(cases))


def test_the_thorough_grid_has_both_rules_wherever_they_differ() -> None:
    cases = set(grid(thorough=True))
    assert cases > set(grid())
    rules: dict[tuple[str, str], set[str]] = {}
    for case in cases:
        rules.setdefault((case.proposer, case.law), set()).add(case.rule)
    for proposer, law in itertools.product(ALONE, LAWS):
        assert rules[proposer, law] == (set(BOTH) if PROPOSERS[proposer].sampled else {"block"})


def test_every_cell_is_told_of_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case("ngram", "plain"), Case("none", "greedy")]
    monkeypatch.setattr(audit, "grid", lambda thorough: cases)
    told: list[Cell] = []
    cells = audit.audit_grid(processes=2, on_cell=told.append)
    assert told == cells and [cell.law for cell in cells] == ["plain", "greedy"]
    assert [cell.rule for cell in cells] == ["points", "points"]


def test_no_two_laws_are_the_same_by_accident() -> None:
    """Otherwise a law that is left out would not be seen. ignore_eos is `stop`, and meant to be."""
    laws = {name: law_of(name) for name in LAWS}
    assert total_variation(laws.pop("ignore_eos"), laws["stop"]) == 0
    assert min(total_variation(laws[a], laws[b]) for a in laws for b in laws if a < b) > 0.03


def test_the_target_has_ties_at_the_top_and_below_it() -> None:
    rows = [sorted(logits.tolist()) for logits in audit._TARGET_LOGITS.values()]
    assert any(low < middle == top for low, middle, top in rows)
    assert any(low == middle < top for low, middle, top in rows)
    assert 2 not in PROMPT  # what the repetition penalty leaves alone


# ---- the reference ------------------------------------------------------------------------------


def test_the_reference_knows_nothing_of_the_code_it_judges() -> None:
    source = "".join(
        inspect.getsource(one)
        for one in (
            plain_law,
            next_probs,
            audit.ends,
            audit._softmax,
            audit._keep,
            audit.allowed_next,
        )
    )
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    ours = {
        "plain_law",
        "next_probs",
        "_softmax",
        "_keep",
        "Exact",
        "target_table",
        "allowed_next",
        "ends",
    }
    ours |= {"SamplingParams", "RowOutcome", "Ids", "STRINGS", "V"}
    assert {name for name in names if hasattr(audit, name)} - ours == {"itertools", "math"}
    properties = {name for name, kind in vars(SamplingParams).items() if isinstance(kind, property)}
    assert properties and not any(f".{name}" in source for name in properties)


def test_top_k_keeps_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """(.4, .2, .4): k = 1 keeps both of .4; (.2, .4, .4): k = 2 keeps the same two."""
    assert probs(monkeypatch, 0.4, 0.2, 0.4, top_k=1) == [0.5, 0, 0.5]
    assert probs(monkeypatch, 0.2, 0.4, 0.4, top_k=2) == [0, 0.5, 0.5]
    assert probs(monkeypatch, 0.2, 0.4, 0.4, top_k=9) == [0.2, 0.4, 0.4]


def test_top_p_acts_on_what_top_k_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """(.5, .3, .2): the first has .5 < .6 of all, but .5/.8 = .625 >= .6 of the first two."""
    assert probs(monkeypatch, 0.5, 0.3, 0.2, top_p=0.6) == [0.625, 0.375, 0]
    assert probs(monkeypatch, 0.5, 0.3, 0.2, top_p=0.6, top_k=2) == [1, 0, 0]


def test_min_p_acts_on_the_largest_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """.3 / .5 = .6, .2 / .5 = .4."""
    assert probs(monkeypatch, 0.5, 0.3, 0.2, min_p=0.5) == [0.625, 0.375, 0]
    assert probs(monkeypatch, 0.5, 0.3, 0.2, min_p=0.61) == [1, 0, 0]


def test_filters_come_after_the_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """T = .5 squares (.5, .3, .2) to (25, 9, 4) / 38: .66 >= .6, so top-p .6 keeps one."""
    squared = [round(x / 38, 12) for x in (25, 9, 4)]
    assert probs(monkeypatch, 0.5, 0.3, 0.2, temperature=0.5) == squared
    assert probs(monkeypatch, 0.5, 0.3, 0.2, temperature=0.5, top_p=0.6) == [1, 0, 0]


def test_penalties_count_what_was_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt (0,), generated 1, 1: logits (2, 1, -1) become 2 / 2, 1 / 2 - 2 * .25 - .5 = -.5 and
    -1. Were they taken off first, the second would be (1 - 1) / 2 = 0."""
    logits_of(monkeypatch, 2, 1, -1)
    sampling = SamplingParams(repetition_penalty=2, frequency_penalty=0.25, presence_penalty=0.5)
    found = next_probs((0,), (1, 1), sampling)[0]
    weights = [math.exp(1), math.exp(-0.5), math.exp(-1)]
    assert found == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-15)


def test_a_bias_comes_before_the_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    """-2 + 4 = 2, then halved: 1 > .9. The other way round it is doubled first: -4 + 4 = 0."""
    logits_of(monkeypatch, -2, 0.9, 0)
    sampling = SamplingParams(temperature=0, logit_bias=((0, 4.0),), repetition_penalty=2)
    assert next_probs((0,), (), sampling)[0] == [1, 0, 0]


def test_greedy_takes_the_first_of_tied_maxima(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_of(monkeypatch, 0, 1, 1)
    greedy = SamplingParams(temperature=0)
    assert next_probs((0,), (), greedy) == ([0, 1, 0], [0, 1, 0])


def test_two_token_bad_words_need_both_tokens_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_of(monkeypatch, 0, 0, 0)
    sampling = SamplingParams(bad_words=((0, 1),))
    assert next_probs((0,), (), sampling)[0][1] > 0  # the 0 is of the prompt
    assert next_probs((0,), (2, 0), sampling)[0] == [0.5, 0, 0.5]


def test_stop_ids_are_banned_before_min_tokens_and_end_the_row_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits (0, -inf, 0), stop id 2, min_tokens 1: first 0, then 0 or 2."""
    logits_of(monkeypatch, 0, -math.inf, 0)
    sampling = SamplingParams(min_tokens=1, stop_token_ids=(2,), max_new_tokens=2)
    law = plain_law((0,), sampling)
    assert {outcome: exact.prob for outcome, exact in law.items()} == {
        ((0, 0), "length"): 0.5,
        ((0, 2), "stop"): 0.5,
    }


def test_the_reference_records_what_samples_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """(.5, .3, .2) with top-k 2 and one token: log .625, log .5 and .8 kept for token 0."""
    logits_of(monkeypatch, *map(math.log, (0.5, 0.3, 0.2)))
    law = plain_law((0,), SamplingParams(top_k=2, max_new_tokens=1))
    [(logprob, logprob_full, kept)] = law[(0,), "length"].records
    assert logprob == pytest.approx(math.log(0.625), abs=1e-15)
    assert logprob_full == pytest.approx(math.log(0.5), abs=1e-15)
    assert kept == pytest.approx(0.8, abs=1e-15)


def test_the_grammar_allows_its_strings_and_then_the_stop_id() -> None:
    assert audit.allowed_next(()) == {0, 1}
    assert audit.allowed_next((1,)) == {0, 2}  # the string (1,) ends, or (1, 0, 0) goes on
    assert audit.allowed_next((0, 1)) == {2}
    assert {ids for ids, _ in law_of("grammar")} == {(0, 1, 2), (1, 2), (1, 0, 0)}


# ---- seeded streams -----------------------------------------------------------------------------


def test_the_toy_is_what_it_says() -> None:
    """Accepted with sum min(p, q) = .1 + .25 + .1 + .05 = .5; residual (0, .15, .2, .15) / .5."""
    assert sum(map(min, TOY_TARGET, TOY_DRAFT)) == pytest.approx(0.5)
    left = [max(0, p - q) / 0.5 for p, q in zip(TOY_TARGET, TOY_DRAFT)]
    assert left == pytest.approx([0, 0.3, 0.4, 0.3])
    assert [toy_law(1)[token,] for token in range(4)] == list(TOY_TARGET)
    # Behind 1 the law is rolled by one: token 1 has the .1 that token 0 had, token 0 the .2 of 3.
    assert toy_law(2)[1, 1] == pytest.approx(0.4 * 0.1)
    assert toy_law(2)[1, 0] == pytest.approx(0.4 * 0.2)
    assert sum(toy_law(3).values()) == pytest.approx(1)


# case 7
def test_half_of_the_toys_drafts_are_accepted() -> None:
    counted: list[SpecCounters] = []

    class Counted(NativeEngine):
        def step(self) -> list[RolloutSample]:
            samples = super().step()
            counted.extend(sample.counters for sample in samples)
            return samples

    audit.toy_tokens("position", 1, 2, 500, engine_class=Counted)
    verified = sum(counters.verified for counters in counted)
    accepted = sum(counters.accepted for counters in counted)
    assert abs(accepted / verified - 0.5) < 5 * math.sqrt(0.25 / verified)


def test_seeded_streams_of_the_right_engine_pass() -> None:
    findings = audit.audit_streams(num_requests=700, num_draws=2000)
    assert len({finding.name for finding in findings}) == len(findings) == 9
    assert min(finding.p_value for finding in findings) > 1e-4
    assert all(finding.to_json()["p_value"] is not None for finding in findings)


def test_requests_of_the_toy_have_streams_of_their_own() -> None:
    emitted = Counter(audit.toy_tokens("block", 2, 3, 200))
    assert len(emitted) > 30  # of 64 sequences


def test_noise_is_read_off_decisions() -> None:
    """Rounded down to one of 1024, from a coin as from a token."""
    draws = SeededDraws(3, "p", 1)
    for position in range(8):
        exact = draws.uniform(b"coin", 2, position)
        assert audit.coin_noise(draws, 2, position) == math.floor(1024 * exact) / 1024
        token = draws.draft(torch.ones(1024), 2, position)
        assert token == math.floor(1024 * draws.uniform(b"draft", 2, position))


def test_streams_of_one_seed_for_all_rows_are_found() -> None:
    """Negative control: each row repeats the row before it."""

    class OneStream(SeededDraws):
        def __init__(self, seed: int, prompt_id: str, sample_index: int) -> None:
            super().__init__(seed, prompt_id, 0)

    findings = audit.audit_streams(num_requests=300, num_draws=1000, draws_class=OneStream)
    assert [f.name for f in findings if f.p_value > 1e-6] == ["tokens of probability 0 when u = 0"]


def test_the_mixed_proposer_drafts_every_kind_of_law() -> None:
    kinds: set[type] = set()

    class Seen(NativeEngine):
        def _verdict(self, row: Row, draft: Draft, laws: TargetLaws, first: int) -> Verdict:
            kinds.update(type(law) for law in draft.laws)
            return super()._verdict(row, draft, laws, first)

    assert examine(Case("mixed", "stop", num_tokens=4, draft_len=3), engine_class=Seen).exact
    assert kinds == {DenseLaw, SparseLaw, PointMass}
