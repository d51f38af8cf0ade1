"""Block verification: the whole draft is judged at once (Sun et al., arXiv:2403.10444, algorithm 2).

p = target, q = draft, X_1..X_g the draft. With r_0 = 1:

    r_i = min(1, r_{i-1} p_i(X_i) / q_i(X_i))              i = 1..g, kept as a logarithm
    R_i(x) = (r_i p_{i+1}(x) - q_{i+1}(x))+,  Z_i = sum_x R_i(x)
    h_i = Z_i / (Z_i + 1 - r_i)  for 0 < i < g,  h_g = r_g
    tau = the largest i with u_i < h_i, else 0;  emitted: X_1..X_tau, then Y ~ p_{g+1} if tau = g,
    else Y ~ R_tau / Z_tau.

The emitted law is p, and the expected accepted length is never below that of position-wise
verification, because what one position has to spare makes up for what another lacks. A later
position is looked at first: "stop at the first failure" would be another law. Point masses among the
laws have q = 1 (a mixture is one law; handing over the mixture that was drawn from is exact too),
and the draft's length may be any stopping time: a function of what came before each token.

Each u_i is looked at from the end until one succeeds, so an interior Z_i, a pass over the vocabulary
for dense laws and over a few ids for sparse ones, is worked out only when all later ones failed.

Foretold is E[tau | X] - sum_i (r_i - e_i) with e_i = sum_x min(r_{i-1} p_i(x), q_i(x)), the mean of r_i
over X_i ~ q_i. So tau minus it has mean zero, by the coins and by the draws of X.
"""

import math

import torch

from rollout.draft import DenseLaw, Draft, PointMass
from rollout.law import TargetLaws
from rollout.streams import Draws
from rollout.verdict import Foretold, Verdict
from rollout.verify_positions import draw_residual, law_prob, residual


def verify_block(
    laws: TargetLaws, first: int, draft: Draft, draws: Draws, start: int, *, foretell: bool
) -> Verdict:
    """See `rollout.verify.verify`."""
    block = _Block(laws, first, _reachable(laws, first, draft))
    draft_len = len(block.draft)
    foretold = block.foretold() if foretell else None
    accepted_len = next(
        (
            length
            for length in range(draft_len, 0, -1)
            if draws.coin(block.accept_prob(length), start, start + length - 1)
        ),
        0,
    )
    index, position = first + accepted_len, start + accepted_len
    accepted = tuple(range(accepted_len))
    laws.check(index)
    if accepted_len == draft_len:
        drawn = draws.target(laws, index, position)
        return Verdict(accepted, drawn, "bonus", foretold, draft_len)
    weights = block.excess(accepted_len)
    drawn, empty = draw_residual(laws, index, weights, draws, start, position)
    return Verdict(accepted, drawn, "correction", foretold, accepted_len + 1, empty)


def _reachable(laws: TargetLaws, first: int, draft: Draft) -> Draft:
    """The draft up to the first token of probability 0, or to the first position without a law.

    Both are stopping times: the token is kept, and whether a position has a law depends on the
    tokens before it. Getting to one without a law raises.
    """
    for depth, token in enumerate(draft.token_ids):
        if not laws.valid(first + depth):
            return draft.truncated(depth)
        if not laws.prob(first + depth, token):
            return draft.truncated(depth + 1)
    return draft


class _Block:
    """r, R, Z and h of one draft; the passes over the vocabulary only where they are asked for."""

    def __init__(self, laws: TargetLaws, first: int, draft: Draft) -> None:
        self.draft = draft
        self._laws, self._first = laws, first
        self._log_r = self._log_ratios()  # [g + 1]
        self._masses: dict[int, float] = {}

    def _log_ratios(self) -> list[float]:
        """log r_0 .. log r_g; -inf behind a token that one of the laws cannot emit."""
        log_r = [0.0]
        for depth, (token, law) in enumerate(zip(self.draft.token_ids, self.draft.laws)):
            target_prob = self._laws.prob(self._first + depth, token)
            draft_prob = law_prob(law, token)
            possible = target_prob > 0 and draft_prob > 0
            ratio = math.log(target_prob) - math.log(draft_prob) if possible else -math.inf
            log_r.append(min(log_r[-1] + ratio, 0.0))
        return log_r

    def accept_prob(self, length: int) -> float:
        """h_i for i = length >= 1."""
        log_r = self._log_r[length]
        if length == len(self.draft) or log_r in (0.0, -math.inf):
            return math.exp(log_r)
        mass = self.mass(length)
        return mass / (mass - math.expm1(log_r))

    def mass(self, length: int) -> float:
        """Z_i for i = length."""
        if length not in self._masses:
            self._masses[length] = self._mass(length)
        return self._masses[length]

    def _mass(self, length: int) -> float:
        index, r = self._first + length, math.exp(self._log_r[length])
        law = self.draft.laws[length]
        if isinstance(law, PointMass):
            return r * (1.0 - self._laws.prob(index, self.draft.token_ids[length]))
        if isinstance(law, DenseLaw):
            return float(self.excess(length).sum(dtype=torch.float64))
        target = self._laws.probs_of(index, law.ids).double()
        inside = float((r * target - law.probs.to(target)).clamp(min=0).sum())
        return inside + r * max(0.0, 1.0 - float(target.sum()))

    def excess(self, length: int) -> torch.Tensor:
        """R_i(x) = (r_i p_{i+1}(x) - q_{i+1}(x))+ [V] for i = length."""
        law = self.draft.laws[length]
        weights = self._laws.probs(self._first + length) * math.exp(self._log_r[length])
        if isinstance(law, PointMass):
            weights[self.draft.token_ids[length]] = 0.0  # r p <= 1 = q
            return weights
        return residual(weights, law)

    def foretold(self) -> Foretold:
        """The expectation of the module's text; looks at every position."""
        mean = second = spread = 0.0
        none_later = 1.0
        for length in range(len(self.draft), 0, -1):
            none_later *= 1.0 - self.accept_prob(length)
            mean += 1.0 - none_later  # E[tau | X] = sum_i P(tau >= i | X)
            second += (2 * length - 1) * (1.0 - none_later)  # E[tau^2 | X]
        variance = second - mean**2  # of the coins
        for length in range(1, len(self.draft) + 1):
            mean_r = min(1.0, max(0.0, math.exp(self._log_r[length - 1]) - self.mass(length - 1)))
            mean -= math.exp(self._log_r[length]) - mean_r
            spread += mean_r * (1.0 - mean_r)  # bound: r_i is in [0, 1]
        return Foretold(mean, max(0.0, variance) + spread)
