"""Models that draft, over tables: a draft model, and a target with a twin over one cache."""

from typing import Any

from proposers.draft_model import DraftModelProposer
from proposers.self_draft import SelfDraftProposer
from rollout.lossless_policy import LosslessPolicy, TwinWeights
from rollout.native_engine import NativeEngine
from rollout.table_policy import Table, TablePolicy
from tests.rollout.engines import table_engine

NAMES = ("draft_model", "self_draft")


def draft_model(
    table: Table,
    vocab_size: int,
    *,
    target_size: int | None = None,
    num_ids: int | None = None,
    num_slots: int = 8,
    context_len: int = 64,
    **options: Any,
) -> DraftModelProposer:
    policy = TablePolicy(table, vocab_size=vocab_size, num_slots=num_slots, context_len=context_len)
    return DraftModelProposer(
        policy, vocab_size=target_size or vocab_size, num_ids=num_ids or vocab_size, **options
    )


def twins(target: Table, draft: Table, vocab_size: int, **sizes: Any) -> LosslessPolicy:
    policy = TablePolicy(target, vocab_size=vocab_size, **sizes)
    return LosslessPolicy(policy, policy.sharing_cache(draft), dict)


def model_engine(
    name: str, target: Table, draft: Table, vocab_size: int, *, draft_len: int, **options: Any
) -> NativeEngine:
    """An engine at version 0 that drafts from a table, as a draft model or of itself."""
    names = ["num_slots", "context_len"] + ["max_cached_tokens"] * (name == "self_draft")
    sizes: dict[str, Any] = {key: options[key] for key in names if key in options}
    options["draft_len"] = draft_len
    if name == "draft_model":
        proposer = draft_model(draft, vocab_size, **sizes)
        return table_engine(target, vocab_size, proposer=proposer, **options)
    policy: Any = twins(target, draft, vocab_size, **sizes)
    engine = table_engine(
        target, vocab_size, policy=policy, proposer=SelfDraftProposer(policy), **options
    )
    engine.load(TwinWeights(target, draft), version=0, digest="table")
    return engine
