"""Factors that move outlier channels from activations to weights (SmoothQuant, Xiao et al.,
arXiv:2211.10438, equation 4).

A linear map is the same with its input channels divided by s and its weight columns multiplied by s. A
token's step is its largest channel / 127, so one channel that is always large takes the precision of
all others; s_j = max|x_j|^a / max|w_j|^(1-a) shares the range between the two sides.
"""

import torch

SMALLEST = 1e-5
"""Maxima below it count as it: a channel that is never used stays where it is."""


def smoothing_factors(
    activation_max: torch.Tensor,  # [C] largest magnitude of each input channel
    weight_max: torch.Tensor,  # [C] of each column
    strength: float,
) -> torch.Tensor:
    """s [C]; `strength` a in [0, 1] is how much of the activations' range the weights take."""
    activations = activation_max.float().clamp_min(SMALLEST)
    weights = weight_max.float().clamp_min(SMALLEST)
    return activations**strength / weights ** (1.0 - strength)
