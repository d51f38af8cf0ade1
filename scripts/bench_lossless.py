"""Full precision at the speed of its quantised weights, in `bench_proposers.py`.

Lossless mode (the quantised weights draft, full precision verifies) and plain full precision take
turns of a few rounds on the same prompts and seeds, T=1; prompts are cached before the clock starts.
Beside it: what a learner would see of the recorded log-probabilities, as k3 = mean(r - 1 - log r)
with r the ratio of Hugging Face's float32 law to the recorded one: for lossless rollouts, and for
those of plain full precision, which says how far two right forwards are apart.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from actors.engine_spec import EngineSpec
from proposers.none import NoProposer
from quant.formats import FormatName
from rollout.draft_len import FixedDraftLen
from rollout.request import RolloutSample, SpecCounters
from rollout.sampling import SamplingParams
from scripts.bench_contenders import Prompts
from scripts.bench_never_loses import PLAIN, Way, decode_in_turns
from scripts.bench_ours import LoadedPolicy

NUM_TOKENS = 192
"""A row's: lengths are learnt in the first hundred rounds, of which shorter rows have hardly more."""
REPEATS = 2
"""Times that of the other parts; they take seconds."""
FORMATS_TRIED: tuple[FormatName, ...] = ("int8_w8a16", "int8_w8a8")


@dataclass(slots=True)
class LosslessCell:
    """One batch size and draft format."""

    batch: int
    format: FormatName
    speedups: list[float] = field(default_factory=list)
    """Of each repeat, as `bench_never_loses.py` takes a ratio."""
    counters: SpecCounters = field(default_factory=SpecCounters)
    k3: float = 0.0
    k3_plain: float = 0.0

    @property
    def speedup(self) -> float:
        """Median over repeats."""
        return statistics.median(self.speedups)

    def to_json(self) -> dict[str, object]:
        return {
            "batch": self.batch,
            "format": self.format,
            "speedup": self.speedup,
            "tokens_per_target_step": self.counters.tokens_per_target_step,
            "acceptance_rate": self.counters.acceptance_rate,
            "k3": self.k3,
            "k3_plain": self.k3_plain,
        }


def measure(
    folder: Path,
    prompts: Prompts,
    *,
    batches: Sequence[int],
    num_tokens: int,
    context_len: int,
    repeats: int,
    tell: Callable[[str], None],
) -> list[LosslessCell]:
    """All cells; the first pair of each warms up and is not counted."""
    cells = []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sampling = SamplingParams(max_new_tokens=num_tokens)
    for format_ in FORMATS_TRIED:
        spec = EngineSpec(
            str(folder),
            mode="lossless",
            format=format_,
            proposer="self_draft",
            max_draft_len=32,
            num_slots=max(batches),
            context_len=context_len,
            dtype="float32",
        )
        loaded = LoadedPolicy.make(spec)
        beside = loaded.beside()
        alone = replace(beside, spec=replace(spec, proposer="none"))
        plain = alone.engine(proposer=NoProposer(), draft_len=FixedDraftLen(0))
        for batch in batches:
            ways = {
                PLAIN: Way(plain, loaded.weights),
                "lossless": Way(loaded.engine(), loaded.weights),
            }
            cell = LosslessCell(batch, format_)
            taken: dict[str, list[RolloutSample]] = {PLAIN: [], "lossless": []}
            for repeat in range(-1, repeats):
                tell(f"lossless, {format_}, B={batch}: repeat {repeat + 1}/{repeats}")
                runs = decode_in_turns(ways, prompts[:batch], sampling, seed=2 + repeat)
                if repeat < 0:
                    continue
                lossless = runs["lossless"]
                cell.speedups.append(lossless.tokens / lossless.plain_tokens)
                for name, run in runs.items():
                    taken[name] += run.samples
            for sample in taken["lossless"]:
                cell.counters.add(sample.counters)
            cell.k3, cell.k3_plain = (_k3(model, taken[name]) for name in ("lossless", PLAIN))
            cells.append(cell)
    return cells


@torch.inference_mode()
def _k3(model: torch.nn.Module, samples: Sequence[RolloutSample]) -> float:
    """Mean over all tokens of r - 1 - log r, r = the model's law / the recorded one."""
    terms: list[float] = []
    for sample in samples:
        prompt = sample.request.prompt_ids
        ids = torch.tensor([[*prompt, *sample.token_ids]])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        law = logits.log_softmax(-1)[torch.arange(len(sample.token_ids)), list(sample.token_ids)]
        log_ratio = law.double() - torch.tensor(sample.logprobs, dtype=torch.float64)
        terms += (log_ratio.exp() - 1 - log_ratio).tolist()
    return statistics.fmean(terms)


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The better format of each batch size, and the worst mismatch of any cell."""
    speedup: dict[int, float] = {}
    for cell in cells:
        speedup[cell["batch"]] = max(cell["speedup"], speedup.get(cell["batch"], 0.0))
    return {
        "speedup": speedup,
        "k3": max(cell["k3"] for cell in cells),
        "k3_plain": max(cell["k3_plain"] for cell in cells),
        "cells": list(cells),
    }


def text(cells: Sequence[dict[str, Any]]) -> list[str]:
    """For people."""
    return [
        f"lossless, {cell['format']} drafts, B={cell['batch']}: {cell['speedup']:.2f}x plain full "
        f"precision, {cell['tokens_per_target_step']:.1f} tokens per target step, k3 "
        f"{cell['k3']:.1e} (plain {cell['k3_plain']:.1e})"
        for cell in cells
    ]
