"""What decides each position of a window, and what the sampling parameters mean at their edges."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import pytest
import torch

from rollout.conditions import Condition, Conditions, checked_mask
from rollout.errors import InvalidLogits, InvalidRequest
from rollout.grammar import Grammar
from rollout.law import TargetLaws
from rollout.sampling import SamplingParams
from tests.rollout.engines import (
    Allowed,
    edited_logits,
    filtered,
    request,
    strict_mask,
    table_engine,
)

V = 5
PENALISED = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2)


def after(
    sampling: SamplingParams,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    allowed: Allowed | None = None,
) -> Conditions:
    """A row's state; the mask is strict."""
    mask = strict_mask(allowed, V, sampling.stop_ids) if allowed else None
    conditions = Conditions(sampling, prompt, mask)
    for token in generated:
        conditions.push(token)
    return conditions


def counts(condition: Condition) -> dict[int, int]:
    assert condition.seen is not None
    return dict(zip(condition.seen.ids.tolist(), condition.seen.num_generated.tolist()))


def law_at(conditions: Sequence[Condition], logits: Sequence[float]) -> TargetLaws:
    """The same logits at every position."""
    rows = torch.tensor([logits] * len(conditions), dtype=torch.float64)
    return TargetLaws(rows, conditions)


# ---- what came before ---------------------------------------------------------------------


def test_every_position_counts_the_drafts_before_it() -> None:
    # prompt 1 1 2, generated 2 0, drafts 0 3
    conditions = after(PENALISED, (1, 1, 2), (2, 0)).along((0, 3))
    assert [counts(c) for c in conditions] == [
        {1: 0, 2: 1, 0: 1},
        {1: 0, 2: 1, 0: 2},
        {1: 0, 2: 1, 0: 2, 3: 1},
    ]


def test_every_node_of_a_tree_counts_its_own_path() -> None:
    # 0 - 1, 0 - 2, and 2 beside 0
    conditions = after(PENALISED, (4,)).along((0, 1, 2, 2), (-1, 0, 0, -1))
    assert [counts(c) for c in conditions] == [
        {4: 0}, {4: 0, 0: 1}, {4: 0, 0: 1, 1: 1}, {4: 0, 0: 1, 2: 1}, {4: 0, 2: 1},
    ]  # fmt: skip


def test_drafts_leave_the_state_of_the_row_alone() -> None:
    state = after(PENALISED, (1,), (2, 2))
    before = counts(state.along(())[0])
    for draft in ((3, 3), (2, 4), (1, 1, 1)):
        state.along(draft)
    assert counts(state.along(())[0]) == before == {1: 0, 2: 2}


def test_without_penalties_nothing_is_counted() -> None:
    assert all(c.seen is None for c in after(SamplingParams(), (1, 2), (3,)).along((4, 4)))


def test_repetition_sees_the_prompt_and_the_other_penalties_do_not() -> None:
    # logits 2 of the prompt's token, 2 of a generated one, 2 of a new one, -1 of the prompt's
    logits, prompt, generated = [2.0, 2.0, 2.0, -1.0, 0.0], (0, 3), (1, 1)
    repeated = law_at(
        after(SamplingParams(repetition_penalty=2.0), prompt, generated).along(()), logits
    )
    frequent = law_at(
        after(SamplingParams(frequency_penalty=0.5), prompt, generated).along(()), logits
    )
    present = law_at(
        after(SamplingParams(presence_penalty=0.5), prompt, generated).along(()), logits
    )
    for laws, edited in (
        (repeated, [1.0, 1.0, 2.0, -2.0, 0.0]),
        (frequent, [2.0, 1.0, 2.0, -1.0, 0.0]),
        (present, [2.0, 1.5, 2.0, -1.0, 0.0]),
    ):
        expected = torch.tensor(edited, dtype=torch.float64).softmax(-1)
        torch.testing.assert_close(laws.probs(0), expected, atol=1e-12, rtol=0)


# ---- order --------------------------------------------------------------------------------


def one_law(
    sampling: SamplingParams, logits: Sequence[float], generated: Sequence[int] = (0,)
) -> list[float]:
    logits = [*logits, *[-math.inf] * (V - len(logits))]
    return law_at(after(sampling, (), generated).along(()), logits).probs(0).tolist()


def softmax(*logits: float) -> list[float]:
    logits = (*logits, *[-math.inf] * (V - len(logits)))
    return torch.tensor(logits, dtype=torch.float64).softmax(-1).tolist()


ORDER: dict[str, tuple[SamplingParams, list[float]]] = {
    # logits (2, 1, 0), token 0 generated once; the other order in the comment
    "bias on raw logits, before the repetition penalty": (
        SamplingParams(logit_bias=((0, 2.0),), repetition_penalty=2.0),
        softmax(2, 1, 0),  # (2 + 2) / 2; else 2 / 2 + 2 = 3
    ),
    "bias decides the sign that the repetition penalty looks at": (
        SamplingParams(logit_bias=((0, -2.5),), repetition_penalty=2.0),
        softmax(-1, 1, 0),  # (2 - 2.5) * 2; else 2 / 2 - 2.5 = -1.5
    ),
    "repetition before frequency and presence": (
        SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25),
        softmax(0.25, 1, 0),  # 2 / 2 - .5 - .25; else (2 - .75) / 2 = .625
    ),
    "penalties before the temperature": (
        SamplingParams(frequency_penalty=1.5, temperature=0.5),
        softmax(1, 2, 0),  # (2 - 1.5) / .5; else 4 - 1.5 = 2.5
    ),
    "penalties before top-k": (
        SamplingParams(frequency_penalty=1.5, top_k=1),
        [0, 1, 0, 0, 0],  # .5 against 1; else token 0
    ),
    "bans before the filters": (
        SamplingParams(bad_words=((0,),), top_k=1),
        [0, 1, 0, 0, 0],
    ),
    "a ban is not lifted by a bias": (
        SamplingParams(bad_words=((0,),), logit_bias=((0, 100.0),)),
        softmax(-math.inf, 1, 0),
    ),
    "a ban is not lifted by a reward": (
        SamplingParams(logit_bias=((0, -math.inf),), frequency_penalty=-50.0, repetition_penalty=0.1),
        softmax(-math.inf, 1, 0),
    ),
    "min-p against the largest that is left": (
        SamplingParams(bad_words=((0,),), min_p=0.36),
        softmax(-math.inf, 1, 0),  # e^-1 = .368 of token 1; of token 0 it is e^-2 = .135
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDER)
def test_the_order_of_the_transformations(name: str) -> None:
    sampling, expected = ORDER[name]
    assert one_law(sampling, (2.0, 1.0, 0.0)) == pytest.approx(expected, abs=1e-12)


def test_greedy_after_penalties_takes_the_first_of_tied_maxima() -> None:
    # (3, 2, 2) with one token 0: 3 - 1 ties with 2; with two it is last
    greedy = SamplingParams(temperature=0, frequency_penalty=1.0)
    conditions = after(greedy, (), (0,)).along((0,))
    laws = law_at(conditions, (2.0, 2.0, 3.0, 0.0, 0.0))
    assert laws.probs(0).tolist() == [0, 0, 1, 0, 0]
    tied = law_at(after(greedy, (), (2,)).along((2,)), (2.0, 2.0, 3.0, 0.0, 0.0))
    assert tied.probs(0).tolist() == [1, 0, 0, 0, 0]
    assert tied.probs(1).tolist() == [1, 0, 0, 0, 0]


# ---- against a reference ------------------------------------------------------------------


def even_after_odd(generated: tuple[int, ...]) -> tuple[int, ...]:
    """A grammar that depends on the last token."""
    return (0, 1, 2, 4) if not generated or generated[-1] % 2 else (1, 2, 3)


def random_sampling(rng: random.Random, grammar: bool) -> SamplingParams:
    """Every parameter of the law, half of the time off."""

    def some(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    ids = range(V)
    return SamplingParams(
        temperature=some(rng.choice([0.0, 0.4, 2.5]), 1.0),
        top_k=some(rng.randint(1, V), 0),
        top_p=some(rng.uniform(0.3, 0.99), 1.0),
        min_p=some(rng.uniform(0.01, 0.4), 0.0),
        repetition_penalty=some(rng.uniform(0.5, 2.0), 1.0),
        frequency_penalty=some(rng.uniform(-1, 1), 0.0),
        presence_penalty=some(rng.uniform(-1, 1), 0.0),
        logit_bias=some(((rng.choice(ids), rng.uniform(-3, 3)),), ()),
        bad_words=some(((rng.choice(ids),), (rng.choice(ids), rng.choice(ids))), ()),
        eos_token_ids=(4,),
        ignore_eos=not grammar and rng.random() < 0.5,
        min_tokens=rng.randint(0, 6),
        grammar=Grammar.named("g") if grammar else None,
    )


@pytest.mark.parametrize("seed", range(150))
def test_every_position_has_the_law_and_the_records_of_the_reference(seed: int) -> None:
    """Random parameters, prompts, outputs and trees; logits that differ from position to position.
    The reference is float64 arithmetic of one token at a time."""
    rng = random.Random(seed)
    allowed = even_after_odd if seed % 3 == 0 else None
    sampling = random_sampling(rng, grammar=allowed is not None)
    prompt = [rng.randrange(V) for _ in range(rng.randint(1, 4))]
    generated = [1, 2, 3, 2][: rng.randint(0, 4)]
    num = 5
    parents = tuple(rng.randint(-1, node - 1) for node in range(num))
    tokens = tuple(rng.randrange(V) for _ in range(num))
    conditions = after(sampling, prompt, generated, allowed).along(tokens, parents)
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num + 1, V, generator=generator, dtype=torch.float64)
    laws = TargetLaws(logits, conditions)
    for node in range(-1, num):
        condition, index, path = conditions[node + 1], node + 1, []
        while node >= 0:
            path.append(tokens[node])
            node = parents[node]
        if condition.reachable:
            done = (*generated, *reversed(path))
            check(laws, index, logits[index].tolist(), prompt, done, sampling, allowed)


def check(
    laws: TargetLaws,
    index: int,
    logits: list[float],
    prompt: Sequence[int],
    done: tuple[int, ...],
    sampling: SamplingParams,
    allowed: Allowed | None,
) -> None:
    edited = edited_logits(logits, prompt, done, sampling, allowed)
    if max(edited) == -math.inf:
        with pytest.raises(InvalidLogits):
            laws.check(index)
        return
    law = filtered(edited, sampling)
    assert laws.probs(index).tolist() == pytest.approx([law.get(t, 0.0) for t in range(V)])
    ids = list(law)
    got = laws.logprobs([index] * len(ids), ids)
    if sampling.greedy:
        assert got == ([0.0], [0.0], [1.0])
        return
    scaled = torch.tensor(logits, dtype=torch.float64) / sampling.temperature
    full = scaled.log_softmax(-1)[ids].tolist()
    assert got[0] == pytest.approx([math.log(law[t]) for t in ids], abs=1e-10)
    assert got[1] == pytest.approx(full, abs=1e-10)
    kept = sum(map(math.exp, full))
    assert got[2] == pytest.approx([kept] * len(ids), abs=1e-10)


@pytest.mark.parametrize("seed", range(30))
def test_positions_are_the_same_in_whatever_order_they_are_asked_for(seed: int) -> None:
    """A position is worked out when it is first asked for."""
    rng = random.Random(seed)
    sampling = random_sampling(rng, grammar=False)
    conditions = after(sampling, (1,), (2, 3)).along((0, 0, 1))
    logits = 2 * torch.randn(4, V, generator=torch.Generator().manual_seed(seed))
    forward, backward = TargetLaws(logits, conditions), TargetLaws(logits, conditions)
    order = list(range(4))
    ahead = [forward.probs(i) if forward.valid(i) else None for i in order]
    behind = [backward.probs(i) if backward.valid(i) else None for i in reversed(order)]
    for one, other in zip(ahead, reversed(behind)):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


# ---- bans ---------------------------------------------------------------------------------


def banned(sampling: SamplingParams, generated: Sequence[int], draft: Sequence[int]) -> list[set]:
    return [set(c.banned) for c in after(sampling, (3,), generated).along(draft)]


def test_stop_ids_are_banned_until_enough_was_generated_drafts_included() -> None:
    # case 29: 2 of 4 generated; the ban ends behind the second draft
    sampling = SamplingParams(min_tokens=4, eos_token_ids=(4,), stop_token_ids=(3,))
    assert banned(sampling, (0, 0), (0, 0, 0)) == [{3, 4}, {3, 4}, set(), set()]


def test_an_ignored_eos_is_never_banned_and_a_stop_id_is() -> None:
    sampling = SamplingParams(
        min_tokens=4, eos_token_ids=(4,), stop_token_ids=(3,), ignore_eos=True
    )
    assert banned(sampling, (), ()) == [{3}]


def test_the_last_id_of_a_phrase_is_banned_behind_the_others() -> None:
    # case 28: over the border of emitted and drafted tokens, and within the draft
    sampling = SamplingParams(bad_words=((0, 1), (1, 1, 2), (4,)))
    assert banned(sampling, (0,), (1, 1, 0)) == [{1, 4}, {4}, {2, 4}, {1, 4}]


def test_the_beginning_of_a_phrase_may_be_shared_and_repeated() -> None:
    sampling = SamplingParams(bad_words=((0, 0, 1), (0, 0, 2), (0, 3)))
    assert banned(sampling, (), (0, 0, 0, 1)) == [set(), {3}, {1, 2, 3}, {1, 2, 3}, set()]


def test_a_phrase_that_begins_in_the_prompt_is_not_recognised() -> None:
    sampling = SamplingParams(bad_words=((3, 1),))
    assert banned(sampling, (), (3,)) == [set(), {1}]


# ---- grammars and reach -------------------------------------------------------------------


def reachable(conditions: Sequence[Condition]) -> list[bool]:
    return [condition.reachable for condition in conditions]


def test_a_mask_is_asked_for_prefixes_that_it_allows_and_no_others() -> None:
    """The strict mask raises otherwise: 0 1 2 and then 0, which its last mask forbids."""
    sampling = SamplingParams(eos_token_ids=(4,), grammar=Grammar.named("g"))
    conditions = after(sampling, (), (1,), even_after_odd).along((2, 0, 1))
    assert reachable(conditions) == [True, True, False, False]


def test_what_is_below_a_forbidden_node_is_unreachable_and_its_siblings_are_not() -> None:
    # behind 1: 3 is forbidden, 2 is not; behind 2: 4 is forbidden, 3 is not
    sampling = SamplingParams(eos_token_ids=(4,), grammar=Grammar.named("g"))
    conditions = after(sampling, (), (1,), even_after_odd).along((3, 2, 1, 3, 4), (-1, -1, 0, 1, 1))
    assert reachable(conditions) == [True, False, True, False, True, False]


@pytest.mark.parametrize(("ignored", "behind"), [(False, False), (True, True)])
def test_what_is_behind_a_stop_is_unreachable(ignored: bool, behind: bool) -> None:
    # case 33
    sampling = SamplingParams(eos_token_ids=(4,), ignore_eos=ignored)
    conditions = after(sampling).along((0, 4, 1, 2))
    assert reachable(conditions) == [True, True, behind, behind, behind]


def test_an_unreachable_position_needs_no_law() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan] * 2, [math.nan] * 2], dtype=torch.float64)
    conditions = [Condition(SamplingParams(), reachable=reach) for reach in (True, False, True)]
    laws = TargetLaws(logits, conditions)
    laws.check(0)
    laws.check(1)
    assert laws.pick(1, 0.99) == 1 and not laws.valid(2)
    with pytest.raises(InvalidLogits):
        laws.check(2)


@pytest.mark.parametrize(
    "mask", [torch.ones(V + 1, dtype=torch.bool), torch.ones(V), torch.ones(1, V, dtype=torch.bool)]
)
def test_a_mask_of_another_shape_or_kind_is_refused_on_one_line(mask: torch.Tensor) -> None:
    with pytest.raises(InvalidRequest, match=r"grammar mask of shape .*expected \(5,\)") as refused:
        checked_mask(lambda _: mask, V)(())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("sampling", "plain", "edited", "reweighted"),
    [
        (SamplingParams(), True, False, False),
        (SamplingParams(temperature=0.5), True, False, False),
        (SamplingParams(temperature=0), False, False, False),
        (SamplingParams(top_k=1), False, False, False),
        (SamplingParams(logit_bias=((1, -math.inf),)), False, True, False),
        (SamplingParams(logit_bias=((1, 0.5),)), False, True, True),
        (SamplingParams(bad_words=((1,),)), False, True, False),
        (SamplingParams(bad_words=((1, 2),)), True, False, False),  # no beginning of it yet
        (SamplingParams(presence_penalty=0.1), False, True, True),
    ],
)
def test_what_acts_on_a_position_is_known_before_it_is_worked_out(
    sampling: SamplingParams, plain: bool, edited: bool, reweighted: bool
) -> None:
    condition = after(sampling).along(())[0]
    assert (condition.plain, condition.edited, condition.reweighted) == (plain, edited, reweighted)


# ---- edge values --------------------------------------------------------------------------

EDGES: dict[str, Any] = {
    "0": 0, "1": 1, "-1": -1, "None": None, "huge": 1e39, "huge integer": 10**400, "True": True,
    "NaN": math.nan, "inf": math.inf, "-inf": -math.inf, "text": "1", "ids": (1, 2), "pair": ((1, 2),),
    "nested": (((1, 2), 3),), "empty": (), "empty phrase": ((),), "bool id": (True,),
    "None inside": (None,), "float id": (1.0,), "negative id": (-1,), "mapping": {1: 2},
    "huge amount": ((1, 1e39),), "NaN amount": ((1, math.nan),), "+inf amount": ((1, math.inf),),
    "-inf amount": ((1, -math.inf),), "bool amount": ((1, True),), "twice": ((1, 2), (1, 2)),
    "strings": ("END",), "empty string": ("",),
}  # fmt: skip
SERVED: dict[str, tuple[str, ...]] = {
    "temperature": ("0", "1"),
    "top_k": ("0", "1", "huge integer"),
    "top_p": ("1",),
    "min_p": ("0", "1"),
    "repetition_penalty": ("1",),
    "frequency_penalty": ("0", "1", "-1"),
    "presence_penalty": ("0", "1", "-1"),
    "logit_bias": ("pair", "empty", "mapping", "-inf amount"),
    "bad_words": ("pair", "empty", "twice"),
    "grammar": ("None",),
    "min_tokens": ("0", "1"),
    "max_new_tokens": ("0", "1", "huge integer"),
    "stop_token_ids": ("ids", "empty"),
    "eos_token_ids": ("ids", "empty"),
    "ignore_eos": ("True",),
    "stop_strings": ("strings", "empty"),
    "seed": ("0", "1", "-1", "None"),
}
"""Every other edge is refused."""
every_edge = pytest.mark.parametrize(
    ("name", "edge"), [(field.name, edge) for field in fields(SamplingParams) for edge in EDGES]
)


@every_edge
def test_an_edge_value_has_a_meaning_or_is_refused_by_name_on_one_line(
    name: str, edge: str
) -> None:
    value = EDGES[edge]
    if edge in SERVED[name]:
        sampling, logits = SamplingParams(**{name: value}), [1.0, 0.5, 0.0, -0.5, 3.0]
        law = filtered(edited_logits(logits, (), (0, 1), sampling), sampling)
        got = one_law(sampling, logits, generated=(0, 1))
        assert got == pytest.approx([law.get(t, 0.0) for t in range(V)], abs=1e-12)
        return
    with pytest.raises(InvalidRequest, match=f"^{name}=.*: expected ") as refused:
        SamplingParams(**{name: value})
    assert "\n" not in str(refused.value)


LARGEST = 1e30
LIMITS = [
    ("temperature", LARGEST),
    ("repetition_penalty", LARGEST),
    ("repetition_penalty", 1 / LARGEST),
    *((name, sign * LARGEST) for name in ("frequency_penalty", "presence_penalty") for sign in (1, -1)),
    ("logit_bias", ((0, LARGEST), (1, -LARGEST))),
    ("logit_bias", ((0, LARGEST), (1, LARGEST))),
    ("min_p", 1e-300),
    ("top_p", 1e-300),
    ("temperature", 1e-300),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), LIMITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_and_smallest_values_make_finite_laws(
    name: str, value: Any, dtype: torch.dtype
) -> None:
    """The law sums to 1 and is that of the reference; a banned token stays banned."""
    sampling = SamplingParams(**{name: value}, bad_words=((4,),))
    logits = [1.0, 0.5, 0.0, -0.5, 3.0]
    conditions = after(sampling, (1, 2), (0, 3, 0)).along(())
    laws = TargetLaws(torch.tensor([logits], dtype=dtype), conditions)
    edited = edited_logits(logits, (1, 2), (0, 3, 0), sampling)
    expected = filtered(edited, sampling)
    assert laws.probs(0).tolist() == pytest.approx(
        [expected.get(t, 0.0) for t in range(V)], abs=1e-6
    )
    assert all(math.isfinite(x) for part in laws.logprobs([0], [laws.pick(0, 0.5)]) for x in part)


def test_values_just_beyond_the_largest_are_refused() -> None:
    for name in ("temperature", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        with pytest.raises(InvalidRequest, match=f"^{name}="):
            SamplingParams(**{name: math.nextafter(LARGEST, math.inf)})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^repetition_penalty="):
        SamplingParams(repetition_penalty=1e-31)


EVERY_FIELD = SamplingParams(
    temperature=0.7, top_k=3, top_p=0.9, min_p=0.05, repetition_penalty=1.1, frequency_penalty=0.2,
    presence_penalty=-0.1, logit_bias=((1, 0.5), (2, -math.inf)), bad_words=((1,), (2, 3)),
    grammar=Grammar.regex("a+"), min_tokens=2, max_new_tokens=9, stop_token_ids=(3,),
    eos_token_ids=(4, 0), ignore_eos=True, stop_strings=("END",), seed=-5,
)  # fmt: skip


def test_every_field_survives_json() -> None:
    assert all(
        getattr(EVERY_FIELD, field.name) != field.default for field in fields(SamplingParams)
    )
    travelled = json.loads(json.dumps(asdict(EVERY_FIELD)))
    assert SamplingParams.from_json(travelled) == EVERY_FIELD
    assert SamplingParams.from_json(asdict(EVERY_FIELD)) == EVERY_FIELD


def test_lists_and_mappings_mean_what_tuples_mean() -> None:
    """Two-token phrases among them: a list that never equals a tuple would be silently ignored."""
    listed = SamplingParams(
        logit_bias={1: 0.5},  # type: ignore[arg-type]
        bad_words=[[1], [2, 3]],  # type: ignore[arg-type]
        stop_token_ids=[3],  # type: ignore[arg-type]
        eos_token_ids=[4],  # type: ignore[arg-type]
        stop_strings=["END"],  # type: ignore[arg-type]
    )
    assert listed == SamplingParams(
        logit_bias=((1, 0.5),), bad_words=((1,), (2, 3)), stop_token_ids=(3,), eos_token_ids=(4,),
        stop_strings=("END",),
    )  # fmt: skip
    assert listed.stop_ids == (3, 4) and hash(listed)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens=9: expected at most max_new_tokens=8"),
        ({"grammar": Grammar.regex("a")}, "grammar without a stop id"),
        (
            {"grammar": Grammar.regex("a"), "eos_token_ids": (1,), "ignore_eos": True},
            "grammar without a stop id",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(logit_bias=((V, 1.0),)),
        SamplingParams(bad_words=((0, V),)),
        SamplingParams(stop_token_ids=(V,)),
        SamplingParams(eos_token_ids=(V,), ignore_eos=True),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_where_it_is_known(
    sampling: SamplingParams,
) -> None:
    engine = table_engine(lambda _: torch.zeros(V, dtype=torch.float64), V)
    with pytest.raises(InvalidRequest, match=rf"token id {V} is outside the vocabulary \[0, {V}\)"):
        engine.submit([request(sampling=sampling)])
