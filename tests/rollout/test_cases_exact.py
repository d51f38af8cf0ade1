"""Failure cases of accepting and replacing drafted tokens, through the whole engine.

Laws are enumerated (`rollout.enumerate`), so a case is decided to 1e-12; only noise that is used
twice cannot be seen that way and is drawn with seeds. Where a case names the numbers of its fault,
the fault is planted and must show them. Acceptance rates are of drafts of one token, where position-
wise and block verification are the same rule; laws are those of whole samples under both.

The toy pair has three possible corrections: with only one, noise that is used twice cannot be seen.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from proposers.history import HistoryProposer
from proposers.ngram import NgramProposer
from proposers.none import NoProposer
from rollout.draft import NO_DRAFT, POINT_MASS, DenseLaw, Draft, DraftLaw, PointMass, SparseLaw
from rollout.draft_len import FixedDraftLen
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes, total_variation
from rollout.errors import InvalidDraft
from rollout.native_engine import NativeEngine, seeded_draws
from rollout.policy import Window
from rollout.proposer import Proposer
from rollout.request import RolloutRequest
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import Draws, SeededDraws
from rollout.table_policy import Table, TablePolicy, random_table
from rollout.watch import FORETELL_EVERY
from tests.rollout.engines import ScriptedProposer, drawing_proposer, plain_law, request, run

Verification = Literal["block", "position"]
VERIFICATIONS: tuple[Verification, ...] = ("block", "position")
both_verifications = pytest.mark.parametrize("verification", VERIFICATIONS)

P = (0.10, 0.40, 0.30, 0.20)
Q = (0.60, 0.25, 0.10, 0.05)
# sum min(P, Q) = .10 + .25 + .10 + .05 = .50; (P - Q)+ = (0, .15, .20, .15); sum P Q = .20
SMALL_P, SMALL_Q = (0.1, 0.5, 0.4), (0.6, 0.3, 0.1)
# sum min = .1 + .3 + .1 = .50; (p - q)+ = (0, .2, .3); sum p q = .06 + .15 + .04 = .25
TOLERANCE = 1e-12
FALSE_ALARM_RATE = 1e-5
ALMOST_ONE = 1 - 2.0**-53
"""The largest uniform there is: accepted at it, accepted always."""
ONE = SamplingParams(max_new_tokens=2)
"""Room for a draft of one token and the token after it."""


# ---- engines over known laws --------------------------------------------------------------


def row_of(probs: Sequence[float]) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64)


def always(probs: Sequence[float]) -> Table:
    """The same law after any tokens."""
    logits = row_of(probs).log()
    return lambda tokens: logits


def once(probs: Sequence[float], prompt_len: int = 1) -> Table:
    """`probs` behind the prompt, then token 0 for ever: one decision to enumerate."""
    certain = row_of([1.0] + [0.0] * (len(probs) - 1)).log()
    logits = row_of(probs).log()
    return lambda tokens: logits if len(tokens) == prompt_len else certain


def build(
    table: Table,
    vocab_size: int,
    proposer: Proposer,
    verification: Verification,
    *,
    draft_len: int = 1,
    num_slots: int = 8,
    draws_for: Callable[[RolloutRequest], Draws] = seeded_draws,
) -> NativeEngine:
    engine = NativeEngine(
        TablePolicy(table, vocab_size=vocab_size, num_slots=num_slots),
        proposer,
        FixedDraftLen(draft_len),
        draws_for=draws_for,
        verification=verification,
    )
    engine.load(table, version=0, digest="table")
    return engine


def drafting(choose: Callable[[Row, int], tuple[int, DraftLaw]]) -> ScriptedProposer:
    """Drafts token by token: `choose` sees the row and the depth in the draft."""

    def draft(row: Row, max_len: int) -> Draft:
        pairs = [choose(row, depth) for depth in range(max_len)]
        return Draft(tuple(token for token, _ in pairs), tuple(law for _, law in pairs))

    return ScriptedProposer(draft)


def drawn(row: Row, depth: int, probs: Sequence[float]) -> int:
    """A token of `probs` by the row's draft stream."""
    start = len(row.token_ids)
    return row.draws.draft(row_of(probs), start, start + depth)


def from_q(kind: str, q: Sequence[float] = Q) -> ScriptedProposer:
    """Draws from q and hands over its law as a row, as a list of the ids it can draw, or not at all
    (`withheld`, a point mass); `mixed` takes them in turn."""
    backwards = row_of(q).nonzero()[:, 0].flip(0)
    kinds: dict[str, DraftLaw] = {
        "dense": DenseLaw(row_of(q)),
        "sparse": SparseLaw(backwards, row_of(q)[backwards]),
        "withheld": POINT_MASS,
    }

    def choose(row: Row, depth: int) -> tuple[int, DraftLaw]:
        here = list(kinds)[(len(row.token_ids) + depth) % 3] if kind == "mixed" else kind
        return drawn(row, depth, q), kinds[here]

    return drafting(choose)


def beside(proposer: ScriptedProposer, drafts: Callable[[Row], Draft | None]) -> ScriptedProposer:
    """Drafts of `proposer`, but for rows that have one of their own."""

    def draft(row: Row, max_len: int) -> Draft:
        own = drafts(row)
        return proposer._draft(row, max_len) if own is None else own.truncated(max_len)

    return ScriptedProposer(draft)


def always_draft(token: int, law: DraftLaw) -> ScriptedProposer:
    return drafting(lambda row, depth: (token, law))


Joint = dict[tuple[tuple[int, ...], ...], float]
Make = Callable[[Callable[[RolloutRequest], Draws]], NativeEngine]


def joint_law(make: Make, requests: Sequence[RolloutRequest]) -> tuple[Joint, list[float]]:
    """(law of all samples together, mean accepted tokens of each), enumerated."""

    def generate(draws: EnumeratedDraws) -> tuple[tuple[tuple[int, ...], int], ...]:
        samples = run(make(lambda _: draws), requests)
        ended = [samples[request.id] for request in requests]
        return tuple((sample.token_ids, sample.counters.accepted) for sample in ended)

    tokens: Joint = defaultdict(float)
    accepted = [0.0] * len(requests)
    for outcome, probability in enumerate_outcomes(generate).items():
        tokens[tuple(ids for ids, _ in outcome)] += probability
        for i, (_, num) in enumerate(outcome):
            accepted[i] += probability * num
    return dict(tokens), accepted


def product(*laws: dict[tuple[int, ...], float]) -> Joint:
    """The joint law of independent samples."""
    joint: Joint = {(): 1.0}
    for law in laws:
        joint = {(*ids, one): p * q for ids, p in joint.items() for one, q in law.items()}
    return joint


def first_token(
    table: Table, vocab_size: int, proposer: Proposer, verification: Verification
) -> tuple[list[float], float]:
    """(law of a token that was drafted for, acceptance rate), enumerated."""
    law, accepted = joint_law(
        lambda draws_for: build(table, vocab_size, proposer, verification, draws_for=draws_for),
        [request(sampling=ONE)],
    )
    cells = [0.0] * vocab_size
    for ((token, *_),), probability in law.items():
        cells[token] += probability
    return cells, accepted[0]


# ---- the toy ------------------------------------------------------------------------------


TOYS = {
    "one token": (1, P, Q),
    "two tokens": (2, SMALL_P, SMALL_Q),
    "two tokens of few ids": (2, SMALL_P, (0.7, 0.3, 0.0)),
}


@both_verifications
@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("kind", ["dense", "sparse", "mixed"])
def test_toy_drafts_emit_the_target_and_nothing_else(
    kind: str, toy: str, verification: Verification
) -> None:
    # case 1, case 7
    draft_len, p, q = TOYS[toy]
    table, sampling = always(p), SamplingParams(max_new_tokens=draft_len + 1)
    law, _ = joint_law(
        lambda draws_for: build(
            table, len(p), from_q(kind, q), verification, draft_len=draft_len, draws_for=draws_for
        ),
        [request(sampling=sampling)],
    )
    assert total_variation(law, product(plain_law(table, (0,), sampling, len(p)))) < TOLERANCE


@both_verifications
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_draft_judged_as_a_block_keeps_at_least_as_much(
    kind: str, verification: Verification
) -> None:
    """Sun et al., section 2: p = (1/3, 2/3), q = (2/3, 1/3), two tokens. Position by position
    2/3 + 4/9 = 10/9 are accepted; as a block 11/9."""
    table, drafts = always((1 / 3, 2 / 3)), from_q(kind, (2 / 3, 1 / 3))
    proposer = beside(drafts, lambda row: NO_DRAFT if row.num_generated else None)
    _, accepted = joint_law(
        lambda draws_for: build(table, 2, proposer, verification, draft_len=2, draws_for=draws_for),
        [request(sampling=SamplingParams(max_new_tokens=3))],
    )
    assert accepted[0] == pytest.approx({"position": 10 / 9, "block": 11 / 9}[verification])


@both_verifications
@pytest.mark.parametrize("kind,rate", [("dense", 0.5), ("sparse", 0.5), ("withheld", 0.2)])
def test_the_acceptance_rate_of_the_toy_is_that_of_theory(
    kind: str, rate: float, verification: Verification
) -> None:
    # case 7; case 14: without its law a sampled draft is a point mass, accepted with sum P Q
    cells, accepted = first_token(once(P), 4, from_q(kind), verification)
    assert cells == pytest.approx(P, abs=TOLERANCE)
    assert accepted == pytest.approx(rate, abs=TOLERANCE)


@both_verifications
def test_a_constant_coin_accepts_everything_and_emits_the_draft(
    verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of case 7."""
    monkeypatch.setattr(EnumeratedDraws, "coin", lambda self, prob, *_: prob > 0)
    cells, accepted = first_token(once(P), 4, from_q("dense"), verification)
    assert (cells, accepted) == (pytest.approx(Q, abs=TOLERANCE), pytest.approx(1.0))


# ---- noise that is used twice ---------------------------------------------------------------


class SharedRace(SeededDraws):
    """Fault: tokens are the winners of exponential races (min E / weight), and the race of the
    draft and that of its replacement are run with one noise a position."""

    def _race(self, weights: torch.Tensor, position: int) -> int:
        runners = [(token, weight) for token, weight in enumerate(weights.tolist()) if weight]
        return min(
            runners,
            key=lambda one: -math.log1p(-self.uniform(b"race", position, one[0])) / one[1],
        )[0]

    def draft(
        self, weights: torch.Tensor, start: int, position: int, ends: np.ndarray | None = None
    ) -> int:
        return self._race(weights, position)

    def correction(self, weights: torch.Tensor, start: int, position: int) -> int:
        return self._race(weights, position)


class SharedUniform(SeededDraws):
    """Fault: a draft token and its replacement are read off one uniform."""

    def correction(self, weights: torch.Tensor, start: int, position: int) -> int:
        return self.draft(weights, start, position)


def chi_square_tail(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chance of `law` being this far away. Outcomes expected fewer than five times are one cell."""
    num = sum(counts.values())
    rare = {outcome for outcome, p in law.items() if num * p < 5}
    cells = [({outcome}, p) for outcome, p in law.items() if outcome not in rare]
    cells += [(rare, sum(law[outcome] for outcome in rare))] if rare else []
    distance = sum(
        (sum(counts[o] for o in outcomes) - num * p) ** 2 / (num * p) for outcomes, p in cells
    )
    return float(chi2.sf(distance, len(cells) - 1))


def first_tokens(
    make_draws: Callable[[int], Draws], num_rows: int
) -> tuple[Counter[tuple[int, ...]], float]:
    """(tokens that were drafted for, acceptance rate) of seeded rows of the toy."""
    engine = build(
        once(P), 4, from_q("dense"), "block", num_slots=250,
        draws_for=lambda request: make_draws(request.sample_index),
    )  # fmt: skip
    requests = [request(str(i), sampling=ONE, sample_index=i) for i in range(num_rows)]
    counts = Counter(sample.token_ids[:1] for sample in run(engine, requests).values())
    return counts, engine.counters().accepted / engine.counters().verified


def test_seeded_rows_of_the_toy_have_the_target_law() -> None:
    # case 1, case 7: .04 of the rate is 5 standard deviations, false alarm 6e-7
    counts, accepted = first_tokens(lambda i: SeededDraws(1, "toy", i), 4000)
    assert chi_square_tail(counts, {(t,): p for t, p in enumerate(P)}) > FALSE_ALARM_RATE
    assert accepted == pytest.approx(0.5, abs=0.04)


def test_noise_that_drafts_and_replaces_shows_its_signature() -> None:
    """Negative control of case 1; acceptance stays healthy."""
    counts, accepted = first_tokens(lambda i: SharedRace(1, "toy", i), 4000)
    seen = [counts[(t,)] / 4000 for t in range(4)]
    assert seen == pytest.approx((0.10, 0.355, 0.318, 0.226), abs=0.02)
    assert chi_square_tail(counts, {(t,): p for t, p in enumerate(P)}) < FALSE_ALARM_RATE
    assert accepted == pytest.approx(0.5, abs=0.04)


def chance_of_seeded_rows(
    make_draws: Callable[[int], Draws], kind: str, verification: Verification
) -> float:
    """Of three tokens, drafted three at a time."""
    table = always(SMALL_P)
    engine = build(
        table, 3, from_q(kind, SMALL_Q), verification, draft_len=3, num_slots=250,
        draws_for=lambda request: make_draws(request.sample_index),
    )  # fmt: skip
    sampling = SamplingParams(max_new_tokens=4)
    requests = [request(str(i), sampling=sampling, sample_index=i) for i in range(500)]
    counts = Counter(sample.token_ids[:3] for sample in run(engine, requests).values())
    three = plain_law(table, (0,), SamplingParams(max_new_tokens=3), 3)
    return chi_square_tail(counts, three)


@both_verifications
@pytest.mark.parametrize("kind", ["dense", "mixed"])
def test_seeded_drafts_of_three_have_the_target_law(kind: str, verification: Verification) -> None:
    # case 1
    chance = chance_of_seeded_rows(lambda i: SeededDraws(1, "toy", i), kind, verification)
    assert chance > FALSE_ALARM_RATE


@both_verifications
@pytest.mark.parametrize("kind", ["dense", "mixed"])
def test_noise_used_twice_is_seen_in_drafts_of_three(kind: str, verification: Verification) -> None:
    """Negative control of case 1."""
    chance = chance_of_seeded_rows(lambda i: SharedUniform(1, "toy", i), kind, verification)
    assert chance < FALSE_ALARM_RATE


# ---- the residual ---------------------------------------------------------------------------


@both_verifications
@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("draft_len", [1, 2])
def test_a_replacement_has_target_mass(
    draft_len: int, kind: str, verification: Verification
) -> None:
    # case 3: every draft is refused
    halves, sampling = (0.5, 0.5, 0.0, 0.0), SamplingParams(max_new_tokens=3)
    law, accepted = joint_law(
        lambda draws_for: build(
            always(halves), 4, from_q(kind, halves[::-1]), verification,
            draft_len=draft_len, draws_for=draws_for,
        ),
        [request(sampling=sampling)],
    )  # fmt: skip
    assert {token for ((ids),) in law for token in ids} == {0, 1}
    assert total_variation(law, product(plain_law(always(halves), (0,), sampling, 4))) < TOLERANCE
    assert accepted == [0.0]


@both_verifications
def test_a_softmaxed_residual_shows_its_signature(
    verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of case 3: softmax of (0, .15, .2, .15), and of (.5, .5, 0, 0)."""
    monkeypatch.setattr(
        EnumeratedDraws, "correction", lambda self, weights, *_: self._token(weights.softmax(-1))
    )
    cells, _ = first_token(once(P), 4, from_q("dense"), verification)
    assert cells == pytest.approx((0.21, 0.378, 0.234, 0.178), abs=1e-3)
    halves = (0.5, 0.5, 0.0, 0.0)
    cells, _ = first_token(once(halves), 4, from_q("dense", halves[::-1]), verification)
    assert cells[2:] == pytest.approx([0.19, 0.19], abs=2e-3)


class FixedUniforms(SeededDraws):
    """Every uniform has the same value."""

    def __init__(self, value: float) -> None:
        self._value = value

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        return self._value


OUTSIDE: dict[str, DraftLaw] = {
    "dense": DenseLaw(row_of(Q)),
    "sparse": SparseLaw(torch.tensor([3, 1, 0]), row_of((0.5, 0.25, 0.25))),
    "point": POINT_MASS,
}


@both_verifications
@pytest.mark.parametrize("sampling", [{"top_k": 2}, {"temperature": 0.0}, {"top_p": 0.6}])
@pytest.mark.parametrize("token", [0, 3])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_token_without_target_mass_is_refused_when_every_uniform_is_zero(
    kind: str, depth: int, token: int, sampling: dict[str, float], verification: Verification
) -> None:
    # case 8: 1 and 2 are the two that filters keep; the draft before `depth` is what 0 accepts
    proposer = drafting(lambda row, at: (token if at == depth else 1, OUTSIDE[kind]))
    engine = build(
        always(P), 4, proposer, verification, draft_len=3, draws_for=lambda _: FixedUniforms(0.0)
    )
    params = SamplingParams(max_new_tokens=5, **sampling)  # type: ignore[arg-type]
    sample = run(engine, [request(sampling=params)])["r0"]
    assert set(sample.token_ids) <= {1, 2}
    assert sample.counters.corrections > 0


@both_verifications
@pytest.mark.parametrize("kind", ["dense", "sparse", "withheld"])
def test_a_token_of_tiny_target_mass_may_be_emitted_at_zero(
    kind: str, verification: Verification
) -> None:
    # case 8
    proposer = from_q(kind, (0.5, 0.5, 0.0))
    engine = build(
        always((1e-30, 0.5, 0.5)), 3, proposer, verification, draft_len=2,
        draws_for=lambda _: FixedUniforms(0.0),
    )  # fmt: skip
    sample = run(engine, [request(sampling=SamplingParams(max_new_tokens=3))])["r0"]
    assert (sample.token_ids, sample.finish_reason) == ((0, 0, 0), "length")
    assert sample.counters.corrections == 0


# ---- greedy and deterministic drafts ----------------------------------------------------------


@both_verifications
@pytest.mark.parametrize("target", [(0.5, 0.5), (0.55, 0.45)])
def test_a_deterministic_candidate_has_all_the_draft_mass(
    target: tuple[float, float], verification: Verification
) -> None:
    # case 4: .5/.5 with token 0 always drafted; case 16: .55/.45 with the top one as candidate
    cells, accepted = first_token(once(target), 2, always_draft(0, POINT_MASS), verification)
    assert cells == pytest.approx(target, abs=TOLERANCE)
    assert accepted == pytest.approx(target[0], abs=TOLERANCE)


@both_verifications
def test_a_greedy_draft_reported_as_sampled_is_biased(verification: Verification) -> None:
    """Negative control of case 4: .5/.6 of token 0 is kept, all else corrected to token 1."""
    proposer = always_draft(0, DenseLaw(row_of((0.6, 0.4))))
    cells, _ = first_token(once((0.5, 0.5)), 2, proposer, verification)
    assert cells[0] == pytest.approx(0.5 / 0.6, abs=TOLERANCE)


@both_verifications
def test_a_candidate_tested_as_if_sampled_turns_sampling_into_the_draft(
    verification: Verification,
) -> None:
    """Negative control of case 16: q = p, ratio 1, always token 0."""
    proposer = always_draft(0, DenseLaw(row_of((0.55, 0.45))))
    cells, accepted = first_token(once((0.55, 0.45)), 2, proposer, verification)
    assert (cells, accepted) == (pytest.approx([1, 0]), pytest.approx(1.0))


TREES = {
    "one": Draft.tree((0,), (-1,)),
    "two": Draft.tree((2, 0), (-1, -1)),
    "all": Draft.tree((3, 1, 0, 2), (-1, -1, -1, -1)),
    "two levels": Draft.tree((1, 0, 2), (-1, 0, 0)),
    "uneven": Draft.tree((0, 1, 3, 0, 2), (-1, 0, -1, 1, 2)),
}


@both_verifications
@pytest.mark.parametrize("name", TREES)
def test_refused_candidates_are_out_of_the_law_of_the_next(
    name: str, verification: Verification
) -> None:
    # case 16: several candidates at a position, each with q = 1; together they are taken with p(S)
    sampling = SamplingParams(max_new_tokens=3)
    proposer = ScriptedProposer(lambda row, n: TREES[name])
    law, _ = joint_law(
        lambda draws_for: build(
            always(P), 4, proposer, verification, draft_len=5, draws_for=draws_for
        ),
        [request(sampling=sampling)],
    )
    assert total_variation(law, product(plain_law(always(P), (0,), sampling, 4))) < TOLERANCE


def test_several_candidates_are_accepted_with_their_mass_together() -> None:
    # case 16: p(2) + p(0) = .40
    proposer = ScriptedProposer(lambda row, n: TREES["two"])
    law, accepted = joint_law(
        lambda draws_for: build(once(P), 4, proposer, "block", draft_len=2, draws_for=draws_for),
        [request(sampling=SamplingParams(max_new_tokens=3))],
    )
    assert len(law) == 4
    assert accepted == pytest.approx([0.40])


# ---- draft laws that are broken or missing ------------------------------------------------------

NAN = float("nan")
BROKEN: dict[str, Draft] = {
    "all NaN": Draft((0,), (DenseLaw(torch.full((4,), NAN)),)),
    "one NaN": Draft((0,), (DenseLaw(row_of((0.5, NAN, 0.25, 0.25))),)),
    "NaN in a list": Draft((0,), (SparseLaw(torch.tensor([0, 1]), row_of((NAN, 1.0))),)),
    "infinite": Draft((0,), (DenseLaw(row_of((torch.inf, 0, 0, 0))),)),
    "NaN behind a good one": Draft((1, 0), (POINT_MASS, DenseLaw(torch.full((4,), NAN)))),
    "a column": Draft((0,), (DenseLaw(row_of(Q)[:, None]),)),
    "a list without a law": Draft((0,), (SparseLaw(torch.tensor([0, 1]), row_of((1.0,))),)),
    "a list of no integers": Draft((0,), (SparseLaw(row_of((0, 1)), row_of((0.5, 0.5))),)),
    "an empty list": Draft((0,), (SparseLaw(torch.tensor([], dtype=torch.int64), row_of(())),)),
    "missing": Draft((0,), (None,)),  # type: ignore[arg-type]
    "sampled siblings": Draft((0, 1), (DenseLaw(row_of(Q)),) * 2, (-1, -1)),
}


@both_verifications
@pytest.mark.parametrize("num_good", [0, 2])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_draft_law_ends_its_row_by_name_and_no_other(
    name: str, num_good: int, verification: Verification
) -> None:
    # case 10: the target row is (.03, .97, 0, 0), token 0 is drafted; case 15
    table, good = always((0.03, 0.97, 0.0, 0.0)), from_q("mixed")
    proposer = beside(
        good,
        lambda row: (
            BROKEN[name] if row.request.id == "broken" and row.num_generated >= num_good else None
        ),
    )
    samplings = {"greedy": SamplingParams(temperature=0, max_new_tokens=6)}
    requests = [
        request(n, sampling=samplings.get(n, SamplingParams(max_new_tokens=9)))
        for n in ("first", "broken", "greedy", "last", "later")
    ]
    engine = build(table, 4, proposer, verification, draft_len=2, num_slots=4)
    samples = run(engine, requests)
    alone = run(
        build(table, 4, good, verification, draft_len=2),
        [one for one in requests if one.id != "broken"],
    )
    broken = samples.pop("broken")
    assert broken.finish_reason == "error"
    assert "law" in broken.finish_detail or "sampled" in broken.finish_detail
    assert num_good <= len(broken.token_ids) < 9
    assert {n: s.token_ids for n, s in samples.items()} == {
        n: s.token_ids for n, s in alone.items()
    }


MIDDLE: dict[str, Callable[[Row], Draft]] = {
    "missing": lambda row: BROKEN["missing"],
    "withheld": lambda row: Draft.of_points((drawn(row, 0, SMALL_Q),)),
    "no draft": lambda row: NO_DRAFT,
}


@both_verifications
@pytest.mark.parametrize("middle", MIDDLE)
def test_a_row_without_its_draft_law_changes_no_rule_of_the_others(
    middle: str, verification: Verification
) -> None:
    # case 15: the outer two keep .50; a point mass in the middle .25; no draft needs no law
    table = once(SMALL_P)
    outer = {"a": from_q("dense", SMALL_Q)._draft, "c": from_q("sparse", SMALL_Q)._draft}
    proposer = ScriptedProposer(
        lambda row, n: (
            MIDDLE[middle](row) if row.request.id == "b" else outer[row.request.id](row, n)
        )
    )
    law, accepted = joint_law(
        lambda draws_for: build(table, 3, proposer, verification, draws_for=draws_for),
        [request(n, sampling=ONE) for n in "abc"],
    )
    plain = plain_law(table, (0,), ONE, 3)
    ended: dict[tuple[int, ...], float] = {(): 1.0} if middle == "missing" else plain
    assert total_variation(law, product(plain, ended, plain)) < TOLERANCE
    assert accepted == pytest.approx([0.5, 0.25 if middle == "withheld" else 0.0, 0.5])


@both_verifications
@pytest.mark.parametrize("kind,rate", [("dense", 0.5), ("sparse", 0.5), ("withheld", 0.2)])
def test_the_counters_say_which_rule_was_used(
    kind: str, rate: float, verification: Verification
) -> None:
    # case 14: what is foretold is the rate of the rule; the prompt's length makes it foretold
    def foretold(draws: EnumeratedDraws) -> tuple[int, int, float]:
        table = once(P, prompt_len=FORETELL_EVERY)
        engine = build(table, 4, from_q(kind), verification, draws_for=lambda _: draws)
        counters = run(engine, [request(prompt=(0,) * FORETELL_EVERY, sampling=ONE)])["r0"].counters
        return counters.foretold_reached, counters.foretold_accepted, counters.expected_accepted

    law = enumerate_outcomes(foretold)
    assert {reached for reached, _, _ in law} == {1}
    assert sum(p * accepted for (_, accepted, _), p in law.items()) == pytest.approx(rate)
    assert sum(p * expected for (_, _, expected), p in law.items()) == pytest.approx(rate)


def test_a_sampled_token_cannot_be_handed_over_without_saying_how() -> None:
    # case 14: a point mass is never what is left when the law is forgotten
    with pytest.raises(InvalidDraft, match="2 tokens with 1 laws: need one each"):
        Draft((0, 1), (DenseLaw(row_of(Q)),))


# ---- a draft law equal to the target ------------------------------------------------------------


class LastUniform(SeededDraws):
    """Every coin falls at the largest uniform; everything else is drawn as ever."""

    def coin(self, accept_prob: float, start: int, position: int) -> bool:
        return accept_prob > ALMOST_ONE


@both_verifications
@pytest.mark.parametrize("draft_len", [1, 4, 8])
@pytest.mark.parametrize("kind", ["dense", "sparse", "point", "mixed"])
def test_a_cold_peak_is_accepted_whole_and_needs_no_residual(
    kind: str, draft_len: int, verification: Verification
) -> None:
    # case 11: T = .002, float32 logits; (37 + 15) / .002 = 26,000, so exp underflows to 0
    logits = torch.full((300,), -15.0)
    logits[7] = 37.0
    engine = build(
        lambda tokens: logits, 300, drawing_proposer(kind, lambda tokens: logits / 0.002),
        verification, draft_len=draft_len, draws_for=lambda _: LastUniform(0, "p", 0),
    )  # fmt: skip
    sample = run(engine, [request(sampling=SamplingParams(temperature=0.002, max_new_tokens=20))])
    counters = sample["r0"].counters
    assert sample["r0"].token_ids == (7,) * 20
    assert sample["r0"].logprobs == (0.0,) * 20  # probability exactly 1
    assert counters.accepted == counters.verified > 0
    assert counters.foretold_accepted == counters.expected_accepted
    assert (counters.corrections, counters.zero_residual_draws) == (0, 0)


HALVING = (0.25, 0.5, 0.25, 0.0)
"""Powers of two: the engine's law is this to the last bit."""


@both_verifications
@pytest.mark.parametrize("draft_len", [1, 3, 8])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_draft_law_equal_to_the_target_is_never_refused(
    kind: str, draft_len: int, verification: Verification
) -> None:
    # case 12: at the largest uniform, hence in any number of draws
    engine = build(
        always(HALVING), 4, from_q(kind, HALVING), verification, draft_len=draft_len,
        draws_for=lambda request: LastUniform(0, "p", request.sample_index),
    )  # fmt: skip
    requests = [
        request(str(i), sampling=SamplingParams(max_new_tokens=40), sample_index=i)
        for i in range(8)
    ]
    run(engine, requests)
    counters = engine.counters()
    assert counters.accepted == counters.verified > 0
    assert (counters.corrections, counters.zero_residual_draws) == (0, 0)


@both_verifications
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_residual_without_mass_draws_from_the_target_and_is_counted(
    kind: str, verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case 12: a refusal is forced; a uniform draw would give 3 a fourth
    monkeypatch.setattr(EnumeratedDraws, "coin", lambda *_: False)

    def generate(draws: EnumeratedDraws) -> tuple[tuple[int, ...], int]:
        proposer = from_q(kind, HALVING)
        engine = build(once(HALVING), 4, proposer, verification, draws_for=lambda _: draws)
        sample = run(engine, [request(sampling=ONE)])["r0"]
        return sample.token_ids, sample.counters.zero_residual_draws

    law = enumerate_outcomes(generate)
    assert law == pytest.approx({((t, 0), 1): HALVING[t] for t in range(3)}, abs=TOLERANCE)


# ---- the law that was drawn from is the law that is verified ------------------------------------

V = 3
TARGET = random_table(V, depth=2, seed=31)
DRAFT = random_table(V, depth=1, seed=32)
KINDS = ("dense", "sparse", "point", "mixed")


def numbers(draft: Draft) -> list[list[float]]:
    """Every number of a draft's laws."""
    return [[] if isinstance(law, PointMass) else law.probs.tolist() for law in draft.laws]


class Watching(ScriptedProposer):
    """Copies every law it hands over and looks again when the round is over."""

    def __init__(self, draft: Callable[[Row, int], Draft]) -> None:
        super().__init__(draft)
        self.num_laws = self.num_changed = 0
        self._handed_over: list[tuple[Draft, list[list[float]]]] = []

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        drafts = super().propose(rows, max_lens)
        self._handed_over = [(draft, numbers(draft)) for draft in drafts]
        return drafts

    def observe(self, rows: Sequence[Row]) -> None:
        for draft, before in self._handed_over:
            self.num_laws += len(draft)
            self.num_changed += numbers(draft) != before


@both_verifications
@pytest.mark.parametrize("kind", KINDS)
def test_draft_laws_are_the_same_after_verification_as_when_drafted(
    kind: str, verification: Verification
) -> None:
    # case 18
    watching = Watching(drawing_proposer(kind, DRAFT)._draft)
    engine = build(TARGET, V, watching, verification, draft_len=3)
    run(engine, [request(n, sampling=SamplingParams(max_new_tokens=20)) for n in "abc"])
    assert watching.num_laws > 30
    assert watching.num_changed == 0


def noisy(probs: torch.Tensor) -> None:
    """Fault: the buffer that was drawn from is divided by noise in place."""
    probs /= row_of((0.5, 2.0, 1.0, 0.25))


@both_verifications
def test_a_buffer_changed_after_the_draw_is_seen(
    verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of case 18: changed while the target is scored, and seen in the law too."""
    buffer = row_of(Q)
    score = TablePolicy.score

    def score_and_spoil(self: TablePolicy, windows: Sequence[Window]) -> torch.Tensor:
        noisy(buffer)
        return score(self, windows)

    def draft(row: Row, max_len: int) -> Draft:
        buffer.copy_(row_of(Q))
        return Draft((drawn(row, 0, Q),), (DenseLaw(buffer),))

    monkeypatch.setattr(TablePolicy, "score", score_and_spoil)
    watching = Watching(draft)
    cells, _ = first_token(once(P), 4, watching, verification)
    assert watching.num_changed > 0
    assert max(abs(got - p) for got, p in zip(cells, P)) > 0.02


@both_verifications
def test_a_buffer_that_no_longer_sums_to_one_is_refused(verification: Verification) -> None:
    # case 18: rows sum to 1 within 1e-5
    def draft(row: Row, max_len: int) -> Draft:
        token, buffer = drawn(row, 0, Q), row_of(Q)
        noisy(buffer)
        return Draft((token,), (DenseLaw(buffer),))

    sample = run(build(once(P), 4, ScriptedProposer(draft), verification), [request()])["r0"]
    assert sample.finish_reason == "error" and "sums to" in sample.finish_detail


# ---- kinds: mixed batches and every proposer ----------------------------------------------------

BATCH = {
    "greedy": SamplingParams(max_new_tokens=2, temperature=0),
    "sampled": SamplingParams(max_new_tokens=2),
    "filtered": SamplingParams(max_new_tokens=2, temperature=1.5, top_k=2),
}


@both_verifications
@pytest.mark.parametrize("turn", range(3))
def test_rows_of_every_draft_law_in_one_batch_keep_their_own_laws(
    turn: int, verification: Verification
) -> None:
    """Every draft law beside every other, each once with greedy, sampled and filtered rows."""
    kinds = dict(zip(BATCH, (*("dense", "sparse", "withheld")[turn:], "dense", "sparse")))
    proposers = {name: from_q(kind, SMALL_Q) for name, kind in kinds.items()}
    proposer = ScriptedProposer(lambda row, n: proposers[row.request.id]._draft(row, n))
    table = once(SMALL_P)
    law, _ = joint_law(
        lambda draws_for: build(table, 3, proposer, verification, draws_for=draws_for),
        [request(name, sampling=sampling) for name, sampling in BATCH.items()],
    )
    alone = [plain_law(table, (0,), sampling, 3) for sampling in BATCH.values()]
    assert total_variation(law, product(*alone)) < TOLERANCE


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "none": NoProposer,
    "ngram": lambda: NgramProposer(min_match=1, max_match=2),
    "history": HistoryProposer,
    "history counts": lambda: HistoryProposer(draw="counts"),
}
DETERMINISTIC = ("none", "ngram", "history")
COINS = random_table(2, depth=3, seed=33)
PAIRS = {
    "both sampled": (1.0, 1.0),
    "greedy beside sampled": (0.0, 1.0),
    "sampled beside greedy": (0.7, 0.0),
    "both greedy": (0.0, 0.0),
}


@both_verifications
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", PROPOSERS)
def test_every_proposer_leaves_the_joint_law_of_two_rows_alone(
    name: str, pair: str, at_once: bool, verification: Verification
) -> None:
    """Two rollouts of one prompt, side by side or one after the other in one slot; history drafts
    each from the other."""
    samplings = [SamplingParams(max_new_tokens=3, temperature=t) for t in PAIRS[pair]]
    prompt = (0, 1, 0)
    law, _ = joint_law(
        lambda draws_for: build(
            COINS, 2, PROPOSERS[name](), verification,
            draft_len=2, num_slots=2 if at_once else 1, draws_for=draws_for,
        ),
        [
            request(n, prompt, s, prompt_id="p", sample_index=i)
            for i, (n, s) in enumerate(zip("ab", samplings))
        ],
    )  # fmt: skip
    alone = [plain_law(COINS, prompt, sampling, 2) for sampling in samplings]
    assert total_variation(law, product(*alone)) < TOLERANCE


class Reported(NoProposer):
    """Another proposer, with the set of laws it handed over."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self.laws: set[DraftLaw] = set()

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        drafts = self._inner.propose(rows, max_lens)
        self.laws |= {law for draft in drafts for law in draft.laws}
        return drafts

    def observe(self, rows: Sequence[Row]) -> None:
        self._inner.observe(rows)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_proposers_report_point_masses_and_change_no_token(
    name: str, temperature: float
) -> None:
    # case 4, case 16: uniform for uniform the tokens of plain decoding, under both verifications
    sampling = SamplingParams(temperature=temperature, max_new_tokens=30)
    requests = [request(str(i), sampling=sampling, prompt_id="p", sample_index=i) for i in range(6)]
    plain = run(build(TARGET, V, NoProposer(), "position", draft_len=0), requests)
    for verification in VERIFICATIONS:
        watching = Reported(PROPOSERS[name]())
        samples = run(build(TARGET, V, watching, verification, draft_len=3), requests)
        assert watching.laws <= {POINT_MASS}
        assert bool(watching.laws) == (name != "none")
        assert {n: s.token_ids for n, s in samples.items()} == {
            n: s.token_ids for n, s in plain.items()
        }
