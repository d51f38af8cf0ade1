"""Drafts from other rollouts of the same prompt, in bounded memory."""

import itertools
import tracemalloc
from collections.abc import Sequence

import pytest
import torch

from proposers.history import HistoryProposer
from rollout.draft import NO_DRAFT, Draft, SparseLaw, check_draft
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import Draws, SeededDraws
from rollout.table_policy import random_table
from tests.rollout.engines import request, run, table_engine

PROMPT = (1, 2, 3)
SAMPLES = itertools.count()
"""Every row is a sample of its own."""


def row(
    generated: Sequence[int] = (),
    prompt: Sequence[int] = PROMPT,
    name: str = "r",
    draws: Draws | None = None,
) -> Row:
    asked = request(name, prompt, prompt_id="same", sample_index=next(SAMPLES))
    made = Row(asked, draws or SeededDraws(0, "p", 0), context_len=4096)
    made.token_ids += generated
    return made


def draft(proposer: HistoryProposer, of: Row, max_len: int = 8) -> tuple[int, ...]:
    return proposer.propose([of], [max_len])[0].token_ids


def finished(proposer: HistoryProposer, one: Row) -> None:
    proposer.observe([one])
    proposer.finish(one)


# ---- what is drafted ----------------------------------------------------------------------


def test_a_finished_sibling_is_drafted_from_its_first_token_on() -> None:
    proposer = HistoryProposer()
    finished(proposer, row([10, 11, 12]))
    assert draft(proposer, row()) == (10, 11, 12)
    assert draft(proposer, row([10])) == (11, 12)
    assert draft(proposer, row([10, 11]), 0) == ()


def test_a_sibling_in_flight_is_drafted_as_far_as_it_has_come() -> None:
    proposer, ahead, behind = HistoryProposer(), row([10, 11]), row()
    proposer.observe([ahead, behind])
    assert draft(proposer, behind) == (10, 11)
    ahead.token_ids += [12, 13]
    proposer.observe([ahead, behind])
    assert draft(proposer, behind) == (10, 11, 12, 13)


def test_who_looks_in_whatever_way_sees_a_sibling_as_far_as_it_has_come() -> None:
    def knowing() -> HistoryProposer:
        proposer = HistoryProposer()
        proposer.observe([row([10, 11]), behind])
        return proposer

    behind = row()
    assert [token for token, _ in knowing().continuations(behind, [])] == [10]
    assert knowing().propose_trees([behind], [8], [8])[0].token_ids == (10, 11)
    assert knowing().gauges()["history/tokens"] == 2


def test_tokens_have_the_version_that_was_in_force_when_they_were_emitted() -> None:
    proposer, one = HistoryProposer(), row([10, 11])
    proposer.observe([one])
    proposer.publish(5)  # before anybody looked
    proposer.finish(one)
    assert proposer.export()["versions"].tolist() == [0]


def test_the_longest_match_wins_over_more_frequent_shorter_ones() -> None:
    proposer = HistoryProposer()
    for tail in ([20, 11, 99], [21, 11, 99], [10, 11, 50]):
        finished(proposer, row(tail))
    assert draft(proposer, row([10, 11])) == (50,)
    assert draft(proposer, row([77, 11])) == (99,)  # only (11,) is known


def test_the_majority_is_followed_and_those_that_disagree_are_dropped() -> None:
    # behind the prompt: 10 twice, 20 once; behind (.., 10): 30 (recent) and 40 once each
    proposer = HistoryProposer()
    for tail in ([10, 40, 41], [20, 60], [10, 30, 31]):
        finished(proposer, row(tail))
    assert draft(proposer, row()) == (10, 30, 31)


def test_a_rollout_from_elsewhere_can_be_remembered() -> None:
    proposer = HistoryProposer()
    proposer.remember(PROMPT, [10, 11, 12])
    proposer.remember(PROMPT, (20, 21))
    assert draft(proposer, row([10])) == (11, 12)
    assert draft(proposer, row()) == (20, 21)  # the most recent of equals
    assert proposer.gauges()["history/tokens"] == 5


def test_nothing_crosses_prompts_also_when_the_prompt_id_is_used_again() -> None:
    # cases 110, 115
    proposer = HistoryProposer()
    finished(proposer, row([10, 11, 12], prompt=(1, 2, 3)))
    assert draft(proposer, row([10], prompt=(9, 2, 3))) == ()
    assert draft(proposer, row([10], prompt=(2, 3))) == ()


def test_a_request_id_used_twice_is_two_rows() -> None:
    # case 115
    proposer, one, other = HistoryProposer(), row([10, 11], name="p-0"), row([20], name="p-0")
    proposer.observe([one, other])
    proposer.finish(one)
    assert proposer.gauges()["history/sequences"] == 2
    assert draft(proposer, row([20, 10], name="p-0")) == (11,)


def test_a_row_that_misses_rounds_is_still_in_flight_and_catches_up() -> None:
    # case 114
    proposer, seldom, reader = HistoryProposer(), row([10]), row()
    proposer.observe([seldom])
    for _ in range(3):
        proposer.observe([reader])  # rounds without it
    seldom.token_ids += [11, 12, 13]
    proposer.observe([seldom])
    assert draft(proposer, reader) == (10, 11, 12, 13)
    assert proposer.gauges()["history/tokens"] == 4


def test_observing_twice_records_once() -> None:
    proposer, one = HistoryProposer(), row([10, 11])
    for _ in range(3):
        proposer.observe([one])
    assert proposer.gauges()["history/tokens"] == 2


def test_proposing_and_observing_never_write_to_a_row() -> None:
    # case 56
    proposer, one = HistoryProposer(), row([10, 11, 10])
    before = list(one.token_ids)
    proposer.observe([one])
    assert draft(proposer, one, 3) == (11, 10, 11)
    proposer.finish(one)
    assert one.token_ids == before and one.counters.drafted == 0


# ---- drawn from counts --------------------------------------------------------------------

FORKED = ([10, 40, 41], [20, 60], [10, 30, 31])
"""Behind the prompt 10 twice and 20; behind 10 30 (the more recent) and 40."""


def told(draw: str = "mode", tails: Sequence[Sequence[int]] = FORKED) -> HistoryProposer:
    proposer = HistoryProposer(draw=draw)  # type: ignore[arg-type]
    for tail in tails:
        finished(proposer, row(tail))
    return proposer


def laws(made: Draft) -> list[dict[int, float]]:
    """Probabilities by id of every law."""
    sparse = [law for law in made.laws if isinstance(law, SparseLaw)]
    assert len(sparse) == len(made), "every token is sampled, also from a single candidate"
    return [dict(zip(law.ids.tolist(), law.probs.tolist())) for law in sparse]


def test_the_law_of_a_draft_is_the_frequencies_behind_what_was_drawn() -> None:
    third, half = pytest.approx(1 / 3), pytest.approx(0.5)
    expected = {
        (20, 60): [{10: pytest.approx(2 / 3), 20: third}, {60: 1.0}],
        (10, 30, 31): [{10: pytest.approx(2 / 3), 20: third}, {30: half, 40: half}, {31: 1.0}],
        (10, 40, 41): [{10: pytest.approx(2 / 3), 20: third}, {30: half, 40: half}, {41: 1.0}],
    }
    proposer, seen = told("counts"), set()
    for seed in range(30):
        made = proposer.propose([row(draws=SeededDraws(seed, "p", 0))], [8])[0]
        assert laws(made) == expected[made.token_ids]
        check_draft(made, 100)
        seen.add(made.token_ids)
    assert seen == expected.keys()


def test_counts_are_drawn_with_their_frequencies() -> None:
    # 2/3 of 10, half of that each way; 1/3 of 20
    proposer = told("counts")

    def drawn(draws: EnumeratedDraws) -> tuple[int, ...]:
        return proposer.propose([row(draws=draws)], [8])[0].token_ids

    law = enumerate_outcomes(drawn)
    assert law == pytest.approx({(10, 30, 31): 1 / 3, (10, 40, 41): 1 / 3, (20, 60): 1 / 3})


def test_counts_are_drawn_anew_by_every_row_and_again_by_the_same() -> None:
    proposer = told("counts", [[n] for n in range(10, 60)])
    seeds = [0, 1, 2, 3, 0]
    drawn = [
        proposer.propose([row(draws=SeededDraws(0, "p", seed))], [1])[0].token_ids
        for seed in seeds
    ]  # fmt: skip
    assert drawn[0] == drawn[4] and len(set(drawn)) == 4


def test_a_law_stays_as_it_was_when_more_is_observed() -> None:
    proposer = told("counts")
    made = proposer.propose([row()], [1])[0]
    before = laws(made)
    finished(proposer, row([20, 60]))
    finished(proposer, row([20, 60]))
    assert laws(made) == before
    assert laws(proposer.propose([row()], [1])[0]) == [pytest.approx({20: 0.6, 10: 0.4})]


@pytest.mark.parametrize(("max_len", "length"), [(0, 0), (1, 1), (2, 2), (9, 2)])
def test_drawn_drafts_keep_to_the_length_asked_for(max_len: int, length: int) -> None:
    proposer = told("counts", [[10, 11]])
    assert len(proposer.propose([row()], [max_len])[0]) == length
    assert proposer.propose([row([77])], [4]) == [NO_DRAFT]


def test_a_draft_that_will_hardly_be_reached_ends() -> None:
    """Tokens of 1 to 3 at random: every next one is open."""
    generator = torch.Generator().manual_seed(0)
    throws = torch.randint(1, 4, (6, 500), generator=generator).tolist()
    proposer = HistoryProposer(draw="counts", max_match=2)  # else it soon follows one of them
    for one in throws:
        finished(proposer, row(one))
    made = proposer.propose([row(throws[0][:3])], [20])[0]
    assert made.chances is not None and 1 < len(made) < 20
    reached = torch.tensor(made.chances).cumprod(0)
    assert float(reached[-1]) <= 0.05 and all(reached[:-1] > 0.05)


# ---- trees --------------------------------------------------------------------------------


def tree(proposer: HistoryProposer, of: Row, nodes: int = 99, depth: int = 99) -> Draft:
    return proposer.propose_trees([of], [nodes], [depth])[0]


def paths(made: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(made.token_ids, made.parents or ()):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_every_continuation_is_a_branch_and_the_most_frequent_paths_come_first() -> None:
    # chances, one vote more for what was never seen: 10 2/4, 20 1/4; 10 30 and 10 40 1/2 * 1/3,
    # 20 60 1/4 * 1/2; 10 30 31 and 10 40 41 1/6 * 1/2
    made = tree(told(), row())
    assert paths(made) == [
        (10,), (20,), (10, 30), (10, 40), (20, 60), (10, 30, 31), (10, 40, 41),
    ]  # fmt: skip
    assert made.deterministic
    check_draft(made, 100)


@pytest.mark.parametrize("draw", ["mode", "counts"])
def test_a_tree_holds_what_a_chain_would_draft(draw: str) -> None:
    proposer = told(draw)
    made = set(paths(tree(proposer, row())))
    for seed in range(10):
        chain = proposer.propose([row(draws=SeededDraws(seed, "p", 0))], [8])[0].token_ids
        assert chain in made


@pytest.mark.parametrize(("nodes", "depth", "num"), [(0, 9, 0), (3, 9, 3), (99, 1, 2), (99, 2, 5)])
def test_trees_keep_to_the_nodes_and_levels_asked_for(nodes: int, depth: int, num: int) -> None:
    made = tree(told(), row(), nodes, depth)
    assert len(made) == num and all(len(path) <= depth for path in paths(made))
    assert made == NO_DRAFT or made.parents is not None


def test_nothing_known_is_no_tree() -> None:
    assert tree(HistoryProposer(), row()) == NO_DRAFT
    assert tree(told(), row(prompt=(9, 9, 9))) == NO_DRAFT
    assert tree(told(), row([77])) == NO_DRAFT


def test_trees_are_made_for_every_row_and_none_is_written_to() -> None:
    # case 56
    proposer, rows = told(), [row(), row([10]), row([77]), row([20])]
    before = [list(one.token_ids) for one in rows]
    made = proposer.propose_trees(rows, [4, 4, 4, 0], [4, 1, 4, 4])
    assert [len(one) for one in made] == [4, 2, 0, 0]
    assert [one.token_ids for one in rows] == before


# ---- memory -------------------------------------------------------------------------------


def random_tail(seed: int, length: int = 100) -> list[int]:
    return torch.randint(50, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_stored_tokens_and_memory_stay_below_the_cap() -> None:
    # case 112: 500 sequences of 100 tokens, room for ten; a leak would triple the second peak
    proposer, peaks = HistoryProposer(max_tokens=1000), []

    def insert(seeds: range) -> None:
        for seed in seeds:
            finished(proposer, row(random_tail(seed)))
            assert proposer.gauges()["history/tokens"] <= 1000

    insert(range(400))
    tracemalloc.start()
    for seeds in (range(400, 450), range(450, 500)):
        tracemalloc.reset_peak()
        insert(seeds)
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert proposer.gauges()["history/sequences"] == 10
    assert peaks[1] < 1.5 * peaks[0]


def test_the_oldest_is_evicted_first() -> None:
    # case 112
    proposer = HistoryProposer(max_tokens=6)
    for first in (10, 20, 30):
        finished(proposer, row([first, first + 1, first + 2]))
    assert draft(proposer, row([10])) == ()
    assert draft(proposer, row([20])) == (21, 22)
    assert draft(proposer, row([30])) == (31, 32)


def test_a_rollout_in_flight_is_never_evicted() -> None:
    # case 112: the oldest is in flight, so the next oldest goes
    proposer, oldest = HistoryProposer(max_tokens=6), row([10, 11, 12])
    proposer.observe([oldest])
    finished(proposer, row([20, 21, 22]))
    finished(proposer, row([30, 31, 32]))
    assert draft(proposer, row([10])) == (11, 12)
    assert draft(proposer, row([20])) == ()


def test_tokens_without_room_wait_and_are_recorded_once_there_is() -> None:
    proposer, one, other = HistoryProposer(max_tokens=4), row([10, 11, 12]), row([20, 21])
    proposer.observe([one, other])
    assert proposer.gauges()["history/tokens"] == 3
    assert draft(proposer, row([20])) == ()
    proposer.finish(one)
    proposer.observe([other])
    assert draft(proposer, row([20])) == (21,)


def test_a_rollout_larger_than_the_cap_is_not_recorded() -> None:
    proposer = HistoryProposer(max_tokens=2)
    proposer.remember(PROMPT, [10, 11, 12])
    assert draft(proposer, row()) == () and proposer.gauges()["history/tokens"] == 0


def test_the_last_rollout_of_a_prompt_takes_the_prompt_with_it() -> None:
    proposer = HistoryProposer(max_tokens=3)
    finished(proposer, row([10, 11, 12], prompt=(1, 2)))
    finished(proposer, row([10, 11, 12], prompt=(3, 4)))
    assert proposer.gauges() == {
        "history/tokens": 3.0, "history/sequences": 1.0, "history/prompts": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_eviction_leaves_the_index_of_what_was_never_inserted(seed: int) -> None:
    small, fresh = HistoryProposer(max_tokens=200), HistoryProposer()
    tails = [random_tail(100 * seed + n, 40) for n in range(12)]
    for n, tail in enumerate(tails):
        finished(small, row(tail))
        if n >= 7:  # the last five of 40 tokens are what 200 holds
            finished(fresh, row(tail))
    for tail in tails:
        for end in range(0, 40, 7):
            assert draft(small, row(tail[:end])) == draft(fresh, row(tail[:end]))


# ---- in an engine -------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("max_tokens", [40, 1_000_000])
def test_groups_over_several_steps_generate_as_plain_decoding(
    temperature: float, max_tokens: int
) -> None:
    # case 117, with history that is evicted while it is used
    table = random_table(3, depth=2, seed=5)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=16)
    engine = table_engine(
        table, 3, proposer=HistoryProposer(max_tokens=max_tokens), draft_len=4, num_slots=3
    )
    for step in range(3):
        group = [
            request(f"s{step}-{i}", (i % 2, 1), sampling, sample_index=4 * step + i)
            for i in range(4)
        ]
        drafted, plain = run(engine, group), run(table_engine(table, 3), group)
        assert {n: s.token_ids for n, s in drafted.items()} == {
            n: s.token_ids for n, s in plain.items()
        }
    assert engine.counters().accepted > 0
    assert engine.gauges()["history/tokens"] <= max_tokens


def test_a_greedy_prompt_that_comes_again_is_accepted_whole() -> None:
    table = random_table(3, depth=2, seed=5)
    engine = table_engine(table, 3, proposer=HistoryProposer(), draft_len=4)
    sampling = SamplingParams(temperature=0, max_new_tokens=21)
    run(engine, [request("one", (0, 1), sampling)])
    counters = run(engine, [request("two", (0, 1), sampling)])["two"].counters
    # 4 accepted and a bonus in each of 4 rounds, then one token without room for a draft
    assert counters.accepted == counters.verified == 16
    assert (counters.rounds, counters.bonuses, counters.plain) == (5, 4, 1)
