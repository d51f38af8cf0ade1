"""Exact verification: how much of a draft the target law keeps, and what is emitted behind it.

p = target, q = draft. Three rules, each with the emitted law p; `verify` takes the one for a draft:

- `rollout.verify_points`     point masses and trees of them, where no rule can do better;
- `rollout.verify_block`      drafts with sampled tokens: never accepts fewer in expectation than
- `rollout.verify_positions`  its simpler alternative.

The target law at a position is looked at only when verification gets there, a full row of it only
where a sampled token was refused.

How many tokens are accepted can be foretold from the laws: observed minus expected accepted length
has mean zero whatever came before (a martingale difference), if tokens were drawn from the laws
handed over and accepted by the rule. For sampled tokens that takes rows of the vocabulary, so it is
worked out where `foretell` asks for it; for point masses it is free.
"""

from typing import Literal

from rollout.draft import Draft
from rollout.law import TargetLaws
from rollout.streams import Draws
from rollout.verdict import Verdict
from rollout.verify_block import verify_block
from rollout.verify_points import verify_points
from rollout.verify_positions import verify_positions

Rule = Literal["block", "position"]
"""How drafts with sampled tokens are verified; point masses have one rule."""


def verify(
    laws: TargetLaws,
    first: int,
    draft: Draft,
    draws: Draws,
    start: int,
    *,
    rule: Rule = "block",
    foretell: bool = True,
) -> Verdict:
    """Verifies one row's draft. Index `first` of `laws` is the position before any draft token,
    first + 1 + i the one behind draft token i; `start` is the sequence position of the first.

    Raises InvalidLogits when a position that is reached has no law.
    """
    if draft.deterministic:
        return verify_points(laws, first, draft, draws, start)
    by_rule = verify_block if rule == "block" else verify_positions
    return by_rule(laws, first, draft, draws, start, foretell=foretell)
