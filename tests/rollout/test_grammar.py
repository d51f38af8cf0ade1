"""Masks spell what the grammar says, are functions of the prefix, and are refused by name."""

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import rollout.llguidance_grammar
from rollout.checkpoint import read_config, read_tokenizer
from rollout.errors import InvalidConfig, InvalidRequest
from rollout.grammar import Grammar, MaskProvider, named_grammars
from rollout.llguidance_grammar import LlguidanceGrammars

V, PADDED = 300, 337  # ids of the tiny tokenizer, width of the logits
EOS = 0
EXPRESSIONS = (
    r"[0-9]{1,3}( \+ [0-9]{1,3}){0,3}: (yes|no|maybe not)\n?",
    r"(The answer is |The ant is )[a-zé€😀]{1,5}(\.|!)+",
    r"abcdefgh(ij|ik)hello, this is forced",
    r"a?",
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": -5, "maximum": 250},
        "unit": {"enum": ["m", "kg"]},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["answer", "unit"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
SUMS = 'start: term (("+" | "-") term)*\nterm: NUM | "(" start ")"\nNUM: /[0-9]{1,3}/\n'
GRAMMARS = (
    *(Grammar.regex(expression) for expression in EXPRESSIONS),
    Grammar.json_schema(SCHEMA),
    Grammar.lark(SUMS),
)
Text = Callable[[Sequence[int]], str]


@pytest.fixture(scope="module")
def grammars(tiny_llama: Path) -> LlguidanceGrammars:
    return LlguidanceGrammars(tiny_llama, vocab_size=PADDED, eos_token_ids=[EOS])


@pytest.fixture(scope="module")
def text(tiny_llama: Path) -> Text:
    return speller(tiny_llama)


def speller(folder: Path) -> Text:
    tokenizer = read_tokenizer(folder)
    return lambda tokens: str(tokenizer.decode(list(tokens)))


def letters(folder: Path, word: str) -> list[int]:
    """One token a letter."""
    vocabulary = read_tokenizer(folder).get_vocab()
    return [vocabulary[letter] for letter in word]


def ids_in(mask: torch.Tensor) -> list[int]:
    ids: list[int] = mask.nonzero()[:, 0].tolist()
    return ids


def walk(mask: MaskProvider, rng: random.Random, *, eos: int = EOS, max_len: int = 80) -> list[int]:
    """Tokens drawn evenly from the masks until the stop id, which is left out."""
    tokens: list[int] = []
    while len(tokens) < max_len and (token := rng.choice(ids_in(mask(tokens)))) != eos:
        tokens.append(token)
    return tokens


def texts(mask: MaskProvider, text: Text, num: int, eos: int = EOS) -> list[str]:
    """Of the walks that came to an end; none may be endless by the grammars used here."""
    walks = [walk(mask, random.Random(seed), eos=eos) for seed in range(num)]
    ended = [tokens for tokens in walks if len(tokens) < 80]
    assert len(ended) > 0.9 * num
    return [text(tokens) for tokens in ended]


def fits_schema(answer: str) -> bool:
    """SCHEMA by hand."""
    value = json.loads(answer)
    notes = value.pop("notes", [])
    assert set(value) == {"answer", "unit"} and type(value["answer"]) is int
    short = all(isinstance(note, str) and len(note) <= 4 for note in notes)
    return (
        -5 <= value["answer"] <= 250 and value["unit"] in ("m", "kg") and short and len(notes) < 3
    )


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_random_walks_spell_what_the_expression_matches(
    expression: str, grammars: LlguidanceGrammars, text: Text
) -> None:
    for spelt in texts(grammars(Grammar.regex(expression)), text, 40):
        assert re.fullmatch(expression, spelt), spelt


def test_random_walks_spell_what_the_schema_accepts(
    grammars: LlguidanceGrammars, text: Text
) -> None:
    spelt = texts(grammars(Grammar.json_schema(SCHEMA)), text, 60)
    assert all(fits_schema(one) for one in spelt)
    assert {"notes" in json.loads(one) for one in spelt} == {True, False}


def test_random_walks_keep_to_the_grammar_on_a_real_tokenizer(smollm2: Path) -> None:
    config, text = read_config(smollm2), speller(smollm2)
    (eos,) = config.eos_token_ids
    compiled = LlguidanceGrammars(smollm2, vocab_size=config.vocab_size, eos_token_ids=[eos])
    spelt = texts(compiled(Grammar.json_schema(SCHEMA)), text, 20, eos)
    assert all(fits_schema(one) for one in spelt)
    expression = EXPRESSIONS[0]
    for one in texts(compiled(Grammar.regex(expression)), text, 20, eos):
        assert re.fullmatch(expression, one), one


def test_mask_holds_exactly_the_ids_that_can_still_be_completed(
    grammars: LlguidanceGrammars, text: Text
) -> None:
    """Against the language written out: 3 + 9 + 27 numbers, each alone or with one of 3 digits. No
    text is forced, so nothing is left out for its spelling."""
    numbers = ["".join(digits) for n in (1, 2, 3) for digits in product("123", repeat=n)]
    language = {number + end for number in numbers for end in ("", "+1", "+2", "+3")}
    mask = grammars(Grammar.regex(r"[1-3]{1,3}(\+[1-3])?"))
    begun = {word[:length] for word in language for length in range(len(word) + 1)}
    pieces = {token: text([token]) for token in range(3, V)}
    for seed in range(30):
        tokens = walk(mask, random.Random(seed))
        for length in range(len(tokens) + 1):
            done = text(tokens[:length])
            allowed = {token for token, piece in pieces.items() if done + piece in begun}
            ends = {EOS} if done in language else set()
            assert set(ids_in(mask(tokens[:length]))) == allowed | ends


def visits(mask: MaskProvider, num: int) -> list[list[int]]:
    """Prefixes of several walks in random order: they grow, shrink and jump to another branch."""
    rng = random.Random(7)
    walks = [walk(mask, random.Random(seed)) for seed in range(6)]
    chosen = [rng.choice(walks) for _ in range(num)]
    return [tokens[: rng.randrange(len(tokens) + 1)] for tokens in chosen]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.source[:12])
def test_mask_after_a_rollback_equals_that_of_a_fresh_provider(
    grammar: Grammar, grammars: LlguidanceGrammars
) -> None:
    used = grammars(grammar)
    for prefix in visits(grammars(grammar), 60):
        assert torch.equal(used(prefix), grammars(grammar)(prefix))


def test_a_prefix_that_is_not_taken_back_is_seen(
    grammars: LlguidanceGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what was consumed beyond the common prefix stays."""
    prefixes = visits(grammars(GRAMMARS[0]), 60)
    fresh = [grammars(GRAMMARS[0])(prefix) for prefix in prefixes]
    monkeypatch.setattr(
        rollout.llguidance_grammar, "_common_len", lambda one, other: min(len(one), len(other))
    )
    used = grammars(GRAMMARS[0])
    assert sum(not torch.equal(used(p), mask) for p, mask in zip(prefixes, fresh)) > 10


def test_only_what_differs_is_taken_back() -> None:
    kept_len = rollout.llguidance_grammar._common_len
    assert [kept_len([1, 2, 3], other) for other in ([1, 2, 3, 4], [1, 2], [1, 5, 3], [])] == [
        3,
        2,
        1,
        0,
    ]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.source[:12])
def test_padded_ids_are_never_allowed(grammar: Grammar, grammars: LlguidanceGrammars) -> None:
    mask = grammars(grammar)
    for prefix in visits(mask, 30):
        allowed = mask(prefix)
        assert allowed.shape == (PADDED,) and allowed.dtype == torch.bool
        assert allowed[:V].any() and not allowed[V:].any()


def test_a_complete_text_is_followed_by_every_eos_id_and_by_nothing_else(tiny_llama: Path) -> None:
    # case 33
    compiled = LlguidanceGrammars(tiny_llama, vocab_size=V, eos_token_ids=[0, 2])
    mask = compiled(Grammar.regex("[ab]c?"))
    a, c = letters(tiny_llama, "ac")
    assert ids_in(mask([a])) == [0, 2, c]  # complete, and may go on
    assert ids_in(mask([a, c])) == [0, 2]
    assert ids_in(mask([a, c, 2])) == ids_in(mask([a, 0, 0])) == [0, 2]  # past the end
    assert ids_in(mask([a])) == [0, 2, c]


def test_a_mask_may_be_written_to(grammars: LlguidanceGrammars) -> None:
    mask = grammars(Grammar.regex("a?"))
    for prefix in ([], [EOS]):
        mask(prefix)[:] = True
        assert mask(prefix).sum() < 3


def test_a_token_that_the_grammar_does_not_allow_is_refused_by_its_place(
    grammars: LlguidanceGrammars, tiny_llama: Path
) -> None:
    a, c = letters(tiny_llama, "ac")
    mask = grammars(Grammar.regex("[ab]c"))
    with pytest.raises(InvalidRequest, match=f"token {a} after 1 generated ones.*does not allow"):
        mask([a, a])
    with pytest.raises(InvalidRequest, match=f"token id {PADDED} out of range"):
        mask([a, PADDED])
    assert ids_in(mask([a])) == [c]


REFUSED = {
    "expression": (Grammar.regex("("), "regex.*unclosed group"),
    "look-ahead": (Grammar.regex("a(?=b)b"), "look-around"),
    "empty language": (Grammar.regex(r"a[^\s\S]"), "the language is empty"),
    "not unicode": (Grammar.regex("\ud800"), "surrogates not allowed"),
    "schema type": (Grammar.json_schema({"type": "text"}), "json_schema.*Invalid type: text"),
    "schema keyword": (Grammar.json_schema({"not": {}}), r'Unimplemented keys: \["not"\]'),
    "lark rule": (Grammar.lark("start: other"), 'lark.*unknown name: "other"'),
    "lark limit": (Grammar.lark("start: a\na[max_tokens=2]: /a*/"), "rollback not supported"),
    "lark stop": (Grammar.lark('start: a?\na[stop="b"]: /a*/'), "rollback not supported"),
    "name": (Grammar.named("mine"), "mine.*named_grammars"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_source_that_does_not_compile_is_refused_on_one_line(
    case: str, grammars: LlguidanceGrammars
) -> None:
    grammar, message = REFUSED[case]
    with pytest.raises(InvalidRequest, match=message) as refusal:
        grammars(grammar)
    assert "\n" not in str(refusal.value)


def narrow(folder: Path) -> LlguidanceGrammars:
    """Too narrow for LONG_WORDS, but for their beginnings."""
    return LlguidanceGrammars(folder, vocab_size=PADDED, eos_token_ids=[EOS], max_lexer_states=30)


LONG_WORDS = Grammar.regex("([a-z]{1,20} ){0,50}x")


def exhaust(mask: MaskProvider, reference: MaskProvider) -> None:
    """Walks until the mask fails; up to there it equals the reference."""
    tokens = walk(reference, random.Random(0), max_len=30)
    with pytest.raises(InvalidRequest, match="too many states: 30"):
        for length in range(len(tokens)):
            assert torch.equal(mask(tokens[:length]), reference(tokens[:length]))


def test_a_matcher_that_fails_raises_and_harms_no_other_row(
    grammars: LlguidanceGrammars, tiny_llama: Path
) -> None:
    """llguidance itself would answer with the stop id, and fail every copy of the grammar."""
    failing_grammars, reference = narrow(tiny_llama), grammars(LONG_WORDS)
    failing, waiting = failing_grammars(LONG_WORDS), failing_grammars(LONG_WORDS)
    exhaust(failing, reference)
    (x,) = letters(tiny_llama, "x")
    for mask in (waiting, failing, failing_grammars(LONG_WORDS)):
        assert torch.equal(mask([x]), reference([x]))


def test_a_grammar_that_failed_is_compiled_anew_for_later_rows(
    grammars: LlguidanceGrammars, tiny_llama: Path, compiled: list[str]
) -> None:
    failing_grammars = narrow(tiny_llama)
    exhaust(failing_grammars(LONG_WORDS), grammars(LONG_WORDS))
    compiled.clear()
    for _ in range(3):
        failing_grammars(LONG_WORDS)([])
    assert compiled == [LONG_WORDS.source]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, in order."""
    sources: list[str] = []
    really = LlguidanceGrammars._compile

    def counted(self: LlguidanceGrammars, grammar: Grammar) -> Any:
        sources.append(grammar.source)
        return really(self, grammar)

    monkeypatch.setattr(LlguidanceGrammars, "_compile", counted)
    return sources


def test_a_grammar_is_compiled_once_while_it_is_in_use(
    tiny_llama: Path, compiled: list[str]
) -> None:
    grammars = LlguidanceGrammars(tiny_llama, vocab_size=V, eos_token_ids=[EOS], num_kept=2)
    for expression in ("a", "b", "a", "c", "a", "b"):  # c drops b, the least recently used
        grammars(Grammar.regex(expression))
    assert compiled == ["a", "b", "c", "b"]


def test_rows_may_be_masked_from_several_threads(grammars: LlguidanceGrammars) -> None:
    prefixes = visits(grammars(GRAMMARS[4]), 60)
    alone = [grammars(GRAMMARS[4])(prefix) for prefix in prefixes]

    def masks(mask: MaskProvider) -> list[torch.Tensor]:
        return [mask(prefix) for prefix in prefixes]

    with ThreadPoolExecutor(4) as pool:
        for together in pool.map(masks, [grammars(GRAMMARS[4]) for _ in range(4)]):
            assert all(torch.equal(one, other) for one, other in zip(alone, together))


def test_without_llguidance_the_install_line_is_shown(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidConfig, match=r"pip install exact-rollout\[grammar\]"):
        LlguidanceGrammars(tiny_llama, vocab_size=V, eos_token_ids=[EOS])


@pytest.mark.parametrize(
    ("vocab_size", "eos", "message"),
    [
        (V - 1, [EOS], "vocab_size=299.*too small"),
        (V, [V], "eos_token_ids=.300,.*out of range"),
        (V, [], "eos_token_ids is empty"),
    ],
)
def test_ids_that_do_not_fit_the_tokenizer_are_refused(
    vocab_size: int, eos: list[int], message: str, tiny_llama: Path
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        LlguidanceGrammars(tiny_llama, vocab_size=vocab_size, eos_token_ids=eos)


@pytest.mark.parametrize("grammar", [*GRAMMARS, Grammar.named("mine")])
def test_a_grammar_travels_as_plain_json(grammar: Grammar) -> None:
    assert Grammar(**json.loads(json.dumps(asdict(grammar)))) == grammar


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    assert list(json.loads(Grammar.json_schema(SCHEMA).source)["properties"]) == [
        "answer",
        "unit",
        "notes",
    ]
    assert Grammar.json_schema(json.dumps(SCHEMA)) == Grammar.json_schema(SCHEMA)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("yaml", "a"), "kind='yaml': expected one of"),  # type: ignore[arg-type]
        (lambda: Grammar.regex(""), "source='': expected a non-empty string"),
        (lambda: Grammar.lark(3), "source=3: expected a non-empty string"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema("{"), "is not JSON"),
        (lambda: Grammar.json_schema("[1]"), r"is \[1\]: expected a JSON object"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "not JSON serializable"),
        (lambda: Grammar.json_schema({"minimum": float("nan")}), "expected plain JSON types"),
    ],
)
def test_a_grammar_that_cannot_be_one_is_refused(make: Callable[[], Grammar], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make()


def test_any_callable_will_do_as_a_provider(grammars: LlguidanceGrammars) -> None:
    def alternating(generated: Sequence[int]) -> torch.Tensor:
        return torch.arange(4) % 2 == len(generated) % 2

    compile_grammar = named_grammars({"alternating": lambda: alternating}, otherwise=grammars)
    assert ids_in(compile_grammar(Grammar.named("alternating"))([0, 1, 2])) == [1, 3]
    assert ids_in(compile_grammar(Grammar.regex("a?"))([EOS])) == [EOS]


def test_a_name_or_kind_that_nobody_serves_is_refused() -> None:
    compile_grammar = named_grammars({"even": lambda: lambda _: torch.ones(2, dtype=torch.bool)})
    with pytest.raises(InvalidRequest, match=r"named 'odd': expected one of \['even'\]"):
        compile_grammar(Grammar.named("odd"))
    with pytest.raises(InvalidRequest, match="kind regex: this engine knows named ones only"):
        compile_grammar(Grammar.regex("a"))
