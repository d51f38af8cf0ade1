"""What runs in the engine benchmark, seen from outside, and what all of it is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Prompts = Sequence[Sequence[int]]


class Contender(Protocol):
    """An engine under the clock."""

    name: str
    max_rows: int
    """Larger batches are not run."""

    def generate(self, prompts: Prompts, num_tokens: int, seed: int) -> float:
        """Seconds from prompts to the last of `num_tokens` new tokens a prompt, T=1."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contenders are told."""

    folder: Path
    prompts: Prompts
    batches: tuple[int, ...]
    num_tokens: int
    vllm_python: Path | None
    llama_python: Path | None

    @property
    def context_len(self) -> int:
        """Prompt, response and a draft behind it, in whole blocks."""
        longest = max(map(len, self.prompts)) + self.num_tokens + 16
        return 64 * -(-longest // 64)
