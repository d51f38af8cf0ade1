"""Every planted fault is caught, by a check that the right engine passes."""

import json
from functools import partial

import pytest
import torch

import recipes.audit_faults as audit
from recipes.audit_enumerated import (
    LOGPROB_TOLERANCE,
    TOLERANCE,
    TOY_DRAFT,
    TOY_TARGET,
    Case,
    examine,
    rolled,
)
from recipes.audit_faults import FAULTS, Control, Fault, by_block, by_position, judging
from rollout.conditions import Condition
from rollout.draft import DenseLaw, Draft
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes
from rollout.law import TargetLaws
from rollout.sampling import SamplingParams

NAMED = """
draft noise reused for the correction
acceptance uniform reused for the correction
only the refused token's draft mass removed
residual softmaxed
always accept
argmax verification at T>0
q reported is not q drawn
block verification stops at the first failure
token dropped after being looked at
penalties ignore earlier drafts
filter applied to the bonus only
logprobs of the raw law
rows of neighbours swapped
""".strip().splitlines()
CHECKS = {fault.check if isinstance(fault.check, Case) else fault.name: fault for fault in FAULTS}


def name_of(fault: Fault) -> str:
    return fault.name


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_the_fault_is_caught(fault: Fault) -> None:
    control = fault.control()
    assert control.caught, control
    assert control.effect > audit.CAUGHT_EFFECT


@pytest.mark.parametrize("fault", CHECKS.values(), ids=name_of)
def test_the_right_engine_passes_the_check_of_the_fault(fault: Fault) -> None:
    control = fault.mended().control()
    assert not control.caught, control
    if control.p_value is None:
        assert control.effect < max(TOLERANCE, LOGPROB_TOLERANCE)
    else:
        assert control.p_value > 1e-4


def test_faults_have_the_names_they_are_known_by() -> None:
    names = [fault.name for fault in FAULTS]
    assert set(NAMED) < set(names) and len(set(names)) == len(names)
    assert len({fault.sentence for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("rule", [by_position, by_block])
def test_the_rules_that_faults_are_planted_in_are_exact_without(rule: audit.Verify) -> None:
    for law in ("plain", "top-k"):
        cell = examine(Case("dense", law), engine_class=judging(rule))
        assert cell.exact and cell.accepted > 0.5, cell


def test_each_control_is_told_of_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [fault for fault in FAULTS if fault.name in ("always accept", "residual softmaxed")]
    monkeypatch.setattr(audit, "FAULTS", (*faults, faults[0].mended()))
    told: list[Control] = []
    controls = audit.run_controls(told.append)
    assert told == controls and [control.caught for control in controls] == [True, True, False]
    assert controls[0].by == "total variation in dense, plain, position"
    rows = [json.loads(json.dumps(control.to_json(), allow_nan=False)) for control in controls]
    assert rows[0]["name"] == "residual softmaxed" and rows[0]["p_value"] is None


def test_an_infinite_effect_is_null_in_json() -> None:
    control = Control("x", "Does x.", True, "log-probability in y", float("inf"))
    assert control.to_json()["effect"] is None


# ---- the arithmetic of the faults, one token of the toy P = (.1, .4, .3, .2), Q = (.6, .25, .1, .05)


def toy_token_law(
    rule: audit.Verify, target: tuple[float, ...], draft: tuple[float, ...]
) -> object:
    """Law of the first token emitted when one token is drafted; probabilities in order."""
    laws = TargetLaws(rolled(target, 0).log().repeat(2, 1), [Condition(SamplingParams())] * 2)
    law = DenseLaw(rolled(draft, 0))

    def first_token(draws: EnumeratedDraws) -> int:
        drafted = Draft((draws.draft(law.probs, 0, 0),), (law,))
        return rule(laws, 0, drafted, draws, 0).run(drafted)[0]

    emitted = enumerate_outcomes(first_token)
    return pytest.approx([emitted.get(token, 0.0) for token in range(len(target))], abs=1e-12)


def with_replacement(weights: audit.Weights) -> audit.Verify:
    return partial(by_position, replacement=weights)


ONE_TOKEN: dict[str, tuple[audit.Verify, tuple[float, ...]]] = {
    "right": (by_position, TOY_TARGET),
    "right, block": (by_block, TOY_TARGET),
    "always accept": (partial(by_position, accept=lambda p, q, x: 1.0), TOY_DRAFT),
    # min(P, Q) + .5 P
    "residual ignores the draft": (with_replacement(lambda p, q, x: p), (0.15, 0.45, 0.25, 0.15)),
    # Only 0 is ever refused: min(P, Q) + .5 (0, .4, .3, .2) / .9
    "only the refused": (
        with_replacement(audit.only_the_refused),
        (0.1, 0.25 + 2 / 9, 0.1 + 1.5 / 9, 0.05 + 1 / 9),
    ),
    "argmax": (
        partial(by_position, accept=audit.argmax_only, replacement=audit.the_argmax),
        (0, 1, 0, 0),
    ),
}


# case 7
@pytest.mark.parametrize("name", ONE_TOKEN)
def test_one_token_under_the_fault_by_hand(name: str) -> None:
    rule, law = ONE_TOKEN[name]
    assert toy_token_law(rule, TOY_TARGET, TOY_DRAFT) == list(law)


# case 3
def test_softmaxed_residuals_emit_what_the_target_cannot() -> None:
    """All of (0, 0, .5, .5) is refused; softmax of (.5, .5, 0, 0) gives 1 / (2 + 2 e^.5) = .19."""
    rule = with_replacement(lambda p, q, x: audit.residual(p, q, x).softmax(-1))
    share = 1 / (2 + 2 * torch.tensor(0.5).double().exp().item())
    law = toy_token_law(rule, (0.5, 0.5, 0, 0), (0, 0, 0.5, 0.5))
    assert law == [0.5 - share, 0.5 - share, share, share] and share == pytest.approx(
        0.1888, abs=1e-4
    )


# case 4
def test_a_greedy_draft_that_reports_its_law_takes_over() -> None:
    """Always 0 with q = .6, p = .5: accepted 5/6 of the time, and (p - q)+ = (0, .1) gives 1 else."""
    drafted = audit.most_probable_first(Draft((1,), (DenseLaw(rolled((0.6, 0.4), 0)),)))
    laws = TargetLaws(torch.zeros(2, 2).double(), [Condition(SamplingParams())] * 2)
    emitted = enumerate_outcomes(lambda d: by_position(laws, 0, drafted, d, 0).run(drafted)[0])
    assert emitted == pytest.approx({0: 5 / 6, 1: 1 / 6})


# case 16
def test_siblings_in_turn_by_hand() -> None:
    """p = (.5, .3, .2), children 0 and 1: .5, then .5 * .3 = .15, and 2 gets the .35 that is left."""
    tree = Draft.tree((0, 1), (-1, -1))
    logits = torch.tensor([[0.5, 0.3, 0.2]] * 3, dtype=torch.float64).log()
    laws = TargetLaws(logits, [Condition(SamplingParams())] * 3)
    emitted = enumerate_outcomes(
        lambda draws: audit.siblings_in_turn(laws, 0, tree, draws, 0).run(tree)[0]
    )
    assert emitted == pytest.approx({0: 0.5, 1: 0.15, 2: 0.35})


# case 8
def test_inclusive_coins_accept_what_is_impossible() -> None:
    """u = 0 comes once in 8; 0 <= 0 accepts, 0 < 0 does not."""
    wrong, right = audit.InclusiveCoins(0, "p", 0), audit.CoarseCoins(0, "p", 0)
    accepted = sum(wrong.coin(0.0, 0, position) for position in range(800))
    assert 60 < accepted < 140
    assert not any(right.coin(0.0, 0, position) for position in range(800))
