"""Whether the adaptive draft length loses: batch sizes times acceptances, in `bench_proposers.py`.

Every cell runs plain decoding, the adaptive length and fixed lengths in turn on the same prompts, which
are cached before the clock starts: seconds are those of decoding, where a wrong length shows most.
Acceptance comes from what the history proposer remembers:

    high         T=.3, after rollouts at T=.3
    low          T=1, after rollouts at T=1
    adversarial  T=1, the same drafts with every token replaced by its neighbour: the proposer is as
                 sure as before and always wrong
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from proposers.history import HistoryProposer
from proposers.none import NoProposer
from rollout.draft import Draft
from rollout.draft_len import AdaptiveDraftLen, DraftLen, FixedDraftLen
from rollout.engine import run_to_end
from rollout.native_engine import NativeEngine
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample
from rollout.row import Row
from rollout.sampling import SamplingParams
from scripts.bench_contenders import Prompts
from scripts.bench_exact import Inexact
from scripts.bench_ours import LoadedPolicy

ADAPTIVE, PLAIN = "adaptive", "plain"
FIXED_LENS = (1, 3, 8)
MAX_LEN = 8
TEMPERATURES = {"high": 0.3, "low": 1.0, "adversarial": 1.0}


class Contrary(HistoryProposer):
    """The drafts of history with every token replaced: as sure as before, and always wrong but by
    chance."""

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        drafts = super().propose(rows, max_lens)
        return [replace(d, token_ids=tuple(token ^ 1 for token in d.token_ids)) for d in drafts]


@dataclass(slots=True)
class Cell:
    """One batch size and acceptance."""

    batch: int
    acceptance: str
    tok_s: dict[str, list[float]] = field(default_factory=dict)
    """Way to run -> one entry a repeat."""
    accepted: int = 0
    verified: int = 0
    """Tokens, of the adaptive runs."""

    def median(self, name: str) -> float:
        return statistics.median(self.tok_s[name])

    @property
    def vs_plain(self) -> float:
        """Median of the ratios within a repeat."""
        pairs = zip(self.tok_s[ADAPTIVE], self.tok_s[PLAIN], strict=True)
        return statistics.median(ours / plain for ours, plain in pairs)

    @property
    def best_fixed(self) -> tuple[str, float]:
        """The fixed length of the highest median, plain among them, and that median."""
        medians = {name: self.median(name) for name in self.tok_s if name != ADAPTIVE}
        best = max(medians, key=lambda name: medians[name])
        return best, medians[best]

    @property
    def vs_best_fixed(self) -> float:
        best, _ = self.best_fixed
        pairs = zip(self.tok_s[ADAPTIVE], self.tok_s[best], strict=True)
        return statistics.median(ours / fixed for ours, fixed in pairs)

    def to_json(self) -> dict[str, object]:
        return {
            "batch": self.batch,
            "acceptance": self.acceptance,
            "tok_s": {name: self.median(name) for name in self.tok_s},
            "vs_plain": self.vs_plain,
            "vs_best_fixed": self.vs_best_fixed,
            "best_fixed": self.best_fixed[0],
            "acceptance_rate": self.accepted / self.verified if self.verified else None,
        }


def decode(
    engine: NativeEngine, prepared: object, prompts: Prompts, sampling: SamplingParams, seed: int
) -> tuple[float, list[RolloutSample]]:
    """Seconds of decoding behind prompts that are cached already, and the samples."""
    engine.load(prepared, version=seed, digest="bench")
    run_to_end(engine, requests_for(prompts, replace(sampling, max_new_tokens=1), -seed))
    requests = requests_for(prompts, sampling, seed)
    started = time.perf_counter()
    samples = run_to_end(engine, requests)
    return time.perf_counter() - started, samples


def requests_for(prompts: Prompts, sampling: SamplingParams, seed: int) -> list[RolloutRequest]:
    return [
        RolloutRequest(f"{seed}/{p}", f"g{p}", f"p{p}", 0, tuple(ids), sampling, run_seed=seed)
        for p, ids in enumerate(prompts)
    ]


def record(
    loaded: LoadedPolicy, prompts: Prompts, sampling: SamplingParams, num_samples: int
) -> list[RolloutSample]:
    """Earlier rollouts of the prompts."""
    engine = loaded.engine(proposer=NoProposer(), draft_len=FixedDraftLen(0))
    engine.load(loaded.weights, version=0, digest="bench")
    requests = [
        replace(request, id=f"{request.id}/{index}", sample_index=1 + index)
        for index in range(num_samples)
        for request in requests_for(prompts, sampling, 0)
    ]
    return run_to_end(engine, requests)


def ways(
    loaded: LoadedPolicy, acceptance: str, earlier: Sequence[RolloutSample]
) -> dict[str, NativeEngine]:
    """Plain, adaptive and fixed lengths by name; each with a memory of its own, and what it learns
    stays from run to run."""

    def remembering() -> Proposer:
        proposer = Contrary() if acceptance == "adversarial" else HistoryProposer()
        for sample in earlier:
            proposer.remember(sample.request.prompt_ids, sample.token_ids, sample.logprobs)
        return proposer

    lens: dict[str, DraftLen] = {
        ADAPTIVE: AdaptiveDraftLen(MAX_LEN),
        **{f"fixed {n}": FixedDraftLen(n) for n in FIXED_LENS},
    }
    drafting = {
        name: loaded.engine(proposer=remembering(), draft_len=draft_len)
        for name, draft_len in lens.items()
    }
    return {PLAIN: loaded.engine(proposer=NoProposer(), draft_len=FixedDraftLen(0)), **drafting}


def measure(
    loaded: LoadedPolicy,
    prompts: Prompts,
    *,
    batches: Sequence[int],
    num_tokens: int,
    num_earlier: int,
    repeats: int,
    tell: Callable[[str], None],
) -> list[Cell]:
    """All cells; each way has one run before that is not counted. Raises Inexact where a way emits
    other tokens than plain decoding, which drafts that name tokens never do."""
    cells = []
    recorded: dict[float, list[RolloutSample]] = {}
    for acceptance, temperature in TEMPERATURES.items():
        sampling = SamplingParams(temperature=temperature, max_new_tokens=num_tokens)
        if temperature not in recorded:
            tell(f"recording {num_earlier} rollouts a prompt at T={temperature}")
            recorded[temperature] = record(loaded, prompts, sampling, num_earlier)
        earlier = recorded[temperature]
        for batch in batches:
            cell = Cell(batch, acceptance)
            engines = ways(loaded, acceptance, earlier)
            names = list(engines)
            for repeat in range(-1, repeats):
                tell(f"B={batch}, {acceptance} acceptance: repeat {repeat + 1}/{repeats}")
                turn, seed = repeat % len(names), 1 + len(names) + repeat
                taken: dict[str, list[RolloutSample]] = {}
                for name in (*names[turn:], *names[:turn]):
                    seconds, samples = decode(
                        engines[name], loaded.weights, prompts[:batch], sampling, seed
                    )
                    taken[name] = samples
                    if repeat < 0:
                        continue
                    emitted = sum(len(sample.token_ids) for sample in samples)
                    cell.tok_s.setdefault(name, []).append(emitted / seconds)
                    if name == ADAPTIVE:
                        cell.accepted += sum(s.counters.accepted for s in samples)
                        cell.verified += sum(s.counters.verified for s in samples)
                for name, samples in taken.items():
                    check_same(taken[PLAIN], samples, f"{name} at B={batch}, {acceptance}")
            cells.append(cell)
    return cells


def check_same(plain: list[RolloutSample], drafted: list[RolloutSample], where: str) -> None:
    """Raises Inexact unless drafts that name tokens left what a seed gives alone."""
    pairs = zip(plain, drafted, strict=True)
    if wrong := [one.request.id for one, other in pairs if one.token_ids != other.token_ids]:
        raise Inexact(f"{where}: {len(wrong)} of {len(plain)} samples differ from plain decoding's")
