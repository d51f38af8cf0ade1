"""Whoever guesses the next tokens, one file a proposer; `rollout.proposer` is their protocol.

history  what this run's other rollouts of the same prompt went on with
ngram    what the row itself went on with after the same tokens
none     no drafts
"""

__all__ = ["history", "ngram", "none"]
