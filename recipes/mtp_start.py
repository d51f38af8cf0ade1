"""An MTP head for a run that brings none: begun from the policy, to be trained along with it.

It is the policy's last layer behind a projection that is fitted to some texts of the task
(`recipes.mtp_trunk.fit_projection`). Its draft vocabulary is fixed for the run before there are
rollouts to count tokens of: the ids of these texts, then the lowest ids of the tokenizer, which are
frequent ones, since a byte-pair encoding numbers its merges by frequency.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from recipes.mtp_head import MtpHead
from recipes.mtp_trunk import Trunk, fit_projection
from rollout.checkpoint import read_config

DRAFT_VOCAB = 4096


def new_head(
    folder: Path, texts: Sequence[Sequence[int]], draft_vocab: int = DRAFT_VOCAB
) -> dict[str, torch.Tensor]:
    """Tensors of a head for the model of a folder, at version 0; `texts` are ids, two or more each."""
    config, trunk = read_config(folder), Trunk(folder)
    size = min(draft_vocab, config.vocab_size)
    chosen = dict.fromkeys([*(id_ for text in texts for id_ in text), *range(config.vocab_size)])
    vocabulary = torch.tensor(sorted(list(chosen)[:size]))
    head = MtpHead.from_policy(trunk.weights(), config, vocabulary)
    readings = [trunk.read(text[:1], [text[1:]])[0] for text in texts]
    fit_projection(head, readings, trunk.embedding)
    return head.tensors(version=0)
