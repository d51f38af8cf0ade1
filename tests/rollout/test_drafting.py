"""A draft being made: what it records is what it drew from, and it cannot be shortened."""

from collections.abc import Callable, Sequence

import pytest
import torch

from rollout.conditions import Condition
from rollout.draft import POINT_MASS, DenseLaw, Draft, SparseLaw, check_draft
from rollout.drafting import Drafting, sparse_law
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes, total_variation
from rollout.law import TargetLaws, pick_from
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import Draws, SeededDraws
from rollout.table_policy import random_table
from rollout.verify import Rule
from tests.rollout.engines import ScriptedProposer, plain_law, request, run, table_engine

V = 3
TARGET, DRAFT = random_table(V, depth=2, seed=1), random_table(V, depth=1, seed=2)
LAW = DenseLaw(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))
FEW = SparseLaw(torch.tensor([7, 4]), torch.tensor([0.25, 0.75], dtype=torch.float64))


def row(draws: Draws | None = None, generated: Sequence[int] = ()) -> Row:
    made = Row(request(prompt=(0, 1)), draws or SeededDraws(0, "p", 0), context_len=64)
    made.token_ids += generated
    return made


# ---- the law it records -------------------------------------------------------------------


def test_the_law_that_is_recorded_is_the_one_that_was_drawn_from() -> None:
    """The very object, so nothing can come between."""
    drafting = Drafting(row(), 3)
    drafting.sample(LAW)
    drafting.point(2)
    drafting.sample(FEW)
    draft = drafting.done()
    assert draft.laws[0] is LAW and draft.laws[1] is POINT_MASS and draft.laws[2] is FEW
    assert draft.token_ids[1] == 2 and draft.token_ids[2] in (7, 4)


@pytest.mark.parametrize("law", [LAW, FEW])
def test_tokens_are_drawn_with_the_probabilities_of_the_law(law: DenseLaw | SparseLaw) -> None:
    def second(draws: EnumeratedDraws) -> int:
        drafting = Drafting(row(draws), 2)
        drafting.point(1)
        return drafting.sample(law)

    ids = law.ids.tolist() if isinstance(law, SparseLaw) else range(V)
    assert enumerate_outcomes(second) == pytest.approx(dict(zip(ids, law.probs.tolist())))


def test_tokens_are_drawn_by_the_rows_own_stream_for_the_round_and_position() -> None:
    draws = SeededDraws(5, "p", 2)
    drafting = Drafting(row(draws, generated=(2, 2, 0)), 4)
    drawn = [drafting.sample(LAW) for _ in range(4)]
    uniforms = [draws.uniform(b"draft", 5, 5 + depth) for depth in range(4)]
    assert drawn == [pick_from(LAW.probs, u) for u in uniforms]
    assert list(drafting.token_ids) == drawn


def test_two_rounds_at_different_places_draw_with_different_uniforms() -> None:
    wide = DenseLaw(torch.full((1000,), 0.001, dtype=torch.float64))
    one, other = (Drafting(row(generated=[0] * n), 3) for n in (0, 1))
    drawn = [drafting.sample(wide) for drafting in (one, other) for _ in range(3)]
    assert len(set(drawn)) == 6


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7, top_k=5)])
def test_a_draw_from_a_models_law_records_that_law(sampling: SamplingParams) -> None:
    logits = random_table(700, depth=1, seed=3)((0,))[None]
    laws, draws = TargetLaws(logits, [Condition(sampling)]), SeededDraws(0, "p", 0)
    drafting = Drafting(row(draws), 200)
    drawn = [drafting.sample_at(laws, 0) for _ in range(200)]
    uniforms = [draws.uniform(b"draft", 2, 2 + depth) for depth in range(200)]
    probs = laws.probs(0)
    assert drawn == [pick_from(probs, u) for u in uniforms]
    draft = check_draft(drafting.done(), 700)
    assert list(draft.token_ids) == drawn
    assert all(isinstance(law, DenseLaw) and torch.equal(law.probs, probs) for law in draft.laws)


def test_a_draw_from_a_models_law_has_its_probabilities() -> None:
    laws = TargetLaws(TARGET((0, 1))[None], [Condition(SamplingParams())])
    law = enumerate_outcomes(lambda draws: Drafting(row(draws), 1).sample_at(laws, 0))
    assert law == pytest.approx(dict(enumerate(laws.probs(0).tolist())))


def test_weights_become_a_law_over_their_ids_in_order() -> None:
    law = sparse_law({9: 3.0, 2: 1.0})
    assert (law.ids.tolist(), law.probs.tolist()) == ([9, 2], [0.75, 0.25])
    assert law.probs.dtype == torch.float64
    check_draft(Draft((2,), (law,)), 10)


# ---- it only grows ------------------------------------------------------------------------


def test_a_draft_can_be_grown_and_finished_and_nothing_else() -> None:
    public = {name for name in dir(Drafting) if not name.startswith("_")}
    assert public == {"room", "token_ids", "point", "points", "sample", "sample_at", "done"}
    drafting = Drafting(row(), 2)
    for name in ("room", "token_ids"):
        with pytest.raises(AttributeError):
            setattr(drafting, name, ())
    assert isinstance(drafting.token_ids, tuple)


def test_points_at_once_are_points_one_by_one() -> None:
    at_once, one_by_one = Drafting(row(), 3), Drafting(row(), 3)
    at_once.points([4, 5], [0.5, 0.25])
    for token, chance in ((4, 0.5), (5, 0.25)):
        one_by_one.point(token, chance)
    assert at_once.done() == one_by_one.done()
    for tokens, chances in (([6, 7], [0.5, 0.5]), ([6], [])):
        with pytest.raises(AssertionError, match="one chance each"):
            at_once.points(tokens, chances)
    assert len(at_once.done()) == 2


def test_what_was_drawn_stays_whatever_comes_after() -> None:
    drafting, lengths = Drafting(row(), 4), []
    before: tuple[int, ...] = ()
    for _ in range(4):
        lengths.append((drafting.room, len(drafting.done())))
        drafting.sample(LAW)
        assert drafting.token_ids[:-1] == before
        before = drafting.token_ids
    assert lengths == [(4, 0), (3, 1), (2, 2), (1, 3)] and drafting.room == 0


def test_a_finished_draft_does_not_change_when_the_next_token_is_drawn() -> None:
    drafting = Drafting(row(), 2)
    drafting.point(1)
    done = drafting.done()
    drafting.point(2)
    assert done == Draft.of_points((1,)) and drafting.done() == Draft.of_points((1, 2))


GROW: dict[str, Callable[[Drafting], object]] = {
    "point": lambda drafting: drafting.point(0),
    "sample": lambda drafting: drafting.sample(LAW),
}


@pytest.mark.parametrize("how", GROW)
@pytest.mark.parametrize("max_len", [0, 2])
def test_a_token_more_than_there_is_room_for_is_an_assertion(how: str, max_len: int) -> None:
    drafting = Drafting(row(), max_len)
    for _ in range(max_len):
        drafting.point(1)
    with pytest.raises(AssertionError, match="ask `room` first"):
        GROW[how](drafting)
    assert len(drafting.done()) == max_len


def test_making_a_draft_leaves_the_row_alone() -> None:
    one = row(generated=(2,))
    drafting = Drafting(one, 3)
    drafting.sample(LAW)
    drafting.done()
    assert one.token_ids == [0, 1, 2] and one.counters.drafted == 0


# ---- in an engine -------------------------------------------------------------------------


def stopping(row: Row, max_len: int) -> Draft:
    """Goes on until a drawn token had less than half; that token is kept."""
    drafting, chance = Drafting(row, max_len), 1.0
    while drafting.room and chance >= 0.5:
        probs = DRAFT((*row.token_ids, *drafting.token_ids)).softmax(-1)
        chance = float(probs[drafting.sample(DenseLaw(probs))])
    return drafting.done()


def dropping(row: Row, max_len: int) -> Draft:
    """Fault: the same, but the unlikely token is taken back, past the interface."""
    made = stopping(row, max_len)
    (law,) = made.laws[-1:]
    assert isinstance(law, DenseLaw)
    return made.truncated(len(made) - (float(law.probs[made.token_ids[-1]]) < 0.5))


def error(draft: Callable[[Row, int], Draft], rule: Rule) -> float:
    sampling = SamplingParams(max_new_tokens=3)

    def generate(draws: EnumeratedDraws) -> tuple[int, ...]:
        engine = table_engine(
            TARGET, V, proposer=ScriptedProposer(draft), draft_len=2, verification=rule,
            draws_for=lambda _: draws,
        )  # fmt: skip
        return run(engine, [request(sampling=sampling)])["r0"].token_ids

    plain = plain_law(TARGET, (0,), sampling, V)
    return total_variation(enumerate_outcomes(generate), plain)


@pytest.mark.parametrize("rule", ["block", "position"])
def test_stopping_behind_an_unlikely_token_is_exact_and_dropping_it_is_not(rule: Rule) -> None:
    assert error(stopping, rule) < 1e-12
    assert error(dropping, rule) > 0.01
