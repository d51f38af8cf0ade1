"""Grammars compiled by llguidance: JSON schemas, regular expressions and Lark grammars.

A compiled grammar is kept and copied for each row. A row's matcher is never rebuilt for a draft: it
remembers the tokens it has consumed, takes back those after the common prefix and consumes the rest.

Three habits of llguidance that matter here:

- A matcher that fails answers with a mask of the stop id, as if the text were complete. Each answer
  is therefore followed by the question whether the matcher failed, and a failure is raised.
- Copies share one lazily built automaton. That makes later rows faster, but what one row uses up
  ("too many states") fails them all. A failed matcher is therefore asked again as a newly compiled
  one that shares nothing: the answer is that of a matcher which saw this prefix only.
- Where the grammar forces the text, the mask holds one id, that of the tokenizer's own spelling;
  other spellings of the same text are masked.

A schema keyword that llguidance cannot enforce is refused, unless the schema itself asks for
leniency (`"x-guidance": {"lenient": true}`). White space between JSON tokens is free by default;
`"x-guidance": {"whitespace_flexible": false}` forbids it.

Source: https://github.com/guidance-ai/llguidance (versions 1.7 to 1.9).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollout.checkpoint import read_tokenizer
from rollout.errors import InvalidConfig, InvalidRequest
from rollout.grammar import Grammar, MaskProvider

if TYPE_CHECKING:
    from llguidance import LLMatcher

INSTALL = "pip install exact-rollout[grammar]"
WORDS = {
    "NoExtensionBias": "no token can follow: the language is empty, or the tokenizer cannot spell it"
}
"""What llguidance says by a bare name."""


class LlguidanceGrammars:
    """The grammars of one tokenizer; a `rollout.grammar.CompileGrammar`.

    Calls and the providers they return may be used from several threads, one provider from one
    thread at a time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_kept: int = 128,
        max_lexer_states: int = 250_000,
    ) -> None:
        """`folder` is a Hugging Face model folder; `vocab_size` counts the logits, and ids without
        a token are never allowed. A complete text is followed by one of `eos_token_ids`, so these
        belong to the request's stop ids. `num_kept` compiled grammars are kept, the last used;
        `max_lexer_states` (1 to 2 kB each) bounds the automaton of each.

        Raises InvalidConfig without llguidance, and for ids that do not fit the tokenizer.
        """
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise InvalidConfig(f"grammars need llguidance ({error}): {INSTALL}") from error
        if not eos_token_ids:
            raise InvalidConfig("eos_token_ids is empty: a grammar needs an id that ends its text")
        tokenizer: Any = read_tokenizer(folder)
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except ValueError as error:
            raise InvalidConfig(
                f"{folder}: vocab_size={vocab_size}, eos_token_ids={tuple(eos_token_ids)}: {error}"
            ) from error
        self._vocab_size, self._matcher = vocab_size, llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=max_lexer_states, verbose_errors=False
        )
        self._eos = frozenset(eos_token_ids)
        self._kept = lru_cache(num_kept)(self._compile)

    def __call__(self, grammar: Grammar) -> MaskProvider:
        def renewed() -> "LLMatcher":
            self._kept.cache_clear()  # what failed may be what the copies share
            return self._compile(grammar)

        return _RowMasks(self._kept(grammar).deep_copy(), self._eos, self._vocab_size, renewed)

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        """A matcher at the start of the text, with an automaton of its own."""
        try:
            matcher = self._matcher(
                self._tokenizer, self._translated(grammar), log_level=0, limits=self._limits
            )
            _check(matcher)
            self._try_out(matcher.deep_copy())
        except (ValueError, InvalidRequest) as error:
            raise InvalidRequest(
                f"grammar of kind {grammar.kind}, {grammar.source!r:.80}: {error}"
            ) from error
        return matcher

    def _translated(self, grammar: Grammar) -> str:
        if grammar.kind == "json_schema":
            return self._matcher.grammar_from_json_schema(grammar.source)
        if grammar.kind == "regex":
            return self._matcher.grammar_from_regex(grammar.source)
        if grammar.kind == "lark":
            return self._matcher.grammar_from_lark(grammar.source)
        raise InvalidRequest("expected json_schema, regex or lark; wrap this in named_grammars")

    def _try_out(self, matcher: "LLMatcher") -> None:
        """Shows now what would end every row later: a language without a text, and lexemes that
        cannot be taken back (`max_tokens=`, `stop=`)."""
        masks = _RowMasks(matcher, self._eos, self._vocab_size)
        first = masks.after([]).nonzero()[:, 0].tolist()
        for token in [token for token in first if token not in self._eos][:1]:
            masks.after([token])
            masks.after([])


class _MatcherFailed(InvalidRequest):
    """llguidance reported an error, and stays in it, or took a token for a wrong one."""


class _RowMasks:
    """The masks of one row, by a matcher that follows the prefix it is asked about."""

    def __init__(
        self,
        matcher: "LLMatcher",
        eos: frozenset[int],
        vocab_size: int,
        renewed: Callable[[], "LLMatcher"] | None = None,
    ) -> None:
        self._matcher, self._renewed = matcher, renewed
        self._eos, self._vocab_size = eos, vocab_size
        self._consumed: list[int] = []  # never an eos id: matchers count these now and then only

    def __call__(self, generated: Sequence[int]) -> torch.Tensor:
        """Allowed next ids, bool [V]. After an eos id, and once the text is complete, the eos ids.

        Raises InvalidRequest for a prefix that the grammar does not allow, or that is beyond the
        limits of llguidance.
        """
        tokens = list(generated)
        try:
            return self.after(tokens)
        except _MatcherFailed:
            assert self._renewed is not None, "a row knows how to renew its matcher"
            self._matcher, self._consumed = self._renewed(), []
            return self.after(tokens)

    def after(self, tokens: list[int]) -> torch.Tensor:
        """The same without a second matcher."""
        kept_len = _common_len(self._consumed, tokens)
        self._take_back(len(self._consumed) - kept_len)
        rest = tokens[kept_len:]
        ended = next((i for i, token in enumerate(rest) if token in self._eos), None)
        self._consume(rest[:ended])
        if ended is not None or self._complete():
            ends = torch.zeros(self._vocab_size, dtype=torch.bool)  # [V]
            ends[list(self._eos)] = True
            return ends
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)  # [ceil(V / 32) * 4]
        _check(self._matcher)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")  # [V]
        return torch.from_numpy(allowed).view(torch.bool)

    def _take_back(self, num: int) -> None:
        if num:
            self._matcher.rollback(num)
            _check(self._matcher)
            del self._consumed[-num:]

    def _consume(self, tokens: list[int]) -> None:
        if tokens:
            num = self._matcher.try_consume_tokens(tokens)
            _check(self._matcher)
            self._consumed += tokens[:num]
            if num < len(tokens):
                raise _MatcherFailed(  # also what a failed automaton says here
                    f"token {tokens[num]} after {len(self._consumed)} generated ones: the grammar "
                    f"does not allow it there; ask for prefixes that its masks allow"
                )

    def _complete(self) -> bool:
        if not self._matcher.is_stopped():
            return False
        if not self._matcher.is_accepting():
            raise _MatcherFailed(f"the grammar stopped early: {self._matcher.stop_reason()}")
        return True


def _common_len(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    if one == other[: len(one)]:  # a prefix that grew
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(other))


def _check(matcher: "LLMatcher") -> None:
    """Raises what llguidance reports, on one line and without the dump of its state."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().partition("\n<")[0].split())
        raise _MatcherFailed(WORDS.get(reason, reason))
