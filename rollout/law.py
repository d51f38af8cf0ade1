"""The target law: which token may come next, and with what probability.

One code for every path: plain decoding, every position of a draft window, corrections and bonuses.
Order: grammar mask, bans (stop ids before `min_tokens`, bad words), logit bias -> penalties
(repetition, then frequency and presence) -> temperature -> top-k -> top-p -> min-p -> normalise,
from the verifier's logits in float32 (float64 logits stay float64: tests enumerate to 1e-12).
Temperature 0 is its own branch, a point mass on the first argmax of what penalties left.

Filters keep sets of *values*, not of ranks: a token tied with the last kept one is kept. So the law
does not depend on a sorting routine, and is the same on every path and device. Top-p acts on the
law that top-k left, min-p on the largest remaining probability.

A law is held as unnormalised weights (largest is 1) with sums over blocks of the vocabulary. All
positions of a round share one pass (`rollout.law_pass`); a draw then touches one block. A position
with edits or filters is worked out when it is first asked for, so what a refusal cuts off costs
nothing. Weights and the sums within a block are float32 (relative error 2e-7, which bounds that of
every cell), what is summed over blocks float64.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from rollout.conditions import Condition
from rollout.draft import DenseLaw
from rollout.errors import InvalidLogits
from rollout.law_pass import BLOCK, block_sums, law_weights
from rollout.sampling import SamplingParams

FEW = 64
"""Weights that plain Python adds up faster than numpy."""
SMALLEST_TEMPERATURE = 1e-30
"""Below it a float32 division overflows; the law is the same point mass (or tie) as at it."""


def pick_from(weights: torch.Tensor, uniform: float, ends: np.ndarray | None = None) -> int:
    """Inverse-CDF draw from unnormalised weights [n] with a uniform in [0, 1). `ends`: their sums up to
    the end of each block, where they are known."""
    if ends is not None:
        return _pick_in_blocks(ends, lambda block: weights[block].cpu().numpy(), uniform)
    if weights.shape[0] <= FEW:  # the same sums, without the overhead of arrays
        values = weights.tolist()
        sums = list(accumulate(values))
        index = bisect_right(sums, uniform * sums[-1])
        return index if index < len(sums) else max(i for i, value in enumerate(values) if value)
    array = weights.detach().cpu().numpy()
    starts = np.arange(0, len(array), BLOCK)
    ends = np.add.reduceat(array, starts, dtype=np.float64).cumsum()
    return _pick_in_blocks(ends, lambda block: array[block], uniform)


def _pick_in_blocks(
    ends: np.ndarray, weights_of: Callable[[slice], np.ndarray], uniform: float
) -> int:
    """The same of weights whose sums up to the end of each block are known."""
    point = uniform * ends[-1]
    block = int(np.searchsorted(ends, point, side="right"))
    if block == len(ends):  # uniform * total rounded up to the total
        block = int(np.flatnonzero(np.diff(ends, prepend=0.0))[-1])
    before = ends[block - 1] if block else 0.0
    cells = weights_of(slice(block * BLOCK, (block + 1) * BLOCK))
    inner = cells.cumsum(dtype=np.float64)
    offset = int(np.searchsorted(inner, point - before, side="right"))
    if offset == len(inner):  # the block's sum and its cumulative sum differ in rounding
        offset = int(np.flatnonzero(cells)[-1])
    return block * BLOCK + offset


class TargetLaws:
    """The laws of N positions of any rows, side by side.

    Shapes: N positions, V vocabulary. A position whose logits hold NaN or +inf, or leave no token,
    has no law: asking for it raises InvalidLogits unless it is marked unreachable; its neighbours are
    unaffected.
    """

    def __init__(
        self,
        logits: torch.Tensor,  # [N, V]
        conditions: Sequence[Condition],
    ) -> None:
        assert logits.shape[0] == len(conditions), "one condition a position"
        logits = logits if logits.dtype == torch.float64 else logits.float()
        self._logits, self._conditions = logits, conditions
        self._temperatures = [_temperature(c.sampling) for c in conditions]
        self._weights, maxima, self._block_cumulative = law_weights(logits, self._temperatures)
        self._maxima: list[float] = maxima.tolist()
        invalid = _invalid_positions(self._maxima)
        for index in invalid:
            self._weights[index] = 1.0
            self._sum_blocks(index)
        # What is drawn behind the end of a row is thrown away, so any law will do there.
        self._invalid = {i: why for i, why in invalid.items() if conditions[i].reachable}
        self._total = self._block_cumulative[:, -1].copy()  # [N]
        self._full_total = self._total.copy()  # [N] before edits and filters
        self._shift = np.zeros(len(conditions))  # log weight = (logit - maximum) / T - shift
        self._edited: dict[int, torch.Tensor] = {}
        """Log weights [V] of positions whose odds were changed; -inf where banned."""
        self._due = {i for i, c in enumerate(conditions) if not c.plain} - self._invalid.keys()

    def check(self, index: int) -> None:
        """Raises InvalidLogits when position `index` has no law."""
        self._prepare(index)
        if index in self._invalid:
            raise InvalidLogits(self._invalid[index])

    def valid(self, index: int) -> bool:
        """Position `index` has a law."""
        self._prepare(index)
        return index not in self._invalid

    def prob(self, index: int, token: int) -> float:
        """Probability of a token under the sampled law."""
        self._prepare(index)
        return float(self._weights[index, token]) / float(self._total[index])

    def probs(self, index: int) -> torch.Tensor:
        """The whole sampled law [V] at one position."""
        self._prepare(index)
        return self._weights[index] / float(self._total[index])

    def probs_of(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        """Probabilities of a few tokens, ids [M] -> [M]."""
        self._prepare(index)
        return self._weights[index][ids] / float(self._total[index])

    def drawable(self, index: int) -> DenseLaw:
        """The sampled law at one position as that of a draft: the weights themselves, no copy."""
        self._prepare(index)
        return DenseLaw(self._weights[index], float(self._total[index]))

    def block_ends(self, index: int) -> np.ndarray:
        """Sums of the weights at one position up to the end of each block, [ceil(V / BLOCK)]."""
        self._prepare(index)
        ends: np.ndarray = self._block_cumulative[index]
        return ends

    def pick(self, index: int, uniform: float) -> int:
        """The token whose cell of the cumulative law holds `uniform`."""
        self._prepare(index)
        return pick_from(self._weights[index], uniform, self._block_cumulative[index])

    def below(self, index: int, token: int) -> float:
        """Probability of all smaller ids: the lower end of the token's cell."""
        self._prepare(index)
        block = token // BLOCK
        before = self._block_cumulative[index, block - 1] if block else 0.0
        inside = self._weights[index, block * BLOCK : token].sum(dtype=torch.float64)
        return min(1.0, float(before + float(inside)) / float(self._total[index]))

    def logprobs(
        self, indices: Sequence[int], tokens: Sequence[int]
    ) -> tuple[list[float], list[float], list[float]]:
        """(sampled law, full vocabulary, kept mass) of emitted tokens, all of one length.

        The full vocabulary is that of the logits at the same temperature before every edit. The
        kept mass is its mass on the tokens that the sampled law can emit. A greedy position is a
        point mass in both: 0, 0 and 1.
        """
        for index in indices:
            self._prepare(index)
        sampled: list[float] = []
        full: list[float] = []
        kept: list[float] = []
        for index, token, logit in zip(indices, tokens, self._logits_of(indices, tokens)):
            if self._conditions[index].sampling.greedy:
                sampled.append(0.0)
                full.append(0.0)
                kept.append(1.0)
                continue
            scaled = (logit - self._maxima[index]) / self._temperatures[index]
            log_total, log_full = np.log(self._total[index]), np.log(self._full_total[index])
            edited = self._edited.get(index)
            weight = scaled - self._shift[index] if edited is None else float(edited[token])
            sampled.append(min(0.0, float(weight - log_total)))
            full.append(min(0.0, float(scaled - log_full)))
            kept.append(min(1.0, float(np.exp(self._log_kept(index) - log_full))))
        return sampled, full, kept

    def _logits_of(self, indices: Sequence[int], tokens: Sequence[int]) -> list[float]:
        if self._logits.device.type == "cpu":  # numpy, which has less to do for a few numbers
            return [float(self._array[index, token]) for index, token in zip(indices, tokens)]
        picked: list[float] = self._logits[list(indices), list(tokens)].double().tolist()
        return picked

    @cached_property
    def _array(self) -> np.ndarray:
        array: np.ndarray = self._logits.detach().numpy()
        return array

    def _log_kept(self, index: int) -> float:
        """Log of the full-vocabulary weight of the tokens with sampled weight."""
        if index not in self._edited:
            return float(np.log(self._total[index]) + self._shift[index])
        support = self._weights[index] > 0
        scaled = (self._logits[index, support].double() - self._maxima[index]) / (
            self._temperatures[index]
        )
        return float(scaled.logsumexp(0))

    def _prepare(self, index: int) -> None:
        """Edits and filters a position once, when it is first asked for."""
        if index not in self._due:
            return
        self._due.discard(index)
        condition = self._conditions[index]
        row = self._weights[index]
        edited = self._logits[index]
        if condition.edited:
            edited = _edited(edited, condition)
            top = float(edited.max())
            if not abs(top) < torch.inf:
                self._invalid[index] = "every token is banned at this position"
                return
            # Rescaled to a largest of 1: a banned giant must not leave the rest to underflow.
            log_weights = (edited - top) / self._temperatures[index]
            torch.exp(log_weights, out=row)
            if condition.reweighted:
                self._edited[index] = log_weights
            else:
                self._shift[index] = (top - self._maxima[index]) / self._temperatures[index]
        if condition.sampling.greedy:
            first = int(edited.argmax())  # of tied maxima; weights tie by rounding
            row.zero_()
            row[first] = 1.0
        else:
            _filter(row, condition.sampling)
        self._sum_blocks(index)
        self._total[index] = self._block_cumulative[index, -1]

    def _sum_blocks(self, index: int) -> None:
        sums = block_sums(self._weights[index : index + 1])
        self._block_cumulative[index] = sums.cumsum(-1).cpu().numpy()[0]


def _invalid_positions(maxima: Sequence[float]) -> dict[int, str]:
    return {
        index: "the policy's logits hold NaN or +inf"
        if maximum != -torch.inf
        else "the policy's logits leave no token"
        for index, maximum in enumerate(maxima)
        if not abs(maximum) < torch.inf
    }


def _temperature(sampling: SamplingParams) -> float:
    return 1.0 if sampling.greedy else max(sampling.temperature, SMALLEST_TEMPERATURE)


def _edited(logits: torch.Tensor, condition: Condition) -> torch.Tensor:
    """Logits [V] after the grammar, bans, biases and penalties, before the temperature."""
    sampling = condition.sampling
    edited = logits.clone()
    if condition.allowed is not None:
        edited.masked_fill_(~condition.allowed.to(edited.device), -torch.inf)
    if condition.banned:
        edited[list(condition.banned)] = -torch.inf
    if sampling.logit_bias:
        biased, amounts = zip(*sampling.logit_bias)
        edited[list(biased)] += edited.new_tensor(amounts)
    if (seen := condition.seen) is not None:
        ids = torch.from_numpy(seen.ids).to(edited.device)
        counts = torch.from_numpy(seen.num_generated).to(edited)
        values = edited[ids]
        penalty = sampling.repetition_penalty
        values = torch.where(values > 0, values / penalty, values * penalty)
        values -= sampling.frequency_penalty * counts
        values -= sampling.presence_penalty * (counts > 0).to(counts)
        edited[ids] = values
    return edited


def _filter(weights: torch.Tensor, sampling: SamplingParams) -> None:
    """Top-k, top-p and min-p on one row of weights [V] whose largest is 1, in place."""
    if 0 < sampling.top_k < weights.shape[0]:
        weights[weights < weights.topk(sampling.top_k).values[-1]] = 0.0
    if sampling.top_p < 1:
        weights[weights < _nucleus_threshold(weights, sampling.top_p)] = 0.0
    if sampling.min_p:
        weights[weights < sampling.min_p] = 0.0


def _nucleus_threshold(weights: torch.Tensor, top_p: float) -> float:
    """The smallest weight of the smallest set of largest weights whose mass is >= top_p.

    Only tokens above (1 - top_p) of the mean weight are sorted: all below it together hold less
    than 1 - top_p of the mass, so the threshold is not among them.
    """
    total = float(weights.sum(dtype=torch.float64))
    floor = 0.999 * (1 - top_p) * total / weights.shape[0]  # .999: the bound is rounded
    largest = weights[weights > floor].sort(descending=True).values
    reached = largest.cumsum(-1, dtype=torch.float64) >= top_p * total
    if bool(reached.any()):
        return float(largest[int(reached.to(torch.uint8).argmax())])
    return float(largest[-1])
