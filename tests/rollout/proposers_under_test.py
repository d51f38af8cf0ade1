"""Every proposer by name, as the failure cases run them.

`make` gives one that drafts from a table or from what was emitted, `knowing` one that drafts a known
answer, so that whole runs are accepted, and `with_trees` lets an engine branch for `tree`. `Watched`
passes everything on and keeps what was asked.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from proposers.history import HistoryProposer
from proposers.ngram import NgramProposer
from proposers.none import NoProposer
from rollout.draft import Draft
from rollout.draft_len import FixedDraftLen
from rollout.native_engine import NativeEngine
from rollout.proposer import Proposer
from rollout.row import Row
from rollout.table_policy import Table, markov_table
from rollout.transformer_policy import TransformerPolicy
from tests.proposers.model_drafts import draft_model
from tests.rollout.engines import drawing_proposer
from tests.rollout.policies import engine_over, hugging_face

DRAWN = ("dense", "sparse", "point", "mixed")
"""Scripted: each token drawn from a law of that kind."""
DRAFTING = ("ngram", "history", "tree", "counts", "draft_model", *DRAWN)
"""`tree` and `counts` are forms of `history`: branching, and drawn from frequencies."""
PROPOSERS = ("none", *DRAFTING)
POINTS = ("none", "ngram", "history", "tree", "point")
"""Point masses only: a seed gives the tokens of plain decoding whatever is drafted."""
SEEDED = tuple(name for name in PROPOSERS if name != "counts")
"""Draft by the row alone or by point masses, so a row's tokens depend on its seed alone; `counts`
draws from what other rollouts happened to be there."""

_MADE: dict[str, Callable[[], Proposer]] = {
    "none": NoProposer,
    "ngram": lambda: NgramProposer(min_match=1),
    "history": HistoryProposer,
    "tree": HistoryProposer,
    "counts": lambda: HistoryProposer(draw="counts"),
}


def make(name: str, draft_table: Table) -> Proposer:
    """A fresh proposer; the scripted kinds draft from the table."""
    if name == "draft_model":
        return draft_model(draft_table, len(draft_table((0,) * 999)), num_slots=64, context_len=512)
    return _MADE[name]() if name in _MADE else drawing_proposer(name, draft_table)


@lru_cache(maxsize=2)
@torch.inference_mode()
def shortsighted(folder: Path) -> Table:
    """A model of the folder that sees the last token only: often right, often not."""
    ids = torch.arange(hugging_face(folder).config.vocab_size)
    return markov_table(hugging_face(folder)(ids[:, None]).logits[:, 0].double())


def with_trees(engine: NativeEngine, name: str, draft_len: int) -> NativeEngine:
    """The same engine; for `tree`, of drafts that branch."""
    engine.draft_len = FixedDraftLen(draft_len, branching=name == "tree")
    return engine


def llama_engine(
    policy: TransformerPolicy, folder: Path, name: str, draft_len: int = 3
) -> NativeEngine:
    """A fresh engine over a loaded policy; scripted drafts are those of its shortsighted model."""
    return with_trees(engine_over(policy, make(name, shortsighted(folder))), name, draft_len)


def certain(script: Sequence[int], vocab_size: int) -> Table:
    """Sure of its next token behind `telling(script)`: the script, then its last token for ever."""
    before = len(telling(script))

    def table(tokens: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(vocab_size, dtype=torch.float64)
        logits[script[min(len(tokens) - before, len(script) - 1)]] = 1000.0
        return logits

    return table


def telling(script: Sequence[int]) -> tuple[int, ...]:
    """A prompt that holds the script behind a 0 and ends in 0, so that prompt lookup finds it."""
    assert 0 not in script, "0 marks where the script begins"
    return (0, *script, 0)


def knowing(name: str, script: Sequence[int], vocab_size: int) -> Proposer:
    """A fresh proposer that drafts the script behind the prompt `telling(script)`."""
    proposer = make(name, certain(script, vocab_size))
    if isinstance(proposer, HistoryProposer):
        proposer.remember(telling(script), script)
    return proposer


class Watched:
    """Keeps what was asked and given, a call each; rows must not be written to. `answer` may be
    overridden to hand over other drafts than those that were made."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.asked: list[tuple[int, ...]] = []
        """Tokens of the longest chain, or levels of the deepest tree, a row."""
        self.room: list[tuple[int, ...]] = []
        """Tokens that each row could still emit."""
        self.drafts: list[tuple[Draft, ...]] = []

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        return self._watch(rows, max_lens, lambda: self.inner.propose(rows, max_lens))

    def propose_trees(
        self, rows: Sequence[Row], max_nodes: Sequence[int], max_depths: Sequence[int]
    ) -> list[Draft]:
        inner: Any = self.inner
        depths = [depth if nodes else 0 for nodes, depth in zip(max_nodes, max_depths)]
        return self._watch(rows, depths, lambda: inner.propose_trees(rows, max_nodes, max_depths))

    def _watch(
        self, rows: Sequence[Row], depths: Sequence[int], propose: Callable[[], list[Draft]]
    ) -> list[Draft]:
        before = [tuple(row.token_ids) for row in rows]
        drafts = propose()
        assert [tuple(row.token_ids) for row in rows] == before, "a proposer wrote to a row"
        self.asked.append(tuple(depths))
        self.room.append(tuple(row.remaining_len for row in rows))
        self.drafts.append(tuple(drafts))
        return self.answer(rows, drafts)

    def answer(self, rows: Sequence[Row], drafts: list[Draft]) -> list[Draft]:
        return drafts

    def observe(self, rows: Sequence[Row]) -> None:
        before = [tuple(row.token_ids) for row in rows]
        self.inner.observe(rows)
        assert [tuple(row.token_ids) for row in rows] == before, "a proposer wrote to a row"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
