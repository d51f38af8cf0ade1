"""How much sooner a training step's rollouts end with drafts, in `bench_proposers.py`.

The policy is that of the quickstart after 20 steps of GRPO, trained here by `rollout run`. A step is 8
prompts with 4 samples each of natural length: they end by end-of-text, at 256 tokens at the latest, so
the last rows decode alone. The history proposer has seen earlier samples of the same prompts by these
weights; in training those would be a few versions older. Makespan runs from submission to the last
token, prompts included; plain and speculative alternate on the same seeds.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from actors.engine_spec import EngineSpec, make_engine
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

STEPS = 20
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

    @property
    def speedup(self) -> float:
        """Median of the ratios of pairs."""
        return statistics.median(p / s for p, s in zip(self.plain_s, self.speculative_s))


def train(out: Path, recipe: Path) -> dict[str, torch.Tensor]:
    """The quickstart's policy after `STEPS` steps, or the one that an earlier call left in `out`."""
    done = sorted(out.glob(f"*/checkpoints/step-{STEPS:06d}"))
    if not done:
        command = [
            sys.executable, "-m", "recipes.cli", "run", str(recipe), f"steps={STEPS}",
            "max_minutes=null", f"checkpoint_every={STEPS}", "ladder.enabled=false",
            "wandb.mode=disabled", f"out={out}", "--json",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TRAIN_TIMEOUT_S)
        done = sorted(out.glob(f"*/checkpoints/step-{STEPS:06d}"))
    return Checkpoint(done[-1]).model()


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
    prepared = policy.load(packed)
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
    plain = make_engine(spec, policy=policy, proposer=NoProposer(), draft_len=FixedDraftLen(0))
    drafting = make_engine(spec, policy=policy, proposer=history, draft_len=AdaptiveDraftLen(8))

    def step(engine: NativeEngine, first: int) -> tuple[float, list[RolloutSample]]:
        engine.load(prepared, version=first, digest="bench")
        asked = requests(first, NUM_SAMPLES)
        started = time.perf_counter()
        samples = run_to_end(engine, asked)
        return time.perf_counter() - started, samples

    tell(f"recording {EARLIER} samples of each of {NUM_PROMPTS} prompts")
    plain.load(prepared, version=0, digest="bench")
    for sample in run_to_end(plain, requests(0, EARLIER)):
        history.remember(sample.request.prompt_ids, sample.token_ids, sample.logprobs)
    made = Makespan()
    for repeat in range(-1, repeats):
        tell(f"makespan: step {repeat + 1}/{repeats}")
        first = EARLIER + NUM_SAMPLES * (repeat + 1)
        order = (plain, drafting) if repeat % 2 else (drafting, plain)
        took = {engine is plain: step(engine, first) for engine in order}
        check_same(took[True][1], took[False][1], f"step {repeat + 1}")
        if repeat < 0:
            continue
        made.plain_s.append(took[True][0])
        made.speculative_s.append(took[False][0])
        for sample in took[False][1]:
            made.counters.add(sample.counters)
            made.lengths.append(len(sample.token_ids))
    return made
