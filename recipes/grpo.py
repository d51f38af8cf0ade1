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
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.group_queue import RolloutGroup
from quant.linear import has_bf16_gemm
from recipes.config import LearnerConfig


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

    def metrics(self) -> dict[str, float]:
        mismatch = ("k1", "k3", "chi2", "ess", "clipped_rate")
        learner = ("loss", "grad_norm", "train_s")
        return {f"mismatch/{n}": getattr(self, n) for n in mismatch} | {
            f"learner/{n}": getattr(self, n) for n in learner
        }


class Learner:
    """The policy in full precision and its optimiser."""

    def __init__(self, folder: Path, config: LearnerConfig, temperature: float) -> None:
        self._config, self._temperature = config, temperature
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
        loss, ratios = 0.0, []
        for group, group_rewards in zip(packed, rewards, strict=True):
            log_ratio = self._logprobs(group) - group.behaviour  # [M]
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
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return self._stats(torch.cat(ratios), loss, float(grad_norm), started)

    def _logprobs(self, group: PackedGroup) -> torch.Tensor:
        """log pi of every rollout token, [M]."""
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16_gemm()):
            logits = self.model(
                input_ids=group.ids,
                position_ids=group.positions,
                attention_mask=group.mask,
                logits_to_keep=group.predictors,
                use_cache=False,
            ).logits[0]  # [M, V]
        log_probs = (logits.float() / self._temperature).log_softmax(-1)
        return log_probs.gather(-1, group.targets[:, None])[:, 0]

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
        return {
            f"{name}.{key}": torch.as_tensor(value)
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimiser.state[parameter].items()
        }

    def load(self, model: dict[str, torch.Tensor], optimiser: dict[str, torch.Tensor]) -> None:
        """Goes on from a checkpoint."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(model[name])
        for name, parameter in parameters.items():
            keys = [k for k in optimiser if k.rpartition(".")[0] == name]
            if keys:
                self.optimiser.state[parameter] = {
                    k.rpartition(".")[2]: optimiser[k].clone() for k in keys
                }
