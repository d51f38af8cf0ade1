"""The compiled pass over the vocabulary against torch's."""

import numpy as np
import pytest
import torch

from rollout.law_pass import BLOCK, FEW_POSITIONS, compiled_weights, law_weights, torch_weights
from rollout.law_pass import _library as library

INF = torch.inf
SIZES = (1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 40, 49_155)
"""Parts of a register and of a block, and whole ones."""


def logits_of(num: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return 6 * torch.randn(num, vocab_size, generator=generator)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num", [1, FEW_POSITIONS, FEW_POSITIONS + 3])
def test_weights_maxima_and_sums_are_those_of_torch(num: int, vocab_size: int) -> None:
    logits = logits_of(num, vocab_size)
    temperatures = [(1.0, 0.7, 1e-30, 3.0)[i % 4] for i in range(num)]
    weights, maxima, sums = compiled_weights(logits, temperatures)
    expected, expected_maxima, expected_sums = torch_weights(logits, temperatures)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-37)
    assert torch.equal(maxima, expected_maxima)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-6)
    ends = [*range(BLOCK, vocab_size, BLOCK), vocab_size]
    exact = weights.double().cumsum(-1)[:, torch.tensor(ends) - 1]
    np.testing.assert_allclose(sums, exact, rtol=1e-6)


def test_a_position_is_the_same_whatever_stands_beside_it() -> None:
    logits = logits_of(9, 700)
    whole = compiled_weights(logits, [0.9] * 9)
    for i in range(9):
        alone = compiled_weights(logits[i : i + 1], [0.9])
        assert torch.equal(alone[0][0], whole[0][i])
        assert (alone[2][0] == whole[2][i]).all()


def test_logits_of_a_wider_tensor_are_read_where_they_stand() -> None:
    wide = logits_of(3, 900)
    for part in (wide[:, 100:800], wide.T.contiguous().T[:, 100:800]):
        found = compiled_weights(part, [1.0] * 3)
        assert torch.equal(found[0], compiled_weights(part.contiguous(), [1.0] * 3)[0])


def test_what_is_banned_or_out_of_reach_has_no_weight_at_all() -> None:
    logits = logits_of(1, 300)
    logits[0, 7], logits[0, 8] = -INF, logits.max() - 200
    weights = compiled_weights(logits, [1.0])[0][0]
    assert weights[7] == weights[8] == 0.0
    assert float(weights.max()) == 1.0


@pytest.mark.parametrize(
    ("bad", "maximum"), [(torch.nan, torch.nan), (INF, torch.nan), (-INF, -INF)]
)
@pytest.mark.parametrize("place", [0, 5, 299])
@pytest.mark.parametrize("way", [compiled_weights, torch_weights])
def test_a_position_without_a_law_says_so_and_leaves_its_neighbours_alone(
    way: object, place: int, bad: float, maximum: float
) -> None:
    logits = logits_of(3, 300)
    if bad == -INF:
        logits[1] = -INF
    else:
        logits[1, place] = bad
    assert callable(way)
    weights, maxima, sums = way(logits, [1.0] * 3)
    told = float(maxima[1])
    assert told == maximum or (told != told and maximum != maximum)
    for i in (0, 2):
        alone = way(logits[i : i + 1], [1.0])
        assert torch.equal(weights[i], alone[0][0])
        assert (sums[i] == alone[2][0]).all()


def test_float64_is_left_to_torch_and_float32_is_not() -> None:
    assert library() is not None, "these machines can build it"
    double = logits_of(2, 300).double()
    assert law_weights(double, [1.0, 1.0])[0].dtype == torch.float64
    logits = logits_of(2, 300)
    assert torch.equal(law_weights(logits, [1.0] * 2)[0], compiled_weights(logits, [1.0] * 2)[0])
