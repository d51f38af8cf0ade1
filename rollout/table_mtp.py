"""A policy and its MTP head that are tables: the fake of `rollout.mtp_policy`.

The head's table sees the tokens that its positions stand for, the first one that the row drew and those
behind it, and is over the whole vocabulary of the target, of which `vocabulary` names what may be
drafted.
"""

from collections.abc import Mapping, Sequence

import torch

from rollout.decoder import DecoderConfig
from rollout.mtp_policy import MtpPolicy, MtpWeights
from rollout.policy import Scored, Window
from rollout.table_policy import Table, TablePolicy

CONFIG = DecoderConfig(
    architecture="table", vocab_size=1, hidden_size=1, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=1, intermediate_size=1, norm_eps=1e-6, inv_freq=(), rope_scale=1.0, qkv_bias=False,
    qk_norm=False, tied_head=True, max_context_len=1, eos_token_ids=(),
)  # fmt: skip
"""Hidden states of one number."""


class _HeadTable(TablePolicy):
    vocabulary: Sequence[int] = ()

    def score_hidden(self, windows: Sequence[Window], inputs: torch.Tensor | None = None) -> Scored:
        scored = super().score_hidden(windows, inputs)
        return Scored(scored.logits[:, list(self.vocabulary)], scored.hidden)


def table_mtp(
    target: Table,
    head: Table,
    vocabulary: Sequence[int],
    *,
    vocab_size: int,
    num_slots: int = 8,
    context_len: int = 64,
    max_cached_tokens: int | None = None,
) -> MtpPolicy:
    """The two with their tables in force; the cap is the target's."""
    drafting = _HeadTable(head, vocab_size=vocab_size, num_slots=num_slots, context_len=context_len)
    drafting.vocabulary = vocabulary
    verifying = TablePolicy(
        target,
        vocab_size=vocab_size,
        num_slots=num_slots,
        context_len=context_len,
        max_cached_tokens=max_cached_tokens,
    )
    policy = MtpPolicy(verifying, drafting, CONFIG, _as_it_is)
    policy.swap(table_weights(target, head, vocabulary))
    return policy


def table_weights(target: Table, head: Table, vocabulary: Sequence[int]) -> MtpWeights:
    """An update of both."""
    one = torch.ones(1)
    ids = torch.tensor(list(vocabulary))
    return MtpWeights(target, head, one, one, torch.zeros(1, 2), ids, version=0)


def _as_it_is(named: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return named
