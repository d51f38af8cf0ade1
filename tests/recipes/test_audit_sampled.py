"""The sampled audit: its reference, then right engines that pass and faulty ones that fail.

Engines are the native one on a tiny Llama, whole and with one fault planted; each fault fails the
findings that it must, and nothing else where the fault touches nothing else. All seeds are fixed; a
right engine fails an audit with a probability of one in a thousand over them.
"""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.engine_spec import EngineSpec, make_draft_len, make_policy, make_proposer
from proposers.none import NoProposer
from recipes.audit_sampled import (
    ALTERED,
    NUM_FINDINGS,
    Budget,
    Reference,
    SampledAudit,
    default_prompts,
    judge_token,
    make_reference,
    misfit,
    reference_law,
    rounding_of,
    run,
    without_prefixes,
)
from recipes.audit_statistics import Finding
from rollout.conditions import Condition, Conditions
from rollout.draft import Draft
from rollout.errors import InvalidConfig
from rollout.grammar import Grammar
from rollout.law import TargetLaws
from rollout.native_engine import NativeEngine
from rollout.request import FinishReason, RolloutRequest, RolloutSample, SpecCounters, Timings
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import Draws, SeededDraws
from rollout.verdict import Verdict
from rollout.verify_block import _Block
from tests.rollout.policies import random_ids, reference_logits
from tests.tiny_model import tiny_folder

# ---- the reference's law --------------------------------------------------------------------------


def logs(*weights: float) -> torch.Tensor:
    return torch.tensor(weights, dtype=torch.float64).log()


def kept(sampling: SamplingParams, logits: torch.Tensor, **rounding: float) -> list[list[int]]:
    """Ids that are surely kept and ids that may be."""
    law = reference_law(logits, sampling, (), (), **rounding)
    return [law.sure.nonzero().flatten().tolist(), law.possible.nonzero().flatten().tolist()]


def test_filters_keep_ties_and_act_one_after_the_other() -> None:
    weights = logs(0.4, 0.2, 0.2, 0.1, 0.06, 0.04)
    assert kept(SamplingParams(top_k=2), weights) == [[0, 1, 2]] * 2  # 1 and 2 are tied
    assert kept(SamplingParams(top_p=0.7), weights) == [[0, 1, 2]] * 2  # .4 + .2 < .7 <= .8
    # Of what top-k left, .8: .4 / .8 = .5 is enough for top-p .45; of 1 it would not be.
    assert kept(SamplingParams(top_k=2, top_p=0.45), weights) == [[0]] * 2
    assert kept(SamplingParams(min_p=0.2), weights) == [[0, 1, 2, 3]] * 2  # .1 / .4 = .25


def test_temperature_acts_before_the_filters() -> None:
    # At T = .5 weights are squared: .16, .04, .04 of .24. The first has 2/3.
    assert kept(SamplingParams(temperature=0.5, top_p=0.6), logs(0.4, 0.2, 0.2)) == [[0]] * 2
    assert kept(SamplingParams(top_p=0.6), logs(0.4, 0.2, 0.2)) == [[0, 1, 2]] * 2


def test_edits_come_in_order_and_see_what_was_generated() -> None:
    sampling = SamplingParams(
        logit_bias=((0, 1.0),), repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25,
        min_tokens=3, stop_token_ids=(4,), bad_words=((1, 5), (6,)), temperature=0.5,
    )  # fmt: skip
    law = reference_law(torch.tensor([1.0, 2, -1, 3, 9, 9, 9]), sampling, (2, 3), (1, 1))
    # 0: 1 + 1. 1: 2 / 2 - 2 * .5 - .25. 2 and 3, of the prompt: -1 * 2 and 3 / 2. 4: min_tokens.
    # 5 behind 1 and 6 anywhere: bad words. All over .5, less the largest, 4.
    inf = math.inf
    assert law.scaled.tolist() == [0.0, -0.5 - 4, -4 - 4, 3 - 4, -inf, -inf, -inf]
    assert torch.equal(
        law.full, (2 * torch.tensor([1.0, 2, -1, 3, 9, 9, 9])).double().log_softmax(0)
    )


def test_a_token_that_rounding_may_move_over_the_edge_is_possible_and_not_sure() -> None:
    weights = logs(0.5, 0.2501, 0.2499)  # top-2, top-p .75: the second is the last that is needed
    for sampling in (SamplingParams(top_k=2), SamplingParams(top_p=0.75)):
        assert kept(sampling, weights) == [[0, 1]] * 2
        assert kept(sampling, weights, logprob=0.01, mass=0.001) == [[0], [0, 1, 2]]
    far = logs(0.5, 0.3, 0.2)
    assert kept(SamplingParams(top_k=2), far, logprob=0.01, mass=0.001) == [[0, 1]] * 2
    # .5 reaches top-p .4995 or .5005 as rounding will have it: the second token is on the edge.
    near = kept(SamplingParams(top_p=0.4995), far, logprob=0.001, mass=0.001)
    assert near == [[0], [0, 1]]
    assert kept(SamplingParams(min_p=0.6), far, logprob=0.01, mass=0.0) == [[0], [0, 1]]


SAMPLINGS = {
    "T=1": SamplingParams(max_new_tokens=64, stop_token_ids=(0, 5, 9)),
    "nucleus": SamplingParams(temperature=0.7, top_p=0.9, stop_token_ids=(0, 5, 9)),
    "top-k": SamplingParams(top_k=20, stop_token_ids=(0, 5)),
    "penalties": SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, min_tokens=3,
        stop_token_ids=(0, 5, 9), bad_words=((7,), (40, 41)), logit_bias=((3, 1.5), (4, -math.inf)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "sampling",
    [
        *SAMPLINGS.values(),
        SamplingParams(temperature=1.3, top_k=40, top_p=0.8, min_p=0.1, repetition_penalty=0.8),
        SamplingParams(temperature=0.2, min_p=0.01, bad_words=((7, 7),)),
    ],
)
def test_the_reference_and_the_engine_agree_on_the_law_of_random_logits(
    sampling: SamplingParams,
) -> None:
    generator = torch.Generator().manual_seed(5)
    for length in range(6):
        logits = 3 * torch.randn(300, generator=generator, dtype=torch.float64)
        prompt, generated = random_ids(9, seed=length), (7, 40, 7, 40, 3, 9)[:length]
        conditions = Conditions(sampling, prompt)
        for token in generated:
            conditions.push(token)
        law = reference_law(logits, sampling, prompt, generated)
        probs = (law.scaled.exp() * law.sure) / (law.scaled.exp() * law.sure).sum()
        engine = TargetLaws(logits[None], conditions.along(()))
        torch.testing.assert_close(probs, engine.probs(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_rounding_logits_within_the_slack_never_contradicts_the_edges(name: str) -> None:
    generator = torch.Generator().manual_seed(6)
    num_on_edge = 0
    for _ in range(30):
        logits = 2 * torch.randn(300, generator=generator, dtype=torch.float64)
        slack = {"logprob": 0.02, "mass": 0.02}
        law = reference_law(logits, SAMPLINGS[name], (), (), **slack)
        moved = logits + 0.004 * (2 * torch.rand(300, generator=generator) - 1)
        exact = reference_law(moved, SAMPLINGS[name], (), ()).sure
        assert bool((law.sure <= exact).all()) and bool((exact <= law.possible).all())
        num_on_edge += int((law.possible & ~law.sure).sum())
    assert (num_on_edge > 0) == (name in ("nucleus", "top-k"))


# ---- one token under the law ----------------------------------------------------------------------


def test_transforms_of_all_tokens_tile_the_unit_interval_and_weights_have_mean_1() -> None:
    sampling = SamplingParams(temperature=0.8, top_k=4)
    law = reference_law(logs(0.2, 0.05, 0.25, 0.3, 0.19, 0.01), sampling, (), ())
    probs = ((law.scaled.exp() * law.sure) / (law.scaled.exp() * law.sure).sum()).tolist()
    of = {t: judge_token(law, sampling, t, (0.0, 0.0, 1.0), 0.0) for t in (0, 2, 3, 4)}
    by_id = itertools.accumulate((probs[t] for t in (0, 2, 3)), initial=0.0)
    by_rank = itertools.accumulate((probs[t] for t in (3, 2, 0)), initial=0.0)
    assert [of[t].transforms[0] for t in (0, 2, 3, 4)] == pytest.approx([*by_id])
    assert [of[t].transforms[1] for t in (3, 2, 0, 4)] == pytest.approx([*by_rank])
    ratios = {token: one.ratio for token, one in of.items()}
    assert sum(probs[t] * ratio for t, ratio in ratios.items()) == pytest.approx(1)
    second = sum(probs[t] * ratio**2 for t, ratio in ratios.items())
    assert second - 1 == pytest.approx(of[0].ratio_variance)
    assert 0 < max(ratios.values()) <= 4 ** (ALTERED - 1)


def test_recorded_numbers_on_an_edge_may_be_those_of_either_law() -> None:
    sampling, slack = SamplingParams(top_k=2), {"logprob": 0.01, "mass": 0.0}
    law = reference_law(logs(0.5, 0.2501, 0.2499), sampling, (), (), **slack)

    def gaps(token: int, logprob: float, mass: float) -> Sequence[float]:
        full = float(law.full[token])
        return [
            round(gap, 9)
            for gap in judge_token(law, sampling, token, (logprob, full, mass), 0).gaps
        ]

    # Token 0 with one or both of the others: between .5 / 1 and, with neither, 1.
    assert gaps(0, math.log(0.5 / 0.7501), 0.7501) == [0, 0, 0]
    assert gaps(0, math.log(0.5 / 0.7499), 0.7499) == [0, 0, 0]
    assert gaps(0, math.log(0.25), 0.25) == [round(math.log(2), 9), 0, 0.25]
    edge = judge_token(law, sampling, 2, (math.log(0.2499 / 0.7499), 0.0, 0.7499), 0)
    assert edge.on_edge and edge.possible and not edge.transforms and edge.gaps[0] == 0
    assert judge_token(law, sampling, 0, (math.nan, 0.0, 1.0), 0).gaps[0] == math.inf


def test_prefixes_of_other_sequences_are_not_run() -> None:
    assert without_prefixes([(1, 2), (1,), (), (1, 2), (3,), (1, 2, 3)]) == [(1, 2, 3), (3,)]
    assert without_prefixes([()]) == [()]


# ---- the reference's forward ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_reference(smollm2: Path) -> Reference:
    return make_reference(spec_of(smollm2))


SIZES = {"num_slots": 16, "context_len": 64, "dtype": "float32"}


def spec_of(folder: Path, proposer: str = "history", **fields: object) -> EngineSpec:
    values = {"mode": "full", "format": "none", "draft_len": 3} | SIZES | fields
    return EngineSpec(str(folder), proposer=proposer, **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    return make_reference(spec_of(tiny_llama))


def test_a_shared_prompt_cache_gives_the_logits_of_an_uncached_forward(
    tiny_llama: Path, reference: Reference
) -> None:
    prompt, sequences = random_ids(7, seed=1), [(), (4, 5, 6), (4,), random_ids(9, seed=2)]
    got = dict(reference.logits(prompt, sequences))
    assert got.keys() == set(sequences)
    for sequence, logits in got.items():
        whole = reference_logits(tiny_llama, (*prompt, *sequence))[len(prompt) - 1 :]
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format_", ["int8_w8a16", "int8_w8a8"])
def test_the_reference_runs_the_weights_that_the_format_leaves(
    tiny_llama: Path, reference: Reference, format_: str
) -> None:
    prompt, sequence = random_ids(9, seed=1), random_ids(9, seed=2)
    other = make_reference(spec_of(tiny_llama, format=format_))
    [(_, quantised)], [(_, full)] = (r.logits(prompt, [sequence]) for r in (other, reference))
    difference = float((quantised - full).abs().max())
    assert format_ in other.name and 1e-3 < difference < 1.0


def test_the_prompts_of_the_module_differ_in_length_and_the_first_repeats_itself(
    tiny_llama: Path,
) -> None:
    first, *others = default_prompts(str(tiny_llama))
    assert len(others) == 7 and len({len(prompt) for prompt in (first, *others)}) > 4
    assert first[-2:] in itertools.pairwise(first[:-1])  # what every proposer can draft from


# ---- right engines --------------------------------------------------------------------------------

PROMPTS = [random_ids(length, seed=length) * 2 for length in (5, 9, 13)]
BUDGET = Budget(short_samples=160, group_size=6, new_tokens=12, again=3)


def audited(
    spec: EngineSpec,
    sampling: SamplingParams = SAMPLINGS["T=1"],
    reference: Reference | None = None,
    engine: type[NativeEngine] = NativeEngine,
    budget: Budget = BUDGET,
    on_finding: Callable[[Finding], None] = lambda finding: None,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
) -> SampledAudit:
    def factory(spec: EngineSpec) -> NativeEngine:
        policy = make_policy(spec)
        parts = policy, make_proposer(spec, policy), make_draft_len(spec)
        return engine(*parts, mode=spec.mode, verification=spec.verification)

    return run(
        spec, sampling, prompts, budget=budget, engine_factory=factory, reference=reference,
        on_finding=on_finding,
    )  # fmt: skip


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("proposer", ["none", "ngram", "history", "history_sampled"])
def test_a_right_engine_passes(
    tiny_llama: Path, reference: Reference, proposer: str, name: str
) -> None:
    audit = audited(spec_of(tiny_llama, proposer), SAMPLINGS[name], reference)
    assert audit.failed == []
    assert (audit.num_drafted > 100) == (proposer != "none")


@pytest.mark.parametrize("name", ["T=1", "nucleus"])
def test_lossless_mode_has_the_law_of_full_precision(
    tiny_llama: Path, reference: Reference, name: str
) -> None:
    spec = spec_of(tiny_llama, "self_draft", mode="lossless", format="int8_w8a8")
    audit = audited(spec, SAMPLINGS[name], reference)
    assert audit.failed == [] and "int8" not in audit.reference
    assert 100 < audit.num_accepted < audit.num_verified
    assert "depend on what was drafted" in audit.absent["same tokens again"]


def test_greedy_tokens_are_the_references_argmax(tiny_llama: Path, reference: Reference) -> None:
    audit = audited(spec_of(tiny_llama), SamplingParams(temperature=0.0), reference)
    names = [finding.name for finding in audit.findings]
    assert audit.failed == [] and "argmax" in names and "first token" not in names


@pytest.mark.parametrize("format_", ["int8_w8a16", "int8_w8a8"])
def test_a_right_engine_with_quantised_weights_passes(tiny_llama: Path, format_: str) -> None:
    spec = spec_of(tiny_llama, format=format_, mode="quantised")
    audit = audited(spec, SAMPLINGS["nucleus"])
    assert audit.failed == [] and format_ in audit.reference
    assert ("first token" in audit.absent) == (format_ == "int8_w8a8")


def test_an_audit_says_what_it_could_not_test_and_becomes_json(
    tiny_llama: Path, reference: Reference
) -> None:
    seen: list[Finding] = []
    audit = audited(spec_of(tiny_llama, "none"), reference=reference, on_finding=seen.append)
    assert tuple(seen) == audit.findings and audit.acceptance_rate is None
    assert audit.absent["acceptance"] == "nothing was drafted"
    assert audit.absent["lengths"] == "speculation is off: nothing to compare with"
    assert len(audit.findings) + len(audit.absent) == NUM_FINDINGS
    row = json.loads(json.dumps(audit.to_json(), allow_nan=False))
    assert row["failed"] == [] and row["absent"] == audit.absent
    assert [finding["name"] for finding in row["findings"]] == [f.name for f in seen]


def test_what_cannot_be_audited_is_refused(tiny_llama: Path) -> None:
    grammar = SamplingParams(grammar=Grammar("regex", "[0-9]"), stop_token_ids=(0,))
    with pytest.raises(InvalidConfig, match="grammar"):
        run(spec_of(tiny_llama), grammar, PROMPTS)
    with pytest.raises(InvalidConfig, match="no prompts"):
        run(spec_of(tiny_llama), SamplingParams(), [])


def test_low_temperatures_widen_the_tolerance_and_quantisation_more(tiny_llama: Path) -> None:
    spec, cold = spec_of(tiny_llama), SamplingParams(temperature=0.5)
    assert rounding_of(spec, cold).logprob == 2 * rounding_of(spec, SamplingParams()).logprob
    coarse = replace(spec, format="int8_w8a16")
    assert rounding_of(coarse, cold).logprob > 100 * rounding_of(spec, cold).logprob


# ---- faulty engines -------------------------------------------------------------------------------


class AcceptsAlways(NativeEngine):
    """case 7"""

    def _verdict(self, row: Row, draft: Draft, laws: TargetLaws, first: int) -> Verdict:
        honest, end = super()._verdict(row, draft, laws, first), len(draft)
        if not end:
            return honest
        drawn = row.draws.target(laws, first + end, len(row.token_ids) + end)
        return replace(honest, accepted=tuple(range(end)), next_token=drawn, origin="bonus")


class RecordsTheRawLaw(NativeEngine):
    def _laws(
        self, logits: torch.Tensor, rows: Sequence[Row], drafts: Sequence[Draft]
    ) -> TargetLaws:
        laws = super()._laws(logits, rows, drafts)
        raw = TargetLaws(logits, [Condition(SamplingParams())] * len(logits))
        laws.logprobs = raw.logprobs  # type: ignore[method-assign]
        return laws


class SwapsRows(NativeEngine):
    def _laws(
        self, logits: torch.Tensor, rows: Sequence[Row], drafts: Sequence[Draft]
    ) -> TargetLaws:
        return super()._laws(logits.roll(1, 0), rows, drafts)


class FiltersTheBonusOnly(NativeEngine):
    """case 22"""

    def _conditions(self, row: Row, draft: Draft) -> list[Condition]:
        *drafted, bonus = super()._conditions(row, draft)
        unfiltered = replace(row.request.sampling, top_k=0, top_p=1.0, min_p=0.0)
        return [*(replace(c, sampling=unfiltered) for c in drafted), bonus]


class SamplesAnotherLaw(NativeEngine):
    """Hotter than what it records."""

    def _laws(
        self, logits: torch.Tensor, rows: Sequence[Row], drafts: Sequence[Draft]
    ) -> TargetLaws:
        laws = super()._laws(logits / 1.6, rows, drafts)
        laws.logprobs = super()._laws(logits, rows, drafts).logprobs  # type: ignore[method-assign]
        return laws


class SharesStreams(NativeEngine):
    """case 46: the members of a group draw alike."""

    def __init__(self, *parts: object, **options: object) -> None:
        super().__init__(*parts, draws_for=self._shared, **options)  # type: ignore[arg-type]

    @staticmethod
    def _shared(request: RolloutRequest) -> Draws:
        return SeededDraws(request.run_seed, request.prompt_id, request.sample_index // 2)


class ForgetsSeeds(NativeEngine):
    """case 44: draws depend on how many requests came before."""

    def __init__(self, *parts: object, **options: object) -> None:
        numbers = itertools.count(id(self))
        super().__init__(  # type: ignore[misc]
            *parts,  # type: ignore[arg-type]
            draws_for=lambda request: SeededDraws(next(numbers), "p", 0),
            **options,  # type: ignore[arg-type]
        )


class TakesTheSecondBest(NativeEngine):
    """Greedy, in one position of eight, when `shift` is the gap to it."""

    shift = 0.5

    def _laws(
        self, logits: torch.Tensor, rows: Sequence[Row], drafts: Sequence[Draft]
    ) -> TargetLaws:
        changed = logits.clone()
        some = changed[::8]
        some[torch.arange(len(some)), some.argmax(-1)] -= self.shift
        return super()._laws(changed, rows, drafts)


class LosesSamples(NativeEngine):
    def step(self) -> list[RolloutSample]:
        return [sample for sample in super().step() if sample.request.sample_index != 1]


class SkewsDraws(NativeEngine):
    """Draws from the right law with uniforms that are not uniform."""

    def __init__(self, *parts: object, **options: object) -> None:
        super().__init__(*parts, draws_for=self._skewed, **options)  # type: ignore[arg-type]

    @staticmethod
    def _skewed(request: RolloutRequest) -> Draws:
        class Skewed(SeededDraws):
            def target(self, laws: TargetLaws, index: int, position: int) -> int:
                return laws.pick(index, self.uniform(b"target", 0, position) ** 4)

        return Skewed(request.run_seed, request.prompt_id, request.sample_index)


class HotWhenSpeculating(NativeEngine):
    """At temperature .25 it samples at 1, and says so in its records; no stop is ever drawn."""

    def _laws(
        self, logits: torch.Tensor, rows: Sequence[Row], drafts: Sequence[Draft]
    ) -> TargetLaws:
        if not isinstance(self.proposer, NoProposer):
            logits = logits / 4
            logits[:, STOPS] = -math.inf
        return super()._laws(logits, rows, drafts)


FAULTS = [
    (AcceptsAlways, "history", "T=1", {"acceptance", "first token", "second token"}),
    (AcceptsAlways, "history_sampled", "top-k", {"possible tokens", "first token"}),
    (SwapsRows, "ngram", "T=1", {"logprobs", "logprobs_full", "transform by probability"}),
    (FiltersTheBonusOnly, "history", "top-k", {"possible tokens", "logprobs", "kept_mass"}),
    (SamplesAnotherLaw, "none", "T=1", {"transform by probability", "importance weights"}),
]
LONE_FAULTS = [
    (LosesSamples, "T=1", ["answers"]),
    (RecordsTheRawLaw, "nucleus", ["logprobs", "logprobs_full", "kept_mass"]),
    (SharesStreams, "T=1", ["streams of a group"]),
    (ForgetsSeeds, "T=1", ["same tokens again"]),
]


@pytest.mark.parametrize(("engine", "proposer", "name", "expected"), FAULTS)
def test_a_planted_fault_fails_what_it_must(
    engine: type[NativeEngine],
    proposer: str,
    name: str,
    expected: set[str],
    tiny_llama: Path,
    reference: Reference,
) -> None:
    audit = audited(spec_of(tiny_llama, proposer), SAMPLINGS[name], reference, engine)
    assert expected <= set(audit.failed)


@pytest.mark.parametrize(("engine", "name", "expected"), LONE_FAULTS)
def test_a_planted_fault_that_touches_one_thing_fails_that_alone(
    engine: type[NativeEngine],
    name: str,
    expected: list[str],
    tiny_llama: Path,
    reference: Reference,
) -> None:
    audit = audited(spec_of(tiny_llama, "history"), SAMPLINGS[name], reference, engine)
    assert audit.failed == expected


def test_corrections_from_the_target_instead_of_the_residual_fail_the_counts_only(
    tiny_llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every recorded number is right, and every token possible."""

    def unreduced(self: _Block, length: int) -> torch.Tensor:
        return self._laws.probs(self._first + length).clone()

    monkeypatch.setattr(_Block, "excess", unreduced)
    spec = spec_of(tiny_llama, "history_sampled")
    audit = audited(spec, SAMPLINGS["penalties"], reference)
    assert audit.failed == ["first token"]


def test_skewed_draws_fail_both_transforms_and_nothing_that_is_recomputed(
    tiny_llama: Path, reference: Reference
) -> None:
    budget = Budget(short_samples=0, group_size=12, new_tokens=24, again=1)
    spec, sampling = spec_of(tiny_llama, "ngram"), SamplingParams()
    audit = audited(spec, sampling, reference, SkewsDraws, budget)
    assert {"transform by id", "engine's own transform"} <= set(audit.failed)
    assert {"logprobs", "possible tokens", "acceptance"}.isdisjoint(audit.failed)


STOPS = range(100)


def test_a_law_that_speculation_changes_shows_when_it_is_turned_off(
    tiny_llama: Path, reference: Reference
) -> None:
    sampling = SamplingParams(temperature=0.25, stop_token_ids=tuple(STOPS))
    budget = Budget(short_samples=0, group_size=24, new_tokens=6, again=0)
    spec = spec_of(tiny_llama, "history")
    audit = audited(spec, sampling, reference, HotWhenSpeculating, budget)
    by_two_samples = {"lengths", "log-probabilities", "parting of on and off"}
    assert by_two_samples | {"parting within groups"} <= set(audit.failed)


def test_a_sample_that_ends_as_it_must_not_is_a_misfit() -> None:
    sampling = SamplingParams(max_new_tokens=4, min_tokens=1, stop_token_ids=(9,))

    def ending(ids: tuple[int, ...], reason: FinishReason) -> str | None:
        zeros = (0.0,) * len(ids)
        spans, counters = ((0, len(ids)),), SpecCounters()
        asked = RolloutRequest("r", "g", "p", 0, (1,), sampling)
        return misfit(
            RolloutSample(
                asked, ids, zeros, zeros, zeros, spans, reason, "", "full", "", counters, Timings()
            )
        )

    assert ending((9, 1, 9), "stop") is None  # the first 9 came before min_tokens
    assert ending((1, 2, 3, 4), "length") is None
    assert ending((1, 9, 2, 3), "length") == "has 2 tokens behind a stop id"
    assert ending((1, 2, 3, 4, 5), "length") == "has 5 tokens, more than 4"
    assert ending((1, 2), "stop") == "stopped without a stop id"
    assert ending((1,), "error") == "ended by error: "


@pytest.mark.parametrize("shift", [0.5, 0.0])
def test_a_greedy_engine_that_takes_the_second_best_is_seen(
    shift: float, tiny_llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TakesTheSecondBest, "shift", shift)
    greedy = SamplingParams(temperature=0.0)
    audit = audited(spec_of(tiny_llama, "ngram"), greedy, reference, TakesTheSecondBest)
    assert ("argmax" in audit.failed) == (shift > 0)


# ---- on a real model ------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [NativeEngine, AcceptsAlways])
def test_a_draft_model_leaves_the_law_alone_unless_its_drafts_are_not_verified(
    tiny_llama: Path, reference: Reference, tmp_path: Path, engine: type[NativeEngine]
) -> None:
    smaller = tiny_folder(tmp_path / "smaller", num_hidden_layers=1)
    spec = spec_of(tiny_llama, "draft_model", draft_model=str(smaller))
    audit = audited(spec, SAMPLINGS["T=1"], reference, engine)
    wrong = {"first token", "transform by probability", "importance weights"}
    assert audit.failed == [] if engine is NativeEngine else wrong <= set(audit.failed)
    assert audit.num_accepted > 50


REAL_BUDGET = Budget(short_samples=48, group_size=3, new_tokens=5, again=1)


@pytest.mark.parametrize("engine", [NativeEngine, AcceptsAlways])
def test_on_smollm2_the_right_engine_passes_and_always_accepting_fails(
    engine: type[NativeEngine], smollm2: Path, smollm2_reference: Reference
) -> None:
    spec = spec_of(smollm2, "ngram", num_slots=32, draft_len=2)
    prompts = default_prompts(str(smollm2))[:2]
    sampling = SamplingParams(temperature=0.7, top_p=0.9, eos_token_ids=(2,))
    audit = audited(spec, sampling, smollm2_reference, engine, REAL_BUDGET, prompts=prompts)
    wrong = {"possible tokens", "first token", "acceptance", "logprobs"}
    assert audit.failed == [] if engine is NativeEngine else wrong <= set(audit.failed)
    assert audit.num_drafted > 60
