#!/usr/bin/env python
"""What a history of rollouts predicts and costs, beside the drafts of arctic-inference.

    python scripts/bench_history.py [--rollouts T1.safetensors T07.safetensors] [--held-out 3]
        [--samples 10000] [--length 512] [--rounds 2000] [--draft-len 4] [--json]

Prediction. Recorded rollouts of SmolLM2 (`record_rollouts.py`; made here where none are named), at
temperatures 1 and .7. Each held-out rollout is read token by token by a proposer that knows the other
samples of its prompt; the policy gives the exact law p of every position, so what the first drafted
token is worth is known without sampling: p(token) for one that was named, sum min(p, q) for one that
was drawn from q, 0 for no draft. The mean over all positions is the expected accepted tokens a
position. arctic-inference gets a suffix tree of this prompt's samples alone, which is more than it
gets where it runs, and each of several settings; its best one counts.

Cost. `--samples` rollouts of `--length` tokens, pieced together from the recorded ones, 16 a prompt,
are remembered; then rows in the middle of a rollout ask for drafts, ours and arctic's in turn. Times
are medians over the calls, in microseconds: of one call for one row, and of taking in two tokens of
one row, a token. Bytes are what the process grew by, everything included.

Not measured: drafts behind the first token, whole rollouts, actors, other models.
"""

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import psutil
import torch

from actors.engine_spec import EngineSpec, make_policy, pack_folder
from proposers.history import HistoryProposer
from proposers.history_law import DRAWS
from recipes.recorded_rollouts import Recording, Rollout
from recipes.smollm2 import model_folder
from rollout.checkpoint import read_tokenizer
from rollout.draft import NO_DRAFT, Draft, PointMass, SparseLaw
from rollout.policy import Policy, Window
from rollout.request import RolloutRequest
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.streams import SeededDraws
from rollout.verdict import Verdict
from scripts.record_rollouts import make_prompts, record, tell

INSTALL = "pip install --no-deps arctic-inference"
TEMPERATURES = (1.0, 0.7)
ARCTIC: dict[str, dict[str, float]] = {
    "arctic, as it comes": {},
    "arctic, whatever the match": {"max_spec_factor": 4.0, "max_spec_offset": 4.0},
    "arctic, whatever the chance": {"min_token_prob": 0.0},
    "arctic, neither": {"min_token_prob": 0.0, "max_spec_factor": 4.0, "max_spec_offset": 4.0},
}
"""Settings of `speculate`."""
SAMPLES_A_PROMPT = 16
TOKENS_A_ROUND = 2
NUM_ROWS = 64
"""Of as many prompts, timed in turn."""


def find_arctic() -> Any | None:
    """Its cache class, if it can be imported."""
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError:
        return None
    return SuffixDecodingCache


def make_row(prompt: Sequence[int], index: int) -> Row:
    request = RolloutRequest(
        f"held out {index}", "g", "p", 10_000 + index, tuple(prompt),
        SamplingParams(max_new_tokens=100_000),
    )  # fmt: skip
    return Row(request, SeededDraws(0, "p", 10_000 + index), context_len=1_000_000)


def emit(row: Row, token: int, logprob: float) -> None:
    """One token of a plain round."""
    row.emit(NO_DRAFT, Verdict((), token, "plain"), [logprob], [logprob], [1.0], 0)


# ---- prediction ---------------------------------------------------------------------------


def exact_laws(policy: Policy, prompt: Sequence[int], rollout: Rollout, temperature: float) -> Any:
    """p of every position of a rollout, [T, V] float32."""
    policy.truncate(0, 0)
    ids = (*prompt, *rollout.token_ids)
    logits = policy.score([Window(0, 0, ids[:-1], len(rollout.token_ids))])
    return (logits / temperature).softmax(-1)


def expected_accepted(draft: Draft, p: torch.Tensor) -> float:
    """Of its first token, p [V]."""
    if not len(draft):
        return 0.0
    law = draft.laws[0]
    if isinstance(law, PointMass):
        return float(p[draft.token_ids[0]])
    assert isinstance(law, SparseLaw)
    return float(torch.minimum(p[law.ids].double(), law.probs).sum())


Reading = Callable[[Sequence[int], Sequence[Rollout], Rollout], Iterator[Draft]]
"""Prompt, earlier rollouts, the one that is read -> the draft at each of its positions."""


def history_reading(draw: str) -> Reading:
    def read(prompt: Sequence[int], earlier: Sequence[Rollout], held: Rollout) -> Iterator[Draft]:
        proposer = HistoryProposer(draw=draw)  # type: ignore[arg-type]
        for one in earlier:
            proposer.remember(prompt, one.token_ids, one.logprobs)
        row = make_row(prompt, 0)
        for token, logprob in zip(held.token_ids, held.logprobs):
            yield proposer.propose([row], [1])[0]
            emit(row, token, logprob)
            proposer.observe([row])

    return read


def arctic_reading(cache_class: Any, setting: dict[str, float], draft_len: int) -> Reading:
    def read(prompt: Sequence[int], earlier: Sequence[Rollout], held: Rollout) -> Iterator[Draft]:
        cache = cache_class()
        for name, one in enumerate(earlier):
            cache.start_request(name, list(prompt))
            cache.add_active_response(name, list(one.token_ids))
            cache.stop_request(name)
        cache.start_request("held", list(prompt))
        ids = list(prompt)
        for token in held.token_ids:
            made = cache.speculate("held", ids, max_spec_tokens=draft_len, **setting)
            yield Draft.of_points(made.token_ids[:1])
            ids.append(token)
            cache.add_active_response("held", [token])

    return read


def predict(
    recording: Recording, readings: dict[str, Reading], num_held: int
) -> tuple[dict[str, float], int]:
    """Expected accepted tokens a position, and the number of positions."""
    longest = max(len(one.token_ids) for of_prompt in recording.rollouts for one in of_prompt)
    policy = _policy(recording, max(map(len, recording.prompts)) + longest)
    sums, num = dict.fromkeys(readings, 0.0), 0
    for at, (prompt, rollouts) in enumerate(zip(recording.prompts, recording.rollouts)):
        tell(f"T={recording.temperature}: prompt {at + 1} of {len(recording.prompts)}")
        for index in range(num_held):
            held = rollouts[index]
            earlier = [*rollouts[:index], *rollouts[index + 1 :]]
            laws = exact_laws(policy, prompt, held, recording.temperature)
            num += len(held.token_ids)
            for name, read in readings.items():
                sums[name] += sum(map(expected_accepted, read(prompt, earlier, held), laws))
    return {name: total / num for name, total in sums.items()}, num


def _policy(recording: Recording, context_len: int) -> Policy:
    spec = EngineSpec(
        str(model_folder("smollm2")),
        mode="full" if recording.quant == "none" else "quantised",
        format=recording.quant,
        num_slots=1,
        context_len=context_len,
    )
    policy = make_policy(spec)
    policy.swap(policy.load(pack_folder(spec)))
    return policy


# ---- cost ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Corpus:
    """Many long rollouts of many prompts."""

    prompts: list[tuple[int, ...]]
    rollouts: list[list[Rollout]]


def make_corpus(recording: Recording, num_samples: int, length: int) -> Corpus:
    """Pieces of a prompt's recorded rollouts one after the other; a number makes prompts distinct."""
    generator = random.Random(0)
    num_prompts = -(-num_samples // SAMPLES_A_PROMPT)
    prompts, rollouts = [], []
    for number in range(num_prompts):
        kind = number % len(recording.prompts)
        prompts.append((*recording.prompts[kind][:-1], number, recording.prompts[kind][-1]))
        rollouts.append([_joined(recording.rollouts[kind], length, generator) for _ in range(16)])
    return Corpus(prompts, rollouts)


def _joined(pieces: Sequence[Rollout], length: int, generator: random.Random) -> Rollout:
    ids: list[int] = []
    logprobs: list[float] = []
    while len(ids) < length:
        piece = generator.choice(pieces)
        ids += piece.token_ids
        logprobs += piece.logprobs
    return Rollout(tuple(ids[:length]), tuple(logprobs[:length]))


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


class Cost:
    """Proposers that have remembered the same corpus, asked in turn."""

    def __init__(self, corpus: Corpus, held: list[Rollout], draft_len: int) -> None:
        self._corpus, self._held, self._draft_len = corpus, held, draft_len
        self.numbers: dict[str, float] = {}
        self._ours: dict[str, tuple[HistoryProposer, list[Row]]] = {}
        self._arctic: Any = None

    @property
    def num_tokens(self) -> int:
        return sum(len(one.token_ids) for of_prompt in self._corpus.rollouts for one in of_prompt)

    @property
    def time_vs_arctic(self) -> float | None:
        """Of a drawn draft over one of arctic's, as it comes."""
        theirs = self.numbers.get("propose_us_arctic")
        return self.numbers["propose_us_best"] / theirs if theirs else None

    def remember(self, arctic: Any | None) -> None:
        tell(f"remembering {self.num_tokens} tokens")
        before, started = resident_bytes(), time.perf_counter()
        first = HistoryProposer(max_tokens=2 * self.num_tokens)
        for prompt, rollouts in zip(self._corpus.prompts, self._corpus.rollouts):
            for one in rollouts:
                first.remember(prompt, one.token_ids, one.logprobs)
        self.numbers["remember_us"] = 1e6 * (time.perf_counter() - started) / self.num_tokens
        self.numbers["bytes_per_token"] = (resident_bytes() - before) / self.num_tokens
        exported = first.export()
        self._ours["mode"] = (first, self._rows())
        for draw in DRAWS[1:]:
            other = HistoryProposer(draw=draw, max_tokens=2 * self.num_tokens)
            other.load(exported)
            self._ours[draw] = (other, self._rows())
        if arctic is not None:
            self._remember_arctic(arctic)

    def _rows(self) -> list[Row]:
        return [
            make_row(prompt, n) for n, prompt in enumerate(self._corpus.prompts[: len(self._held)])
        ]

    def _remember_arctic(self, arctic: Any) -> None:
        tell("remembering them in arctic's tree")
        cache, names = arctic(), itertools.count()
        started = time.perf_counter()
        for prompt, rollouts in zip(self._corpus.prompts, self._corpus.rollouts):
            for one in rollouts:
                name = next(names)
                cache.start_request(name, list(prompt))
                cache.add_active_response(name, list(one.token_ids))
                cache.stop_request(name)
        spent = time.perf_counter() - started
        self.numbers["arctic_remember_us"] = 1e6 * spent / self.num_tokens
        memory = cache._global_tree.estimate_memory()
        self.numbers["arctic_bytes_per_token"] = memory / self.num_tokens
        self._arctic = cache
        for n, prompt in enumerate(self._corpus.prompts[: len(self._held)]):
            cache.start_request(f"held {n}", list(prompt))

    def measure(self, num_rounds: int) -> None:
        """One row after the other takes two tokens and is drafted for, by each in turn."""
        propose: dict[str, list[float]] = {}
        observe: dict[str, list[float]] = {}
        drafted = dict.fromkeys(self._ours, 0)
        places = [0] * len(self._held)
        for round_ in range(num_rounds):
            if round_ % 200 == 0:
                tell(f"round {round_} of {num_rounds}")
            n = round_ % len(self._held)
            text = self._held[n]
            tokens = text.token_ids[places[n] : places[n] + TOKENS_A_ROUND]
            logprobs = text.logprobs[places[n] : places[n] + TOKENS_A_ROUND]
            places[n] += TOKENS_A_ROUND
            for name, (proposer, rows) in self._ours.items():
                for token, logprob in zip(tokens, logprobs):
                    emit(rows[n], token, logprob)
                one, lens = [rows[n]], [self._draft_len]
                began = time.perf_counter()
                proposer.observe(one)
                proposer.publish(0)  # records what was observed, which else is put off to a look
                seen = time.perf_counter()
                drafts = proposer.propose(one, lens)
                ended = time.perf_counter()
                observe.setdefault(name, []).append((seen - began) / TOKENS_A_ROUND)
                propose.setdefault(name, []).append(ended - seen)
                drafted[name] += len(drafts[0])
            if self._arctic is not None:
                ids = self._ours["mode"][1][n].token_ids
                began = time.perf_counter()
                self._arctic.add_active_response(f"held {n}", list(tokens))
                seen = time.perf_counter()
                self._arctic.speculate(f"held {n}", ids, max_spec_tokens=self._draft_len)
                ended = time.perf_counter()
                observe.setdefault("arctic", []).append((seen - began) / TOKENS_A_ROUND)
                propose.setdefault("arctic", []).append(ended - seen)
        for name in propose:
            self.numbers[f"propose_us_{name}"] = 1e6 * statistics.median(propose[name])
            for part in (10, 90):
                spread = 1e6 * float(np.percentile(propose[name], part))
                self.numbers[f"propose_us_{name}_p{part}"] = spread
            self.numbers[f"observe_us_{name}"] = 1e6 * statistics.median(observe[name])
        for name, num in drafted.items():
            self.numbers[f"drafted_{name}"] = num / num_rounds


# ---- the command --------------------------------------------------------------------------


def recordings(arguments: argparse.Namespace) -> list[Recording]:
    if arguments.rollouts:
        return [Recording.load(path) for path in arguments.rollouts]
    prompts = make_prompts(arguments.prompts, read_tokenizer(model_folder("smollm2")), 0)
    return [
        record(
            prompts, num_samples=SAMPLES_A_PROMPT + 1, num_tokens=144, temperature=temperature,
            quant="int8_w8a16", seed=0, num_rows=32, tell=tell,
        )
        for temperature in TEMPERATURES
    ]  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollouts", type=Path, nargs=2, help="recorded at T=1 and at T=.7")
    parser.add_argument("--prompts", type=int, default=12, help="to record where none are named")
    parser.add_argument(
        "--held-out", type=int, default=3, help="rollouts of a prompt that are read"
    )
    parser.add_argument("--samples", type=int, default=10_000, help="stored rollouts to time with")
    parser.add_argument("--length", type=int, default=512, help="their tokens")
    parser.add_argument("--rounds", type=int, default=2000, help="timed calls of each")
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="the JSON line only")
    arguments = parser.parse_args()
    for name in ("prompts", "held_out", "samples", "length", "rounds", "draft_len"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    return arguments


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    arctic = find_arctic()
    readings: dict[str, Reading] = {draw: history_reading(draw) for draw in DRAWS}
    if arctic is not None:
        for name, setting in ARCTIC.items():
            readings[name] = arctic_reading(arctic, setting, arguments.draft_len)
    recorded = recordings(arguments)
    # Cost first: what a model leaves in the heap would hide what a history takes.
    corpus = make_corpus(recorded[0], arguments.samples, arguments.length)
    num_rows = min(NUM_ROWS, len(corpus.prompts))
    cost = Cost(corpus, _unseen(recorded[0], num_rows, arguments.length), arguments.draft_len)
    cost.remember(arctic)
    cost.measure(min(arguments.rounds, arguments.length // TOKENS_A_ROUND * num_rows))
    by_temperature: dict[str, dict[str, float]] = {}
    versus: dict[str, float | None] = {}
    positions = 0
    for recording, key in zip(recorded, ("t1", "t07")):
        accepted, num = predict(recording, readings, arguments.held_out)
        by_temperature[key], positions = accepted, positions + num
        theirs = max((accepted[name] for name in ARCTIC if name in accepted), default=None)
        versus[f"vs_arctic_{key}"] = accepted["best"] / theirs if theirs else None
    tell("")
    if not arguments.json:
        _print(by_temperature, positions, cost, len(corpus.prompts), arctic is not None)
    result = {
        **versus,
        "time_vs_arctic": cost.time_vs_arctic,
        "propose_us": cost.numbers["propose_us_best"],
        "observe_us": cost.numbers["observe_us_best"],
        "bytes_per_token": cost.numbers["bytes_per_token"],
        "accepted": by_temperature,
        "positions": positions,
        "prompts_stored": len(corpus.prompts),
        "tokens_stored": cost.num_tokens,
        "cost": cost.numbers,
    }
    print(json.dumps({k: _rounded(v) for k, v in result.items()}))


def _unseen(recording: Recording, num_rows: int, length: int) -> list[Rollout]:
    """What the timed rows emit: pieced together anew."""
    generator = random.Random(1)
    kinds = len(recording.prompts)
    return [_joined(recording.rollouts[n % kinds], length, generator) for n in range(num_rows)]


def _print(
    accepted: dict[str, dict[str, float]], positions: int, cost: Cost, prompts: int, arctic: bool
) -> None:
    print(f"expected accepted tokens a position, {positions} positions:")
    for name in accepted["t1"]:
        print(f"  {name:28} T=1 {accepted['t1'][name]:.3f}   T=.7 {accepted['t07'][name]:.3f}")
    if not arctic:
        print(f"  arctic-inference is not installed: {INSTALL}")
    print(f"with {cost.num_tokens} tokens of {prompts} prompts stored:")
    for name, value in cost.numbers.items():
        print(f"  {name:28} {value:.2f}")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
