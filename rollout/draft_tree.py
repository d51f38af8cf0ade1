"""Growing a deterministic draft tree: the most probable continuations first.

Nodes are added in order of the estimated probability that the target gets there, the product of the
estimates along the path, until the budget is spent. For estimates that are right this is the tree of
its size with the largest expected accepted length (Sequoia, arXiv:2402.12374, without a bound on the
width). The shape depends on the proposer's estimates alone, never on the target's randomness, which
is all that exactness asks; a wrong estimate costs tokens that are verified in vain.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from rollout.draft import NO_DRAFT, Draft

State = TypeVar("State")
Continuations = Callable[[State], Iterable[tuple[int, float, State]]]
"""State of a node -> (token, estimated probability after the node, state behind the token)."""


def grow_tree(
    root: State, continuations: Continuations[State], *, max_nodes: int, max_depth: int
) -> Draft:
    """Best-first tree of at most `max_nodes` tokens and `max_depth` levels."""
    order = itertools.count()
    frontier: list[tuple[float, int, int, int, int, State]] = []
    token_ids: list[int] = []
    parents: list[int] = []

    def open_children(parent: int, depth: int, chance: float, state: State) -> None:
        if depth == max_depth:
            return
        for token, probability, behind in continuations(state):
            reached = chance * probability
            heapq.heappush(frontier, (-reached, next(order), parent, depth + 1, token, behind))

    open_children(-1, 0, 1.0, root)
    while frontier and len(token_ids) < max_nodes:
        minus_chance, _, parent, depth, token, state = heapq.heappop(frontier)
        token_ids.append(token)
        parents.append(parent)
        open_children(len(token_ids) - 1, depth, -minus_chance, state)
    return Draft.tree(token_ids, parents) if token_ids else NO_DRAFT


def most_probable(probs: torch.Tensor, width: int) -> Sequence[tuple[int, float]]:
    """(token, probability) of the `width` most probable ids of a law [V], as a head's top-k."""
    top = probs.topk(min(width, probs.shape[0]))
    return list(zip(top.indices.tolist(), top.values.tolist()))
