"""Drafts: proposed token ids, each with the law it was drawn from.

Three kinds of law, each with its own cheap verification; none builds a dense tensor nobody has:

- `PointMass`: the proposer named one token (n-gram, history, a greedy draft model);
- `SparseLaw`: drawn from a few ids with probabilities (history counts, reduced vocabularies);
- `DenseLaw`: drawn from a full row; the very tensor that was sampled from.

The kinds may be mixed within one draft. A draft is a chain, or a tree of point masses (SpecInfer,
arXiv:2305.09781): several continuations at a position, of which the target may take one.

Handing over a law the token was not drawn from, or dropping a token after having looked at it, are
the two mistakes that verification cannot see. `rollout.drafting` is the interface that cannot make
them; the enumeration tests plant them.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rollout.errors import InvalidDraft


@dataclass(frozen=True, slots=True)
class PointMass:
    """q(token) = 1."""


@dataclass(frozen=True, slots=True)
class SparseLaw:
    """q over a few distinct ids."""

    ids: torch.Tensor  # [M] int64, distinct
    probs: torch.Tensor  # [M], sums to 1


@dataclass(frozen=True, slots=True)
class DenseLaw:
    """q over the vocabulary, as weights: dividing a row of them takes as long as a draw."""

    weights: torch.Tensor  # [V]
    total: float = 1.0
    """Their sum."""

    @property
    def probs(self) -> torch.Tensor:
        """q [V]."""
        return self.weights if self.total == 1.0 else self.weights / self.total


DraftLaw = PointMass | SparseLaw | DenseLaw
POINT_MASS = PointMass()
LAW_TOLERANCE = 1e-4
"""How far the sum of a law may be from 1: a float32 softmax over 49,152 ids was seen 1.1e-5 off."""
SUM_ROUNDING = 1e-7
"""Further off than this a law is divided by its sum: draws from it are in proportion to it."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Token ids a row might continue with, and the law of each given those before it."""

    token_ids: tuple[int, ...] = ()
    laws: tuple[DraftLaw, ...] = ()
    parents: tuple[int, ...] | None = None
    """None: a chain. Else a tree: each node's parent by index, -1 for the row's last token; parents
    come before their children, and siblings differ."""
    chances: tuple[float, ...] | None = None
    """The proposer's own estimate that each token is accepted once those before it were; None: it has
    none. Made before a sampled token is drawn, from those before it and from laws: drafts are cut by
    it (`rollout.draft_len`)."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.laws):
            raise InvalidDraft(
                f"draft of {len(self.token_ids)} tokens with {len(self.laws)} laws: need one each"
            )
        if self.chances is not None and len(self.chances) != len(self.token_ids):
            raise InvalidDraft(
                f"draft of {len(self.token_ids)} tokens with {len(self.chances)} chances: need one "
                "each or none"
            )

    @staticmethod
    def of_points(token_ids: Sequence[int]) -> "Draft":
        """A draft of deterministic choices."""
        return Draft(tuple(token_ids), (POINT_MASS,) * len(token_ids))

    @staticmethod
    def tree(token_ids: Sequence[int], parents: Sequence[int]) -> "Draft":
        """Deterministic continuations that branch."""
        return Draft(tuple(token_ids), (POINT_MASS,) * len(token_ids), tuple(parents))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def deterministic(self) -> bool:
        """Every token is a point mass."""
        return all(isinstance(law, PointMass) for law in self.laws)

    def truncated(self, max_len: int) -> "Draft":
        """The first `max_len` tokens. Exact for any length that does not look at the tokens cut."""
        if len(self) <= max_len:
            return self
        parents = None if self.parents is None else self.parents[:max_len]
        chances = None if self.chances is None else self.chances[:max_len]
        return Draft(self.token_ids[:max_len], self.laws[:max_len], parents, chances)

    def until(self, stop_ids: Collection[int]) -> "Draft":
        """A chain up to its first stop id: what follows could never be emitted. Trees stay whole."""
        if self.parents is None:
            for depth, token in enumerate(self.token_ids):
                if token in stop_ids:
                    return self.truncated(depth + 1)
        return self

    def named(self) -> "Draft":
        """The tokens before the first that was drawn: under those a seed gives what it gives without
        drafts, whatever decided about their number."""
        drawn = (depth for depth, law in enumerate(self.laws) if not isinstance(law, PointMass))
        return self.truncated(next(drawn, len(self)))


NO_DRAFT = Draft()


def check_draft(draft: Draft, vocab_size: int) -> Draft:
    """The draft with its laws normalised. Raises InvalidDraft for ids outside the vocabulary, laws
    that cannot be probabilities or could not draw their token, and broken trees."""
    if draft.parents is not None:
        _check_tree(draft, draft.parents)
    laws: list[DraftLaw] = []
    for token, law in zip(draft.token_ids, draft.laws, strict=True):
        if not 0 <= token < vocab_size:
            raise InvalidDraft(f"draft token {token}: expected an id in [0, {vocab_size})")
        laws.append(law if isinstance(law, PointMass) else _checked_law(token, law, vocab_size))
    return draft if draft.deterministic else replace(draft, laws=tuple(laws))


def _checked_law(token: int, law: SparseLaw | DenseLaw, vocab_size: int) -> SparseLaw | DenseLaw:
    if not isinstance(law, SparseLaw | DenseLaw):
        raise InvalidDraft(f"draft token {token} with law {law!r}: expected one of rollout.draft")
    if isinstance(law, DenseLaw):
        if law.weights.shape != (vocab_size,):
            shape = tuple(law.weights.shape)
            raise InvalidDraft(f"dense law over {shape}: expected {vocab_size} ids")
    else:
        if law.probs.ndim != 1 or law.ids.shape != law.probs.shape:
            raise InvalidDraft("sparse law of ids and probs of different shapes: expected [M] each")
        if law.ids.dtype != torch.int64:
            raise InvalidDraft(f"sparse law over ids of {law.ids.dtype}: expected int64")
        ids = np.sort(law.ids.cpu().numpy())
        if len(ids) and not 0 <= ids[0] <= ids[-1] < vocab_size:
            raise InvalidDraft(f"sparse law names an id outside [0, {vocab_size})")
        if (ids[1:] == ids[:-1]).any():
            raise InvalidDraft("sparse law names an id twice: expected distinct ids")
    weights = (law.weights if isinstance(law, DenseLaw) else law.probs).detach().cpu()
    if weights.dtype in (torch.bfloat16, torch.float16):
        weights = weights.float()
    values = weights.numpy()  # which has less to do for one row than torch
    counted = law.total if isinstance(law, DenseLaw) else 1.0
    total = float(values.sum(dtype=np.float64)) / counted if counted > 0 else math.nan
    if not abs(total - 1.0) < LAW_TOLERANCE or float(values.min()) < 0:
        raise InvalidDraft(f"draft law sums to {total}: expected non-negative, sum 1")
    mass = law.weights[token] if isinstance(law, DenseLaw) else law.probs[law.ids == token].sum()
    if not float(mass) > 0:
        raise InvalidDraft(f"draft token {token} has no mass in its own law: not drawn from it")
    if abs(total - 1.0) <= SUM_ROUNDING:
        return law
    if isinstance(law, DenseLaw):
        return replace(law, total=law.total * total)
    return replace(law, probs=law.probs / total)


def _check_tree(draft: Draft, parents: Sequence[int]) -> None:
    if not draft.deterministic:
        raise InvalidDraft("a tree of sampled tokens: only point masses can branch exactly")
    if len(parents) != len(draft):
        raise InvalidDraft(f"tree of {len(draft)} tokens with {len(parents)} parents: one each")
    branches = set(zip(parents, draft.token_ids))
    if len(branches) < len(draft):
        raise InvalidDraft("a tree with equal siblings: expected distinct children of a node")
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InvalidDraft(f"parent {parent} of node {node}: expected -1 to {node - 1}")
