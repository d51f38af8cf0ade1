"""The law of the next token, from where a context's last tokens stood before and what followed.

Occurrences are interpolated from long matches to short ones. Those that match at least L tokens say
p_L(w); what they leave open goes to those that match L - 1, and so on:

    p(w) = sum_L p_L(w) prod_{l > L} (1 - sum_v p_l(v))

A rollout records the probability c that each of its tokens was sampled with, so an occurrence knows
one value of its own law. With b(w) the mean of sqrt(c) over the occurrences of w, n(w) their weight
(decay ** versions behind) and n = sum n(w), an occurrence of w leaves 1 - b(w) to the other tokens,
which take b(v) of it each, or their share where that is not enough:

    r(w) = min(1, (1 - b(w)) / sum_{v != w} b(v))
    p_L(w) = trust b(w) (n(w) + sum_{v != w} n(v) r(v)) / n

So a token seen once counts by how probable it was, not as one of few. The root is a compromise that
was measured: c itself is right in the same context, and too large in others, since a context in which
w was probable is the one in which w was seen; c^0 counts occurrences. Where nobody recorded c, b(w) =
n(w) / (n + number of tokens) and trust = 1, which is Witten-Bell interpolation (Witten and Bell, IEEE
Trans. Inf. Theory 37, 1991, method C): p_L = b. Beside it, on SmolLM2 at temperature 1 with 16 earlier
samples a prompt, recorded probabilities raised the expected accepted tokens a position from .292 to
.304 (5,577 positions, drafts drawn from p^1.3; `scripts/bench_history.py` measures such things).

A law becomes a draft by its mode or by a draw from q ~ p^sharpness. Expected acceptance, E sum min(p,
q), is concave in q and a point mass an end of its range, so where anything is open a draw is the
better; a token that is nearly certain is named all the same, which costs no draw.

This is the reference of csrc/history.cpp and runs where that cannot be built, some hundred times
slower.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from proposers.history_rollouts import NO_NOISE, PromptRollouts, Rollout
from rollout.draft import SparseLaw
from rollout.errors import InvalidConfig

Draw = Literal["mode", "counts", "best"]
DRAWS: tuple[Draw, ...] = ("mode", "counts", "best")

ENOUGH = 1e-4
"""Shorter matches are not asked once this much is left for them."""


@dataclass(frozen=True, slots=True)
class Options:
    """How matches vote and how a law becomes a draft."""

    decay: float = 0.95
    """Weight of a vote for each policy version that its rollout is behind; 1 forgets nothing."""
    trust: float = 0.5
    """Share of what matches of one length say that is taken to hold in another context."""
    sharpness: float = 1.3
    """Exponent of the law that `best` draws from."""
    certain: float = 0.9
    """Share of a token in that law above which `best` names it."""
    least: float = 0.01
    """Nothing is named behind tokens of which all are accepted with a smaller chance, by estimate."""
    min_match: int = 1
    max_match: int = 16
    """Tokens of context; a longer match says no more."""
    max_scanned: int = 65_536
    """Tokens of a prompt's newest rollouts that are looked through, to the end of a rollout."""
    max_votes: int = 64
    """Occurrences of one match length, the latest."""
    max_ids: int = 32
    """Tokens of a law, the most probable."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise InvalidConfig(
                f"min_match={self.min_match} max_match={self.max_match}: expected 1 <= min_match <= "
                "max_match"
            )
        for name in ("decay", "trust", "certain", "least"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidConfig(f"{name}={getattr(self, name)}: expected a share in (0, 1]")
        for name in ("sharpness", "max_scanned", "max_votes", "max_ids"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{name}={getattr(self, name)}: expected more than 0")


@dataclass(frozen=True, slots=True)
class Reader:
    """The row that is drafted for."""

    version: int = 0
    """Policy version in force."""
    noise: int = NO_NOISE
    own: Rollout | None = None


ANYBODY = Reader()


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens that are named, then perhaps one to be drawn."""

    points: list[int]
    law: SparseLaw | None
    """None: the draft ends behind the named tokens."""
    chances: list[float]
    """Estimates that each is accepted, that of the drawn one last."""


class LookUp(Protocol):
    """Who reads the rollouts: the reference or compiled code."""

    def law(
        self, prompt: PromptRollouts, context: Sequence[int], reader: Reader
    ) -> list[tuple[int, float]]:
        """Tokens that followed the context and their probabilities, the most probable first; what is
        missing to 1 is unseen."""
        ...

    def step(
        self,
        prompt: PromptRollouts,
        context: Sequence[int],
        reader: Reader,
        draw: Draw,
        room: int,
    ) -> Step:
        """A draft behind the context, up to the first token that is drawn, of at most `room`."""
        ...


class ReferenceLookUp:
    """In Python."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def law(
        self, prompt: PromptRollouts, context: Sequence[int], reader: Reader
    ) -> list[tuple[int, float]]:
        law = interpolate(find_occurrences(prompt, context, reader, self._options), self._options)
        ranked = sorted(law.items(), key=lambda item: -item[1])  # stable: of equals the first met
        return ranked[: self._options.max_ids]

    def step(
        self,
        prompt: PromptRollouts,
        context: Sequence[int],
        reader: Reader,
        draw: Draw,
        room: int,
    ) -> Step:
        points: list[int] = []
        chances: list[float] = []
        while len(points) < room and math.prod(chances) > self._options.least:
            if not (law := self.law(prompt, [*context, *points], reader)):
                break
            probs = sharpened(law, self._options.sharpness if draw == "best" else 1.0)
            if draw == "counts" or (draw == "best" and probs[0] <= self._options.certain):
                ids = torch.tensor([token for token, _ in law])
                expected = accepted_rate(law, probs)
                sparse = SparseLaw(ids, torch.tensor(probs, dtype=torch.float64))
                return Step(points, sparse, [*chances, expected])
            points.append(law[0][0])
            chances.append(law[0][1])
        return Step(points, None, chances)


def sharpened(law: Sequence[tuple[int, float]], sharpness: float) -> list[float]:
    """q ~ p^sharpness over the law's tokens."""
    powers = [p**sharpness for _, p in law]
    total = sum(powers)
    return [power / total for power in powers]


def accepted_rate(law: Sequence[tuple[int, float]], probs: Sequence[float]) -> float:
    """How often a token drawn from `probs` is accepted: between sum p q, which it is where every token
    is either certain or impossible, and sum min(p, q), where p is right; the geometric mean was as far
    off as the estimate for the most probable token, at all sizes (SmolLM2, T=1)."""
    most = sum(min(p, q) for (_, p), q in zip(law, probs))
    least = sum(p * q for (_, p), q in zip(law, probs))
    return math.sqrt(most * least)


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Where the context's last `match_len` tokens stood before, and the token behind them."""

    token: int
    match_len: int
    weight: float
    chance: float
    """Its probability when it was sampled; NaN: not known."""


def find_occurrences(
    prompt: PromptRollouts, context: Sequence[int], reader: Reader, options: Options
) -> list[Occurrence]:
    """Longest matches first, of equals the latest of the newest rollout. Rollouts that were drawn with
    the noise of the row that asks are left out, but for its own."""
    found: list[Occurrence] = []
    scanned = 0
    for rollout in reversed(list(prompt)):
        if scanned >= options.max_scanned:
            break
        if reader.noise == rollout.noise != NO_NOISE and rollout is not reader.own:
            continue
        scanned += len(rollout.tokens)
        weight = options.decay ** max(0, reader.version - rollout.version)
        found += _matches(prompt, rollout, context[-options.max_match :], weight)
    ordered: list[Occurrence] = []
    for length in range(options.max_match, options.min_match - 1, -1):
        ordered += [one for one in found if one.match_len == length][: options.max_votes]
    return ordered


def _matches(
    prompt: PromptRollouts, rollout: Rollout, context: Sequence[int], weight: float
) -> Iterator[Occurrence]:
    tokens = [*prompt.tail, *rollout.tokens]
    first = len(prompt.tail)
    ends = np.flatnonzero(np.array(tokens[:-1]) == context[-1]) + 1
    for end in reversed(ends.tolist()):
        if end >= first:
            longest, length = min(len(context), end), 1
            while length < longest and tokens[end - 1 - length] == context[-1 - length]:
                length += 1
            yield Occurrence(tokens[end], length, weight, rollout.chances[end - first])


@dataclass(slots=True)
class _Votes:
    """For one token."""

    weight: float = 0.0
    known: float = 0.0
    """Weight of those that know their chance."""
    roots: float = 0.0
    """Sum of weight * sqrt(chance) over these."""


def interpolate(occurrences: Sequence[Occurrence], options: Options) -> dict[int, float]:
    """p(w) of every token that followed, in order of appearance."""
    law: dict[int, float] = {}
    votes: dict[int, _Votes] = {}
    left, at = 1.0, 0
    while at < len(occurrences) and left > ENOUGH:
        length = occurrences[at].match_len
        while at < len(occurrences) and occurrences[at].match_len == length:
            one = occurrences[at]
            of_token = votes.setdefault(one.token, _Votes())
            of_token.weight += one.weight
            if not math.isnan(one.chance):
                of_token.known += one.weight
                of_token.roots += one.weight * math.sqrt(one.chance)
            at += 1
        said = estimates(votes, options.trust)
        total = sum(said.values())
        shorter = occurrences[at].match_len if at < len(occurrences) else options.min_match - 1
        # All match lengths down to the next that somebody has say the same.
        remains = (1.0 - total) ** (length - shorter)
        for token, chance in said.items():
            factor = left * (1.0 - remains) / total if total > 0 else 0.0
            law[token] = law.get(token, 0.0) + factor * chance
        left *= remains
    return law


def estimates(votes: dict[int, _Votes], trust: float) -> dict[int, float]:
    """p_L(w) of one match length."""
    total = sum(v.weight for v in votes.values())
    b = {
        w: (v.roots + (v.weight - v.known) * (v.weight / (total + len(votes)))) / v.weight
        for w, v in votes.items()
    }
    every = sum(b.values())

    def share(w: int) -> float:
        others = every - b[w]
        return (1.0 - b[w]) / others if others > 1.0 - b[w] else 1.0

    rest = sum(v.weight * share(w) for w, v in votes.items())
    return {
        w: b[w]
        * ((trust * v.known + (v.weight - v.known)) / v.weight)
        * (v.weight * (1.0 - share(w)) + rest)
        / total
        for w, v in votes.items()
    }
