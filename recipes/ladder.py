"""The four-step ladder: what quantisation and speculation each buy, on the run's own prompts.

Plain full precision, plain quantised, speculative full precision, speculative quantised; the same
requests with the same seeds on each, one after the other, several times round in one process, so that
a slow moment of the machine hits all of them. A round uses seeds of its own. The history proposer
starts each time from what the run had recorded, never from the ladder's own rollouts.

`same_tokens_rate` says how many samples came out token for token as on the plain rung of the same
weights: speculation with point-mass drafts draws what plain decoding draws, so what is missing to 1 is
rounding between forwards of different widths. Drafts that are drawn give other tokens of the same law.

In lossless mode the speculative rung of full precision is that mode, and that of the quantised weights
drafts from history.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from actors.engine_spec import (
    EngineSpec,
    make_draft_len,
    make_engine,
    make_policy,
    make_proposer,
    pack_weights,
    read_mtp,
)
from proposers.history import HistoryProposer
from proposers.mixture import MixtureProposer
from quant.drift import Drift, measure_drift
from quant.formats import FormatName
from rollout.draft_len import FixedDraftLen
from rollout.engine import run_to_end
from rollout.packing import digest
from rollout.probe import DriftProbe
from rollout.request import RolloutRequest, RolloutSample, SpecCounters

QUANTISED_DEFAULT: FormatName = "int8_w8a16"


@dataclass(frozen=True, slots=True)
class Rung:
    """One row of the ladder. Ratios are sums over sums over all repeats."""

    name: str
    tokens_per_s: float
    """Median over repeats of emitted tokens / seconds, prompts included."""
    tokens_per_s_min: float
    tokens_per_s_max: float
    tokens_per_target_step: float
    acceptance_rate: float | None
    drift_kl: float
    same_tokens_rate: float
    weights_bytes: int
    kernel: str
    speedup_vs_first: float = 1.0


class Ladder:
    """Two sets of weights, four ways to sample them."""

    def __init__(
        self,
        spec: EngineSpec,
        weights: Mapping[str, torch.Tensor],
        probe_ids: Sequence[Sequence[int]],
        history: Sequence[RolloutSample],
        head: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """`head`: the MTP head where one drafts; None takes the one that the spec names."""
        quantised = QUANTISED_DEFAULT if spec.format == "none" else spec.format
        self._history = history
        if spec.mode == "lossless":  # the quantised weights have nobody to draft for them
            full_spec = spec
            quant_spec = replace(spec, mode="quantised", proposer="history")
        else:
            full_spec = replace(spec, format="none", mode="full")
            quant_spec = replace(spec, format=quantised, mode="quantised")
        self._specs = {"full precision": full_spec, "quantised": quant_spec}
        self._policies = {name: make_policy(s) for name, s in self._specs.items()}
        self._prepared: dict[str, Any] = {}
        self._drift: dict[str, float] = {}
        reference: torch.Tensor | None = None
        for name, policy in self._policies.items():
            made = self._specs[name]
            packed = pack_weights(made, weights.items())
            if made.has_head:
                packed |= head or read_mtp(made)
            self._prepared[name] = (policy.load(packed), digest(packed))
            probe = DriftProbe(
                make_policy(
                    self._specs[name],
                    num_slots=len(probe_ids),
                    context_len=max(map(len, probe_ids)),
                ),
                probe_ids,
            )
            logits = probe.logits(self._prepared[name][0])
            reference = logits.log_softmax(-1) if reference is None else reference
            drift: Drift = measure_drift(reference, logits, probe.next_tokens)
            self._drift[name] = max(drift.kl, 0.0)
        self._draft_lens = {name: make_draft_len(made) for name, made in self._specs.items()}

    def measure(self, requests: Sequence[RolloutRequest], repeats: int) -> list[Rung]:
        """Runs every rung `repeats` times, alternating, after one short warm-up each."""
        for weights in self._specs:
            for speculative in (False, True):
                self._run(weights, speculative, requests[:2])
        runs: dict[tuple[bool, str], list[tuple[float, list[RolloutSample]]]] = {}
        for repeat in range(repeats):
            seeded = [replace(r, run_seed=r.run_seed + 1 + repeat) for r in requests]
            for speculative in (False, True):
                for weights in self._specs:
                    run = self._run(weights, speculative, seeded)
                    runs.setdefault((speculative, weights), []).append(run)
        rungs = [
            self._rung(speculative, weights, runs[speculative, weights], runs[False, weights])
            for speculative in (False, True)
            for weights in self._specs
        ]
        first = rungs[0].tokens_per_s
        return [replace(r, speedup_vs_first=r.tokens_per_s / first) for r in rungs]

    def _run(
        self, weights: str, speculative: bool, requests: Sequence[RolloutRequest]
    ) -> tuple[float, list[RolloutSample]]:
        """Seconds and samples, in order of request."""
        spec = (
            self._specs[weights] if speculative else replace(self._specs[weights], proposer="none")
        )
        proposer = make_proposer(spec, self._policies[weights])
        if isinstance(proposer, HistoryProposer | MixtureProposer):
            for sample in self._history:
                proposer.remember(sample.request.prompt_ids, sample.token_ids, sample.logprobs)
        engine = make_engine(
            spec,
            policy=self._policies[weights],
            proposer=proposer,
            draft_len=self._draft_lens[weights] if speculative else FixedDraftLen(0),
        )
        prepared, name = self._prepared[weights]
        engine.load(prepared, version=0, digest=name, in_flight="interrupt")
        started = time.perf_counter()
        samples = run_to_end(engine, requests)
        seconds = time.perf_counter() - started
        return seconds, samples

    def _rung(
        self,
        speculative: bool,
        weights: str,
        runs: Sequence[tuple[float, list[RolloutSample]]],
        plain: Sequence[tuple[float, list[RolloutSample]]],
    ) -> Rung:
        counters = SpecCounters()
        same = total = 0
        for (_, samples), (_, reference) in zip(runs, plain, strict=True):
            for sample, other in zip(samples, reference, strict=True):
                counters.add(sample.counters)
                same += sample.token_ids == other.token_ids
                total += 1
        rates = [sum(len(s.token_ids) for s in samples) / seconds for seconds, samples in runs]
        prepared = self._prepared[weights][0]
        return Rung(
            name=f"{'speculative' if speculative else 'plain'} {weights}",
            tokens_per_s=statistics.median(rates),
            tokens_per_s_min=min(rates),
            tokens_per_s_max=max(rates),
            tokens_per_target_step=counters.tokens_per_target_step or 0.0,
            acceptance_rate=counters.acceptance_rate,
            drift_kl=self._drift[weights],
            same_tokens_rate=same / total,
            weights_bytes=prepared.bytes(),
            kernel=prepared.kernels()["blocks"],
        )


def ladder_rows(rungs: Sequence[Rung]) -> list[dict[str, Any]]:
    """As written to summary.json."""
    return [asdict(rung) for rung in rungs]
