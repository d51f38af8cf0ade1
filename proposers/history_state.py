"""Rollouts of a history as plain tensors, for checkpoints and the object store.

salt          uint8    the proposer's, as UTF-8
keys          uint8    [P, 16] digests of the prompts
tails         int32    their last tokens, one prompt after the other
tail_lens     int64    [P]
prompts       int64    [R] prompt of each rollout, oldest rollout first
token_ids     int32    one rollout after the other
chances       float32  probability that each was sampled with; NaN: not known
token_lens    int64    [R]
versions      int64    [R] policy version of the last token
noises        int64    [R] names of the noise they were drawn with
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from proposers.history_rollouts import PromptRollouts, Rollout
from rollout.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """One rollout and the prompt it follows."""

    key: bytes
    tail: Sequence[int]
    token_ids: Sequence[int]
    chances: Sequence[float]
    version: int
    noise: int


def to_tensors(rollouts: Sequence[Rollout], salt: str) -> dict[str, torch.Tensor]:
    """Copies; nothing of the proposer's own memory."""
    prompts: dict[bytes, PromptRollouts] = {r.prompt.key: r.prompt for r in rollouts}
    index = {key: number for number, key in enumerate(prompts)}
    key_bytes = torch.tensor(list(b"".join(prompts)), dtype=torch.uint8)
    return {
        "salt": torch.tensor(list(salt.encode()), dtype=torch.uint8),
        "keys": key_bytes.view(len(prompts), -1) if prompts else key_bytes.view(0, 16),
        "tails": _flat([p.tail for p in prompts.values()], np.int32),
        "tail_lens": _longs(len(p.tail) for p in prompts.values()),
        "prompts": _longs(index[r.prompt.key] for r in rollouts),
        "token_ids": _flat([r.tokens for r in rollouts], np.int32),
        "chances": _flat([r.chances for r in rollouts], np.float32),
        "token_lens": _longs(len(r.tokens) for r in rollouts),
        "versions": _longs(r.version for r in rollouts),
        "noises": _longs(r.noise for r in rollouts),
    }


def from_tensors(exported: Mapping[str, torch.Tensor], salt: str) -> list[StoredRollout]:
    """In their order. Raises InvalidConfig for another salt."""
    of = bytes(exported["salt"].tolist()).decode()
    if of != salt:
        raise InvalidConfig(
            f"a history of {of!r}, this proposer's salt is {salt!r}: ids of another model or "
            "tokenizer mean other tokens; start without it"
        )
    keys = [bytes(key) for key in exported["keys"].tolist()]
    tails = list(_parts(exported["tails"], exported["tail_lens"]))
    return [
        StoredRollout(keys[prompt], tails[prompt], token_ids, chances, version, noise)
        for prompt, token_ids, chances, version, noise in zip(
            exported["prompts"].tolist(),
            _parts(exported["token_ids"], exported["token_lens"]),
            _parts(exported["chances"], exported["token_lens"]),
            exported["versions"].tolist(),
            exported["noises"].tolist(),
            strict=True,
        )
    ]


def _flat(arrays: "Sequence[array[int]] | Sequence[array[float]]", dtype: type) -> torch.Tensor:
    parts: list[np.ndarray] = [np.frombuffer(one, dtype=dtype) for one in arrays if one]
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=dtype))


def _longs(numbers: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64)


def _parts(flat: torch.Tensor, lens: torch.Tensor) -> Iterator[Any]:
    """Lists of the numbers that `flat` holds."""
    for part in flat.split(lens.tolist()):
        yield part.tolist()
