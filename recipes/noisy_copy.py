"""A draft model for an audit that names none: the model itself, with noise in its matrices.

An audit needs a draft model that is wrong now and then, not one that is fast. Any model has a noisy
copy with the same token table, which every engine loads as it loads the model.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from rollout.checkpoint import read_weights

NOISE = 0.1
"""Standard deviations of a matrix's own entries. SmolLM2's copy has .67 of its mass in common with it
at T=1 (.85 at half the noise, .26 at twice as much)."""


def noisy_copy(folder: Path, to: Path, *, noise: float = NOISE, seed: int = 0) -> Path:
    """Writes the copy into `to`, which is made; returns it. Raises UnsupportedModel."""
    weights = read_weights(folder)
    generator = torch.Generator().manual_seed(seed)
    noisy = {
        name: _noisy(weights[name], noise, generator) if weights[name].ndim == 2 else weights[name]
        for name in sorted(weights)
    }
    to.mkdir(parents=True)
    for file in folder.iterdir():
        if file.is_file() and ".safetensors" not in file.suffixes:
            shutil.copyfile(file, to / file.name)
    save_file(noisy, to / "model.safetensors", metadata={"format": "pt"})
    return to


def _noisy(matrix: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
    whole = matrix.float()
    whole = whole + noise * whole.std() * torch.randn(whole.shape, generator=generator)
    return whole.to(matrix.dtype)
