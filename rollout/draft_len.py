"""How many tokens to draft, a row and a round; 0 included.

Drafting k tokens for each of B rows turns B scored tokens into B(1 + k) and the expected emitted
tokens a row into E(k) = 1 + sum_i a_1 ... a_i (Leviathan et al., arXiv:2211.17192, section 3.3, with
measured conditional rates a_i instead of one constant). What a round costs is measured as well:
seconds = fixed + per_token * scored tokens, fitted online with forgetting. The length with the most
expected tokens a second wins; when it is 0 the round is a plain decode step.

A round may branch instead (`rollout.draft_tree`). How many tokens a tree of `tree_nodes` yields is
measured by trying one now and then; trees are used while they yield more expected tokens a second
than the best chain, which at small batches they can and at large ones they do not.

The choice is made before anything is drafted, so it cannot look at the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout.row import Row

PRIOR_ROWS = 2.0
"""A position starts as if this many rows had reached it and done as at the position before; the first
as if half of them had been accepted. So a good start is followed further than it was ever tried."""


class DraftLen(Protocol):
    """Chooses draft lengths from what rounds have shown so far."""

    @property
    def branching(self) -> bool:
        """The lengths last chosen are nodes of trees, for proposers that can branch."""
        ...

    def choose(self, rows: Sequence[Row], *, can_branch: bool = True) -> list[int]:
        """Drafted tokens a row, this round; of chains only where the proposer cannot branch."""
        ...

    def observe(self, round_: "RoundCost") -> None: ...


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What one round did and took."""

    seconds: float
    num_rows: int
    asked_len: int
    scored_tokens: int
    """Tokens run through the target, prompts and re-prefills included."""
    plain_tokens: bool
    """No prompt or re-prefill was in the round, so its time says what decoding costs."""
    drafted: tuple[int, ...]
    """Draft length of each row."""
    accepted: tuple[int, ...]
    branched: bool = False
    """The drafts were trees."""


@dataclass(frozen=True, slots=True)
class FixedDraftLen:
    """The same length for every row and round."""

    draft_len: int
    branching: bool = False

    def choose(self, rows: Sequence[Row], *, can_branch: bool = True) -> list[int]:
        return [self.draft_len] * len(rows)

    def observe(self, round_: RoundCost) -> None:
        pass


class AdaptiveDraftLen:
    """The length that maximises expected emitted tokens a second.

    `decay` is the weight that evidence of acceptance keeps after the next drafting round, and
    `cost_decay` that of costs; acceptance moves with the policy, costs with the machine.
    `probe_every` rounds without drafting are followed by one that drafts `probe_len`, so that a
    proposer which has become good is noticed after a few probes. `tree_nodes` > 0 lets trees of that
    size compete; one is tried after every `tree_every` rounds with drafts.
    """

    def __init__(
        self,
        max_len: int,
        *,
        decay: float = 0.9,
        cost_decay: float = 0.98,
        probe_every: int = 24,
        probe_len: int = 2,
        tree_nodes: int = 0,
        tree_every: int = 24,
    ) -> None:
        self.max_len, self._decay = max_len, decay
        self._probe_every, self._probe_len = probe_every, min(probe_len, max_len)
        self._reached = [0.0] * max_len
        self._accepted = [0.0] * max_len
        self._asked = [0.0] * max_len
        self._drafted = [0.0] * max_len
        self._cost = LinearCost(cost_decay)
        self._rounds_without = 0
        self._trees = _TreeYield(tree_nodes, tree_every, decay)
        self._branching = False

    @property
    def branching(self) -> bool:
        return self._branching

    def choose(self, rows: Sequence[Row], *, can_branch: bool = True) -> list[int]:
        self._branching = False
        if not rows or not self.max_len:
            return [0] * len(rows)
        best = self.best_len(len(rows))
        if best and self._cost.known and self._trees.nodes and can_branch:
            chain_rate = self._chain_rate(best, len(rows))
            self._branching = self._trees.pays(len(rows), self._cost, chain_rate)
            if self._branching:
                best = self._trees.nodes
        if best == 0:
            self._rounds_without += 1
            if self._rounds_without > self._probe_every:
                best = self._probe_len
        if best:
            self._rounds_without = 0
        return [best] * len(rows)

    def best_len(self, num_rows: int) -> int:
        """argmax over k of emitted(k) / seconds(k); the shortest of equals."""
        if not self._cost.known:
            return self._probe_len
        rates = [self._chain_rate(length, num_rows) for length in range(self.max_len + 1)]
        return rates.index(max(rates))

    def _chain_rate(self, length: int, num_rows: int) -> float:
        """Expected emitted tokens a row and second when `length` tokens are drafted."""
        emitted, scored, chain = 1.0, 1.0, 1.0
        accept_rate, draft_rate = 0.5, 1.0
        for depth in range(length):
            accept_rate = _rate(self._accepted[depth], self._reached[depth], accept_rate)
            draft_rate = _rate(self._drafted[depth], self._asked[depth], draft_rate)
            chain *= accept_rate
            emitted += chain * draft_rate
            scored += draft_rate
        return emitted / self._cost.seconds(num_rows * scored)

    def observe(self, round_: RoundCost) -> None:
        if round_.plain_tokens:
            self._cost.add(round_.scored_tokens, round_.seconds)
        if not round_.asked_len:
            return
        if round_.branched:
            self._trees.observe(round_)
            return
        for counts in (self._reached, self._accepted, self._asked, self._drafted):
            counts[:] = [self._decay * count for count in counts]
        for depth in range(min(round_.asked_len, self.max_len)):
            self._asked[depth] += round_.num_rows
            self._drafted[depth] += sum(length > depth for length in round_.drafted)
        for length, accepted in zip(round_.drafted, round_.accepted, strict=True):
            for depth in range(min(length, accepted + 1, self.max_len)):
                self._reached[depth] += 1
                self._accepted[depth] += depth < accepted


class _TreeYield:
    """What trees of one size have yielded, with forgetting."""

    def __init__(self, nodes: int, every: int, decay: float) -> None:
        self.nodes, self._every, self._decay = nodes, every, decay
        self._rows = self._emitted = self._scored = 0.0
        self._rounds_without = every  # the first round that drafts tries one

    def pays(self, num_rows: int, cost: "LinearCost", chain_rate: float) -> bool:
        """A tree has a better rate than the chain, or it is time to try one."""
        self._rounds_without += 1
        if self._rounds_without > self._every:
            tried = True
        elif self._rows:
            scored = num_rows * self._scored / self._rows
            tried = self._emitted / self._rows / cost.seconds(scored) > chain_rate
        else:
            tried = False
        if tried:
            self._rounds_without = 0
        return tried

    def observe(self, round_: RoundCost) -> None:
        for name, value in (
            ("_rows", round_.num_rows),
            ("_emitted", round_.num_rows + sum(round_.accepted)),
            ("_scored", round_.num_rows + sum(round_.drafted)),
        ):
            setattr(self, name, self._decay * getattr(self, name) + value)


def _rate(successes: float, trials: float, prior: float) -> float:
    return (successes + PRIOR_ROWS * prior) / (trials + PRIOR_ROWS)


class LinearCost:
    """seconds = fixed + per_token * tokens, least squares with exponential forgetting."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._n > 0

    def add(self, tokens: float, seconds: float) -> None:
        for name, value in (
            ("_n", 1.0),
            ("_x", tokens),
            ("_y", seconds),
            ("_xx", tokens * tokens),
            ("_xy", tokens * seconds),
        ):
            setattr(self, name, self._decay * getattr(self, name) + value)

    def seconds(self, tokens: float) -> float:
        """Prediction; neither part of the cost is ever negative."""
        spread = self._n * self._xx - self._x**2
        seen = spread > 1e-9 * self._n * self._xx  # less is the rounding of one width's sums
        slope = (self._n * self._xy - self._x * self._y) / spread if seen else 0.0
        slope = min(max(slope, 0.0), self._y / self._x)
        return (self._y - slope * self._x) / self._n + slope * tokens
