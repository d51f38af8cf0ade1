"""What vLLM's worker is asked by our engine, mixed into it by `worker_extension_cls`.

Arguments and answers are plain objects, so that a worker may be in another process. Where a model is
split over several workers, each has our law in place and the one that leads has the rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from actors.engine_spec import (
    EngineSpec,
    make_compile_grammar,
    make_decode,
    make_draft_len,
    make_proposer,
    num_ids,
)
from actors.vllm.executor import end_with_parent
from actors.vllm.pass_through import check_joined, gpu_of
from actors.vllm.proposer import RowProposer
from actors.vllm.ranks import leads, num_ranks
from actors.vllm.rounds import Parts, Rounds
from actors.vllm.support import VLLM_DRAFTERS
from actors.vllm.verifier import ExactSampler, ExactVerifier
from actors.vllm.weight_transfer import WeightTransferWorker, register
from proposers.none import NoProposer
from rollout.draft_len import FixedDraftLen
from rollout.engine import EngineLimits
from rollout.errors import InvalidConfig, RolloutError
from rollout.proposer import Remembering
from rollout.request import FinishReason, RolloutRequest, RolloutSample, SpecCounters

register()  # vLLM imports this in every worker's process, before it loads a model


@dataclass(frozen=True, slots=True)
class Refused:
    """An error as an answer: raised in another process, or returned bare, it would lose its type."""

    error: RolloutError


class RolloutWorker(WeightTransferWorker):
    """Every name begins with `rollout_`, so that none is vLLM's."""

    model_runner: Any
    device: torch.device
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    shutdown_weight_transfer_engine: Callable[[], None]
    rollout_spec: EngineSpec
    rollout_whole: Parts
    """As the spec has them."""
    rollout_rounds: Rounds

    def rollout_ask(self, method: str, arguments: tuple[Any, ...], everywhere: bool) -> Any:
        """What a method of ours answers, on every rank or on the one that leads, whose it is then:
        None of the others."""
        if not (everywhere or leads()):
            return None
        try:
            return getattr(self, method)(*arguments)
        except RolloutError as error:
            return Refused(error)

    def rollout_install(self, spec: EngineSpec, limits: EngineLimits) -> None:
        """Puts our law and verification in place, on every rank, and the rows and our proposer on the
        one that leads. Raises InvalidConfig for a model runner that has not the seams for it."""
        runner = self.model_runner
        if not isinstance(runner, GPUModelRunner):
            raise InvalidConfig(
                f"engine=vllm on {type(runner).__module__}.{type(runner).__name__}: the plug-in is for "
                "the V1 model runner; unset VLLM_USE_V2_MODEL_RUNNER"
            )
        if (num := num_ranks()) > 1:
            end_with_parent()
        rounds = None
        if leads():
            self.rollout_spec, self.rollout_whole = spec, _parts(spec, limits)
            rounds = self.rollout_rounds = Rounds(self.rollout_whole)
        runner.sampler = ExactSampler(runner, rounds, num)
        if runner.speculative_config is not None:
            runner.rejection_sampler = ExactVerifier(runner, rounds, num)
            # Drafts end with their row: no step has to do without one near the end of the context.
            runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens
            if rounds is not None and isinstance(runner.drafter, RowProposer):
                runner.drafter.bind(runner, rounds)

    def rollout_gpu(self) -> str:
        return gpu_of(self.device)

    def rollout_join(self, init_info: dict[str, Any]) -> None:
        """On every rank. Raises InvalidConfig."""
        self.shutdown_weight_transfer_engine()
        self.init_weight_transfer_engine(init_info)
        check_joined(self.weight_transfer_engine)

    def rollout_add(self, ticket: int, request: RolloutRequest) -> None:
        self.rollout_rounds.add(ticket, request)

    def rollout_token_ids(self, ticket: int) -> list[int]:
        return self.rollout_rounds.token_ids(ticket)

    def rollout_end(self, ticket: int, reason: FinishReason, detail: str) -> RolloutSample:
        return self.rollout_rounds.end(ticket, reason, detail)

    def rollout_publish(self, version: int, digest: str) -> None:
        self.rollout_rounds.publish(version, digest)

    def rollout_begin(self, draining: bool) -> None:
        self.rollout_rounds.begin(draining=draining)

    def rollout_take_ended(self) -> list[tuple[int, RolloutSample]]:
        return self.rollout_rounds.take_ended()

    def rollout_counters(self) -> SpecCounters:
        return self.rollout_rounds.counters()

    def rollout_gauges(self) -> Mapping[str, float]:
        return self.rollout_rounds.gauges()

    def rollout_explain(self) -> str:
        return self.rollout_rounds.explain()

    def rollout_renew(self, speculative: bool) -> None:
        """Goes on, idle, with a proposer that has seen nothing, or without one."""
        whole, rounds = self.rollout_whole, self.rollout_rounds
        proposer = make_proposer(self.rollout_spec) if speculative else NoProposer()
        draft_len = whole.draft_len if speculative else FixedDraftLen(0)
        rounds.parts = replace(whole, proposer=proposer, draft_len=draft_len)

    def rollout_remembers(self) -> bool:
        return isinstance(self.rollout_rounds.parts.proposer, Remembering)

    def rollout_export(self, name: str) -> dict[str, torch.Tensor]:
        """`name` is one of the exports of `rollout.proposer.Remembering`."""
        exported: dict[str, torch.Tensor] = getattr(self.rollout_rounds.parts.proposer, name)()
        return exported

    def rollout_merge(self, exported: Sequence[Mapping[str, torch.Tensor]]) -> None:
        memory = self.rollout_rounds.parts.proposer
        assert isinstance(memory, Remembering), "asked before"
        for one in exported:
            memory.merge(one)

    def rollout_release(self) -> None:
        """Takes the model apart, since vLLM hides it from the collector; the worker is of no use
        afterwards. Left are the modules that vLLM shares between the models of a process, and the tree
        of the others, over which it goes once more at the end."""
        shared, of_torch = set(map(id, _ROPE_DICT.values())), vars(torch.nn.Module()).keys()
        for module in list(self.model_runner.model.modules()):
            if id(module) in shared:
                continue
            for name in vars(module).keys() - of_torch:
                del vars(module)[name]
            module._parameters.clear()
            module._buffers.clear()


def _parts(spec: EngineSpec, limits: EngineLimits) -> Parts:
    own = spec.proposer not in VLLM_DRAFTERS
    return Parts(
        proposer=make_proposer(spec) if own else NoProposer(),
        draft_len=make_draft_len(spec) if own else FixedDraftLen(0),
        verification=spec.verification,
        mode=spec.mode,
        limits=limits,
        num_ids=num_ids(Path(spec.model_folder)),
        max_draft_len=max(spec.max_draft_len, spec.draft_len or 0),
        decode=make_decode(spec),
        compile_grammar=make_compile_grammar(spec),
    )
