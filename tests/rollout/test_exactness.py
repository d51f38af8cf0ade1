"""The joint law of whole speculative generations, enumerated through the real engine."""

from collections import Counter

import pytest
from scipy.stats import chi2

import rollout.verify
from proposers.history import HistoryProposer
from proposers.ngram import NgramProposer
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes, total_variation
from rollout.proposer import Proposer
from rollout.sampling import SamplingParams
from rollout.table_policy import random_table
from tests.rollout.engines import drawing_proposer, plain_law, request, run, table_engine

V = 3
TARGET = random_table(V, depth=2, seed=1)
DRAFT = random_table(V, depth=1, seed=2)
TOLERANCE = 1e-12

LAWS = {
    "plain": SamplingParams(max_new_tokens=4),
    "cold": SamplingParams(max_new_tokens=3, temperature=0.5),
    "hot": SamplingParams(max_new_tokens=3, temperature=2.0),
    "greedy": SamplingParams(max_new_tokens=4, temperature=0.0),
    "top_k": SamplingParams(max_new_tokens=3, top_k=2),
    "top_p": SamplingParams(max_new_tokens=3, top_p=0.8),
    "min_p": SamplingParams(max_new_tokens=3, min_p=0.3),
    "all filters": SamplingParams(max_new_tokens=4, temperature=1.3, top_k=2, top_p=0.9, min_p=0.1),
    "stop": SamplingParams(max_new_tokens=4, stop_token_ids=(2,)),
    "min_tokens": SamplingParams(max_new_tokens=4, min_tokens=2, stop_token_ids=(2, 1)),
}
KINDS = ("dense", "sparse", "point", "mixed")


def speculative_law(
    proposer: Proposer, sampling: SamplingParams, draft_len: int
) -> dict[tuple[int, ...], float]:
    def generate(draws: EnumeratedDraws) -> tuple[int, ...]:
        engine = table_engine(
            TARGET, V, proposer=proposer, draft_len=draft_len, draws_for=lambda _: draws
        )
        return run(engine, [request(sampling=sampling)])["r0"].token_ids

    return enumerate_outcomes(generate)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAWS)
def test_emitted_law_equals_target_by_enumeration(kind: str, name: str) -> None:
    law = speculative_law(drawing_proposer(kind, DRAFT), LAWS[name], draft_len=2)
    assert total_variation(law, plain_law(TARGET, (0,), LAWS[name], V)) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_len", [1, 3])
def test_emitted_law_does_not_depend_on_the_draft_length(kind: str, draft_len: int) -> None:
    sampling = SamplingParams(max_new_tokens=4, stop_token_ids=(1,))
    law = speculative_law(drawing_proposer(kind, DRAFT), sampling, draft_len)
    assert total_variation(law, plain_law(TARGET, (0,), sampling, V)) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_draft_length_may_be_a_stopping_time(kind: str) -> None:
    proposer = drawing_proposer(kind, DRAFT, stop_after=lambda tokens: tokens[-1] == 1)
    law = speculative_law(proposer, LAWS["plain"], draft_len=3)
    assert total_variation(law, plain_law(TARGET, (0,), LAWS["plain"], V)) < TOLERANCE


def test_ngram_drafts_leave_the_law_alone() -> None:
    proposer = NgramProposer(min_match=1, max_match=2)
    law = speculative_law(proposer, LAWS["plain"], draft_len=3)
    assert total_variation(law, plain_law(TARGET, (0,), LAWS["plain"], V)) < TOLERANCE


def test_history_drafts_leave_the_joint_law_of_a_group_alone() -> None:
    """Two rollouts of one prompt, each drafting from the other while both are in flight."""
    sampling = SamplingParams(max_new_tokens=3)

    def generate(draws: EnumeratedDraws) -> tuple[tuple[int, ...], ...]:
        engine = table_engine(
            TARGET, V, proposer=HistoryProposer(), draft_len=2, draws_for=lambda _: draws
        )
        samples = run(engine, [request(n, sampling=sampling, prompt_id="p") for n in ("a", "b")])
        return samples["a"].token_ids, samples["b"].token_ids

    one = plain_law(TARGET, (0,), sampling, V)
    both = {(a, b): pa * pb for a, pa in one.items() for b, pb in one.items()}
    assert total_variation(enumerate_outcomes(generate), both) < TOLERANCE


def test_rows_of_different_laws_in_one_batch_keep_their_own() -> None:
    samplings = [LAWS["greedy"], SamplingParams(max_new_tokens=2), LAWS["stop"]]
    names = ["a", "b", "c"]

    def generate(draws: EnumeratedDraws) -> tuple[tuple[int, ...], ...]:
        engine = table_engine(
            TARGET, V, proposer=drawing_proposer("point", DRAFT), draft_len=1,
            draws_for=lambda _: draws,
        )  # fmt: skip
        requests = [request(n, sampling=s) for n, s in zip(names, samplings)]
        samples = run(engine, requests)
        return tuple(samples[name].token_ids for name in names)

    laws = [plain_law(TARGET, (0,), sampling, V) for sampling in samplings]
    joint = {
        (a, b, c): pa * pb * pc
        for a, pa in laws[0].items()
        for b, pb in laws[1].items()
        for c, pc in laws[2].items()
    }
    assert total_variation(enumerate_outcomes(generate), joint) < TOLERANCE


FAULTS = {
    "residual not used": ("residual", lambda target, law: target),
    "residual softmaxed": (
        "residual",
        lambda target, law: (target - law.probs).clamp(min=0).softmax(-1),
    ),
    "only the refused mass removed": ("residual", lambda target, law: target * (law.probs < 0.5)),
    "q reported is not q drawn": ("law_prob", lambda law, token: 0.5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen_by_enumeration(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the same comparison fails when the rule is bent."""
    monkeypatch.setattr(rollout.verify, *FAULTS[fault])
    sampling = SamplingParams(max_new_tokens=3)  # a whole draft of 2 and its bonus
    law = speculative_law(drawing_proposer("dense", DRAFT), sampling, draft_len=2)
    assert total_variation(law, plain_law(TARGET, (0,), sampling, V)) > 0.01


def test_always_accepting_is_seen_by_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnumeratedDraws, "coin", lambda *_: True)
    law = speculative_law(drawing_proposer("dense", DRAFT), LAWS["plain"], draft_len=2)
    assert total_variation(law, plain_law(TARGET, (0,), LAWS["plain"], V)) > 0.01


def test_enumeration_itself_counts_every_path_once() -> None:
    def two_coins(draws: EnumeratedDraws) -> tuple[bool, bool]:
        return draws.coin(0.25, 0, 0), draws.coin(0.5, 0, 1)

    law = enumerate_outcomes(two_coins)
    assert law == {(True, True): 0.125, (True, False): 0.125} | dict.fromkeys(
        [(False, True), (False, False)], 0.375
    )


NUM_SAMPLES = 1500
FALSE_ALARM_RATE = 1e-6


def chi_square_tail(kind: str) -> float:
    """Chance that a correct engine is further from the plain law than three tokens of seeded
    samples are, drafted two at a time. Outcomes expected fewer than five times are one cell."""
    sampling = SamplingParams(max_new_tokens=3)
    engine = table_engine(
        TARGET, V, proposer=drawing_proposer(kind, DRAFT), draft_len=2, num_slots=64
    )
    samples = run(
        engine,
        [
            request(str(i), sampling=sampling, prompt_id="p", sample_index=i)
            for i in range(NUM_SAMPLES)
        ],
    )
    observed, expected = Counter[object](), Counter[object]()
    cells = {}
    for outcome, prob in plain_law(TARGET, (0,), sampling, V).items():
        cells[outcome] = outcome if NUM_SAMPLES * prob >= 5 else "rare"
        expected[cells[outcome]] += NUM_SAMPLES * prob
    observed.update(cells[sample.token_ids] for sample in samples.values())
    distance = sum((observed[c] - mean) ** 2 / mean for c, mean in expected.items())
    return float(chi2.sf(distance, len(expected) - 1))


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_samples_of_the_real_path_have_the_target_law(kind: str) -> None:
    assert chi_square_tail(kind) > FALSE_ALARM_RATE


def test_a_planted_fault_is_seen_in_seeded_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: corrections drawn from the target instead of the residual."""
    monkeypatch.setattr(rollout.verify, "residual", lambda target, law: target)
    assert chi_square_tail("dense") < FALSE_ALARM_RATE
