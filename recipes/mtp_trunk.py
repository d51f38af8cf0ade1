"""What an MTP head is taught from recorded rollouts: one pass of the policy over them, in float32.

The pass is most of the cost of training a head: it runs the whole policy once a token. A prompt runs
once for its rollouts. Kept of each token are the hidden state behind the final norm, the input of the
last layer, and, once the draft vocabulary is known, the law on it (in bf16).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from recipes.mtp_head import MtpHead
from recipes.mtp_training import Response, Shared

MASS_POSITIONS = 1500
"""Positions whose whole laws have a say in which ids may be drafted."""
RIDGE = 1e-2
"""Of the first projection, whose inputs have mean squares near 1."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One response of n tokens, read by the policy; state i foretold token i."""

    token_ids: torch.Tensor  # [n]
    hidden: torch.Tensor  # [n, H] behind the final norm
    last_input: torch.Tensor  # [n, H] of the last layer


class Trunk:
    """The policy in a model folder, in float32."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, local_files_only=True
        ).eval()
        self.embedding: torch.Tensor = self._model.get_input_embeddings().weight.detach()
        self.output: torch.Tensor = self._model.get_output_embeddings().weight.detach()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self._model.named_parameters()}

    @torch.no_grad()
    def read(self, prompt: Sequence[int], rollouts: Sequence[Sequence[int]]) -> list[Reading]:
        """Readings of some non-empty responses to a prompt, in order."""
        ids = [torch.tensor(list(rollout)) for rollout in rollouts]
        cache = DynamicCache()
        behind = self._pass(torch.tensor([list(prompt)]), cache)
        cache.batch_repeat_interleave(len(ids))
        inside = self._pass(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), cache)
        states = [  # [B, n + 1, H]
            torch.cat([before[:, -1:].expand(len(ids), -1, -1), after], dim=1)
            for before, after in zip(behind, inside)
        ]
        # Copies: a view would keep the padded whole.
        return [
            Reading(row_ids, *(of[row, : len(row_ids)].clone() for of in states))
            for row, row_ids in enumerate(ids)
        ]

    def _pass(self, ids: torch.Tensor, cache: DynamicCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and inputs of the last layer, [B, n, H] each, of ids [B, n] behind a cache. No
        mask: rows are padded behind their end."""
        decoder, taken = self._model.base_model, list[torch.Tensor]()
        hook = decoder.layers[-1].register_forward_pre_hook(
            lambda _, arguments: taken.append(arguments[0])
        )
        try:
            # By place: the name of the cache's argument is about to change in transformers.
            out = decoder(ids, None, None, cache, use_cache=True)
        finally:
            hook.remove()
        return out.last_hidden_state, taken[0]

    def shared(self, vocabulary: torch.Tensor, temperature: float) -> Shared:
        return Shared(self.embedding, self.output[vocabulary], temperature)

    @torch.no_grad()
    def law(self, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
        """The whole law behind states [n, H]."""
        return (hidden @ self.output.T / temperature).softmax(-1)

    def responses(
        self, readings: Sequence[Reading], vocabulary: torch.Tensor, temperature: float
    ) -> list[Response]:
        """Readings with their laws on a draft vocabulary."""

        def law(hidden: torch.Tensor) -> torch.Tensor:
            parts = [self.law(part, temperature)[:, vocabulary] for part in hidden.split(256)]
            return torch.cat(parts).bfloat16()

        return [Response(r.token_ids, r.hidden, law(r.hidden)) for r in readings]

    def draft_vocabulary(
        self, readings: Sequence[Reading], size: int, temperature: float, seed: int = 0
    ) -> torch.Tensor:
        """The `size` ids that come up most, sorted: how often each was drawn, and for those that were
        rarely or never drawn how much mass the policy gave them at some of the positions."""
        drawn = torch.cat([reading.token_ids for reading in readings])
        expected = torch.bincount(drawn, minlength=len(self.output)).float()
        hidden = torch.cat([reading.hidden for reading in readings])
        generator = torch.Generator().manual_seed(seed)
        some = hidden[torch.randperm(len(hidden), generator=generator)[:MASS_POSITIONS]]
        for part in some.split(256):
            expected += self.law(part, temperature).sum(0)
        return expected.topk(min(size, len(expected))).indices.sort().values


@torch.no_grad()
def fit_projection(head: MtpHead, readings: Sequence[Reading], embedding: torch.Tensor) -> None:
    """Sets the projection to the ridge regression of the last layer's input on what the head sees one
    token before. With a block that is a copy of the last layer the head then starts as the policy
    would, had it not run the layers below it on the newest token."""
    eps, size = head.config.norm_eps, head.config.hidden_size
    gram = torch.zeros(2 * size, 2 * size, dtype=torch.float64)
    cross = torch.zeros(2 * size, size, dtype=torch.float64)
    num = 0
    for reading in readings:
        next_ids = reading.token_ids[:-1]
        states, embedded = reading.hidden[:-1], F.embedding(next_ids, embedding)
        joint = [F.rms_norm(x, (size,), None, eps) for x in (states, embedded)]
        seen = torch.cat(joint, dim=-1)  # [n - 1, 2H]
        gram += (seen.T @ seen).double()
        cross += (seen.T @ reading.last_input[1:]).double()
        num += len(next_ids)
    if num:
        ridge = RIDGE * num * torch.eye(2 * size, dtype=torch.float64)
        head.proj.weight.copy_(torch.linalg.solve(gram + ridge, cross).T.float())
