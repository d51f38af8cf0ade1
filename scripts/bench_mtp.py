#!/usr/bin/env python
"""What an MTP head of SmolLM2 drafts after minutes of training, and what training it along is worth.

    python scripts/bench_mtp.py [--rollouts T1.safetensors] [--run RUN] [--parts recorded task drift]
        [--minutes 10] [--steps N] [--task-steps 40] [--drift-steps 50] [--threads 2]
        [--out bench/mtp] [--again] [--json]

recorded  a head trained on recorded rollouts (`record_rollouts.py`, default prompts; made here where
          none are named), by what `rollout train-mtp` runs.
task      the same for the policy of a run's last checkpoint, on its own rollouts of the run's prompts
          (`rollout run recipes/quickstart.yaml steps=20`, made here where no run is named).
drift     two copies of a head trained on the first policy's rollouts of those prompts, while the
          run's accepted groups are trained on again, one a step, from the first policy on: one copy
          is trained along, the other stands still.

Acceptance at depth k is the mean over positions of sum_x min(p, q), with p the policy's whole law at
the rollout temperature and q the head's over its draft vocabulary, where the tokens before are those of
the rollout: the chance that a drafted token is accepted when those before it were. It is measured on
samples that were trained on by nobody, of the same prompts: the last sixth of each prompt's, and in the
drift the last two of each group, of the last groups of the run.

Times are given by the clock and in processor seconds of all threads; the second count where others
use the machine. What was recorded, trained and measured is kept in --out, and not made again by
a call with the same settings at the same commit; --again measures anew with the recordings and heads
that are there.

Not measured: drafting in an engine (`bench_alone.py`), other models, other prompts than those trained
on.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from actors.engine_spec import history_salt
from actors.group_queue import RolloutGroup
from recipes.arithmetic import ArithmeticTask
from recipes.config import RunConfig, load_config
from recipes.grpo import Learner, pack_group, responses_of
from recipes.mtp_head import MtpHead
from recipes.mtp_training import MtpStats, MtpTrainer, Response, acceptance
from recipes.passport import project_state
from recipes.recorded_rollouts import Recording
from recipes.smollm2 import model_folder
from recipes.train_mtp import MtpOptions, train_mtp
from rollout.checkpoint import read_config, read_tokenizer
from rollout.mtp_weights import load_mtp, save_mtp
from rollout.request import RolloutSample
from scripts.bench_kept import Kept
from scripts.bench_trained import policy_folder, trained_run
from scripts.record_rollouts import make_prompts, record, tell

Tell = Callable[[str], None]
Tensors = dict[str, torch.Tensor]
QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.yaml"
TASK_SAMPLES = 16
"""Of each prompt of the task."""
HELD_OUT = 2
"""Samples of each group, in the drift."""
EVALUATED_GROUPS = 16
EVALUATED_EVERY = 25


def head_of(
    folder: Path, recording: Recording, options: MtpOptions, tell: Tell
) -> tuple[Tensors, dict[str, Any]]:
    """A trained head, and its report."""
    head, report = train_mtp(folder, recording, options, tell)
    cpu_s = report.read_cpu_s + report.train_cpu_s
    return head.tensors(version=0), {**report.to_json(), "cpu_minutes": round(cpu_s / 60, 2)}


def recorded_rollouts(path: Path, tell: Tell) -> Recording:
    """Of the default prompts: from a file, made here where it is not there."""
    if not path.is_file():
        record(
            make_prompts(12, read_tokenizer(model_folder("smollm2")), 0),
            num_samples=17,
            num_tokens=160,
            temperature=1.0,
            quant="int8_w8a16",
            seed=0,
            num_rows=32,
            tell=tell,
        ).save(path)
    return Recording.load(path)


# ---- a run's policy and prompts -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run folder."""

    path: Path
    config: RunConfig

    @staticmethod
    def open(path: Path) -> "PastRun":
        return PastRun(path, load_config(path / "config.yaml"))

    @property
    def last_checkpoint(self) -> Path:
        return sorted((self.path / "checkpoints").glob("step-*"))[-1]

    def policy_folder(self) -> Path:
        """A model folder of the last checkpoint's weights."""
        return policy_folder(self.last_checkpoint, self.path / "policy", self.config.model.path)

    def rollouts(self, folder: Path, tell: Tell) -> Recording:
        """Of a policy on the run's prompts, as the run samples."""
        task, sampling = self.config.task, self.config.sampling
        problems = ArithmeticTask(
            num_problems=task.num_problems, max_operand=task.max_operand, seed=self.config.seed
        ).problems
        tokenizer = read_tokenizer(folder)
        prompts = [tokenizer.encode(p.prompt, add_special_tokens=False) for p in problems]
        return record(
            [tuple(ids) for ids in prompts],
            num_samples=TASK_SAMPLES,
            num_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            quant=self.config.quant,  # type: ignore[arg-type]  # checked against its choices
            seed=1,
            num_rows=32,
            tell=tell,
            folder=folder,
            stop_strings=tuple(sampling.stop_strings),
        )

    def groups(self) -> list[tuple[RolloutGroup, list[float]]]:
        """Whole groups that the run trained on, and their rewards, in order."""
        samples = defaultdict[str, list[tuple[RolloutSample, float]]](list)
        for line in (self.path / "samples.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row["fate"] == "accepted":
                sample = RolloutSample.from_json({"attempt": 0, **row})
                samples[row["group_id"]].append((sample, row["reward"]))
        groups = []
        for id_, some in samples.items():
            some.sort(key=lambda pair: pair[0].request.sample_index)
            of_group, rewards = zip(*some)
            group = RolloutGroup(id_, of_group[0].request.prompt_id, of_group, len(of_group))
            groups.append((group, list(rewards)))
        return groups


# ---- drift --------------------------------------------------------------------------------


class TimedTrainer(MtpTrainer):
    """Counts the processor seconds of its steps."""

    cpu_s = 0.0

    def step(self, *arguments: Any, **options: Any) -> MtpStats | None:
        started = time.process_time()
        stats = super().step(*arguments, **options)
        self.cpu_s += time.process_time() - started
        return stats


def measure_drift(
    past: PastRun, folder: Path, head: Tensors, *, steps: int, learning_rate: float, tell: Tell
) -> dict[str, Any]:
    """Acceptance of a head that is trained along and of its copy that is not, as the policy of a
    folder goes the run's way."""
    config = read_config(folder)
    trainer = TimedTrainer(
        MtpHead.from_tensors(head, config),
        learning_rate=learning_rate,
        depths=past.config.mtp.depths,
    )
    heads = {"online": trainer.head, "frozen": MtpHead.from_tensors(head, config)}
    learner = Learner(folder, past.config.learner, past.config.sampling.temperature, trainer)
    groups = past.groups()
    unseen = [
        replace(group, samples=group.samples[-HELD_OUT:]) for group, _ in groups[-EVALUATED_GROUPS:]
    ]
    rows = [{"step": 0, **_measure(learner, heads, unseen)}]
    step_cpu_s = 0.0
    for step in range(1, steps + 1):
        group, rewards = groups[(step - 1) % len(groups)]
        seen = replace(group, samples=group.samples[:-HELD_OUT])
        started = time.process_time()
        learner.step([seen], [rewards[:-HELD_OUT]])
        step_cpu_s += time.process_time() - started
        if step == steps or step % EVALUATED_EVERY == 0:
            rows.append({"step": step, **_measure(learner, heads, unseen)})
            tell(f"drift: {json.dumps(rows[-1])}")
    gain, error = _gain(learner, heads, unseen)
    return {
        "groups": len(groups),
        "repeats": steps > len(groups),
        "learning_rate": learning_rate,
        "rows": rows,
        "gain_points": round(100 * gain, 2),
        "gain_error_points": round(100 * error, 2),
        "cpu_s_a_step": round(step_cpu_s / steps, 3),
        "head_share_of_step": round(trainer.cpu_s / step_cpu_s, 4),
    }


@torch.no_grad()
def _measure(
    learner: Learner, heads: dict[str, MtpHead], groups: Sequence[RolloutGroup]
) -> dict[str, Any]:
    vocabulary = heads["frozen"].vocabulary
    responses: list[Response] = []
    for packed in map(pack_group, groups):
        responses += responses_of(packed, learner.score(packed), vocabulary)
    long_enough = [r for r in responses if len(r.token_ids) > 1]
    return {
        name: [round(x, 4) for x in acceptance(head, learner.shared(vocabulary), long_enough, 3)]
        for name, head in heads.items()
    }


def _gain(
    learner: Learner, heads: dict[str, MtpHead], groups: Sequence[RolloutGroup]
) -> tuple[float, float]:
    """Acceptance at depth 1 of the head that was trained along over that of the other, and its
    standard error, by groups."""
    gains, nums = [], []
    for group in groups:
        rates = _measure(learner, heads, [group])
        num = sum(max(0, len(sample.token_ids) - 1) for sample in group.samples)
        if num:
            gains.append(num * (rates["online"][0] - rates["frozen"][0]))
            nums.append(num)
    assert len(nums) > 1, "a standard error takes two groups"
    gain = sum(gains) / sum(nums)
    squares = sum((one - gain * num) ** 2 for one, num in zip(gains, nums))
    return gain, math.sqrt(squares * len(nums) / (len(nums) - 1)) / sum(nums)


# ---- the whole ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured."""

    rollouts: Path
    run: Path | None
    """None: trained here."""
    options: MtpOptions
    task_options: MtpOptions
    drift_steps: int
    drift_learning_rate: float
    threads: int
    out: Path


def measure_recorded(plan: Plan, tell: Tell) -> dict[str, Any]:
    recording = recorded_rollouts(plan.rollouts, tell)
    return head_of(model_folder("smollm2"), recording, plan.options, tell)[1]


def measure_task(plan: Plan, tell: Tell) -> dict[str, Any]:
    past = _past_run(plan)
    trained = past.policy_folder()
    report = head_of(trained, past.rollouts(trained, tell), plan.task_options, tell)[1]
    return {"checkpoint": past.last_checkpoint.name, **report}


def measure_drift_of_run(plan: Plan, tell: Tell) -> dict[str, Any]:
    past, first = _past_run(plan), model_folder("smollm2")
    return measure_drift(
        past,
        first,
        first_head(past, plan, tell),
        steps=plan.drift_steps,
        learning_rate=plan.drift_learning_rate,
        tell=tell,
    )


def first_head(past: PastRun, plan: Plan, tell: Tell) -> Tensors:
    """Trained on the first policy's rollouts of a run's prompts, by this call or an earlier one."""
    folder, steps = model_folder("smollm2"), plan.task_options.max_steps
    path = plan.out / f"first-{past.path.name}-{steps}.safetensors"
    if not path.is_file():
        head, _ = head_of(folder, past.rollouts(folder, tell), plan.task_options, tell)
        save_mtp(path, head, history_salt(folder))
    return load_mtp(path, read_config(folder), history_salt(folder))


def _past_run(plan: Plan) -> PastRun:
    return PastRun.open(plan.run or trained_run(plan.out / "runs", QUICKSTART))


PARTS = {"recorded": measure_recorded, "task": measure_task, "drift": measure_drift_of_run}


def measure(parts: Sequence[str], plan: Plan, kept: Kept, tell: Tell) -> dict[str, Any]:
    """What `bench_proposers.py` shows of heads, and beside it each part as measured; None for a part
    that was not asked for."""
    torch.set_num_threads(plan.threads)
    measured: dict[str, Any] = dict.fromkeys(PARTS)
    for part in parts:
        measured[part] = kept.find_or(part, lambda part=part: PARTS[part](plan, tell))  # type: ignore[misc]
    recorded, drift = measured["recorded"], measured["drift"]
    return {
        "rate_depth1": recorded and recorded["acceptance"][0],
        "train_minutes": recorded and round(recorded["cpu_minutes"] / plan.threads, 2),
        "online_gain_points": drift and drift["gain_points"],
        **measured,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rollouts", type=Path, default=None, help="of record_rollouts.py; made in --out"
    )
    parser.add_argument("--run", type=Path, default=None, help="run folder of the quickstart")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=10.0, help="for each head")
    parser.add_argument("--steps", type=int, default=None, help="of training at most")
    parser.add_argument("--task-steps", type=int, default=40, help="the same on the run's prompts")
    parser.add_argument("--drift-steps", type=int, default=50)
    parser.add_argument("--drift-learning-rate", type=float, default=6e-4, help="of the head")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/mtp"), help="folder of results")
    parser.add_argument("--again", action="store_true", help="measure what --out has anew")
    parser.add_argument("--json", action="store_true", help="the JSON line only")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    plan = Plan(
        rollouts=arguments.rollouts or arguments.out / "rollouts.safetensors",
        run=arguments.run,
        options=MtpOptions(minutes=arguments.minutes, max_steps=arguments.steps),
        task_options=MtpOptions(minutes=arguments.minutes, max_steps=arguments.task_steps),
        drift_steps=arguments.drift_steps,
        drift_learning_rate=arguments.drift_learning_rate,
        threads=arguments.threads,
        out=arguments.out,
    )
    settings = {name: str(value) for name, value in asdict(plan).items()}
    kept = Kept(arguments.out, settings | {"commit": project_state()["commit"]})
    if arguments.again:
        kept.forget()
    measured = measure(arguments.parts, plan, kept, (lambda _: None) if arguments.json else tell)
    if not arguments.json:
        tell("")
        for name in PARTS:
            if measured[name] is not None:
                print(f"{name}: {json.dumps(measured[name], indent=2)}")
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
