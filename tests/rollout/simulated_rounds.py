"""Rounds on a machine made of formulas: what a draft length policy earns, without a clock."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout.draft import POINT_MASS, Draft
from rollout.draft_len import DraftLen
from rollout.round_cost import RoundCost, Trial
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import SeededDraws
from tests.rollout.engines import request

Curve = Callable[[float], float]
DRAFTED, OTHER = 1, 2
"""The token that is always drafted and what is emitted where it was wrong."""


def rows(num: int, *, max_new_tokens: int = 40) -> list[Row]:
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return [
        Row(
            request(f"r{i}", sampling=sampling, prompt_id=f"p{i}"),
            SeededDraws(0, "p", i),
            context_len=max_new_tokens + 24,
        )
        for i in range(num)
    ]


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds: of a step by its tokens, of asking a row, of one drafted token for all rows, and of what
    the first ask of a run takes besides (prompts that a draft model has to run)."""

    step: Curve
    ask_s: float = 2e-5
    draft_step_s: float = 0.0
    first_ask_s: float = 0.0
    noise: float = 0.03


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a proposer offers: with equal shares, tokens of these true chances."""

    chances: Sequence[float]
    says: Callable[[float], float] | None = None
    """Its estimate of a true chance; None: it has none."""

    def draft(self, rng: random.Random, length: int) -> tuple[Draft, list[float]]:
        true = [rng.choice(self.chances) for _ in range(length)]
        said = None if self.says is None else tuple(self.says(chance) for chance in true)
        return Draft((DRAFTED,) * length, (POINT_MASS,) * length, chances=said), true


def tokens_per_s(
    chooser: DraftLen,
    machine: Machine,
    offered: Tokens,
    num_rows: int,
    *,
    num_rounds: int = 300,
    settling: int = 0,
    seed: int = 0,
) -> float:
    """Emitted tokens a second over `num_rounds`, behind `settling` ones that are not counted."""
    rng, live = random.Random(seed), rows(num_rows)
    emitted, seconds, begun = 0, 0.0, False
    for round_ in range(settling + num_rounds):
        if round_ == settling:
            emitted, seconds = 0, 0.0
        lengths = chooser.choose(live)
        made = [offered.draft(rng, length) for length in lengths]
        kept = chooser.keep(live, [draft for draft, _ in made])
        trials = []
        for row, length, (draft, true), part in zip(live, lengths, made, kept, strict=True):
            hits = [
                rng.random() < chance for chance in (*true, 0.5)
            ]  # one more: what is emitted next
            accepted = next((i for i, hit in enumerate(hits[: len(part)]) if not hit), len(part))
            next_token = DRAFTED if hits[accepted] else OTHER
            trials.append(Trial(row, length, draft, len(part), accepted, next_token))
            emitted += accepted + 1
        asked = sum(length > 0 for length in lengths)
        scored = num_rows + sum(map(len, kept))
        jitter = math.exp(rng.gauss(0, machine.noise))
        proposing = asked * machine.ask_s + max(lengths) * machine.draft_step_s
        if asked and not begun:
            proposing, begun = proposing + machine.first_ask_s, True
        chooser.observe(
            RoundCost(machine.step(scored) * jitter, proposing, scored, True, tuple(trials))
        )
        seconds += machine.step(scored) + proposing
    return emitted / seconds


def steps_speedup(
    chooser: DraftLen,
    machine: Machine,
    offered: Sequence[Tokens],
    length: int,
    *,
    num_steps: int,
    settling: int,
    seed: int,
) -> float:
    """Times plain decoding's speed over steps of `length` tokens a row, behind `settling` ones that are
    not counted; row i is offered `offered[i]`, and a step ends when its last row does."""
    rng, seconds = random.Random(seed), 0.0
    for step in range(settling + num_steps):
        if step == settling:
            seconds = 0.0
        live = list(zip(rows(len(offered), max_new_tokens=length), offered))
        while live:
            decoding = [row for row, _ in live]
            asked = chooser.choose(decoding, draining=True)
            asked = [min(num, row.remaining_len - 1) for num, row in zip(asked, decoding)]
            made = [of_row.draft(rng, num) for (_, of_row), num in zip(live, asked)]
            kept = chooser.keep(decoding, [draft for draft, _ in made])
            trials = []
            for row, num, (draft, true), part in zip(decoding, asked, made, kept, strict=True):
                hits = [rng.random() < chance for chance in (*true, 0.5)]
                accepted = next(
                    (i for i, hit in enumerate(hits[: len(part)]) if not hit), len(part)
                )
                row.token_ids += [OTHER] * (accepted + 1)
                if row.remaining_len <= 0:
                    row.finish("length", "max_new_tokens")
                next_token = DRAFTED if hits[accepted] else OTHER
                trials.append(Trial(row, num, draft, len(part), accepted, next_token))
            scored = len(live) + sum(map(len, kept))
            proposing = sum(num > 0 for num in asked) * machine.ask_s
            took = machine.step(scored) * math.exp(rng.gauss(0, machine.noise))
            chooser.observe(RoundCost(took, proposing, scored, True, tuple(trials)))
            seconds += machine.step(scored) + proposing
            live = [(row, of_row) for row, of_row in live if not row.done]
    return num_steps * length * machine.step(len(offered)) / seconds


def plain_tokens_per_s(machine: Machine, num_rows: int) -> float:
    return num_rows / machine.step(num_rows)


def best_fixed(machine: Machine, offered: Tokens, num_rows: int, max_len: int) -> float:
    """Expected rate of the best fixed length, 0 included: a token is accepted with the mean chance."""
    chance = sum(offered.chances) / len(offered.chances)
    rates = [plain_tokens_per_s(machine, num_rows)]
    emitted = 1.0
    for length in range(1, max_len + 1):
        emitted += chance**length
        proposing = num_rows * machine.ask_s + length * machine.draft_step_s
        seconds = machine.step(num_rows * (1 + length)) + proposing
        rates.append(num_rows * emitted / seconds)
    return max(rates)
