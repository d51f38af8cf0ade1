"""Position-wise exact verification: how much of a draft the target law keeps.

Speculative sampling of Leviathan et al. (arXiv:2211.17192) and Chen et al. (arXiv:2302.01318); here
p = target, q = draft. A drafted x is accepted with probability min(1, p(x)/q(x)); after a refusal
one token is drawn from the residual (p - q)+ and the rest of the draft is dropped; after full
acceptance one more is drawn from p. The emitted law is p.

A point-mass draft is verified by the coupled form of the same rule: draw y from p with the
position's own uniform and compare. y = x happens with probability p(x), and y given y != x has the
law p without x, the residual. So the emitted tokens are, uniform for uniform, those that plain
decoding emits: with point-mass drafts a seed gives the same tokens whatever was drafted, and
exactness does not even need the draft to be independent of the target's randomness.

The target law at a position is looked at only when verification gets there; a residual row is built
only for the one position that was refused. `verify.py` does not do blocks or trees.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from rollout.draft import DenseLaw, Draft, DraftLaw, PointMass, SparseLaw
from rollout.law import TargetLaws
from rollout.streams import Draws

Origin = Literal["correction", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round emits for one row: draft[:accepted_len], then `next_token`."""

    accepted_len: int
    next_token: int
    origin: Origin
    accept_probs: tuple[float, ...]
    """Acceptance probability sum_x min(p, q) at each position that was reached."""
    zero_residual: bool = False


def verify(laws: TargetLaws, first: int, draft: Draft, draws: Draws, start: int) -> Verdict:
    """Verifies one row's draft against the laws at indices first .. first + len(draft).

    `start` is the sequence position of the first drafted token.
    Raises InvalidLogits when a position that is reached has no law.
    """
    accept_probs: list[float] = []
    for depth, (token, law) in enumerate(zip(draft.token_ids, draft.laws, strict=True)):
        index, position = first + depth, start + depth
        laws.check(index)
        if isinstance(law, PointMass):
            accept_probs.append(laws.prob(index, token))
            drawn = draws.target(laws, index, position)
            if drawn != token:
                return Verdict(depth, drawn, "correction", tuple(accept_probs))
            continue
        accept_probs.append(acceptance(laws, index, law))
        target_prob, draft_prob = laws.prob(index, token), law_prob(law, token)
        if draft_prob > 0 and draws.coin(min(1.0, target_prob / draft_prob), start, position):
            continue
        weights = residual(laws.probs(index), law)
        empty = not float(weights.sum()) > 0  # reachable by rounding only: p = q, yet refused
        drawn = draws.correction(laws.probs(index) if empty else weights, start, position)
        return Verdict(depth, drawn, "correction", tuple(accept_probs), zero_residual=empty)
    depth = len(draft)
    laws.check(first + depth)
    drawn = draws.target(laws, first + depth, start + depth)
    return Verdict(depth, drawn, "bonus" if depth else "plain", tuple(accept_probs))


def law_prob(law: SparseLaw | DenseLaw, token: int) -> float:
    """q(token)."""
    if isinstance(law, DenseLaw):
        return float(law.probs[token])
    return float(law.probs[law.ids == token].sum())


def acceptance(laws: TargetLaws, index: int, law: DraftLaw) -> float:
    """sum_x min(p(x), q(x)) = 1 - TV(p, q) at one position."""
    assert not isinstance(law, PointMass), "a point mass is accepted with p(x)"
    target = laws.probs(index)
    if isinstance(law, DenseLaw):
        return float(torch.minimum(target, law.probs).sum())
    return float(torch.minimum(target[law.ids], law.probs.to(target.dtype)).sum())


def residual(target: torch.Tensor, law: DraftLaw) -> torch.Tensor:
    """Unnormalised residual (p - q)+ over the vocabulary [V]; sparse laws touch their ids only."""
    assert not isinstance(law, PointMass), "a point mass is verified by comparison"
    if isinstance(law, DenseLaw):
        return (target - law.probs).clamp(min=0)
    weights = target.clone()
    weights[law.ids] = (target[law.ids] - law.probs.to(target.dtype)).clamp(min=0)
    return weights
