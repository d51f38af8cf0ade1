"""Sampling parameters of a request and the one documented meaning of each edge value.

The order of the transformations is that of `rollout.law`: grammar, bans, logit bias, penalties,
temperature, top-k, top-p, min-p. A value outside what a field documents is refused, None included
where it is not named: -1 never means "off".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollout.errors import InvalidRequest
from rollout.grammar import Grammar

LARGEST = 1e30
"""No parameter may be larger, and no repetition penalty below its inverse, so that float32 laws stay
finite."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends."""

    temperature: float = 1.0
    """0 is greedy (the first of tied maxima); every value above 0 is sampled, however small."""
    top_k: int = 0
    """Keep the k most probable tokens and all tied with the k-th; 0, or more than there are, keeps
    the whole vocabulary; 1 keeps the most probable and its ties."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens with mass >= top_p, ties included; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the largest probability; 0 keeps all, 1 the most
    probable and its ties; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or generated so far are divided by it when positive, multiplied
    when negative; > 0, 1 is off, below 1 rewards (Keskar et al., arXiv:1909.05858)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was generated; 0 is off, below 0 rewards."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of a token that was generated; 0 is off, below 0 rewards."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, amount added to its logit); -inf bans the token. A mapping is taken as well."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never generated: the last id of one is banned behind the others. Only
    generated tokens count, so a phrase that begins in the prompt is not recognised."""
    grammar: Grammar | None = None
    """What the generated tokens must spell (`rollout.grammar`); None constrains nothing."""
    min_tokens: int = 0
    """Stop ids are banned, and stop strings ignored, before this many tokens were generated."""
    max_new_tokens: int = 256
    """Upper limit; 0 gives an empty sample that ends by length. What fits the context is made."""
    stop_token_ids: tuple[int, ...] = ()
    """A sampled id of this set ends the sample and is kept as its last token; may be empty."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence ids: as stop_token_ids, unless `ignore_eos`."""
    ignore_eos: bool = False
    """eos_token_ids are tokens like any other: they end nothing and are never banned."""
    stop_strings: tuple[str, ...] = ()
    """Text that ends the sample once complete; the ids that completed it are kept whole."""
    seed: int | None = None
    """None derives the streams from run seed, prompt id and sample index; a value replaces the run
    seed. Any int64. It fixes the uniforms; with drafts that are drawn, not named, the tokens depend
    on what was drafted as well."""

    def __post_init__(self) -> None:
        for name, valid, expected in _CHECKS:
            value = getattr(self, name)
            if name == "logit_bias" and isinstance(value, Mapping):
                value = tuple(value.items())
            value = _as_tuple(value)
            object.__setattr__(self, name, value)
            if not valid(value):
                raise InvalidRequest(f"{name}={value!r}: expected {expected}")
        self._check_together()

    def _check_together(self) -> None:
        if self.min_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens}: expected at most "
                f"max_new_tokens={self.max_new_tokens}"
            )
        if self.grammar is not None and not self.stop_ids:
            raise InvalidRequest(
                "grammar without a stop id: a complete text could not end; "
                "give eos_token_ids (and not ignore_eos) or stop_token_ids"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end the sample."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids + self.eos_token_ids

    @property
    def penalised(self) -> bool:
        """The law depends on which tokens came before, and how often."""
        return bool(self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty)

    @property
    def named_ids(self) -> tuple[int, ...]:
        """Every token id these parameters speak of."""
        phrases = [token for phrase in self.bad_words for token in phrase]
        biased = [token for token, _ in self.logit_bias]
        return (*self.stop_token_ids, *self.eos_token_ids, *biased, *phrases)

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> "SamplingParams":
        """The inverse of `dataclasses.asdict`, also through JSON, where tuples become lists."""
        known = {field.name for field in fields(SamplingParams)}
        values = {name: value for name, value in row.items() if name in known}
        if isinstance(grammar := values.get("grammar"), Mapping):
            values["grammar"] = Grammar(**grammar)
        return SamplingParams(**values)


def _as_tuple(value: Any) -> Any:
    """Lists, at any depth, as tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    """Of at most LARGEST; a bool is not a number here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _ids(value: Any) -> bool:
    return isinstance(value, tuple) and all(_integer(token) and token >= 0 for token in value)


def _bias(pairs: Any) -> bool:
    if not isinstance(pairs, tuple) or any(not isinstance(p, tuple) or len(p) != 2 for p in pairs):
        return False
    ids = tuple(token for token, _ in pairs)
    amounts = [amount for _, amount in pairs]
    finite = all(_number(amount) or amount == -math.inf for amount in amounts)
    return _ids(ids) and len(set(ids)) == len(ids) and finite


_CHECKS = (
    (
        "temperature",
        lambda v: _number(v) and v >= 0,
        "a number in [0, 1e30] (0 is greedy)",
    ),
    (
        "top_k",
        lambda v: _integer(v) and v >= 0,
        "an integer >= 0 (0 keeps the whole vocabulary)",
    ),
    ("top_p", lambda v: _number(v) and 0 < v <= 1, "a number in (0, 1] (1 keeps all)"),
    ("min_p", lambda v: _number(v) and 0 <= v <= 1, "a number in [0, 1] (0 keeps all)"),
    (
        "repetition_penalty",
        lambda v: _number(v) and v >= 1 / LARGEST,
        "a number in [1e-30, 1e30] (1 is off)",
    ),
    ("frequency_penalty", _number, "a number of magnitude at most 1e30 (0 is off)"),
    ("presence_penalty", _number, "a number of magnitude at most 1e30 (0 is off)"),
    ("logit_bias", _bias, "pairs of distinct token ids >= 0 and amounts of at most 1e30, or -inf"),
    (
        "bad_words",
        lambda v: isinstance(v, tuple) and all(phrase and _ids(phrase) for phrase in v),
        "non-empty sequences of token ids >= 0",
    ),
    ("grammar", lambda v: v is None or isinstance(v, Grammar), "None or a Grammar"),
    ("min_tokens", lambda v: _integer(v) and v >= 0, "an integer >= 0"),
    ("max_new_tokens", lambda v: _integer(v) and v >= 0, "an integer >= 0"),
    ("stop_token_ids", _ids, "token ids >= 0"),
    ("eos_token_ids", _ids, "token ids >= 0"),
    ("ignore_eos", lambda v: isinstance(v, bool), "True or False"),
    (
        "stop_strings",
        lambda v: isinstance(v, tuple) and all(isinstance(s, str) and s for s in v),
        "non-empty strings",
    ),
    (
        "seed",
        lambda v: v is None or (_integer(v) and -(2**63) <= v < 2**63),
        "None or a 64-bit signed integer",
    ),
)
"""Field, whether its value will do, and what was expected."""
