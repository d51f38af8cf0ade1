"""What decides the law of each position of a window besides its logits.

A position's law depends on the tokens before it, drafted ones included: how many were generated
(`min_tokens`), which (penalties, several-token bad words) and what they spell (grammar). `Conditions`
keeps the state of one row and answers for every position of a draft, chain or tree, with the state
after that position's own path; the row's state moves only by tokens that were emitted.

A position behind a token that its own law gives probability 0 (a grammar that forbids it), or behind
one that ends the row, is marked unreachable: no verification gets there, so no mask is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rollout.errors import InvalidRequest
from rollout.grammar import MaskProvider
from rollout.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Seen:
    """Which tokens came before, for the penalties."""

    ids: npt.NDArray[np.int64]  # [M] distinct: of the prompt or generated
    num_generated: npt.NDArray[np.int64]  # [M] how often each was generated; 0 for the prompt's


@dataclass(frozen=True, slots=True)
class Condition:
    """What acts on the logits of one position."""

    sampling: SamplingParams
    banned: tuple[int, ...] = ()
    """Stop ids before `min_tokens`, last ids of bad words."""
    allowed: torch.Tensor | None = None  # [V] bool, of the grammar
    seen: Seen | None = None
    """None without penalties."""
    reachable: bool = True
    """False: no token is ever emitted here, whatever law stands at it."""

    @property
    def plain(self) -> bool:
        """The law is the softmax of logits / temperature."""
        sampling = self.sampling
        filtered = sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.greedy
        return not filtered and not self.edited

    @property
    def edited(self) -> bool:
        """Logits are changed, not only filtered."""
        return bool(
            self.banned or self.sampling.logit_bias or self.allowed is not None or self.reweighted
        )

    @property
    def reweighted(self) -> bool:
        """Kept tokens change their odds: by a bias or a penalty."""
        bias = any(amount > -np.inf for _, amount in self.sampling.logit_bias)
        return bias or self.seen is not None


class Conditions:
    """The state of one row. Only `push` changes it."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        mask: MaskProvider | None = None,
    ) -> None:
        self._sampling, self._mask = sampling, mask
        self._generated: list[int] = []
        self._phrases = [(phrase[:-1], phrase[-1]) for phrase in sampling.bad_words]
        distinct = dict.fromkeys(prompt_ids) if sampling.penalised else {}
        self._index = {token: at for at, token in enumerate(distinct)}
        self._ids = np.fromiter(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.int64)

    def push(self, token: int) -> None:
        """A token was emitted."""
        self._generated.append(token)
        if self._sampling.penalised:
            self._ids, self._counts = self._count_in([token])
            self._index.setdefault(token, len(self._ids) - 1)

    def along(
        self, draft_ids: Sequence[int], parents: Sequence[int] | None = None
    ) -> list[Condition]:
        """Conditions after the emitted tokens, and after each drafted one: len(draft) + 1. A tree
        names each node's parent, -1 being the last emitted token; None is a chain."""
        conditions = [self._after([])]
        paths: list[list[int]] = []
        for node, token in enumerate(draft_ids):
            parent = node - 1 if parents is None else parents[node]
            path = [*paths[parent], token] if parent >= 0 else [token]
            paths.append(path)
            before = conditions[parent + 1]
            forbidden = before.allowed is not None and not bool(before.allowed[token])
            if not before.reachable or forbidden or token in self._sampling.stop_ids:
                conditions.append(Condition(SamplingParams(), reachable=False))
            else:
                conditions.append(self._after(path))
        return conditions

    def behind(self, draft_ids: Sequence[int]) -> Condition:
        """The last of `along`, for a chain that its own laws can emit and that has not ended the
        row: what the law of its next token must heed."""
        return self._after(list(draft_ids))

    def _after(self, path: list[int]) -> Condition:
        sampling = self._sampling
        return Condition(
            sampling,
            banned=self._banned(path),
            allowed=self._allowed(path),
            seen=Seen(*self._count_in(path)) if sampling.penalised else None,
        )

    def _allowed(self, path: list[int]) -> torch.Tensor | None:
        if self._mask is None:
            return None
        return self._mask([*self._generated, *path])

    def _banned(self, path: list[int]) -> tuple[int, ...]:
        num_generated = len(self._generated) + len(path)
        banned = self._sampling.stop_ids if num_generated < self._sampling.min_tokens else ()
        if not self._phrases:
            return banned
        longest = max(len(start) for start, _ in self._phrases)
        recent = tuple((self._generated[-longest:] + path)[-longest:]) if longest else ()
        ends = [
            last
            for start, last in self._phrases
            if len(start) <= len(recent) and recent[len(recent) - len(start) :] == start
        ]
        return (*banned, *ends)

    def _count_in(self, path: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Ids and counts with the path's tokens added."""
        new = [token for token in dict.fromkeys(path) if token not in self._index]
        at = (
            self._index | {token: len(self._ids) + i for i, token in enumerate(new)}
            if new
            else (self._index)
        )
        ids = np.concatenate([self._ids, np.array(new, dtype=np.int64)])
        counts = np.concatenate([self._counts, np.zeros(len(new), dtype=np.int64)])
        np.add.at(counts, [at[token] for token in path], 1)
        return ids, counts


def checked_mask(provider: MaskProvider, vocab_size: int) -> MaskProvider:
    """The same provider, raising InvalidRequest when it returns anything but [V] booleans."""

    def allowed_after(generated: Sequence[int]) -> torch.Tensor:
        allowed = provider(generated)
        if allowed.shape != (vocab_size,) or allowed.dtype != torch.bool:
            raise InvalidRequest(
                f"grammar mask of shape {tuple(allowed.shape)}, {allowed.dtype}: "
                f"expected ({vocab_size},), torch.bool"
            )
        return allowed

    return allowed_after
