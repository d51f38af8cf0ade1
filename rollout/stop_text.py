"""Stop strings over token ids, checked at every token, also inside accepted runs.

Text is decoded incrementally: bytes that do not yet complete a character add nothing until they do,
so no U+FFFD of an unfinished one reaches the search. A match counts when it *ends* in the newest text,
so one split over two rounds is found, and one that ended before `min_tokens` is never looked at again.
"""

import copy
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class StopText:
    """Watches the generated ids of one row."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops, self._decode = stops, decode
        self._ids: list[int] = []
        self._prefix, self._read = 0, 0  # ids[prefix:read] is context already turned into text
        self._given = 0  # characters of the text of ids[prefix:] that were searched
        self._tail = ""
        self._longest = max(map(len, stops))

    def push(self, token: int) -> str | None:
        """Takes the next id; the stop string it completes, or None."""
        new = self._new_text(token)
        if not new:
            return None
        searched = self._tail + new
        found = next((s for s in self._stops if self._ends_in_new(searched, s, len(new))), None)
        self._tail = searched[-(self._longest - 1) :] if self._longest > 1 else ""
        return found

    def branch(self) -> "StopText":
        """Another watcher that goes on from here; this one stays as it is."""
        other = copy.copy(self)
        other._ids = self._ids[self._prefix :]
        other._prefix, other._read = 0, self._read - self._prefix
        return other

    @staticmethod
    def _ends_in_new(text: str, stop: str, new_len: int) -> bool:
        return stop in text[max(0, len(text) - new_len - len(stop) + 1) :]

    def _new_text(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids[self._prefix :])
        whole = text.rstrip("\ufffd")
        new, self._given = whole[self._given :], max(self._given, len(whole))
        if whole == text:
            self._prefix, self._read = self._read, len(self._ids)
            self._given = len(self._decode(self._ids[self._prefix :]))
        return new
