"""Prompt lookup: what a row's own tokens say comes next."""

from collections.abc import Sequence

import pytest
import torch

from proposers.ngram import NgramProposer
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import SeededDraws
from rollout.table_policy import random_table
from tests.rollout.engines import request, run, table_engine


def row(prompt: Sequence[int], generated: Sequence[int] = ()) -> Row:
    made = Row(request(prompt=prompt), SeededDraws(0, "p", 0), context_len=512)
    made.token_ids += generated
    return made


def draft(proposer: NgramProposer, of: Row, max_len: int = 8) -> tuple[int, ...]:
    return proposer.propose([of], [max_len])[0].token_ids


def reference(ids: Sequence[int], max_len: int, min_match: int, max_match: int) -> tuple[int, ...]:
    """Longest suffix that occurred earlier, latest occurrence, by looking everywhere."""
    for length in range(max_match, min_match - 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if length < len(ids) and ids[end - length : end] == ids[-length:]:
                return tuple(ids[end : end + max_len])
    return ()


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    # (1, 2, 3) -> 7 earlier; (9, 2, 3) -> 8 later
    assert draft(NgramProposer(), row([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]), 1) == (7,)


def test_of_equally_long_matches_the_latest_wins() -> None:
    assert draft(NgramProposer(), row([1, 2, 7, 1, 2, 8, 1, 2]), 1) == (8,)


@pytest.mark.parametrize("max_len", range(9))
def test_a_draft_is_never_longer_than_asked_nor_than_what_is_known(max_len: int) -> None:
    # case 52: behind the earlier (9, 7, 8) come three tokens
    assert draft(NgramProposer(), row([9, 7, 8, 9, 7, 8]), max_len) == (9, 7, 8)[:max_len]


@pytest.mark.parametrize("prompt", [[1], [1, 2], [1, 2, 3, 4], [1, 2, 3, 2]])
def test_without_an_earlier_occurrence_there_is_no_draft(prompt: list[int]) -> None:
    # a match of one token is below min_match=2
    assert draft(NgramProposer(), row(prompt)) == ()


@pytest.mark.parametrize("seed", range(20))
def test_the_index_that_grows_finds_what_a_full_search_finds(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, (60,), generator=generator).tolist()
    proposer, growing = NgramProposer(min_match=1, max_match=3), row(ids[:2])
    for end in range(3, 60, 1 + seed % 3):
        growing.token_ids += ids[len(growing.token_ids) : end]
        assert draft(proposer, growing, 5) == reference(growing.token_ids, 5, 1, 3)


def test_a_slot_or_id_used_again_starts_from_an_empty_index() -> None:
    # case 110: the n-gram 5 6 exists in the first row only
    proposer = NgramProposer()
    first, second = row([5, 6, 7, 5, 6, 7, 5, 6]), row([1, 2, 5, 6])
    assert draft(proposer, first) and draft(proposer, second) == ()
    proposer.finish(first)
    assert draft(proposer, row([1, 2, 5, 6])) == ()


def test_rows_of_one_id_share_nothing() -> None:
    # case 115
    proposer = NgramProposer()
    one, other = row([5, 6, 7, 5, 6]), row([5, 6, 8, 5, 6])
    assert [draft(proposer, one, 1), draft(proposer, other, 1)] == [(7,), (8,)]


def test_a_row_that_misses_rounds_is_proposed_as_much_as_one_that_does_not() -> None:
    # case 114
    ids = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 3]
    often, seldom, proposer = row(ids[:2]), row(ids[:2]), NgramProposer()
    for end in range(3, 13):
        often.token_ids += ids[end - 1 : end]
        draft(proposer, often)
        proposer.propose([seldom], [0])
    seldom.token_ids += ids[2:]
    assert draft(proposer, seldom) == draft(proposer, often) != ()


def test_a_finished_row_leaves_nothing_behind() -> None:
    proposer = NgramProposer()
    rows = [row([5, 6, 5, 6]) for _ in range(50)]
    proposer.propose(rows, [3] * 50)
    assert proposer.gauges()["ngram/rows"] == 50
    for one in rows:
        proposer.finish(one)
    assert proposer.gauges()["ngram/rows"] == 0


def test_proposing_and_observing_never_write_to_a_row() -> None:
    # case 56
    proposer, one = NgramProposer(min_match=1), row([1, 2, 1, 2], [1])
    before = list(one.token_ids)
    ids = draft(proposer, one)
    proposer.observe([one])
    assert one.token_ids == before and ids
    assert one.counters.drafted == 0


@pytest.mark.parametrize("draft_len", [2, 3, 4, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_of_one_repeated_token_generates_as_plain_decoding(
    temperature: float, draft_len: int
) -> None:
    # case 117
    table = random_table(3, depth=3, seed=1)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=64)
    requests = [request("r", [1] * 6, sampling)]
    engine = table_engine(
        table, 3, proposer=NgramProposer(min_match=1), draft_len=draft_len, context_len=128
    )
    plain = run(table_engine(table, 3, context_len=128), requests)["r"]
    drafted = run(engine, requests)["r"]
    assert drafted.token_ids == plain.token_ids and drafted.counters.accepted > 0
