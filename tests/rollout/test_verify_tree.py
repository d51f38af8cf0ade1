"""Trees of point masses: the walk through one, the tree that is grown, and engines that branch."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch

from proposers.history import HistoryProposer
from proposers.none import NoProposer
from rollout.conditions import Condition
from rollout.draft import NO_DRAFT, DenseLaw, Draft, check_draft
from rollout.draft_tree import grow_tree, most_probable
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes
from rollout.errors import InvalidDraft, InvalidLogits
from rollout.grammar import Grammar
from rollout.law import TargetLaws
from rollout.native_engine import NativeEngine
from rollout.proposer import Proposer
from rollout.request import RolloutSample
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import Draws, SeededDraws
from rollout.table_policy import Table, random_table
from rollout.verdict import Foretold, Verdict
from rollout.verify import verify
from tests.rollout.engines import TableTrees, grammar_named, request, run, table_engine

V = 3
START = 5
PLAIN = SamplingParams()


class FixedUniforms(SeededDraws):
    """The uniforms of the positions START, START + 1, ..."""

    def __init__(self, *values: float) -> None:
        self._values = values

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        return self._values[position - START]


def laws_of(*positions: Sequence[float]) -> TargetLaws:
    logits = torch.tensor(positions, dtype=torch.float64).log()
    return TargetLaws(logits, [Condition(PLAIN)] * len(positions))


# ---- the walk -----------------------------------------------------------------------------

#  root - 0 - 2      behind the root .5 .3 .2
#     `-- 1          behind 0 .1 .2 .7, behind 1 .6 .4 0, behind 0 2 .25 .25 .5
TREE = Draft.tree((0, 1, 2), (-1, -1, 0))
LAWS = ((0.5, 0.3, 0.2), (0.1, 0.2, 0.7), (0.6, 0.4, 0.0), (0.25, 0.25, 0.5))


@pytest.mark.parametrize(
    ("uniforms", "verdict"),
    [
        # cells of the root end at .5 .8 1, behind 0 at .1 .3 1, behind 0 2 at .25 .5 1, behind 1 .6 1
        ((0.49, 0.31, 0.3), Verdict((0, 2), 1, "bonus", Foretold(1.5, 0.37), 2)),
        ((0.49, 0.29), Verdict((0,), 1, "correction", Foretold(1.5, 0.37), 2)),
        ((0.79, 0.59), Verdict((1,), 0, "bonus", Foretold(0.8, 0.16), 1)),
        ((0.81,), Verdict((), 2, "correction", Foretold(0.8, 0.16), 1)),
    ],
)
def test_the_walk_goes_on_while_the_token_drawn_is_a_child(
    uniforms: tuple[float, ...], verdict: Verdict
) -> None:
    # covered at the root .5 + .3, behind 0 .7; variances .16 and .21
    got = verify(laws_of(*LAWS), 0, TREE, FixedUniforms(*uniforms), START)
    assert (got.run(TREE), got.accepted) == (verdict.run(TREE), verdict.accepted)
    assert (got.origin, got.num_reached) == (verdict.origin, verdict.num_reached)
    assert got.foretold and verdict.foretold
    assert got.foretold.mean == pytest.approx(verdict.foretold.mean)
    assert got.foretold.variance == pytest.approx(verdict.foretold.variance)


def expected(value: Callable[[Verdict], float], draft: Draft, laws: TargetLaws) -> float:
    outcomes = enumerate_outcomes(lambda draws: value(verify(laws, 0, draft, draws, START)))
    return sum(prob * outcome for outcome, prob in outcomes.items())


def test_a_tree_is_accepted_with_the_mass_it_covers() -> None:
    # .5 + .3 at the first level, .5 * .7 at the second
    laws = laws_of(*LAWS)
    assert expected(lambda v: float(v.accepted_len > 0), TREE, laws) == pytest.approx(0.8)
    assert expected(lambda v: float(v.accepted_len), TREE, laws) == pytest.approx(0.8 + 0.35)


def random_tree(num: int, seed: int) -> Draft:
    """Nodes anywhere, siblings distinct."""
    generator = torch.Generator().manual_seed(seed)
    branches: list[tuple[int, int]] = []
    while len(branches) < num:
        parent = int(torch.randint(-1, len(branches), (1,), generator=generator))
        token = int(torch.randint(V, (1,), generator=generator))
        if (parent, token) not in branches:
            branches.append((parent, token))
    return Draft.tree([token for _, token in branches], [parent for parent, _ in branches])


def random_laws(num: int, seed: int) -> TargetLaws:
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(num, V, generator=generator, dtype=torch.float64)
    return TargetLaws(logits, [Condition(PLAIN)] * num)


def deviation(verdict: Verdict) -> float:
    assert verdict.foretold is not None
    return verdict.accepted_len - verdict.foretold.mean


@pytest.mark.parametrize("seed", range(8))
def test_observed_minus_foretold_has_mean_zero_and_the_variance_that_is_foretold(
    seed: int,
) -> None:
    """Steps of a martingale with two values each, so the bound is the variance itself."""
    tree, laws = random_tree(6, seed), random_laws(7, seed)
    assert expected(deviation, tree, laws) == pytest.approx(0, abs=1e-12)
    squares = expected(lambda v: deviation(v) ** 2, tree, laws)
    variance = expected(lambda v: v.foretold.variance if v.foretold else 0.0, tree, laws)
    assert squares == pytest.approx(variance, abs=1e-12)


class Hotter:
    """Fault: the walk draws from a flatter law than the one it is judged by."""

    def __init__(self, draws: EnumeratedDraws) -> None:
        self._draws = draws

    def target(self, laws: TargetLaws, index: int, position: int) -> int:
        return self._draws.correction(laws.probs(index).sqrt(), START, position)


def test_a_walk_by_another_law_is_not_what_was_foretold() -> None:
    """Negative control: the root's .2 outside the tree is drawn with .45/1.70."""
    laws = laws_of(*LAWS)
    outcomes = enumerate_outcomes(
        lambda draws: deviation(verify(laws, 0, TREE, Hotter(draws), START))  # type: ignore[arg-type]
    )
    assert sum(prob * outcome for outcome, prob in outcomes.items()) < -0.05


@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_siblings_does_not_matter(seed: int) -> None:
    one, other = Draft.tree((0, 1, 2), (-1, -1, 1)), Draft.tree((1, 0, 2), (-1, -1, 0))
    draws = SeededDraws(seed, "p", 0)
    verdict = verify(laws_of(*LAWS), 0, one, draws, START)
    swapped = laws_of(LAWS[0], LAWS[2], LAWS[1], LAWS[3])  # the position behind 1 comes first
    assert verify(swapped, 0, other, draws, START).run(other) == verdict.run(one)


@pytest.mark.parametrize("seed", range(10))
def test_a_tree_without_branches_is_a_chain(seed: int) -> None:
    tokens, laws, draws = (2, 0, 1), random_laws(4, seed), SeededDraws(seed, "p", 0)
    chain, tree = Draft.of_points(tokens), Draft.tree(tokens, (-1, 0, 1))
    assert verify(laws, 0, chain, draws, START) == verify(laws, 0, tree, draws, START)


def test_a_branch_without_a_law_matters_only_when_it_is_taken() -> None:
    laws = laws_of(LAWS[0], (math.nan,) * 3, LAWS[2], LAWS[3])
    assert verify(laws, 0, TREE, FixedUniforms(0.79, 0.59), START).accepted == (1,)
    with pytest.raises(InvalidLogits):
        verify(laws, 0, TREE, FixedUniforms(0.49, 0.5), START)


BROKEN = {
    "sampled tokens": Draft((0,), (DenseLaw(torch.ones(1)),), (-1,)),
    "equal siblings": Draft.tree((0, 1, 0), (-1, -1, -1)),
    "a parent of its own": Draft.tree((0, 1), (-1, 1)),
    "a parent that comes later": Draft.tree((0, 1), (1, -1)),
    "a parent before the root": Draft.tree((0,), (-2,)),
    "too few parents": Draft.tree((0, 1), (-1,)),
    "an id outside the vocabulary": Draft.tree((0, V), (-1, 0)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tree_is_refused_on_one_line(name: str) -> None:
    with pytest.raises(InvalidDraft) as refused:
        check_draft(BROKEN[name], V)
    assert "\n" not in str(refused.value)


def test_equal_tokens_below_different_nodes_are_no_siblings() -> None:
    check_draft(Draft.tree((0, 1, 0, 0), (-1, -1, 0, 1)), V)


def path_len(tree: Draft, node: int) -> int:
    """Tokens from the root to a node, itself included."""
    assert tree.parents is not None
    return 1 if tree.parents[node] < 0 else 1 + path_len(tree, tree.parents[node])


def test_a_tree_cut_short_is_a_tree() -> None:
    cut = TREE.truncated(2)
    assert (cut.token_ids, cut.parents) == ((0, 1), (-1, -1))
    assert [path_len(TREE, node) for node in range(3)] == [1, 1, 2]


# ---- growing ------------------------------------------------------------------------------


def estimates(*levels: Sequence[float]) -> Callable[[int], Iterable[tuple[int, float, int]]]:
    """The same estimates for every node of a level."""
    return lambda depth: [(t, p, depth + 1) for t, p in enumerate(levels[depth])]


def test_the_most_probable_paths_come_first() -> None:
    # .6, .6 * .5 = .3, .3, then .18 of three: the child 1 of 0 first, of equals the oldest
    tree = grow_tree(0, estimates((0.6, 0.3), (0.5, 0.3)), max_nodes=4, max_depth=2)
    assert tree.token_ids == (0, 1, 0, 1) and tree.parents == (-1, -1, 0, 0)


@pytest.mark.parametrize(("max_nodes", "num"), [(0, 0), (1, 1), (5, 5), (6, 6), (100, 6)])
def test_a_tree_has_at_most_the_nodes_and_levels_asked_for(max_nodes: int, num: int) -> None:
    # 2 + 4 nodes on two levels
    tree = grow_tree(0, estimates((0.6, 0.4), (0.6, 0.4)), max_nodes=max_nodes, max_depth=2)
    assert len(tree) == num and all(path_len(tree, node) <= 2 for node in range(num))
    check_draft(tree, V)


def test_nothing_to_go_on_with_is_no_draft() -> None:
    assert grow_tree(0, lambda _: [], max_nodes=5, max_depth=5) is NO_DRAFT
    assert grow_tree(0, estimates((0.5,)), max_nodes=5, max_depth=0) is NO_DRAFT


def all_trees(num: int, paths: Sequence[tuple[int, ...]]) -> Iterable[tuple[tuple[int, ...], ...]]:
    """Sets of paths that hold every beginning of each."""
    for chosen in itertools.combinations(paths, num):
        if all(path[:-1] in chosen for path in chosen if len(path) > 1):
            yield chosen


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_no_tree_of_the_size_is_accepted_further_when_the_estimates_are_right(
    seed: int, num: int
) -> None:
    """Expected accepted length is the sum of what reaches each node; against all trees there are."""
    table = random_table(V, depth=2, seed=seed)

    def laws(tokens: tuple[int, ...]) -> Iterable[tuple[int, float, tuple[int, ...]]]:
        chances = table(tokens).softmax(-1).tolist()
        return [(t, p, (*tokens, t)) for t, p in enumerate(chances)]

    def reached(path: tuple[int, ...]) -> float:
        steps = (table(path[:end]).softmax(-1)[token] for end, token in enumerate(path))
        return float(torch.stack(list(steps)).prod())

    root: tuple[int, ...] = ()
    tree = grow_tree(root, laws, max_nodes=num, max_depth=3)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents or ()):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    every = [p for depth in (1, 2, 3) for p in itertools.product(range(V), repeat=depth)]
    best = max(sum(map(reached, chosen)) for chosen in all_trees(num, every))
    assert sum(map(reached, paths)) == pytest.approx(best)


def test_the_most_probable_ids_come_with_their_probabilities() -> None:
    probs = torch.tensor([0.1, 0.6, 0.3])
    assert [token for token, _ in most_probable(probs, 2)] == [1, 2]
    assert len(most_probable(probs, 9)) == 3


# ---- in an engine -------------------------------------------------------------------------

TABLE = random_table(V, depth=3, seed=31)
DRAFT = random_table(V, depth=1, seed=32)


def words(generated: tuple[int, ...]) -> tuple[int, ...]:
    """A grammar: 0 begins, never twice in a row; 2 ends behind a 0."""
    return (0,) if not generated else (1, 2) if generated[-1] == 0 else (0, 1)


SAMPLINGS = {
    "plain": SamplingParams(max_new_tokens=30),
    "greedy": SamplingParams(max_new_tokens=30, temperature=0, presence_penalty=1.0),
    "penalties": SamplingParams(max_new_tokens=30, frequency_penalty=0.2, repetition_penalty=1.2),
    "phrases": SamplingParams(max_new_tokens=30, bad_words=((0, 1, 2), (2, 2)), top_p=0.9),
    "grammar": SamplingParams(
        max_new_tokens=30, grammar=Grammar.named("words"), eos_token_ids=(2,), min_tokens=4
    ),
}
BRANCHING: dict[str, Callable[[], Proposer]] = {
    "table": lambda: TableTrees(DRAFT, width=2, max_depth=4),
    "history": HistoryProposer,
    "counts": lambda: HistoryProposer(draw="counts"),
}


def branching(table: Table, proposer: Proposer, num_nodes: int = 9) -> NativeEngine:
    compile_grammar = grammar_named("words", words, V, stop_ids=(2,))
    return table_engine(
        table, V, proposer=proposer, draft_len=num_nodes, branching=True,
        compile_grammar=compile_grammar,
    )  # fmt: skip


@pytest.mark.parametrize("name", BRANCHING)
@pytest.mark.parametrize("law", SAMPLINGS)
def test_trees_emit_what_plain_decoding_emits_token_for_token(name: str, law: str) -> None:
    """And record what it records. Trees of drawn counts are point masses as well."""
    requests = [
        request(f"r{i}", (0, 1), SAMPLINGS[law], prompt_id="p", sample_index=i) for i in range(10)
    ]
    engine = branching(TABLE, BRANCHING[name]())
    drafted = run(engine, requests)
    plain = run(branching(TABLE, NoProposer()), requests)
    for one, other in ((drafted[n], plain[n]) for n in plain):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12)
        assert one.kept_mass == pytest.approx(other.kept_mass, abs=1e-12)
    counters = engine.counters()
    assert counters.accepted > 20
    assert sum(counters.accepted_by_position) == counters.accepted
    assert counters.emitted == sum(len(sample.token_ids) for sample in drafted.values())


class Fixed(NoProposer):
    """The same tree in every round."""

    def __init__(self, tree: Draft) -> None:
        self._tree = tree

    def propose_trees(
        self, rows: Sequence[Row], max_nodes: Sequence[int], max_depths: Sequence[int]
    ) -> list[Draft]:
        return [self._tree] * len(rows)


def stopped(table: Table, proposer: Proposer, stop: int = 2) -> RolloutSample:
    sampling = SamplingParams(max_new_tokens=8, stop_token_ids=(stop,))
    return run(branching(table, proposer), [request(sampling=sampling)])["r0"]


def after_two(logits: Sequence[float]) -> Table:
    """Certain of 0, then 2; `logits` behind the 2."""
    script = {1: (50.0, 0.0, 0.0), 2: (0.0, 0.0, 50.0)}
    return lambda ids: torch.tensor(script.get(len(ids), logits), dtype=torch.float64)


DEEP = Draft.tree((0, 1, 2, 1, 2), (-1, -1, 0, 2, 3))


def test_what_a_tree_holds_behind_a_stop_is_not_emitted() -> None:
    # 0 2 | 1 2: all four are walked, two are emitted
    sample = stopped(after_two((0.0, 50.0, 0.0)), Fixed(DEEP))
    assert (sample.token_ids, sample.finish_reason) == ((0, 2), "stop")
    assert (sample.counters.accepted, sample.counters.emitted) == (2, 2)
    assert sample.counters.reached == [1, 1]


@pytest.mark.parametrize("tree", [DEEP, Draft.tree((0, 2), (-1, 0))])
def test_logits_behind_a_stop_need_not_be_a_law(tree: Draft) -> None:
    """Plain decoding never asks for them."""
    sample = stopped(after_two((math.nan,) * 3), Fixed(tree))
    assert (sample.token_ids, sample.finish_reason) == ((0, 2), "stop")


def test_a_draw_knows_its_depth_and_not_its_node() -> None:
    """Positions of the uniforms along the second branch."""
    asked: list[int] = []

    class Recorded(SeededDraws):
        def target(self, laws: TargetLaws, index: int, position: int) -> int:
            asked.append(position)
            return {START: 1, START + 1: 0}.get(position, 2)

    draws: Draws = Recorded(0, "p", 0)
    verify(random_laws(4, 0), 0, Draft.tree((0, 1, 0), (-1, -1, 1)), draws, START)
    assert asked == [START, START + 1, START + 2]
