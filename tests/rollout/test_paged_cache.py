"""Pages: what a slot reads is what was written to it, whatever is shared."""

import random

import pytest

from rollout.paged_cache import PAGE, PagedCache, pages_for


class Cached(PagedCache):
    """Holds a value an entry, so that a page in wrong hands is seen."""

    def __init__(self, *, num_slots: int, context_len: int, num_pages: int) -> None:
        self.content = [[-1] * PAGE for _ in range(num_pages)]
        super().__init__(
            num_slots=num_slots, context_len=context_len, num_pages=num_pages, copy=self._copied
        )

    def _copied(self, source: int, target: int) -> None:
        self.content[target] = list(self.content[source])

    def put(self, slot: int, entry: int, value: int) -> None:
        self.content[self.tables[slot, entry // PAGE]][entry % PAGE] = value

    def get(self, slot: int, length: int) -> list[int]:
        return [self.content[self.tables[slot, e // PAGE]][e % PAGE] for e in range(length)]


def test_random_use_reads_back_what_was_written_and_loses_no_page() -> None:
    rng = random.Random(0)
    refused = 0
    for _ in range(40):
        cache = Cached(num_slots=5, context_len=70, num_pages=rng.randint(5, 16))
        expected: list[list[int]] = [[] for _ in range(5)]
        for step in range(300):
            slot, other = rng.sample(range(5), 2)
            match rng.random():
                case x if x < 0.55:
                    end = min(70, len(expected[slot]) + rng.randint(1, 20))
                    free = cache.num_free
                    if not cache.grow(slot, end):
                        refused += 1
                        assert cache.num_free == free
                        continue
                    accepted = rng.randint(len(expected[slot]), end)
                    for entry in range(len(expected[slot]), end):
                        cache.put(slot, entry, step)
                    cache.written(slot, end)
                    if accepted < end:
                        cache.truncate(slot, accepted)
                    expected[slot] += [step] * (accepted - len(expected[slot]))
                case x if x < 0.75:
                    length = rng.randint(0, len(expected[other]))
                    cache.fork(other, slot, length)
                    expected[slot] = expected[other][:length]
                case _:
                    length = rng.choice([0, rng.randint(0, 70)])
                    cache.truncate(slot, length)
                    del expected[slot][length:]
            for s in range(5):
                assert cache.length(s) == len(expected[s])
                assert cache.get(s, len(expected[s])) == expected[s]
        cache.clear()
        assert cache.num_free == cache.num_pages
    assert refused > 100


def test_a_group_keeps_its_prompt_once() -> None:
    cache = Cached(num_slots=8, context_len=200, num_pages=40)
    assert cache.grow(0, 100)
    cache.written(0, 100)
    for slot in range(1, 8):
        cache.fork(0, slot, 100)
    assert cache.num_free == 40 - pages_for(100)
    for slot in range(8):  # seven copy the page they write to; the last one has it for itself
        assert cache.grow(slot, 101)
        cache.written(slot, 101)
    assert cache.num_free == 40 - pages_for(100) - 7


def test_a_cache_that_cannot_hold_one_row_is_refused() -> None:
    with pytest.raises(AssertionError, match="do not hold one row"):
        Cached(num_slots=2, context_len=100, num_pages=6)
