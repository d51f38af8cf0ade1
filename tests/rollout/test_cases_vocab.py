"""Failure cases of vocabularies, tokenizers and text.

The engine takes token ids and returns token ids; no second tokenizer and no draft model exists here,
and a run that names one is refused. What their cases ask for is then owed to any draft, whatever made
it: padded, translated, wrongly translated or of another width. Laws are enumerated to 1e-12.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch

from actors.engine_spec import EngineSpec, make_engine
from proposers.history import HistoryProposer
from proposers.ngram import NgramProposer
from proposers.none import NoProposer
from recipes.config import load_config
from rollout.checkpoint import read_tokenizer
from rollout.draft import NO_DRAFT, POINT_MASS, DenseLaw, Draft, DraftLaw, PointMass, SparseLaw
from rollout.draft_len import FixedDraftLen
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes, total_variation
from rollout.errors import InvalidConfig, InvalidRequest
from rollout.native_engine import NativeEngine, seeded_draws
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.stop_text import Decode
from rollout.streams import Draws
from rollout.table_policy import Table, TablePolicy, random_table
from tests.rollout.engines import (
    ScriptedProposer,
    drawing_proposer,
    plain_law,
    request,
    run,
    table_engine,
)
from tests.rollout.policies import packed_weights
from tests.tiny_model import tiny_folder

Verification = Literal["block", "position"]
both_verifications = pytest.mark.parametrize("verification", ["block", "position"])
KINDS = ("dense", "sparse", "point", "mixed")
every_kind = pytest.mark.parametrize("kind", KINDS)
TOLERANCE = 1e-12

V, REAL = 8, 5
"""Ids of the target, and how many of them the draft (or the tokenizer) knows: the first five."""


def row_of(probs: Sequence[float]) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64)


def build(
    table: Table,
    vocab_size: int,
    proposer: Proposer,
    verification: Verification,
    *,
    draft_len: int = 2,
    decode: Decode | None = None,
    draws_for: Callable[[RolloutRequest], Draws] = seeded_draws,
) -> NativeEngine:
    engine = NativeEngine(
        TablePolicy(table, vocab_size=vocab_size, context_len=256),
        proposer,
        FixedDraftLen(draft_len),
        decode=decode,
        draws_for=draws_for,
        verification=verification,
    )
    engine.load(table, version=0, digest="table")
    return engine


def sample_law(
    table: Table,
    vocab_size: int,
    proposer: Proposer,
    verification: Verification,
    sampling: SamplingParams,
    draft_len: int = 2,
) -> dict[tuple[int, ...], float]:
    """The law of one sample, enumerated."""

    def generate(draws: EnumeratedDraws) -> tuple[int, ...]:
        engine = build(
            table, vocab_size, proposer, verification,
            draft_len=draft_len, draws_for=lambda _: draws,
        )  # fmt: skip
        return run(engine, [request(sampling=sampling)])["r0"].token_ids

    return enumerate_outcomes(generate)


def ids_of(law: dict[tuple[int, ...], float]) -> set[int]:
    return {token for ids in law for token in ids}


def padded(table: Table, logit: float, size: int = V) -> Table:
    """A table over `size` ids; those that `table` lacks have one logit."""

    def wider(tokens: tuple[int, ...]) -> torch.Tensor:
        known = table(tokens)
        return torch.cat([known, known.new_full((size - len(known),), logit)])

    return wider


# ---- vocabularies of different sizes --------------------------------------------------------------


def knowing(table: Table, size: int = REAL) -> Table:
    """Reads ids it does not know as some that it does: a context only, never a draft."""
    return lambda tokens: table(tuple(token % size for token in tokens))


SMALL = knowing(random_table(REAL, depth=1, seed=41))
WIDE = random_table(V, depth=1, seed=42)
DRAFT = knowing(random_table(REAL, depth=1, seed=43))
SAMPLINGS = {
    "sampled": SamplingParams(max_new_tokens=2),
    "greedy": SamplingParams(max_new_tokens=3, temperature=0),
    "filtered": SamplingParams(max_new_tokens=3, top_k=2, top_p=0.9),
}


@both_verifications
@every_kind
@pytest.mark.parametrize("name", SAMPLINGS)
def test_padded_ids_are_never_emitted(name: str, kind: str, verification: Verification) -> None:
    # case 87: the draft's rows are padded with zeros, the target's with -inf
    table = padded(SMALL, -torch.inf)
    proposer = drawing_proposer(kind, padded(DRAFT, -torch.inf))
    law = sample_law(table, V, proposer, verification, SAMPLINGS[name], draft_len=1)
    assert ids_of(law) <= set(range(REAL))
    assert total_variation(law, plain_law(SMALL, (0,), SAMPLINGS[name], REAL)) < TOLERANCE


@both_verifications
@every_kind
def test_padded_ids_that_the_target_gives_mass_are_kept_out_by_a_bias(
    kind: str, verification: Verification
) -> None:
    # case 87: the target's logits are 0 there
    never = tuple((token, -torch.inf) for token in range(REAL, V))
    sampling = SamplingParams(max_new_tokens=2, logit_bias=never)
    proposer = drawing_proposer(kind, padded(DRAFT, 0.0))
    law = sample_law(padded(SMALL, 0.0), V, proposer, verification, sampling, draft_len=1)
    expected = plain_law(SMALL, (0,), SamplingParams(max_new_tokens=2), REAL)
    assert ids_of(law) == set(range(REAL))
    assert total_variation(law, expected) < TOLERANCE


@pytest.mark.parametrize("kind", ["point", "dense"])
def test_padded_ids_are_never_emitted_by_an_engine_that_counts_its_ids(kind: str) -> None:
    # case 87: the target's logits are 0 there, no bias asks for anything
    sampling = SamplingParams(max_new_tokens=2)

    def generate(draws: EnumeratedDraws) -> tuple[int, ...]:
        engine = table_engine(
            padded(SMALL, 0.0), V, proposer=drawing_proposer(kind, padded(DRAFT, 0.0)),
            draft_len=1, draws_for=lambda _: draws, num_ids=REAL,
        )  # fmt: skip
        return run(engine, [request(sampling=sampling)])["r0"].token_ids

    law = enumerate_outcomes(generate)
    assert total_variation(law, plain_law(SMALL, (0,), sampling, REAL)) < TOLERANCE


def test_a_checkpoint_wider_than_its_tokenizer_emits_tokens_of_the_tokenizer(
    tmp_path: Path,
) -> None:
    # case 87, for the transformer: the head is random, so padded rows have as much mass as others
    narrow = tiny_folder(tmp_path / "narrow")
    num_tokens = len(read_tokenizer(narrow))
    folder = tiny_folder(tmp_path / "wide", vocab_size=num_tokens + 200)
    spec = EngineSpec(str(folder), mode="full", format="none", proposer="none", dtype="float32")
    engine = make_engine(spec)
    weights = packed_weights(folder)
    engine.load(engine.prepare(weights), version=0, digest="first")
    sampling = SamplingParams(max_new_tokens=32, temperature=2.0)
    samples = run(engine, [request(f"r{i}", (5,), sampling, sample_index=i) for i in range(8)])
    tokens = [token for sample in samples.values() for token in sample.token_ids]
    assert len(tokens) == 256 and max(tokens) < num_tokens
    assert all(mass == 1.0 for sample in samples.values() for mass in sample.kept_mass)


PADDED_DRAFTS: dict[str, DraftLaw] = {
    "dense": DenseLaw(row_of((0.0,) * 6 + (0.75, 0.25))),
    "sparse": SparseLaw(torch.tensor([6, 1]), row_of((0.75, 0.25))),
    "point": POINT_MASS,
}


@both_verifications
@pytest.mark.parametrize("kind", PADDED_DRAFTS)
def test_a_drafted_padded_id_is_refused(kind: str, verification: Verification) -> None:
    # case 87
    def draft(row: Row, max_len: int) -> Draft:
        law, start = PADDED_DRAFTS[kind], len(row.token_ids)
        if isinstance(law, PointMass):
            return Draft((6,), (law,))
        token = row.draws.draft(law.probs, start, start)
        return Draft((int(law.ids[token]) if isinstance(law, SparseLaw) else token,), (law,))

    table, sampling = padded(SMALL, -torch.inf), SamplingParams(max_new_tokens=2)
    law = sample_law(table, V, ScriptedProposer(draft), verification, sampling)
    assert total_variation(law, plain_law(SMALL, (0,), sampling, REAL)) < TOLERANCE


@both_verifications
@every_kind
def test_ids_that_the_draft_lacks_come_out_of_the_residual(
    kind: str, verification: Verification
) -> None:
    # case 87: the residual is over the target's whole vocabulary
    sampling = SamplingParams(max_new_tokens=2)
    proposer = drawing_proposer(kind, padded(DRAFT, -torch.inf))
    law = sample_law(WIDE, V, proposer, verification, sampling, draft_len=1)
    assert ids_of(law) == set(range(V))
    assert total_variation(law, plain_law(WIDE, (0,), sampling, V)) < TOLERANCE


@both_verifications
def test_a_draft_of_100_ids_serves_a_target_of_128(verification: Verification) -> None:
    # case 87
    target = padded(random_table(100, depth=0, seed=44), -torch.inf, 128)
    proposer = drawing_proposer("mixed", padded(random_table(100, depth=0, seed=45), -1e9, 128))
    engine = build(target, 128, proposer, verification, draft_len=4)
    sampling = SamplingParams(max_new_tokens=100)
    samples = run(engine, [request(str(i), sampling=sampling) for i in range(4)])
    assert all(token < 100 for sample in samples.values() for token in sample.token_ids)
    assert engine.counters().accepted > 0 and engine.counters().corrections > 0


FOREIGN: dict[str, tuple[Draft, str]] = {
    "too narrow": (Draft((0,), (DenseLaw(row_of((0.5, 0.3, 0.2))),)), "dense law over"),
    "too wide": (Draft((0,), (DenseLaw(torch.full((10,), 0.1)),)), "dense law over"),
    "id of the larger": (Draft.of_points((2, 8)), "draft token 8"),
    "id of -1": (Draft.of_points((-1,)), "draft token -1"),
    "listed id of the larger": (
        Draft((0,), (SparseLaw(torch.tensor([0, 8]), row_of((0.5, 0.5))),)),
        "outside [0, 8)",
    ),
    "id that its law lacks": (
        Draft((1,), (SparseLaw(torch.tensor([4, 0, 7]), row_of((0.5, 0.3, 0.2))),)),
        "draft token 1",
    ),
}


@both_verifications
@pytest.mark.parametrize("name", FOREIGN)
def test_a_draft_in_another_vocabulary_ends_its_row_by_name_and_no_other(
    name: str, verification: Verification
) -> None:
    # case 87, case 89, case 91: sizes differ and nothing translates; after two good rounds
    draft, message = FOREIGN[name]
    good = drawing_proposer("mixed", padded(DRAFT, -torch.inf))
    proposer = ScriptedProposer(
        lambda row, n: (
            draft.truncated(n)
            if row.request.id == "foreign" and row.num_generated >= 2
            else good._draft(row, n)
        )
    )
    requests = [request(n) for n in ("before", "foreign", "behind")]
    samples = run(build(WIDE, V, proposer, verification), requests)
    alone = run(build(WIDE, V, good, verification), [requests[0], requests[2]])
    foreign = samples.pop("foreign")
    assert foreign.finish_reason == "error" and message in foreign.finish_detail
    assert all(0 <= token < V for token in foreign.token_ids)
    assert {n: s.token_ids for n, s in samples.items()} == {
        n: s.token_ids for n, s in alone.items()
    }


# ---- translated ids -------------------------------------------------------------------------------

TO_TARGET = (4, 0, 7)
"""Draft ids 0, 1, 2 in the target's vocabulary."""
P = (0.2, 0.1, 0.05, 0.05, 0.3, 0.05, 0.05, 0.2)
Q = (0.5, 0.3, 0.2)


def translating(table: Sequence[int]) -> ScriptedProposer:
    """Draws draft ids from Q and hands over the target's ids with Q on exactly those."""
    law = SparseLaw(torch.tensor(table), row_of(Q))

    def draft(row: Row, max_len: int) -> Draft:
        start = len(row.token_ids)
        drawn = [row.draws.draft(row_of(Q), start, start + depth) for depth in range(max_len)]
        return Draft(tuple(table[i] for i in drawn), (law,) * max_len)

    return ScriptedProposer(draft)


@both_verifications
@pytest.mark.parametrize(
    "table,rate",
    [
        (TO_TARGET, 0.3 + 0.2 + 0.2),  # min(.3, .5) + min(.2, .3) + min(.2, .2)
        ((0, 1, 2), 0.2 + 0.1 + 0.05),  # the identity: min(.2, .5) + min(.1, .3) + min(.05, .2)
        ((3, 5, 6), 0.05 * 3),  # another family's ids: hardly anything is accepted
    ],
)
def test_a_translated_draft_costs_acceptance_when_wrong_and_never_the_law(
    table: tuple[int, ...], rate: float, verification: Verification
) -> None:
    # case 89, case 91
    logits, sampling = row_of(P).log(), SamplingParams(max_new_tokens=2)

    def generate(draws: EnumeratedDraws) -> tuple[tuple[int, ...], int]:
        engine = build(
            lambda _: logits, V, translating(table), verification, draws_for=lambda _: draws
        )
        sample = run(engine, [request(sampling=sampling)])["r0"]
        return sample.token_ids, sample.counters.accepted

    outcomes = enumerate_outcomes(generate)
    law: dict[tuple[int, ...], float] = {}
    for (ids, _), probability in outcomes.items():
        law[ids] = law.get(ids, 0.0) + probability
    assert total_variation(law, plain_law(lambda _: logits, (0,), sampling, V)) < TOLERANCE
    assert sum(p for (_, n), p in outcomes.items() if n) == pytest.approx(rate, abs=TOLERANCE)


def test_a_translated_draft_has_its_mass_on_the_translated_ids() -> None:
    # case 89: accepted tokens are among 4, 0, 7; all others can only be replacements
    seen: list[int] = []
    inner = translating(TO_TARGET)

    def draft(row: Row, max_len: int) -> Draft:
        made = inner._draft(row, max_len)
        seen.extend(made.token_ids)
        return made

    engine = build(lambda _: row_of(P).log(), V, ScriptedProposer(draft), "block", draft_len=3)
    run(engine, [request(str(i), sampling=SamplingParams(max_new_tokens=30)) for i in range(4)])
    assert set(seen) == set(TO_TARGET)


@pytest.mark.parametrize(
    "override,message",
    [
        ("proposer=draft_model", "proposer=draft_model without draft.model: name the folder"),
        ("draft.model=another/model", "draft.model=another/model with proposer=history: it would"),
        ("draft.tokenizer=another", "unknown option draft.tokenizer; did you mean"),
        ("draft.id_table=map.pt", "unknown option draft.id_table; did you mean"),
    ],
)
def test_half_a_draft_model_is_refused_by_name(override: str, message: str) -> None:
    # case 89, case 91, case 93: a draft model is named as a whole, and no table of ids
    with pytest.raises(InvalidConfig) as refused:
        load_config(None, ["name=run", override])
    assert message in str(refused.value)


# ---- tokens that the draft does not know ------------------------------------------------------------


@both_verifications
def test_a_row_with_a_token_that_the_draft_lacks_is_not_drafted_for(
    verification: Verification,
) -> None:
    # case 92: prompt and emitted tokens alike; its neighbour is drafted for
    inner = drawing_proposer("dense", padded(DRAFT, -torch.inf))
    known = set(range(REAL))
    drafted: list[tuple[str, set[int]]] = []

    def draft(row: Row, max_len: int) -> Draft:
        if not set(row.token_ids) <= known:
            return NO_DRAFT
        drafted.append((row.request.id, set(row.token_ids)))
        return inner._draft(row, max_len)

    prompts = {"known": (0, 1), "unknown": (0, 6)}
    sampling = SamplingParams(max_new_tokens=2)

    def generate(draws: EnumeratedDraws) -> tuple[tuple[int, ...], ...]:
        engine = build(
            WIDE, V, ScriptedProposer(draft), verification,
            draft_len=1, draws_for=lambda row: draws,
        )  # fmt: skip
        return tuple(
            run(engine, [request(name, prompt, sampling)])[name].token_ids
            for name, prompt in prompts.items()
            if name == "unknown"
        )

    law = {ids: p for (ids,), p in enumerate_outcomes(generate).items()}
    assert total_variation(law, plain_law(WIDE, prompts["unknown"], sampling, V)) < TOLERANCE
    both = [request(name, prompt) for name, prompt in prompts.items()]
    run(build(WIDE, V, ScriptedProposer(draft), verification), both)
    assert {name for name, _ in drafted} == {"known"}


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "none": NoProposer,
    "ngram": lambda: NgramProposer(min_match=1),
    "history": HistoryProposer,
    "history counts": lambda: HistoryProposer(draw="counts"),
    **{
        kind: lambda kind=kind: drawing_proposer(kind, padded(DRAFT, -torch.inf))  # type: ignore[misc]
        for kind in KINDS
    },
}
every_proposer = pytest.mark.parametrize("name", PROPOSERS)


@both_verifications
@every_proposer
def test_every_law_is_asked_for_behind_the_prompt_as_it_was_given(
    name: str, verification: Verification
) -> None:
    # case 92, case 93: no id is replaced, none is added
    prompts = {(6, 7, 6), (7, 0, 7, 6)}
    contexts: set[tuple[int, ...]] = set()

    def table(tokens: tuple[int, ...]) -> torch.Tensor:
        contexts.add(tokens)
        return WIDE(tokens)

    requests = [request(str(p), p, SamplingParams(max_new_tokens=12)) for p in sorted(prompts)]
    samples = run(build(table, V, PROPOSERS[name](), verification), requests)
    assert {c[:3] if c[0] == 6 else c[:4] for c in contexts} == prompts
    for sample in samples.values():
        whole = (*sample.request.prompt_ids, *sample.token_ids)
        assert all(whole[:n] in contexts for n in range(len(sample.request.prompt_ids), 12))


@pytest.mark.parametrize("prompt", [(0, 8), (-1,), (0, 151_936)])
def test_a_prompt_in_another_vocabulary_is_refused_and_nothing_is_queued(
    prompt: tuple[int, ...],
) -> None:
    # case 87, case 91
    engine = build(WIDE, V, NoProposer(), "block")
    with pytest.raises(InvalidRequest, match=r"outside the vocabulary \[0, 8\)"):
        engine.submit([request("good"), request("bad", prompt)])
    assert engine.num_unfinished == 0
    assert run(engine, [request("good")])["good"].finish_reason == "length"


# ---- turns ----------------------------------------------------------------------------------------

BOS = 1


def without_bos(tokens: tuple[int, ...]) -> torch.Tensor:
    logits = WIDE(tokens).clone()
    logits[BOS] = -torch.inf
    return logits


def turns(
    engine: NativeEngine, prompt: tuple[int, ...], sampling: SamplingParams, num: int
) -> list[RolloutSample]:
    """Each turn's prompt is the one before it with what was emitted: ids, never text."""
    samples: list[RolloutSample] = []
    for turn in range(num):
        name = f"turn {turn}"
        samples.append(run(engine, [request(name, prompt, sampling, sample_index=turn)])[name])
        prompt += samples[-1].token_ids
    return samples


@both_verifications
@every_proposer
def test_a_begin_of_text_token_stays_one_over_ten_turns(
    name: str, verification: Verification
) -> None:
    # case 93
    engine = build(without_bos, V, PROPOSERS[name](), verification)
    samples = turns(engine, (BOS, 5, 2), SamplingParams(max_new_tokens=4), num=10)
    last = (*samples[-1].request.prompt_ids, *samples[-1].token_ids)
    assert (last.count(BOS), len(last)) == (1, 3 + 10 * 4)


def test_a_text_with_a_special_token_goes_round_ten_times_unchanged(tiny_llama: Path) -> None:
    # case 93: as recipes encode prompts, with nothing added
    tokenizer = read_tokenizer(tiny_llama)
    first = ids = tokenizer.encode("<|im_start|>Hello world", add_special_tokens=False)
    for _ in range(10):
        text = tokenizer.decode(ids, skip_special_tokens=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == first
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 1


@both_verifications
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@every_proposer
def test_the_next_turn_begins_with_the_ids_of_the_last_and_finds_them_cached(
    name: str, temperature: float, verification: Verification
) -> None:
    # case 96: the tokens are those of an engine that never saw the turns before
    sampling = SamplingParams(max_new_tokens=9, temperature=temperature)
    engine = build(WIDE, V, PROPOSERS[name](), verification)
    first, second, third = turns(engine, (3, 1, 2), sampling, num=3)
    assert second.request.prompt_ids == (3, 1, 2, *first.token_ids)
    assert third.request.prompt_ids == (*second.request.prompt_ids, *second.token_ids)
    assert engine.gauges()["count/prefill_tokens"] == 2  # of 3, 1; the last is scored
    plain = build(WIDE, V, NoProposer(), verification)
    if name in ("none", "ngram", "history", "point"):
        alone = run(plain, [second.request, third.request])
        assert alone["turn 1"].token_ids == second.token_ids
        assert alone["turn 2"].token_ids == third.token_ids


@both_verifications
@every_kind
def test_a_turn_on_a_shared_cache_has_the_law_of_one_on_a_fresh_cache(
    kind: str, verification: Verification
) -> None:
    # case 96: the same uniforms, hence the same tokens, with and without the first turn
    proposer = drawing_proposer(kind, padded(DRAFT, -torch.inf))
    sampling = SamplingParams(max_new_tokens=20)
    shared = build(WIDE, V, proposer, verification, draft_len=3)
    _, second = turns(shared, (3, 1, 2), sampling, num=2)
    fresh = run(build(WIDE, V, proposer, verification, draft_len=3), [second.request])["turn 1"]
    assert (fresh.token_ids, fresh.logprobs) == (second.token_ids, second.logprobs)


def test_ids_that_text_would_merge_come_back_as_they_were_sampled() -> None:
    # case 96: 'a' + 'bc' reads 'abc', which is one id
    pieces = ("?", "a", "bc", "abc", "b", "c", "d", "e")
    script = {0: 1, 1: 2}  # after the prompt 'a', then 'bc', then 'd'

    def table(tokens: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(V, dtype=torch.float64)
        logits[script.get(tokens[-1], 6)] = 1000.0
        return logits

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces[token] for token in ids)

    engine = build(table, V, drawing_proposer("point", table), "block", decode=decode)
    sampling = SamplingParams(max_new_tokens=5, stop_strings=("abc",))
    sample = run(engine, [request(sampling=sampling)])["r0"]
    assert sample.token_ids == (1, 2)  # not (3,)
    following = (*sample.request.prompt_ids, *sample.token_ids)
    after = run(engine, [request("next", following, SamplingParams(max_new_tokens=2))])["next"]
    assert after.request.prompt_ids == (0, 1, 2)
    assert after.token_ids == (6, 6)


# ---- text -------------------------------------------------------------------------------------------

BYTES = (b"?", b"a", b"\xf0\x9f", b"\x99\x82", b"b", b"\xc3", b"\xa9!", b"\x99\x82\xc3")
"""Ids 2 and 3 are a 4-byte emoji; 6 ends one character and holds the next; 7 ends the emoji and
begins a character."""


def utf8(ids: Sequence[int]) -> str:
    return b"".join(BYTES[token] for token in ids).decode("utf-8", errors="replace")


def reading(script: Sequence[int], prompt_len: int = 1) -> Table:
    """Certain of the script."""

    def table(tokens: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(max(V, max(script) + 1), dtype=torch.float64)
        logits[script[min(len(tokens) - prompt_len, len(script) - 1)]] = 1000.0
        return logits

    return table


EMOJI = (1, 2, 3, 4, 5, 6, 4)  # a 🙂 b é! b


def generate(
    stop: str, kind: str, draft_len: int, verification: Verification, script: Sequence[int] = EMOJI
) -> RolloutSample:
    table = reading(script)
    proposer = drawing_proposer(kind, table)
    engine = build(table, V, proposer, verification, draft_len=draft_len, decode=utf8)
    sampling = SamplingParams(max_new_tokens=len(script), stop_strings=(stop,))
    return run(engine, [request(sampling=sampling)])["r0"]


@both_verifications
@every_kind
@pytest.mark.parametrize("draft_len", [0, 1, 2, 4])
@pytest.mark.parametrize(
    "stop,num",
    [
        ("🙂", 3),
        ("a🙂", 3),
        ("🙂b", 4),
        ("é", 6),
        ("bé!b", 7),
        (utf8(EMOJI), 7),
        ("\ufffd", None),
        ("a\ufffd", None),
    ],
)
def test_a_character_split_over_tokens_and_rounds_reads_as_in_the_whole_text(
    stop: str, num: int | None, draft_len: int, kind: str, verification: Verification
) -> None:
    # case 94: rounds end before, between and behind the halves; None: never seen
    sample = generate(stop, kind, draft_len, verification)
    assert sample.token_ids == EMOJI[: num or len(EMOJI)]
    assert sample.finish_reason == ("stop" if num else "length")


@pytest.mark.parametrize("draft_len", [0, 1, 2])
@pytest.mark.parametrize("stop,num", [("🙂", 2), ("🙂é", 3), ("é", 3), ("\ufffd", None)])
def test_a_character_is_read_with_the_token_that_ends_it_though_that_begins_another(
    stop: str, num: int | None, draft_len: int
) -> None:
    # case 94
    script = (2, 7, 6, 4)  # 🙂 é! b
    sample = generate(stop, "point", draft_len, "block", script)
    assert sample.token_ids == script[: num or len(script)]
    assert sample.finish_reason == ("stop" if num else "length")


@pytest.mark.parametrize("text", ["naïve 🙂👍 漢字 ok", "1 + 1 = 2 🙂", "🙂"])
@pytest.mark.parametrize("draft_len", [0, 1, 2, 5])
def test_text_of_a_byte_level_tokenizer_is_found_whole_and_without_replacement_marks(
    text: str, draft_len: int, tiny_llama: Path
) -> None:
    # case 94: the pieces joined are the text of all ids
    tokenizer = read_tokenizer(tiny_llama)
    script = tokenizer.encode(text, add_special_tokens=False)
    table, size = padded(reading(script), 0.0, len(tokenizer)), len(tokenizer)
    for stop, reason in ((text, "stop"), ("\ufffd", "length")):
        engine = build(
            table, size, drawing_proposer("point", table), "block", draft_len=draft_len,
            decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        )  # fmt: skip
        sampling = SamplingParams(max_new_tokens=len(script), stop_strings=(stop,))
        sample = run(engine, [request(sampling=sampling)])["r0"]
        assert (sample.token_ids, sample.finish_reason) == (tuple(script), reason)
