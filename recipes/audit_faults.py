"""Planted faults: engines that are wrong on purpose, and the check of the audit that catches each.

A comparison that never fails proves nothing. Every fault here was made by some engine, or is the
nearest thing to one: it is committed by a subclass of the engine, a wrapper of its proposer or another
class of draws, and judged by the very check that passes the right engine. A fault that is not caught
makes the audit void.

Faults of the arithmetic are written on top of a rule of their own (`by_position`, `by_block`), exact
as it stands, so that each differs from a right one by what its name says and nothing else.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from recipes.audit_enumerated import (
    Case,
    CoarseCoins,
    WrapProposer,
    examine,
    refusal_at_zero,
    stream_findings,
    toy_findings,
    unchanged,
)
from recipes.audit_statistics import Finding
from rollout.conditions import Condition
from rollout.draft import DenseLaw, Draft, DraftLaw, PointMass, SparseLaw
from rollout.law import TargetLaws
from rollout.native_engine import NativeEngine
from rollout.policy import Window
from rollout.proposer import Proposer
from rollout.row import Row
from rollout.streams import Draws, SeededDraws
from rollout.verdict import Verdict

CAUGHT_EFFECT = 1e-3
"""Total variation, or error of a log-probability, above which an enumerated fault is caught."""
CAUGHT_LEVEL = 1e-6
"""P-value below which a seeded fault is caught."""


# ---- rules of their own -----------------------------------------------------------------------

Accept = Callable[[torch.Tensor, torch.Tensor, int], float]
"""Target [V], draft [V], drafted token -> probability to accept it."""
Weights = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Target [V], draft [V], refused token -> weights [V] that its replacement is drawn from."""
Verify = Callable[[TargetLaws, int, Draft, Draws, int], Verdict]


def ratio(target: torch.Tensor, draft: torch.Tensor, token: int) -> float:
    """min(1, p / q), the right one."""
    return min(1.0, float(target[token] / draft[token]))


def residual(target: torch.Tensor, draft: torch.Tensor, token: int) -> torch.Tensor:
    """(p - q)+, the right one."""
    return (target - draft).clamp(min=0)


def by_position(
    laws: TargetLaws,
    first: int,
    draft: Draft,
    draws: Draws,
    start: int,
    *,
    accept: Accept = ratio,
    replacement: Weights = residual,
    bonus_shift: int = 0,
) -> Verdict:
    """Verification of dense drafts position by position."""
    for depth, (token, draft_law) in enumerate(zip(draft.token_ids, draft.laws)):
        target, drafted = laws.probs(first + depth), _dense(draft_law)
        if draws.coin(accept(target, drafted, token), start, start + depth):
            continue
        weights = replacement(target, drafted, token)
        drawn = draws.correction(weights, start, start + depth)
        return Verdict(tuple(range(depth)), drawn, "correction")
    depth = len(draft)
    drawn = draws.target(laws, first + depth + bonus_shift, start + depth)
    return Verdict(tuple(range(depth)), drawn, "bonus")


def by_block(
    laws: TargetLaws,
    first: int,
    draft: Draft,
    draws: Draws,
    start: int,
    *,
    stop_at_first_failure: bool = False,
) -> Verdict:
    """Block verification of dense drafts; symbols as in `rollout.verify_block`."""
    length = len(draft)
    target = [laws.probs(first + depth) for depth in range(length + 1)]
    drafted = [_dense(law) for law in draft.laws]
    r = [1.0]
    for depth, token in enumerate(draft.token_ids):
        r.append(min(1.0, r[-1] * float(target[depth][token] / drafted[depth][token])))
    excess = [(r[i] * target[i] - drafted[i]).clamp(min=0) for i in range(length)]
    masses = [float(weights.sum()) for weights in excess]
    h = [z / (z + 1 - ri) if ri < 1 else 1.0 for z, ri in zip(masses, r)] + [r[length]]
    heads = [draws.coin(h[i], start, start + i - 1) for i in range(1, length + 1)]
    if stop_at_first_failure:
        tau = (*heads, False).index(False)
    else:
        tau = max((i for i, head in enumerate(heads, start=1) if head), default=0)
    if tau == length:
        drawn = draws.target(laws, first + tau, start + tau)
        return Verdict(tuple(range(tau)), drawn, "bonus")
    drawn = draws.correction(excess[tau], start, start + tau)
    return Verdict(tuple(range(tau)), drawn, "correction")


def _dense(law: DraftLaw) -> torch.Tensor:
    assert isinstance(law, DenseLaw), "rules of faults are for dense drafts"
    return law.probs


def only_the_refused(target: torch.Tensor, draft: torch.Tensor, token: int) -> torch.Tensor:
    """p, less q at the refused token."""
    weights = target.clone()
    weights[token] = (target[token] - draft[token]).clamp(min=0)
    return weights


def argmax_only(target: torch.Tensor, draft: torch.Tensor, token: int) -> float:
    """1 for the most probable token."""
    return float(token == int(target.argmax()))


def the_argmax(target: torch.Tensor, draft: torch.Tensor, token: int) -> torch.Tensor:
    """All weight on the most probable token."""
    return torch.eye(len(target), dtype=target.dtype)[int(target.argmax())]


def siblings_in_turn(
    laws: TargetLaws, first: int, draft: Draft, draws: Draws, start: int
) -> Verdict:
    """Each child is tested against the whole target, as if no sibling had been refused before."""
    assert draft.parents is not None, "this rule is for trees"
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        position = start + len(path)
        children = [child for child, parent in enumerate(draft.parents) if parent == node]
        target = laws.probs(first + 1 + node)
        for child in children:
            if draws.coin(float(target[draft.token_ids[child]]), start, position):
                path.append(child)
                break
        else:
            target[[draft.token_ids[child] for child in children]] = 0.0
            drawn = draws.correction(target, start, position)
            return Verdict(tuple(path), drawn, "correction" if children else "bonus")


# ---- engines ----------------------------------------------------------------------------------


def judging(rule: Verify) -> type[NativeEngine]:
    """An engine with another rule for rounds that have a draft."""

    class Judging(NativeEngine):
        def _verdict(self, row: Row, draft: Draft, laws: TargetLaws, first: int) -> Verdict:
            if not len(draft):
                return super()._verdict(row, draft, laws, first)
            return rule(laws, first, draft, row.draws, len(row.token_ids))

    return Judging


def conditioned(edit: Callable[[list[Condition]], list[Condition]]) -> type[NativeEngine]:
    """An engine that changes what the laws of a window are made from; of at least two positions."""

    class Conditioned(NativeEngine):
        def _conditions(self, row: Row, draft: Draft) -> list[Condition]:
            conditions = super()._conditions(row, draft)
            return edit(conditions) if len(draft) else conditions

    return Conditioned


def with_rows(row_class: type[Row]) -> type[NativeEngine]:
    """An engine whose rows take in what was emitted in another way."""

    class WithRows(NativeEngine):
        def _commit(self, rows: Sequence[Row], *rest: Any) -> None:
            for row in rows:
                row.__class__ = row_class
            super()._commit(rows, *rest)

    return WithRows


def unfiltered(condition: Condition) -> Condition:
    sampling = replace(condition.sampling, top_k=0, top_p=1.0, min_p=0.0)
    return replace(condition, sampling=sampling)


def unbanned(condition: Condition) -> Condition:
    return replace(condition, banned=())


class TreeAsChain(NativeEngine):
    """Takes the tokens before a node in the window for its path."""

    def _conditions(self, row: Row, draft: Draft) -> list[Condition]:
        return row.conditions.along(draft.token_ids)


class RegrowsTree(NativeEngine):
    """Gives a tree two chances."""

    def _verdict(self, row: Row, draft: Draft, laws: TargetLaws, first: int) -> Verdict:
        verdict = super()._verdict(row, draft, laws, first)
        if verdict.accepted or not len(draft):
            return verdict
        return super()._verdict(row, draft, laws, first)  # the tree was wrong: draw once more


class KeepsFirstNodes(NativeEngine):
    """Rolls back by length, as if a tree were a chain."""

    def _keep(self, row: Row, draft: Draft, window: Window, verdict: Verdict) -> None:
        first_nodes = tuple(range(verdict.accepted_len))
        super()._keep(row, draft, window, replace(verdict, accepted=first_nodes))


class SwapsNeighbours(NativeEngine):
    """Hands each row of equal width the logits of the next."""

    def _laws(
        self, logits: torch.Tensor, rows: Sequence[Row], drafts: Sequence[Draft]
    ) -> TargetLaws:
        windows = list(logits.split([len(draft) + 1 for draft in drafts]))
        for i in range(len(windows) - 1):
            if len(windows[i]) == len(windows[i + 1]):
                windows[i : i + 2] = windows[i + 1], windows[i]
        return super()._laws(torch.cat(windows), rows, drafts)


class StopsAtRunEnd(Row):
    """Looks for a stop id at the end of a round only."""

    def emit(self, draft: Draft, verdict: Verdict, *rest: Any) -> int:
        self.num_to_come = verdict.accepted_len + 1
        return super().emit(draft, verdict, *rest)

    def _check_end(self, token: int) -> None:
        self.num_to_come -= 1
        if not self.num_to_come or not self.remaining_len:
            super()._check_end(token)


class RecordsRawLaw(Row):
    """Takes one log-probability for the other."""

    def emit(
        self, draft: Draft, verdict: Verdict, logprobs: list[float], full: list[float], *rest: Any
    ) -> int:
        return super().emit(draft, verdict, full, full, *rest)


class RecordsZeros(Row):
    """Has no log-probability for what it did not draw."""

    def emit(self, draft: Draft, verdict: Verdict, logprobs: list[float], *rest: Any) -> int:
        num = verdict.accepted_len
        return super().emit(draft, verdict, [0.0] * num + logprobs[num:], *rest)


# ---- proposers --------------------------------------------------------------------------------


class Redrafting:
    """A proposer whose drafts are changed after they were made."""

    def __init__(self, inner: Proposer, change: Callable[[Draft], Draft]) -> None:
        self._inner, self._change = inner, change

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        return list(map(self._change, self._inner.propose(rows, max_lens)))

    def observe(self, rows: Sequence[Row]) -> None:
        self._inner.observe(rows)

    def finish(self, row: Row) -> None:
        self._inner.finish(row)

    def publish(self, version: int) -> None:
        self._inner.publish(version)

    def gauges(self) -> Mapping[str, float]:
        return self._inner.gauges()


def redrafting(change: Callable[[Draft], Draft]) -> WrapProposer:
    return lambda proposer: Redrafting(proposer, change)


def most_probable_first(draft: Draft) -> Draft:
    """One token, the most probable, with the law it was not drawn from."""
    if not len(draft) or isinstance(law := draft.laws[0], PointMass):
        return draft
    best = int(law.probs.argmax())
    token = int(law.ids[best]) if isinstance(law, SparseLaw) else best
    return Draft((token,), (law,))


def without_unlikely_end(draft: Draft) -> Draft:
    """The last token is dropped when its own draft probability was low."""
    if not len(draft) or float(_dense(draft.laws[-1])[draft.token_ids[-1]]) > 0.4:
        return draft
    return draft.truncated(len(draft) - 1)


# ---- draws ------------------------------------------------------------------------------------


class CorrectionByDraftNoise(SeededDraws):
    """Keyed by the position, not by what it is for."""

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        return super().uniform(purpose.replace(b"correction", b"draft"), start, position)


class CorrectionByCoin(SeededDraws):
    """One uniform to refuse and to replace."""

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        return super().uniform(purpose.replace(b"correction", b"coin"), start, position)


class CoinOfPosition(SeededDraws):
    """Coins that do not know their round."""

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        return super().uniform(purpose, 0 if purpose == b"coin" else start, position)


class DraftOfPosition(SeededDraws):
    """Draft tokens that do not know their round."""

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        return super().uniform(purpose, 0 if purpose == b"draft" else start, position)


class DraftByTargetNoise(SeededDraws):
    """Drafts with what the target will be drawn with."""

    def uniform(self, purpose: bytes, start: int, position: int) -> float:
        if purpose == b"draft":
            purpose, start = b"target", 0
        return super().uniform(purpose, start, position)


class InclusiveCoins(CoarseCoins):
    """<= for <."""

    def coin(self, accept_prob: float, start: int, position: int) -> bool:
        return self.uniform(b"coin", start, position) <= accept_prob


# ---- the faults -------------------------------------------------------------------------------

Seeded = Callable[..., list[Finding]]
"""A check of seeded streams; takes `engine_class` and `draws_class`."""
DENSE = Case("dense", "plain", "position")
BLOCK = Case("dense", "plain", "block")
TREE = Case("table_tree", "plain", draft_len=4)
LONG_TREE = Case("table_tree", "plain", num_tokens=4, draft_len=7)
MIXED_BATCH = Case("history", "greedy, plain and penalised rows", num_tokens=2)


@dataclass(frozen=True, slots=True)
class Control:
    """Whether a fault was caught."""

    name: str
    sentence: str
    caught: bool
    by: str
    """The check, and the number it caught the fault by."""
    effect: float
    """That number: a total variation, an error of a log-probability, or, of a seeded check, the
    deviation in the unit of its finding."""
    p_value: float | None = None
    """Of a seeded check."""

    def to_json(self) -> dict[str, Any]:
        """The fields; an infinite effect becomes null."""
        row = dataclasses.asdict(self)
        return row | {"effect": self.effect if math.isfinite(self.effect) else None}


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to be wrong, and the check that must see it."""

    name: str
    sentence: str
    """What the faulty engine does."""
    check: Case | Seeded
    engine_class: type[NativeEngine] = NativeEngine
    wrap: WrapProposer = unchanged
    draws_class: type[SeededDraws] | None = None

    def control(self) -> Control:
        """Runs the check on the faulty engine."""
        return _enumerated(self, self.check) if isinstance(self.check, Case) else _seeded(self)

    def mended(self) -> "Fault":
        """The same check of the right engine."""
        return Fault(f"{self.name}, mended", "Nothing.", self.check)


def _enumerated(fault: Fault, case: Case) -> Control:
    cell = examine(case, engine_class=fault.engine_class, wrap=fault.wrap)
    law_is_off = cell.total_variation > CAUGHT_EFFECT
    effect = cell.total_variation if law_is_off else cell.logprob_error
    what = "total variation" if law_is_off else "error of a log-probability"
    where = f"{cell.proposer}, {cell.law}, {cell.rule}"
    return Control(fault.name, fault.sentence, effect > CAUGHT_EFFECT, f"{what} in {where}", effect)


def _seeded(fault: Fault) -> Control:
    assert not isinstance(fault.check, Case), "an enumerated check"
    draws = {} if fault.draws_class is None else {"draws_class": fault.draws_class}
    findings = fault.check(engine_class=fault.engine_class, **draws)
    worst = min(findings, key=lambda finding: finding.p_value)
    return Control(
        fault.name, fault.sentence, worst.p_value < CAUGHT_LEVEL,
        f"p-value of {worst.name}", float(worst.effect), worst.p_value,
    )  # fmt: skip


def run_controls(on_control: Callable[[Control], None] = lambda _: None) -> list[Control]:
    """Every fault; one that is not caught makes the audit void. `on_control` hears of each."""
    controls: list[Control] = []
    for fault in FAULTS:
        controls.append(fault.control())
        on_control(controls[-1])
    return controls


FAULTS: tuple[Fault, ...] = (
    # ---- noise: seen by seeded streams
    Fault(
        "draft noise reused for the correction",
        "The uniform that drew a drafted token also draws its replacement.",
        partial(toy_findings, "position", 1, 1500),
        draws_class=CorrectionByDraftNoise,
    ),
    Fault(
        "acceptance uniform reused for the correction",
        "The uniform that refused a token, which is therefore large, draws its replacement.",
        partial(toy_findings, "position", 1, 2500),
        draws_class=CorrectionByCoin,
    ),
    Fault(
        "draft drawn with the target's noise",
        "A token is drafted by the uniform that later draws from the target at its position.",
        partial(stream_findings, 2000),
        draws_class=DraftByTargetNoise,
    ),
    Fault(
        "draft noise of a position reused in the next round",
        "A token that was drafted and cut off is drafted again by the same uniform.",
        partial(stream_findings, 2000),
        draws_class=DraftOfPosition,
    ),
    Fault(
        "coin of a position reused in the next round",
        "A coin that block verification has looked at decides about another draft.",
        partial(stream_findings, 2000),
        draws_class=CoinOfPosition,
    ),
    Fault(
        "zero-probability token accepted at u = 0",
        "The coin compares with <=, so a uniform of exactly 0 accepts what the target cannot emit.",
        refusal_at_zero,
        draws_class=InclusiveCoins,
    ),
    # ---- the rule: seen by the joint law
    Fault(
        "only the refused token's draft mass removed",
        "A replacement is drawn from the target less q at the refused token alone.",
        DENSE,
        judging(partial(by_position, replacement=only_the_refused)),
    ),
    Fault(
        "residual softmaxed",
        "The residual goes through a softmax, so tokens of residual 0 can be drawn.",
        DENSE,
        judging(partial(by_position, replacement=lambda p, q, x: residual(p, q, x).softmax(-1))),
    ),
    Fault(
        "residual ignores the draft",
        "A replacement is drawn from the target law itself.",
        DENSE,
        judging(partial(by_position, replacement=lambda p, q, x: p)),
    ),
    Fault(
        "always accept",
        "Every drafted token is kept.",
        DENSE,
        judging(partial(by_position, accept=lambda p, q, x: 1.0)),
    ),
    Fault(
        "argmax verification at T>0",
        "A drafted token is kept if it is the most probable one, else that one is emitted.",
        DENSE,
        judging(partial(by_position, accept=argmax_only, replacement=the_argmax)),
    ),
    Fault(
        "bonus drawn one position early",
        "After full acceptance the bonus is drawn from the law of the last drafted token.",
        DENSE,
        judging(partial(by_position, bonus_shift=-1)),
    ),
    Fault(
        "block verification stops at the first failure",
        "Block verification tosses its coins from the front and ends at the first tail.",
        BLOCK,
        judging(partial(by_block, stop_at_first_failure=True)),
    ),
    Fault(
        "siblings tested one by one against the whole target",
        "A child of a tree is accepted with p of it although its sibling was refused before.",
        TREE,
        judging(siblings_in_turn),
    ),
    Fault(
        "tree grown by looking at the target's draw",
        "When the target's draw is not in the tree, the tree is given up and the target drawn anew.",
        TREE,
        RegrowsTree,
    ),
    # ---- the draft
    Fault(
        "q reported is not q drawn",
        "The most probable token is drafted and reported as drawn from the whole draft law.",
        BLOCK,
        wrap=redrafting(most_probable_first),
    ),
    Fault(
        "old rollout taken as a sample of its counts",
        "What the history continued with most often is reported as freshly drawn from its counts.",
        Case("history_sampled", "plain"),
        wrap=redrafting(most_probable_first),
    ),
    Fault(
        "token dropped after being looked at",
        "The last drafted token is dropped because it turned out unlikely under the draft law.",
        BLOCK,
        wrap=redrafting(without_unlikely_end),
    ),
    # ---- the law of each position
    Fault(
        "penalties ignore earlier drafts",
        "All positions of a window are penalised for the tokens before the window only.",
        Case("dense", "frequency"),
        conditioned(lambda window: window[:1] * len(window)),
    ),
    Fault(
        "tree's penalties follow the window, not the path",
        "A node of a tree is penalised for its siblings as if they came before it.",
        Case("table_tree", "all penalties", draft_len=4),
        TreeAsChain,
    ),
    Fault(
        "filter applied to the bonus only",
        "Drafted tokens are judged by the unfiltered law.",
        Case("dense", "top-k"),
        conditioned(lambda window: [*map(unfiltered, window[:-1]), window[-1]]),
    ),
    Fault(
        "min_tokens not applied inside the window",
        "Stop ids are banned at the first position of a window only.",
        Case("dense", "min_tokens"),
        conditioned(lambda window: [*window[:1], *map(unbanned, window[1:])]),
    ),
    Fault(
        "grammar not applied to the bonus",
        "The bonus is drawn without the grammar's mask.",
        Case("dense", "grammar"),
        conditioned(lambda window: [*window[:-1], replace(window[-1], allowed=None)]),
    ),
    # ---- bookkeeping
    Fault(
        "rows of neighbours swapped",
        "Two rows of a batch are verified on each other's logits.",
        MIXED_BATCH,
        SwapsNeighbours,
    ),
    Fault(
        "cache keeps a tree's first nodes",
        "After a path of a tree was accepted, its first nodes stay in the cache instead.",
        LONG_TREE,
        KeepsFirstNodes,
    ),
    Fault(
        "stop inside an accepted run ignored",
        "Whether a row has ended is asked after the last token of a round only.",
        Case("dense", "stop"),
        with_rows(StopsAtRunEnd),
    ),
    Fault(
        "logprobs of the raw law",
        "Log-probabilities of the unfiltered law are recorded as those of the sampled law.",
        Case("dense", "top-k"),
        with_rows(RecordsRawLaw),
    ),
    Fault(
        "logprobs of accepted tokens set to 0",
        "An accepted token is recorded as certain.",
        Case("dense", "plain"),
        with_rows(RecordsZeros),
    ),
)
"""By what is wrong."""
