"""Grammars: which token ids may come next, told by a callable that is asked position by position.

A `Grammar` travels with a request as plain text. The engine compiles it into one `MaskProvider` a
row and asks it, at every position of a draft window, for the ids that are allowed after the tokens
generated so far: drafted tokens before the position are part of that prefix, and when some of them
are refused a shorter prefix, or another one, is asked for next.

What is sampled is the target law restricted to the allowed ids and renormalised at each position.
That is not the model's law conditioned on the whole text being in the language, and no one who
masks step by step samples from that. Since a mask is a function of the prefix alone, a draft that
is verified under masks leaves the masked law as it is.

`rollout.llguidance_grammar` compiles the kinds `json_schema`, `regex` and `lark`. Any callable will
do as a provider: hand in your own by name with `named_grammars`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from rollout.errors import InvalidRequest

Kind = Literal["json_schema", "regex", "lark", "named"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of one sample must look like. `Grammar(**asdict(grammar))` is `grammar`."""

    kind: Kind
    source: str
    """JSON text of the schema, the expression (matched whole), the Lark grammar, or the name of a
    provider that is registered with the engine."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidRequest(f"grammar kind={self.kind!r}: expected one of {get_args(Kind)}")
        if not isinstance(self.source, str) or not self.source:
            raise InvalidRequest(f"grammar source={self.source!r}: expected a non-empty string")
        if self.kind == "json_schema":
            _check_schema(self.source)

    @staticmethod
    def json_schema(schema: dict[str, Any] | str) -> "Grammar":
        """A schema as a dict or as JSON text; the order of its properties is kept."""
        if isinstance(schema, str):
            return Grammar("json_schema", schema)
        try:
            return Grammar("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"JSON schema: {error}; expected plain JSON types") from error

    @staticmethod
    def regex(expression: str) -> "Grammar":
        """The whole text matches the expression, as with `re.fullmatch`."""
        return Grammar("regex", expression)

    @staticmethod
    def lark(grammar: str) -> "Grammar":
        """A context-free grammar with the rule `start`."""
        return Grammar("lark", grammar)

    @staticmethod
    def named(name: str) -> "Grammar":
        """A provider that was registered with the engine; see `named_grammars`."""
        return Grammar("named", name)


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"JSON schema is not JSON: {error}; pass a dict") from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"JSON schema is {schema!r:.60}: expected a JSON object")


MaskProvider = Callable[[Sequence[int]], torch.Tensor]
"""Tokens generated so far (prompt not included) -> allowed next ids, bool [V] on the CPU.

Any callable will do that is, seen from outside, a pure function of its argument; what it keeps
between calls is its own affair. It serves one row. Prefixes grow, and are rolled back to any
shorter one; it is asked neither for a prefix that its own masks do not allow nor for one past a
stop id. It may raise InvalidRequest, which ends its row as an error. V counts the logits, padded
ids included."""

CompileGrammar = Callable[[Grammar], MaskProvider]
"""Makes a fresh provider for one row. Raises InvalidRequest for a source that does not compile."""


def named_grammars(
    providers: Mapping[str, Callable[[], MaskProvider]],
    otherwise: CompileGrammar | None = None,
) -> CompileGrammar:
    """Looks grammars of kind `named` up; each row gets what a call of the entry returns. All other
    kinds go to `otherwise`, and are refused without one."""

    def compile_grammar(grammar: Grammar) -> MaskProvider:
        if grammar.kind == "named":
            if grammar.source not in providers:
                raise InvalidRequest(
                    f"grammar named {grammar.source!r}: expected one of {sorted(providers)}; "
                    f"register it with the engine"
                )
            return providers[grammar.source]()
        if otherwise is None:
            raise InvalidRequest(
                f"grammar of kind {grammar.kind}: this engine knows named ones only, "
                f"{sorted(providers)}; give named_grammars a compiler for the rest"
            )
        return otherwise(grammar)

    return compile_grammar
