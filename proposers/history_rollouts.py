"""The rollouts a history drafts from: by prompt, in bounded memory, as plain arrays.

A rollout is its token ids, the probability each had when it was sampled (NaN where nobody said), the
policy version of its last token and whose noise it was drawn with. Those of one prompt lie in a table
of addresses that compiled code reads in place; nothing else is indexed, so taking in a token costs
8 bytes and an append.

Tokens are bounded. Whole rollouts are evicted, oldest first, never one in flight; while nothing can
be evicted, new tokens wait unrecorded. The key is the prompt itself (a 128-bit digest of its ids), so
a prompt id that is used again for another prompt starts empty.
"""

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

COLUMNS = ("tokens", "chances", "length", "version", "noise")
"""Of a prompt's table: two addresses, the number of tokens, and what decides the vote's weight."""
NO_NOISE = 0
"""Drawn with noise that no row will use: another run's, or none."""


LEAST_CHANCE = 1e-30
"""What was sampled was possible, also where its logarithm rounds to the probability 0."""


@dataclass(slots=True, eq=False)
class Rollout:
    """One sample, finished or in flight."""

    serial: int
    prompt: "PromptRollouts"
    noise: int
    unshared: bool = False
    """It is to be handed to other actors; what came from elsewhere is not handed on."""
    in_flight: bool = True
    version: int = 0
    place: int = 0
    """Its line in the prompt's table."""
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    chances: "array[float]" = field(default_factory=lambda: array("f"))

    def extend(self, token_ids: Iterable[int], chances: Iterable[float], version: int) -> None:
        """Appends tokens and the probabilities they were sampled with, as far as these are known."""
        self.tokens.extend(token_ids)
        self.chances.extend(min(max(chance, LEAST_CHANCE), 1.0) for chance in chances)
        self.chances.extend([math.nan] * (len(self.tokens) - len(self.chances)))
        assert len(self.tokens) == len(self.chances), "more probabilities than tokens"
        self.version = version
        self.prompt.show(self)

    def trim(self) -> None:
        """Gives back the room that was kept for more tokens."""
        self.tokens, self.chances = array("i", self.tokens), array("f", self.chances)
        self.prompt.show(self)


class PromptRollouts:
    """The rollouts of one prompt, oldest first."""

    def __init__(self, key: bytes, tail: Sequence[int]) -> None:
        self.key = key
        self.tail = array("i", tail)
        """The prompt's last tokens: what every rollout follows."""
        self._place_table(np.zeros((4, len(COLUMNS)), dtype=np.int64))
        self.num_lines = 0
        self._rollouts: dict[int, Rollout] = {}

    def __len__(self) -> int:
        return len(self._rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self._rollouts.values())

    def _place_table(self, table: np.ndarray) -> None:
        """A line of COLUMNS a rollout. Those removed have length 0 until the table is packed."""
        self.table, self.address = table, table.ctypes.data

    def add(self, rollout: Rollout) -> None:
        self._rollouts[rollout.serial] = rollout
        self._append(rollout)

    def remove(self, rollout: Rollout) -> None:
        del self._rollouts[rollout.serial]
        self.table[rollout.place] = 0
        if self.num_lines > 2 * len(self._rollouts) + 4:
            self.num_lines = 0
            for kept in self:
                self._append(kept)

    def _append(self, rollout: Rollout) -> None:
        if self.num_lines == len(self.table):
            self._place_table(np.concatenate([self.table, np.zeros_like(self.table)]))
        rollout.place = self.num_lines
        self.num_lines += 1
        self.show(rollout)

    def show(self, rollout: Rollout) -> None:
        """Writes where a rollout lies now: arrays move as they grow."""
        tokens, length = rollout.tokens.buffer_info()
        chances, _ = rollout.chances.buffer_info()
        self.table[rollout.place] = (tokens, chances, length, rollout.version, rollout.noise)


class RolloutStore:
    """All rollouts, `max_tokens` tokens of them at most, not counting the prompts' last tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._rollouts: dict[int, Rollout] = {}  # by serial, oldest first
        self._prompts: dict[bytes, PromptRollouts] = {}
        self._foreign = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self._rollouts.values())

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def prompt(self, key: bytes) -> PromptRollouts | None:
        return self._prompts.get(key)

    def start(
        self, key: bytes, tail: Sequence[int], serial: int | None = None, noise: int = NO_NOISE
    ) -> Rollout:
        """An empty rollout, the newest and in flight: of a row by its serial, or from elsewhere."""
        unshared = serial is not None
        if serial is None:
            self._foreign -= 1  # rows count from 0
            serial = self._foreign
        if (prompt := self._prompts.get(key)) is None:
            prompt = self._prompts[key] = PromptRollouts(key, tail)
        rollout = self._rollouts[serial] = Rollout(serial, prompt, noise, unshared)
        prompt.add(rollout)
        return rollout

    def extend(
        self, rollout: Rollout, token_ids: Sequence[int], chances: Iterable[float], version: int
    ) -> None:
        """Appends tokens if there is, or can be made, room for them."""
        if self._make_room(len(token_ids)):
            rollout.extend(token_ids, chances, version)
            self.num_tokens += len(token_ids)

    def finish(self, rollout: Rollout) -> None:
        """It will not grow any more and may be evicted."""
        rollout.in_flight = False
        if rollout.tokens:
            rollout.trim()
        else:
            self._remove(rollout)

    def _make_room(self, num_tokens: int) -> bool:
        """Evicts finished rollouts, oldest first, until `num_tokens` more fit."""
        while self.num_tokens + num_tokens > self._max_tokens:
            oldest = next((r for r in self if not r.in_flight), None)
            if oldest is None:
                return False
            self._remove(oldest)
        return True

    def _remove(self, rollout: Rollout) -> None:
        del self._rollouts[rollout.serial]
        self.num_tokens -= len(rollout.tokens)
        rollout.prompt.remove(rollout)
        if not len(rollout.prompt):
            del self._prompts[rollout.prompt.key]


def prompt_key(prompt_ids: Sequence[int]) -> bytes:
    """16 bytes that tell prompts apart."""
    return hashlib.blake2b(array("i", prompt_ids).tobytes(), digest_size=16).digest()
