"""Sampling parameters of a request and the one documented meaning of each edge value.

The order of the transformations is that of `rollout.law`: bans, temperature, top-k, top-p, min-p.
"""

import math
from dataclasses import dataclass

from rollout.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends."""

    temperature: float = 1.0
    """0 is greedy (the first of tied maxima); every value above 0 is sampled, however small."""
    top_k: int = 0
    """Keep the k most probable tokens and all tied with the k-th; 0 keeps the whole vocabulary."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens with mass >= top_p, ties included; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the largest probability; 0 keeps all; in [0, 1]."""
    min_tokens: int = 0
    """Stop ids are banned, and stop strings ignored, before this many tokens were generated."""
    max_new_tokens: int = 256
    """Upper limit; 0 gives an empty sample that ends by length. What fits the context is made."""
    stop_token_ids: tuple[int, ...] = ()
    """A sampled id of this set ends the sample and is kept as its last token; may be empty."""
    stop_strings: tuple[str, ...] = ()
    """Text that ends the sample once complete; the ids that completed it are kept whole."""
    seed: int | None = None
    """None derives the stream from run seed, prompt id and sample index; a value replaces the
    run seed. Any int64."""

    def __post_init__(self) -> None:
        checks = (
            (
                math.isfinite(self.temperature) and self.temperature >= 0,
                "temperature",
                self.temperature,
                "a finite number >= 0 (0 is greedy)",
            ),
            (
                self.top_k >= 0,
                "top_k",
                self.top_k,
                "an integer >= 0 (0 keeps the whole vocabulary)",
            ),
            (0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1] (1 keeps all)"),
            (0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1] (0 keeps all)"),
            (self.min_tokens >= 0, "min_tokens", self.min_tokens, "an integer >= 0"),
            (self.max_new_tokens >= 0, "max_new_tokens", self.max_new_tokens, "an integer >= 0"),
            (
                self.seed is None or -(2**63) <= self.seed < 2**63,
                "seed",
                self.seed,
                "None or a 64-bit signed integer",
            ),
            (all(self.stop_strings), "stop_strings", self.stop_strings, "non-empty strings"),
            (
                all(token >= 0 for token in self.stop_token_ids),
                "stop_token_ids",
                self.stop_token_ids,
                "token ids >= 0",
            ),
            (
                self.min_tokens <= self.max_new_tokens,
                "min_tokens",
                self.min_tokens,
                f"at most max_new_tokens={self.max_new_tokens}",
            ),
        )
        for valid, name, got, expected in checks:
            if not valid:
                raise InvalidRequest(f"{name}={got!r}: expected {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0
