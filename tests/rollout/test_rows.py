"""Where a row ends: stops inside accepted runs, stop strings, limits, empty and full prompts."""

from collections.abc import Sequence

import pytest
import torch

from proposers.ngram import NgramProposer
from rollout.draft import Draft
from rollout.errors import InvalidRequest
from rollout.proposer import Proposer
from rollout.request import RolloutSample
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.stop_text import StopText
from rollout.table_policy import Table, random_table
from tests.rollout.engines import ScriptedProposer, request, run, table_engine

V = 10
DRAFT_LENS = [0, 1, 3, 4, 5, 7, 8]


def chain(script: Sequence[int], prompt_len: int = 1) -> Table:
    """Certain of its next token: the script, then its last token for ever."""

    def table(tokens: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(V, dtype=torch.float64)
        logits[script[min(len(tokens) - prompt_len, len(script) - 1)]] = 1000.0
        return logits

    return table


def oracle(script: Sequence[int]) -> ScriptedProposer:
    """Drafts the script."""

    def draft(row: Row, max_len: int) -> Draft:
        return Draft.of_points(script[row.num_generated : row.num_generated + max_len])

    return ScriptedProposer(draft)


def letters(ids: Sequence[int]) -> str:
    return "".join("xEND.abcde"[token] for token in ids)


def utf8(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def generate(
    script: Sequence[int],
    sampling: SamplingParams,
    draft_len: int = 8,
    *,
    context_len: int = 64,
    prompt: Sequence[int] = (0,),
    proposer: Proposer | None = None,
) -> RolloutSample:
    engine = table_engine(
        chain(script, len(prompt)),
        V,
        proposer=proposer or oracle(script),
        draft_len=draft_len,
        context_len=context_len,
        decode=letters,
    )
    return run(engine, [request("r", prompt, sampling)])["r"]


# ---- length -------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_len", range(1, 9))
@pytest.mark.parametrize("max_new_tokens", range(1, 7))
def test_prompt_lookup_never_makes_more_than_max_new_tokens(
    max_new_tokens: int, draft_len: int
) -> None:
    # case 52
    sample = generate(
        [9, 7, 8] * 4,
        SamplingParams(max_new_tokens=max_new_tokens),
        draft_len,
        prompt=(9, 7, 8, 9, 7, 8),
        proposer=NgramProposer(),
    )
    assert sample.token_ids == tuple(([9, 7, 8] * 2)[:max_new_tokens])
    assert (sample.finish_reason, sample.finish_detail) == ("length", "max_new_tokens")


@pytest.mark.parametrize("draft_len", [3, 8])
def test_rows_end_at_the_context_limit_beside_each_other(draft_len: int) -> None:
    # cases 54, 55, 86
    table = random_table(4, depth=2, seed=1)
    sampling = SamplingParams(max_new_tokens=40)
    requests = [request(f"r{n}", [n % 4] * n, sampling) for n in range(50, 64)]
    engines = [
        table_engine(table, 4, proposer=NgramProposer(min_match=1), draft_len=k)
        for k in (0, draft_len)
    ]
    plain, drafted = (run(engine, requests) for engine in engines)
    assert all(len(s.request.prompt_ids) + len(s.token_ids) == 64 for s in drafted.values())
    assert {s.finish_detail for s in drafted.values()} == {"context_len"}
    assert {n: s.token_ids for n, s in drafted.items()} == {
        n: s.token_ids for n, s in plain.items()
    }


@pytest.mark.parametrize("draft_len", [0, 2, 8])
def test_what_fits_the_context_is_made(draft_len: int) -> None:
    # case 66
    sample = generate(
        [5] * 9, SamplingParams(max_new_tokens=8), draft_len, context_len=32, prompt=[1] * 30
    )
    assert (sample.token_ids, sample.finish_reason) == ((5, 5), "length")


@pytest.mark.parametrize("prompt_len", [32, 33])
def test_a_prompt_that_fills_the_context_is_refused_before_it_costs_anything(
    prompt_len: int,
) -> None:
    # case 65
    engine = table_engine(chain([5]), V, context_len=32)
    with pytest.raises(InvalidRequest, match="context"):
        engine.submit([request("r", [1] * prompt_len)])
    assert engine.num_unfinished == 0


def test_max_new_tokens_0_gives_an_empty_sample_that_ends_by_length() -> None:
    # case 65: the group keeps its two entries
    engine = table_engine(chain([5] * 4), V)
    empty = SamplingParams(max_new_tokens=0)
    samples = run(engine, [request("a", sampling=empty), request("b")])
    assert (samples["a"].token_ids, samples["a"].logprobs) == ((), ())
    assert samples["a"].finish_reason == "length" and samples["a"].oldest_version is None
    assert len(samples["b"].token_ids) == 8


def test_an_empty_prompt_is_refused_by_name_and_others_finish() -> None:
    # case 63
    engine = table_engine(chain([5] * 8), V)
    engine.submit([request(name) for name in "abc"])
    engine.step()
    with pytest.raises(InvalidRequest, match="empty prompt"):
        engine.submit([request("d"), request("empty", ())])
    assert set(run(engine, [])) == {"a", "b", "c"}  # d came with a bad one: none is queued


@pytest.mark.parametrize("token", [-1, V])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    engine = table_engine(chain([5]), V)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        engine.submit([request("r", (0, token))])
    with pytest.raises(InvalidRequest):
        engine.submit([request("r", (0,), SamplingParams(stop_token_ids=(token,)))])


@pytest.mark.parametrize("num_before", [3, 5, 7])
def test_a_row_that_was_interrupted_does_not_get_its_budget_again(num_before: int) -> None:
    # case 67
    script = [5] * 20
    engine = table_engine(chain(script), V)
    engine.submit([request("r", sampling=SamplingParams(max_new_tokens=8))])
    for _ in range(num_before):
        engine.step()
    engine.load(chain(script), version=1, digest="next")
    sample = run(engine, [])["r"]
    assert sample.version_spans == ((0, num_before), (1, 8 - num_before))


@pytest.mark.parametrize(("offered", "draft_len"), [(30, 4), (5, 0), (30, 1)])
def test_a_proposer_that_returns_too_much_is_cut_to_what_was_asked(
    offered: int, draft_len: int
) -> None:
    # case 69
    proposer = ScriptedProposer(lambda row, n: Draft.of_points([5] * offered))
    sample = generate([5] * 9, SamplingParams(max_new_tokens=9), draft_len, proposer=proposer)
    assert sample.token_ids == (5,) * 9
    assert len(sample.counters.reached) <= draft_len


@pytest.mark.parametrize("draft_len", DRAFT_LENS)
def test_no_draft_reaches_behind_the_last_token_that_may_be_emitted(draft_len: int) -> None:
    # case 55: a draft of at most `remaining - 1`, so nothing verified is thrown away
    sample = generate([5] * 12, SamplingParams(max_new_tokens=7), draft_len)
    assert sample.counters.verified == sample.counters.accepted
    assert len(sample.token_ids) == 7


def test_no_row_outgrows_its_limits_whatever_is_drafted() -> None:
    # case 56: the limit 32, accepted runs that end at every offset
    table = random_table(3, depth=2, seed=6)
    requests = [
        request(f"r{n}", [n % 3] * n, SamplingParams(max_new_tokens=1 + n % 9))
        for n in range(1, 32)
    ]
    engine = table_engine(
        table, 3, proposer=NgramProposer(min_match=1), draft_len=5, context_len=32
    )
    for sample in run(engine, requests).values():
        prompt_len = len(sample.request.prompt_ids)
        assert len(sample.token_ids) == min(sample.request.sampling.max_new_tokens, 32 - prompt_len)


# ---- stop ids -----------------------------------------------------------------------------


@pytest.mark.parametrize("draft_len", DRAFT_LENS)
def test_a_stop_before_the_limit_wins_inside_one_accepted_run(draft_len: int) -> None:
    # case 57
    sampling = SamplingParams(max_new_tokens=6, stop_token_ids=(3,))
    sample = generate([4, 5, 6, 3, 7, 8, 9], sampling, draft_len)
    assert (sample.token_ids, sample.finish_reason) == ((4, 5, 6, 3), "stop")
    assert sample.finish_detail == "token 3"


def test_a_stop_as_the_last_token_of_the_budget_is_a_stop() -> None:
    sampling = SamplingParams(max_new_tokens=4, stop_token_ids=(3,))
    assert generate([4, 5, 6, 3], sampling).finish_reason == "stop"


def test_a_stop_in_the_middle_of_a_draft_ends_the_row_and_nothing_follows() -> None:
    # case 61
    script = [5, 3, 6, 7]
    stopped = generate(script, SamplingParams(max_new_tokens=4, stop_token_ids=(3,)))
    assert stopped.token_ids == (5, 3)
    # case 61: without stop ids the same draft is kept whole
    assert generate(script, SamplingParams(max_new_tokens=4)).token_ids == (5, 3, 6, 7)


def test_nothing_is_verified_behind_a_drafted_stop() -> None:
    # case 33: drafts behind the stop could never be emitted
    sample = generate([5, 3, 6, 7, 8], SamplingParams(max_new_tokens=9, stop_token_ids=(3,)))
    assert (sample.counters.drafted, sample.counters.accepted) == (2, 2)
    assert sample.counters.bonuses == 0


@pytest.mark.parametrize("stop", [3, 6])
def test_either_of_two_stop_ids_ends_the_row(stop: int) -> None:
    # case 62
    sampling = SamplingParams(max_new_tokens=15, stop_token_ids=(3, 6))
    assert generate([5, stop, 7], sampling).token_ids == (5, stop)


def test_without_stop_ids_the_row_runs_to_its_limit() -> None:
    # case 62
    sample = generate(
        [5] * 20, SamplingParams(max_new_tokens=15), prompt=(5, 5, 5), proposer=NgramProposer()
    )
    assert (sample.token_ids, sample.finish_reason) == ((5,) * 15, "length")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("min_tokens", [1, 2, 5])
@pytest.mark.parametrize("draft_len", DRAFT_LENS)
def test_min_tokens_holds_at_every_offset_of_the_window(
    draft_len: int, min_tokens: int, temperature: float
) -> None:
    # case 29: stop far above all others, drafted at every position
    sampling = SamplingParams(
        max_new_tokens=9, min_tokens=min_tokens, stop_token_ids=(3,), temperature=temperature
    )
    draft_stops = ScriptedProposer(lambda row, n: Draft.of_points([3] * n))
    sample = generate([3] * 9, sampling, draft_len, proposer=draft_stops)
    assert len(sample.token_ids) == min_tokens + 1
    assert 3 not in sample.token_ids[:-1] and sample.token_ids[-1] == 3


@pytest.mark.parametrize("draft_len", DRAFT_LENS)
def test_min_tokens_holds_behind_accepted_tokens(draft_len: int) -> None:
    # case 29: 5, 5, 5 are accepted, the stop behind them is banned up to position 5
    sampling = SamplingParams(max_new_tokens=9, min_tokens=5, stop_token_ids=(3,), temperature=0)
    sample = generate([5, 5, 5, 3, 3, 3, 3], sampling, draft_len)
    # greedy with the stop banned: the first of the tied rest, 0
    assert sample.token_ids == (5, 5, 5, 0, 0, 3)


@pytest.mark.parametrize("draft_len", DRAFT_LENS)
@pytest.mark.parametrize("num_before", [2, 3, 5])
def test_a_stop_is_allowed_from_min_tokens_on_within_one_window(
    num_before: int, draft_len: int
) -> None:
    # case 29: the window starts before min_tokens=2 and reaches behind it
    sampling = SamplingParams(max_new_tokens=9, min_tokens=2, stop_token_ids=(3,))
    script = [5] * num_before + [3]
    assert generate(script, sampling, draft_len).token_ids == tuple(script)


# ---- stop strings -------------------------------------------------------------------------


@pytest.mark.parametrize("draft_len", DRAFT_LENS)
@pytest.mark.parametrize("offset", range(5))
def test_a_stop_string_is_found_wherever_the_rounds_end(offset: int, draft_len: int) -> None:
    # case 59: E N D behind `offset` tokens, inside a run or over two of them
    script = [6] * offset + [1, 2, 3] + [7] * 8
    sampling = SamplingParams(max_new_tokens=12, stop_strings=("END",))
    sample = generate(script, sampling, draft_len)
    assert sample.token_ids == tuple(script[: offset + 3])
    assert (sample.finish_reason, sample.finish_detail) == ("stop", "string 'END'")


@pytest.mark.parametrize("draft_len", DRAFT_LENS)
def test_a_stop_string_that_ends_before_min_tokens_is_never_looked_at_again(
    draft_len: int,
) -> None:
    # case 30: the first END is complete at 3 < 5, the second at 8
    script = [1, 2, 3, 6, 6, 1, 2, 3, 7, 7, 7]
    sampling = SamplingParams(max_new_tokens=11, min_tokens=5, stop_strings=("END",))
    assert generate(script, sampling, draft_len).token_ids == tuple(script[:8])


def test_a_stop_string_complete_at_min_tokens_is_a_stop() -> None:
    # case 30: it ends at 3, not before it
    sampling = SamplingParams(max_new_tokens=9, min_tokens=3, stop_strings=("END",))
    assert generate([1, 2, 3, 6], sampling).token_ids == (1, 2, 3)


def test_tokens_behind_a_stop_string_are_verified_and_neither_accepted_nor_emitted() -> None:
    # case 197: one round of 8 drafted tokens, END complete at the third
    sampling = SamplingParams(max_new_tokens=12, stop_strings=("END",))
    counters = generate([1, 2, 3] + [7] * 9, sampling).counters
    assert (counters.verified, counters.accepted, counters.emitted) == (8, 3, 3)
    assert counters.reached == counters.accepted_by_position == [1, 1, 1]


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    engine = table_engine(chain([5]), V)
    with pytest.raises(InvalidRequest, match="tokenizer"):
        engine.submit([request(sampling=SamplingParams(stop_strings=("END",)))])


EMOJI = "\N{GRINNING FACE}".encode()  # 4 bytes


def completed_at(stops: Sequence[str], data: bytes) -> list[tuple[int, str]]:
    """(number of ids, stop string) of every id that completes one; an id is a byte."""
    watch = StopText(stops, utf8)
    found = [(n, watch.push(byte)) for n, byte in enumerate(data, 1)]
    return [(n, stop) for n, stop in found if stop is not None]


def test_a_character_split_over_tokens_is_seen_when_it_is_complete() -> None:
    # case 94
    assert completed_at((EMOJI.decode(),), b"ab" + EMOJI + b"c") == [(6, EMOJI.decode())]


def test_the_replacement_mark_never_reaches_the_search() -> None:
    # case 94
    assert completed_at(("\ufffd",), b"a" + EMOJI + "é".encode() + b"b") == []


@pytest.mark.parametrize("seed", range(20))
def test_text_taken_in_piece_by_piece_is_the_text_of_all_ids(seed: int) -> None:
    # case 94: every prefix of the text is a stop string, so each completed piece is reported
    generator = torch.Generator().manual_seed(seed)
    text = "".join("aé€😀"[int(i)] for i in torch.randint(4, (12,), generator=generator))
    prefixes = [text[: n + 1] for n in range(12)]
    pieces = [StopText((prefix,), utf8) for prefix in prefixes]
    ends = [len(prefix.encode()) for prefix in prefixes]
    for watch, end in zip(pieces, ends):
        hits = [n for n, byte in enumerate(text.encode(), 1) if watch.push(byte)]
        assert hits[0] == end


def test_overlapping_and_nested_stops_are_found_at_their_first_end() -> None:
    assert completed_at(("aab",), b"aaab") == [(4, "aab")]
    assert completed_at(("abc", "b"), b"xabc")[0] == (3, "b")
    assert completed_at(("a",), b"bab") == [(2, "a")]


@pytest.mark.parametrize("seed", range(30))
def test_stops_are_found_as_by_a_search_of_the_whole_text(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    text = "".join("ab"[int(i)] for i in torch.randint(2, (40,), generator=generator))
    stops = ("aba", "bbbb", "abab")
    expected = [n for n in range(1, 41) if any(text[:n].endswith(stop) for stop in stops)]
    assert [n for n, _ in completed_at(stops, text.encode())] == expected
