"""Rounds with draft trees on a transformer: tree mask, acceptance of a branch, compacted cache.

Point masses are verified by drawing what plain decoding draws, so a tree round that is right emits
plain decoding's tokens one by one, and a mask, rotation or cache fault shows as another token.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proposers.history import HistoryProposer
from proposers.none import NoProposer
from rollout.draft import Draft
from rollout.draft_len import FixedDraftLen
from rollout.native_engine import NativeEngine
from rollout.policy import Window
from rollout.request import RolloutRequest, RolloutSample
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.transformer_policy import TransformerPolicy
from tests.rollout.engines import request, run
from tests.rollout.policies import engine_over, loaded_policy, packed_weights, random_ids

PROMPTS = [random_ids(length, seed=length) for length in (5, 12, 23)]
LAWS = {
    "plain": SamplingParams(max_new_tokens=24),
    "greedy": SamplingParams(max_new_tokens=24, temperature=0.0),
    "filters": SamplingParams(max_new_tokens=24, temperature=0.8, top_k=30, top_p=0.9),
    "penalties": SamplingParams(max_new_tokens=24, repetition_penalty=1.3, frequency_penalty=0.5),
    "stops": SamplingParams(
        max_new_tokens=24, stop_token_ids=tuple(range(0, 300, 9)), min_tokens=4
    ),
}


class TwinTrees(NoProposer):
    """Branches around what the row will emit, known from a plain run: the right token in some
    place among siblings, wrong branches that go on, and now and then nothing right at all."""

    def __init__(self, plain: dict[str, RolloutSample], width: int) -> None:
        self._plain, self._width = plain, width

    def propose_trees(
        self, rows: Sequence[Row], max_nodes: Sequence[int], max_depths: Sequence[int]
    ) -> list[Draft]:
        return [self._tree(row, *size) for row, *size in zip(rows, max_nodes, max_depths)]

    def _tree(self, row: Row, max_nodes: int, max_depth: int) -> Draft:
        ahead = self._plain[row.request.id].token_ids[row.num_generated :]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for depth, right in enumerate(ahead[:max_depth]):
            siblings = [(right + 1 + i) % 300 for i in range(self._width)]
            if (row.num_generated + depth) % 5 != 3:  # else the tree holds no way on
                siblings[(row.num_generated + depth) % self._width] = right
            first = len(tokens)
            tokens += siblings
            parents += [parent] * len(siblings)
            if right not in siblings:
                break
            parent = first + siblings.index(right)
        return Draft.tree(tokens[:max_nodes], parents[:max_nodes])


def requests(sampling: SamplingParams) -> list[RolloutRequest]:
    return [
        request(f"r{i}", prompt, sampling, sample_index=i)
        for i, prompt in enumerate(prompt for prompt in PROMPTS for _ in range(2))
    ]


def tree_engine(policy: TransformerPolicy, plain: dict[str, RolloutSample]) -> NativeEngine:
    engine = NativeEngine(policy, TwinTrees(plain, width=3), FixedDraftLen(9, branching=True))
    engine.load(policy.weights, version=0, digest="first")
    return engine


def tokens_of(samples: dict[str, RolloutSample]) -> dict[str, tuple[int, ...]]:
    return {name: sample.token_ids for name, sample in samples.items()}


@pytest.fixture(scope="module")
def policy(tiny_llama: Path) -> TransformerPolicy:
    return loaded_policy(tiny_llama, num_slots=4)


@pytest.mark.parametrize("law", LAWS)
def test_tree_rounds_emit_plain_decodings_tokens_with_their_logprobs(
    law: str, policy: TransformerPolicy
) -> None:
    plain = run(engine_over(policy), requests(LAWS[law]))
    engine = tree_engine(policy, plain)
    drafted = run(engine, requests(LAWS[law]))
    assert tokens_of(drafted) == tokens_of(plain)
    counters = engine.counters()
    assert counters.accepted > 20 and counters.corrections > 5
    for name, sample in drafted.items():
        assert sample.logprobs == pytest.approx(plain[name].logprobs, abs=1e-4)


def test_a_tree_larger_than_what_is_left_of_the_context_is_cut(tiny_llama: Path) -> None:
    policy = loaded_policy(tiny_llama, num_slots=4, context_len=32)
    sampling = SamplingParams(max_new_tokens=100)
    plain = run(engine_over(policy), requests(sampling))
    drafted = run(tree_engine(policy, plain), requests(sampling))
    assert tokens_of(drafted) == tokens_of(plain)
    assert {s.finish_detail for s in drafted.values()} == {"context_len"}


def test_weights_that_change_between_tree_rounds_change_what_follows(
    tiny_llama: Path, policy: TransformerPolicy
) -> None:
    """Interrupted rows run their tokens again under the new weights, tree entries not among them."""
    sampling = SamplingParams(max_new_tokens=24)
    plain = run(engine_over(policy), requests(sampling))
    other = policy.load(packed_weights(tiny_llama, change=lambda name, tensor: tensor * 1.05))

    def run_with_swap(engine: NativeEngine, num_tokens: int) -> dict[str, RolloutSample]:
        """One row; the swap comes once it has `num_tokens`."""
        engine.submit(requests(sampling)[:1])
        samples: dict[str, RolloutSample] = {}
        while engine.num_unfinished:
            live = engine._scheduler.live
            if engine.version == 0 and live and live[0].num_generated == num_tokens:
                engine.load(other, version=1, digest="second")
            samples |= {s.request.id: s for s in engine.step()}
        return samples

    first = policy.weights
    drafted = tree_engine(policy, plain)
    drafted.submit(requests(sampling)[:1])
    drafted.step()
    at = drafted._scheduler.live[0].num_generated  # where a round of this engine ends
    assert at > 1
    policy.swap(first)
    one = run_with_swap(tree_engine(policy, plain), at)
    policy.swap(first)
    reference = run_with_swap(engine_over(policy), at)
    policy.swap(first)
    assert one["r0"].version_spans[0] == (0, at) == reference["r0"].version_spans[0]
    assert tokens_of(one) == tokens_of(reference)


def test_history_branches_are_verified_on_a_real_model(
    smollm2: Path, smollm2_policy: TransformerPolicy
) -> None:
    sampling = SamplingParams(max_new_tokens=16, temperature=0.6)
    group = [
        replace(request(f"r{i}", (504, 5101, 281, 260), sampling, prompt_id="p"), sample_index=i)
        for i in range(6)
    ]
    plain = run(engine_over(smollm2_policy), group)
    history = HistoryProposer()
    for sample in plain.values():
        history.remember(sample.request.prompt_ids, sample.token_ids)
    engine = NativeEngine(smollm2_policy, history, FixedDraftLen(8, branching=True))
    engine.load(smollm2_policy.weights, version=0, digest="first")
    assert tokens_of(run(engine, group)) == tokens_of(plain)
    assert engine.counters().tokens_per_target_step > 2


def test_a_causal_mask_over_a_tree_is_seen(
    policy: TransformerPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: siblings that see each other change what is emitted."""
    sampling = LAWS["plain"]
    plain = run(engine_over(policy), requests(sampling))
    score = policy.score

    def causal(windows: Sequence[Window]) -> torch.Tensor:
        return score([replace(window, parents=None) for window in windows])

    monkeypatch.setattr(policy, "score", causal)
    assert tokens_of(run(tree_engine(policy, plain), requests(sampling))) != tokens_of(plain)
