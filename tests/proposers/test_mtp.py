"""The MTP head drafts from the law that its definition gives, and the emitted law is the target's."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.mtp import MtpProposer
from proposers.none import NoProposer
from rollout.compiled_policy import CompiledPolicy
from rollout.draft import Draft, PointMass, SparseLaw
from rollout.draft_len import FixedDraftLen
from rollout.engine import run_to_end
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes, total_variation
from rollout.errors import InvalidWeights
from rollout.mtp_policy import MAX_WAITING, MtpPolicy
from rollout.mtp_weights import VERSION, VOCABULARY
from rollout.native_engine import NativeEngine
from rollout.policy import Window
from rollout.sampling import SamplingParams
from rollout.table_mtp import table_mtp, table_weights
from rollout.table_policy import random_table
from rollout.transformer_policy import TransformerPolicy
from rollout.verify import Rule
from tests.proposers.mtp_heads import (
    mtp_policy,
    random_head,
    reference_logits,
)
from tests.rollout.engines import plain_law, request, run, table_engine
from tests.rollout.policies import hugging_face, loaded_policy, packed_weights

V = 3
TARGET, HEAD = random_table(V, depth=2, seed=1), random_table(V, depth=2, seed=2)
every_kernel = pytest.mark.parametrize("make", [CompiledPolicy, TransformerPolicy])


class Watched(MtpProposer):
    """Keeps what it drafted, with the row as it was."""

    def __init__(self, policy: MtpPolicy, **options: Any) -> None:
        super().__init__(policy, **options)
        self.seen: list[tuple[tuple[int, ...], int, Draft]] = []

    def propose(self, rows: Any, max_lens: Any) -> list[Draft]:
        drafts = super().propose(rows, max_lens)
        self.seen += [(tuple(r.token_ids), r.prompt_len, d) for r, d in zip(rows, drafts) if d]
        return drafts


def engine_of(policy: MtpPolicy, proposer: MtpProposer, draft_len: int) -> NativeEngine:
    engine = NativeEngine(policy, proposer, FixedDraftLen(draft_len))
    engine.load(policy.weights, version=0, digest="first")
    return engine


def requests(num: int, seed: int = 0, **sampling: Any) -> list[Any]:
    """Groups of three with prompts of different lengths."""
    rng, made = random.Random(seed), []
    for group in range(-(-num // 3)):
        prompt = [rng.randrange(3, 60) for _ in range(rng.randint(1, 24))]
        for index in range(min(3, num - len(made))):
            params = SamplingParams(max_new_tokens=rng.randint(6, 30), **sampling)
            name = f"g{group}/{index}"
            made.append(request(name, prompt, params, prompt_id=f"p{group}", sample_index=index))
    return made


# ---- the seam -----------------------------------------------------------------------------


@every_kernel
def test_hidden_states_are_what_the_output_head_reads(make: Any, tiny_llama: Path) -> None:
    policy = mtp_policy(tiny_llama, make, random_head(tiny_llama)).target
    ids = (5, 9, 17, 3, 30, 8)
    scored = policy.score_hidden([Window(0, 0, ids, num_logits=4)])
    with torch.inference_mode():
        out = hugging_face(tiny_llama).model(torch.tensor([ids])).last_hidden_state[0]
    torch.testing.assert_close(scored.hidden, out[2:], atol=1e-4, rtol=1e-4)
    again = policy.score([Window(1, 0, ids, num_logits=4)])
    assert torch.equal(scored.logits, again)


@every_kernel
def test_embeddings_as_inputs_are_the_tokens_themselves(make: Any, tiny_llama: Path) -> None:
    policy = mtp_policy(tiny_llama, make, random_head(tiny_llama)).target
    ids, others = (5, 9, 17), (30, 8)
    windows = [Window(0, 0, ids, num_logits=2), Window(1, 0, others, num_logits=1)]
    expected = policy.score(windows)
    nameless = [Window(w.slot + 2, 0, (0,) * len(w.token_ids), w.num_logits) for w in windows]
    scored = policy.score_hidden(nameless, policy.embed([*ids, *others]))
    assert torch.equal(scored.logits, expected)


# ---- what it drafts -----------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("draft_len", [1, 3])
def test_drafts_are_drawn_from_the_law_of_the_definition(
    make: Any, draft_len: int, tiny_llama: Path
) -> None:
    """Groups that share prompts, rows that come and go in 4 slots, refused and accepted drafts."""
    head = random_head(tiny_llama)
    policy = mtp_policy(tiny_llama, make, head)
    proposer = Watched(policy, width=40)
    run_to_end(engine_of(policy, proposer, draft_len), requests(9, temperature=0.8))
    assert len(proposer.seen) > 60
    for token_ids, prompt_len, draft in random.Random(1).sample(proposer.seen, 24):
        for depth, law in enumerate(draft.laws):
            assert isinstance(law, SparseLaw)
            drafted = draft.token_ids[:depth]
            logits = reference_logits(tiny_llama, head, token_ids, prompt_len, drafted)
            expected = dict(zip(head[VOCABULARY].tolist(), (logits / 0.8).softmax(-1).tolist()))
            got = dict(zip(law.ids.tolist(), law.probs.tolist()))
            assert got == pytest.approx(expected, abs=2e-4)


def test_a_law_is_cut_to_its_most_probable_ids(tiny_llama: Path) -> None:
    policy = mtp_policy(tiny_llama, TransformerPolicy, random_head(tiny_llama))
    proposer = Watched(policy, width=5)
    run_to_end(engine_of(policy, proposer, 2), requests(3))
    laws = [law for _, _, draft in proposer.seen for law in draft.laws]
    assert laws and all(isinstance(law, SparseLaw) and len(law.ids) == 5 for law in laws)


def test_greedy_rows_are_named_the_heads_first_choice(tiny_llama: Path) -> None:
    head = random_head(tiny_llama)
    policy = mtp_policy(tiny_llama, TransformerPolicy, head)
    proposer = Watched(policy)
    samples = run_to_end(engine_of(policy, proposer, 2), requests(3, temperature=0.0))
    token_ids, prompt_len, draft = proposer.seen[-1]
    logits = reference_logits(tiny_llama, head, token_ids, prompt_len, ())
    assert draft.token_ids[0] == int(head[VOCABULARY][int(logits.argmax())])
    assert all(isinstance(law, PointMass) for law in draft.laws)
    alone = loaded_policy(tiny_llama)
    plain = NativeEngine(alone, NoProposer(), FixedDraftLen(0))
    plain.load(alone.weights, version=0, digest="first")
    expected = run_to_end(plain, requests(3, temperature=0.0))
    assert [s.token_ids for s in samples] == [s.token_ids for s in expected]


@every_kernel
def test_the_target_computes_what_it_computes_without_a_head(make: Any, tiny_llama: Path) -> None:
    """A head drafts for a plain run's forwards bit for bit: nothing of it is in the target's cache."""
    policy = mtp_policy(tiny_llama, make, random_head(tiny_llama))
    alone = mtp_policy(tiny_llama, make, random_head(tiny_llama)).target
    ids = tuple(range(5, 17))
    first = [Window(0, 0, ids, num_logits=1)]
    assert torch.equal(policy.score(first), alone.score(first))
    policy.catch_up([(0, [*ids, 20])])
    policy.run_head([Window(0, 1, (21,), num_logits=1)], torch.ones(1, 64), [21])
    policy.forget_draft(0)
    second = [Window(0, len(ids), (20, 21, 22), num_logits=3)]
    assert torch.equal(policy.score(second), alone.score(second))


# ---- trees --------------------------------------------------------------------------------


@every_kernel
def test_a_tree_holds_the_likeliest_paths_of_the_definition(make: Any, tiny_llama: Path) -> None:
    """Every node has its parent; no path that is left out is likelier than one that is in."""
    head = random_head(tiny_llama)
    policy = mtp_policy(tiny_llama, make, head)
    proposer = WatchedTrees(policy)
    engine = engine_of(policy, proposer, 0)
    engine.draft_len = FixedDraftLen(6, branching=True)
    run_to_end(engine, requests(3, seed=4))
    assert len(proposer.seen) > 8
    for token_ids, prompt_len, draft in proposer.seen[:4]:
        paths = paths_of(draft)
        chances = {path: chance(tiny_llama, head, token_ids, prompt_len, path) for path in paths}
        worst = min(chances.values())
        law = reference_logits(tiny_llama, head, token_ids, prompt_len, ()).softmax(-1)
        others = zip(head[VOCABULARY].tolist(), law.tolist())
        left_out = [p for token, p in others if (token,) not in chances]
        assert max(left_out) < worst + 1e-4
        assert all(path[:-1] in chances for path in paths if len(path) > 1)
    assert any(len(path) > 1 for _, _, draft in proposer.seen for path in paths_of(draft))


class WatchedTrees(MtpProposer):
    def __init__(self, policy: MtpPolicy) -> None:
        super().__init__(policy)
        self.seen: list[tuple[tuple[int, ...], int, Draft]] = []

    def propose_trees(self, rows: Any, max_nodes: Any, max_depths: Any) -> list[Draft]:
        drafts = super().propose_trees(rows, max_nodes, max_depths)
        self.seen += [(tuple(r.token_ids), r.prompt_len, d) for r, d in zip(rows, drafts) if d]
        return drafts


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids, draft.parents or ()):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def chance(
    folder: Path, head: Any, token_ids: tuple[int, ...], prompt_len: int, path: tuple[int, ...]
) -> float:
    """Product of the head's probabilities along a path."""
    product, ids = 1.0, head[VOCABULARY].tolist()
    for depth, token in enumerate(path):
        logits = reference_logits(folder, head, token_ids, prompt_len, path[:depth])
        product *= float(logits.softmax(-1)[ids.index(token)])
    return product


def test_trees_leave_the_law_alone_by_enumeration() -> None:
    sampling, accepted = SamplingParams(max_new_tokens=4), 0

    def generate(draws: EnumeratedDraws) -> tuple[int, ...]:
        nonlocal accepted
        policy: Any = table_mtp(TARGET, HEAD, (0, 2), vocab_size=V)
        engine = table_engine(
            TARGET, V, policy=policy, proposer=MtpProposer(policy), draft_len=4, branching=True,
            draws_for=lambda _: draws,
        )  # fmt: skip
        engine.load(table_weights(TARGET, HEAD, (0, 2)), version=0, digest="table")
        token_ids = run(engine, [request(sampling=sampling)])["r0"].token_ids
        accepted += engine.counters().accepted
        return token_ids

    law = enumerate_outcomes(generate)
    assert total_variation(law, plain_law(TARGET, (0,), sampling, V)) < 1e-12
    assert accepted > 0


@every_kernel
def test_chains_behind_trees_are_drafted_as_without_them(make: Any, tiny_llama: Path) -> None:
    """A tree's accepted path is what the head goes on from."""
    head = random_head(tiny_llama)
    policy = mtp_policy(tiny_llama, make, head)
    proposer = Watched(policy, width=40)
    engine = engine_of(policy, proposer, 0)
    engine.submit(requests(3, seed=5))
    while engine.num_unfinished:
        engine.draft_len = FixedDraftLen(5, branching=True)
        engine.step()
        engine.draft_len = FixedDraftLen(2)
        engine.step()
    assert engine.counters().accepted > 0 and len(proposer.seen) > 8
    for token_ids, prompt_len, draft in proposer.seen:
        law = draft.laws[0]
        assert isinstance(law, SparseLaw)
        logits = reference_logits(tiny_llama, head, token_ids, prompt_len, ())
        got = dict(zip(law.ids.tolist(), law.probs.tolist()))
        expected = dict(zip(head[VOCABULARY].tolist(), logits.softmax(-1).tolist()))
        assert got == pytest.approx(expected, abs=2e-4)


# ---- exactness ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["block", "position"])
@pytest.mark.parametrize(
    ("vocabulary", "sampling"),
    [
        ((0, 1, 2), SamplingParams(max_new_tokens=4)),
        ((0, 2), SamplingParams(max_new_tokens=4)),
        ((1, 2), SamplingParams(temperature=0.6, top_k=2, stop_token_ids=(2,), max_new_tokens=4)),
    ],
)
def test_the_emitted_law_is_the_targets_by_enumeration(
    rule: Rule, vocabulary: tuple[int, ...], sampling: SamplingParams
) -> None:
    drafted = 0

    def generate(draws: EnumeratedDraws) -> tuple[int, ...]:
        nonlocal drafted
        policy: Any = table_mtp(TARGET, HEAD, vocabulary, vocab_size=V)
        proposer = MtpProposer(policy)
        engine = table_engine(
            TARGET, V, policy=policy, proposer=proposer, draft_len=2, draws_for=lambda _: draws,
            verification=rule,
        )  # fmt: skip
        engine.load(table_weights(TARGET, HEAD, vocabulary), version=0, digest="table")
        token_ids = run(engine, [request(sampling=sampling)])["r0"].token_ids
        drafted += engine.counters().drafted
        return token_ids

    law = enumerate_outcomes(generate)
    assert total_variation(law, plain_law(TARGET, (0,), sampling, V)) < 1e-12
    assert drafted > 0


# ---- rows that come, go and come back -----------------------------------------------------


def test_a_swap_starts_the_head_anew_and_takes_its_new_weights(tiny_llama: Path) -> None:
    head, other = random_head(tiny_llama), random_head(tiny_llama, seed=1)
    policy = mtp_policy(tiny_llama, TransformerPolicy, head)
    proposer = Watched(policy, width=40)
    engine = engine_of(policy, proposer, 2)
    engine.submit(requests(3, seed=2))
    for _ in range(4):
        engine.step()
    before = len(proposer.seen)
    prepared = engine.prepare(packed_weights(tiny_llama) | other)
    engine.load(prepared, version=1, digest="second")
    while engine.num_unfinished:
        engine.step()
    for token_ids, prompt_len, draft in proposer.seen[before + 3 : before + 9]:
        law = draft.laws[0]
        assert isinstance(law, SparseLaw)
        # the row was run again: the head sees it from the last token that it had at the swap
        behind = [
            reference_logits(tiny_llama, other, token_ids, start, ()).softmax(-1)
            for start in range(prompt_len, len(token_ids))
        ]
        got = torch.zeros(40).scatter(
            0, torch.searchsorted(other[VOCABULARY], law.ids), law.probs.float()
        )
        assert min(float((got - one).abs().max()) for one in behind) < 2e-4


def test_a_row_that_was_not_drafted_for_in_a_long_time_starts_anew(tiny_llama: Path) -> None:
    head = random_head(tiny_llama)
    policy = mtp_policy(tiny_llama, TransformerPolicy, head, context_len=160)
    proposer = Watched(policy, width=40)
    engine = engine_of(policy, proposer, 0)
    engine.submit([request("r", (7, 8, 9), SamplingParams(max_new_tokens=MAX_WAITING + 30))])
    for _ in range(MAX_WAITING + 9):
        engine.step()
    engine.draft_len = FixedDraftLen(2)
    engine.step()
    token_ids, _, draft = proposer.seen[0]
    law = draft.laws[0]
    assert isinstance(law, SparseLaw)
    start = len(token_ids) - MAX_WAITING - 1  # what is kept, and the last token run
    expected = reference_logits(tiny_llama, head, token_ids, start, ()).softmax(-1).tolist()
    got = dict(zip(law.ids.tolist(), law.probs.tolist()))
    assert got == pytest.approx(dict(zip(head[VOCABULARY].tolist(), expected)), abs=2e-4)


@pytest.mark.parametrize("cached", [0, 2, 4])
def test_what_a_slot_held_is_not_drafted_behind_once_it_is_cut(
    cached: int, tiny_llama: Path
) -> None:
    """The slot's next row may happen to be as long as the last one was."""
    policy = mtp_policy(tiny_llama, TransformerPolicy, random_head(tiny_llama))
    ids = (7, 8, 9, 10, 11, 12)
    policy.grow(0, len(ids))
    policy.score([Window(0, 0, ids[:5], num_logits=1)])
    assert policy.drafts_behind(0, len(ids)), "the case is one where a draft is possible"
    policy.catch_up([(0, ids)])
    policy.truncate(0, cached)
    assert not policy.drafts_behind(0, len(ids))
    assert policy.num_run(0) == 0, "the head's cache belongs to what was cut"


@pytest.mark.parametrize("seed", range(3))
def test_preempted_rows_are_drafted_for_again(seed: int) -> None:
    """A cache of 26 entries for four rows. Target and head are one table that sees the last token, so
    any refusal would be a fault."""
    rng, table = random.Random(seed), random_table(V, depth=1, seed=seed)
    policy: Any = table_mtp(
        table, table, range(V), vocab_size=V, num_slots=4, context_len=24, max_cached_tokens=26
    )
    engine = table_engine(table, V, policy=policy, proposer=MtpProposer(policy), draft_len=2)
    engine.load(table_weights(table, table, range(V)), version=0, digest="table")
    rows = [
        request(f"r{i}", (rng.randrange(V),) * rng.randint(1, 4), SamplingParams(max_new_tokens=14))
        for i in range(6)
    ]
    samples = run(engine, rows)
    counters = engine.counters()
    assert engine.gauges()["count/preemptions"] > 0
    assert counters.accepted == counters.verified > 20
    assert all(len(sample.token_ids) == 14 for sample in samples.values())


# ---- updates ------------------------------------------------------------------------------


def test_an_update_without_its_head_or_with_another_vocabulary_is_refused(tiny_llama: Path) -> None:
    head = random_head(tiny_llama)
    policy = mtp_policy(tiny_llama, TransformerPolicy, head)
    with pytest.raises(InvalidWeights, match=r"mtp\.vocabulary"):
        policy.load(packed_weights(tiny_llama))
    wider = random_head(tiny_llama, draft_vocab_size=41)
    with pytest.raises(InvalidWeights, match="got 41 ids, expected 40"):
        policy.load(packed_weights(tiny_llama) | wider)
    broken = head | {"mtp.proj.weight": head["mtp.proj.weight"] * torch.nan}
    with pytest.raises(InvalidWeights, match=r"mtp\.proj\.weight"):
        policy.load(packed_weights(tiny_llama) | broken)


@pytest.mark.parametrize("format_", ["int8_w8a16", "int8_w8a8"])
def test_a_quantised_heads_rows_are_those_of_the_policys_head(
    format_: Any, tiny_llama: Path
) -> None:
    """Quantised anew they are the same numbers: what the policy has, the head has."""
    head = random_head(tiny_llama)
    policy = mtp_policy(tiny_llama, CompiledPolicy, head, format_=format_)
    assert policy.weights is not None and policy.weights.version == int(head[VERSION])
    ids = head[VOCABULARY]
    rows = policy.head.embed(list(range(len(ids))))  # tied, so the embedding shows them
    assert torch.equal(rows, policy.target.embed(ids.tolist()))
