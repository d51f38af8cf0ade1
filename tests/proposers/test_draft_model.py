"""A draft model's own cache: it holds what each row has, whatever happens to the row."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine_spec import EngineSpec, make_engine, pack_folder
from proposers.draft_model import DraftModelProposer, common_len
from proposers.none import NoProposer
from rollout.draft import Draft
from rollout.engine import run_to_end
from rollout.errors import InvalidConfig
from rollout.native_engine import NativeEngine
from rollout.policy import Window
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import SeededDraws
from rollout.table_policy import TablePolicy, random_table
from tests.proposers.model_drafts import draft_model
from tests.rollout.engines import request, run, table_engine
from tests.tiny_model import tiny_folder

V = 5
TABLE = random_table(V, depth=3, seed=7)
OTHER = random_table(V, depth=3, seed=8)


def sized(num: int, **how: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=num, **how)


def row(prompt: Sequence[int], generated: Sequence[int] = (), index: int = 0) -> Row:
    made = Row(
        request(prompt=prompt, sample_index=index, sampling=sized(400)),
        SeededDraws(0, "p", index), context_len=512,
    )  # fmt: skip
    for token in generated:
        made.token_ids.append(token)
        made.conditions.push(token)
    return made


class Counting(TablePolicy):
    """Remembers the windows it ran."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.windows: list[Window] = []

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        self.windows += windows
        return super().score(windows)

    @property
    def num_run(self) -> int:
        return sum(len(window.token_ids) for window in self.windows)


def counting(num_slots: int = 4, context_len: int = 512, **options: Any) -> Any:
    """A proposer and its policy."""
    policy = Counting(TABLE, vocab_size=V, num_slots=num_slots, context_len=context_len)
    return DraftModelProposer(policy, vocab_size=V, num_ids=V, **options), policy


def drafts_of_a_fresh_one(rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
    return draft_model(TABLE, V, num_slots=len(rows), context_len=512).propose(rows, max_lens)


def test_any_history_of_a_slot_gives_the_drafts_of_a_fresh_proposer() -> None:
    """Rows grow by accepted and refused drafts, sit out rounds, end, and are followed by others."""
    rng = random.Random(3)
    proposer, _ = counting()
    live: list[Row] = []
    for turn in range(200):
        if len(live) < 4 and rng.random() < 0.5:
            prompt = [rng.randrange(V) for _ in range(rng.choice([1, 3, 12, 30]))]
            live.append(row(prompt, index=turn))
        some = rng.sample(live, rng.randint(0, len(live)))
        max_lens = [rng.choice([0, 1, 4, 9]) for _ in some]
        made = proposer.propose(some, max_lens)
        fresh = drafts_of_a_fresh_one(some, max_lens) if some else []
        assert [d.token_ids for d in made] == [d.token_ids for d in fresh]
        for one, draft in zip(some, made):
            kept = draft.token_ids[: rng.randint(0, len(draft))]
            for token in (*kept, rng.randrange(V)):
                one.token_ids.append(token)
                one.conditions.push(token)
        for ended in [one for one in live if len(one.token_ids) > 60 or rng.random() < 0.03]:
            live.remove(ended)
            proposer.finish(ended)


def test_a_round_runs_each_token_once() -> None:
    proposer, policy = counting()
    one = row((0, 1, 2))
    for _ in range(10):  # all accepted, then one more: 4 drafted cost 4 forwards
        (draft,) = proposer.propose([one], [4])
        one.token_ids += [*draft.token_ids, 3]
    # 3 of the prompt and 3 drafts, then each round the last draft, the one behind it, 3 drafts
    assert policy.num_run == 6 + 9 * 5
    assert len(policy.windows) == 10 * 4


def test_a_groups_prompt_is_run_once() -> None:
    proposer, policy = counting()
    group = [row([1] * 29 + [2], index=i) for i in range(4)]
    proposer.propose(group, [1] * 4)
    assert proposer.gauges()["draft_model/catch_up_tokens"] == 29
    assert policy.num_run == 29 + 4


def test_a_row_that_ended_leaves_its_prompt_to_the_next_and_nothing_else() -> None:
    # cases 79, 85, 110
    proposer, policy = counting(num_slots=1)
    first = row([1] * 20, [2, 3, 4])
    proposer.propose([first], [5])
    proposer.finish(first)
    assert proposer.gauges()["draft_model/rows"] == 0
    ran = policy.num_run
    second = row([1] * 20, index=1)
    made = proposer.propose([second], [5])
    assert policy.num_run - ran == 5  # the last token of the prompt, four drafts
    assert made[0].token_ids == drafts_of_a_fresh_one([second], [5])[0].token_ids


def test_prompts_beyond_a_rounds_budget_wait_and_are_drafted_for_later() -> None:
    proposer, policy = counting(max_catch_up=16)
    long, short = row([1] * 60), row((0, 2))
    lengths = []
    for _ in range(4):
        made = proposer.propose([long, short], [3, 3])
        lengths.append([len(draft) for draft in made])
    assert lengths == [[0, 3], [0, 3], [0, 3], [3, 3]]
    assert max(len(window.token_ids) for window in policy.windows) <= 16


def test_more_rows_than_slots_take_turns() -> None:
    """Rows that wait, preempted, keep no slot from those that are drafted for."""
    proposer, _ = counting(num_slots=2)
    rows = [row([i] * 12, index=i) for i in range(4)]
    for pair in ([0, 1], [2, 3], [1, 2], [0, 3]):
        some = [rows[i] for i in pair]
        made = proposer.propose(some, [4, 4])
        assert [d.token_ids for d in made] == [
            d.token_ids for d in drafts_of_a_fresh_one(some, [4, 4])
        ]
    assert proposer.gauges()["draft_model/rows"] == 2


def test_a_row_beyond_the_draft_models_context_is_not_drafted_for() -> None:
    proposer, _ = counting(context_len=20)
    lengths = [len(proposer.propose([row([1] * n)], [8])[0]) for n in (10, 15, 19, 20, 21, 30)]
    assert lengths == [8, 6, 2, 1, 0, 0]  # the last drafted token takes no entry


def test_a_row_with_a_token_that_the_draft_model_lacks_is_not_drafted_for() -> None:
    # case 92: no token stands in for it
    proposer = draft_model(TABLE, V, target_size=9)
    made = proposer.propose([row((0, 7)), row((0, 1)), row((0, 1), (8,))], [3, 3, 3])
    assert [len(draft) for draft in made] == [0, 3, 0]


def test_a_full_cache_drafts_nothing_rather_than_failing() -> None:
    policy = TablePolicy(TABLE, vocab_size=V, num_slots=2, context_len=32, max_cached_tokens=40)
    proposer = DraftModelProposer(policy, vocab_size=V, num_ids=V)
    made = proposer.propose([row([1] * 24), row([2] * 24, index=1)], [8, 8])
    assert [len(draft) for draft in made] == [8, 0]


# ---- through the engine -------------------------------------------------------------------


def accepted_share(engine: NativeEngine) -> float:
    counters = engine.counters()
    assert counters.verified > 100
    return counters.accepted / counters.verified


def test_preempted_rows_are_drafted_for_as_before() -> None:
    # cases 81, 85
    engine = table_engine(
        TABLE, V, proposer=draft_model(TABLE, V, num_slots=4, context_len=48), draft_len=3,
        num_slots=4, context_len=48, max_cached_tokens=60,
    )  # fmt: skip
    run(engine, [request(f"r{i}", (i % V,) * (1 + 3 * i), sized(30)) for i in range(8)])
    assert engine.gauges()["count/preemptions"] > 0 and accepted_share(engine) == 1.0


@pytest.mark.parametrize("in_flight", ["interrupt", "finish", "abort"])
def test_a_swap_leaves_the_draft_models_weights_and_cache_alone(in_flight: Any) -> None:
    """It drafts what the new weights emit: refused before the swap, accepted behind it."""
    engine = table_engine(TABLE, V, proposer=draft_model(OTHER, V), draft_len=4)
    requests = [request(f"r{i}", (0, 1, i % V), sized(40)) for i in range(12)]
    engine.submit(requests[:6])
    for _ in range(4):
        engine.step()
    before = engine.counters()
    engine.load(OTHER, version=1, digest="other", in_flight=in_flight)
    samples = {s.request.id: s for s in run(engine, requests[6:]).values()}
    after = engine.counters()
    assert before.accepted < 0.9 * before.verified
    for sample in (s for s in samples.values() if s.version_spans[0][0] == 1):
        assert sample.counters.accepted == sample.counters.verified
    behind = after.verified - before.verified, after.accepted - before.accepted
    assert behind[0] > 100 and (in_flight == "finish" or behind[1] == behind[0])


def test_rows_at_the_context_limit_end_there() -> None:
    proposer = draft_model(OTHER, V, context_len=20)
    engine = table_engine(TABLE, V, proposer=proposer, draft_len=7, context_len=24)
    samples = run(engine, [request(f"r{i}", (1,) * (i + 1), sized(100)) for i in range(8)])
    for i, sample in enumerate(samples[f"r{i}"] for i in range(8)):
        assert (len(sample.token_ids), sample.finish_detail) == (24 - (i + 1), "context_len")


# ---- checkpoints --------------------------------------------------------------------------


def spec_of(folder: Path, draft: Path, **options: Any) -> EngineSpec:
    fields: dict[str, Any] = {
        "mode": "full", "format": "none", "dtype": "float32", "num_slots": 4, "draft_len": 3,
    }  # fmt: skip
    return EngineSpec(
        str(folder), proposer="draft_model", draft_model=str(draft), context_len=64,
        **fields | options,
    )  # fmt: skip


def greedy_tokens(engine: NativeEngine, folder: Path) -> list[tuple[int, ...]]:
    engine.load(engine.prepare(pack_folder(EngineSpec(str(folder), "full", "none", dtype="float32"))),
                version=0, digest="folder")  # fmt: skip
    requests = [request(f"r{i}", (5 + i, 6, 7), sized(24, temperature=0.0)) for i in range(6)]
    return [sample.token_ids for sample in run_to_end(engine, requests)]


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_a_smaller_checkpoint_drafts_for_a_larger_one(
    kernels: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    """One layer and a padded head, against two; greedy tokens are those of plain decoding."""
    small = tiny_folder(tmp_path / "small", num_hidden_layers=1, vocab_size=320)
    plain = make_engine(spec_of(tiny_llama, small, kernels=kernels), proposer=NoProposer())
    engine = make_engine(spec_of(tiny_llama, small, kernels=kernels))
    assert greedy_tokens(engine, tiny_llama) == greedy_tokens(plain, tiny_llama)
    assert engine.counters().verified > 100


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_the_target_itself_as_draft_model_is_accepted_nearly_always(
    kernels: Any, tiny_llama: Path
) -> None:
    """Nearly: it drafts in INT8."""
    engine = make_engine(spec_of(tiny_llama, tiny_llama, kernels=kernels))
    greedy_tokens(engine, tiny_llama)
    counters = engine.counters()
    assert counters.accepted > 0.8 * counters.verified > 60


def test_a_draft_model_with_another_tokenizer_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    # cases 89, 91: the same size, two tokens swapped
    other = tiny_folder(tmp_path / "other")
    file = other / "tokenizer.json"
    text = file.read_text()
    assert text.count('"a":') == text.count('"b":') == 1
    swapped = text.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
    file.write_text(swapped)
    with pytest.raises(InvalidConfig, match=r"token table .* expected .* the target's tokenizer"):
        make_engine(spec_of(tiny_llama, other))


def test_how_much_two_sequences_share() -> None:
    assert [common_len(a, b) for a, b in [((), (1,)), ((1, 2), (1, 2, 3)), ((1, 2, 3), (1, 4))]] == [
        0, 2, 1,
    ]  # fmt: skip
