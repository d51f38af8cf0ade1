"""Verification position by position: speculative sampling as first published.

p = target, q = draft (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318). A drafted
x is accepted with probability min(1, p(x)/q(x)); after a refusal one token is drawn from the residual
(p - q)+ and the rest of the draft is dropped; after full acceptance one more is drawn from p.

A point mass among sampled tokens is decided by drawing from p, as in `rollout.verify_points`. A row
of the vocabulary is worked out only for the one position that was refused, and for `foretell`.
"""

import torch

from rollout.draft import DenseLaw, Draft, DraftLaw, PointMass, SparseLaw
from rollout.law import TargetLaws
from rollout.streams import Draws
from rollout.verdict import Foretold, Verdict


def verify_positions(
    laws: TargetLaws, first: int, draft: Draft, draws: Draws, start: int, *, foretell: bool
) -> Verdict:
    """See `rollout.verify.verify`."""
    chances: list[float] = []
    for depth, (token, law) in enumerate(zip(draft.token_ids, draft.laws, strict=True)):
        index, position = first + depth, start + depth
        laws.check(index)
        if foretell:
            chances.append(acceptance(laws, index, law, token))
        if isinstance(law, PointMass):
            drawn = draws.target(laws, index, position)
            if drawn == token:
                continue
            return Verdict(tuple(range(depth)), drawn, "correction", _foretold(chances), depth + 1)
        target_prob, draft_prob = laws.prob(index, token), law_prob(law, token)
        if draft_prob > 0 and draws.coin(min(1.0, target_prob / draft_prob), start, position):
            continue
        weights = residual(laws.probs(index), law)
        drawn, empty = draw_residual(laws, index, weights, draws, start, position)
        foretold = _foretold(chances)
        return Verdict(tuple(range(depth)), drawn, "correction", foretold, depth + 1, empty)
    depth = len(draft)
    laws.check(first + depth)
    drawn = draws.target(laws, first + depth, start + depth)
    return Verdict(tuple(range(depth)), drawn, "bonus", _foretold(chances), depth)


def _foretold(chances: list[float]) -> Foretold | None:
    """From the acceptance probabilities of the reached positions; none were worked out: None."""
    variance = sum(chance * (1 - chance) for chance in chances)
    return Foretold(sum(chances), variance) if chances else None


def draw_residual(
    laws: TargetLaws, index: int, weights: torch.Tensor, draws: Draws, start: int, position: int
) -> tuple[int, bool]:
    """A correction from unnormalised weights [V], and whether they had no mass (reachable by
    rounding only: p = q, yet refused); then it is drawn from the target law."""
    empty = not float(weights.sum()) > 0
    drawn = draws.correction(laws.probs(index) if empty else weights, start, position)
    return drawn, empty


def law_prob(law: DraftLaw, token: int) -> float:
    """q(token), for the token that was drawn."""
    if isinstance(law, PointMass):
        return 1.0
    if isinstance(law, DenseLaw):
        return float(law.weights[token]) / law.total
    return float(law.probs[law.ids == token].sum())


def acceptance(laws: TargetLaws, index: int, law: DraftLaw, token: int) -> float:
    """sum_x min(p(x), q(x)) = 1 - TV(p, q) at one position."""
    if isinstance(law, PointMass):
        return laws.prob(index, token)
    if isinstance(law, DenseLaw):
        target = laws.probs(index)
        return min(1.0, float(torch.minimum(target, law.probs.to(target.device)).sum()))
    target = laws.probs_of(index, law.ids)
    return min(1.0, float(torch.minimum(target, law.probs.to(target)).sum()))


def residual(target: torch.Tensor, law: SparseLaw | DenseLaw) -> torch.Tensor:
    """Unnormalised residual (p - q)+ over the vocabulary [V]; sparse laws touch their ids only."""
    if isinstance(law, DenseLaw):
        weights = law.weights.to(target.device)
        return torch.sub(target, weights, alpha=1.0 / law.total).clamp_(min=0)
    weights = target.clone()
    weights[law.ids] = (target[law.ids] - law.probs.to(target)).clamp(min=0)
    return weights
