"""vLLM as it is, without our plug-in: what `rollout audit --engine vllm --stock` looks at.

Its own sampler, its own speculation (n-gram, a draft model, or none), weights of the folder only.
It returns one log-probability a token, so laws without filters can be audited. For the audit, not for
recipes: what it emits is not exact everywhere.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams as VllmSamplingParams
from vllm.sampling_params import RequestOutputKind

from actors.engine_spec import EngineSpec
from actors.vllm.launch import engine_args, longest_draft, retire, start
from rollout.checkpoint import read_config
from rollout.engine import EngineLimits, InFlight
from rollout.errors import InvalidConfig, InvalidRequest
from rollout.request import RolloutRequest, RolloutSample, SpecCounters, Timings
from rollout.streams import row_key


@dataclass(frozen=True, slots=True)
class _Folder:
    """Stands for the weights that vLLM read itself."""

    def bytes(self) -> int:
        return 0

    def kernels(self) -> dict[str, str]:
        return {"all": "vLLM"}


class StockVllmEngine:
    """As much of `rollout.engine.Engine` as an audit asks for."""

    def __init__(self, spec: EngineSpec) -> None:
        arguments = engine_args(spec)
        arguments.worker_extension_cls, arguments.weight_transfer_config = "", None
        arguments.logprobs_mode = "processed_logprobs"
        arguments.speculative_config = stock_speculation(spec)
        if arguments.speculative_config is not None:
            arguments.per_request_spec_decode_metrics = "detailed"
        config = read_config(Path(spec.model_folder))
        self.limits = EngineLimits(config.vocab_size, spec.context_len, can_decode=False)
        self._core, self._mode = start(arguments), spec.mode
        self.version: int | None = None
        self._digest, self._names = "", itertools.count()
        self._flying: dict[str, RolloutRequest] = {}

    def check(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            _params(request)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        for request, params in zip(requests, map(_params, requests)):
            name = str(next(self._names))
            self._flying[name] = request
            self._core.add_request(name, {"prompt_token_ids": list(request.prompt_ids)}, params)

    @property
    def num_unfinished(self) -> int:
        return len(self._flying)

    def prepare(self, weights: Mapping[str, torch.Tensor]) -> _Folder:
        """The folder's own are in force already; no others can be."""
        return _Folder()

    def load(self, prepared: Any, *, version: int, digest: str, in_flight: InFlight) -> None:
        self.version, self._digest = version, digest

    def step(self) -> list[RolloutSample]:
        outputs = self._core.step() if self._flying else []
        return [self._sample(output) for output in outputs if output.finished]

    def _sample(self, output: Any) -> RolloutSample:
        assert self.version is not None, "loaded before it is stepped"
        out = output.outputs[0]
        logprobs = tuple(entry[token].logprob for entry, token in zip(out.logprobs, out.token_ids))
        num = len(out.token_ids)
        return RolloutSample(
            request=self._flying.pop(output.request_id),
            token_ids=tuple(out.token_ids),
            logprobs=logprobs,
            logprobs_full=logprobs,
            kept_mass=(1.0,) * num,
            version_spans=((self.version, num),),
            finish_reason=out.finish_reason,
            finish_detail=str(out.stop_reason or ""),
            mode=self._mode,
            weights_digest=self._digest,
            counters=_counters(out.spec_decode_metrics, num),
            timings=Timings(),
        )

    def close(self) -> None:
        retire(self._core)


def stock_speculation(spec: EngineSpec) -> dict[str, Any] | None:
    """vLLM's own proposers. Raises InvalidConfig for one that it has not."""
    length = {"num_speculative_tokens": longest_draft(spec)}
    if spec.proposer == "none":
        return None
    if spec.proposer == "ngram":
        return length | {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if spec.proposer == "vllm_draft_model":
        return length | {"method": "draft_model", "model": spec.draft_model}
    raise InvalidConfig(
        f"--stock with proposer={spec.proposer}: vLLM's own are none, ngram and vllm_draft_model"
    )


def _params(request: RolloutRequest) -> VllmSamplingParams:
    """Raises InvalidRequest for a law whose full-vocabulary log-probabilities it does not return."""
    sampling = request.sampling
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.greedy:
        raise InvalidRequest("--stock: vLLM returns one log-probability a token; drop the filters")
    key = row_key(request.run_seed, request.prompt_id, request.sample_index)
    return VllmSamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        seed=int.from_bytes(key[:7], "little"),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _counters(metrics: Any, num_tokens: int) -> SpecCounters:
    """Corrections and bonuses are not told apart: both count as plain."""
    if metrics is None:
        return SpecCounters(rounds=num_tokens, plain=num_tokens)
    accepted = min(sum(metrics.per_step_accepted), num_tokens)
    drafted = metrics.num_draft_tokens
    return SpecCounters(
        rounds=num_tokens - accepted,
        drafted=drafted,
        verified=drafted,
        accepted=accepted,
        plain=num_tokens - accepted,
    )
