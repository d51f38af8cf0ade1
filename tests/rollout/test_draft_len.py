"""The draft length that pays, from measured costs and measured acceptance."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from proposers.history import HistoryProposer
from proposers.none import NoProposer
from rollout.draft import Draft
from rollout.draft_len import AdaptiveDraftLen, FixedDraftLen, LinearCost, RoundCost
from rollout.native_engine import NativeEngine
from rollout.proposer import Proposer
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import SeededDraws
from rollout.table_policy import TablePolicy, random_table
from tests.rollout.engines import request, run
from tests.rollout.proposers_under_test import Watched


def rows(num: int) -> list[Row]:
    return [Row(request(), SeededDraws(0, "p", i), context_len=64) for i in range(num)]


def plain_round(chooser: AdaptiveDraftLen, seconds: float, scored_tokens: int) -> None:
    chooser.observe(RoundCost(seconds, 1, 0, scored_tokens, True, (0,), (0,)))


def learn_cost(chooser: AdaptiveDraftLen, fixed: float, per_token: float) -> None:
    for scored_tokens in (1, 2, 3, 4, 8, 16):
        plain_round(chooser, fixed + per_token * scored_tokens, scored_tokens)


def learn_acceptance(
    chooser: AdaptiveDraftLen, rates: list[float], *, drafted: bool = True, num_rounds: int = 3000
) -> None:
    """Rounds of one row whose draft position i is accepted at rates[i] given those before it."""
    rng = random.Random(1)
    for _ in range(num_rounds):
        accepted = next((i for i, rate in enumerate(rates) if rng.random() >= rate), len(rates))
        length = len(rates) if drafted else 0
        chooser.observe(
            RoundCost(1.0, 1, len(rates), 0, False, (length,), (accepted if drafted else 0,))
        )


def adaptive(max_len: int = 12, **options: float) -> AdaptiveDraftLen:
    return AdaptiveDraftLen(max_len, decay=0.999, **options)  # type: ignore[arg-type]


# ---- cost ---------------------------------------------------------------------------------


def test_linear_cost_recovers_a_line() -> None:
    cost = LinearCost(decay=0.98)
    for tokens in (1, 5, 9, 30, 2, 64):
        cost.add(tokens, 0.010 + 0.002 * tokens)
    assert cost.seconds(0) == pytest.approx(0.010, abs=1e-9)
    assert cost.seconds(100) == pytest.approx(0.210, abs=1e-9)


def test_linear_cost_recovers_a_line_under_noise() -> None:
    # 500 points, effective window 1/(1 - .99) = 100, noise 5% of the fixed part
    rng, cost = random.Random(3), LinearCost(decay=0.99)
    for _ in range(500):
        tokens = rng.randint(1, 64)
        cost.add(tokens, 0.010 + 0.002 * tokens + rng.gauss(0, 0.0005))
    assert cost.seconds(0) == pytest.approx(0.010, rel=0.1)
    assert cost.seconds(50) == pytest.approx(0.110, rel=0.02)


def test_linear_cost_follows_a_machine_that_changed() -> None:
    cost = LinearCost(decay=0.9)
    for per_token in (0.002, 0.005):
        for tokens in (1, 8, 16, 32) * 40:
            cost.add(tokens, 0.010 + per_token * tokens)
    assert cost.seconds(10) == pytest.approx(0.060, abs=1e-6)


@pytest.mark.parametrize("tokens", [1, 8, 333, 2048, 2955])
def test_a_cost_seen_at_one_width_only_is_taken_as_fixed(tokens: int) -> None:
    # rounding of the sums must not be read as a slope
    rng, cost = random.Random(tokens), LinearCost(decay=0.98)
    for _ in range(300):
        cost.add(tokens, 0.2 + 0.01 * rng.random())
    assert cost.seconds(2 * tokens) == pytest.approx(cost.seconds(tokens), rel=1e-9)
    assert 0.2 < cost.seconds(tokens) < 0.21


@pytest.mark.parametrize("points", [[(1, 0.9), (10, 0.1)], [(10, 0.1), (11, 0.9)]])
def test_no_part_of_a_cost_is_negative(points: list[tuple[float, float]]) -> None:
    cost = LinearCost(decay=1.0)
    for tokens, seconds in points:
        cost.add(tokens, seconds)
    assert 0 <= cost.seconds(0) <= cost.seconds(1) <= cost.seconds(100)


# ---- best length --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "per_token", "expected"),
    [
        # rate of emission per second, fixed 1: E(k) / (1 + c(1 + k)), E = (1 - a^(k+1)) / (1 - a)
        # a=.8 c=.1: k=4 3.362/1.5=2.241, k=5 3.689/1.6=2.306, k=6 3.951/1.7=2.324,
        #            k=7 4.161/1.8=2.312
        (0.8, 0.1, 6),
        # a=.5 c=.5: k=0 1/1.5=.667, k=1 1.5/2=.75, k=2 1.75/2.5=.70
        (0.5, 0.5, 1),
        # a=.2 c=.5: k=0 .667, k=1 1.2/2=.60
        (0.2, 0.5, 0),
    ],
)
def test_best_length_maximises_expected_tokens_a_second(
    rate: float, per_token: float, expected: int
) -> None:
    chooser = adaptive()
    learn_cost(chooser, 1.0, per_token)
    chooser._accepted = [rate * 1e6] * chooser.max_len
    chooser._reached = [1e6] * chooser.max_len
    chooser._drafted = chooser._asked = [1e6] * chooser.max_len
    assert chooser.best_len(1) == expected


def test_conditional_rates_by_position_count_and_not_their_mean() -> None:
    # METHODS 6: a = (.9, .5) gives E = 1 + .9 + .45 = 2.35; at c = .5, fixed 1:
    # k=0 .667, k=1 1.9/2 = .95, k=2 2.35/2.5 = .94
    chooser = adaptive(2)
    learn_cost(chooser, 1.0, 0.5)
    learn_acceptance(chooser, [0.9, 0.5])
    assert chooser.best_len(1) == 1


def test_free_verification_drafts_as_long_as_allowed() -> None:
    chooser = adaptive(5)
    learn_cost(chooser, 1.0, 0.0)
    learn_acceptance(chooser, [0.6] * 5)
    assert chooser.choose(rows(3)) == [5, 5, 5]


@pytest.mark.parametrize(("num_rows", "drafts"), [(1, True), (64, False)])
def test_speculation_pays_for_stragglers_and_not_for_a_full_batch(
    num_rows: int, drafts: bool
) -> None:
    # fixed 1, .1 a token, a=.5: one row 1.5/1.2 > 1/1.1; 64 rows 1.5/13.8 < 1/7.4
    chooser = adaptive(4)
    learn_cost(chooser, 1.0, 0.1)
    learn_acceptance(chooser, [0.5] * 4)
    assert (chooser.best_len(num_rows) > 0) == drafts


# ---- choosing -----------------------------------------------------------------------------


def hopeless() -> AdaptiveDraftLen:
    chooser = adaptive(8, probe_every=5, probe_len=2)
    learn_cost(chooser, 0.1, 1.0)
    learn_acceptance(chooser, [0.0] * 8)
    return chooser


def test_nothing_is_drafted_while_it_does_not_pay_except_for_probes() -> None:
    chooser = hopeless()
    lengths = [chooser.choose(rows(1))[0] for _ in range(18)]
    assert lengths == [0, 0, 0, 0, 0, 2] * 3  # five without, then a probe


def test_probes_notice_a_proposer_that_has_become_good() -> None:
    chooser = hopeless()
    learn_cost(chooser, 10.0, 0.01)
    for _ in range(3000):
        length = chooser.choose(rows(1))[0]
        chooser.observe(RoundCost(10.0, 1, length, 1 + length, True, (length,), (length,)))
    assert chooser.best_len(1) > 0


def test_a_good_proposer_that_turns_bad_is_dropped() -> None:
    chooser = AdaptiveDraftLen(4, decay=0.9)
    learn_cost(chooser, 1.0, 1.0)
    learn_acceptance(chooser, [1.0] * 4, num_rounds=100)
    assert chooser.best_len(1) == 4
    learn_acceptance(chooser, [0.0] * 4, num_rounds=100)
    assert chooser.best_len(1) == 0


@pytest.mark.parametrize("max_len", [0, 1, 3])
def test_no_length_exceeds_the_maximum(max_len: int) -> None:
    chooser = AdaptiveDraftLen(max_len, probe_every=2, probe_len=9)
    for _ in range(50):
        lengths = chooser.choose(rows(2))
        assert len(lengths) == 2 and max(lengths) <= max_len
        asked = lengths[0]
        chooser.observe(RoundCost(0.1, 2, asked, 2 + 2 * asked, True, (asked,) * 2, (asked,) * 2))


def test_no_rows_need_no_lengths() -> None:
    assert adaptive().choose([]) == []
    assert FixedDraftLen(3).choose([]) == []


def test_a_fixed_length_is_the_same_for_every_row() -> None:
    assert FixedDraftLen(3).choose(rows(4)) == [3, 3, 3, 3]


def test_rounds_with_prompts_do_not_teach_the_cost_of_decoding() -> None:
    chooser = adaptive()
    chooser.observe(RoundCost(9.0, 1, 0, 500, False, (0,), (0,)))
    assert chooser.best_len(1) == 2  # nothing known yet: a probe


def test_a_good_start_is_followed_further_than_it_was_tried() -> None:
    """Nothing was drafted beyond two tokens; both were always accepted and cost next to nothing."""
    chooser = AdaptiveDraftLen(8)
    for tokens in (4, 12, 4, 12):
        chooser.observe(RoundCost(1.0, 4, 2, tokens, True, (2,) * 4, (2,) * 4))
    assert chooser.best_len(4) > 2


# ---- trees --------------------------------------------------------------------------------


def tree_round(chooser: AdaptiveDraftLen, num_rows: int, nodes: int, accepted: int) -> None:
    """A round of trees, whose time says nothing about costs."""
    num_tokens = num_rows * (1 + nodes)
    drafted, taken = (nodes,) * num_rows, (accepted,) * num_rows
    chooser.observe(
        RoundCost(1.0, num_rows, nodes, num_tokens, False, drafted, taken, branched=True)
    )


def branches(chooser: AdaptiveDraftLen, num_rows: int = 1) -> bool:
    """The choice of one round."""
    lengths = chooser.choose(rows(num_rows))
    assert len(set(lengths)) == 1
    return chooser.branching


def known(rate: float = 0.5, fixed: float = 1.0, per_token: float = 0.1) -> AdaptiveDraftLen:
    """Chains of up to 4, trees of 8, both with a known cost."""
    chooser = AdaptiveDraftLen(4, decay=0.999, tree_nodes=8, tree_every=5)
    learn_cost(chooser, fixed, per_token)
    learn_acceptance(chooser, [rate] * 4)
    return chooser


def test_a_tree_is_tried_first_and_then_now_and_then() -> None:
    # nothing accepted: 1 token for 1.9 s against a chain's 1.5 for 1.2
    chooser, tried = known(), []
    for _ in range(13):
        tried.append(branches(chooser))
        if tried[-1]:
            tree_round(chooser, 1, 8, accepted=0)
    assert tried == [True, *[False] * 5, True, *[False] * 5, True]


@pytest.mark.parametrize(
    ("accepted", "num_trees"),
    # fixed 1, .1 a token, a = .5: chains 1.5/1.2 = 1.25, 1.75/1.3 = 1.35, 1.875/1.4 = 1.34,
    # 1.94/1.5 = 1.29; a tree of 8: (1 + accepted)/1.9, 1.05 for one and 1.58 for two
    [(1, 2), (2, 12)],
)
def test_trees_are_used_while_they_yield_more_tokens_a_second(
    accepted: int, num_trees: int
) -> None:
    chooser = known()
    for _ in range(30):
        tree_round(chooser, 1, 8, accepted)
    lengths = [chooser.choose(rows(1))[0] for _ in range(12)]
    assert (lengths.count(8), lengths.count(2)) == (num_trees, 12 - num_trees)


@pytest.mark.parametrize(("num_rows", "pays"), [(1, True), (16, False)])
def test_the_same_trees_pay_for_stragglers_and_not_for_a_full_batch(
    num_rows: int, pays: bool
) -> None:
    # 16 rows: a tree 3/(1 + .1 * 16 * 9) = .19, plain decoding 1/2.6 = .38
    chooser = known()
    for _ in range(30):
        tree_round(chooser, 1, 8, accepted=2)
    branches(chooser)  # the first is a trial
    assert [branches(chooser, num_rows) for _ in range(4)] == [pays] * 4


def test_trees_that_turn_bad_are_dropped_and_tried_again() -> None:
    chooser = AdaptiveDraftLen(4, decay=0.9, tree_nodes=8, tree_every=5)
    learn_cost(chooser, 1.0, 0.1)
    learn_acceptance(chooser, [0.5] * 4)
    for accepted, pays in ((4, True), (0, False), (4, True)):
        for _ in range(150):
            if branches(chooser):
                tree_round(chooser, 1, 8, accepted)
        assert sum(branches(chooser) for _ in range(5)) >= 4 * pays
        assert pays or sum(branches(chooser) for _ in range(12)) <= 2


def test_trees_teach_chains_nothing() -> None:
    """Accepted paths say nothing about the conditional rates of a chain."""
    chooser = known()
    before = [chooser._chain_rate(length, 1) for length in range(5)]
    for _ in range(50):
        tree_round(chooser, 1, 8, accepted=4)
    assert [chooser._chain_rate(length, 1) for length in range(5)] == before


def test_nothing_branches_before_a_cost_is_known_or_where_drafts_do_not_pay() -> None:
    unknown = AdaptiveDraftLen(4, tree_nodes=8)
    assert not branches(unknown)
    costly = hopeless()
    costly._trees.nodes = 8
    assert not any(branches(costly) for _ in range(4))


def test_without_nodes_nothing_branches() -> None:
    chooser = AdaptiveDraftLen(4)
    learn_cost(chooser, 1.0, 0.01)
    learn_acceptance(chooser, [0.9] * 4)
    assert not any(branches(chooser) for _ in range(60))
    assert not FixedDraftLen(3).branching and FixedDraftLen(3, branching=True).branching


TABLE = random_table(3, depth=2, seed=1)


class Clockless(AdaptiveDraftLen):
    """Costs of 1 a round and .01 a token, whatever the machine does."""

    def observe(self, round_: RoundCost) -> None:
        super().observe(replace(round_, seconds=1 + 0.01 * round_.scored_tokens))


def generated(proposer: Proposer, temperature: float = 1.0) -> dict[str, tuple[int, ...]]:
    """Rows of one prompt under chains of up to 3 and trees of 9, of which one round in 3 tries one."""
    chooser = Clockless(3, tree_nodes=9, tree_every=2)
    engine = NativeEngine(TablePolicy(TABLE, vocab_size=3), proposer, chooser)
    engine.load(TABLE, version=0, digest="table")
    sampling = SamplingParams(temperature=temperature, max_new_tokens=40)
    requests = [request(f"r{i}", (0, 1), sampling, prompt_id="p", sample_index=i) for i in range(6)]
    return {name: sample.token_ids for name, sample in run(engine, requests).items()}


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_an_engine_that_chooses_between_chains_and_trees_emits_the_plain_tokens(
    temperature: float,
) -> None:
    proposer = Watched(HistoryProposer())
    assert generated(proposer, temperature) == generated(NoProposer(), temperature)
    drafts = [draft for drafts in proposer.drafts for draft in drafts if len(draft)]
    assert {draft.parents is None for draft in drafts} == {True, False}
    assert max(len(draft) for draft in drafts if draft.parents is None) <= 3


def test_a_proposer_that_cannot_branch_is_never_asked_for_a_chain_as_long_as_a_tree() -> None:
    asked: list[int] = []

    class Asked(NoProposer):
        def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
            asked.extend(max_lens)
            return [Draft.of_points([1] * length) for length in max_lens]

    generated(Asked())
    assert asked and max(asked) <= 3
