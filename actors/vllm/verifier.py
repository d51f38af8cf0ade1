"""Our law and verification where vLLM samples.

vLLM's model runner hands logits to `runner.rejection_sampler` where somebody drafts, in steps without
a draft as well, and else to `runner.sampler`. Both are replaced, so that every token goes through
`actors.vllm.rounds`; of vLLM's own sampling parameters only the length is used. The kernel that expands
parameters over drafted tokens, which returns garbage where Triton is absent, is never called.

Log-probabilities are kept by the rows and not returned through vLLM. Where a model is split over
workers the rows are one's (`actors.vllm.ranks`), and `rounds` is None for the others.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import Sampler

from actors.vllm.ranks import emitted_by_all
from actors.vllm.rounds import Rounds
from actors.vllm.scheduled import Scheduled

TICKET = "rollout_ticket"
"""Key of `SamplingParams.extra_args` by which a request is known here."""

Verify = Callable[[list[Scheduled], torch.Tensor], list[list[int]]]


class ExactSampler(Sampler):
    """A step of an engine in which nobody drafts."""

    def __init__(self, runner: Any, rounds: Rounds | None, num_ranks: int = 1) -> None:
        super().__init__(runner.model_config.logprobs_mode)
        self._runner, self._verify = runner, verifying(rounds, num_ranks)

    def forward(self, logits: torch.Tensor, *_: Any, **__: Any) -> SamplerOutput:
        num = self._runner.input_batch.num_reqs
        batch = scheduled(self._runner, [()] * num, [None] * num)
        return _output(self._verify(batch, logits), 1, logits.device)


class ExactVerifier(RejectionSampler):
    """A step of an engine with a proposer; any number of requests have a draft."""

    def __init__(self, runner: Any, rounds: Rounds | None, num_ranks: int = 1) -> None:
        super().__init__(runner.sampler, runner.speculative_config, runner.device)
        self._runner, self._verify = runner, verifying(rounds, num_ranks)

    def forward(
        self,
        metadata: Any,  # vllm.v1.spec_decode.metadata.SpecDecodeMetadata
        draft_probs: torch.Tensor | None,  # [num drafted, V]
        logits: torch.Tensor,  # [num drafted + B, V], those of a request side by side
        *_: Any,
        **__: Any,
    ) -> SamplerOutput:
        counts = metadata.num_draft_tokens
        ids = [tuple(part.tolist()) for part in metadata.draft_token_ids.split(counts)]
        probs = [None] * len(counts) if draft_probs is None else draft_probs.split(counts)
        batch = scheduled(self._runner, ids, list(probs))
        width = metadata.max_spec_len + 1
        return _output(self._verify(batch, logits), width, logits.device)


def verifying(rounds: Rounds | None, num_ranks: int) -> Verify:
    """What turns a batch and its logits into tokens: the rows, or those of the rank that leads."""

    def verify(batch: list[Scheduled], logits: torch.Tensor) -> list[list[int]]:
        assert rounds is not None, "the rank that leads has the rows"
        return rounds.verify(batch, logits)

    if num_ranks == 1:
        return verify
    return lambda batch, logits: emitted_by_all(lambda: verify(batch, logits))


def scheduled(
    runner: Any, draft_ids: list[tuple[int, ...]], draft_probs: list[torch.Tensor | None]
) -> list[Scheduled]:
    """What each request of the batch had in the forward that just ran."""
    inputs = runner.input_batch
    num = inputs.num_reqs
    offsets = runner.query_start_loc.np[: num + 1]
    return [
        Scheduled(
            ticket=ticket_of(runner, request_id),
            num_tokens=int(offsets[index + 1] - offsets[index]),
            num_known=int(inputs.num_tokens_no_spec[index]),
            draft_ids=(real := tuple(token for token in draft_ids[index] if token >= 0)),
            draft_probs=draft_probs[index],
            num_padded=len(draft_ids[index]) - len(real),
            partial=bool(runner.discard_request_mask.np[index]),
        )
        for index, request_id in enumerate(inputs.req_ids[:num])
    ]


def ticket_of(runner: Any, request_id: str) -> int | None:
    """The ticket of a request of vLLM's; None for one that is not ours."""
    ticket: int | None = (runner.requests[request_id].sampling_params.extra_args or {}).get(TICKET)
    return ticket


def _output(tokens: list[list[int]], width: int, device: torch.device) -> SamplerOutput:
    """As vLLM reads it: int32 [B, width], padded; a partial request's row is thrown away there."""
    padded = [[*ids, *[PLACEHOLDER_TOKEN_ID] * (width - len(ids))] for ids in tokens]
    ids = torch.tensor(padded, dtype=torch.int32, device=device)
    return SamplerOutput(sampled_token_ids=ids, logprobs_tensors=None)
