"""Two models over one cache: what the target computes does not depend on what was drafted."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quant.formats import FORMATS, FormatName
from rollout.checkpoint import read_config
from rollout.compiled_policy import CompiledPolicy
from rollout.errors import InvalidWeights
from rollout.lossless_policy import LosslessPolicy
from rollout.packing import pack
from rollout.policy import Policy, Window
from rollout.transformer_policy import TransformerPolicy
from tests.rollout.policies import packed_weights

CONTEXT = 96
SLOTS = 5
Make = Callable[..., Any]
every_kernel = pytest.mark.parametrize("make", [CompiledPolicy, TransformerPolicy])


def plain(folder: Path, make: Make) -> Policy:
    policy: Policy = make(
        read_config(folder), FORMATS["none"], num_slots=SLOTS, context_len=CONTEXT,
        dtype=torch.float32,
    )  # fmt: skip
    return policy


def lossless(folder: Path, make: Make, format_: FormatName = "int8_w8a16") -> LosslessPolicy:
    target: Any = plain(folder, make)

    def quantise(weights: Any) -> Any:
        return pack(weights.items(), target.config, FORMATS[format_], torch.float32)

    return LosslessPolicy(target, target.sharing_cache(FORMATS[format_]), quantise)


def load(policy: Policy, folder: Path, **how: Any) -> None:
    policy.swap(policy.load(packed_weights(folder, **how)))


def draft(policy: LosslessPolicy, slot: int, pending: list[int], num: int, rng: Any) -> None:
    """A draft of `num` tokens of no account, as a proposer makes them."""
    start, ids = policy.cached_len(slot), pending
    assert policy.grow(slot, start + len(pending) + num)
    for _ in range(num):
        logits = policy.draft.score([Window(slot, start, tuple(ids), num_logits=1)])
        assert logits.shape == (1, policy.vocab_size)
        start, ids = start + len(ids), [rng.randrange(policy.vocab_size)]
    policy.forget_draft(slot, policy.cached_len(slot) + len(pending) + num)


@every_kernel
@pytest.mark.parametrize("format_", ["int8_w8a16", "int8_w8a8"])
@pytest.mark.parametrize("seed", range(4))
def test_logits_of_the_target_are_those_of_a_run_without_drafts_bit_for_bit(
    make: Make, format_: FormatName, seed: int, tiny_llama: Path
) -> None:
    """Prompts, forks that share pages, ragged rounds of refused and accepted drafts, rollbacks, and
    rows at the end of their context; the drafts of one row must not reach another either."""
    rng = random.Random(seed)
    alone, both = plain(tiny_llama, make), lossless(tiny_llama, make, format_)
    for policy in (alone, both):
        load(policy, tiny_llama)
    prompt = [rng.randrange(both.vocab_size) for _ in range(rng.randint(17, 40))]
    rows = [list(prompt) for _ in range(SLOTS)]
    cached = [len(prompt) - 1] * SLOTS
    for policy in (alone, both):
        policy.score([Window(0, 0, tuple(prompt[:-1]), num_logits=0)])
        for slot in range(1, SLOTS):
            policy.fork(0, slot, len(prompt) - 1)
    for _ in range(30):
        windows = []
        for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
            room = CONTEXT - len(rows[slot])
            num = min(room, rng.choice([0, 1, 3, 9, 20]))
            if room == 0:
                continue
            pending = rows[slot][cached[slot] :]
            draft(both, slot, pending, num, rng)
            ids = [rng.randrange(both.vocab_size) for _ in range(num)]
            windows.append(Window(slot, cached[slot], (*pending, *ids), num_logits=num + 1))
        for policy in (alone, both):
            for window in windows:
                assert policy.grow(window.slot, window.start + len(window.token_ids))
        assert torch.equal(both.score(windows), alone.score(windows))
        for window in windows:  # a first part is kept, then one more token
            kept = rng.randint(1, len(window.token_ids))
            end = window.start + kept
            cached[window.slot] = end
            rows[window.slot] = [*rows[window.slot][: window.start], *window.token_ids[:kept]]
            rows[window.slot] += [rng.randrange(both.vocab_size)] * (end < CONTEXT)
            for policy in (alone, both):
                policy.truncate(window.slot, end)
            assert both.cached_len(window.slot) == end
    assert max(map(len, rows)) > CONTEXT - 25


@every_kernel
def test_a_draft_left_in_the_cache_would_be_seen(make: Make, tiny_llama: Path) -> None:
    """Negative control: behind the draft's own entries the target computes something else."""
    policy = lossless(tiny_llama, make)
    load(policy, tiny_llama)
    ids = (5, 6, 7, 8)
    right = policy.score([Window(0, 0, ids, num_logits=1)])
    policy.draft.score([Window(1, 0, ids[:3], num_logits=0)])
    wrong = policy.target.score([Window(1, 3, ids[3:], num_logits=1)])
    assert float((right - wrong).abs().max()) > 1e-3


@every_kernel
def test_the_draft_is_what_a_policy_of_its_format_computes(make: Make, tiny_llama: Path) -> None:
    """Up to the bf16 cache that quantised policies have; the target's is of float32."""
    both = lossless(tiny_llama, make)
    load(both, tiny_llama)
    alone = make(
        read_config(tiny_llama), FORMATS["int8_w8a16"], num_slots=1, context_len=CONTEXT,
        dtype=torch.float32,
    )  # fmt: skip
    load(alone, tiny_llama, format_="int8_w8a16")
    window = Window(0, 0, tuple(range(5, 25)), num_logits=20)
    expected, quantised = alone.score([window]), both.draft.score([window])
    both.forget_draft(0, 0)
    full = both.score([window])
    error, distance = (float((x - quantised).abs().mean()) for x in (expected, full))
    assert error < 0.3 * distance


@every_kernel
def test_a_swap_changes_both_and_empties_the_cache(make: Make, tiny_llama: Path) -> None:
    both, fresh = lossless(tiny_llama, make), lossless(tiny_llama, make)
    load(both, tiny_llama)
    window = Window(0, 0, (5, 6, 7), num_logits=3)
    before = both.score([window])
    for policy in (both, fresh):
        load(policy, tiny_llama, change=lambda name, tensor: 1.1 * tensor)
    assert both.cached_len(0) == 0
    after = both.score([window])
    assert torch.equal(after, fresh.score([window])) and not torch.equal(after, before)
    for policy in (both, fresh):
        policy.truncate(0, 0)
    assert torch.equal(both.draft.score([window]), fresh.draft.score([window]))


def test_an_update_that_is_refused_changes_nothing(tiny_llama: Path) -> None:
    both = lossless(tiny_llama, CompiledPolicy)
    load(both, tiny_llama)
    window = Window(0, 0, (5, 6, 7), num_logits=3)
    before = both.score([window])
    with pytest.raises(InvalidWeights, match="are missing"):
        both.load({})
    both.truncate(0, 0)
    assert torch.equal(both.score([window]), before)


def test_weights_of_both_are_counted_and_named(tiny_llama: Path) -> None:
    both = lossless(tiny_llama, CompiledPolicy)
    prepared = both.load(packed_weights(tiny_llama))
    assert prepared.bytes() == prepared.target.bytes() + prepared.draft.bytes()
    assert prepared.draft.bytes() < 0.5 * prepared.target.bytes()
    kernels = prepared.kernels()
    assert "float32" in kernels["blocks"] and "int8" in kernels["draft blocks"]


def test_nan_in_a_draft_reaches_nobody(tiny_llama: Path) -> None:
    """Weights of the draft alone that make nothing finite; norms are shared, so these are copies."""
    both, alone = lossless(tiny_llama, TransformerPolicy), plain(tiny_llama, TransformerPolicy)
    load(alone, tiny_llama)
    prepared = both.load(packed_weights(tiny_llama))
    first, *others = prepared.draft.blocks
    broken = replace(first, attention_norm=torch.nan * first.attention_norm)
    both.swap(replace(prepared, draft=replace(prepared.draft, blocks=(broken, *others))))
    for policy in (both, alone):
        policy.score([Window(0, 0, (5, 6, 7), num_logits=0)])
    logits = both.draft.score([Window(0, 3, (8,), num_logits=1), Window(1, 0, (8, 9, 10), 1)])
    assert not bool(logits.isfinite().any())
    for slot in (0, 1):
        both.forget_draft(slot, CONTEXT)
    windows = [Window(0, 3, (8, 9), num_logits=2), Window(1, 0, (5, 6), num_logits=2)]
    assert torch.equal(both.score(windows), alone.score(windows))
