"""Drafts from this run's other rollouts of the same prompt, finished and in flight, across steps.

A prompt's rollouts share a suffix index: where each n-gram of their tokens was followed by more. The
suffix of a row is matched at the longest length known; the occurrences that match vote on the next
token, those that disagree with what was drafted are dropped, and so on until the draft is long
enough or nothing is left. How a vote becomes a draft is `draw`:

- `mode`: the most frequent token, a point mass;
- `counts`: a token drawn from the frequencies with the row's own fresh randomness, a sparse law. The
  emitted law is the target's, but which tokens a seed gives then depends on what was recorded.

As a tree (`propose_trees`) every continuation is a branch, the most frequent paths first.

Old rollouts have influenced the weights that verify, so treating one as a sample of its old policy
would be biased. Neither form does: the first is deterministic, the second draws anew from a frozen
distribution, and verification emits what plain sampling would.

Memory is bounded in tokens. Whole rollouts are evicted, oldest first, never one in flight; while
nothing can be evicted, new tokens wait unrecorded. Nothing crosses prompts: the key is the prompt
itself, its token ids, so a reused prompt id with another prompt starts empty.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollout.draft import NO_DRAFT, Draft
from rollout.draft_tree import grow_tree
from rollout.drafting import Drafting, sparse_law
from rollout.row import Row

MAX_OCCURRENCES = 64
"""Most recent occurrences of an n-gram that vote on its continuation."""

Occurrence = tuple[int, int]  # (sequence serial, position behind the n-gram)
Ngram = tuple[int, ...]
Draw = Literal["mode", "counts"]


@dataclass(slots=True)
class _Sequence:
    prompt: Ngram
    tokens: list[int]
    """The prompt's last tokens as context, then the rollout's."""
    num_context: int
    in_flight: bool = True
    num_indexed: int = 0


@dataclass(slots=True)
class _PromptIndex:
    """Occurrences by n-gram, oldest first, over the sequences of one prompt."""

    occurrences: defaultdict[Ngram, list[Occurrence]] = field(
        default_factory=lambda: defaultdict(list)
    )
    num_sequences: int = 0


class HistoryProposer:
    """Longest-suffix match over the run's rollouts of the same prompt."""

    def __init__(
        self,
        *,
        draw: Draw = "mode",
        max_tokens: int = 1_000_000,
        min_match: int = 1,
        max_match: int = 4,
    ) -> None:
        self._draw, self._max_tokens = draw, max_tokens
        self._lengths = range(max_match, min_match - 1, -1)
        self._max_match = max_match
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()  # oldest first
        self._prompts: dict[Ngram, _PromptIndex] = {}
        self._num_tokens = 0
        self._foreign = 0
        """Serials below zero are rollouts without a row."""

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        return [self._draft(row, max_len) for row, max_len in zip(rows, max_lens, strict=True)]

    def _draft(self, row: Row, max_len: int) -> Draft:
        drafting = Drafting(row, max_len)
        occurrences = self._match(row) if max_len else []
        while drafting.room and (votes := self._votes(occurrences)):
            if self._draw == "mode":
                token = next(iter(votes))
                drafting.point(token)
            else:
                token = drafting.sample(sparse_law({t: float(len(o)) for t, o in votes.items()}))
            occurrences = votes[token]
        return drafting.done()

    def propose_trees(
        self, rows: Sequence[Row], max_nodes: Sequence[int], max_depths: Sequence[int]
    ) -> list[Draft]:
        return [
            grow_tree(self._match(row), self._branches, max_nodes=nodes, max_depth=depth)
            if nodes
            else NO_DRAFT
            for row, nodes, depth in zip(rows, max_nodes, max_depths, strict=True)
        ]

    def _match(self, row: Row) -> list[Occurrence]:
        """Occurrences of the longest known suffix that something follows, oldest first."""
        index = self._prompts.get(row.request.prompt_ids)
        if index is None:
            return []
        for length in self._lengths:
            suffix = tuple(row.token_ids[-length:])
            if len(suffix) == length and (found := index.occurrences.get(suffix)):
                followed = [o for o in found[-MAX_OCCURRENCES:] if self._next_token(o) is not None]
                if followed:
                    return followed
        return []

    def _next_token(self, occurrence: Occurrence) -> int | None:
        serial, position = occurrence
        tokens = self._sequences[serial].tokens
        return tokens[position] if position < len(tokens) else None

    def _votes(self, occurrences: list[Occurrence]) -> dict[int, list[Occurrence]]:
        """Next token -> the occurrences behind it; the most frequent first, of equals the most
        recent."""
        behind: dict[int, list[Occurrence]] = {}
        for occurrence in reversed(occurrences):
            if (token := self._next_token(occurrence)) is not None:
                behind.setdefault(token, []).append((occurrence[0], occurrence[1] + 1))
        ranked = sorted(behind.items(), key=lambda item: -len(item[1]))
        return {token: following[::-1] for token, following in ranked}

    def _branches(
        self, occurrences: list[Occurrence]
    ) -> Iterator[tuple[int, float, list[Occurrence]]]:
        votes = self._votes(occurrences)
        total = sum(map(len, votes.values())) + 1.0  # one more for what was never seen
        return ((token, len(behind) / total, behind) for token, behind in votes.items())

    def observe(self, rows: Sequence[Row]) -> None:
        for row in rows:
            sequence = self._sequences.get(row.serial) or self._start(
                row.serial, row.request.prompt_ids
            )
            recorded = len(sequence.tokens) - sequence.num_context
            new = row.token_ids[row.prompt_len + recorded :]
            if self._make_room(len(new)):
                sequence.tokens += new
                self._num_tokens += len(new)
                self._index(row.serial, sequence)

    def remember(self, prompt_ids: Ngram, token_ids: Sequence[int]) -> None:
        """Takes in a finished rollout from elsewhere, such as an earlier part of the run."""
        self._foreign -= 1
        sequence = self._start(self._foreign, tuple(prompt_ids))
        if self._make_room(len(token_ids)):
            sequence.tokens += token_ids
            self._num_tokens += len(token_ids)
            self._index(self._foreign, sequence)
        sequence.in_flight = False

    def _start(self, serial: int, prompt: Ngram) -> _Sequence:
        context = list(prompt[-self._max_match :])
        sequence = _Sequence(prompt, context, len(context), num_indexed=len(context) - 1)
        self._sequences[serial] = sequence
        self._prompts.setdefault(prompt, _PromptIndex()).num_sequences += 1
        return sequence

    def _index(self, serial: int, sequence: _Sequence) -> None:
        """Records the n-grams that have gained a following token."""
        occurrences = self._prompts[sequence.prompt].occurrences
        for end in range(sequence.num_indexed + 1, len(sequence.tokens)):
            for length in self._lengths:
                if length <= end:
                    occurrences[tuple(sequence.tokens[end - length : end])].append((serial, end))
        sequence.num_indexed = max(sequence.num_indexed, len(sequence.tokens) - 1)

    def finish(self, row: Row) -> None:
        if (sequence := self._sequences.get(row.serial)) is not None:
            sequence.in_flight = False

    def _make_room(self, num_tokens: int) -> bool:
        """Evicts finished rollouts, oldest first, until `num_tokens` more fit."""
        while self._num_tokens + num_tokens > self._max_tokens:
            oldest = next((s for s, seq in self._sequences.items() if not seq.in_flight), None)
            if oldest is None:
                return False
            self._remove(oldest)
        return True

    def _remove(self, serial: int) -> None:
        sequence = self._sequences.pop(serial)
        self._num_tokens -= len(sequence.tokens) - sequence.num_context
        index = self._prompts[sequence.prompt]
        index.num_sequences -= 1
        if not index.num_sequences:
            del self._prompts[sequence.prompt]
            return
        tokens = sequence.tokens
        for end in range(1, len(tokens)):
            for length in self._lengths:
                ngram = tuple(tokens[end - length : end]) if length <= end else ()
                if ngram in index.occurrences:
                    kept = [o for o in index.occurrences[ngram] if o[0] != serial]
                    if kept:
                        index.occurrences[ngram] = kept
                    else:
                        del index.occurrences[ngram]

    def publish(self, version: int) -> None:
        pass

    def gauges(self) -> Mapping[str, float]:
        return {
            "history/tokens": float(self._num_tokens),
            "history/sequences": float(len(self._sequences)),
            "history/prompts": float(len(self._prompts)),
        }
