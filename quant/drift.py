"""How far one model's next-token laws are from another's, over the same tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Drift:
    """Means over probed positions; natural logarithms."""

    kl: float
    """KL(reference || model) over the whole vocabulary, nats a token."""
    abs_logp: float
    """|log p_model - log p_reference| of the probe's own next tokens."""
    tv: float
    """Total variation a token."""


def measure_drift(
    reference: torch.Tensor,  # [N, V] log-probabilities
    logits: torch.Tensor,  # [N, V] of the model under test
    next_tokens: torch.Tensor,  # [N]
) -> Drift:
    """Drift of `logits` from `reference`, temperature 1, float32."""
    log_model = logits.float().log_softmax(-1)
    log_reference = reference.float()
    probs = log_reference.exp()
    at = next_tokens[:, None]
    gap = log_model.gather(-1, at) - log_reference.gather(-1, at)
    return Drift(
        kl=float((probs * (log_reference - log_model)).sum(-1).mean()),
        abs_logp=float(gap.abs().mean()),
        tv=float(0.5 * (probs - log_model.exp()).abs().sum(-1).mean()),
    )
