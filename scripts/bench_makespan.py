"""How much sooner a training step's rollouts end with drafts, in `bench_proposers.py`.

The policy is that of the quickstart after 20 steps of GRPO, trained here by `rollout run`. A step is 8
prompts with 4 samples each of natural length: they end by end-of-text, at 256 tokens at the latest, so
the last rows decode alone. The history proposer has seen earlier samples of the same prompts by these
weights; in training those would be a few versions older. Makespan runs from submission to the last
token, prompts included; plain and speculative alternate on the same seeds. At the end each prompt is
sampled once more with nothing beside it, for what drafts earn one row.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from actors.engine_spec import EngineSpec
from proposers.history import HistoryProposer
from proposers.none import NoProposer
from quant.formats import FORMATS
from recipes.arithmetic import ArithmeticTask
from recipes.run_folder import Checkpoint
from rollout.checkpoint import read_config, read_tokenizer
from rollout.draft_len import AdaptiveDraftLen, FixedDraftLen
from rollout.engine import run_to_end
from rollout.native_engine import NativeEngine
from rollout.packing import pack
from rollout.policy import Policy
from rollout.request import RolloutRequest, RolloutSample, SpecCounters
from rollout.sampling import SamplingParams
from scripts.bench_never_loses import check_same
from scripts.bench_ours import LoadedPolicy

STEPS = 20
LAST_CHECKPOINT = f"step-{STEPS:06d}"
NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 8, 4, 256
EARLIER = 16
TRAIN_TIMEOUT_S = 1200


@dataclass(slots=True)
class Makespan:
    """Seconds of whole steps, plain and speculative, pair by pair."""

    plain_s: list[float] = field(default_factory=list)
    speculative_s: list[float] = field(default_factory=list)
    counters: SpecCounters = field(default_factory=SpecCounters)
    """Of the speculative steps."""
    lengths: list[int] = field(default_factory=list)
    alone: SpecCounters = field(default_factory=SpecCounters)
    """Of single rows, speculative."""
    alone_s: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    """Seconds of all of them, by whether they are plain."""

    @property
    def speedup(self) -> float:
        """Median of the ratios of pairs."""
        return statistics.median(p / s for p, s in zip(self.plain_s, self.speculative_s))

    def to_json(self) -> dict[str, Any]:
        return {
            "speedup": self.speedup,
            "plain_s": self.plain_s,
            "speculative_s": self.speculative_s,
            "tokens_per_target_step": self.counters.tokens_per_target_step,
            "acceptance_rate": self.counters.acceptance_rate,
            "lengths": sorted(self.lengths),
            "speedup_b1": self.alone_s[True] / self.alone_s[False],
            "tokens_per_target_step_b1": self.alone.tokens_per_target_step,
        }


def text(step: dict[str, Any]) -> list[str]:
    """For people."""
    return [
        f"makespan of {NUM_PROMPTS} x {NUM_SAMPLES} rollouts of up to {MAX_TOKENS} tokens: "
        f"{step['speedup']:.2f}x plain, {step['tokens_per_target_step']:.2f} tokens per target step; "
        f"one row at a time {step['speedup_b1']:.2f}x, {step['tokens_per_target_step_b1']:.2f}"
    ]


def trained_run(out: Path, recipe: Path) -> Path:
    """The folder of a run of the quickstart of `STEPS` steps: of an earlier call, or trained now."""
    if not (found := _runs(out)):
        command = [
            sys.executable, "-m", "recipes.cli", "run", str(recipe), f"steps={STEPS}",
            "max_minutes=null", f"checkpoint_every={STEPS}", "ladder.enabled=false",
            "wandb.mode=disabled", f"out={out}", "--json",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TRAIN_TIMEOUT_S)
        found = _runs(out)
    return found[-1]


def _runs(out: Path) -> list[Path]:
    return sorted(path.parent.parent for path in out.glob(f"*/checkpoints/{LAST_CHECKPOINT}"))


def trained_weights(run: Path) -> dict[str, torch.Tensor]:
    return Checkpoint(run / "checkpoints" / LAST_CHECKPOINT).model()


def measure(
    policy: Policy,
    spec: EngineSpec,
    weights: dict[str, torch.Tensor],
    repeats: int,
    tell: Callable[[str], None],
) -> Makespan:
    """Steps of new samples; the first pair warms up and is not counted."""
    folder = Path(spec.model_folder)
    config = read_config(folder)
    packed = pack(weights.items(), config, FORMATS[spec.target_format], spec.torch_dtype)
    loaded = LoadedPolicy(spec, config, policy, policy.load(packed))
    tokenizer = read_tokenizer(folder)
    task = ArithmeticTask(seed=0, num_problems=NUM_PROMPTS, max_operand=20)
    prompts = [
        tuple(tokenizer.encode(problem.prompt, add_special_tokens=False))
        for problem in task.problems
    ]
    sampling = SamplingParams(max_new_tokens=MAX_TOKENS, eos_token_ids=tuple(config.eos_token_ids))

    def requests(first: int, num: int) -> list[RolloutRequest]:
        """Samples first, first + 1, ... of every prompt."""
        return [
            RolloutRequest(f"{p}/{first + s}", f"g{p}", f"p{p}", first + s, ids, sampling)
            for p, ids in enumerate(prompts)
            for s in range(num)
        ]

    history = HistoryProposer()
    plain = loaded.engine(proposer=NoProposer(), draft_len=FixedDraftLen(0))
    drafting = loaded.engine(proposer=history, draft_len=AdaptiveDraftLen(8))

    def timed(
        engine: NativeEngine, asked: list[RolloutRequest]
    ) -> tuple[float, list[RolloutSample]]:
        started = time.perf_counter()
        samples = run_to_end(engine, asked)
        return time.perf_counter() - started, samples

    def pair(
        version: int, asked: list[RolloutRequest], plain_first: bool
    ) -> dict[bool, tuple[float, list[RolloutSample]]]:
        """The same requests by both, by whether they are plain."""
        took = {}
        for engine in (plain, drafting) if plain_first else (drafting, plain):
            engine.load(loaded.weights, version=version, digest="bench")
            took[engine is plain] = timed(engine, asked)
        check_same(took[True][1], took[False][1], f"samples of version {version}")
        return took

    tell(f"recording {EARLIER} samples of each of {NUM_PROMPTS} prompts")
    plain.load(loaded.weights, version=0, digest="bench")
    for sample in run_to_end(plain, requests(0, EARLIER)):
        history.remember(sample.request.prompt_ids, sample.token_ids, sample.logprobs)
    made = Makespan()
    first = EARLIER
    for repeat in range(-1, repeats):
        tell(f"makespan: step {repeat + 1}/{repeats}")
        took = pair(first, requests(first, NUM_SAMPLES), plain_first=repeat % 2 == 1)
        first += NUM_SAMPLES
        if repeat < 0:
            continue
        made.plain_s.append(took[True][0])
        made.speculative_s.append(took[False][0])
        for sample in took[False][1]:
            made.counters.add(sample.counters)
            made.lengths.append(len(sample.token_ids))
    for index, request in enumerate(requests(first, 1)):
        took = pair(first, [request], plain_first=index % 2 == 1)
        for is_plain, (seconds, _) in took.items():
            made.alone_s[is_plain] += seconds
        made.alone.add(took[False][1][0].counters)
    return made
