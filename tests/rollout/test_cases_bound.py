"""Where rows end, for every proposer: limits, stops inside accepted runs, empty and full prompts.

Scripts that target and proposers know make whole runs accepted, whatever the law of the draft; where
the random tables are used, the law of what fits is enumerated. Rows at temperature 0 and 1 share a
batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proposers.none import NoProposer
from rollout.draft import Draft
from rollout.draft_len import FixedDraftLen
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes, total_variation
from rollout.errors import InvalidRequest
from rollout.native_engine import NativeEngine
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.table_policy import markov_table, random_table
from tests.rollout.engines import (
    ScriptedProposer,
    drawing_proposer,
    plain_law,
    request,
    run,
    table_engine,
)
from tests.rollout.policies import engine_over, loaded_policy, random_ids
from tests.rollout.proposers_under_test import (
    DRAFTING,
    DRAWN,
    PROPOSERS,
    SEEDED,
    Watched,
    certain,
    knowing,
    llama_engine,
    make,
    telling,
    with_trees,
)

V = 10
TARGET, DRAFT = random_table(3, depth=2, seed=1), random_table(3, depth=1, seed=2)
every_proposer = pytest.mark.parametrize("name", PROPOSERS)
every_drafting = pytest.mark.parametrize("name", DRAFTING)
every_kind = pytest.mark.parametrize("kind", DRAWN)


def letters(ids: Sequence[int]) -> str:
    return "".join(("x", "E", "N", "D", "EN", "DE", "a", "b", "c", "d")[token] for token in ids)


def script_engine(
    name: str, script: Sequence[int], draft_len: int, proposer: Proposer | None = None
) -> NativeEngine:
    """Target and proposer know the script behind `telling(script)`."""
    proposer = proposer or knowing(name, script, V)
    made = table_engine(certain(script, V), V, proposer=proposer, decode=letters)
    return with_trees(made, name, draft_len)


def both(script: Sequence[int], **sampling: object) -> list[RolloutRequest]:
    """A greedy and a sampled request of the script."""
    return [
        request(f"t{t}", telling(script), SamplingParams(temperature=t, **sampling))  # type: ignore[arg-type]
        for t in (0, 1)
    ]


def ends(samples: dict[str, RolloutSample]) -> set[tuple[tuple[int, ...], str, str]]:
    """Tokens, reason and detail of all samples."""
    return {(s.token_ids, s.finish_reason, s.finish_detail) for s in samples.values()}


def table_rows(name: str, draft_len: int, **sizes: int) -> NativeEngine:
    """An engine over the random tables of three tokens."""
    made = table_engine(TARGET, 3, proposer=Watched(make(name, DRAFT)), **sizes)
    return with_trees(made, name, draft_len)


def tokens(samples: dict[str, RolloutSample]) -> dict[str, tuple[int, ...]]:
    return {name: sample.token_ids for name, sample in samples.items()}


# ---- length -------------------------------------------------------------------------------


@every_drafting
@pytest.mark.parametrize("draft_len", range(1, 9))
def test_accepted_drafts_never_make_more_than_max_new_tokens(name: str, draft_len: int) -> None:
    # case 52: prompt 9 7 8 9 7 8; budgets 1..6, greedy and sampled, in one batch
    behind = [{9: 7, 7: 8, 8: 9}.get(token, 0) for token in range(V)]
    cycle = markov_table(1000 * torch.eye(V, dtype=torch.float64)[behind])
    made = table_engine(cycle, V, proposer=make(name, cycle), num_slots=12)
    with_trees(made, name, draft_len)
    requests = [
        request(f"{n} {t}", (9, 7, 8, 9, 7, 8), SamplingParams(temperature=t, max_new_tokens=n))
        for n in range(1, 7)
        for t in (0, 1)
    ]
    for sample in run(made, requests).values():
        num = sample.request.sampling.max_new_tokens
        assert sample.token_ids == (9, 7, 8, 9, 7, 8)[:num]
        assert (sample.finish_reason, sample.finish_detail) == ("length", "max_new_tokens")
    assert made.counters().accepted > 0


@every_proposer
def test_rows_end_at_the_context_limit_and_the_engine_serves_on(name: str) -> None:
    # cases 54, 86: limit 64, prompts of 50..63 tokens, drafts of 8, four slots
    made = table_rows(name, 8, num_slots=4)
    requests = [
        request(f"r{n}", [n % 3] * n, SamplingParams(max_new_tokens=40, temperature=n % 2))
        for n in range(50, 64)
    ]
    for sample in run(made, requests).values():
        assert len(sample.request.prompt_ids) + len(sample.token_ids) == 64
        assert (sample.finish_reason, sample.finish_detail) == ("length", "context_len")
    assert len(run(made, [request("next")])["next"].token_ids) == 8


@pytest.mark.parametrize("name", ["ngram", "history", "tree", "counts", "mixed"])
def test_a_transformer_is_driven_to_the_last_entry_of_its_cache(
    name: str, tiny_llama: Path
) -> None:
    # case 54: its cache and its rotary table end at 64; greedy rows equal those without drafts
    policy = loaded_policy(tiny_llama, num_slots=4, context_len=64)
    requests = [
        request(f"r{n}", random_ids(n, n), SamplingParams(max_new_tokens=40, temperature=n % 2))
        for n in (50, 55, 60, 61, 62, 63)
    ]
    drafted = run(llama_engine(policy, tiny_llama, name, draft_len=8), requests)
    plain = run(engine_over(policy), requests)
    assert all(len(s.request.prompt_ids) + len(s.token_ids) == 64 for s in drafted.values())
    greedy = [r.id for r in requests if r.sampling.greedy]
    assert [drafted[n].token_ids for n in greedy] == [plain[n].token_ids for n in greedy]


@every_proposer
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_last_positions_of_the_context_have_the_plain_law(
    name: str, temperature: float
) -> None:
    # case 55: limit 8, prompt of 6, K = 3: drafts of at most one token, then none
    prompt, sampling = (0, 1, 2, 0, 1, 2), SamplingParams(temperature=temperature)

    def generate(draws: EnumeratedDraws) -> tuple[int, ...]:
        proposer = Watched(make(name, DRAFT))
        made = table_engine(TARGET, 3, proposer=proposer, context_len=8, draws_for=lambda _: draws)
        with_trees(made, name, draft_len=3)
        ids = run(made, [request(prompt=prompt, sampling=sampling)])["r0"].token_ids
        assert proposer.asked == [(1,)]
        return ids

    plain = plain_law(TARGET, prompt, SamplingParams(temperature=temperature, max_new_tokens=2), 3)
    assert total_variation(enumerate_outcomes(generate), plain) < 1e-12


@every_drafting
def test_three_tokens_before_the_limit_a_proposer_writes_nothing_into_the_row(name: str) -> None:
    # case 56: P = 29, two accepted, limit 32; `Watched` compares the rows before and after
    script = [1 + n % 9 for n in range(27)]
    proposer = Watched(knowing(name, script, V))
    made = table_engine(certain(script, V), V, proposer=proposer, context_len=32)
    samples = run(with_trees(made, name, draft_len=8), both(script))
    assert ends(samples) == {(tuple(script[:3]), "length", "context_len")}
    # the second row forks its prompt from the first and decodes in the round after
    assert proposer.asked == [(2,), (2,)] and made.counters().accepted == 4


@every_proposer
def test_what_fits_the_context_is_made_and_not_an_error(name: str) -> None:
    # case 66: limit 32, prompt of 30, max_new_tokens 8
    made = table_rows(name, 4, context_len=32)
    requests = [
        request(f"t{t}", (0, 1) * 15, SamplingParams(temperature=t, max_new_tokens=8))
        for t in (0, 1)
    ]
    for sample in run(made, requests).values():
        assert len(sample.token_ids) == len(sample.logprobs) == 2
        assert (sample.finish_reason, sample.finish_detail) == ("length", "context_len")


# ---- stops --------------------------------------------------------------------------------


@every_proposer
@pytest.mark.parametrize("draft_len", [5, 8])
def test_a_stop_id_inside_the_budget_wins_over_the_length(name: str, draft_len: int) -> None:
    # case 57: out = [4, 5, 6, STOP, 7, 8, 9] in one accepted run, max 6
    script = [4, 5, 6, 3, 7, 8, 9]
    samples = run(
        script_engine(name, script, draft_len),
        both(script, max_new_tokens=6, stop_token_ids=(3,)),
    )
    assert ends(samples) == {((4, 5, 6, 3), "stop", "token 3")}
    assert all(s.counters.rounds == 1 for s in samples.values()) == (name != "none")


@every_proposer
@pytest.mark.parametrize("draft_len", [5, 8])
def test_a_stop_string_inside_the_budget_wins_over_the_length(name: str, draft_len: int) -> None:
    # case 57: c E N D | d d d; also where the string ends with the budget
    script = [8, 1, 2, 3, 9, 9, 9]
    for budget in (6, 4):
        requests = both(script, max_new_tokens=budget, stop_strings=("END",))
        assert ends(run(script_engine(name, script, draft_len), requests)) == {
            ((8, 1, 2, 3), "stop", "string 'END'")
        }


@every_proposer
@pytest.mark.parametrize("end", [[4, 3], [6, 4, 3], [6, 6, 1, 2, 3], [5, 4, 5], [1, 2, 5]])
def test_a_stop_string_is_cut_at_wherever_the_rounds_end(name: str, end: list[int]) -> None:
    # case 59: complete at the 2nd of a run of 8, or split over rounds; tokens of two letters
    # ("EN" + "D"), one of which ends the string and goes on ("DE"), kept whole
    script = [*end, *[7] * 10]
    for draft_len in (1, 2, 3, 8):
        requests = both(script, max_new_tokens=12, stop_strings=("END",))
        samples = run(script_engine(name, script, draft_len), requests)
        assert ends(samples) == {(tuple(end), "stop", "string 'END'")}


@every_proposer
def test_a_stop_string_split_by_a_weight_swap_is_found(name: str) -> None:
    # case 59: the resumed run; a swap after every round
    script = [6, 1, 2, 3, *[7] * 8]
    made = script_engine(name, script, draft_len=1)
    made.submit(both(script, max_new_tokens=12, stop_strings=("END",)))
    samples: dict[str, RolloutSample] = {}
    for version in range(1, 9):
        samples |= {sample.request.id: sample for sample in made.step()}
        made.load(certain(script, V), version=version, digest="again")
    assert ends(samples) == {((6, 1, 2, 3), "stop", "string 'END'")}
    assert all(len(sample.version_spans) > 1 for sample in samples.values())


def test_the_prompt_is_not_searched_for_stop_strings() -> None:
    # case 59: the prompt ends in "EN", the answer begins with "D"
    made = table_engine(lambda ids: 1000 * torch.eye(V).double()[3], V, decode=letters)
    sampling = SamplingParams(max_new_tokens=3, stop_strings=("END",))
    assert run(made, [request(prompt=(1, 2), sampling=sampling)])["r0"].token_ids == (3, 3, 3)


@every_proposer
def test_nothing_is_emitted_behind_eos_in_the_middle_of_a_draft(name: str) -> None:
    # case 61: [5, EOS, 6, 7] all matching
    script = [5, 3, 6, 7]
    samples = run(
        script_engine(name, script, draft_len=4),
        both(script, max_new_tokens=4, stop_token_ids=(3,)),
    )
    assert ends(samples) == {((5, 3), "stop", "token 3")}


@every_proposer
def test_eos_is_a_token_like_any_other_when_it_is_ignored(name: str) -> None:
    # case 61: as the model's eos it ends the row, with ignore_eos all four are kept
    script = [5, 3, 6, 7]
    for ignored, want in ((False, (5, 3)), (True, (5, 3, 6, 7))):
        requests = both(script, max_new_tokens=4, eos_token_ids=(3,), ignore_eos=ignored)
        samples = run(script_engine(name, script, draft_len=4), requests)
        assert {sample.token_ids for sample in samples.values()} == {want}


@every_proposer
def test_an_ignored_eos_does_not_hide_a_stop_id(name: str) -> None:
    # case 61: ignore_eos is about the model's ids, not about the request's own
    script = [5, 3, 6, 7]
    requests = both(
        script, max_new_tokens=4, eos_token_ids=(3,), ignore_eos=True, stop_token_ids=(6,)
    )
    samples = run(script_engine(name, script, draft_len=4), requests)
    assert ends(samples) == {((5, 3, 6), "stop", "token 6")}


@every_proposer
def test_without_eos_rows_run_to_their_length(name: str) -> None:
    # case 62: no stop ids, a match found, max 15
    script = [5, 6] * 8
    samples = run(script_engine(name, script, draft_len=4), both(script, max_new_tokens=15))
    assert ends(samples) == {(tuple(script[:15]), "length", "max_new_tokens")}
    assert all((s.counters.accepted > 0) == (name != "none") for s in samples.values())


@every_proposer
@pytest.mark.parametrize("given", ["stop_token_ids", "eos_token_ids"])
def test_either_of_two_eos_ids_ends_a_row(name: str, given: str) -> None:
    # case 62: 4 behind one token, 8 behind two
    for script, want in (([5, 4, 8, 6], (5, 4)), ([5, 6, 8, 4], (5, 6, 8))):
        requests = both(script, max_new_tokens=4, **{given: (8, 4)})
        samples = run(script_engine(name, script, draft_len=3), requests)
        assert ends(samples) == {(want, "stop", f"token {want[-1]}")}


@every_proposer
def test_rows_with_stops_have_the_plain_law(name: str) -> None:
    # cases 57, 61, 62: two eos ids, a budget of 3, drafts of 3; random tables
    sampling = SamplingParams(max_new_tokens=3, stop_token_ids=(2, 1))

    def generate(draws: EnumeratedDraws) -> tuple[int, ...]:
        made = table_engine(TARGET, 3, proposer=make(name, DRAFT), draws_for=lambda _: draws)
        with_trees(made, name, draft_len=3)
        return run(made, [request(prompt=(0, 0), sampling=sampling)])["r0"].token_ids

    plain = plain_law(TARGET, (0, 0), sampling, 3)
    assert total_variation(enumerate_outcomes(generate), plain) < 1e-12


# ---- empty and full -----------------------------------------------------------------------


@every_proposer
def test_an_empty_prompt_is_refused_by_name_and_rows_in_flight_finish(name: str) -> None:
    # case 63: three in flight; the good one that came with it is not queued either
    made = table_rows(name, 3)
    rows = [
        request(f"r{i}", (0, i), SamplingParams(temperature=i % 2, max_new_tokens=12))
        for i in range(3)
    ]
    made.submit(rows)
    made.step()
    with pytest.raises(InvalidRequest, match="empty prompt"):
        made.submit([request("d"), request("empty", ())])
    assert tokens(run(made, [])) == tokens(run(table_rows(name, 3), rows))


@every_proposer
def test_a_budget_of_zero_gives_an_empty_sample_that_no_proposer_sees(name: str) -> None:
    # case 65: 0 tokens, 0 logprobs, reason length; the group keeps its four entries
    made = table_rows(name, 3)
    budgets = [SamplingParams(max_new_tokens=n) for n in (0, 6, 0, 6)]
    group = [
        request(f"r{i}", (0, 1), sampling, prompt_id="p", sample_index=i)
        for i, sampling in enumerate(budgets)
    ]
    samples = run(made, group)
    assert samples.keys() == {r.id for r in group}
    for i in (0, 2):
        empty = samples[f"r{i}"]
        assert (empty.token_ids, empty.logprobs, empty.kept_mass) == ((), (), ())
        assert (empty.finish_reason, empty.version_spans) == ("length", ())
        assert empty.counters.rounds == 0 and empty.counters.acceptance_rate is None
    assert all(len(room) <= 2 for room in made.proposer.room)  # type: ignore[attr-defined]


@every_proposer
@pytest.mark.parametrize("prompt_len", [32, 33])
def test_a_full_prompt_is_refused_before_it_is_scheduled(name: str, prompt_len: int) -> None:
    # case 65
    made = table_rows(name, 3, context_len=32)
    made.submit([request("live", (0, 1))])
    made.step()
    with pytest.raises(InvalidRequest, match="leaves no room in a context of 32"):
        made.submit([request("full", [1] * prompt_len)])
    assert run(made, []).keys() == {"live"}


# ---- resumed ------------------------------------------------------------------------------


@every_proposer
@pytest.mark.parametrize("num_rounds", [1, 2, 3])
def test_an_interrupted_row_gets_the_rest_of_its_budget_only(name: str, num_rounds: int) -> None:
    # case 67: budget 8; what was made before the swap and after it
    made = table_rows(name, 3)
    rows = [
        request(f"t{t}", (0, 1), SamplingParams(temperature=t, max_new_tokens=8)) for t in (0, 1)
    ]
    made.submit(rows)
    samples = {s.request.id: s for _ in range(num_rounds) for s in made.step()}
    made.load(TARGET, version=1, digest="next")
    samples |= run(made, [])
    assert {s.finish_detail for s in samples.values()} == {"max_new_tokens"}
    assert all(sum(n for _, n in s.version_spans) == 8 for s in samples.values())


@pytest.mark.parametrize("name", SEEDED)
def test_a_sample_resumed_by_its_client_goes_on_as_if_it_had_not_stopped(name: str) -> None:
    # case 67: aborted after some of 20 tokens and asked for again behind them, with what is left
    for i in range(4):  # one greedy, three sampled
        sampling = SamplingParams(temperature=min(i, 1), max_new_tokens=20)
        first = request(prompt=(0, 1), sampling=sampling, sample_index=i)
        whole = run(table_rows(name, 3), [first])["r0"].token_ids
        made = table_rows(name, 3)
        made.submit([first])
        assert not any(made.step() for _ in range(2 + i))
        (part,) = made.abort(["r0"])
        rest = replace(sampling, max_new_tokens=20 - len(part.token_ids))
        resumed = replace(first, prompt_ids=(0, 1, *part.token_ids), sampling=rest)
        assert part.token_ids + run(table_rows(name, 3), [resumed])["r0"].token_ids == whole


@every_proposer
def test_a_sample_resumed_with_nothing_left_gets_nothing(name: str) -> None:
    # case 67: 8 done, then 0 more, reason length
    sampling = SamplingParams(max_new_tokens=8)
    made = table_rows(name, 3)
    done = run(made, [request(prompt=(0, 1), sampling=sampling)])["r0"].token_ids
    none_left = SamplingParams(max_new_tokens=8 - len(done))
    sample = run(made, [request(prompt=(0, 1, *done), sampling=none_left)])["r0"]
    assert (sample.token_ids, sample.finish_reason) == ((), "length")


# ---- too much, or nonsense, from a proposer -----------------------------------------------


class Lengths(FixedDraftLen):
    """Four drafted tokens for every other row, none for the rest."""

    def choose(
        self, rows: Sequence[Row], *, can_branch: bool = True, draining: bool = False
    ) -> list[int]:
        return [4 * (i % 2) for i, _ in enumerate(rows)]


@every_kind
def test_thirty_drafted_tokens_are_cut_to_four_and_five_to_none(kind: str) -> None:
    # case 69: K = 4 and K = 0 in one batch, greedy and sampled; all rows are given 30
    inner = drawing_proposer(kind, DRAFT)

    class Generous(NoProposer):
        def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
            return [inner._draft(row, 30) for row in rows]

    made = table_engine(TARGET, 3, proposer=Generous())
    made.draft_len = Lengths(0)
    sampling = [SamplingParams(temperature=t, max_new_tokens=20) for t in (0, 0, 1, 1)]
    samples = run(made, [request(f"r{i}", (0, 1), one) for i, one in enumerate(sampling)])
    assert all(len(sample.token_ids) == 20 for sample in samples.values())
    assert max(len(sample.counters.reached) for sample in samples.values()) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_that_is_too_large_and_too_deep_leaves_the_row_its_length(
    temperature: float,
) -> None:
    # case 69: 30 nodes in one line for a row that has 9 tokens left, then 8, ...
    class Deep(NoProposer):
        def propose_trees(
            self, rows: Sequence[Row], max_nodes: Sequence[int], max_depths: Sequence[int]
        ) -> list[Draft]:
            return [Draft.tree([1] * 30, range(-1, 29)) for _ in rows]

    made = table_engine(TARGET, 3, proposer=Deep(), context_len=16)
    made.draft_len = FixedDraftLen(12, branching=True)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=9)
    rows = [request("long", (1,) * 14, sampling), request("short", (1,), sampling)]
    assert tokens(run(made, rows)) == tokens(run(table_engine(TARGET, 3, context_len=16), rows))


@every_kind
def test_a_draft_that_is_too_long_leaves_the_law_alone(kind: str) -> None:
    # case 69: one more than was asked for; cutting does not look at the tokens
    sampling = SamplingParams(max_new_tokens=2)

    def generate(draws: EnumeratedDraws) -> tuple[int, ...]:
        inner = drawing_proposer(kind, DRAFT)
        too_long = ScriptedProposer(lambda row, n: inner._draft(row, n + 1))
        made = table_engine(
            TARGET, 3, proposer=too_long, draft_len=1, draws_for=lambda _: draws
        )  # fmt: skip
        return run(made, [request(sampling=sampling)])["r0"].token_ids

    law = enumerate_outcomes(generate)
    assert total_variation(law, plain_law(TARGET, (0,), sampling, 3)) < 1e-12


def test_what_is_cut_off_a_draft_is_not_looked_at() -> None:
    """Nobody scores it, and to check what was drawn takes as long as to draw it."""

    class First(FixedDraftLen):
        def keep(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> list[Draft]:
            return [draft.truncated(1) for draft in drafts]

    proposer = ScriptedProposer(lambda row, n: Draft.of_points([0, -1, 2]))
    made = table_engine(TARGET, 3, proposer=proposer, draft_len=3)
    made.draft_len = First(3)
    sample = run(made, [request()])["r0"]
    assert sample.finish_reason == "length" and sample.counters.verified > 0
    assert sample.token_ids == tokens(run(table_engine(TARGET, 3), [request()]))["r0"]


@pytest.mark.parametrize("bad", [-1, 3])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_drafted_id_outside_the_vocabulary_ends_that_row_only(bad: int, depth: int) -> None:
    # case 69: at every place of the draft; the other rows, greedy and sampled, are untouched
    ids = [0, 1, 2]
    ids[depth] = bad
    proposer = ScriptedProposer(
        lambda row, n: Draft.of_points(ids if row.request.id == "bad" else [0, 1, 2])
    )
    rows = [
        request(n, (0, 1), SamplingParams(temperature=t, max_new_tokens=9))
        for n, t in (("a", 1), ("bad", 1), ("greedy", 0))
    ]
    samples = run(table_engine(TARGET, 3, proposer=proposer, draft_len=3), rows)
    assert samples["bad"].finish_reason == "error" and f"draft token {bad}" in (
        samples["bad"].finish_detail
    )
    plain = tokens(run(table_engine(TARGET, 3), rows))
    assert all(samples[n].token_ids == plain[n] for n in ("a", "greedy"))
