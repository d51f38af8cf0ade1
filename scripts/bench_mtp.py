#!/usr/bin/env python
"""What an MTP head of SmolLM2 drafts after minutes of training, and what training it along is worth.

    python scripts/bench_mtp.py [--rollouts T1.safetensors] [--run RUN] [--parts recorded task drift]
        [--minutes 10] [--steps N] [--task-steps 40] [--drift-steps 50] [--threads 2] [--json]

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
use the machine. Not measured: drafting in an engine (`bench_proposers.py`), other models, other prompts
than those trained on.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import load_file, save_file

from actors.group_queue import RolloutGroup
from recipes.arithmetic import ArithmeticTask
from recipes.config import RunConfig, load_config
from recipes.grpo import Learner, pack_group, responses_of
from recipes.mtp_head import MtpHead
from recipes.mtp_training import MtpStats, MtpTrainer, Response, acceptance
from recipes.recorded_rollouts import Recording
from recipes.run import run
from recipes.smollm2 import model_folder
from recipes.train_mtp import MtpOptions, train_mtp
from rollout.checkpoint import read_config, read_tokenizer
from rollout.request import RolloutSample
from scripts.record_rollouts import make_prompts, record, tell

Tell = Callable[[str], None]
Tensors = dict[str, torch.Tensor]
QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.yaml"
RUN_STEPS = 20
TASK_SAMPLES = 16
"""Of each prompt of the task."""
HELD_OUT = 2
"""Samples of each group, in the drift."""
EVALUATED_GROUPS = 10
EVALUATED_EVERY = 25


def head_of(
    folder: Path, recording: Recording, options: MtpOptions, tell: Tell
) -> tuple[Tensors, dict[str, Any]]:
    """A trained head, and its report."""
    head, report = train_mtp(folder, recording, options, tell)
    cpu_s = report.read_cpu_s + report.train_cpu_s
    return head.tensors(version=0), {**report.to_json(), "cpu_minutes": round(cpu_s / 60, 2)}


def recorded_rollouts(path: Path | None, threads: int, tell: Tell) -> Recording:
    """Of the default prompts: from a file, or made here."""
    if path is not None:
        return Recording.load(path)
    torch.set_num_threads(threads)
    return record(
        make_prompts(12, read_tokenizer(model_folder("smollm2")), 0),
        num_samples=17,
        num_tokens=160,
        temperature=1.0,
        quant="int8_w8a16",
        seed=0,
        num_rows=32,
        tell=tell,
    )


# ---- a run's policy and prompts -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run folder."""

    path: Path
    config: RunConfig

    @staticmethod
    def open(path: Path | None, scratch: Path) -> "PastRun":
        """A run that is there, or one of the quickstart made here."""
        if path is None:
            words = [f"steps={RUN_STEPS}", f"out={scratch / 'runs'}", "ladder.enabled=false"]
            quickstart = load_config(
                QUICKSTART, [*words, "wandb.mode=disabled", "max_minutes=null"]
            )
            path = Path(run(quickstart)["run"])
        return PastRun(path, load_config(path / "config.yaml"))

    @property
    def last_checkpoint(self) -> Path:
        return sorted((self.path / "checkpoints").glob("step-*"))[-1]

    def policy_folder(self, scratch: Path) -> Path:
        """A model folder of the last checkpoint's weights."""
        folder, original = scratch / "policy", model_folder(self.config.model.path)
        folder.mkdir()
        for file in original.iterdir():
            if file.suffix != ".safetensors":
                (folder / file.name).write_bytes(file.read_bytes())
        weights = load_file(self.last_checkpoint / "model.safetensors")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

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
    last = rows[-1]
    return {
        "groups": len(groups),
        "repeats": steps > len(groups),
        "learning_rate": learning_rate,
        "rows": rows,
        "gain_points": round(100 * (last["online"][0] - last["frozen"][0]), 2),
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


# ---- the whole ----------------------------------------------------------------------------


def measure(
    parts: Sequence[str],
    *,
    rollouts: Path | None,
    past_run: Path | None,
    options: MtpOptions,
    task_options: MtpOptions,
    drift_steps: int,
    drift_learning_rate: float,
    threads: int,
    tell: Tell,
) -> dict[str, Any]:
    """What `bench_proposers.py` shows of heads, and beside it each part as measured; None for a part
    that was not asked for."""
    torch.set_num_threads(threads)
    measured: dict[str, Any] = {"recorded": None, "task": None, "drift": None}
    first = model_folder("smollm2")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        if "recorded" in parts:
            recording = recorded_rollouts(rollouts, threads, tell)
            measured["recorded"] = head_of(first, recording, options, tell)[1]
        if {"task", "drift"} & set(parts):
            past = PastRun.open(past_run, scratch)
            torch.set_num_threads(threads)
        if "task" in parts:
            trained = past.policy_folder(scratch)
            report = head_of(trained, past.rollouts(trained, tell), task_options, tell)[1]
            measured["task"] = {"checkpoint": past.last_checkpoint.name, **report}
        if "drift" in parts:
            head, _ = head_of(first, past.rollouts(first, tell), task_options, tell)
            measured["drift"] = measure_drift(
                past,
                first,
                head,
                steps=drift_steps,
                learning_rate=drift_learning_rate,
                tell=tell,
            )
    recorded, drift = measured["recorded"], measured["drift"]
    return {
        "rate_depth1": recorded and recorded["acceptance"][0],
        "train_minutes": recorded and round(recorded["cpu_minutes"] / threads, 2),
        "online_gain_points": drift and drift["gain_points"],
        **measured,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollouts", type=Path, default=None, help="of record_rollouts.py")
    parser.add_argument("--run", type=Path, default=None, help="run folder of the quickstart")
    names = ("recorded", "task", "drift")
    parser.add_argument("--parts", nargs="+", choices=names, default=list(names))
    parser.add_argument("--minutes", type=float, default=10.0, help="for each head")
    parser.add_argument("--steps", type=int, default=None, help="of training at most")
    parser.add_argument("--task-steps", type=int, default=40, help="the same on the run's prompts")
    parser.add_argument("--drift-steps", type=int, default=50)
    parser.add_argument("--drift-learning-rate", type=float, default=3e-4, help="of the head")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="the JSON line only")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    measured = measure(
        arguments.parts,
        rollouts=arguments.rollouts,
        past_run=arguments.run,
        options=MtpOptions(minutes=arguments.minutes, max_steps=arguments.steps),
        task_options=MtpOptions(minutes=arguments.minutes, max_steps=arguments.task_steps),
        drift_steps=arguments.drift_steps,
        drift_learning_rate=arguments.drift_learning_rate,
        threads=arguments.threads,
        tell=(lambda _: None) if arguments.json else tell,
    )
    if not arguments.json:
        tell("")
        for name in ("recorded", "task", "drift"):
            if measured[name] is not None:
                print(f"{name}: {json.dumps(measured[name], indent=2)}")
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
