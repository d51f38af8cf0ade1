"""Recorded log-probabilities and greedy ties, for every proposer, whatever a token came as.

Hand-computed laws go through the whole engine; a greedy row is always in the batch. On real numbers
the recorded values are those of the forward that verified, and bf16 may differ from float32 only
where the two best logits are closer than a stated eps.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.config import load_config
from rollout.conditions import Condition
from rollout.errors import InvalidConfig, InvalidRequest
from rollout.law import TargetLaws
from rollout.native_engine import NativeEngine
from rollout.policy import Window
from rollout.request import RolloutSample, SpecCounters
from rollout.sampling import SamplingParams
from rollout.table_policy import Table, random_table
from rollout.transformer_policy import TransformerPolicy
from tests.rollout.engines import drawing_proposer, request, run, table_engine
from tests.rollout.policies import engine_over, loaded_policy, random_ids, reference_logits
from tests.rollout.proposers_under_test import (
    DRAFTING,
    DRAWN,
    PROPOSERS,
    llama_engine,
    make,
    with_trees,
)

V = 4
P = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
TABLE = random_table(V, depth=3, seed=21)
DRAFT = random_table(V, depth=1, seed=23)
every_proposer = pytest.mark.parametrize("name", PROPOSERS)
every_drafting = pytest.mark.parametrize("name", DRAFTING)
EPS = 0.25
"""Top-2 gap of float32 logits below which bf16 may take the other token. bf16 moves a logit of the
tiny Llama by .04 (root mean square), so the difference of two by .055; this is 4.5 of them. Its median
gap is .44; first differences were seen at gaps up to .08."""


def always(logits: Sequence[float] | torch.Tensor) -> Table:
    """The same logits at every position."""
    row = torch.as_tensor(logits, dtype=torch.float64)
    return lambda ids: row


NEAR = always([1.0, 0.5, 0.2, 0.0])
"""What is drafted from where the law never moves."""


def engine(name: str, table: Table, draft: Table = DRAFT, vocab_size: int = V) -> NativeEngine:
    made = table_engine(table, vocab_size, proposer=make(name, draft), context_len=256)
    return with_trees(made, name, draft_len=2)


def samples_of(made: NativeEngine, **sampling: Any) -> dict[str, RolloutSample]:
    """Three sampled rows of one prompt and a greedy one."""
    drawn, greedy = SamplingParams(**sampling), SamplingParams(temperature=0, max_new_tokens=12)
    kinds = {"r0": drawn, "r1": drawn, "r2": drawn, "greedy": greedy}
    rows = [
        request(n, (0, 1, 0), one, prompt_id="p", sample_index=i)
        for i, (n, one) in enumerate(kinds.items())
    ]
    return run(made, rows)


def drawn(samples: dict[str, RolloutSample]) -> list[RolloutSample]:
    return [samples[n] for n in ("r0", "r1", "r2")]


def assert_all_origins(name: str, counters: SpecCounters) -> None:
    """Tokens came as accepted drafts, as corrections and as bonuses, or all as plain ones."""
    if name == "none":
        assert counters.plain == counters.emitted
    else:
        assert min(counters.accepted, counters.corrections, counters.bonuses) > 0


# ---- one law, one number ------------------------------------------------------------------


@every_proposer
def test_a_token_has_one_logprob_whatever_it_came_as(name: str) -> None:
    # case 98: ln .5, ln .3, ln .15, ln .05
    want = {0: -0.6931, 1: -1.2040, 2: -1.8971, 3: -2.9957}
    made = engine(name, always(P.log()), NEAR)
    samples = samples_of(made, max_new_tokens=30)
    assert_all_origins(name, made.counters())
    seen = [pair for s in drawn(samples) for pair in zip(s.token_ids, s.logprobs)]
    assert {token for token, _ in seen} == {0, 1, 2, 3}
    assert [lp for _, lp in seen] == pytest.approx([want[t] for t, _ in seen], abs=1e-4)
    assert set(samples["greedy"].logprobs) == {0.0}  # a point mass, as documented


@every_proposer
def test_logprobs_are_those_of_the_law_behind_each_tokens_own_context(name: str) -> None:
    # case 98: on a law that moves, by the table itself
    for sample in drawn(samples_of(engine(name, TABLE), max_new_tokens=20, temperature=1.3)):
        contexts = [(0, 1, 0, *sample.token_ids[:n]) for n in range(20)]
        laws = [(TABLE(context) / 1.3).log_softmax(-1) for context in contexts]
        want = [float(law[token]) for law, token in zip(laws, sample.token_ids)]
        assert sample.logprobs == pytest.approx(want, abs=1e-9)
        assert sample.logprobs_full == pytest.approx(want, abs=1e-9)


@every_drafting
def test_logprobs_are_recorded_while_speculating(name: str) -> None:
    # case 100: they are always there, a number a token, and drafts are proposed all the same
    made = engine(name, TABLE)
    for sample in samples_of(made, max_new_tokens=20).values():
        assert sample.counters.drafted > 0
        assert len(sample.logprobs) == len(sample.logprobs_full) == len(sample.token_ids) > 0
    assert made.counters().rounds < made.counters().emitted


def test_there_is_no_switch_for_logprobs_to_get_out_of_step_with() -> None:
    # case 100
    with pytest.raises(TypeError, match="logprobs"):
        SamplingParams(logprobs=True)  # type: ignore[call-arg]


@every_proposer
def test_behaviour_logprobs_are_those_of_the_scaled_logits_and_say_so(name: str) -> None:
    # case 101: logits (2, 1, 0), T = .5; token 0: 4 - ln(e^4 + e^2 + 1) = -.1429, unscaled -.4076
    made = engine(name, always([2.0, 1.0, 0.0, -50.0]), NEAR)
    for sample in drawn(samples_of(made, max_new_tokens=30, temperature=0.5)):
        zeros = [i for i, token in enumerate(sample.token_ids) if token == 0]
        for values in (sample.logprobs, sample.logprobs_full):
            assert [values[i] for i in zeros] == pytest.approx([-0.1429] * len(zeros), abs=1e-4)
        written = json.loads(json.dumps(sample.to_json()))
        assert written["sampling"]["temperature"] == 0.5
        assert written["logprobs"] == list(sample.logprobs)
    assert_all_origins(name, made.counters())


@every_proposer
def test_both_definitions_are_recorded_and_never_mixed_within_a_sequence(name: str) -> None:
    # case 103: top-p .9 keeps .95; ln(.5/.95) = -.6419, ln(.3/.95) = -1.1527, ln(.15/.95) = -1.8458
    filtered = {0: -0.6419, 1: -1.1527, 2: -1.8458}
    made = engine(name, always(P.log()), NEAR)
    for sample in drawn(samples_of(made, max_new_tokens=30, top_p=0.9)):
        ids = sample.token_ids
        assert sample.logprobs == pytest.approx([filtered[t] for t in ids], abs=1e-4)
        assert sample.logprobs_full == pytest.approx(P.log()[list(ids)].tolist(), abs=1e-9)
        assert sample.kept_mass == pytest.approx([0.95] * len(ids), abs=1e-9)
    assert_all_origins(name, made.counters())


@every_drafting
def test_rows_of_different_filters_in_one_batch_keep_their_own_definitions(name: str) -> None:
    # case 103: unfiltered, top-k 2 (keeps .8), min-p .5 (keeps .8: .3 >= .25), greedy
    kept = {"all": 1.0, "top_k": 0.8, "min_p": 0.8, "greedy": 1.0}
    extra = {"top_k": {"top_k": 2}, "min_p": {"min_p": 0.5}, "greedy": {"temperature": 0.0}}
    samplings = {n: SamplingParams(max_new_tokens=20, **extra.get(n, {})) for n in kept}  # type: ignore[arg-type]
    rows = [request(n, (0, 1, 0), sampling) for n, sampling in samplings.items()]
    for n, sample in run(engine(name, always(P.log())), rows).items():
        assert sample.kept_mass == pytest.approx([kept[n]] * 20, abs=1e-9)
        gap = [full - lp for full, lp in zip(sample.logprobs_full, sample.logprobs)]
        assert gap == pytest.approx([math.log(kept[n])] * 20, abs=1e-9)


# ---- broken and extreme rows --------------------------------------------------------------


@every_proposer
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_row_ends_by_name_and_its_siblings_do_not_notice(name: str, value: float) -> None:
    # case 105: no law from token 10 of the rows that begin with 1; greedy, where an argmax of NaN
    # would be silent, and sampled
    def table(ids: tuple[int, ...]) -> torch.Tensor:
        broken = ids[0] == 1 and len(ids) >= 10
        return torch.full((V,), value, dtype=torch.float64) if broken else TABLE(ids)

    kinds = [SamplingParams(max_new_tokens=13, temperature=t) for t in (0, 0, 1, 1)]
    rows = [request(f"r{i}", (i % 2, 0), kind) for i, kind in enumerate(kinds)]
    whole = run(engine(name, TABLE), rows)
    for n, sample in run(engine(name, table), rows).items():
        num = len(sample.token_ids)
        assert sample.token_ids == whole[n].token_ids[:num]
        assert sample.finish_reason == ("error" if n in ("r1", "r3") else "length")
        if sample.finish_reason == "error":
            assert "NaN or +inf" in sample.finish_detail and 6 <= num <= 8
        written = json.dumps(sample.to_json(), allow_nan=False)  # neither NaN nor a neutral value
        assert "null" not in written.replace('"seed": null', "").replace('"grammar": null', "")


@every_proposer
def test_a_row_whose_weights_recover_is_an_error_all_the_same_and_can_be_asked_for_again(
    name: str,
) -> None:
    # case 105: the retry, under good weights, is the sample that plain weights would have made
    made = engine(name, always([math.nan] * V))
    assert run(made, [request(prompt=(0, 1))])["r0"].finish_reason == "error"
    made.load(TABLE, version=1, digest="good")
    again = run(made, [request(prompt=(0, 1))])["r0"]
    assert again.finish_reason == "length" and again.version_spans == ((1, 8),)
    assert again.token_ids == run(engine(name, TABLE), [request(prompt=(0, 1))])["r0"].token_ids


EXTREMES: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 1e-30},
    "hot": {"temperature": 1e6},
    "one kept": {"top_k": 1, "top_p": 1e-9, "min_p": 1.0},
    "the rest of a giant": {"min_tokens": 7, "stop_token_ids": (0,)},
    "the rest of a giant, cold": {
        "min_tokens": 7, "stop_token_ids": (0,), "temperature": 1e-6,
    },
}  # fmt: skip


@every_proposer
@pytest.mark.parametrize("case", EXTREMES)
def test_the_logprob_of_a_sampled_token_is_always_finite(name: str, case: str) -> None:
    # case 106: logits 1e4 apart; what is sampled has a logprob under both laws
    made = engine(name, always([1e4, 0.0, -5.0, -1e4]), NEAR)
    for sample in samples_of(made, max_new_tokens=8, **EXTREMES[case]).values():
        for values in (sample.logprobs, sample.logprobs_full, sample.kept_mass):
            assert len(values) == len(sample.token_ids) > 0
            assert all(math.isfinite(value) for value in values)
        assert all(value <= 0 for value in (*sample.logprobs, *sample.logprobs_full))


@pytest.mark.parametrize(
    ("field", "value"), [("top_p", 0.0), ("top_k", -1), ("temperature", -1.0), ("min_p", -0.1)]
)
def test_a_value_without_a_meaning_has_none_in_requests_and_recipes(
    field: str, value: float
) -> None:
    # case 106: one meaning a value, in both layers
    with pytest.raises(InvalidRequest, match=f"^{field}=") as request_error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig) as recipe_error:
        load_config(None, ["name=x", f"sampling.{field}={value}"])
    assert str(recipe_error.value) == f"sampling.{request_error.value}"


@every_proposer
def test_top_k_0_keeps_the_whole_vocabulary(name: str) -> None:
    # case 106: as does top-p 1 and a top-k of more than there are
    law = always(P.log())
    samples = samples_of(engine(name, law, NEAR), max_new_tokens=20, top_k=0, top_p=1.0)
    wide = samples_of(engine(name, law, NEAR), max_new_tokens=20, top_k=V + 7)
    assert {token for sample in samples.values() for token in sample.token_ids} == {0, 1, 2, 3}
    assert [s.token_ids for s in samples.values()] == [s.token_ids for s in wide.values()]


# ---- ties and bf16 ------------------------------------------------------------------------


@every_proposer
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_tied_maxima_on_every_path(name: str, dtype: torch.dtype) -> None:
    # case 108: logits (1, 1, 0): token 0 as plain, verified, corrected and bonus token, beside
    # sampled rows; the drafted 1 ties and is refused
    def table(ids: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([1.0, 1.0, 0.0, -1.0], dtype=dtype)

    samples = samples_of(engine(name, table, NEAR), max_new_tokens=12)
    assert samples["greedy"].token_ids == (0,) * 12


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("drafted", [0, 1])
def test_a_draft_of_either_tied_token_changes_nothing(kind: str, drafted: int) -> None:
    # case 108: certain drafts of 0 are all accepted, certain drafts of the tied 1 all refused
    proposer = drawing_proposer(kind, always(1000 * torch.eye(V)[drafted]))
    made = table_engine(always([1.0, 1.0, 0.0, -1.0]), V, proposer=proposer, draft_len=3)
    sample = run(made, [request(sampling=SamplingParams(temperature=0, max_new_tokens=12))])["r0"]
    assert sample.token_ids == (0,) * 12
    assert sample.counters.accepted == (sample.counters.verified if drafted == 0 else 0)


@pytest.mark.parametrize("name", ["none", "ngram", "tree", "dense", "sparse"])
@pytest.mark.parametrize("tied", [(3, 599), (255, 256), (256, 511)])
def test_ties_across_blocks_of_a_large_vocabulary_go_to_the_first(
    name: str, tied: tuple[int, int]
) -> None:
    # case 108: also where each block of 256 has one of the maxima
    logits = torch.zeros(600)
    logits[list(tied)] = 2.5
    draft = random_table(600, depth=0, seed=3)
    samples = samples_of(engine(name, always(logits), draft, 600), max_new_tokens=6)
    assert set(samples["greedy"].token_ids) == {tied[0]}


@every_proposer
def test_greedy_speculation_on_a_table_is_identical_to_plain(name: str) -> None:
    # case 109: float64
    samples = samples_of(engine(name, TABLE), max_new_tokens=12)
    plain = samples_of(engine("none", TABLE), max_new_tokens=12)
    assert samples["greedy"].token_ids == plain["greedy"].token_ids


GREEDY = SamplingParams(temperature=0, max_new_tokens=24)
PROMPTS = [request(f"r{i}", random_ids(3 + i, seed=i), GREEDY) for i in range(6)]


@pytest.fixture(scope="module")
def float32(tiny_llama: Path) -> TransformerPolicy:
    return loaded_policy(tiny_llama)


@pytest.fixture(scope="module")
def plain_float32(float32: TransformerPolicy) -> dict[str, RolloutSample]:
    return run(engine_over(float32), PROMPTS)


@every_drafting
def test_greedy_speculation_in_float32_is_identical_to_plain(
    name: str,
    tiny_llama: Path,
    float32: TransformerPolicy,
    plain_float32: dict[str, RolloutSample],
) -> None:
    # case 109
    samples = run(llama_engine(float32, tiny_llama, name), PROMPTS)
    assert {n: s.token_ids for n, s in samples.items()} == {
        n: s.token_ids for n, s in plain_float32.items()
    }


@pytest.mark.parametrize("name", ["none", "ngram", "tree", "mixed"])
def test_bf16_differs_from_float32_first_where_the_best_two_are_closer_than_eps(
    name: str,
    tiny_llama: Path,
    plain_float32: dict[str, RolloutSample],
    record_property: Any,
) -> None:
    # case 109: gaps of the float32 logits at the first difference of each row
    policy = loaded_policy(tiny_llama, dtype=torch.bfloat16)
    samples = run(llama_engine(policy, tiny_llama, name), PROMPTS)
    gaps = []
    for n, sample in samples.items():
        one, other = plain_float32[n].token_ids, sample.token_ids
        at = next((i for i, (x, y) in enumerate(zip(one, other)) if x != y), None)
        if at is not None:
            logits = reference_logits(tiny_llama, (*sample.request.prompt_ids, *one[:at]))[-1]
            gaps.append(float(logits[one[at]] - logits[other[at]]))
    record_property("top-2 gaps at first differences", gaps)
    print(f"{name}: {len(gaps)} of {len(samples)} rows differ, gaps {gaps}")
    assert all(0 <= gap < EPS for gap in gaps)


class Remembering(TransformerPolicy):
    """Keeps the logits of each verified context, as they were computed."""

    def __init__(self, policy: TransformerPolicy) -> None:
        self.__dict__.update(policy.__dict__)
        self.contexts: dict[int, list[int]] = {}
        self.scored: dict[tuple[int, ...], torch.Tensor] = {}

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        logits = super().score(windows)
        at = 0
        for window in windows:
            cached = self.contexts.setdefault(window.slot, [])
            del cached[window.start :]
            cached += window.token_ids
            num = len(window.token_ids)
            for index in range(num - window.num_logits, num):
                self.scored[tuple(cached[: window.start + index + 1])] = logits[at]
                at += 1
        return logits

    def fork(self, source: int, target: int, length: int) -> None:
        super().fork(source, target, length)
        self.contexts[target] = self.contexts[source][:length]


@pytest.mark.parametrize("name", ["none", "ngram", "counts", *DRAWN])
def test_behaviour_logprobs_in_bf16_are_those_of_the_verifying_forward(
    name: str, tiny_llama: Path
) -> None:
    # case 109: not of a second pass: the law of the very logits that verified the token
    policy = Remembering(loaded_policy(tiny_llama, dtype=torch.bfloat16))
    sampling = SamplingParams(temperature=0.8, top_p=0.95, max_new_tokens=12)
    rows = [request(f"r{i}", (20, 21 + i, 20), sampling) for i in range(3)]
    for sample in run(llama_engine(policy, tiny_llama, name), rows).values():
        contexts = [(*sample.request.prompt_ids, *sample.token_ids[:n]) for n in range(12)]
        logits = torch.stack([policy.scored[context] for context in contexts])
        laws = TargetLaws(logits, [Condition(sampling)] * 12)
        sampled, full, _ = laws.logprobs(range(12), sample.token_ids)
        assert sample.logprobs == tuple(sampled) and sample.logprobs_full == tuple(full)
        want = (logits.double() / 0.8).log_softmax(-1)[range(12), list(sample.token_ids)]
        assert sample.logprobs_full == pytest.approx(want.tolist(), abs=1e-5)
