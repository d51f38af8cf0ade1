"""`rollout run`: asynchronous GRPO from a recipe, recorded in a run folder.

The loop in `_train` is the whole of it; what stands around it opens and closes things. A step ends at
a boundary: the optimiser has stepped, its groups are accepted and on disk, and the state from which a
resumed run goes on is taken. Checkpoints are written from boundaries only.
"""

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from actors.cluster import Prompt, RolloutCluster
from actors.controller import Retired
from actors.engine_spec import history_salt
from actors.group_queue import RolloutGroup
from actors.metrics import ClusterSnapshot, exactness_row, metrics_row
from actors.ray_session import ray_session
from recipes.arithmetic import ArithmeticTask, Problem, reward
from recipes.config import (
    OWN_HEAD,
    RunConfig,
    begin_head,
    cluster_config,
    engine_spec,
    sampling_params,
    to_yaml,
)
from recipes.grpo import Learner, StepStats
from recipes.ladder import Ladder, ladder_rows
from recipes.live import LiveView
from recipes.mtp_head import MtpHead
from recipes.mtp_start import new_head
from recipes.mtp_training import MtpTrainer
from recipes.passport import outcome, passport
from recipes.report import write_report
from recipes.run_folder import Checkpoint, RunFolder, SavedHead
from recipes.sink import MetricsSink
from recipes.smollm2 import model_folder
from recipes.stop_request import StopRequest
from rollout.checkpoint import check_weights, read_config, read_tokenizer
from rollout.errors import FleetDead, RolloutError, RolloutTimeout
from rollout.mtp_weights import VERSION, load_mtp, save_mtp
from rollout.request import RolloutSample
from rollout.sampling import SamplingParams

RECENT_SAMPLES = 4096
POLL_S = 2.0
"""How often a wait for groups looks whether somebody asked to stop."""


@dataclass
class Progress:
    """Where a run stands at a step boundary."""

    step: int = 0
    next_index: int = 0
    """Prompts submitted up to the boundary."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step's groups, before any were set aside."""
    cluster: dict[str, Any] = field(default_factory=dict)
    """The cluster's state at the boundary; empty between boundaries."""
    log_bytes: dict[str, int] = field(default_factory=dict)
    """Lengths of the logs at the boundary."""
    ended: str = "failed"


class Feeder:
    """Submits the task's prompts in order, and keeps apart which problem a group is."""

    def __init__(
        self,
        cluster: RolloutCluster,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
    ) -> None:
        self._cluster, self._tokenizer, self._sampling = cluster, tokenizer, sampling
        self.next_index = 0
        self._size = config.learner.group_size
        self._ahead = (config.actors.max_staleness + 2) * config.learner.groups_per_step
        self._task = _task(config)

    def top_up(self) -> None:
        """Submits prompts until as many groups are held as pacing may open and a step more; so
        dropped groups are made up for."""
        missing = max(0, self._ahead - self._cluster.metrics().groups_held)
        self.submit(range(self.next_index, self.next_index + missing))
        self.next_index += missing

    def submit(self, indices: Sequence[int], finished: Sequence[RolloutSample] = ()) -> None:
        prompts = [self._prompt(index) for index in indices]
        self._cluster.submit(prompts, self._sampling, group_size=self._size, finished=finished)

    def _prompt(self, index: int) -> Prompt:
        problem, visit = self._task.problem(index)
        ids = self._tokenizer.encode(problem.prompt, add_special_tokens=False)
        return Prompt(f"{index:06d}", problem.id, ids, first_sample_index=visit * self._size)

    def problem(self, group_id: str) -> Problem:
        return self._task.problem(int(group_id))[0]


def _task(config: RunConfig) -> ArithmeticTask:
    task = config.task
    return ArithmeticTask(
        num_problems=task.num_problems, max_operand=task.max_operand, seed=config.seed
    )


def _probe_texts(config: RunConfig) -> tuple[str, ...]:
    """Two of the task's prompts with their answers."""
    return tuple(p.prompt + p.answer for p in _task(config).problems[:2])


def run(config: RunConfig, resume: Path | None = None, *, explain: bool = False) -> dict[str, Any]:
    """Runs or goes on with a run; its summary. `explain` prints each step why its rounds drafted as
    much as they did. Raises the project's errors."""
    folder_of_model = model_folder(config.model.path)
    eos = read_config(folder_of_model).eos_token_ids
    check_weights(folder_of_model)
    tokenizer = read_tokenizer(folder_of_model)
    with ExitStack() as stack:
        if resume is None:
            folder = RunFolder.create(Path(config.out), config.name, to_yaml(config))
            checkpoint = None
        else:
            folder, checkpoint = RunFolder.resume(resume, to_yaml(config))
        stack.callback(folder.close)
        config = _with_head(config, folder_of_model, folder, tokenizer)
        folder.write_json("passport.json", passport(config, folder_of_model))
        stop = stack.enter_context(StopRequest())
        view = stack.enter_context(LiveView(config.steps, config.name))
        view.phase("starting Ray and loading the model")
        torch.set_num_threads(config.learner.threads)
        cores = config.actors.num * config.actors.cpus
        stack.enter_context(ray_session(num_cpus=cores, address=config.actors.address))
        sink = stack.enter_context(
            MetricsSink(
                folder.path,
                wandb_mode=config.wandb.mode,
                project=config.wandb.project,
                name=folder.path.name,
                config={"recipe": to_yaml(config)},
            )
        )
        fleet = cluster_config(config, folder_of_model, _probe_texts(config))
        cluster = stack.enter_context(RolloutCluster.launch(fleet))
        learner = Learner(
            folder_of_model,
            config.learner,
            config.sampling.temperature,
            _head_trainer(config, folder_of_model, checkpoint),
        )
        feeder = Feeder(cluster, config, tokenizer, sampling_params(config, eos))
        progress = _begin(config, cluster, learner, feeder, checkpoint)
        recorder = Recorder(folder, sink, view, tokenizer, feeder, explain=explain)
        try:
            _train(config, cluster, learner, feeder, recorder, progress, stop)
        except RolloutError as error:
            progress.ended = f"error: {error}"
            raise
        finally:
            summary = _conclude(config, cluster, learner, recorder, progress)
        cluster.shutdown()
        if config.ladder.enabled and recorder.recent and progress.ended != "interrupted":
            view.phase("measuring the ladder")
            torch.set_num_threads(config.actors.cpus + config.learner.threads)
            summary["ladder"] = _ladder(config, folder_of_model, learner, recorder, tokenizer)
            folder.write_json("summary.json", summary)
            write_report(folder.path)
        sink.summary(_flat(summary))
        return summary


def _conclude(
    config: RunConfig,
    cluster: RolloutCluster,
    learner: Learner,
    recorder: "Recorder",
    progress: Progress,
) -> dict[str, Any]:
    """Writes what there is however the training ended; a checkpoint that cannot be written comes
    last and takes nothing else with it."""
    folder = recorder.folder
    if recorder.last is not None:
        lengths = [len(sample.token_ids) for sample in recorder.recent]
        folder.add_json("passport.json", {"outcome": outcome(recorder.last, lengths)})
    summary = _summary(folder, config, progress, recorder.last)
    folder.write_json("summary.json", summary)
    write_report(folder.path)
    if progress.cluster:
        _checkpoint(folder, cluster, learner, progress, _saved_head(config, learner))
    return summary


def _flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The summary's plain values, the ladder's speeds among them, for W&B."""
    ladder = {f"ladder/{r['name']}/tokens_per_s": r["tokens_per_s"] for r in summary["ladder"]}
    return {k: v for k, v in summary.items() if isinstance(v, (int, float, str))} | ladder


def _with_head(
    config: RunConfig,
    folder_of_model: Path,
    folder: RunFolder,
    tokenizer: PreTrainedTokenizerBase,
) -> RunConfig:
    """The config with an MTP head's file where one drafts: a new head, in the run's folder, for a
    recipe that names none."""
    path = folder.path / OWN_HEAD
    begun = begin_head(config, path)
    if begun is None:
        return config
    if not path.is_file():
        texts = [problem.prompt + problem.answer for problem in _task(config).problems]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        save_mtp(path, new_head(folder_of_model, ids), history_salt(folder_of_model))
    return begun


def _head_trainer(
    config: RunConfig, folder_of_model: Path, checkpoint: Checkpoint | None
) -> MtpTrainer | None:
    """The MTP head that is trained along, from the recipe's file or as a checkpoint left it."""
    if config.mtp.path is None or not config.mtp.online:
        return None
    kept = checkpoint.mtp() if checkpoint else None
    decoder, salt = read_config(folder_of_model), history_salt(folder_of_model)
    tensors = load_mtp(kept or Path(config.mtp.path).expanduser(), decoder, salt)
    trainer = MtpTrainer(
        MtpHead.from_tensors(tensors, decoder),
        learning_rate=config.mtp.learning_rate,
        depths=config.mtp.depths,
        version=int(tensors[VERSION]),
    )
    if checkpoint is not None and kept is not None:
        trainer.load_optimiser(checkpoint.mtp_optimiser())
    return trainer


def _begin(
    config: RunConfig,
    cluster: RolloutCluster,
    learner: Learner,
    feeder: Feeder,
    checkpoint: Checkpoint | None,
) -> Progress:
    """Puts the first weights in force and enough prompts on the way."""
    if checkpoint is None:
        cluster.publish(0, learner.model.named_parameters())
        feeder.top_up()
        return Progress()
    state = checkpoint.state
    learner.load(checkpoint.model(), checkpoint.optimiser())
    cluster.restore(state["cluster"])
    cluster.publish(state["step"], learner.model.named_parameters(), draft=learner.mtp_tensors())
    if (history := checkpoint.history()) is not None:
        cluster.load_history(history)
    finished = [RolloutSample.from_json(row) for row in state["cluster"]["finished"]]
    unfinished = sorted({int(id_.partition("/")[0]) for id_ in state["cluster"]["unfinished"]})
    feeder.submit(unfinished, finished)
    feeder.next_index = state["next_index"]
    feeder.top_up()
    return Progress(state["step"], rewards=list(state["rewards"]))


def _train(
    config: RunConfig,
    cluster: RolloutCluster,
    learner: Learner,
    feeder: Feeder,
    recorder: "Recorder",
    progress: Progress,
    stop: StopRequest,
) -> None:
    started = time.monotonic()
    recorder.last = cluster.metrics()
    while progress.step < config.steps:
        groups, wait_s = _next_groups(config, cluster, feeder, recorder, stop)
        if groups is None:
            progress.ended = "interrupted"
            return
        rewards = recorder.rewards(groups)
        useful = [g for g in groups if len(set(rewards[g.id])) > 1]
        filtered = [g for g in groups if g not in useful]
        progress.cluster = {}  # no boundary until these groups are settled
        recorder.view.phase("training")
        stats = learner.step(useful, [rewards[g.id] for g in useful]) if useful else None
        cluster.accept(useful)
        cluster.filter(filtered)
        recorder.samples(progress.step + 1, useful, rewards, "accepted")
        recorder.samples(progress.step + 1, filtered, rewards, "filtered")
        _reach_boundary(cluster, feeder, recorder, progress, rewards)
        recorder.view.phase("publishing weights")
        cluster.publish(
            progress.step, learner.model.named_parameters(), draft=learner.mtp_tensors()
        )
        recorder.step(progress, cluster.metrics(), stats, wait_s)
        if progress.step % config.checkpoint_every == 0 and progress.step < config.steps:
            head = _saved_head(config, learner)
            _checkpoint(recorder.folder, cluster, learner, progress, head)
        if stop:
            progress.ended = "interrupted"
            return
        if config.max_minutes and time.monotonic() - started > config.max_minutes * 60:
            progress.ended = "time limit"
            return
    progress.ended = "finished"


def _reach_boundary(
    cluster: RolloutCluster,
    feeder: Feeder,
    recorder: "Recorder",
    progress: Progress,
    rewards: Mapping[str, Sequence[float]],
) -> None:
    """Ends a step: from here a resumed run goes on."""
    feeder.top_up()
    boundary = cluster.boundary()
    recorder.retired(boundary.retired, progress.step + 1)
    progress.step += 1
    progress.next_index = feeder.next_index
    progress.rewards.append(statistics.fmean(r for group in rewards.values() for r in group))
    progress.log_bytes = recorder.folder.log_bytes()
    progress.cluster = boundary.state


def _next_groups(
    config: RunConfig,
    cluster: RolloutCluster,
    feeder: Feeder,
    recorder: "Recorder",
    stop: StopRequest,
) -> tuple[list[RolloutGroup] | None, float]:
    """The next groups and how long they took to come; None when somebody asked to stop."""
    recorder.view.phase("waiting for rollouts")
    started = time.monotonic()
    while not stop:
        try:
            groups = cluster.next_groups(config.learner.groups_per_step, timeout_s=POLL_S)
            return groups, time.monotonic() - started
        except RolloutTimeout:
            if time.monotonic() - started > config.learner.wait_timeout_s:
                raise
            feeder.top_up()
    return None, time.monotonic() - started


class Recorder:
    """Writes what happened where people look: samples, metrics, the live view."""

    def __init__(
        self,
        folder: RunFolder,
        sink: MetricsSink,
        view: LiveView,
        tokenizer: PreTrainedTokenizerBase,
        feeder: Feeder,
        *,
        explain: bool = False,
    ) -> None:
        self.folder, self.view, self._explain = folder, view, explain
        self._sink, self._tokenizer, self._feeder = sink, tokenizer, feeder
        self.last: ClusterSnapshot | None = None
        self.recent: deque[RolloutSample] = deque(maxlen=RECENT_SAMPLES)
        """Samples consumed last, for the ladder and the passport's percentiles."""

    def _text(self, sample: RolloutSample) -> str:
        return str(self._tokenizer.decode(list(sample.token_ids), skip_special_tokens=False))

    def rewards(self, groups: Sequence[RolloutGroup]) -> dict[str, list[float]]:
        return {
            group.id: [reward(self._feeder.problem(group.id), self._text(s)) for s in group.samples]
            for group in groups
        }

    def samples(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        rewards: dict[str, list[float]],
        fate: str,
    ) -> None:
        for group in groups:
            for sample, value in zip(group.samples, rewards[group.id], strict=True):
                self._write(step, sample, value, fate)
                self.recent.append(sample)

    def retired(self, retired_samples: Sequence[Retired], step: int) -> None:
        for retired in retired_samples:
            self._write(step, retired.sample, None, retired.fate)

    def _write(self, step: int, sample: RolloutSample, value: float | None, fate: str) -> None:
        line = sample.to_json()
        line |= {"step": step, "text": self._text(sample), "reward": value, "fate": fate}
        self.folder.write_sample(line)

    def step(
        self, progress: Progress, now: ClusterSnapshot, stats: StepStats | None, wait_s: float
    ) -> None:
        assert self.last is not None
        row: dict[str, float | int | None] = {
            "learner/step": progress.step,
            "learner/wait_s": wait_s,
            "reward/mean": progress.rewards[-1],
            **metrics_row(self.last, now),
            **(stats.metrics() if stats else {}),
        }
        self.last = now
        self._sink.log(row)
        self.view.update(row)
        if self._explain:
            for actor, why in sorted(now.explanations.items()):
                self.view.say(f"step {progress.step}, {actor}: {why}")
        progress.log_bytes = self.folder.log_bytes()


def _saved_head(config: RunConfig, learner: Learner) -> SavedHead | None:
    if learner.mtp is None:
        return None
    salt = history_salt(model_folder(config.model.path))
    return SavedHead(learner.mtp.tensors(), learner.mtp.optimiser_tensors(), salt)


def _checkpoint(
    folder: RunFolder,
    cluster: RolloutCluster,
    learner: Learner,
    progress: Progress,
    head: SavedHead | None = None,
) -> None:
    state = {
        "step": progress.step,
        "next_index": progress.next_index,
        "rewards": progress.rewards,
        "cluster": progress.cluster,
        "log_bytes": progress.log_bytes,
    }
    model = dict(learner.model.named_parameters())
    detached = {name: parameter.detach() for name, parameter in model.items()}
    folder.checkpoint(
        progress.step, detached, learner.optimiser_tensors(), state, _history(cluster), head
    )


def _history(cluster: RolloutCluster) -> dict[str, torch.Tensor] | None:
    """What the proposers remember now, which may be more than at the boundary: nothing but drafts comes
    of it. A fleet that is gone took it along: a run that goes on from there drafts less at first, which
    is no reason to lose the checkpoint."""
    try:
        return cluster.history()
    except (FleetDead, RolloutTimeout):
        return None


def _ladder(
    config: RunConfig,
    folder_of_model: Path,
    learner: Learner,
    recorder: Recorder,
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """The rungs on the run's last prompts, drafting from what the run had recorded before them."""
    size = config.ladder.groups * config.learner.group_size
    recent = list(recorder.recent)
    requests = [sample.request for sample in recent[-size:]]
    prompts = {request.prompt_ids for request in requests}
    history = [s for s in recent[:-size] if s.request.prompt_ids in prompts]
    probe_ids = [tokenizer.encode(text, add_special_tokens=False) for text in _probe_texts(config)]
    spec = engine_spec(config, folder_of_model)
    weights = {name: p.detach() for name, p in learner.model.named_parameters()}
    ladder: Ladder
    if spec.engine == "vllm":
        from recipes.ladder_vllm import VllmLadder

        ladder = VllmLadder(spec, weights, probe_ids, history)
    else:
        ladder = Ladder(spec, weights, probe_ids, history, learner.mtp_tensors())
    return ladder_rows(ladder.measure(requests, config.ladder.repeats))


def _summary(
    folder: RunFolder, config: RunConfig, progress: Progress, now: ClusterSnapshot | None
) -> dict[str, Any]:
    """The closing numbers, over the whole run."""
    third = max(1, len(progress.rewards) // 3)
    summary: dict[str, Any] = {
        "name": config.name,
        "run": str(folder.path),
        "steps": progress.step,
        "ended": progress.ended,
        "reward_first_third": _mean(progress.rewards[:third]),
        "reward_last_third": _mean(progress.rewards[-third:]),
        "ladder": [],
    }
    if now is None:
        return summary
    published = now.publication
    return summary | {
        "accepted_samples": now.ledger["accepted"],
        "accepted_samples_per_hour": now.ledger["accepted"] * 3600 / now.elapsed_s,
        "tokens_per_second": now.counters.emitted / now.elapsed_s,
        "tokens_per_target_step": now.counters.tokens_per_target_step,
        "acceptance_rate": now.counters.acceptance_rate,
        "drift_kl": published.drift.kl if published else None,
        "exactness": exactness_row(now.counters),
        "ledger": now.ledger,
        "restarts": now.restarts,
        "last_loss": now.last_loss,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
