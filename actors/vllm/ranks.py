"""The ranks of a model that is split over several workers (tensor parallelism): the first one leads.

Every rank computes its part of each forward, and vLLM gives the logits to all of them. The leader alone
has the rows: what it emits depends on times that it measured, by way of the draft lengths, so ranks
that each decided would go apart. The others are told the tokens and nothing else; drafts reach them
with vLLM's scheduler, as every rank's.
"""

from collections.abc import Callable

from vllm.distributed import get_tp_group

Emitted = list[list[int]]


def num_ranks() -> int:
    return int(get_tp_group().world_size)


def leads() -> bool:
    """This process has the rows."""
    return int(get_tp_group().rank_in_group) == 0


def emitted_by_all(decide: Callable[[], Emitted]) -> Emitted:
    """The leader's tokens of each request, on every rank. Where the leader fails the others raise
    RuntimeError, so that none waits for it."""
    group = get_tp_group()
    emitted: Emitted | None = None
    if leads():
        try:
            emitted = decide()
        finally:
            group.broadcast_object(emitted)  # None where it failed
    else:
        emitted = group.broadcast_object()
    if emitted is None:
        raise RuntimeError("the first rank emitted nothing; its own error says why")
    return emitted
