"""Asynchronous GRPO on rollouts from a `RolloutCluster`.

Loss, for token t of rollout i with behaviour log-probability mu recorded by the actor that sampled it:

    A_i = (R_i - mean R) / (std R + 1e-6)                        over the group (arXiv:2402.03300)
    r_t = min(pi_theta / mu, C)                                  token-truncated importance, C = 2
    L   = - sum_t min(r_t A_i, clip(r_t, 1 - e, 1 + e) A_i) / number of tokens of the batch

The ratio is to the law that was really sampled, quantised and up to `max_staleness` versions old, so
clip and truncation see the whole mismatch (with top-k, top-p or min-p on, its renormalisation too).
One optimiser step a batch. A group whose rewards are all equal has no advantage; it is set aside
(`filtered`) before it costs a backward pass.

A group is one packed sequence: the prompt once, then its rollouts, each seeing the prompt and
itself. Log-probabilities are taken at the sampling temperature over the whole vocabulary.

With an MTP head to be kept in step with the policy (`recipes.mtp_training`) each optimiser step is
followed by one of the head's, on the same rollouts, from what the forward passes have computed anyway.
The policy's own gradients know nothing of it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.group_queue import RolloutGroup
from recipes.config import LearnerConfig
from recipes.mtp_training import MtpStats, MtpTrainer, Response, Shared, load_state, named_state


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """One prompt and its rollouts as one sequence. N tokens in all, M of them rollout tokens."""

    ids: torch.Tensor  # [1, N]
    positions: torch.Tensor  # [1, N], starting again behind the prompt for every rollout
    mask: torch.Tensor  # [1, 1, N, N] additive
    predictors: torch.Tensor  # [M] index of the token whose logits predict each rollout token
    targets: torch.Tensor  # [M]
    behaviour: torch.Tensor  # [M] recorded log-probabilities
    sample: torch.Tensor  # [M] which rollout a token belongs to


def pack_group(group: RolloutGroup) -> PackedGroup:
    """Packs the non-empty rollouts of a group."""
    prompt = list(group.samples[0].request.prompt_ids)
    ids, positions, owner = list(prompt), list(range(len(prompt))), [-1] * len(prompt)
    predictors: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    for number, sample in enumerate(group.samples):
        start = len(ids)
        predictors += [len(prompt) - 1, *range(start, start + len(sample.token_ids) - 1)]
        predictors = predictors[: len(targets) + len(sample.token_ids)]
        targets += sample.token_ids
        behaviour += sample.logprobs
        ids += sample.token_ids
        positions += range(len(prompt), len(prompt) + len(sample.token_ids))
        owner += [number] * len(sample.token_ids)
    owners = torch.tensor(owner)
    visible = (owners[:, None] == owners) | (owners == -1)
    visible &= torch.ones(len(ids), len(ids)).tril().bool()
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    return PackedGroup(
        ids=torch.tensor([ids]),
        positions=torch.tensor([positions]),
        mask=mask[None, None],
        predictors=torch.tensor(predictors),
        targets=torch.tensor(targets),
        behaviour=torch.tensor(behaviour),
        sample=owners[owners >= 0],
    )


def group_advantages(rewards: Sequence[float]) -> torch.Tensor:
    """Rewards relative to their group, [G]; all zero when they are equal or there is one."""
    values = torch.tensor(rewards)
    spread = values.std(correction=0)
    return torch.zeros_like(values) if spread == 0 else (values - values.mean()) / (spread + 1e-6)


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimiser step. Mismatch is behaviour mu against the policy pi before the step."""

    loss: float
    grad_norm: float
    k1: float
    """mean(log mu - log pi), nats a token."""
    k3: float
    """mean(pi/mu - 1 - log(pi/mu)), the low-variance estimate of KL(mu || pi)."""
    chi2: float
    """mean((pi/mu)^2) - 1."""
    ess: float
    """Effective sample size of the token weights pi/mu, as a fraction of the tokens."""
    clipped_rate: float
    """Fraction of tokens whose ratio lies outside 1 +/- clip, whatever the sign of the advantage."""
    train_s: float
    mtp: MtpStats | None = None
    """Of the MTP head's step, where one is trained."""

    def metrics(self) -> dict[str, float]:
        mismatch = ("k1", "k3", "chi2", "ess", "clipped_rate")
        learner = ("loss", "grad_norm", "train_s")
        return (
            {f"mismatch/{n}": getattr(self, n) for n in mismatch}
            | {f"learner/{n}": getattr(self, n) for n in learner}
            | (self.mtp.metrics() if self.mtp else {})
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """What the policy makes of the rollout tokens of a packed group, M of them."""

    log_probs: torch.Tensor  # [M, V] at the sampling temperature
    hidden: torch.Tensor  # [M, H] behind the final norm

    def of(self, targets: torch.Tensor) -> torch.Tensor:
        """Log-probability of each token, [M]."""
        return self.log_probs.gather(-1, targets[:, None])[:, 0]


class Learner:
    """The policy in full precision and its optimiser."""

    def __init__(
        self,
        folder: Path,
        config: LearnerConfig,
        temperature: float,
        mtp: MtpTrainer | None = None,
    ) -> None:
        """`mtp`: a head of this model that is to follow the policy."""
        self._config, self._temperature, self.mtp = config, temperature, mtp
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, local_files_only=True
        )
        self.model.train()
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, weight_decay=0.0, fused=True
        )

    def step(self, groups: Sequence[RolloutGroup], rewards: Sequence[Sequence[float]]) -> StepStats:
        """One optimiser step on whole groups."""
        started = time.perf_counter()
        packed = [pack_group(group) for group in groups]
        num_tokens = sum(len(group.targets) for group in packed)
        loss, ratios, responses = 0.0, [], list[Response]()
        for group, group_rewards in zip(packed, rewards, strict=True):
            scores = self.score(group)
            if self.mtp is not None:
                responses += responses_of(group, scores, self.mtp.head.vocabulary)
            log_ratio = scores.of(group.targets) - group.behaviour  # [M]
            part = self._loss(log_ratio, group_advantages(group_rewards)[group.sample])
            part = part.sum() / num_tokens
            part.backward()
            loss += float(part.detach())
            ratios.append(log_ratio.detach())
        grad_norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self._config.max_grad_norm
        )
        if not bool(grad_norm.isfinite()):
            raise FloatingPointError(f"gradient norm is {float(grad_norm)}; the step is not taken")
        mtp = self._train_head(groups, responses)  # before the policy is another
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        stats = self._stats(torch.cat(ratios), loss, float(grad_norm), started)
        return replace(stats, mtp=mtp)

    def score(self, group: PackedGroup) -> Scores:
        """What the policy makes of a group now, in float32 on every machine: bf16 moves
        log-probabilities by up to .1 nats, as much as an optimiser step does."""
        hidden = self.model.base_model(
            input_ids=group.ids,
            position_ids=group.positions,
            attention_mask=group.mask,
            use_cache=False,
        ).last_hidden_state[0, group.predictors]  # [M, H]
        logits = self.model.get_output_embeddings()(hidden)  # [M, V]
        return Scores((logits / self._temperature).log_softmax(-1), hidden)

    def _logprobs(self, group: PackedGroup) -> torch.Tensor:
        """log pi of every rollout token, [M]."""
        return self.score(group).of(group.targets)

    def _train_head(
        self, groups: Sequence[RolloutGroup], responses: Sequence[Response]
    ) -> MtpStats | None:
        """One step of the MTP head, if one is trained, for the policy as it is now."""
        if self.mtp is None:
            return None
        spans = [span for group in groups for s in group.samples for span in s.version_spans]
        self.mtp.version = max((version for version, _ in spans), default=self.mtp.version)
        return self.mtp.step(self.shared(self.mtp.head.vocabulary), responses)

    def shared(self, vocabulary: torch.Tensor) -> Shared:
        """What an MTP head of a draft vocabulary uses of the policy as it is now."""
        model: Any = self.model
        embedding = model.get_input_embeddings().weight.detach()
        output = model.get_output_embeddings().weight.detach()
        return Shared(embedding, output[vocabulary], self._temperature)

    def mtp_tensors(self) -> dict[str, torch.Tensor] | None:
        """The MTP head as it is now; None where none is trained."""
        return None if self.mtp is None else self.mtp.tensors()

    def _loss(self, log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Clipped surrogate a token, [M]."""
        clip, cap = self._config.clip, self._config.tis_cap
        ratio = log_ratio.exp().clamp(max=cap)
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)

    def _stats(
        self, log_ratio: torch.Tensor, loss: float, grad_norm: float, started: float
    ) -> StepStats:
        ratio = log_ratio.exp()
        outside = (ratio - 1).abs() > self._config.clip
        return StepStats(
            loss=loss,
            grad_norm=grad_norm,
            k1=float(-log_ratio.mean()),
            k3=float((ratio - 1 - log_ratio).mean()),
            chi2=float(ratio.square().mean() - 1),
            ess=float(ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())),
            clipped_rate=float((outside | (ratio > self._config.tis_cap)).float().mean()),
            train_s=time.perf_counter() - started,
        )

    def optimiser_tensors(self) -> dict[str, torch.Tensor]:
        """The optimiser's state by parameter name."""
        return named_state(self.model, self.optimiser)

    def load(self, model: dict[str, torch.Tensor], optimiser: dict[str, torch.Tensor]) -> None:
        """Goes on from a checkpoint."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(model[name])
        load_state(self.model, self.optimiser, optimiser)


def responses_of(group: PackedGroup, scores: Scores, vocabulary: torch.Tensor) -> list[Response]:
    """A group's rollouts as an MTP head is taught them, without gradients."""
    lens = torch.bincount(group.sample).tolist()
    hidden = scores.hidden.detach().float()
    law = scores.log_probs.detach()[:, vocabulary].exp()
    parts = zip(group.targets.split(lens), hidden.split(lens), law.split(lens))
    return [Response(ids, states, laws) for ids, states, laws in parts if len(ids)]
