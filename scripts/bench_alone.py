"""What drafts earn a row that decodes alone, by proposer and length, in `bench_proposers.py`.

Policy, prompts and natural lengths are those of `bench_makespan.py`. Every proposer knows the same:
earlier samples of the same prompts, which a history remembers and an MTP head was trained on. All ways
to draft decode the same requests, one after the other in turn; those that name tokens have to emit
plain decoding's. Tokens per target step are emitted tokens over rounds, whatever the drafts cost; the
speedup beside it is of seconds, drafting and the prompt included. The best way of each is named: with
the fewest steps, and the fastest, which need not be the same.

Not measured: trees; heads that are trained along with the policy; several rows.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actors.engine_spec import ProposerName, make_proposer
from proposers.history import HistoryProposer
from proposers.mixture import MixtureProposer
from recipes.recorded_rollouts import Recording
from rollout.draft_len import AdaptiveDraftLen, FixedDraftLen
from rollout.engine import run_to_end
from rollout.native_engine import NativeEngine
from rollout.request import RolloutRequest, RolloutSample, SpecCounters
from scripts.bench_never_loses import check_same
from scripts.bench_ours import LoadedPolicy

MAX_LEN = 8
"""Of adaptive drafts."""
PLAIN = "plain"
MEASURES = ("tokens_per_target_step", "speedup")
KEYS = tuple(f"{key}_b1{way}" for key in MEASURES for way in ("", "_way"))
"""Of what `to_json` tells first: the best by each measure, and its name."""
NAMED = ("history",)
"""Ways whose tokens are plain decoding's."""


@dataclass(frozen=True, slots=True)
class How:
    """To draft."""

    proposer: ProposerName
    draft_len: int | None = None
    """None: chosen round by round."""


WAYS: dict[str, How] = {
    PLAIN: How("none", 0),
    "history": How("history"),
    **{name: How(name) for name in ("mtp", "mixture")},
    **{f"{name} {k}": How(name, k) for name in ("mtp", "mixture") for k in (1, 2, 4)},
}  # fmt: skip


@dataclass(slots=True)
class Run:
    """All that one way decoded."""

    seconds: float = 0.0
    num_tokens: int = 0
    counters: SpecCounters = field(default_factory=SpecCounters)

    def add(self, seconds: float, sample: RolloutSample) -> None:
        self.seconds += seconds
        self.num_tokens += len(sample.token_ids)
        self.counters.add(sample.counters)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def to_json(self, plain: "Run") -> dict[str, Any]:
        counters = self.counters
        pairs = zip(counters.accepted_by_position, counters.reached)
        return {
            "tokens_per_target_step": counters.tokens_per_target_step,
            "speedup": self.tokens_per_s / plain.tokens_per_s,
            "acceptance_rate": counters.acceptance_rate,
            "conditional": [accepted / reached for accepted, reached in pairs if reached],
        }


def measure(
    loaded: LoadedPolicy,
    earlier: Recording,
    requests: Sequence[RolloutRequest],
    tell: Callable[[str], None],
) -> dict[str, Run]:
    """Every way on the requests, by its name; the first request warms up and counts as well as any
    but is decoded once more before. `loaded` is a policy with a head, of one slot."""
    engines = {name: make_way(loaded, how, earlier) for name, how in WAYS.items()}
    runs = {name: Run() for name in WAYS}
    for number, request in enumerate((requests[0], *requests)):
        tell(f"one row alone: {number} of {len(requests)}")
        again = replace(request, run_seed=request.run_seed + 1) if not number else request
        made = {name: _decode(engine, loaded, again) for name, engine in engines.items()}
        for name in NAMED:
            check_same([made[PLAIN][1]], [made[name][1]], f"{again.id} by {name}")
        if number:
            for name, (seconds, sample) in made.items():
                runs[name].add(seconds, sample)
    return runs


def make_way(loaded: LoadedPolicy, how: How, earlier: Recording) -> NativeEngine:
    """An engine that drafts so; they share the policy and run one at a time."""
    proposer = make_proposer(replace(loaded.spec, proposer=how.proposer), loaded.policy)
    if isinstance(proposer, HistoryProposer | MixtureProposer):
        for prompt, rollouts in zip(earlier.prompts, earlier.rollouts, strict=True):
            for one in rollouts:
                proposer.remember(prompt, one.token_ids, one.logprobs)
    draft_len = AdaptiveDraftLen(MAX_LEN) if how.draft_len is None else FixedDraftLen(how.draft_len)
    return loaded.engine(proposer=proposer, draft_len=draft_len)


def _decode(
    engine: NativeEngine, loaded: LoadedPolicy, request: RolloutRequest
) -> tuple[float, RolloutSample]:
    engine.load(loaded.weights, version=0, digest="bench")
    started = time.perf_counter()
    (sample,) = run_to_end(engine, [request])
    return time.perf_counter() - started, sample


def to_json(runs: Mapping[str, Run]) -> dict[str, Any]:
    """The best way by either measure, and all of them."""
    ways = {name: run.to_json(runs[PLAIN]) for name, run in runs.items()}
    told: dict[str, Any] = {}
    for key in MEASURES:
        best = max(ways, key=lambda name: ways[name][key] or 0.0)
        told |= {f"{key}_b1": ways[best][key], f"{key}_b1_way": best}
    return told | {"alone": ways}


def text(told: Mapping[str, Any]) -> list[str]:
    """For people."""
    lines = ["one row alone: tokens per target step and speed over plain decoding, by way to draft"]
    for name, way in told["alone"].items():
        rates = " ".join(f"{rate:.2f}" for rate in way["conditional"])
        lines.append(
            f"  {name:12} {way['tokens_per_target_step']:.2f}  {way['speedup']:.2f}x  "
            f"accepted by depth {rates or '-'}"
        )
    return lines
