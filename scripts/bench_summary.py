"""From single runs to what the engine benchmark reports: medians, shares, steps, memory."""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from recipes.passport import machine, project_state, versions
from scripts.bench_contenders import Contender, Setting
from scripts.bench_exact import Checked
from scripts.bench_ours import OURS, QUANTISED_PLAIN, LoadedPolicy, OurEngine, OurRun
from scripts.bench_peers import VARIANT, PeerProcess, peak_resident_bytes
from scripts.bench_report import LABELS, Missing, Outcome, Step, best_by_batch
from scripts.bench_roofline import Roofline, cache_token_bytes, decode_step

Rates = dict[str, dict[int, list[float]]]


@dataclass(slots=True)
class Measured:
    """Engine -> B -> one entry a repeat."""

    tok_s: Rates = field(default_factory=dict)
    runs: dict[str, dict[int, list[OurRun]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Engine -> why it ended in the middle; what it had done counts."""


def best_variants(tok_s: Rates) -> tuple[Rates, dict[str, dict[int, str]]]:
    """Of a contender's variants the one with the best median, batch size by batch size; and which."""
    best: Rates = {}
    which: dict[str, dict[int, str]] = {}
    for contender in sorted(tok_s, key=lambda name: list(LABELS).index(name.split(VARIANT)[0])):
        name, _, variant = contender.partition(VARIANT)
        for batch, rates in tok_s[contender].items():
            so_far = best.setdefault(name, {}).get(batch)
            if so_far is None or statistics.median(rates) > statistics.median(so_far):
                best[name][batch] = rates
                if variant:
                    which.setdefault(name, {})[batch] = variant
    return best, which


def overhead(pairs: Sequence[tuple[float, float]]) -> float:
    """Ratio of the medians - 1."""
    plain, idle = zip(*pairs)
    return statistics.median(idle) / statistics.median(plain) - 1


def spread(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The smallest and the largest overhead of a pair."""
    each = [idle / plain - 1 for plain, idle in pairs]
    return min(each), max(each)


def steps_of(
    measured: Measured, ours: Mapping[str, OurEngine], setting: Setting
) -> dict[int, Step]:
    """A step of the better quantised plain engine, by batch size."""
    medians = {
        name: {batch: statistics.median(values) for batch, values in by.items()}
        for name, by in measured.tok_s.items()
    }
    return {
        batch: _step(ours[name], measured.runs[name][batch], setting, batch)
        for batch, name in best_by_batch(medians, QUANTISED_PLAIN).items()
    }


def _step(engine: OurEngine, runs: Sequence[OurRun], setting: Setting, batch: int) -> Step:
    loaded = engine.loaded
    prompt_len = statistics.mean(map(len, setting.prompts[:batch]))
    rounds = sum(run.num_rounds for run in runs)
    work = decode_step(
        loaded.config,
        weights_bytes=loaded.weights.bytes(),
        num_rows=batch,
        context_len=prompt_len + setting.num_tokens / 2,
        cache_itemsize=loaded.cache_tensors()[0].itemsize,
    )
    return Step(
        engine=engine.name,
        work=work,
        seconds=statistics.median(run.step_s for run in runs),
        by_phase_s=_each(runs, lambda run: run.by_phase, rounds),
        by_operation_s=_each(runs, lambda run: run.by_operation, rounds),
    )


def _each(
    runs: Sequence[OurRun], of: Callable[[OurRun], dict[str, float]], rounds: int
) -> dict[str, float]:
    """Seconds a round by name."""
    return {name: sum(of(run)[name] for run in runs) / rounds for name in of(runs[0])}


def shares_of(runs: Sequence[OurRun]) -> dict[str, float]:
    """Phase -> share of the engine's seconds, sums over sums."""
    whole = sum(run.seconds for run in runs)
    shares = {name: sum(run.by_phase[name] for run in runs) / whole for name in runs[0].by_phase}
    return shares | {"other": 1 - sum(shares.values())}


def speculation_of(runs: Sequence[OurRun]) -> dict[str, float | None]:
    """Acceptance and what it brought, sums over sums."""
    verified = sum(run.counters.verified for run in runs)
    accepted = sum(run.counters.accepted for run in runs)
    return {
        "acceptance_rate": accepted / verified if verified else None,
        "tokens_per_target_step": sum(run.counters.emitted for run in runs)
        / sum(run.counters.rounds for run in runs),
    }


def policy_name(loaded: LoadedPolicy) -> str:
    """Format and compute dtype."""
    dtype = str(loaded.spec.torch_dtype).removeprefix("torch.")
    return f"{loaded.spec.format} in {dtype}"


def memory_of(
    ours: Mapping[str, OurEngine], contenders: Mapping[str, Contender], setting: Setting
) -> dict[str, dict[str, int]]:
    """Bytes by place and name. `cache` is what the largest batch's tokens need at the cache's type,
    `cache_allocated` what the policy holds."""
    found: dict[str, dict[str, int]] = {}
    rows = max(setting.batches)
    tokens = sum(map(len, setting.prompts[:rows])) + rows * setting.num_tokens
    for name, engine in ours.items():
        if OURS[name].speculative:
            continue
        loaded, cache = engine.loaded, engine.loaded.cache_tensors()
        found[name] = {
            "weights_bytes": loaded.weights.bytes(),
            "cache_bytes": tokens * cache_token_bytes(loaded.config, cache[0].itemsize),
            "cache_allocated_bytes": sum(tensor.nbytes for tensor in cache),
        }
    found["this process (ours and Hugging Face)"] = {
        "peak_resident_bytes": peak_resident_bytes(os.getpid())
    }
    for name, contender in contenders.items():
        if isinstance(contender, PeerProcess):
            found[name] = {"peak_resident_bytes": contender.peak_bytes()}
    return found


def summarise(
    settings: Mapping[str, object],
    setting: Setting,
    ours: Mapping[str, OurEngine],
    contenders: Mapping[str, Contender],
    roofline: Roofline,
    checked: Sequence[Checked],
    measured: Measured,
    pairs: Sequence[tuple[float, float]],
    missing: Sequence[Missing],
    startup_s: Mapping[str, float],
    vllm_controller: Mapping[str, Any],
) -> Outcome:
    """Everything, in one place."""
    peers = [c for c in contenders.values() if isinstance(c, PeerProcess)]
    tok_s, variants = best_variants(measured.tok_s)
    return Outcome(
        num_tokens=setting.num_tokens,
        times=tok_s,
        steps=steps_of(measured, ours, setting),
        roofline=roofline,
        time_shares={
            name: {batch: shares_of(runs) for batch, runs in by.items()}
            for name, by in measured.runs.items()
        },
        speculation={
            name: {batch: speculation_of(runs) for batch, runs in by.items()}
            for name, by in measured.runs.items()
            if OURS[name].speculative
        },
        zero_speculation_overhead=overhead(pairs) if pairs else None,
        overhead_range=spread(pairs) if pairs else None,
        memory=memory_of(ours, contenders, setting),
        missing=missing,
        vllm_controller=vllm_controller,
        about={
            "machine": machine() | {"threads": torch.get_num_threads()},
            "versions": versions(),
            "peer_versions": {peer.name: peer.versions for peer in peers},
            "project": project_state(),
            "settings": {
                **settings,
                "batches": setting.batches,
                "prompt_lens": [len(prompt) for prompt in setting.prompts],
            },
            "kernels": {name: engine.loaded.weights.kernels() for name, engine in ours.items()},
            "checked": [asdict(one) for one in checked],
            "startup_s": dict(startup_s),
            "best_variants": variants,
            "idle_cpu_rate": {peer.name: peer.idle_cpu_rate for peer in peers},
        },
    )
