"""Draft trees from an MTP head, level by level.

A node is a token with the estimate that the target gets to it, the product of the head's
probabilities along its path; the tree is the `max_nodes` likeliest, as in `rollout.draft_tree`. There a
node opens by a look-up; here it takes a forward, so all nodes of a level that are among the likeliest
so far are opened in one, as a tree window that holds their ancestors too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rollout.draft import NO_DRAFT, Draft
from rollout.mtp_policy import MtpPolicy
from rollout.policy import ROOT, Scored, Window

BRANCHES = 8
"""Continuations of a node that are thought of."""


@dataclass(slots=True)
class _Node:
    token: int
    parent: int
    """Index of the node before it, ROOT for the row's last token."""
    depth: int
    reached: float
    hidden: torch.Tensor  # [1, H] of what is before it, the head's input


@dataclass(slots=True)
class Tree:
    """One row's tree as it grows."""

    slot: int
    max_nodes: int
    max_depth: int
    nodes: list[_Node] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    """Nodes that the head was run behind, parents first."""

    def open(
        self, parent: int, probs: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Adds the likeliest continuations of a node: its law [D] over `ids` and the head's output
        [1, H] behind it."""
        depth, reached = 0, 1.0
        if parent != ROOT:
            depth, reached = self.nodes[parent].depth, self.nodes[parent].reached
        top = probs.topk(min(BRANCHES, len(probs)))
        for at, prob in zip(top.indices.tolist(), top.values.tolist()):
            if prob > 0:
                node = _Node(int(ids[at]), parent, depth + 1, reached * prob, hidden)
                self.nodes.append(node)

    def likeliest(self) -> list[int]:
        """The nodes of the tree so far, parents first: none is likelier than its parent."""
        order = sorted(range(len(self.nodes)), key=lambda i: (-self.nodes[i].reached, i))
        return order[: self.max_nodes]

    def next_level(self, depth: int) -> list[int]:
        """Nodes of a depth that are worth opening."""
        if depth >= self.max_depth:
            return []
        return [index for index in self.likeliest() if self.nodes[index].depth == depth]

    def window(self, level: Sequence[int], num_run: int) -> Window:
        """What opens a level: the nodes opened before and these."""
        self.opened += level
        place = {index: at for at, index in enumerate(self.opened)}
        run = [self.nodes[index] for index in self.opened]
        parents = tuple(ROOT if node.parent == ROOT else place[node.parent] for node in run)
        ids = tuple(node.token for node in run)
        return Window(self.slot, num_run, ids, num_logits=len(level), parents=parents)

    def inputs(self) -> torch.Tensor:
        """[n, H] what the head takes at the tokens of the last window."""
        return torch.cat([self.nodes[index].hidden for index in self.opened])

    def draft(self) -> Draft:
        chosen = self.likeliest()
        if not chosen:
            return NO_DRAFT
        place = {index: at for at, index in enumerate(chosen)}
        nodes = [self.nodes[index] for index in chosen]
        parents = [ROOT if node.parent == ROOT else place[node.parent] for node in nodes]
        return Draft.tree([node.token for node in nodes], parents)


def open_level(
    policy: MtpPolicy, trees: Sequence[Tree], depth: int
) -> tuple[list[tuple[Tree, int]], Scored] | None:
    """Runs the head behind the nodes of a depth that are worth it: the nodes and what it says behind
    each; None where there are none."""
    levels = [(tree, tree.next_level(depth)) for tree in trees]
    levels = [(tree, level) for tree, level in levels if level]
    if not levels:
        return None
    windows = [tree.window(level, policy.num_run(tree.slot)) for tree, level in levels]
    hidden = torch.cat([tree.inputs() for tree, _ in levels])
    next_ids = [token for window in windows for token in window.token_ids]
    scored = policy.run_head(windows, hidden, next_ids)
    for tree, _ in levels:
        policy.forget_draft(tree.slot)
    return [(tree, index) for tree, level in levels for index in level], scored
