"""The ladder on vLLM: the same four rungs, by vLLM's kernels, with our law and proposers.

Two engines, full precision and W8A8, each once with a proposer and once without, over the same
requests. Rung, rates and comparisons are those of `recipes.ladder`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from actors.engine_spec import EngineSpec, make_proposer, pack_weights
from actors.vllm.engine import VllmEngine
from proposers.history import HistoryProposer
from quant.drift import measure_drift
from recipes.ladder import Ladder
from rollout.engine import run_to_end
from rollout.packing import digest
from rollout.request import RolloutRequest, RolloutSample


class VllmLadder(Ladder):
    """Two engines, four ways to sample them."""

    def __init__(
        self,
        spec: EngineSpec,
        weights: Mapping[str, torch.Tensor],
        probe_ids: Sequence[Sequence[int]],
        history: Sequence[RolloutSample],
    ) -> None:
        self._history = history
        self._specs = {
            "full precision": replace(spec, format="none", mode="full"),
            "quantised": replace(spec, format="int8_w8a8", mode="quantised"),
        }
        self._engines = {name: VllmEngine(made) for name, made in self._specs.items()}
        next_tokens = torch.tensor([token for ids in probe_ids for token in ids[1:]])
        self._prepared, self._drift = {}, {}
        reference: torch.Tensor | None = None
        for name, engine in self._engines.items():
            packed = pack_weights(self._specs[name], weights.items())
            prepared, named = engine.prepare(packed), digest(packed)
            engine.load(prepared, version=0, digest=named, in_flight="interrupt")
            engine.step()
            self._prepared[name] = prepared, named
            logprobs = engine.probe(probe_ids)
            reference = logprobs if reference is None else reference
            drift = measure_drift(reference, logprobs, next_tokens)
            self._drift[name] = max(drift.kl, 0.0)

    def _run(
        self, weights: str, speculative: bool, requests: Sequence[RolloutRequest]
    ) -> tuple[float, list[RolloutSample]]:
        engine = self._engines[weights]
        engine.renew(speculative=speculative)
        if speculative and (memory := engine.memory) is not None:
            memory.merge(self._remembered(weights))
        started = time.perf_counter()
        samples = run_to_end(engine, requests)
        return time.perf_counter() - started, samples

    def _remembered(self, weights: str) -> dict[str, torch.Tensor]:
        """What the run had recorded, as a proposer of these weights takes it in."""
        proposer = make_proposer(self._specs[weights])
        assert isinstance(proposer, HistoryProposer), "no other remembers under vLLM"
        for sample in self._history:
            proposer.remember(sample.request.prompt_ids, sample.token_ids, sample.logprobs)
        return proposer.export()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
