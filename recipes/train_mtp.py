"""`rollout train-mtp`: an MTP head for a policy from rollouts that were recorded of it.

The policy reads the rollouts (`recipes.mtp_trunk`), a linear fit gives the head its start, then it is
trained (`recipes.mtp_training`) until the time is up, reading and fitting included: by cross-entropy
first and by total variation, which is the chance of refusal itself, at the end. Where reading would
take more than half of the time, the rest of the rollouts is left out, and said to be.

Held out are the last samples of every prompt, about one in six: other samples of the same prompts,
which is what a head meets in a run whose prompts come again. It says nothing about other prompts.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from actors.engine_spec import history_salt
from recipes.mtp_head import MtpHead
from recipes.mtp_training import MtpTrainer, Response, acceptance
from recipes.mtp_trunk import Reading, Trunk, fit_projection
from recipes.recorded_rollouts import Recording
from recipes.smollm2 import model_folder
from rollout.checkpoint import check_weights, read_config
from rollout.errors import InvalidConfig
from rollout.mtp_weights import save_mtp

HELD_OUT = 1 / 6
READING_SHARE = 0.5
"""Of the time, at most."""
SAMPLES_AT_ONCE = 8
BATCH_TOKENS = 1500
WARM_UP_STEPS = 10
LAST_PHASE = 0.5
"""Share of the training, at its end, by total variation."""


@dataclass(frozen=True, slots=True)
class MtpOptions:
    """What to train and for how long."""

    minutes: float = 10.0
    """Wall clock from the start to the end of training."""
    max_steps: int | None = None
    """Optimiser steps at most, which the schedule then counts by; None trains until the time is
    up."""
    draft_vocab: int = 4096
    depths: int = 3
    learning_rate: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes <= 0:
            raise InvalidConfig(f"minutes={self.minutes}: expected more than 0")
        if self.max_steps is not None and self.max_steps < 0:
            raise InvalidConfig(f"steps={self.max_steps}: expected at least 0")
        for name in ("draft_vocab", "depths"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}={getattr(self, name)}: expected at least 1")


@dataclass(frozen=True, slots=True)
class MtpReport:
    """What came of it. Acceptance by depth, on the rollouts held out."""

    tokens: int
    """Response tokens trained on."""
    tokens_left_out: int
    """Response tokens that there was no time to read."""
    tokens_held_out: int
    kept_mass: float
    """Mass of the draft vocabulary under the policy, a position held out: no acceptance is above."""
    acceptance_fitted: list[float]
    """Behind the linear fit, before any step."""
    acceptance: list[float]
    steps: int
    read_s: float
    train_s: float
    read_cpu_s: float
    train_cpu_s: float
    """Processor time, all threads: what counts where others use the machine."""

    def to_json(self) -> dict[str, object]:
        return {
            name: [round(x, 4) for x in value]
            if isinstance(value, list)
            else round(value, 4)
            if isinstance(value, float)
            else value
            for name, value in asdict(self).items()
        }


def train_mtp_command(arguments: argparse.Namespace) -> int:
    """`rollout train-mtp`."""
    torch.set_num_threads(arguments.threads)
    options = MtpOptions(
        minutes=arguments.minutes,
        max_steps=arguments.steps,
        draft_vocab=arguments.draft_vocab,
        depths=arguments.depths,
        seed=arguments.seed,
    )
    folder = model_folder(arguments.model)
    recording = Recording.load(arguments.rollouts)
    head, report = train_mtp(
        folder, recording, options, lambda text: print(text, file=sys.stderr, flush=True)
    )
    save_mtp(arguments.out, head.tensors(version=0), history_salt(folder))
    about = {"out": str(arguments.out), **report.to_json()}
    if arguments.json:
        print(json.dumps(about))
    else:
        print("\n".join(f"{name}: {value}" for name, value in about.items()))
    return 0


def train_mtp(
    folder: Path, recording: Recording, options: MtpOptions, tell: Callable[[str], None]
) -> tuple[MtpHead, MtpReport]:
    """Trains a head for the model of a folder. Raises InvalidConfig for rollouts that cannot be split,
    or of temperature 0, which have no law to teach."""
    _check(recording)
    check_weights(folder)
    clock = _Clock(options.minutes * 60)
    config, trunk, temperature = read_config(folder), Trunk(folder), recording.temperature
    training, held_out = _read(trunk, recording, clock, tell)
    vocabulary = trunk.draft_vocabulary(training, options.draft_vocab, temperature, options.seed)
    head = MtpHead.from_policy(trunk.weights(), config, vocabulary)
    fit_projection(head, training, trunk.embedding)
    taught = trunk.responses(training, vocabulary, temperature)
    unseen = trunk.responses(held_out, vocabulary, temperature)
    shared = trunk.shared(vocabulary, temperature)
    read_s, read_cpu_s = clock.lap()
    fitted = acceptance(head, shared, unseen, options.depths)
    tell(f"fitted: held-out acceptance {_rates(fitted)}")
    trainer = MtpTrainer(head, learning_rate=options.learning_rate, depths=options.depths)
    steps = 0
    for batch in _batches(taught, options.seed):
        if clock.share >= 1 or steps == options.max_steps:
            break
        done = steps / options.max_steps if options.max_steps else clock.share
        stats = trainer.step(
            shared,
            batch,
            kind="total_variation" if done >= 1 - LAST_PHASE else "cross_entropy",
            pace=min(1.0, (steps + 1) / WARM_UP_STEPS) * (1 - done),
        )
        steps += 1
        if stats is not None and steps % 10 == 0:
            tell(f"step {steps}, {done:.0%}: acceptance in training {_rates(stats.acceptance)}")
    train_s, train_cpu_s = clock.lap()
    reached = acceptance(head, shared, unseen, options.depths)
    tell(f"trained: held-out acceptance {_rates(reached)}")
    total = recording.num_tokens
    num_training, num_held_out = _num_tokens(taught), _num_tokens(unseen)
    return head, MtpReport(
        tokens=num_training,
        tokens_left_out=total - num_training - num_held_out,
        tokens_held_out=num_held_out,
        kept_mass=float(torch.cat([r.law[1:].float().sum(-1) for r in unseen]).mean()),
        acceptance_fitted=fitted,
        acceptance=reached,
        steps=steps,
        read_s=read_s,
        train_s=train_s,
        read_cpu_s=read_cpu_s,
        train_cpu_s=train_cpu_s,
    )


def _check(recording: Recording) -> None:
    if recording.temperature == 0:
        raise InvalidConfig("rollouts of temperature 0: expected sampled ones, which have a law")
    if len(recording.rollouts[0]) < 2:
        raise InvalidConfig("one sample a prompt: expected at least 2, as some are held out")
    held_out = _held_out(recording)
    for part in (slice(None, -held_out), slice(-held_out, None)):
        if not any(len(r.token_ids) > 1 for of in recording.rollouts for r in of[part]):
            raise InvalidConfig("no rollout of two tokens to train on or to hold out; record more")


def _held_out(recording: Recording) -> int:
    """Samples of each prompt."""
    return max(1, round(len(recording.rollouts[0]) * HELD_OUT))


def _read(
    trunk: Trunk, recording: Recording, clock: "_Clock", tell: Callable[[str], None]
) -> tuple[list[Reading], list[Reading]]:
    """Readings to train on, and those held out; some samples of every prompt, then some more."""
    split = len(recording.rollouts[0]) - _held_out(recording)
    held_out = _read_samples(trunk, recording, range(split, split + _held_out(recording)))
    training: list[Reading] = []
    for first in range(0, split, SAMPLES_AT_ONCE):
        samples = range(first, min(first + SAMPLES_AT_ONCE, split))
        training += _read_samples(trunk, recording, samples)
        num = sum(len(r.token_ids) for r in training + held_out)
        tell(f"read {num} of {recording.num_tokens} tokens")
        if clock.share > READING_SHARE:
            break
    return training, held_out


def _read_samples(trunk: Trunk, recording: Recording, samples: range) -> list[Reading]:
    readings: list[Reading] = []
    for prompt, of_prompt in zip(recording.prompts, recording.rollouts, strict=True):
        ids = [of_prompt[index].token_ids for index in samples]
        if some := sorted((i for i in ids if len(i) > 1), key=len):
            readings += trunk.read(prompt, some)
    return readings


def _batches(responses: Sequence[Response], seed: int) -> Iterator[list[Response]]:
    """Random batches of about BATCH_TOKENS tokens, for ever; each response once an epoch."""
    generator, batch = random.Random(seed), list[Response]()
    while True:
        for index in generator.sample(range(len(responses)), len(responses)):
            batch.append(responses[index])
            if _num_tokens(batch) >= BATCH_TOKENS:
                yield batch
                batch = []


def _num_tokens(responses: Sequence[Response]) -> int:
    return sum(len(response.token_ids) for response in responses)


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.3f}" for rate in rates)


class _Clock:
    """Seconds since the start, and of what was done since the last lap."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._start = limit_s, time.monotonic()
        self._lap, self._cpu_lap = self._start, time.process_time()

    @property
    def share(self) -> float:
        """Of the limit that has gone."""
        return (time.monotonic() - self._start) / self._limit_s

    def lap(self) -> tuple[float, float]:
        """Wall clock and processor seconds."""
        wall, cpu = time.monotonic(), time.process_time()
        spent = wall - self._lap, cpu - self._cpu_lap
        self._lap, self._cpu_lap = wall, cpu
        return spent
