"""How many tokens to draft, a row and a round; 0 included.

A drafted token adds to what a row emits the chance that it and all before it are accepted, and to what
the round costs one more scored token. Emitted tokens a second are most when exactly those tokens are
scored whose chance exceeds a price (`rollout.draft_price`). The price is what changes with the batch:
one row on an idle machine drafts whatever has a chance of .2, a full batch only what is nearly certain,
and where it is above every chance the round is a plain decode step.

Costs come from the engine's own timings (`rollout.step_cost`), chances from what was accepted, by
depth and proposer's estimate, prompt and row (`rollout.acceptance`). Where proposing costs next to
nothing, every row is asked for a draft longer than any that was kept lately, and `keep` cuts each
behind its last token that is worth its price. A token that was cut off teaches all the same: the
token emitted in its place was drawn from the target law, so it equals a point mass as often as that
would have been accepted. A proposer that costs more than it earns is asked for a few rows only. One
that runs a model is asked for the lengths that maximise the rate with its own seconds counted in,
and probed for one row now and then while that is 0.

None of this is believed against the clock: where rounds that draft turn out slower than plain ones,
drafting rests (`rollout.realised`). While nobody is worth asking, that is decided for a few rounds at
once.

Nothing here looks at a token to decide about it: lengths are chosen before anything is drafted, and
the price that cuts is fixed before as well, so whether a token is scored depends on those before it and
on an estimate made before it was drawn. That is a stopping time, for which verification is exact. What
was learnt from a request must not choose the lengths of drawn drafts when the same request is sent
again with the same uniforms: the engine drops those (`RolloutRequest.attempt`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from rollout.acceptance import Acceptance, Evidence
from rollout.asking import Asking, Probes
from rollout.draft import Draft, PointMass
from rollout.draft_price import DraftPrice
from rollout.realised import TIMING, Realised
from rollout.round_cost import RoundCost, Trial
from rollout.row import Row
from rollout.step_cost import HOPE, StepCost
from rollout.stragglers import Stragglers
from rollout.tree_yield import TreeYield

REPRICE = 16
"""Rounds for which a price holds while as many rows keep as many tokens."""
MOST_CALM = 2
"""Doublings of that while price after price nothing is kept."""
RETIME = 16
"""Rounds for which it holds while rows keep other numbers of tokens, and of which one is timed."""
FIRST_TIMINGS = 64
"""All of these are taken."""
LULL = 4
"""Rounds for which the second decision in a row to ask nobody holds: a forward drives everything out
of the caches, and looking at the reasons behind it took 40 us of a step of 3.5 ms (SmolLM2, 4 rows)."""
FEW_ROWS = 4
"""Rows up to which a round may score several times its mean of tokens, or none: there what a further
token adds is looked up for the round, not for the mean."""
CHAINS_PAY = 1.01
"""Speedup of chains by what was offered lately, above which trees are thought of."""
FIRST_REACH, REACH, RECALL = 4, 2, 0.97
"""Drafts are at most so long at first, and then so many times what was kept of any lately and one more,
so what is kept may grow from round to round; that memory shrinks to this share with each round. Where
nothing was tried every token seems to pay: first drafts of 32 tokens for 4 rows cost 30 plain steps."""
NEAR = 0.25
"""Share of its price below which a token will not be worth it soon either."""
NUM_PRICES = 24
"""Prices that are compared where lengths are planned."""


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
    """Chance at which a drafted token is worth its cost, its drafting included where that is dear."""
    asked: int = 0
    """Rows asked for a draft."""
    offered: int = 0
    kept: int = 0
    """Tokens."""
    expected: float = 0.0
    """What those kept that will be accepted count, in tokens."""
    speedup: float = 1.0
    """Expected rate of what was kept over that of plain decoding, proposing left out."""
    why: str = "no cost was measured yet"

    def __str__(self) -> str:
        return (
            f"{self.num_rows} rows, plain step {1e3 * self.plain_s:.1f} ms: a drafted token must be "
            f"accepted with {self.price:.2f}; kept {self.kept} of {self.offered} tokens offered for "
            f"{self.asked} rows, expected to be worth {self.expected:.1f}, {self.speedup:.2f}x plain "
            f"({self.why})"
        )


@dataclass(slots=True)
class _Sums:
    """Over all choices that had a price."""

    rounds: float = 0.0
    plain: float = 0.0
    price: float = 0.0
    speedup: float = 0.0
    offered: float = 0.0
    kept: float = 0.0

    def add(self, choice: Choice) -> None:
        self.rounds += 1
        self.plain += not choice.kept
        self.price += min(choice.price, 1.0)
        self.speedup += choice.speedup
        self.offered += choice.offered
        self.kept += choice.kept


class AdaptiveDraftLen:
    """The lengths that maximise expected emitted tokens a second.

    After `probe_every` rounds in which nothing was scored, and ever more rarely while that finds
    nothing, one row's draft of `probe_len` tokens is scored whatever its chances. `tree_nodes` > 0 lets
    trees of that size compete with chains; one is tried after every `tree_every` rounds in which chains
    pay.
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
        self._acceptance, self._cost, self._price = Acceptance(), StepCost(), DraftPrice()
        self._asking, self._probes = Asking(), Probes(probe_every)
        self._trees = TreeYield(tree_nodes, tree_every)
        self._realised, self._stragglers = Realised(), Stragglers()
        self._branching = False
        self._cut = 1.0
        """Chance at which a token is worth scoring once it is drafted, in this round."""
        self._first_cut = 0.0
        """The same for the first tokens that are scored at all."""
        self._cuts: list[float] = []
        """The same by the number of tokens that are scored already, where rows are few."""
        self._best_speedup = 1.0
        """Of the best chains over plain decoding, by what was offered lately."""
        self._plain_s, self._age = 0.0, 0
        """Seconds of a plain step, and the rounds since it and the price were worked out."""
        self._priced = 0, 0
        """Rows, and tokens kept in the round before, that they were worked out for."""
        self._calm = 0
        """Times in a row that they were worked out anew after nothing was kept."""
        self._timed = self._num_timed = self._untimed = 0
        """Tokens of the step that was timed last, for another like it says little new; timings so far;
        rounds since the last."""
        self._lull = self._lulled = 0
        """Rounds for which the last decision will hold yet, and for which it has held since."""
        self._reach = float(min(max_len, FIRST_REACH))
        """Tokens a row that are asked for where every row is, and the most that are planned."""
        self._plan: dict[int, int] = {}
        """The last plan: lengths by serial."""
        self._futile = False
        """The last plan was to draft nothing or could not be afforded, or nothing of it was kept."""
        self._asked: set[int] = set()
        """Serials of the rows asked in this round."""
        self._probed: int | None = None
        """Serial of the row whose draft is scored whatever its chances."""
        self._worth: dict[int, float] = {}
        """What a token of a row counts, by serial; 1 for the others."""
        self.last = Choice()
        self._sums = _Sums()

    @property
    def branching(self) -> bool:
        return self._branching

    # ---- before drafting ------------------------------------------------------------------

    def choose(
        self, rows: Sequence[Row], *, can_branch: bool = True, draining: bool = False
    ) -> list[int]:
        num_rows, before = len(rows), self.last
        if self._lull and num_rows == before.num_rows:
            self._lull, self._lulled = self._lull - 1, self._lulled + 1
            return [0] * num_rows
        rounds = 1 + self._lulled if num_rows == before.num_rows else 1
        self._lull = self._lulled = 0
        self._branching, self._probed, self._asked = False, None, set()
        self.last = Choice(num_rows)
        if not rows or not self.max_len or not self._cost.known:
            return [0] * num_rows
        self._price_round(num_rows, before.kept, rounds)
        lengths = self._lengths(
            rows,
            quiet=not before.kept,
            can_branch=can_branch,
            draining=draining,
            rounds=rounds,
        )
        if any(lengths):
            self._weigh(rows, draining)
            self._asked = {row.serial for row, length in zip(rows, lengths) if length}
            self.last.asked = len(self._asked)
        elif not before.asked and self.last.why != TIMING:
            self._lull = LULL - 1
        return lengths

    def _lengths(
        self, rows: Sequence[Row], *, quiet: bool, can_branch: bool, draining: bool, rounds: int
    ) -> list[int]:
        """What to ask for. `quiet`: the round before kept nothing; `rounds`: of so many rows, since the
        last decision."""
        num_rows = len(rows)
        if objection := self._realised.objection(num_rows, rounds):
            self.last.why = objection
            return [0] * num_rows
        if (
            can_branch
            and self._trees.nodes
            and self._best_speedup > CHAINS_PAY
            and self._tree_pays()
        ):
            self._branching = True
            self.last.why = "trees"
            return [self._trees.nodes] * num_rows
        if self._asking.cheap:
            lengths = self._offers(num_rows, rounds)
        elif self._futile and self._age:
            self.last.why = "the last plan, to draft nothing, holds as long as its price"
            lengths = [0] * num_rows
        elif not self._asking.affords(num_rows):
            self.last.why, lengths = "drafting has lost too much", [0] * num_rows
            self._futile = True
        elif self._settled and self._age and [row.serial for row in rows] == [*self._plan]:
            self.last.why = "the last plan holds as long as its price"
            lengths = [*self._plan.values()]
        else:
            self._weigh(rows, draining)
            lengths = self._planned(rows)
            self._plan = {row.serial: length for row, length in zip(rows, lengths)}
            self._futile = not any(lengths)
        if quiet and self._probes.due(rounds):
            self._probe(rows, lengths)
        return lengths

    def _price_round(self, num_rows: int, kept: int, rounds: int) -> None:
        """A price holds for some rounds of as many rows, and for fewer where other numbers of tokens
        are kept."""
        self._age += rounds
        rows_before, kept_before = self._priced
        holds = 0
        if kept == kept_before:
            holds = REPRICE << min(self._calm, MOST_CALM)
        elif num_rows <= FEW_ROWS and self._settled:
            holds = RETIME
        if num_rows != rows_before or self._age >= holds:
            self._priced, self._age = (num_rows, kept), 0
            self._calm = 0 if kept or num_rows != rows_before else self._calm + 1
            self._plain_s = self._cost.seconds(num_rows)
            self._cut, self._best_speedup = self._price.price(num_rows, self._cost)
            self._first_cut = self._cost.slope(num_rows) * num_rows / self._plain_s
            self._cuts = self._cuts_by_count(num_rows) if num_rows <= FEW_ROWS else []
            self._asking.weigh(num_rows, self._plain_s)
        self.last.plain_s, self.last.price = self._plain_s, self._cut

    @property
    def _longest(self) -> int:
        """Tokens that a draft of this round may have."""
        return max(math.ceil(self._reach), min(self.max_len, FIRST_REACH))

    @property
    def _settled(self) -> bool:
        """Costs are known well enough to be looked at rarely."""
        return self._num_timed >= FIRST_TIMINGS

    def _cuts_by_count(self, num_rows: int) -> list[float]:
        """The chance at which the first, second, ... token of a round is worth what it adds to the
        round's seconds, in tokens at the best rate. Never falling: costs are taken as convex, as far as
        a round may go: what was never tried is believed to be cheap."""
        rate = self._best_speedup * num_rows / self._plain_s
        most = num_rows * self._longest
        seconds = self._cost.hoped.at(num_rows + np.arange(most + 1)).tolist()
        added = convex_steps(seconds)
        return [rate * step for step in added]

    def _weigh(self, rows: Sequence[Row], draining: bool) -> None:
        alike = not draining or len(rows) == 1
        self._worth = {} if alike else self._stragglers.worth(rows, self._first_cut)

    def _tree_pays(self) -> bool:
        chain_rate = self._best_speedup / self.last.plain_s
        return self._trees.pays(self.last.num_rows, self._cost, chain_rate)

    def _offers(self, num_rows: int, rounds: int) -> list[int]:
        """For every row, or for a few in turn while asking costs more than it earns."""
        if self._asking.pays:
            self.last.why = "proposing is cheap"
            return [math.ceil(self._reach)] * num_rows
        lengths, turns = [0] * num_rows, self._asking.turns(num_rows, rounds)
        if turns:  # a few tokens at most, whatever the price of many
            self._cut = max(self._cut, self._first_cut)
            for row in turns:
                lengths[row] = self._longest
        self.last.why = "proposing does not pay: rows in turn"
        return lengths

    def _planned(self, rows: Sequence[Row]) -> list[int]:
        """The lengths of the largest rate, the proposer's own seconds counted in: of all prices and
        depths the pair whose tokens yield most."""
        num_rows = len(rows)
        unknown = [math.nan] * math.ceil(self._reach)
        value = np.array([self._values(row, unknown, hope=HOPE) for row in rows])  # [B, n]
        ranked = np.sort(value, axis=None)
        prices = ranked[np.linspace(0, len(ranked) - 1, NUM_PRICES).astype(int)]
        worth = value >= prices[:, None, None]  # [P, B, n]
        drafting = worth.sum(1)  # [P, n] rows that draft so deep
        step_s = self._asking.draft_step.hoped.at(np.maximum(drafting, 1)) * (drafting > 0)
        seconds = self._cost.hoped.at(num_rows + drafting.cumsum(1)) + step_s.cumsum(1)
        gains = (value * worth).sum(1).cumsum(1)
        rates = (num_rows + gains) / seconds  # [P, n] of drafting up to each depth
        best, depth = np.unravel_index(int(rates.argmax()), rates.shape)
        self._best_speedup = float(rates[best, depth]) * self._cost.hoped(num_rows) / num_rows
        self.last.why = f"drafting costs {1e3 * step_s[best].max():.1f} ms a token"
        if self._best_speedup <= 1.0:
            self.last.price = 1.0
            return [0] * num_rows
        self.last.price = float(prices[best])
        lengths: list[int] = worth[best, :, : depth + 1].sum(1).tolist()
        return lengths

    def _probe(self, rows: Sequence[Row], lengths: list[int]) -> None:
        """Picks the row to be tried, one that is asked anyway if there is any."""
        asked = [index for index, length in enumerate(lengths) if length] or range(len(rows))
        index = asked[self._probes.turn % len(asked)]
        self._probed = rows[index].serial
        lengths[index] = max(lengths[index], self._probe_len)
        self.last.why = "a probe"

    # ---- before scoring -------------------------------------------------------------------

    def keep(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> list[Draft]:
        if not rows or not self._asked:
            return list(drafts)
        self.last.offered = self.last.kept = sum(map(len, drafts))
        if self._branching:
            return list(drafts)
        least = NEAR * (self._cuts[0] if self._cuts else self._cut)
        values = [
            self._values(row, _chances(draft), least=least) if len(draft) else []
            for row, draft in zip(rows, drafts, strict=True)
        ]
        lengths = self._worth_scoring(values)
        kept: list[Draft] = []
        expected = 0.0
        for index, (row, draft) in enumerate(zip(rows, drafts)):
            if row.serial == self._probed:
                lengths[index] = max(lengths[index], min(self._probe_len, len(draft)))
            expected += sum(values[index][: lengths[index]])
            kept.append(draft.truncated(lengths[index]))
        longest = REACH * max(lengths) + 1
        self._reach = min(max(float(longest), RECALL * self._reach), float(self.max_len))
        offered = [value for of_row in values for value in of_row]
        self._price.offered(offered, len(self._asked.intersection(row.serial for row in rows)))
        self._expect(len(rows), sum(map(len, kept)), expected)
        self._futile = bool(self.last.offered) and not self.last.kept
        return kept

    def _worth_scoring(self, values: Sequence[Sequence[float]]) -> list[int]:
        """Of each row's chain how many tokens are worth their price. With few rows that depends on how
        many are scored already: depth by depth, at each the likeliest first, so that no token is
        decided about by what was drawn at its depth or behind it."""
        if not self._cuts:
            return [sum(value >= self._cut for value in of_row) for of_row in values]
        lengths, num, depth, last = [0] * len(values), 0, 0, len(self._cuts) - 1
        going = [row for row, of_row in enumerate(values) if of_row]
        while going:
            going.sort(key=lambda row: -values[row][depth])
            for place, row in enumerate(going):
                if values[row][depth] < self._cuts[min(num, last)]:
                    going = going[:place]
                    break
                lengths[row], num = depth + 1, num + 1
            depth += 1
            going = [row for row in going if len(values[row]) > depth]
        return lengths

    def _expect(self, num_rows: int, kept: int, accepted: float) -> None:
        """Notes what is kept and what it promises."""
        plain_s, seconds = self._cost.seconds(num_rows), self._cost.seconds(num_rows + kept)
        self.last.kept, self.last.expected = kept, accepted
        self.last.speedup = (num_rows + accepted) / num_rows * plain_s / seconds

    def _weight(self, row: Row) -> float:
        """What a token of the row counts."""
        return self._worth.get(row.serial, 1.0)

    def _values(
        self, row: Row, chances: Sequence[float], *, hope: float = 0.0, least: float = 0.0
    ) -> list[float]:
        """What each token of a draft is worth: the chance that it and all before it are accepted, times
        what a token of the row counts. It never rises; behind a value below `least` the rest is left
        out."""
        weight = self._weight(row)
        chain = self._acceptance.chain(
            row.request.prompt_id, row.serial, chances, hope=hope, least=least / weight
        )
        return chain if weight == 1.0 else [weight * chance for chance in chain]

    # ---- after the round ------------------------------------------------------------------

    def observe(self, round_: RoundCost) -> None:
        if self.last.plain_s:
            self._sums.add(self.last)
        if self._lulled:  # the first round of a lull says what all of them would
            return
        self._stragglers.observe(round_.trials)
        if round_.plain_tokens and self._says_something(round_.scored_tokens):
            self._cost.add(round_.scored_tokens, round_.seconds)
        kept = round_.num_kept if self._asked else 0
        gained = self._gained(round_.trials) if kept else 0.0
        if round_.plain_tokens and round_.trials and self._probed is None:
            self._realised.observe(round_, self._cost.seconds(round_.num_rows), kept, gained)
        if not any(trial.asked_len for trial in round_.trials):
            return
        if round_.branched:
            self._trees.observe(round_.num_rows, round_.num_drafted, round_.num_accepted)
            return
        self._asking.observe(round_, self._cost, gained, self.last.expected)
        if round_.num_accepted:
            self._probes.found()
        self._learn(round_.trials)

    def _gained(self, trials: Sequence[Trial]) -> float:
        """What the accepted tokens of a round count."""
        return sum(trial.accepted_len * self._weight(trial.row) for trial in trials)

    def _says_something(self, scored_tokens: int) -> bool:
        """A timing of so many tokens is worth taking in, which costs as much as a draft does."""
        self._untimed += 1
        if self._age and (
            scored_tokens == self._timed or (self._settled and self._untimed < RETIME)
        ):
            return False
        self._timed, self._untimed = scored_tokens, 0
        self._num_timed += 1
        return True

    def _learn(self, trials: Sequence[Trial]) -> None:
        self._acceptance.learn(
            [
                Evidence(
                    trial.row.request.prompt_id,
                    trial.row.serial,
                    _chances(trial.draft),
                    _seen(trial),
                )
                for trial in trials
                if len(trial.draft) and trial.next_token is not None
            ]
        )

    def gauges(self) -> Mapping[str, float]:
        return {f"draft/{name}": value for name, value in asdict(self._sums).items()}

    def explain(self) -> str:
        return str(self.last)


def convex_steps(values: Sequence[float]) -> list[float]:
    """The steps of the highest convex function below the values: of equal ends, none smaller than the
    one before."""
    runs: list[tuple[float, int]] = []  # (mean step, how many)
    for before, after in pairwise(values):
        step, num = after - before, 1
        while runs and runs[-1][0] > step:
            earlier, many = runs.pop()
            step, num = (earlier * many + step * num) / (many + num), many + num
        runs.append((step, num))
    return [step for step, num in runs for _ in range(num)]


def _chances(draft: Draft) -> Sequence[float]:
    """The proposer's estimates, NaN where there is none."""
    return (math.nan,) * len(draft) if draft.chances is None else draft.chances


def _seen(trial: Trial) -> list[bool]:
    """What became of the tokens that the verification got to, in order; behind a draft that was cut and
    accepted whole also of the next one, if it was named: the token emitted there was drawn from the
    target law, so it equals a named one as often as that would have been accepted."""
    draft, got = trial.draft, trial.accepted_len
    if got < trial.kept_len:
        return [True] * got + [False]
    if got < len(draft) and isinstance(draft.laws[got], PointMass):
        return [True] * got + [trial.next_token == draft.token_ids[got]]
    return [True] * got
