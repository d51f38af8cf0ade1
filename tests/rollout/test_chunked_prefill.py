"""Prompts in chunks beside decoding rows: one forward a round, a budget of tokens, the same tokens."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from proposers.history import HistoryProposer
from proposers.ngram import NgramProposer
from proposers.none import NoProposer
from rollout.draft_len import FixedDraftLen
from rollout.errors import InvalidConfig
from rollout.native_engine import NativeEngine
from rollout.policy import Window
from rollout.request import RolloutRequest, RolloutSample
from rollout.round_cost import RoundCost
from rollout.sampling import SamplingParams
from rollout.scheduler import MAX_BEFORE_TREE, split_budget
from rollout.table_policy import TablePolicy, random_table
from tests.rollout.engines import TableTrees, drawing_proposer, request, run, table_engine
from tests.rollout.policies import engine_over, loaded_policy, random_ids

V = 4
TABLE = random_table(V, depth=3, seed=41)
NEXT = random_table(V, depth=3, seed=42)
DRAFT = random_table(V, depth=1, seed=43)


class Recording(TablePolicy):
    """Keeps the windows of each call."""

    def __init__(self, num_slots: int = 8) -> None:
        super().__init__(TABLE, vocab_size=V, context_len=128, num_slots=num_slots)
        self.calls: list[list[Window]] = []

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        self.calls.append(list(windows))
        return super().score(windows)

    @property
    def num_tokens(self) -> list[int]:
        return [sum(len(window.token_ids) for window in call) for call in self.calls]


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first + i * i) % V for i in range(length))


def sized(length: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=length)


def group(num: int, prompt_len: int, length: int = 10) -> list[RolloutRequest]:
    return [
        request(f"g{i}", prompt(prompt_len), sized(length), prompt_id="p", sample_index=i)
        for i in range(num)
    ]


def tokens(samples: dict[str, RolloutSample]) -> dict[str, tuple[int, ...]]:
    return {name: sample.token_ids for name, sample in samples.items()}


# ---- the budget ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pending", "max_lens", "budget", "shares"),
    [
        ([1, 1], [3, 3], 4, [1, 1]),  # who decodes never waits
        ([1, 9], [3, 3], 8, [1, 4]),  # 4 decode, 4 are left
        ([1, 9], [3, 3], 16, [1, 9]),  # 9 and its draft of 3 are what is left
        ([1, 9], [3, 3], 15, [1, 8]),  # the draft does not fit: all but the last
        ([9, 5, 0, 5], [0, 0, 0, 0], 12, [9, 3, 0, 0]),  # in order; a row may wait
        ([1, 1, 9], [9, 9, 0], 4, [1, 1, 1]),  # one token in any case
        ([2], [0], 1, [1]),
    ],
)
def test_the_budget_goes_to_decoding_rows_first_and_then_in_order(
    pending: list[int], max_lens: list[int], budget: int, shares: list[int]
) -> None:
    assert split_budget(pending, max_lens, budget) == shares


def test_a_budget_of_no_tokens_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="max_round_tokens=0"):
        table_engine(TABLE, V, max_round_tokens=0)


@pytest.mark.parametrize("budget", [8, 20])
def test_a_round_is_one_forward_of_at_most_the_budget(budget: int) -> None:
    policy = Recording(num_slots=3)
    engine = table_engine(
        TABLE, V, policy=policy, proposer=NgramProposer(min_match=1), draft_len=1,
        max_round_tokens=budget,
    )  # fmt: skip
    run(engine, [request(f"r{n}", prompt(n, n), sized(12)) for n in (30, 3, 41, 1, 17)])
    assert len(policy.calls) == engine.gauges()["count/rounds"]
    assert max(policy.num_tokens) == budget


def test_a_prompt_that_fits_the_budget_is_run_and_decoded_in_one_round() -> None:
    policy = Recording()
    engine = table_engine(TABLE, V, policy=policy, max_round_tokens=5)
    engine.submit([request(prompt=prompt(5))])
    engine.step()
    assert policy.calls == [[Window(0, 0, prompt(5), num_logits=1)]]
    assert engine.counters().emitted == 1


def test_a_decoding_row_emits_in_every_round_while_a_long_prompt_is_run() -> None:
    engine = table_engine(TABLE, V, context_len=128, max_round_tokens=6)
    engine.submit([request("short", (1,), sized(30))])
    engine.step()
    engine.submit([request("long", prompt(60), sized(3))])
    emitted = []
    for _ in range(13):  # 5 of 60 a round beside the other's 1
        engine.step()
        emitted.append(engine.counters().emitted)
    assert emitted == [*range(2, 13), 14, 16]


def test_a_prompt_is_run_though_decoding_rows_fill_the_budget() -> None:
    engine = table_engine(TABLE, V, max_round_tokens=2)
    engine.submit([request(f"r{i}", (i,), sized(40)) for i in range(3)])
    engine.step()
    engine.submit([request("late", prompt(5), sized(1))])
    ended = [sample.request.id for _ in range(5) for sample in engine.step()]
    assert ended == ["late"]  # 4 rounds of one token and the round that decodes it


# ---- shared prompts -----------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 6, 19, 20, 2048])
def test_a_prompt_in_chunks_is_run_once_and_forked_to_its_group(budget: int) -> None:
    policy = Recording()
    engine = table_engine(TABLE, V, policy=policy, max_round_tokens=budget)
    samples = run(engine, group(5, prompt_len=20))
    gauges = engine.gauges()
    assert (gauges["count/prefill_tokens"], gauges["count/forked_tokens"]) == (19, 4 * 19)
    # 19 of the prompt, the last prompt token of each row and all emitted tokens but the last
    assert sum(policy.num_tokens) == 19 + 5 + 5 * 9
    assert tokens(samples) == tokens(run(table_engine(TABLE, V), group(5, prompt_len=20)))


def test_the_rows_of_a_group_decode_in_the_round_after_their_prompt_was_run() -> None:
    policy = Recording()
    engine = table_engine(TABLE, V, policy=policy, max_round_tokens=12)
    engine.submit(group(3, prompt_len=20))
    for _ in range(3):
        engine.step()
    slots = [[window.slot for window in call] for call in policy.calls]
    assert slots == [[0], [0], [0, 1, 2]]  # 12, 8 and its first token, all


def test_a_later_prompt_takes_what_an_earlier_one_leaves() -> None:
    policy = Recording()
    engine = table_engine(TABLE, V, policy=policy, max_round_tokens=10)
    engine.submit([request("a", prompt(7), sized(5)), request("b", prompt(7, 1), sized(5))])
    engine.step()
    assert [(w.slot, len(w.token_ids), w.num_logits) for w in policy.calls[0]] == [
        (0, 7, 1), (1, 3, 0),
    ]  # fmt: skip


# ---- the same tokens ----------------------------------------------------------------------

PROPOSERS = {
    "none": NoProposer,
    "ngram": lambda: NgramProposer(min_match=1),
    "history": HistoryProposer,
    "mixed": lambda: drawing_proposer("mixed", DRAFT),
}


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("budget", [1, 3, 7, 16])
def test_chunks_change_no_token_and_no_count_of_a_row(name: str, budget: int) -> None:
    requests = [request(f"r{n}", prompt(n, n), sized(15)) for n in (25, 1, 9, 2, 14, 30)]
    one, other = (
        run(
            table_engine(
                TABLE, V, proposer=PROPOSERS[name](), draft_len=3, num_slots=3, max_round_tokens=b
            ),
            requests,
        )
        for b in (budget, 2048)
    )
    assert tokens(one) == tokens(other)
    assert all(one[name].counters == other[name].counters for name in one)


@pytest.mark.parametrize("budget", [1, 4, 2048])
def test_interrupted_rows_run_what_they_had_once_more_in_chunks(budget: int) -> None:
    engine = table_engine(TABLE, V, max_round_tokens=budget)
    engine.submit([request("r", prompt(6), sized(20))])
    while engine.counters().emitted < 9:
        engine.step()
    engine.load(NEXT, version=1, digest="next")
    sample = run(engine, [])["r"]
    gauges = engine.gauges()
    assert (gauges["count/prefill_tokens"], gauges["count/refill_tokens"]) == (2 * 5, 9)
    assert sample.version_spans == ((0, 9), (1, 11))
    rest = request("rest", (*prompt(6), *sample.token_ids[:9]), sized(11), prompt_id="prompt of r")
    assert sample.token_ids[9:] == run(table_engine(NEXT, V), [rest])["rest"].token_ids


@pytest.mark.parametrize("budget", [5, 64])
def test_chunks_change_no_token_on_a_transformer(budget: int, tiny_llama: Path) -> None:
    policy = loaded_policy(tiny_llama, num_slots=3)
    requests = [
        request(f"r{i}", random_ids((40, 3, 17)[i % 3], seed=i % 3), sized(12), sample_index=i)
        for i in range(7)
    ]
    chunked = NativeEngine(
        policy, NgramProposer(min_match=1), FixedDraftLen(2), max_round_tokens=budget
    )
    chunked.load(policy.weights, version=0, digest="first")
    emitted = run(chunked, requests)
    plain = run(engine_over(policy), requests)
    assert tokens(emitted) == tokens(plain)
    for name, sample in emitted.items():
        assert sample.logprobs == pytest.approx(plain[name].logprobs, abs=1e-4)


# ---- drafts and their lengths -------------------------------------------------------------


@pytest.mark.parametrize("budget", [3, 2048])
@pytest.mark.parametrize(
    "prompt_len", [9, MAX_BEFORE_TREE, MAX_BEFORE_TREE + 1, MAX_BEFORE_TREE + 9]
)
def test_a_tree_is_drafted_behind_a_short_prompt_and_not_behind_a_long_one(
    prompt_len: int, budget: int
) -> None:
    policy = Recording()
    engine = table_engine(
        TABLE, V, policy=policy, proposer=TableTrees(TABLE), draft_len=5, branching=True,
        max_round_tokens=budget,
    )  # fmt: skip
    requests = [request(f"r{i}", prompt(prompt_len, i), sized(10)) for i in range(2)]
    samples = run(engine, requests)
    trees = [w for call in policy.calls for w in call if w.parents is not None]
    longest = max(len(window.token_ids) - window.num_logits for window in trees)
    fits = budget > prompt_len and prompt_len <= MAX_BEFORE_TREE
    assert longest == (prompt_len - 1 if fits else 0)
    plain = table_engine(TABLE, V, context_len=128)
    assert tokens(samples) == tokens(run(plain, requests))


def test_rounds_with_prompts_are_not_taken_for_what_decoding_costs() -> None:
    costs: list[RoundCost] = []

    class Observed(FixedDraftLen):
        def observe(self, round_: RoundCost) -> None:
            costs.append(round_)

    engine = table_engine(TABLE, V, max_round_tokens=4)
    engine.draft_len = Observed(1)
    run(engine, [request("a", (1,), sized(5)), request("b", prompt(6), sized(3))])
    # a decodes and drafts nothing; 2 are left for b: 2, 2, then its last two tokens
    seen = [(c.num_rows, len(c.asked), c.scored_tokens, c.plain_tokens) for c in costs]
    assert seen == [
        (1, 1, 3, False), (1, 1, 3, False), (1, 1, 2, False),
        (2, 2, 2, True), (2, 1, 2, True), (1, 0, 1, True),
    ]  # fmt: skip


def test_a_round_of_prompts_alone_is_no_round_for_the_draft_length() -> None:
    class Unseen(FixedDraftLen):
        def observe(self, round_: RoundCost) -> None:
            raise AssertionError("nothing was decoded")

    engine = table_engine(TABLE, V, max_round_tokens=4)
    engine.draft_len = Unseen(1)
    engine.submit([request("b", prompt(9), sized(3))])
    engine.step()
    assert engine.gauges()["count/prefill_tokens"] == 4 and engine.counters().rounds == 0
