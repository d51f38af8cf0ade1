"""Drafting by a model: laws, lengths and ends of drafts, of a draft model and of a policy's twin."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from proposers.lockstep import Ahead, draft_in_lockstep
from recipes.audit_enumerated import TOLERANCE, Case, examine
from rollout.draft import DenseLaw, Draft, PointMass
from rollout.proposer import Proposer
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import SeededDraws
from rollout.table_policy import Table, TablePolicy, random_table
from tests.proposers.model_drafts import NAMES, model_engine
from tests.rollout.engines import edited_logits, filtered, request, run

V = 6
TABLE = random_table(V, depth=3, seed=5)
SAMPLINGS = {
    "T=1": SamplingParams(),
    "T=0.7": SamplingParams(temperature=0.7),
    "filters": SamplingParams(temperature=1.3, top_k=4, top_p=0.9, min_p=0.05),
    "penalties": SamplingParams(
        repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3, logit_bias=((1, 0.5),)
    ),
    "bans": SamplingParams(bad_words=((2, 3), (4,)), stop_token_ids=(5,), min_tokens=3),
    "greedy": SamplingParams(temperature=0.0),
}
every_model = pytest.mark.parametrize("name", NAMES)


def row(sampling: SamplingParams, prompt: Sequence[int] = (0,), index: int = 0, **how: Any) -> Row:
    return Row(
        request(prompt=prompt, sampling=sampling), SeededDraws(index, "p", index),
        context_len=64, **how,
    )  # fmt: skip


def drafts(
    rows: Sequence[Row],
    max_lens: Sequence[int],
    table: Table = TABLE,
    *,
    draft_size: int = V,
    target_size: int = V,
    num_ids: int = V,
) -> list[Draft]:
    policy = TablePolicy(table, vocab_size=draft_size, num_slots=len(rows))
    ahead = [Ahead(r, slot, 0, n) for slot, (r, n) in enumerate(zip(rows, max_lens))]
    made = draft_in_lockstep(policy, ahead, vocab_size=target_size, num_ids=num_ids)
    return [drafted.draft for drafted in made]


def sure_of(*script: int) -> Table:
    """A table that goes through the script, whatever came before."""

    def table(tokens: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(V, dtype=torch.float64)
        logits[script[(len(tokens) - 1) % len(script)]] = 1000.0
        return logits

    return table


# ---- laws ---------------------------------------------------------------------------------


EIGHT_LAWS = (
    "plain", "cold", "greedy", "all filters", "bad words", "grammar", "min_tokens", "everything",
)  # fmt: skip
"""The audit's own tests have the others."""


@every_model
@pytest.mark.parametrize("law", EIGHT_LAWS)
def test_emitted_law_equals_target_by_enumeration(name: str, law: str) -> None:
    cell = examine(Case(name, law))
    assert cell.exact and cell.accepted > 0.3


@every_model
@pytest.mark.parametrize("law", ["cold", "everything"])
def test_emitted_law_equals_target_position_by_position(name: str, law: str) -> None:
    assert examine(Case(name, law, "position")).exact


def test_emitted_law_of_rows_in_one_batch_equals_target() -> None:
    assert examine(Case("self_draft", "greedy, plain and penalised rows", num_tokens=2)).exact


class Tampered:
    """Hands over drafts that were changed after they were drawn."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        return [self.change(draft) for draft in self._inner.propose(rows, max_lens)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Unsharpened(Tampered):
    """The law before the temperature of .5, which a token drawn at .5 was not drawn from."""

    def change(self, draft: Draft) -> Draft:
        laws = [law.probs.sqrt() for law in draft.laws if isinstance(law, DenseLaw)]
        return replace(draft, laws=tuple(DenseLaw(law / law.sum()) for law in laws))


class Rounded(Tampered):
    """The law made anew from its rounded numbers."""

    def change(self, draft: Draft) -> Draft:
        laws = [law.probs for law in draft.laws if isinstance(law, DenseLaw)]
        rounded = [(8 * law).ceil() / 8 for law in laws]
        return replace(draft, laws=tuple(DenseLaw(law / law.sum()) for law in rounded))


class Fussy(Tampered):
    """Drops a last token that it finds unlikely, having seen it."""

    def change(self, draft: Draft) -> Draft:
        last = draft.laws[-1] if draft.laws else None
        unlikely = isinstance(last, DenseLaw) and float(last.probs[draft.token_ids[-1]]) < 0.4
        return draft.truncated(len(draft) - unlikely)


@every_model
@pytest.mark.parametrize("fault", [Unsharpened, Rounded, Fussy])
def test_a_law_that_was_not_drawn_from_and_a_token_that_was_dropped_are_seen(
    name: str, fault: type[Tampered]
) -> None:
    """Negative control."""
    assert examine(Case(name, "cold"), wrap=fault).total_variation > 1e6 * TOLERANCE


@pytest.mark.parametrize("name", SAMPLINGS)
def test_each_law_is_the_rows_own_behind_the_drafted_tokens(name: str) -> None:
    sampling = SAMPLINGS[name]
    (draft,) = drafts([row(sampling, (0, 3))], [6])
    assert len(draft) == 6 or draft.token_ids[-1] in sampling.stop_ids
    for depth, (token, law) in enumerate(zip(draft.token_ids, draft.laws)):
        before = draft.token_ids[:depth]
        edited = edited_logits(TABLE((0, 3, *before)).tolist(), (0, 3), before, sampling)
        expected = filtered(edited, sampling)
        assert token in expected
        if isinstance(law, PointMass):
            assert sampling.greedy and expected == {token: 1.0}
        else:
            assert isinstance(law, DenseLaw)
            assert {t: p for t, p in enumerate(law.probs.tolist()) if p} == pytest.approx(expected)


def test_drafts_follow_their_laws() -> None:
    num = 4000
    made = drafts([row(SamplingParams(), index=i) for i in range(num)], [1] * num)
    counts = torch.bincount(torch.tensor([d.token_ids[0] for d in made]), minlength=V) / num
    spread = (TABLE((0,)).softmax(-1) / num).sqrt()
    assert bool(((counts - TABLE((0,)).softmax(-1)).abs() < 4.5 * spread).all())


# ---- lengths and ends ---------------------------------------------------------------------


def test_every_draft_has_a_length_of_its_own_and_rows_do_not_disturb_each_other() -> None:
    prompts, max_lens = [(0,), (1, 2), (3,), (4, 5, 1)], [0, 3, 7, 1]
    rows = [row(SamplingParams(), p, i) for i, p in enumerate(prompts)]
    together = drafts(rows, max_lens)
    assert [len(draft) for draft in together] == max_lens
    alone = [drafts([r], [n])[0] for r, n in zip(rows, max_lens)]
    assert [d.token_ids for d in together] == [d.token_ids for d in alone]


def test_a_drafted_stop_is_kept_and_ends_the_draft() -> None:
    stopping = SamplingParams(stop_token_ids=(3,))
    (draft,) = drafts([row(stopping)], [6], sure_of(1, 2, 3, 4))
    assert draft.token_ids == (1, 2, 3)
    ending = SamplingParams(eos_token_ids=(3,))
    (draft,) = drafts([row(ending)], [6], sure_of(1, 3))
    assert draft.token_ids == (1, 3)
    (draft,) = drafts([row(replace(ending, ignore_eos=True))], [6], sure_of(1, 3))
    assert draft.token_ids == (1, 3, 1, 3, 1, 3)


def test_a_stop_is_not_drafted_before_min_tokens() -> None:
    stopping = SamplingParams(stop_token_ids=(3,), min_tokens=4)
    (draft,) = drafts([row(stopping)], [8], sure_of(3))
    assert len(draft) == 5 and draft.token_ids.index(3) == 4


def test_a_drafted_stop_string_ends_the_draft_and_leaves_the_row_alone() -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join("abcdef"[i] for i in ids)

    text = row(SamplingParams(stop_strings=("de",)), decode=decode)
    for _ in range(2):
        (draft,) = drafts([text], [9], sure_of(1, 2, 3, 4, 5))
        assert draft.token_ids == (1, 2, 3, 4)
    (later,) = drafts([row(SamplingParams(stop_strings=("de",), min_tokens=5), decode=decode)], [9],
                      sure_of(1, 2, 3, 4, 5))  # fmt: skip
    assert later.token_ids == (1, 2, 3, 4, 5, 1, 2, 3, 4)


def test_a_model_without_a_law_drafts_no_further() -> None:
    def broken(tokens: tuple[int, ...]) -> torch.Tensor:
        return TABLE(tokens) if len(tokens) < 3 else torch.full((V,), torch.nan)

    rows = [row(SamplingParams()), row(SamplingParams(), (1, 2, 3))]
    assert [len(draft) for draft in drafts(rows, [5, 5], broken)] == [2, 0]


def test_a_greedy_draft_takes_the_first_of_tied_maxima() -> None:
    # case 108
    tied = torch.tensor([0.0, 2.0, 2.0, 1.0, 2.0, 0.0], dtype=torch.float64)
    (draft,) = drafts([row(SAMPLINGS["greedy"])], [3], lambda tokens: tied)
    assert draft.token_ids == (1, 1, 1) and draft.deterministic


# ---- vocabularies of different widths -----------------------------------------------------


@pytest.mark.parametrize(("draft_size", "target_size"), [(6, 9), (9, 6), (9, 9), (5, 7)])
def test_padding_of_either_head_is_never_drafted(draft_size: int, target_size: int) -> None:
    # case 87: padded logits are the largest
    def padded(tokens: tuple[int, ...]) -> torch.Tensor:
        logits = torch.full((draft_size,), 9.0, dtype=torch.float64)
        logits[:5] = TABLE(tuple(min(t, V - 1) for t in tokens))[:5]
        return logits

    rows = [row(SamplingParams(), index=i) for i in range(20)]
    sizes = {"draft_size": draft_size, "target_size": target_size, "num_ids": 5}
    for draft in drafts(rows, [6] * 20, padded, **sizes):
        assert max(draft.token_ids) < 5
        for law in draft.laws:
            assert isinstance(law, DenseLaw) and law.probs.shape == (target_size,)
            assert float(law.probs[5:].sum()) == 0.0


# ---- through the engine -------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("draft_len", [1, 4, 8])
def test_a_draft_of_the_target_itself_is_accepted_whole(
    name: str, sampling: str, draft_len: int
) -> None:
    # case 71: any refusal shows a fault of a cache or a law
    limited = replace(SAMPLINGS[sampling], max_new_tokens=24)
    engine = model_engine(name, TABLE, TABLE, V, draft_len=draft_len, num_slots=3)
    run(engine, [request(f"r{i}", (i % V,) * (1 + i), limited) for i in range(7)])
    counters = engine.counters()
    assert counters.accepted == counters.verified > 25 and counters.corrections == 0
