"""Memory of a history: what it takes, what is evicted, where arrays lie."""

import random
import tracemalloc

import numpy as np
import pytest

from proposers.history_rollouts import COLUMNS, PromptRollouts, Rollout, RolloutStore, prompt_key


def lines(prompt: PromptRollouts) -> list[list[int]]:
    """Tokens as compiled code reads them, oldest rollout first."""
    table = prompt.table[: prompt.num_lines]
    assert table.ctypes.data == prompt.address and table.shape[1] == len(COLUMNS)
    live = {rollout.place: rollout for rollout in prompt}
    read = []
    for place, (tokens, chances, length, *_) in enumerate(table.tolist()):
        if length:
            rollout = live[place]
            assert tokens == rollout.tokens.buffer_info()[0]
            assert chances == rollout.chances.buffer_info()[0]
            assert length == len(rollout.tokens) == len(rollout.chances)
            read.append(rollout.tokens.tolist())
    return read


@pytest.mark.parametrize("seed", range(10))
def test_the_table_shows_every_rollout_in_order_through_growth_and_eviction(seed: int) -> None:
    """Against a list of lists; the store never holds more than its cap."""
    generator, store = random.Random(seed), RolloutStore(max_tokens=300)
    growing: list[Rollout] = []
    for step in range(400):
        if not growing or generator.random() < 0.2:
            growing.append(store.start(prompt_key((step % 3,)), (step % 3,), serial=step))
        one = generator.choice(growing)
        num = generator.randrange(6)
        store.extend(one, [generator.randrange(9) for _ in range(num)], (), 0)
        if generator.random() < 0.2 or len(growing) > 5:
            growing.remove(one)
            store.finish(one)
        assert store.num_tokens == sum(len(rollout.tokens) for rollout in store) <= 300
        held = list(store)
        assert all(rollout in held for rollout in growing), "one in flight was evicted"
        for kind in range(3):
            if (prompt := store.prompt(prompt_key((kind,)))) is not None:
                expected = [r.tokens.tolist() for r in held if r.prompt is prompt and r.tokens]
                assert lines(prompt) == expected
                assert prompt.num_lines <= 2 * len(prompt) + 5


def test_a_token_takes_less_than_64_bytes() -> None:
    """Objects, tables and slack included: 512 tokens a rollout as they come, two a round, and 16 to a
    prompt; eight bytes are the token and its probability."""
    for length, most in ((512, 16), (64, 64)):
        store = RolloutStore(max_tokens=10**9)
        tracemalloc.start()
        for number in range(320):
            key = prompt_key((number // 16,))
            rollout = store.start(key, (1, 2, 3), serial=number)
            for _ in range(length // 2):
                store.extend(rollout, [1000 + number, 2000], [0.5, 0.25], number)
            store.finish(rollout)
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert 8 < taken / store.num_tokens < most


def test_chances_that_are_not_known_are_nan_from_there_on() -> None:
    store = RolloutStore(max_tokens=100)
    rollout = store.start(prompt_key((1,)), (1,))
    store.extend(rollout, [5, 6], [0.5], 0)
    assert rollout.chances[0] == 0.5 and np.isnan(rollout.chances[1])
    with pytest.raises(AssertionError, match="more probabilities"):
        store.extend(rollout, [7], [0.5, 0.5], 0)


def test_a_rollout_that_never_got_room_leaves_nothing() -> None:
    store = RolloutStore(max_tokens=2)
    rollout = store.start(prompt_key((1,)), (1,))
    store.extend(rollout, [5, 6, 7], (), 0)
    store.finish(rollout)
    assert (len(store), store.num_prompts, store.num_tokens) == (0, 0, 0)


def test_prompts_of_the_same_tail_are_told_apart() -> None:
    keys = {prompt_key(ids) for ids in ((1, 2), (0, 1, 2), (2, 1), (1, 2, 0), (258,), (2, 1, 0, 0))}
    assert len(keys) == 6
