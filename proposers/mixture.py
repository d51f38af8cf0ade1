"""The run's history and the policy's MTP head draft together, on one chain.

Each token is drawn from q = w h + (1 - w) m, with h what `proposers.history` saw following the row's
last tokens and m the head's law (`proposers.mtp`): where the row retraces earlier rollouts the history
is sharper, elsewhere the head knows more. A mixture that is handed over as it was sampled from is a
draft law like any other.

The weight w is learnt online, by how much of its law the history is sure of (the law leaves mass to
what was never seen; a longer match leaves less). The rate at which drafts from q are accepted is

    sum_x min(p(x), q(x)) = E_{x ~ p} min(1, q(x) / p(x)),

and the emitted tokens are draws from p whose p(x) is recorded. So every token that was emitted where a
draft reached says what each of a few weights would have been accepted with, without bias and whatever
weight was in force, and the best one is taken. Weights rest on rounds that are over: a draft does not
depend on what decides about it.

Trees and the sharing of what is remembered are the history's alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from proposers.history import HistoryProposer
from proposers.mtp import MtpProposer
from rollout.draft import Draft, SparseLaw
from rollout.row import Row

WEIGHTS = np.linspace(0.0, 1.0, 11)
"""Weights of the history that are compared."""
BANDS = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97)
"""Edges of the bands of mass that the history's law has seen; each band has a weight."""
FORGET = 0.999
"""Weight that a band's evidence keeps after the next token."""
PRIOR_TOKENS = 8.0
"""For how many tokens the first belief counts: that the history's mass is its weight."""


class MixtureWeights:
    """The weight of the history by band, from what was emitted."""

    def __init__(self) -> None:
        middles = [(low + high) / 2 for low, high in zip((0.0, *BANDS), (*BANDS, 1.0))]
        self._tokens = np.full(len(middles), PRIOR_TOKENS)
        self._accepted = np.array(  # [bands, weights]
            [PRIOR_TOKENS * (0.5 - 0.5 * np.abs(WEIGHTS - middle)) for middle in middles]
        )

    def weight(self, mass: float) -> float:
        """Of a history whose law has seen so much."""
        return float(WEIGHTS[int(self._accepted[_band(mass)].argmax())])

    def learn(self, mass: float, target: float, history: float, head: float) -> None:
        """A token was emitted that has these probabilities under the target, the history's law made
        whole, and the head's."""
        band = _band(mass)
        accepted = np.minimum(1.0, (WEIGHTS * history + (1.0 - WEIGHTS) * head) / target)
        self._tokens[band] = FORGET * self._tokens[band] + 1.0
        self._accepted[band] = FORGET * self._accepted[band] + accepted

    def expected(self, mass: float) -> float:
        """How often a token drawn with the weight in force is accepted."""
        band = _band(mass)
        return float(self._accepted[band].max() / self._tokens[band])


def _band(mass: float) -> int:
    return sum(mass >= edge for edge in BANDS)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What went into the law of one drafted token."""

    mass: float
    history: dict[int, float]
    head: SparseLaw


@dataclass(slots=True)
class _Draft:
    """What a row was offered in this round."""

    start: int
    """Position of its first token."""
    parts: list[_Parts] = field(default_factory=list)


class MixtureProposer:
    """Drafts with both. Where the head has nothing to go on, right behind a prompt or a swap, the
    history drafts alone."""

    def __init__(self, history: HistoryProposer, head: MtpProposer) -> None:
        self._history, self._head = history, head
        self._weights = MixtureWeights()
        self._drafts: dict[int, _Draft] = {}  # by serial
        head.blend = self._blend

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        self._drafts = {}
        drafts = self._head.propose(rows, max_lens)
        left = [0 if draft else max_len for draft, max_len in zip(drafts, max_lens)]
        alone = self._history.propose(rows, left) if any(left) else drafts
        return [draft or other for draft, other in zip(drafts, alone)]

    def _blend(self, row: Row, drafted: Sequence[int], head: SparseLaw) -> tuple[SparseLaw, float]:
        history = dict(self._history.continuations(row, drafted))
        mass = sum(history.values())
        offered = self._drafts.setdefault(row.serial, _Draft(len(row.token_ids)))
        whole = {token: chance / mass for token, chance in history.items()}
        offered.parts.append(_Parts(mass, whole, head))
        law = mixed(whole, head, self._weights.weight(mass)) if history else head
        return law, self._weights.expected(mass)

    def observe(self, rows: Sequence[Row]) -> None:
        self._history.observe(rows)
        for row in rows:
            if (offered := self._drafts.pop(row.serial, None)) is not None:
                self._learn(row, offered)

    def _learn(self, row: Row, offered: _Draft) -> None:
        """By the tokens emitted where the draft reached. Greedy rows have no law to learn from."""
        if row.request.sampling.greedy:
            return
        emitted = row.token_ids[offered.start :]
        logprobs = row.logprobs[offered.start - row.prompt_len :]
        for token, logprob, parts in zip(emitted, logprobs, offered.parts):
            head = float(parts.head.probs[parts.head.ids == token].sum())
            history = parts.history.get(token, 0.0)
            self._weights.learn(parts.mass, math.exp(logprob), history, head)

    # ---- the protocol ---------------------------------------------------------------------

    def propose_trees(
        self, rows: Sequence[Row], max_nodes: Sequence[int], max_depths: Sequence[int]
    ) -> list[Draft]:
        self._drafts = {}
        return self._history.propose_trees(rows, max_nodes, max_depths)

    def finish(self, row: Row) -> None:
        self._drafts.pop(row.serial, None)
        self._history.finish(row)
        self._head.finish(row)

    def publish(self, version: int) -> None:
        self._history.publish(version)
        self._head.publish(version)

    def gauges(self) -> Mapping[str, float]:
        return {**self._history.gauges(), **self._head.gauges()}

    def remember(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float] = (),
    ) -> None:
        """Takes in a finished rollout from elsewhere (`HistoryProposer.remember`)."""
        self._history.remember(prompt_ids, token_ids, logprobs)

    def export(self) -> dict[str, torch.Tensor]:
        return self._history.export()

    def export_new(self) -> dict[str, torch.Tensor]:
        return self._history.export_new()

    def export_told(self) -> dict[str, torch.Tensor]:
        return self._history.export_told()

    def merge(self, exported: Mapping[str, torch.Tensor]) -> None:
        self._history.merge(exported)


def mixed(history: Mapping[int, float], head: SparseLaw, weight: float) -> SparseLaw:
    """weight * history + (1 - weight) * head, both of sum 1, over the ids of either that get mass."""
    told = np.fromiter(history.values(), float, len(history))
    ids = np.concatenate([np.fromiter(history, np.int64, len(history)), head.ids.numpy()])
    distinct, place = np.unique(ids, return_inverse=True)
    probs = np.concatenate([weight * told, (1.0 - weight) * head.probs.numpy()])
    summed = np.bincount(place, probs)
    some = summed > 0.0
    return SparseLaw(torch.from_numpy(distinct[some]), torch.from_numpy(summed[some]))
