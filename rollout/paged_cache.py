"""Which pages of a cache belong to which slot: pages are shared by forks and copied when written.

A slot's entry e lies in its page e // PAGE. A page counts the slots that hold it; one that several
hold is read by all and copied for whoever writes to it first. So a group's prompt is kept once.
"""

from collections.abc import Callable

import numpy as np

PAGE = 16
"""Entries a page; as in csrc/attention.h."""


class PagedCache:
    """Page tables of `num_slots` slots of up to `context_len` entries over `num_pages` pages.

    `copy(source, target)` copies the content of a page.
    """

    def __init__(
        self, *, num_slots: int, context_len: int, num_pages: int, copy: Callable[[int, int], None]
    ) -> None:
        longest = pages_for(context_len)
        assert num_pages >= longest, f"{num_pages} pages do not hold one row of {context_len}"
        self.tables = np.zeros((num_slots, longest), dtype=np.int32)
        self.num_pages = num_pages
        self._copy = copy
        self._held = [0] * num_slots
        self._lengths = [0] * num_slots
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the lowest is taken first

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def length(self, slot: int) -> int:
        """Entries of the slot that mean something."""
        return self._lengths[slot]

    def grow(self, slot: int, length: int) -> bool:
        """Makes the slot able to hold `length` entries, the page it writes next its own; False when
        there are not enough pages, and then nothing has changed."""
        held, needed = self._held[slot], pages_for(length)
        writes = self._lengths[slot] // PAGE
        shared = writes < held and self._holders[self.tables[slot, writes]] > 1
        if max(0, needed - held) + shared > len(self._free):
            return False
        if shared:
            source = int(self.tables[slot, writes])
            self._copy(source, self._take(slot, writes))
            self._holders[source] -= 1
        for index in range(held, needed):
            self._take(slot, index)
        self._held[slot] = max(held, needed)
        return True

    def written(self, slot: int, length: int) -> None:
        """Entries up to `length` have been filled."""
        self._lengths[slot] = length

    def truncate(self, slot: int, length: int) -> None:
        """Forgets the entries from `length` on and gives their pages back."""
        kept = min(pages_for(length), self._held[slot])
        for page in self.tables[slot, kept : self._held[slot]].tolist():
            self._drop(page)
        self._held[slot] = kept
        self._lengths[slot] = min(self._lengths[slot], length)

    def fork(self, source: int, target: int, length: int) -> None:
        """The target holds the first `length` entries of the source, in the same pages."""
        assert length <= self._lengths[source], f"slot {source} does not hold {length} entries"
        self.truncate(target, 0)
        num = pages_for(length)
        self.tables[target, :num] = self.tables[source, :num]
        for page in self.tables[target, :num].tolist():
            self._holders[page] += 1
        self._held[target], self._lengths[target] = num, length

    def clear(self) -> None:
        """Forgets everything."""
        for slot in range(len(self._held)):
            self.truncate(slot, 0)

    def _take(self, slot: int, index: int) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        self.tables[slot, index] = page
        return page

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)


def pages_for(length: int) -> int:
    """Pages that `length` entries take."""
    return -(-length // PAGE)
