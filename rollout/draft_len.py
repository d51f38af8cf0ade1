"""How many tokens to draft, a row and a round; 0 included.

A drafted token adds to what a row emits the chance that it and all before it are accepted, and to what
the round costs one more scored token. Emitted tokens a second are most when exactly those tokens are
scored whose chance exceeds a price (`rollout.draft_price`). The price is what changes with the batch:
one row on an idle machine drafts whatever has a chance of .2, a full batch only what is nearly certain,
and where it is above every chance the round is a plain decode step.

Costs come from the engine's own timings (`rollout.step_cost`), chances from what was accepted, by depth
and proposer's estimate, prompt and row (`rollout.acceptance`). Where proposing costs next to nothing,
every row is asked for a draft of full length, and `keep` cuts each behind its last token that is worth
its price. A token that was cut off teaches all the same: the token emitted in its place was drawn from
the target law, so it equals a point mass as often as that would have been accepted. A proposer that
costs more than it earns is asked for a few rows only. One that runs a model is asked for the lengths
that maximise the rate with its own seconds counted in, and probed for one row now and then while that
is 0.

Nothing here looks at a token to decide about it: lengths are chosen before anything is drafted, and
the price that cuts is fixed before as well, so whether a token is scored depends on those before it and
on an estimate made before it was drawn. That is a stopping time, for which verification is exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rollout.acceptance import Acceptance
from rollout.draft import Draft, PointMass
from rollout.draft_price import DraftPrice
from rollout.row import Row
from rollout.step_cost import HOPE, StepCost
from rollout.tree_yield import TreeYield

CHEAP = 0.02
"""Share of a plain step that asking every row may take for a proposer to be asked always."""
NUM_PRICES = 24
"""Prices that are compared where lengths are planned."""
IDLE = 0.004
"""Share of a plain step that asking takes while it does not pay."""
SMOOTH = 0.1
"""Weight of the last round in running means."""
MOST_PATIENT = 4
"""Doublings of the time between probes that find nothing."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One row's draft in one round."""

    row: Row
    asked_len: int
    draft: Draft
    """As it was proposed."""
    kept_len: int
    """Of its first tokens, how many were scored."""
    accepted_len: int
    next_token: int | None
    """Emitted behind the accepted tokens; None where the row failed."""


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What one round did and took."""

    seconds: float
    """All but proposing."""
    propose_seconds: float
    scored_tokens: int
    """Tokens run through the target, prompts and re-prefills included."""
    plain_tokens: bool
    """No prompt or re-prefill was in the round, so its time says what decoding costs."""
    trials: tuple[Trial, ...]
    branched: bool = False
    """The drafts were trees."""

    @property
    def num_rows(self) -> int:
        return len(self.trials)

    @property
    def asked_len(self) -> int:
        return max((trial.asked_len for trial in self.trials), default=0)

    @property
    def proposed_len(self) -> int:
        return max((len(trial.draft) for trial in self.trials), default=0)


class DraftLen(Protocol):
    """Chooses draft lengths from what rounds have shown so far."""

    @property
    def branching(self) -> bool:
        """The lengths last chosen are nodes of trees, for proposers that can branch."""
        ...

    def choose(
        self, rows: Sequence[Row], *, can_branch: bool = True, draining: bool = False
    ) -> list[int]:
        """The longest draft of each row, this round; of chains only where the proposer cannot branch.
        `draining`: no row waits, so the round is as late as its last row."""
        ...

    def keep(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> list[Draft]:
        """The part of each draft that is worth scoring."""
        ...

    def observe(self, round_: RoundCost) -> None: ...

    def gauges(self) -> Mapping[str, float]:
        """Sums over all choices so far, by name."""
        ...

    def explain(self) -> str:
        """Why the last lengths are what they are, for people."""
        ...


@dataclass(frozen=True, slots=True)
class FixedDraftLen:
    """The same length for every row and round."""

    draft_len: int
    branching: bool = False

    def choose(
        self, rows: Sequence[Row], *, can_branch: bool = True, draining: bool = False
    ) -> list[int]:
        return [self.draft_len] * len(rows)

    def keep(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> list[Draft]:
        return list(drafts)

    def observe(self, round_: RoundCost) -> None:
        pass

    def gauges(self) -> Mapping[str, float]:
        return {}

    def explain(self) -> str:
        return f"every draft has {self.draft_len} tokens"


@dataclass(slots=True)
class Choice:
    """What a round's lengths rest on."""

    num_rows: int = 0
    plain_s: float = 0.0
    """Predicted seconds of the round without drafts."""
    price: float = 0.0
    """Chance at which a drafted token is worth scoring."""
    asked: int = 0
    """Rows asked for a draft."""
    offered: int = 0
    kept: int = 0
    """Tokens."""
    expected: float = 0.0
    """Tokens of those kept that will be accepted."""
    speedup: float = 1.0
    """Expected rate over that of plain decoding."""
    why: str = "no cost was measured yet"

    def __str__(self) -> str:
        return (
            f"{self.num_rows} rows, plain step {1e3 * self.plain_s:.1f} ms: a drafted token must be "
            f"accepted with {self.price:.2f}; kept {self.kept} of {self.offered} tokens offered for "
            f"{self.asked} rows, expected {self.expected:.1f} accepted, {self.speedup:.2f}x plain "
            f"({self.why})"
        )


@dataclass(slots=True)
class _Running:
    """A running mean."""

    value: float = 0.0
    known: bool = False

    def add(self, value: float) -> None:
        self.value += (value - self.value) * (SMOOTH if self.known else 1.0)
        self.known = True


@dataclass(slots=True)
class _Probes:
    """When to try again what does not pay: after `every` rounds, then twice that, and so on."""

    every: int
    waited: int = 0
    patience: int = 0
    turn: int = 0
    """Whose turn it is to be tried."""

    def due(self) -> bool:
        self.waited += 1
        if self.waited <= self.every << self.patience:
            return False
        self.waited, self.patience = 0, min(self.patience + 1, MOST_PATIENT)
        self.turn += 1
        return True

    def found(self) -> None:
        self.waited = self.patience = 0


class AdaptiveDraftLen:
    """The lengths that maximise expected emitted tokens a second.

    After `probe_every` rounds in which nothing was scored, one row's draft of `probe_len` tokens is
    scored whatever its chances. `tree_nodes` > 0 lets trees of that size compete with chains; one is
    tried after every `tree_every` rounds with drafts.
    """

    def __init__(
        self,
        max_len: int,
        *,
        probe_every: int = 24,
        probe_len: int = 2,
        tree_nodes: int = 0,
        tree_every: int = 24,
    ) -> None:
        self.max_len, self._probe_len = max_len, min(probe_len, max_len)
        self._acceptance = Acceptance()
        self._cost = StepCost()
        self._draft_step = StepCost()
        """Seconds of one drafted token a row, by rows."""
        self._ask_s = _Running()
        """Seconds of asking one row."""
        self._earned, self._paid = _Running(), _Running()
        """Seconds a round saved by what was kept, and spent on asking."""
        self._price = DraftPrice()
        self._cut = 1.0
        """Price of scoring a token that is drafted already, in this round."""
        self._probes = _Probes(probe_every)
        self._probed: int | None = None
        """Serial of the row whose draft is scored uncut in this round."""
        self._worth: dict[int, float] = {}
        """What a token of a row counts, by serial; 1 for the others."""
        self._credit, self._turn = 0.0, 0
        """Rows that may be asked though asking does not pay, and whose turn it is."""
        self._trees = TreeYield(tree_nodes, tree_every, decay=0.9)
        self._branching = False
        self.last = Choice()
        self._sums = dict.fromkeys(
            (
                f"draft/{name}"
                for name in ("rounds", "plain", "price", "speedup", "offered", "kept")
            ),
            0.0,
        )

    @property
    def branching(self) -> bool:
        return self._branching

    # ---- before drafting ------------------------------------------------------------------

    def choose(
        self, rows: Sequence[Row], *, can_branch: bool = True, draining: bool = False
    ) -> list[int]:
        num_rows, self._branching, self._probed = len(rows), False, None
        self._worth = straggler_weights(rows) if draining else {}
        self.last = Choice(num_rows)
        if not rows or not self.max_len or not self._cost.known:
            return [0] * num_rows
        self.last.plain_s = float(self._cost.seconds(num_rows))
        self._cut, self.last.speedup = self._price.price(num_rows, self._cost)
        self.last.price = self._cut
        if can_branch and self._tree_pays(num_rows):
            self._branching = True
            self.last.why = "trees"
            return [self._trees.nodes] * num_rows
        lengths = self._offers(num_rows) if self._cheap(num_rows) else self._planned(rows)
        if not any(lengths) and self._probes.due():
            index = self._probes.turn % num_rows
            self._probed = rows[index].serial
            lengths[index] = self._probe_len
            self.last.why = "a probe"
        self.last.asked = sum(length > 0 for length in lengths)
        return lengths

    def _cheap(self, num_rows: int) -> bool:
        return self._ask_s.value * num_rows <= CHEAP * self.last.plain_s

    def _offers(self, num_rows: int) -> list[int]:
        """Full length for every row, or for a few in turn while asking costs more than it earns."""
        if self._earned.value >= self._paid.value:
            self.last.why = "proposing is cheap and pays"
            return [self.max_len] * num_rows
        self._credit += IDLE * self.last.plain_s / max(self._ask_s.value, 1e-9)
        few = min(int(self._credit), num_rows)
        self._credit = min(self._credit - few, 1.0)
        self.last.why = f"proposing does not pay: {few} rows in turn"
        turns = {(self._turn + i) % num_rows for i in range(few)}
        self._turn += few
        return [self.max_len if row in turns else 0 for row in range(num_rows)]

    def _planned(self, rows: Sequence[Row]) -> list[int]:
        """The lengths of the largest rate, the proposer's own seconds counted in: of all prices and
        depths the pair whose tokens yield most."""
        num_rows = len(rows)
        unknown = np.full((num_rows, self.max_len), np.nan)
        value = self._weights(rows) * self._chain(rows, unknown, HOPE)  # [B, n]
        prices = np.quantile(value, np.linspace(0.0, 1.0, NUM_PRICES))
        worth = value >= prices[:, None, None]  # [P, B, n]
        drafting = worth.sum(1)  # [P, n] rows that draft so deep
        step_s = self._draft_step.hoped(np.maximum(drafting, 1)) * (drafting > 0)
        seconds = self._cost.hoped(num_rows + drafting.cumsum(1)) + step_s.cumsum(1)
        gains = (value * worth).sum(1).cumsum(1)
        rates = (num_rows + gains) / seconds  # [P, n] of drafting up to each depth
        best, depth = np.unravel_index(int(rates.argmax()), rates.shape)
        speedup = float(rates[best, depth] * self._cost.hoped(num_rows)) / num_rows
        self.last.why = f"drafting costs {1e3 * step_s[best].max():.1f} ms a token"
        if speedup <= 1.0:
            self.last.price, self.last.speedup = 1.0, 1.0
            return [0] * num_rows
        self.last.price, self.last.speedup = float(prices[best]), speedup
        return [int(length) for length in worth[best, :, : depth + 1].sum(1)]

    def _tree_pays(self, num_rows: int) -> bool:
        if not self._trees.nodes:
            return False
        return self._trees.pays(num_rows, self._cost, self.last.speedup / self.last.plain_s)

    # ---- before scoring -------------------------------------------------------------------

    def keep(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> list[Draft]:
        offered = sum(map(len, drafts))
        self.last.offered = self.last.kept = offered
        if self._branching or not offered or not self._cost.known:
            return list(drafts)
        chances, drafted = _chances(drafts)
        chain = self._chain(rows, chances)  # [B, n]
        value = self._weights(rows) * chain
        worth = (value >= self._cut) & drafted
        self._price.offered(value[drafted], self.last.asked)
        for index, row in enumerate(rows):
            if row.serial == self._probed:
                worth[index] = drafted[index]
        lengths = worth.sum(1)
        self.last.kept, self.last.expected = int(lengths.sum()), float(chain[worth].sum())
        return [draft.truncated(int(n)) for draft, n in zip(drafts, lengths, strict=True)]

    def _weights(self, rows: Sequence[Row]) -> np.ndarray:
        """[B, 1] what a token of each row counts."""
        return np.array([[self._worth.get(row.serial, 1.0)] for row in rows])

    def _chain(self, rows: Sequence[Row], chances: np.ndarray, hope: float = 0.0) -> np.ndarray:
        """[B, n] chance that a token and all before it are accepted."""
        prompts = [row.request.prompt_id for row in rows]
        factors = self._acceptance.factors(prompts, [row.serial for row in rows])
        rates = np.clip(self._acceptance.rates(chances, hope) * factors[:, None], 0.0, 1.0)
        chain: np.ndarray = np.cumprod(rates, axis=1)
        return chain

    # ---- after the round ------------------------------------------------------------------

    def observe(self, round_: RoundCost) -> None:
        if round_.plain_tokens:
            self._cost.add(round_.scored_tokens, round_.seconds)
        if self.last.plain_s:
            self._note()
        asked = sum(trial.asked_len > 0 for trial in round_.trials)
        if not asked:
            return
        if round_.branched:
            drafted = sum(len(trial.draft) for trial in round_.trials)
            accepted = sum(trial.accepted_len for trial in round_.trials)
            self._trees.observe(round_.num_rows, drafted, accepted)
            return
        self._ask_s.add(round_.propose_seconds / asked)
        if steps := round_.proposed_len:
            at_once = sum(len(trial.draft) for trial in round_.trials) / steps
            self._draft_step.add(at_once, round_.propose_seconds / steps)
        self._count_earnings(round_)
        self._learn(round_.trials)

    def _note(self) -> None:
        last = self.last
        for name, value in (
            ("rounds", 1), ("plain", not last.kept), ("price", min(last.price, 1.0)),
            ("speedup", last.speedup), ("offered", last.offered), ("kept", last.kept),
        ):  # fmt: skip
            self._sums[f"draft/{name}"] += value

    def _count_earnings(self, round_: RoundCost) -> None:
        """What the kept drafts saved against plain steps for the same tokens, by predicted costs."""
        num_rows = round_.num_rows
        kept = sum(trial.kept_len for trial in round_.trials)
        accepted = sum(trial.accepted_len for trial in round_.trials)
        plain_s, drafting_s = self._cost.seconds(np.array([num_rows, num_rows + kept]))
        self._earned.add(float(plain_s * (num_rows + accepted) / num_rows - drafting_s))
        self._paid.add(round_.propose_seconds)
        if accepted:
            self._probes.found()

    def _learn(self, trials: Sequence[Trial]) -> None:
        known = [trial for trial in trials if len(trial.draft) and trial.next_token is not None]
        if not known:
            return
        chances, _ = _chances([trial.draft for trial in known])
        reached, accepted = np.zeros(chances.shape), np.zeros(chances.shape)
        for index, trial in enumerate(known):
            got = trial.accepted_len
            accepted[index, :got] = 1
            reached[index, : min(got + 1, trial.kept_len)] = 1
            cut_off = trial.draft.laws[got : got + 1] if got == trial.kept_len else ()
            if any(isinstance(law, PointMass) for law in cut_off):
                reached[index, got] = 1
                accepted[index, got] = trial.next_token == trial.draft.token_ids[got]
        self._acceptance.learn(
            [trial.row.request.prompt_id for trial in known],
            [trial.row.serial for trial in known],
            chances,
            reached,
            accepted,
        )

    def gauges(self) -> Mapping[str, float]:
        return dict(self._sums)

    def explain(self) -> str:
        return str(self.last)


def straggler_weights(rows: Sequence[Row]) -> dict[int, float]:
    """What a row's tokens count while nobody waits, by serial: a step ends when its longest row ends,
    so rows that may still become long count more, up to 4 times as much as others; mean 1."""
    left = np.array([max(1, row.remaining_len) for row in rows], dtype=float)
    weights = np.clip(left / left.mean(), 0.5, 2.0)
    shares = (weights / weights.mean()).tolist()
    return {row.serial: share for row, share in zip(rows, shares, strict=True)}


def _chances(drafts: Sequence[Draft]) -> tuple[np.ndarray, np.ndarray]:
    """Estimates [B, n], NaN without one, and whether there is a token [B, n]."""
    shape = len(drafts), max(map(len, drafts), default=0)
    chances, drafted = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    for index, draft in enumerate(drafts):
        drafted[index, : len(draft)] = True
        if draft.chances is not None:
            chances[index, : len(draft)] = draft.chances
    return chances, drafted
