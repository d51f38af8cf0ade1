#!/usr/bin/env python
"""What the law and the verification cost: their share of a round, by kind of draft and of law.

    python scripts/bench_verify.py [--rows 8] [--draft-len 4] [--tokens 24] [--repeats 2]
        [--quant int8_w8a16] [--json]

Regime: SmolLM2-135M (vocabulary 49,152), default format and kernels, rows of one length, drafts of a
twin of the target at temperature 1.3 (so the acceptance is real, not chosen). A round here is scoring,
law, verification, commit and rollback; drafting is left out, since a share of a round with a costly
drafter says nothing. The kinds alternate within a repeat; a short round of each comes first and is not
counted. Before anything is timed, greedy rows must come out as plain decoding makes them.

Beside the share stands the roofline: the time in which this machine reads the scored logits once, by
the bandwidth measured in the same run, and how many such passes the law and verification took.
Not measured: proposers, GPUs, grammars (a mask costs what its provider costs).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from actors.engine_spec import EngineSpec, make_policy, pack_folder
from proposers.none import NoProposer
from quant.formats import FORMATS, FormatName
from recipes.smollm2 import model_folder
from rollout.checkpoint import read_config, read_tokenizer
from rollout.draft import DenseLaw, Draft
from rollout.draft_len import FixedDraftLen
from rollout.draft_tree import most_probable
from rollout.drafting import Drafting, sparse_law
from rollout.engine import run_to_end
from rollout.native_engine import NativeEngine
from rollout.policy import Policy, Window
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample
from rollout.row import Row
from rollout.sampling import SamplingParams

GOAL_SHARE = 0.15
"""Of a round, for the plain law."""
TWIN_TEMPERATURE = 1.3
SPARSE_IDS = 32
TEXT = "The weather in the valley was mild that spring, and the people of the village"
LAWS = {
    "T=1": SamplingParams(),
    "T=.7 top-k 20 top-p .9": SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    "top-p .9": SamplingParams(top_p=0.9),
    "min-p .05": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2),
}
KINDS = ("none", "point", "sparse", "dense")
PHASES = ("score", "verify", "commit")


class TwinProposer(NoProposer):
    """Drafts by a second instance of the target; its laws are of the kind asked for."""

    def __init__(self, policy: Policy, kind: str) -> None:
        self._policy, self._kind = policy, kind
        self._cached: dict[int, int] = {}

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        drafts = [Drafting(row, max_len) for row, max_len in zip(rows, max_lens)]
        while growing := [(row, draft) for row, draft in zip(rows, drafts) if draft.room]:
            for (_, draft), probs in zip(growing, self._next_laws(growing)):
                self._extend(draft, probs)
        for row in rows:  # what was drafted may be refused
            self._cached[row.serial] = len(row.token_ids) - 1
            self._policy.truncate(row.slot or 0, len(row.token_ids) - 1)
        return [draft.done() for draft in drafts]

    def _next_laws(self, growing: Sequence[tuple[Row, Drafting]]) -> torch.Tensor:
        windows = []
        for row, draft in growing:
            ids = (*row.token_ids, *draft.token_ids)
            start = self._cached.get(row.serial, 0)
            windows.append(Window(row.slot or 0, start, ids[start:], num_logits=1))
            self._cached[row.serial] = len(ids)
        return (self._policy.score(windows) / TWIN_TEMPERATURE).softmax(-1)  # [B, V]

    def _extend(self, draft: Drafting, probs: torch.Tensor) -> None:
        if self._kind == "point":
            draft.point(int(probs.argmax()))
        elif self._kind == "dense":
            draft.sample(DenseLaw(probs))
        else:
            draft.sample(sparse_law(dict(most_probable(probs, SPARSE_IDS))))


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kind of draft under one law; times are medians over repeats, milliseconds a round."""

    law: str
    draft: str
    round_ms: float
    law_and_verify_ms: float
    share: float
    """(law, verification, commit) / (those and scoring)."""
    share_min: float
    share_max: float
    acceptance_rate: float | None
    passes: float
    """Of the scored logits: time of law and verification / time to read them once."""


class Bench:
    """Two instances of one model and what is run on them."""

    def __init__(self, num_rows: int, draft_len: int, num_tokens: int, quant: FormatName) -> None:
        folder = model_folder("smollm2")
        config = read_config(folder)
        self._ids = tuple(read_tokenizer(folder).encode(TEXT))
        self._num_rows, self._draft_len, self._num_tokens = num_rows, draft_len, num_tokens
        spec = EngineSpec(
            str(folder),
            format=quant,
            num_slots=num_rows,
            context_len=len(self._ids) + num_tokens + draft_len + 1,
        )
        self._policies = [make_policy(spec) for _ in range(2)]
        self._weights = self._policies[0].load(pack_folder(spec))
        self.kernels: dict[str, str] = self._weights.kernels()
        self.vocab_size = config.vocab_size

    def run(
        self, kind: str, sampling: SamplingParams, seed: int, num_tokens: int | None = None
    ) -> tuple[NativeEngine, list[RolloutSample]]:
        target, twin = self._policies
        twin.swap(self._weights)
        proposer: Proposer = NoProposer() if kind == "none" else TwinProposer(twin, kind)
        draft_len = FixedDraftLen(0 if kind == "none" else self._draft_len)
        engine = NativeEngine(target, proposer, draft_len)
        engine.load(self._weights, version=0, digest="bench")
        limited = replace(sampling, max_new_tokens=num_tokens or self._num_tokens)
        requests = [
            RolloutRequest(str(i), "g", "p", i, self._ids, limited, run_seed=seed)
            for i in range(self._num_rows)
        ]
        return engine, run_to_end(engine, requests)

    def check_exact(self) -> None:
        """Greedy rows with drafts of every kind equal plain ones."""
        greedy = SamplingParams(temperature=0.0)
        plain = [s.token_ids for s in self.run("none", greedy, 0)[1]]
        for kind in KINDS[1:]:
            drafted = [s.token_ids for s in self.run(kind, greedy, 0)[1]]
            if drafted != plain:
                sys.exit(f"bench_verify: greedy {kind} drafts changed the tokens; nothing is timed")


def read_seconds(num_rows: int, vocab_size: int) -> float:
    """Time to read float32 [N, V] once; the best of ten after a flush of the caches."""
    logits, flush = torch.ones(num_rows, vocab_size), torch.ones(32 * 2**20)
    times = []
    for _ in range(10):
        flush.add_(1)
        started = time.perf_counter()
        logits.sum()
        times.append(time.perf_counter() - started)
    return min(times)


def measure(bench: Bench, arguments: argparse.Namespace, tell: Callable[[str], None]) -> list:
    rounds: dict[tuple[str, str], list[dict[str, float]]] = {}
    for repeat in range(arguments.repeats):
        for law, sampling in LAWS.items():
            for kind in KINDS:
                tell(f"repeat {repeat + 1}/{arguments.repeats}: {law}, {kind}")
                if not repeat:
                    bench.run(kind, sampling, 0, num_tokens=4)  # warm-up
                engine, _ = bench.run(kind, sampling, 1 + repeat)
                gauges, counters = engine.gauges(), engine.counters()
                rounds.setdefault((law, kind), []).append(
                    {phase: gauges[f"seconds/{phase}"] for phase in PHASES}
                    | {
                        "rounds": gauges["count/rounds"],
                        "positions": float(counters.rounds + counters.verified),
                        "accepted": float(counters.accepted),
                        "verified": float(counters.verified),
                    }
                )
    return [_summarise(bench, law, kind, runs) for (law, kind), runs in rounds.items()]


def _summarise(bench: Bench, law: str, kind: str, runs: Sequence[dict[str, float]]) -> Measurement:
    ours = [run["verify"] + run["commit"] for run in runs]
    whole = [run["score"] + mine for run, mine in zip(runs, ours)]
    shares = [mine / total for mine, total in zip(ours, whole)]
    num_rounds = [run["rounds"] for run in runs]
    positions = sum(run["positions"] for run in runs) / sum(num_rounds)
    mine_s = statistics.median(mine / n for mine, n in zip(ours, num_rounds))
    verified = sum(run["verified"] for run in runs)
    return Measurement(
        law=law,
        draft=kind,
        round_ms=1e3 * statistics.median(total / n for total, n in zip(whole, num_rounds)),
        law_and_verify_ms=1e3 * mine_s,
        share=statistics.median(shares),
        share_min=min(shares),
        share_max=max(shares),
        acceptance_rate=sum(run["accepted"] for run in runs) / verified if verified else None,
        passes=mine_s / read_seconds(round(positions), bench.vocab_size),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=8, help="rows in the batch")
    parser.add_argument("--draft-len", type=int, default=4, help="drafted tokens a row and round")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens a row")
    parser.add_argument("--repeats", type=int, default=2, help="times each kind is measured")
    parser.add_argument("--quant", choices=list(FORMATS), default="int8_w8a16", help="weights")
    parser.add_argument("--json", action="store_true", help="the JSON line only")
    arguments = parser.parse_args()
    progress = sys.stderr.isatty() and not arguments.json

    def tell(text: str) -> None:
        if progress:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    tell("loading SmolLM2, checking that greedy rows come out right")
    bench = Bench(arguments.rows, arguments.draft_len, arguments.tokens, arguments.quant)
    bench.check_exact()
    results = measure(bench, arguments, tell)
    tell("")
    if not arguments.json:
        print(
            f"B={arguments.rows}, K={arguments.draft_len}, V={bench.vocab_size}, {arguments.quant}"
        )
        print(f"blocks: {bench.kernels['blocks']}; head: {bench.kernels['head']}")
        print(f"{torch.get_num_threads()} threads; share = law + verify + commit of a round")
        print(f"{'law':24}{'draft':8}{'round ms':>9}{'ours ms':>9}{'share (range)':>22}"
              f"{'passes':>8}{'accepted':>10}")  # fmt: skip
        for r in results:
            accepted = "–" if r.acceptance_rate is None else f"{r.acceptance_rate:.2f}"
            shares = f"{r.share:.3f} ({r.share_min:.3f}–{r.share_max:.3f})"
            print(f"{r.law:24}{r.draft:8}{r.round_ms:9.1f}{r.law_and_verify_ms:9.1f}{shares:>22}"
                  f"{r.passes:8.1f}{accepted:>10}")  # fmt: skip
        beyond = [r for r in results if r.share > GOAL_SHARE]
        print(f"beyond {GOAL_SHARE:.0%} of the round: "
              f"{', '.join(f'{r.law} with {r.draft} drafts' for r in beyond) or 'none'}")  # fmt: skip
    print(json.dumps({"quant": arguments.quant, "kernels": bench.kernels,
                      "rows": arguments.rows, "draft_len": arguments.draft_len,
                      "vocab_size": bench.vocab_size, "threads": torch.get_num_threads(),
                      "results": [asdict(r) for r in results]}))  # fmt: skip


if __name__ == "__main__":
    main()
