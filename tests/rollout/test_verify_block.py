"""Block verification beside the rule by positions: hand arithmetic, then expectations by enumeration
over the draws of the draft and the coins, on random pairs of target and draft."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch

import rollout.law
from rollout.conditions import Condition
from rollout.draft import POINT_MASS, DenseLaw, Draft, DraftLaw, SparseLaw
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes, total_variation
from rollout.errors import InvalidLogits
from rollout.law import TargetLaws
from rollout.sampling import SamplingParams
from rollout.streams import Draws, SeededDraws
from rollout.table_policy import Table, random_table
from rollout.verdict import Verdict
from rollout.verify import Rule, verify
from rollout.verify_block import _Block, verify_block
from rollout.verify_points import verify_points
from tests.rollout.engines import plain_law

V = 3
RULES: tuple[Rule, ...] = ("block", "position")
KINDS = ("dense", "weights", "sparse", "mixed")
START = 1
PLAIN = SamplingParams()
by_rule = pytest.mark.parametrize("rule", RULES)
by_kind = pytest.mark.parametrize("kind", KINDS)


def row(probs: Sequence[float]) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64)


def fixed(probs: Sequence[float]) -> Table:
    """The same law behind every prefix."""
    logits = row(probs).log()
    return lambda tokens: logits


def pair(seed: int, spread: float = 1.5) -> tuple[Table, Table]:
    """A target that sees two tokens and a draft that sees one."""
    return (
        random_table(V, depth=2, seed=1000 + seed, spread=spread),
        random_table(V, depth=1, seed=2000 + seed, spread=spread),
    )


def behind(target: Table, tokens: Sequence[int], sampling: SamplingParams = PLAIN) -> TargetLaws:
    """Laws behind a 0 and behind each token that follows."""
    path = (0, *tokens)
    logits = torch.stack([target(path[: end + 1]) for end in range(len(path))])
    return TargetLaws(logits, [Condition(sampling)] * len(path))


def law_at(kind: str, depth: int, q: torch.Tensor) -> DraftLaw:
    """Of the kind at this depth; a point mass for the mixed kind's last."""
    here = ("dense", "sparse", "point")[depth % 3] if kind == "mixed" else kind
    if here == "dense":
        return DenseLaw(q)
    if here == "weights":
        return DenseLaw(3 * q, 3.0)
    if here == "point":
        return POINT_MASS
    top = q.topk(2)
    return SparseLaw(top.indices, top.values / top.values.sum())


def drawn(draws: Draws, law: DraftLaw, q: torch.Tensor, position: int) -> int:
    if isinstance(law, DenseLaw):
        return draws.draft(law.probs, START, position)
    if isinstance(law, SparseLaw):
        return int(law.ids[draws.draft(law.probs, START, position)])
    return int(q.argmax())


def drafted(draws: Draws, draft_table: Table, length: int, kind: str = "dense") -> Draft:
    tokens: list[int] = []
    laws: list[DraftLaw] = []
    for depth in range(length):
        q = draft_table((0, *tokens)).softmax(-1)
        laws.append(law_at(kind, depth, q))
        tokens.append(drawn(draws, laws[-1], q, START + depth))
    return Draft(tuple(tokens), tuple(laws))


def one_round(
    rule: Rule, target: Table, draft_table: Table, length: int, draws: Draws, kind: str = "dense"
) -> tuple[Draft, Verdict]:
    draft = drafted(draws, draft_table, length, kind)
    return draft, verify(behind(target, draft.token_ids), 0, draft, draws, START, rule=rule)


class FirstOfAll:
    """Draws whose replacements are not enumerated: only the accepted length is looked at."""

    def __init__(self, draws: EnumeratedDraws) -> None:
        self.coin, self.draft = draws.coin, draws.draft

    def target(self, laws: TargetLaws, index: int, position: int) -> int:
        return laws.pick(index, 0.0)

    def correction(self, weights: torch.Tensor, start: int, position: int) -> int:
        return int(weights.argmax())

    def pit(self, position: int) -> float:
        return 0.5


def expected(value: Callable[[EnumeratedDraws], float]) -> float:
    """Mean over all draws and coins."""
    return sum(prob * outcome for outcome, prob in enumerate_outcomes(value).items())


def expected_len(rule: Rule, target: Table, draft_table: Table, length: int) -> float:
    return expected(
        lambda draws: float(
            one_round(rule, target, draft_table, length, FirstOfAll(draws))[1].accepted_len
        )
    )


Outcome = tuple[int, int]


def outcome(verdict: Verdict) -> Outcome:
    return verdict.accepted_len, verdict.next_token


class FixedUniforms(SeededDraws):
    """Every uniform is the same."""

    def __init__(self, value: float) -> None:
        self._value = value

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        return self._value


# ---- the toy of the paper -----------------------------------------------------------------

TOY_TARGET, TOY_DRAFT = fixed((1 / 3, 2 / 3)), fixed((2 / 3, 1 / 3))


def test_the_toy_accepts_10_9_by_positions_and_11_9_by_blocks() -> None:
    # by positions a = 1/3 + 1/3: 2/3 + 4/9. By blocks, X: q(X), then E[tau | X]:
    # 01: 2/9, 2;  00: 4/9, h_2 = 1/4, h_1 = 0: 1/2;  10: 2/9, h_2 = 1/2, h_1 = 1: 3/2;  11: 1/9, 2
    assert expected_len("position", TOY_TARGET, TOY_DRAFT, 2) == pytest.approx(10 / 9, abs=1e-12)
    assert expected_len("block", TOY_TARGET, TOY_DRAFT, 2) == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2.0**-53])
def test_a_later_position_makes_up_for_an_earlier_one(uniform: float) -> None:
    # X = 0, 1: r_1 = 1/2, Z_1 = (1/6 - 2/3)+ + (1/3 - 1/3)+ = 0, h_1 = 0; r_2 = min(1, 1/2 * 2) = 1
    draft = Draft((0, 1), (DenseLaw(row((2 / 3, 1 / 3))),) * 2)
    laws = behind(TOY_TARGET, draft.token_ids)
    block = _Block(laws, 0, draft)
    assert block.accept_prob(1) == pytest.approx(0, abs=1e-12)
    assert block.accept_prob(2) == 1.0
    verdict = verify(laws, 0, draft, FixedUniforms(uniform), START)
    assert (verdict.accepted, verdict.origin) == ((0, 1), "bonus")


def test_what_is_left_for_the_correction_is_chained() -> None:
    # r_1 = (.4/.8) = .5; R_1 = (.5 * (.4, .4, .2) - (.1, .2, .7))+ = (.1, 0, 0); Z_1 = .1;
    # h_1 = .1/(.1 + .5) = 1/6. By positions the residual would be (.3, .2, 0).
    q = (DenseLaw(row((0.8, 0.1, 0.1))), DenseLaw(row((0.1, 0.2, 0.7))))
    draft = Draft((0, 2), q)
    block = _Block(behind(fixed((0.4, 0.4, 0.2)), (0, 2)), 0, draft)
    assert block.excess(1).tolist() == pytest.approx([0.1, 0, 0], abs=1e-12)
    assert block.mass(1) == pytest.approx(0.1) and block.accept_prob(1) == pytest.approx(1 / 6)
    assert block.accept_prob(2) == pytest.approx(0.5 * 0.2 / 0.7)  # h_2 = r_2


def test_what_lies_behind_a_token_of_probability_0_is_not_worked_out() -> None:
    # top-k 1 leaves token 0 only: the draft of 1 is refused, and no filter runs behind it
    draft = Draft((1, 0, 0), (DenseLaw(row((0.2, 0.6, 0.2))),) * 3)
    laws = behind(fixed((0.5, 0.3, 0.2)), (1, 0, 0), SamplingParams(top_k=1))
    verdict = verify(laws, 0, draft, FixedUniforms(0.5), START)
    assert (verdict.accepted, verdict.next_token) == ((), 0)
    assert laws._due == {1, 2, 3}


# ---- never below the rule by positions ----------------------------------------------------


def test_blocks_never_accept_less_than_positions_and_often_more() -> None:
    """Exact, over random pairs that lie far apart and close together."""
    gains = [
        expected_len("block", *pair(seed, spread), 3) - expected_len("position", *pair(seed, spread), 3)
        for seed in range(8)
        for spread in (0.3, 1.5, 4.0)
    ]  # fmt: skip
    assert min(gains) > -1e-12
    assert sum(gain > 1e-3 for gain in gains) > 12 and max(gains) > 0.1


def test_drafts_of_one_token_gain_nothing() -> None:
    for seed in range(10):
        by_block, by_position = (expected_len(rule, *pair(seed), 1) for rule in RULES)
        assert by_block == pytest.approx(by_position, abs=1e-12)


@by_rule
@by_kind
@pytest.mark.parametrize("seed", range(2))
def test_what_is_emitted_has_the_target_law(rule: Rule, kind: str, seed: int) -> None:
    """A round of three drafted tokens, then plain draws up to four."""
    target, draft_table = pair(seed)

    def four(draws: EnumeratedDraws) -> tuple[int, ...]:
        draft, verdict = one_round(rule, target, draft_table, 3, draws, kind)
        run = verdict.run(draft)
        while len(run) < 4:
            run = (*run, draws.target(behind(target, run), len(run), START + len(run)))
        return run

    plain = plain_law(target, (0,), SamplingParams(max_new_tokens=4), V)
    assert total_variation(enumerate_outcomes(four), plain) < 1e-12


def test_on_point_masses_blocks_accept_what_the_cheap_path_accepts() -> None:
    """Joint law of accepted length and next token."""
    for seed in range(10):
        target, draft_table = pair(seed)
        draft = drafted(EnumeratedDraws(), draft_table, 3, "point")
        laws = behind(target, draft.token_ids)

        def by_block(draws: Draws, laws: TargetLaws = laws, draft: Draft = draft) -> Outcome:
            return outcome(verify_block(laws, 0, draft, draws, START, foretell=False))

        def cheaply(draws: Draws, laws: TargetLaws = laws, draft: Draft = draft) -> Outcome:
            return outcome(verify_points(laws, 0, draft, draws, START))

        one, other = enumerate_outcomes(by_block), enumerate_outcomes(cheaply)
        assert total_variation(one, other) < 1e-12


# ---- foretold -----------------------------------------------------------------------------

SHAPES = [(rule, kind, length) for rule in RULES for kind in KINDS for length in (1, 3)]
every_shape = pytest.mark.parametrize(("rule", "kind", "length"), SHAPES)


def difference(verdict: Verdict) -> float:
    assert verdict.foretold is not None
    return verdict.accepted_len - verdict.foretold.mean


def replacing(draws: EnumeratedDraws, kind: str) -> Draws:
    """Point masses are decided by the target's draw, so there it has to be enumerated."""
    return draws if kind == "mixed" else FirstOfAll(draws)


@every_shape
@pytest.mark.parametrize("seed", range(3))
def test_observed_minus_foretold_has_mean_zero(
    rule: Rule, kind: str, length: int, seed: int
) -> None:
    def value(draws: EnumeratedDraws) -> float:
        how = replacing(draws, kind)
        return difference(one_round(rule, *pair(seed), length, how, kind)[1])

    assert expected(value) == pytest.approx(0, abs=1e-12)


@every_shape
@pytest.mark.parametrize("seed", range(3))
def test_the_foretold_variance_bounds_that_of_the_difference(
    rule: Rule, kind: str, length: int, seed: int
) -> None:
    def excess(draws: EnumeratedDraws) -> float:
        how = replacing(draws, kind)
        verdict = one_round(rule, *pair(seed), length, how, kind)[1]
        assert verdict.foretold is not None
        return difference(verdict) ** 2 - verdict.foretold.variance

    assert expected(excess) < 1e-12


@by_rule
def test_the_foretold_mean_is_off_when_q_reported_is_not_q_drawn(rule: Rule) -> None:
    """Negative control: drawn at temperature 1, reported at 1/2."""
    for seed in range(4):
        target, draft_table = pair(seed)

        def value(draws: EnumeratedDraws, target: Table = target, q: Table = draft_table) -> float:
            draft = drafted(draws, q, 2)
            reported = tuple(
                DenseLaw((2 * q((0, *draft.token_ids[:depth]))).softmax(-1)) for depth in range(2)
            )
            laws = behind(target, draft.token_ids)
            misreported = Draft(draft.token_ids, reported)
            return difference(verify(laws, 0, misreported, FirstOfAll(draws), START, rule=rule))

        assert abs(expected(value)) > 0.01


@by_rule
def test_the_foretold_mean_is_off_when_everything_is_accepted(rule: Rule) -> None:
    """Negative control."""
    target, draft_table = pair(0)

    def value(draws: EnumeratedDraws) -> float:
        how = FirstOfAll(draws)
        how.coin = lambda *_: True
        return difference(one_round(rule, target, draft_table, 3, how)[1])

    assert expected(value) > 0.1


@by_rule
def test_nothing_is_foretold_unless_it_is_asked_for(rule: Rule) -> None:
    draft = drafted(SeededDraws(0, "p", 0), pair(1)[1], 3)
    laws = behind(pair(1)[0], draft.token_ids)
    with_it, without = (
        verify(laws, 0, draft, SeededDraws(0, "p", 0), START, rule=rule, foretell=foretell)
        for foretell in (True, False)
    )
    assert without.foretold is None and with_it.foretold is not None
    assert (with_it.accepted, with_it.next_token) == (without.accepted, without.next_token)


# ---- laziness -----------------------------------------------------------------------------


class CountedLaws(TargetLaws):
    """Counts how often a full row was worked out."""

    num_rows = 0

    def probs(self, index: int) -> torch.Tensor:
        self.num_rows += 1
        return super().probs(index)


def counted(target: Table, draft: Draft, sampling: SamplingParams = PLAIN) -> CountedLaws:
    path = (0, *draft.token_ids)
    logits = torch.stack([target(path[: end + 1]) for end in range(len(path))])
    return CountedLaws(logits, [Condition(sampling)] * len(path))


@by_rule
@by_kind
def test_a_draft_accepted_whole_asks_for_no_full_row(rule: Rule, kind: str) -> None:
    num_whole = 0
    for seed in range(40):
        draws = SeededDraws(seed, "p", 0)
        draft = drafted(draws, pair(seed, 0.3)[1], 3, kind)
        laws = counted(pair(seed, 0.3)[0], draft)
        verdict = verify(laws, 0, draft, draws, START, rule=rule, foretell=False)
        refused = verdict.origin == "correction"
        assert refused or laws.num_rows == 0
        num_whole += not refused
    assert num_whole > 5


def test_an_interior_mass_is_worked_out_only_when_all_later_coins_failed() -> None:
    # the last coin succeeds: nothing. It fails and the one before succeeds: one row for Z, one for
    # the correction that follows from it
    draft = Draft((0, 0, 0), (DenseLaw(row((0.8, 0.1, 0.1))),) * 3)
    target = fixed((0.7, 0.2, 0.1))
    for script, num_rows in (([True], 0), ([False, True], 2), ([False, False, True], 3)):
        answers = iter(script)

        class Scripted(SeededDraws):
            def coin(
                self, accept_prob: float, start: int, position: int, answers: object = answers
            ) -> bool:
                return next(answers)  # type: ignore[call-overload]

        laws = counted(target, draft)
        verdict = verify(laws, 0, draft, Scripted(0, "p", 0), START, foretell=False)
        assert verdict.accepted_len == 4 - len(script)
        assert laws.num_rows == num_rows


def test_positions_behind_a_refusal_are_never_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By positions and under filters: as many rows are filtered as verification looked at."""
    filtered: list[SamplingParams] = []
    really = rollout.law._filter

    def counting(weights: torch.Tensor, sampling: SamplingParams) -> None:
        filtered.append(sampling)
        really(weights, sampling)

    monkeypatch.setattr(rollout.law, "_filter", counting)
    lengths = set()
    for seed in range(20):
        filtered.clear()
        draws = SeededDraws(seed, "p", 0)
        draft = drafted(draws, pair(seed)[1], 4)
        laws = behind(pair(seed)[0], draft.token_ids, SamplingParams(top_k=2))
        verdict = verify(laws, 0, draft, draws, START, rule="position", foretell=False)
        assert len(filtered) == verdict.accepted_len + 1
        lengths.add(verdict.accepted_len)
    assert len(lengths) > 2


# ---- positions that cannot be passed ------------------------------------------------------


@by_rule
@pytest.mark.parametrize("depth", range(3))
def test_nothing_behind_a_token_without_target_mass_is_accepted(rule: Rule, depth: int) -> None:
    """Not even by u = 0; what stands behind it, NaN included, is not looked at."""
    logits = torch.zeros(4, V, dtype=torch.float64)
    logits[depth, 1] = -torch.inf
    logits[depth + 1 :] = torch.nan
    tokens = [0, 0, 0]
    tokens[depth] = 1
    draft = Draft(tuple(tokens), (DenseLaw(row((1 / 3,) * 3)),) * 3)
    laws = TargetLaws(logits, [Condition(PLAIN)] * 4)
    verdict = verify(laws, 0, draft, FixedUniforms(0.0), START, rule=rule)
    assert verdict.accepted_len == depth and verdict.next_token != 1


@by_rule
def test_a_position_without_a_law_raises_only_where_verification_gets_there(rule: Rule) -> None:
    logits = torch.zeros(3, V, dtype=torch.float64)
    logits[1] = torch.nan
    laws = TargetLaws(logits, [Condition(PLAIN)] * 3)
    draft = Draft((0, 0), (DenseLaw(row((0.8, 0.1, 0.1))),) * 2)
    refused = verify(laws, 0, draft, FixedUniforms(0.9), START, rule=rule)
    assert (refused.accepted_len, refused.origin) == (0, "correction")  # .9 > (1/3)/.8
    with pytest.raises(InvalidLogits):
        verify(laws, 0, draft, FixedUniforms(0.1), START, rule=rule)


@by_rule
def test_a_token_its_own_law_cannot_draw_ends_the_run(rule: Rule) -> None:
    draft = Draft((0, 1, 0), (DenseLaw(row((0.5, 0.5, 0))), DenseLaw(row((1, 0, 0))), POINT_MASS))
    laws = behind(fixed((0.4, 0.4, 0.2)), draft.token_ids)
    assert verify(laws, 0, draft, FixedUniforms(0.0), START, rule=rule).accepted_len == 1


# ---- numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_a_draft_law_equal_to_the_target_is_accepted_whole(uniform: float) -> None:
    # case 12, 512 tokens at once
    tokens = [0, 1, 2] * 170 + [0, 1]
    laws = behind(fixed((0.5, 0.3, 0.2)), tokens)
    q = DenseLaw(laws.probs(0))
    draft = Draft(tuple(tokens), (q,) * 512)
    verdict = verify(laws, 0, draft, FixedUniforms(uniform), START)
    assert (verdict.accepted_len, verdict.zero_residual) == (512, False)
    assert verdict.foretold and verdict.foretold.mean == pytest.approx(512)


def test_a_long_draft_against_its_law_does_not_underflow() -> None:
    """r_g = (1e-8)^600 is far below the smallest float; the first positions still count."""
    tokens = [0, *[1] * 600]
    q = (DenseLaw(row((0.5, 0.5, 0))), *(DenseLaw(row((0, 1 - 1e-9, 1e-9))),) * 600)
    laws = behind(fixed((0.5, 1e-8, 0.5 - 1e-8)), tokens)
    draft = Draft(tuple(tokens), q)
    block = _Block(laws, 0, draft)
    chances = [block.accept_prob(length) for length in range(1, 602)]
    assert all(0 <= chance <= 1 for chance in chances) and chances[0] == 1.0
    verdict = verify(laws, 0, draft, FixedUniforms(0.5), START)
    assert verdict.accepted_len == 1 and verdict.next_token in (0, 2)
    assert verdict.foretold and math.isfinite(verdict.foretold.mean + verdict.foretold.variance)


@pytest.mark.parametrize("tiny", [1e-300, 1e-30, 1e-12])
def test_tiny_probabilities_make_neither_nan_nor_a_negative_chance(tiny: float) -> None:
    for p, q in ((tiny, 0.5), (0.5, tiny), (tiny, tiny)):
        laws = behind(fixed((p, 1 - p, 0)), (0, 0))
        draft = Draft((0, 0), (DenseLaw(row((q, 1 - q, 0))),) * 2)
        block = _Block(laws, 0, draft)
        foretold = block.foretold()
        assert all(0 <= block.accept_prob(length) <= 1 for length in (1, 2))
        assert math.isfinite(foretold.mean) and foretold.variance >= 0


def test_chances_of_a_sparse_law_are_those_of_the_dense_one_it_abbreviates() -> None:
    tokens = (2, 0, 2)
    ids = torch.tensor([2, 0])
    target = pair(5)[0]
    sparse = Draft(tokens, (SparseLaw(ids, row((0.25, 0.75))),) * 3)
    dense = Draft(tokens, (DenseLaw(row((0.75, 0, 0.25))),) * 3)
    one, other = (_Block(behind(target, tokens), 0, draft) for draft in (sparse, dense))
    for length in range(3):
        assert one.mass(length) == pytest.approx(other.mass(length), abs=1e-12)
        assert one.excess(length).tolist() == pytest.approx(other.excess(length).tolist())
    assert one.foretold().mean == pytest.approx(other.foretold().mean)
