"""Whoever guesses the next tokens, one file a proposer; `rollout.proposer` is their protocol.

draft_model       what a smaller checkpoint of the same vocabulary goes on with
history           what this run's other rollouts of the same prompt went on with
history_kernels   looking that up in compiled code
history_law       the law of the next token, from what followed before
history_rollouts  the rollouts it is read from, in bounded memory
history_state     the same as tensors, for checkpoints and other actors
lockstep          drafting by a model: all rows one token a forward, together
mixture           history and MTP head on one chain, weighed by what was accepted
mtp               what the policy's MTP head goes on with
mtp_trees         the same as trees, grown level by level
ngram             what the row itself went on with after the same tokens
none              no drafts
self_draft        what the policy's own quantised weights go on with
"""

__all__ = [
    "draft_model", "history", "history_kernels", "history_law", "history_rollouts", "history_state",
    "lockstep", "mixture", "mtp", "mtp_trees", "ngram", "none", "self_draft",
]  # fmt: skip
