"""Drift between two models' laws."""

import math

import pytest
import torch

from quant.drift import measure_drift


def random_logits(seed: int) -> torch.Tensor:
    return 3 * torch.randn(20, 50, generator=torch.Generator().manual_seed(seed))


NEXT = torch.arange(20)


def test_a_model_has_no_drift_from_itself() -> None:
    logits = random_logits(0)
    drift = measure_drift(logits.log_softmax(-1), logits + 7.0, NEXT)  # a shift changes no law
    assert drift.kl == pytest.approx(0, abs=1e-6)
    assert drift.tv == pytest.approx(0, abs=1e-6)
    assert drift.abs_logp == pytest.approx(0, abs=1e-5)


def test_drift_of_two_laws_by_hand() -> None:
    """p = (1/2, 1/2) against q = (3/4, 1/4), the next token is 1:
    KL(p || q) = 1/2 ln(2/3) + 1/2 ln 2 = 0.14384; TV = 1/4; |ln 1/4 - ln 1/2| = ln 2."""
    reference = torch.tensor([[0.5, 0.5]]).log()
    drift = measure_drift(reference, torch.tensor([[0.75, 0.25]]).log(), torch.tensor([1]))
    assert drift.kl == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2), abs=1e-6)
    assert drift.tv == pytest.approx(0.25, abs=1e-6)
    assert drift.abs_logp == pytest.approx(math.log(2), abs=1e-6)


def test_positions_weigh_the_same() -> None:
    one, other = random_logits(1), random_logits(2)
    whole = measure_drift(one.log_softmax(-1), other, NEXT)
    parts = [
        measure_drift(one[i : i + 1].log_softmax(-1), other[i : i + 1], NEXT[i : i + 1])
        for i in range(20)
    ]
    assert whole.kl == pytest.approx(sum(part.kl for part in parts) / 20, rel=1e-5)
    assert whole.tv == pytest.approx(sum(part.tv for part in parts) / 20, rel=1e-5)


def test_pinsker_bounds_the_variation_by_the_divergence() -> None:
    for seed in range(10):
        drift = measure_drift(random_logits(seed).log_softmax(-1), random_logits(seed + 99), NEXT)
        assert 0 < drift.tv <= math.sqrt(drift.kl / 2)


def test_bf16_logits_are_compared_in_float32() -> None:
    logits = random_logits(3)
    drift = measure_drift(logits.log_softmax(-1), logits.bfloat16(), NEXT)
    assert 0 < drift.kl < 1e-3
