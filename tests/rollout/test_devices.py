"""Draft laws that lie elsewhere than the logits: proposers draft on the CPU, a policy may not."""

import pytest
import torch

from rollout.draft import DenseLaw, SparseLaw
from rollout.verify_positions import residual

LAWS = {
    "dense": DenseLaw(torch.tensor([0.5, 0.5, 0.0])),
    "sparse": SparseLaw(torch.tensor([0, 1]), torch.tensor([0.5, 0.5])),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_residual_is_made_where_the_target_law_lies(name: str) -> None:
    """The device `meta` stands for a GPU: it has shapes and no numbers."""
    target = torch.zeros(3, device="meta")
    weights = residual(target, LAWS[name])
    assert weights.device.type == "meta" and weights.shape == (3,)
    with pytest.raises(RuntimeError, match="device cpu"):  # what it would be without the move
        torch.sub(target, torch.zeros(3))
