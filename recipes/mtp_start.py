"""An MTP head for a run that brings none: untrained, to be trained along with the policy.

It starts as the policy's last layer (`MtpHead.from_policy`). Its draft vocabulary is fixed for the run
before there are rollouts to count tokens of: the ids of some texts of the task, then the lowest ids of
the tokenizer, which are frequent ones, since a byte-pair encoding numbers its merges by frequency.
"""

from collections.abc import Iterable
from pathlib import Path

import torch

from recipes.mtp_head import MtpHead
from rollout.checkpoint import read_config, read_weights

DRAFT_VOCAB = 4096


def new_head(
    folder: Path, ids: Iterable[int], draft_vocab: int = DRAFT_VOCAB
) -> dict[str, torch.Tensor]:
    """Tensors of a head for the model of a folder, at version 0."""
    config = read_config(folder)
    size = min(draft_vocab, config.vocab_size)
    chosen = set(list(dict.fromkeys(ids))[:size])
    lowest = (id_ for id_ in range(config.vocab_size) if id_ not in chosen)
    while len(chosen) < size:
        chosen.add(next(lowest))
    vocabulary = torch.tensor(sorted(chosen))
    return MtpHead.from_policy(read_weights(folder), config, vocabulary).tensors(version=0)
