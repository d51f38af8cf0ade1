#!/usr/bin/env python
"""Our verification where vLLM samples, against vLLM's own rejection sampler.

    python scripts/bench_vllm_verify.py [--repeats 40] [--quick] [--json]

Run by an interpreter that has vLLM. Both are called as vLLM's model runner calls them, with the same
logits, for B rows with K drafted tokens each over V tokens, T=1, no filters; drafts are named (vLLM
takes the draft's law for a point mass) or drawn from dense laws that come along. They alternate within
every repeat, in an order that rotates; copies of the logits are made outside the clock.

    ours            `actors.vllm.verifier`: law, verdicts, the rows' bookkeeping, two log-probabilities
                    a token and the counters
    stock           vLLM's `RejectionSampler`, which returns tokens
    stock_logprobs  the same, returning a log-probability a token as well

vLLM's expansion of temperatures over drafted tokens returns memory that nobody wrote where Triton is
absent; here it is replaced by one that works, so that stock judges by the law asked for. Before the
ratios are given both have to emit as many tokens on average, within `SIGMAS` standard errors; else
the exit code is 1. Seconds are medians; CPU seconds are those of all threads, which sleep while they
wait. Not measured: the forward, filters, penalties and grammars (`bench_verify.py` has them for the
native engine), GPUs.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from actors.threads import thread_environment

for _name, _value in thread_environment(len(os.sched_getaffinity(0))).items():
    os.environ.setdefault(_name, _value)

from actors.vllm.support import INSTALL

if importlib.util.find_spec("vllm") is None:
    sys.exit(f"bench_vllm_verify: {sys.executable} has no vLLM; {INSTALL}")

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor.state import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from actors.vllm.rounds import Parts, Rounds
from actors.vllm.verifier import TICKET, ExactVerifier
from proposers.none import NoProposer
from recipes.passport import machine, project_state, versions
from rollout.draft_len import FixedDraftLen
from rollout.engine import EngineLimits
from rollout.request import RolloutRequest
from rollout.sampling import SamplingParams
from scripts.bench_engine import make_tell, own_stdout, rotated
from scripts.bench_exact import Inexact

SIZES = ((8, 3, 49_152), (16, 4, 49_152), (8, 4, 151_936))
"""B, K, V."""
QUICK_SIZES = ((2, 3, 512),)
KINDS = ("named", "drawn")
LIKELY = 0.7
"""Probability of the token that a named draft names."""
SIGMAS = 6.0
CONTEXT_LEN = 100_000


@dataclass(frozen=True, slots=True)
class Case:
    """What both are given."""

    logits: torch.Tensor  # [B (K + 1), V], those of a row side by side
    draft_probs: torch.Tensor | None  # [B K, V]
    metadata: SpecDecodeMetadata


def make_case(kind: str, batch: int, draft_len: int, vocab_size: int, seed: int) -> Case:
    """Laws with one likely token in a long tail; drawn drafts come from a law a little off."""
    noise = torch.Generator().manual_seed(seed)
    window = draft_len + 1
    logits = 2 * torch.randn(batch * window, vocab_size, generator=noise)
    likely = torch.randint(vocab_size, (batch * window, 1), generator=noise)
    rest = logits.scatter(1, likely, -torch.inf).logsumexp(1, keepdim=True)
    logits.scatter_(1, likely, rest + np.log(LIKELY / (1 - LIKELY)))
    drafted = torch.arange(batch * window).view(batch, window)[:, :-1].flatten()  # [B K]
    if kind == "named":
        ids, probs = likely[drafted, 0], None
    else:
        off = logits[drafted] + torch.randn(len(drafted), vocab_size, generator=noise)
        probs = off.softmax(-1)
        ids = torch.multinomial(probs, 1, generator=noise)[:, 0]
    metadata = SpecDecodeMetadata.make_dummy(
        ids.view(batch, draft_len).tolist(), torch.device("cpu")
    )
    metadata.target_logits_indices = drafted.to(torch.int32)
    metadata.bonus_logits_indices = torch.arange(draft_len, batch * window, window).to(torch.int32)
    return Case(logits, probs, metadata)


# ---- the contenders -----------------------------------------------------------------------


class Ours:
    """The verifier over a stand-in for vLLM's model runner."""

    def __init__(self, batch: int, draft_len: int, vocab_size: int) -> None:
        limits = EngineLimits(vocab_size, CONTEXT_LEN, can_decode=False)
        parts = Parts(
            proposer=NoProposer(),
            draft_len=FixedDraftLen(0),
            verification="block",
            mode="full",
            limits=limits,
            num_ids=vocab_size,
            max_draft_len=draft_len,
            decode=None,
            compile_grammar=None,
        )
        self._rounds, self._batch = Rounds(parts), batch
        sampling = SamplingParams(max_new_tokens=CONTEXT_LEN)
        for row in range(batch):
            request = RolloutRequest(f"r{row}", f"g{row}", f"p{row}", 0, (1, 2, 3), sampling)
            self._rounds.add(row, request)
        self._rounds.publish(0, "bench")
        names = [f"r{row}" for row in range(batch)]
        self._runner = SimpleNamespace(
            sampler=Sampler(),
            speculative_config=None,
            device=torch.device("cpu"),
            input_batch=SimpleNamespace(num_reqs=batch, req_ids=names, num_tokens_no_spec=None),
            requests={
                name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args={TICKET: row}))
                for row, name in enumerate(names)
            },
            query_start_loc=SimpleNamespace(np=np.arange(batch + 1) * (draft_len + 1)),
            discard_request_mask=SimpleNamespace(np=np.zeros(batch, dtype=bool)),
        )
        self._verifier = ExactVerifier(self._runner, self._rounds)

    def ready(self) -> None:
        """What vLLM knows of the rows before a forward."""
        lens = [len(self._rounds.token_ids(row)) for row in range(self._batch)]
        self._runner.input_batch.num_tokens_no_spec = np.array(lens)
        self._rounds.begin(draining=False)

    def __call__(self, case: Case, logits: torch.Tensor) -> torch.Tensor:
        return self._verifier(case.metadata, case.draft_probs, logits).sampled_token_ids


class Stock:
    """vLLM's own."""

    def __init__(self, batch: int, *, logprobs: bool) -> None:
        self._sampler = RejectionSampler(
            Sampler("processed_logprobs" if logprobs else "raw_logprobs")
        )
        none = torch.zeros(batch)
        self._sampling = SamplingMetadata(
            temperature=torch.ones(batch),
            all_greedy=False,
            all_random=True,
            top_p=None,
            top_k=None,
            generators={},
            max_num_logprobs=0 if logprobs else None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=none,
            presence_penalties=none,
            repetition_penalties=none + 1,
            output_token_ids=[[] for _ in range(batch)],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )

    def ready(self) -> None:
        pass

    def __call__(self, case: Case, logits: torch.Tensor) -> torch.Tensor:
        output = self._sampler(case.metadata, case.draft_probs, logits, self._sampling)
        return output.sampled_token_ids


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """What vLLM's function of this name should return."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts)


# ---- measuring ----------------------------------------------------------------------------


@dataclass(slots=True)
class Taken:
    """One contender's calls."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    """Tokens of each call."""


def measure(
    kind: str, size: tuple[int, int, int], repeats: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """One cell. Raises Inexact."""
    batch, draft_len, vocab_size = size
    contenders: dict[str, Ours | Stock] = {
        "ours": Ours(batch, draft_len, vocab_size),
        "stock": Stock(batch, logprobs=False),
        "stock_logprobs": Stock(batch, logprobs=True),
    }
    names, taken = list(contenders), {name: Taken() for name in contenders}
    for repeat in range(-1, repeats):  # the first is a warm-up
        tell(f"B={batch}, K={draft_len}, V={vocab_size}, {kind}: {repeat + 1}/{repeats}")
        case = make_case(kind, batch, draft_len, vocab_size, repeat + 1)
        for name in rotated(names, repeat):
            contenders[name].ready()
            logits = case.logits.clone()
            began, cpu_before = time.perf_counter(), time.process_time()
            ids = contenders[name](case, logits)
            seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_before
            if repeat >= 0:
                taken[name].seconds.append(seconds)
                taken[name].cpu_s.append(cpu_s)
                taken[name].emitted.append(int((ids != PLACEHOLDER_TOKEN_ID).sum()))
    check_same_length(taken, exactly=kind == "named")
    return {
        "kind": kind,
        "batch": batch,
        "draft_len": draft_len,
        "vocab_size": vocab_size,
        "ms": {name: 1e3 * statistics.median(one.seconds) for name, one in taken.items()},
        "cpu_ms": {name: 1e3 * statistics.median(one.cpu_s) for name, one in taken.items()},
        "emitted": {name: statistics.mean(one.emitted) / batch for name, one in taken.items()},
        "ratio": _ratios(taken, lambda one: one.seconds),
        "cpu_ratio": _ratios(taken, lambda one: one.cpu_s),
    }


def _ratios(taken: Mapping[str, Taken], of: Callable[[Taken], Sequence[float]]) -> dict[str, float]:
    """Ours / each other, of medians."""
    ours = statistics.median(of(taken["ours"]))
    return {
        name: ours / statistics.median(of(one)) for name, one in taken.items() if name != "ours"
    }


def check_same_length(taken: Mapping[str, Taken], *, exactly: bool) -> None:
    """Raises Inexact where the mean numbers of tokens emitted differ by more than chance. Of drawn
    drafts block verification may accept more than stock does, never fewer."""
    ours = taken["ours"].emitted
    for name, one in taken.items():
        gaps = [mine - other for mine, other in zip(ours, one.emitted)]
        mean, error = statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5
        if mean < -SIGMAS * error or (exactly and mean > SIGMAS * error):
            raise Inexact(f"ours emits {mean:+.2f} tokens a call beside {name} (± {error:.2f})")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40, help="calls of each; 40")
    parser.add_argument("--quick", action="store_true", help="a trial: says that it runs, no more")
    parser.add_argument("--json", action="store_true", help="the JSON line only")
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        parser.error(f"--repeats {arguments.repeats}: expected at least 2")
    return arguments


def text(cells: Sequence[Mapping[str, Any]]) -> str:
    """For people."""
    lines = ["ours / stock by the clock, by CPU seconds; / stock with log-probabilities"]
    for cell in cells:
        ratio, cpu = cell["ratio"], cell["cpu_ratio"]
        lines.append(
            f"B={cell['batch']:<3}K={cell['draft_len']} V={cell['vocab_size']:<7}{cell['kind']:6} "
            f"{cell['ms']['ours']:6.2f} ms, stock {cell['ms']['stock']:6.2f} ms: "
            f"{ratio['stock']:.2f}, {cpu['stock']:.2f}; "
            f"{ratio['stock_logprobs']:.2f}, {cpu['stock_logprobs']:.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    arguments, tell = parse(), make_tell()
    answers = own_stdout()
    torch.manual_seed(0)  # stock's randomness
    current_platform.register_triton_kernel_overrides()
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    sizes = QUICK_SIZES if arguments.quick else SIZES
    repeats = 3 if arguments.quick else arguments.repeats
    try:
        cells = [measure(kind, size, repeats, tell) for kind in KINDS for size in sizes]
    except Inexact as error:
        tell("")
        sys.exit(f"bench_vllm_verify: {error}")
    tell("")
    if not arguments.json:
        print(text(cells), file=answers)
    found = {
        "cells": cells,
        "settings": {"repeats": repeats, "quick": arguments.quick},
        "machine": machine() | {"threads": torch.get_num_threads()},
        "versions": versions(),
        "project": project_state(),
    }
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
