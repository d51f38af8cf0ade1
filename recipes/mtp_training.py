"""Training an MTP head on responses of its policy: the loss, and the steps.

At each position the head is taught the whole law that the policy has there, not the token that was
drawn: with p the policy's law at the rollout temperature and q the head's, over the draft vocabulary,

    cross-entropy     - sum_x p(x) log q(x)
    total variation   1 - sum_x min(p(x), q(x))

The second is the chance that a token drawn from q is refused (Leviathan et al., arXiv:2211.17192,
theorem 3.5), so what is to be had in the end; its gradient is weak far from the goal, so the first
leads there. Depth k of the recursion weighs `DEPTH_DECAY` to the power of k - 1.

Hidden states, laws, embeddings and output head come from the policy without gradients: the policy does
not know that it is being imitated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from recipes.mtp_head import MtpHead

DEPTH_DECAY = 0.7
MAX_GRAD_NORM = 1.0
BETAS = (0.9, 0.95)
Loss = Literal["cross_entropy", "total_variation"]


@dataclass(frozen=True, slots=True)
class Response:
    """One response of n tokens, and what the policy made of it."""

    token_ids: torch.Tensor  # [n]
    hidden: torch.Tensor  # [n, H] behind the final norm; state i is that which foretold token i
    law: torch.Tensor  # [n, V] probabilities of the draft vocabulary; law i is that of token i


@dataclass(frozen=True, slots=True)
class Shared:
    """What a head uses of its policy."""

    embedding: torch.Tensor  # [vocabulary, H]
    output: torch.Tensor  # [V, H] rows of the output head that belong to the draft vocabulary
    temperature: float


@dataclass(frozen=True, slots=True)
class DepthLaws:
    """Both laws at the positions of one depth, P of them."""

    logits: torch.Tensor  # [P, V] of the head, over the temperature
    law: torch.Tensor  # [P, V]

    def loss(self, kind: Loss) -> torch.Tensor:
        """Sum over the positions."""
        if kind == "cross_entropy":
            return -(self.law * self.logits.log_softmax(-1)).sum()
        return len(self.law) - self.accepted()

    def accepted(self) -> torch.Tensor:
        """Sum over the positions of the chance that a token of the head's law is accepted."""
        return torch.minimum(self.law, self.logits.softmax(-1)).sum()


def depth_laws(
    head: MtpHead, shared: Shared, responses: Sequence[Response], depths: int
) -> list[DepthLaws]:
    """The head run over whole responses; depth k has no law for those of k tokens or fewer."""
    lens = torch.tensor([len(r.token_ids) for r in responses])
    ids = _padded([r.token_ids for r in responses])  # [B, T]
    hidden = _padded([r.hidden for r in responses])  # [B, T, H]
    law = _padded([r.law for r in responses])  # [B, T, V]
    outputs = head(hidden, F.embedding(ids, shared.embedding), min(depths, ids.shape[1]))
    laws = []
    for depth, output in enumerate(outputs, start=1):
        real = torch.arange(depth, ids.shape[1]) < lens[:, None]  # [B, T - depth]
        logits = output[:, :-1][real] @ shared.output.T / shared.temperature
        laws.append(DepthLaws(logits, law[:, depth:][real].float()))
    return laws


def _padded(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)


@torch.no_grad()
def acceptance(
    head: MtpHead, shared: Shared, responses: Sequence[Response], depths: int, batch: int = 8
) -> list[float]:
    """By depth, the chance that a token of the head's law is accepted where the tokens before it are
    those of the response: sum over positions of sum_x min(p, q) / positions."""
    accepted, counts = [0.0] * depths, [0] * depths
    for at in range(0, len(responses), batch):
        some = responses[at : at + batch]
        for depth, laws in enumerate(depth_laws(head, shared, some, depths)):
            accepted[depth] += float(laws.accepted())
            counts[depth] += len(laws.law)
    return [a / n for a, n in zip(accepted, counts) if n]


@dataclass(frozen=True, slots=True)
class MtpStats:
    """One step of a head, measured before it was taken."""

    loss: float
    """Of all depths, weighted, a position."""
    acceptance: tuple[float, ...]
    """By depth, as `acceptance` counts it; shorter where no response reaches a depth."""

    def metrics(self) -> dict[str, float]:
        by_depth = {f"mtp/acceptance_depth{k}": a for k, a in enumerate(self.acceptance, start=1)}
        return {"mtp/loss": self.loss} | by_depth


class MtpTrainer:
    """A head and its optimiser."""

    def __init__(
        self, head: MtpHead, *, learning_rate: float, depths: int, version: int = 0
    ) -> None:
        self.head, self._learning_rate, self._depths = head, learning_rate, depths
        self.version = version
        """Of the policy whose responses it was trained on last."""
        self._optimiser = torch.optim.AdamW(
            head.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0
        )

    def step(
        self,
        shared: Shared,
        responses: Sequence[Response],
        *,
        kind: Loss = "cross_entropy",
        pace: float = 1.0,
    ) -> MtpStats | None:
        """One step on some responses; None, and no step, where none has two tokens. `pace` scales
        the learning rate."""
        long_enough = [r for r in responses if len(r.token_ids) > 1]
        if not long_enough:
            return None
        losses: list[torch.Tensor] = []
        accepted: list[float] = []
        for depth, laws in enumerate(depth_laws(self.head, shared, long_enough, self._depths)):
            if len(laws.law):
                losses.append(DEPTH_DECAY**depth * laws.loss(kind) / len(laws.law))
                accepted.append(float(laws.accepted().detach()) / len(laws.law))
        loss = torch.stack(losses).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRAD_NORM)
        for group in self._optimiser.param_groups:
            group["lr"] = pace * self._learning_rate
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return MtpStats(float(loss.detach()), tuple(accepted))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The head as it is now; a copy."""
        return self.head.tensors(self.version)

    def optimiser_tensors(self) -> dict[str, torch.Tensor]:
        """The optimiser's state by parameter name."""
        return named_state(self.head, self._optimiser)

    def load_optimiser(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Goes on from what `optimiser_tensors` gave."""
        load_state(self.head, self._optimiser, tensors)


def named_state(module: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """An optimiser's state as PARAMETER.KEY -> tensor."""
    return {
        f"{name}.{key}": torch.as_tensor(value)
        for name, parameter in module.named_parameters()
        for key, value in optimiser.state[parameter].items()
    }


def load_state(
    module: nn.Module, optimiser: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Puts back what `named_state` gave."""
    for name, parameter in module.named_parameters():
        keys = [k for k in tensors if k.rpartition(".")[0] == name]
        if keys:
            optimiser.state[parameter] = {k.rpartition(".")[2]: tensors[k].clone() for k in keys}
