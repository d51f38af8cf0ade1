"""Rollouts in a file: what `scripts/record_rollouts.py` writes and heads are trained on.

Safetensors, everything flat, with lengths: prompts, token ids of every sample, and the log-probability
of each token under the law that it was sampled from.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quant.formats import FormatName
from rollout.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sample; log-probabilities of the law that was sampled."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """Samples of each prompt, in order of sample index."""

    prompts: tuple[tuple[int, ...], ...]
    rollouts: tuple[tuple[Rollout, ...], ...]
    temperature: float
    quant: FormatName

    @property
    def num_tokens(self) -> int:
        return sum(len(one.token_ids) for of_prompt in self.rollouts for one in of_prompt)

    def save(self, path: Path) -> None:
        flat = [one for of_prompt in self.rollouts for one in of_prompt]
        tensors = {
            "prompt_ids": torch.tensor([i for p in self.prompts for i in p], dtype=torch.int32),
            "prompt_lens": torch.tensor([len(p) for p in self.prompts]),  # [P]
            "token_ids": torch.tensor([i for r in flat for i in r.token_ids], dtype=torch.int32),
            "logprobs": torch.tensor([x for r in flat for x in r.logprobs], dtype=torch.float32),
            "token_lens": torch.tensor([len(r.token_ids) for r in flat]).view(
                len(self.prompts), -1
            ),
        }
        about = {"temperature": str(self.temperature), "quant": self.quant}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata=about)

    @staticmethod
    def load(path: Path) -> "Recording":
        """Raises InvalidConfig for a file that is missing or holds no rollouts."""
        if not path.is_file():
            raise InvalidConfig(f"{path}: no such file; scripts/record_rollouts.py writes one")
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                about = file.metadata() or {}
        except SafetensorError as error:
            raise InvalidConfig(f"{path}: not a safetensors file: {error}") from error
        if "token_lens" not in tensors or "temperature" not in about:
            raise InvalidConfig(
                f"{path}: expected rollouts as scripts/record_rollouts.py writes them"
            )
        prompts = tensors["prompt_ids"].split(tensors["prompt_lens"].tolist())
        lens = tensors["token_lens"]  # [P, N]
        ids = tensors["token_ids"].split(lens.flatten().tolist())
        logprobs = tensors["logprobs"].split(lens.flatten().tolist())
        flat = [Rollout(tuple(i.tolist()), tuple(x.tolist())) for i, x in zip(ids, logprobs)]
        num = lens.shape[1]
        return Recording(
            tuple(tuple(p.tolist()) for p in prompts),
            tuple(tuple(flat[at : at + num]) for at in range(0, len(flat), num)),
            float(about["temperature"]),
            about["quant"],
        )
