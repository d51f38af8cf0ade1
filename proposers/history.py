"""Drafts from this run's other rollouts of the same prompt, finished and in flight, across steps.

A prompt's rollouts share a suffix index: where each n-gram of their tokens was followed by more. The
suffix of a row is matched at the longest length known; among the occurrences that match, the most
frequent next token is drafted, the occurrences that disagree are dropped, and so on until the draft
is long enough or nothing is left. Every drafted token is a point mass, so old rollouts that
influenced the weights bias nothing: verification emits what plain sampling would.

Memory is bounded in tokens. Whole rollouts are evicted, oldest first, never one in flight; while
nothing can be evicted, new tokens wait unrecorded. Nothing crosses prompts: the key is the prompt
itself, its token ids, so a reused prompt id with another prompt starts empty.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollout.draft import NO_DRAFT, Draft
from rollout.row import Row

MAX_OCCURRENCES = 64
"""Most recent occurrences of an n-gram that vote on its continuation."""

Occurrence = tuple[int, int]  # (sequence serial, position behind the n-gram)
Ngram = tuple[int, ...]


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
        self, *, max_tokens: int = 1_000_000, min_match: int = 1, max_match: int = 4
    ) -> None:
        self._max_tokens = max_tokens
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
        index = self._prompts.get(row.request.prompt_ids)
        if not max_len or index is None:
            return NO_DRAFT
        for length in self._lengths:
            suffix = tuple(row.token_ids[-length:])
            if len(suffix) == length and (found := index.occurrences.get(suffix)):
                tokens = self._majority_path(found[-MAX_OCCURRENCES:], max_len)
                if tokens:
                    return Draft.of_points(tokens)
        return NO_DRAFT

    def _majority_path(self, occurrences: list[Occurrence], max_len: int) -> list[int]:
        """Follows the most frequent continuation; the most recent of equals."""
        path: list[int] = []
        while len(path) < max_len:
            following = [
                (serial, position, self._sequences[serial].tokens[position])
                for serial, position in reversed(occurrences)
                if position < len(self._sequences[serial].tokens)
            ]
            if not following:
                break
            token = Counter(token for _, _, token in following).most_common(1)[0][0]
            path.append(token)
            occurrences = [(s, p + 1) for s, p, t in reversed(following) if t == token]
        return path

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
