"""The target law: which token may come next, and with what probability.

One code for every path: plain decoding, every position of a draft window, corrections and bonuses.
Order: bans (stop ids before `min_tokens`) -> temperature -> top-k -> top-p -> min-p -> normalise,
from the verifier's logits in float32 (float64 logits stay float64: tests enumerate to 1e-12).
Temperature 0 is its own branch, a point mass on the first argmax.

Filters keep sets of *values*, not of ranks: a token tied with the last kept one is kept. So the law
does not depend on a sorting routine, and is the same on every path and device. Top-p acts on the
law that top-k left, min-p on the largest remaining probability.

A law is held as unnormalised weights (largest is 1) with sums over blocks of the vocabulary: one
pass of exp, one of sums, and a draw touches one block. Weights and the sums within a block are
float32 (relative error 2e-7, which bounds that of every cell), what is summed over blocks float64.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rollout.errors import InvalidLogits
from rollout.sampling import SamplingParams

BLOCK = 256
"""Tokens a block sum covers; about the square root of common vocabulary sizes."""
SMALLEST_TEMPERATURE = 1e-30
"""Below it a float32 division overflows; the law is the same point mass (or tie) as at it."""
NUCLEUS_GUESS = 512
"""How many largest weights top-p looks at before it sorts the whole row."""


def pick_from(weights: torch.Tensor, uniform: float) -> int:
    """Inverse-CDF draw from unnormalised weights [n] with a uniform in [0, 1)."""
    cumulative = np.cumsum(weights.detach().cpu().numpy().astype(np.float64))
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    if index == len(cumulative):  # uniform * total rounded up to the total
        index = int(np.flatnonzero(weights.cpu().numpy())[-1])
    return index


class TargetLaws:
    """The laws of N positions of any rows, side by side.

    Shapes: N positions, V vocabulary. Build with `target_laws`.
    """

    def __init__(
        self,
        scaled: torch.Tensor,  # [N, V] (logit - row maximum) / temperature, nothing removed
        full_total: torch.Tensor,  # [N] float64: sum of exp(scaled)
        weights: torch.Tensor,  # [N, V] unnormalised sampled law, 0 where removed
        shift: torch.Tensor,  # [N] float64: log weight = scaled - shift where kept
        greedy: torch.Tensor,  # [N] bool
        invalid: dict[int, str],
    ) -> None:
        self._scaled, self._weights, self._shift = scaled, weights, shift
        self._full_total, self._greedy, self._invalid = full_total, greedy, invalid
        block_sums = _block_sums(weights)  # [N, ceil(V / BLOCK)] float64
        self._block_cumulative = block_sums.cumsum(-1).cpu().numpy()
        self._total = self._block_cumulative[:, -1]  # [N]

    def check(self, index: int) -> None:
        """Raises InvalidLogits when position `index` has no law."""
        if index in self._invalid:
            raise InvalidLogits(self._invalid[index])

    def prob(self, index: int, token: int) -> float:
        """Probability of a token under the sampled law."""
        return float(self._weights[index, token]) / float(self._total[index])

    def probs(self, index: int) -> torch.Tensor:
        """The whole sampled law [V] at one position."""
        return self._weights[index] / float(self._total[index])

    def pick(self, index: int, uniform: float) -> int:
        """The token whose cell of the cumulative law holds `uniform`."""
        cumulative = self._block_cumulative[index]
        point = uniform * cumulative[-1]
        block = int(np.searchsorted(cumulative, point, side="right"))
        if block == len(cumulative):
            block = int(np.flatnonzero(np.diff(cumulative, prepend=0.0))[-1])
        before = cumulative[block - 1] if block else 0.0
        cells = self._weights[index, block * BLOCK : (block + 1) * BLOCK]
        inner = np.cumsum(cells.cpu().numpy().astype(np.float64))
        offset = int(np.searchsorted(inner, point - before, side="right"))
        if offset == len(inner):  # the block's sum and its cumulative sum differ in rounding
            offset = int(np.flatnonzero(cells.cpu().numpy())[-1])
        return block * BLOCK + offset

    def logprobs(
        self, indices: Sequence[int], tokens: Sequence[int]
    ) -> tuple[list[float], list[float], list[float]]:
        """(sampled law, full vocabulary, kept mass) of emitted tokens, all of one length.

        A greedy position is a point mass in both: 0, 0 and 1.
        """
        at = torch.as_tensor(indices, dtype=torch.int64, device=self._scaled.device)
        token_ids = torch.as_tensor(tokens, dtype=torch.int64, device=self._scaled.device)
        scaled = self._scaled[at, token_ids].double()
        log_full_total = self._full_total[at].log()
        log_total = torch.as_tensor(self._total, device=self._scaled.device)[at].log()
        shift = self._shift[at]
        sampled = scaled - shift - log_total
        full = scaled - log_full_total
        kept = (log_total + shift - log_full_total).exp().clamp(max=1.0)
        greedy = self._greedy[at]
        return (
            torch.where(greedy, 0.0, sampled.clamp(max=0.0)).tolist(),
            torch.where(greedy, 0.0, full.clamp(max=0.0)).tolist(),
            torch.where(greedy, 1.0, kept).tolist(),
        )


def target_laws(
    logits: torch.Tensor,  # [N, V]
    samplings: Sequence[SamplingParams],
    banned: Sequence[Sequence[int]],
) -> TargetLaws:
    """Laws of N positions, each under its own sampling parameters and banned ids.

    A position whose logits hold NaN or +inf, or leave no token, is marked; using it raises.
    """
    num = logits.shape[0]
    assert num == len(samplings) == len(banned), "one sampling and one ban list a position"
    logits = logits if logits.dtype == torch.float64 else logits.float()
    maxima = logits.amax(-1)  # [N]; NaN if any logit of the row is
    invalid = {
        index: "the policy's logits hold NaN or +inf"
        if maximum != -torch.inf
        else "the policy's logits leave no token"
        for index, maximum in enumerate(maxima.tolist())
        if not abs(maximum) < torch.inf
    }
    greedy = torch.tensor([sampling.greedy for sampling in samplings], device=logits.device)
    temperatures = torch.tensor(
        [max(sampling.temperature, SMALLEST_TEMPERATURE) for sampling in samplings],
        dtype=logits.dtype,
        device=logits.device,
    )
    temperatures[greedy] = 1.0
    scaled = (logits - maxima[:, None]) / temperatures[:, None]  # [N, V]
    weights = scaled.exp()
    full_total = _block_sums(weights).sum(-1)  # [N]
    shift = torch.zeros(num, dtype=torch.float64, device=logits.device)
    for index, sampling in enumerate(samplings):
        if index in invalid:
            weights[index] = 1.0  # never read; keeps the block sums finite
            continue
        row = scaled[index]
        if banned[index]:
            row = row.clone()
            row[list(banned[index])] = -torch.inf
            top = float(row.max())
            if top == -torch.inf:
                invalid[index] = "every token is banned at this position"
                weights[index] = 1.0
                continue
            shift[index] = top  # rescale: a banned giant must not leave the rest to underflow
            weights[index] = (row - top).exp()
        if sampling.greedy:
            weights[index] = 0.0
            weights[index, int(row.argmax())] = 1.0  # argmax returns the first of tied maxima
        elif sampling.top_k or sampling.top_p < 1 or sampling.min_p:
            _filter(weights[index], sampling)
    return TargetLaws(scaled, full_total, weights, shift, greedy, invalid)


def _filter(weights: torch.Tensor, sampling: SamplingParams) -> None:
    """Top-k, top-p and min-p on one row of weights [V] whose largest is 1, in place."""
    if 0 < sampling.top_k < weights.shape[0]:
        weights[weights < weights.topk(sampling.top_k).values[-1]] = 0.0
    if sampling.top_p < 1:
        weights[weights < _nucleus_threshold(weights, sampling.top_p)] = 0.0
    if sampling.min_p:
        weights[weights < sampling.min_p] = 0.0


def _nucleus_threshold(weights: torch.Tensor, top_p: float) -> float:
    """The smallest weight of the smallest set of largest weights whose mass is >= top_p."""
    goal = top_p * float(weights.sum(dtype=torch.float64))
    for count in (min(NUCLEUS_GUESS, weights.shape[0]), weights.shape[0]):
        largest = weights.topk(count).values  # sorted, descending
        reached = largest.cumsum(-1, dtype=torch.float64) >= goal
        if bool(reached.any()):
            return float(largest[int(reached.to(torch.uint8).argmax())])
    return float(largest[-1])


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums over blocks of the vocabulary, [N, V] -> [N, ceil(V / BLOCK)] float64."""
    num, vocab_size = weights.shape
    whole = vocab_size // BLOCK * BLOCK
    sums = weights[:, :whole].reshape(num, -1, BLOCK).sum(-1).double()
    if whole == vocab_size:
        return sums
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True).double()], dim=-1)
