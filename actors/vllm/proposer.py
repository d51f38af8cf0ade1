"""Our proposers where vLLM drafts (`speculative_config` with method `custom_class`).

vLLM asks once a step, after its own bookkeeping, for every request of the batch; what is drafted for
whom, and whether at all, is decided in `actors.vllm.rounds`. Where nothing is drafted the next step is
a plain one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.vllm.rounds import Rounds
from actors.vllm.verifier import ticket_of


class RowProposer:
    """Made by vLLM with its config; `bind` gives it the rows once the worker stands."""

    def __init__(self, vllm_config: Any) -> None:
        self._longest = vllm_config.speculative_config.num_speculative_tokens
        self._runner: Any = None
        self._rounds: Rounds | None = None

    def load_model(self, *_: Any) -> None:
        """There is none."""

    def bind(self, runner: Any, rounds: Rounds) -> None:
        self._runner, self._rounds = runner, rounds

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft ids of each request of the batch, at most as many as vLLM was told."""
        if self._rounds is None:  # vLLM's own start-up
            return [[] for _ in sampled_token_ids]
        drafts = dict(self._rounds.draft())
        tickets = [ticket_of(self._runner, name) for name in self._runner.input_batch.req_ids]
        return [[] if ticket is None else list(drafts.get(ticket, ())) for ticket in tickets]
