"""The policy's MTP head drafts (`rollout.mtp_policy`).

All rows go one token a forward, together, as in `proposers.lockstep`; a forward is one decoder block
and the rows of the output head that belong to the draft vocabulary. A row's first forward also runs
what was emitted since its last draft, with the hidden states that the policy computed for it.

Each token is drawn from the head's law under the row's temperature and filters, cut to the `width`
most probable ids: a sparse law, handed over as it was sampled from. Penalties, bans and grammars are
left to the verification: what they forbid is refused there. Greedy rows name the first argmax. A draft
ends where the head's own estimate that all of it is accepted falls below LEAST, which is decided before
the next token is drawn, and behind a token that ends the row.

As a tree (`propose_trees`, `proposers.mtp_trees`) the likeliest ids of each law are branches.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from proposers.mtp_trees import Tree, open_level
from rollout.conditions import Condition
from rollout.draft import NO_DRAFT, Draft, SparseLaw
from rollout.drafting import Drafting
from rollout.law import TargetLaws
from rollout.mtp_policy import MtpPolicy
from rollout.policy import ROOT, Scored, Window
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.scheduler import slot_of

WIDTH = 256
"""Ids that a token is drawn from, at most."""
LEAST = 0.05
"""No token is drawn behind a draft that is accepted whole with a smaller chance, by estimate."""


class Blend(Protocol):
    """What else has a say in the law that a token is drawn from (`proposers.mixture`)."""

    def __call__(
        self, row: Row, drafted: Sequence[int], head: SparseLaw
    ) -> tuple[SparseLaw, float]:
        """The law to draw from, and the estimate that what is drawn will be accepted."""
        ...


class MtpProposer:
    """Drafts with the MTP head of the engine's own policy. `blend` may change each law, by what is
    drafted before and by nothing that comes after."""

    def __init__(
        self, policy: MtpPolicy, *, width: int = WIDTH, blend: Blend | None = None
    ) -> None:
        self._policy, self._width, self.blend = policy, width, blend
        self._num_drafted = 0

    # ---- chains ---------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(rows)
        chains = {
            index: _Chain(row, max_len)
            for index, (row, max_len) in enumerate(zip(rows, max_lens, strict=True))
            if max_len and self._policy.drafts_behind(slot_of(row), len(row.token_ids))
        }
        live = list(chains.values())
        scored = self._policy.catch_up([(c.slot, c.row.token_ids) for c in live]) if live else None
        while scored is not None:
            going = self._extend(live, scored)
            live, scored = self._go_on(live, scored, going)
        for index, chain in chains.items():
            self._policy.forget_draft(chain.slot)
            drafts[index] = chain.drafting.done()
            self._num_drafted += len(drafts[index])
        return drafts

    def _extend(self, chains: Sequence["_Chain"], scored: Scored) -> list[bool]:
        """Adds a token to each chain; which of them go on."""
        laws = TargetLaws(scored.logits, [chain.condition for chain in chains])
        return [self._add(chain, laws, index) for index, chain in enumerate(chains)]

    def _add(self, chain: "_Chain", laws: TargetLaws, index: int) -> bool:
        if not laws.valid(index):
            return False
        if chain.row.request.sampling.greedy:
            return chain.name(self._ids[laws.pick(index, 0.0)])
        law = self._law(laws, index)
        if self.blend is None:
            return chain.draw(law, float(law.probs.max()))
        return chain.draw(*self.blend(chain.row, chain.drafting.token_ids, law))

    def _law(self, laws: TargetLaws, index: int) -> SparseLaw:
        probs = laws.probs(index).cpu().numpy()  # [D]; numpy has less to do for one row than torch
        width = min(self._width, len(probs))
        places = np.argpartition(probs, -width)[-width:]
        kept = probs[places].astype(np.float64)
        some = kept > 0
        places, kept = places[some], kept[some]
        return SparseLaw(self._ids[torch.from_numpy(places)], torch.from_numpy(kept / kept.sum()))

    def _go_on(
        self, chains: Sequence["_Chain"], scored: Scored, going: Sequence[bool]
    ) -> tuple[list["_Chain"], Scored | None]:
        """Runs the head behind the chains that go on."""
        kept = [index for index, goes in enumerate(going) if goes]
        live = [chains[index] for index in kept]
        if not live:
            return [], None
        windows = [chain.window(self._policy.num_run(chain.slot)) for chain in live]
        last = [chain.drafting.token_ids[-1] for chain in live]
        return live, self._policy.run_head(windows, scored.hidden[kept], last)

    # ---- trees ----------------------------------------------------------------------------

    @torch.inference_mode()
    def propose_trees(
        self, rows: Sequence[Row], max_nodes: Sequence[int], max_depths: Sequence[int]
    ) -> list[Draft]:
        drafts = [NO_DRAFT] * len(rows)
        trees: dict[int, Tree] = {}
        for index, (row, nodes, depth) in enumerate(zip(rows, max_nodes, max_depths, strict=True)):
            if nodes and depth and self._policy.drafts_behind(slot_of(row), len(row.token_ids)):
                trees[index] = Tree(slot_of(row), nodes, depth)
        if not trees:
            return drafts
        asked = [(tree.slot, rows[index].token_ids) for index, tree in trees.items()]
        scored, behind = self._policy.catch_up(asked), [(tree, ROOT) for tree in trees.values()]
        conditions = {tree.slot: condition_of(rows[index]) for index, tree in trees.items()}
        for depth in itertools.count(1):
            laws = TargetLaws(scored.logits, [conditions[tree.slot] for tree, _ in behind])
            for at, (tree, node) in enumerate(behind):
                if laws.valid(at):
                    tree.open(node, laws.probs(at), self._ids, scored.hidden[at : at + 1])
            level = open_level(self._policy, list(trees.values()), depth)
            if level is None:
                break
            behind, scored = level
        for index, tree in trees.items():
            drafts[index] = tree.draft()
            self._num_drafted += len(drafts[index])
        return drafts

    @property
    def _ids(self) -> torch.Tensor:
        """[D] the draft vocabulary."""
        assert self._policy.weights is not None, "no weights are in force"
        return self._policy.weights.vocabulary

    # ---- the protocol ---------------------------------------------------------------------

    def observe(self, rows: Sequence[Row]) -> None:
        pass

    def finish(self, row: Row) -> None:
        pass

    def publish(self, version: int) -> None:
        pass

    def gauges(self) -> Mapping[str, float]:
        return {"mtp/tokens": float(self._num_drafted)}


class _Chain:
    """One row's draft as it grows."""

    def __init__(self, row: Row, max_len: int) -> None:
        self.row, self.slot = row, slot_of(row)
        self.condition = condition_of(row)
        self.drafting = Drafting(row, max_len)
        self._ends, self._reached = row.draft_end(), 1.0

    def name(self, token: torch.Tensor) -> bool:
        """Adds a token without randomness; whether there is more to draft."""
        self.drafting.point(int(token))
        return self._goes_on(int(token))

    def draw(self, law: SparseLaw, chance: float) -> bool:
        """Adds a token of the law, by estimate accepted with `chance`; whether there is more to
        draft."""
        self._reached *= chance
        return self._goes_on(self.drafting.sample(law, chance))

    def _goes_on(self, token: int) -> bool:
        return bool(self.drafting.room) and self._reached > LEAST and not self._ends(token)

    def window(self, num_run: int) -> Window:
        """What the head runs behind the last token: an entry behind those it has."""
        drafted = self.drafting.token_ids
        return Window(self.slot, num_run + len(drafted) - 1, (drafted[-1],), num_logits=1)


def condition_of(row: Row) -> Condition:
    """What of a row's sampling acts on the head's logits, whose ids are not the target's."""
    sampling = row.request.sampling
    return Condition(
        SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
    )
