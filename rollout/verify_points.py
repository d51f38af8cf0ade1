"""Verification of point masses, chain or tree: plain decoding that finds its forwards already made.

At each node y is drawn from the target law p by the position's own uniform; if a child of the node
is y, the walk goes on there, else y is emitted and the round ends. The drawn tokens are those of
plain decoding, so the emitted law is p whatever was proposed, and a seed gives the same tokens with
any draft or none. A set of children S is accepted with probability p(S), the most that any rule
can accept for candidates chosen without randomness (SpecInfer, arXiv:2305.09781, naive sampling of
the target; position-wise verification with q = 1 on a chain).
"""

from collections.abc import Sequence

from rollout.draft import Draft
from rollout.law import TargetLaws
from rollout.streams import Draws
from rollout.verdict import Foretold, Origin, Verdict


def verify_points(laws: TargetLaws, first: int, draft: Draft, draws: Draws, start: int) -> Verdict:
    """See `rollout.verify.verify`; every law of the draft is a point mass."""
    children = _children(draft)
    path: list[int] = []
    mean = variance = 0.0
    node, num_reached = -1, 0
    while True:
        index = first + 1 + node
        laws.check(index)
        here = children.get(node, {})
        num_reached += bool(here)
        covered = min(1.0, sum(laws.prob(index, token) for token in here))
        mean += covered
        variance += covered * (1 - covered)
        drawn = draws.target(laws, index, start + len(path))
        if drawn not in here:
            origin: Origin = "correction" if here else "bonus" if path else "plain"
            return Verdict(tuple(path), drawn, origin, Foretold(mean, variance), num_reached)
        node = here[drawn]
        path.append(node)


def _children(draft: Draft) -> dict[int, dict[int, int]]:
    """Node -> token -> child; the root is -1."""
    parents: Sequence[int] = range(-1, len(draft) - 1) if draft.parents is None else draft.parents
    children: dict[int, dict[int, int]] = {}
    for node, (token, parent) in enumerate(zip(draft.token_ids, parents)):
        children.setdefault(parent, {})[token] = node
    return children
