"""Thousands of rounds of everything at once: groups, stops, aborts, preemptions, chunks, weight swaps.

Every sample is compared with its request run again alone: plain decoding, all the room there is, the
same weights in force for the same tokens. Drafts are point masses, which a seed's tokens do not depend
on, so the two must agree token by token, also where the weights changed on the way. Of an aborted
sample the tokens it has are compared. Seeds decide all that happens; draft lengths that adapt do so to
made-up costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from proposers.history import HistoryProposer
from proposers.ngram import NgramProposer
from proposers.none import NoProposer
from quant.formats import FORMATS, FormatName
from rollout.checkpoint import read_config
from rollout.compiled_policy import CompiledPolicy
from rollout.draft_len import AdaptiveDraftLen, DraftLen, FixedDraftLen
from rollout.engine import InFlight
from rollout.native_engine import NativeEngine
from rollout.policy import Window
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample, SpecCounters
from rollout.round_cost import RoundCost
from rollout.sampling import SamplingParams
from rollout.table_policy import TablePolicy, random_table
from rollout.transformer_policy import TransformerPolicy
from tests.rollout.engines import request, table_engine
from tests.rollout.policies import loaded_policy, packed_weights, random_ids

V = 5
CONTEXT = 28
BUDGET = 7
CAP = 60
TABLES = [random_table(V, depth=3, seed=seed) for seed in (61, 62, 63)]
"""In force in turn."""
IN_FLIGHT: tuple[InFlight, ...] = ("interrupt", "finish", "abort")


def letters(ids: Sequence[int]) -> str:
    return "".join("abcde"[token] for token in ids)


class Clockless(AdaptiveDraftLen):
    """Costs of 1 a round and .02 a token, whatever the machine does."""

    def observe(self, round_: RoundCost) -> None:
        seconds = 1 + 0.02 * round_.scored_tokens
        super().observe(replace(round_, seconds=seconds, propose_seconds=1e-5))


class Recording(TablePolicy):
    """Keeps the windows of each call."""

    def __init__(self) -> None:
        super().__init__(
            TABLES[0], vocab_size=V, context_len=CONTEXT, num_slots=6, max_cached_tokens=CAP
        )
        self.calls: list[list[Window]] = []

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        self.calls.append(list(windows))
        return super().score(windows)


class Soak:
    """An engine under random load, and everything that went in and came out."""

    def __init__(
        self,
        engine: NativeEngine,
        weights: Callable[[int], Any],
        group: Callable[[Random, int], list[RolloutRequest]],
        seed: int,
    ) -> None:
        self.engine, self._weights, self._group = engine, weights, group
        self._random = Random(seed)
        self._num_groups = self._version = 0
        self.submitted: list[RolloutRequest] = []
        self.samples: list[RolloutSample] = []

    def run(self, num_steps: int, check_round: Callable[[], None] = lambda: None) -> None:
        """Rounds with something new before each, then until nothing is left."""
        while num_steps > 0 or self.engine.num_unfinished:
            if num_steps > 0:
                self._disturb()
            self.samples += self.engine.step()
            num_steps -= 1
            self.check()
            check_round()
        self.check_end()

    def _disturb(self) -> None:
        """New groups while few rows are left, now and then an abort or a swap."""
        engine, chance = self.engine, self._random.random
        if engine.num_unfinished < 14 and chance() < 0.4:
            group = self._group(self._random, self._num_groups)
            self._num_groups += 1
            engine.submit(group)
            self.submitted += group
        if chance() < 0.04:
            named = [self._random.choice(self.submitted).id for _ in range(3) if self.submitted]
            self.samples += engine.abort([*named, "unknown"])
        if chance() < 0.04 and not engine.load_is_due:
            self._version += 1
            engine.load(
                self._weights(self._version),
                version=self._version,
                digest=f"{self._version}",
                in_flight=self._random.choice(IN_FLIGHT),
            )

    def check(self) -> None:
        """What holds between any two rounds."""
        engine, scheduler = self.engine, self.engine._scheduler
        rows = [*scheduler.live, *scheduler.waiting]
        assert len(self.submitted) == len(self.samples) + engine.num_unfinished
        assert [row.serial for row in rows] == sorted(row.serial for row in rows), "overtaken"
        assert not any(row.done for row in rows)
        assert all(row.slot is None for row in scheduler.waiting)
        slots = [row.slot for row in scheduler.live]
        assert len(set(slots)) == len(slots) and None not in slots
        for row in scheduler.live:
            num_cached = scheduler.num_cached(row)
            assert num_cached < len(row.token_ids) <= row.max_len
            assert scheduler._cached[row.slot or 0] == row.token_ids[:num_cached]
        total = SpecCounters()
        for counters in [s.counters for s in self.samples] + [row.counters for row in rows]:
            total.add(counters)
        assert counts(total) == counts(engine.counters())

    def check_end(self) -> None:
        """Each request came back once; nothing is left of any."""
        engine = self.engine
        assert sorted(s.request.id for s in self.samples) == sorted(r.id for r in self.submitted)
        assert not engine._scheduler.live and not engine._scheduler.waiting
        assert engine.gauges()["count/samples"] == len(self.samples)
        counters = engine.counters()
        assert counters.emitted == sum(len(sample.token_ids) for sample in self.samples)
        assert counters.accepted <= counters.verified <= counters.drafted
        assert counters.num_reached == counters.accepted + counters.corrections
        proposer = engine.proposer
        assert not isinstance(proposer, NgramProposer) or not proposer._indices
        if isinstance(proposer, HistoryProposer):
            assert not any(rollout.in_flight for rollout in proposer._store)


def counts(counters: SpecCounters) -> list[Any]:
    """Whole numbers only: sums of fractions depend on their order."""
    values = [getattr(counters, name) for name in SpecCounters.__slots__]
    return [value for value in values if not isinstance(value, float)]


def alone(
    sample: RolloutSample, engine: NativeEngine, weights: Callable[[int], Any]
) -> RolloutSample:
    """The sample's request on an idle engine without drafts, one token a round, under the versions
    that verified the sample's tokens."""
    ended: list[RolloutSample] = []
    engine.submit([sample.request])
    for version, num in sample.version_spans:
        engine.load(weights(version), version=version, digest=f"{version}", in_flight="interrupt")
        for _ in range(num):
            assert not ended, "alone it ended before"
            ended += engine.step()
    if sample.finish_reason == "abort" or not sample.token_ids:
        ended += engine.abort([sample.request.id]) or engine.step()
    assert engine.num_unfinished == 0, "alone it goes on"
    return ended[0]


def check_alone(sample: RolloutSample, again: RolloutSample, tolerance: float) -> None:
    assert sample.token_ids == again.token_ids
    assert sample.version_spans == again.version_spans
    assert sample.logprobs == pytest.approx(again.logprobs, abs=tolerance)
    if sample.finish_reason != "abort":
        assert (sample.finish_reason, sample.finish_detail) == (
            again.finish_reason, again.finish_detail,
        )  # fmt: skip


# ---- tables -------------------------------------------------------------------------------


def table_of(version: int) -> Any:
    return TABLES[version % len(TABLES)]


def table_group(random: Random, index: int) -> list[RolloutRequest]:
    """One to four samples of a prompt of any length, some of it seen before."""
    base = [(i * i + i // 3) % V for i in range(CONTEXT)]
    prompt = base[: random.choice((1, 2, 5, 9, 9, 14, 22, 27))]
    prompt[-1] = random.randrange(V)
    length = random.choice((0, 1, 6, 12, 20, 40))
    sampling = SamplingParams(
        max_new_tokens=length,
        min_tokens=min(length, random.choice((0, 0, 3))),
        temperature=random.choice((0.0, 0.3, 0.7, 1.0)),
        top_k=random.choice((0, 0, 3)),
        repetition_penalty=random.choice((1.0, 1.0, 1.2)),
        stop_token_ids=random.choice(((), (2,), (1, 4))),
        stop_strings=random.choice(((), ("cab", "dd"))),
    )
    return [
        request(f"{index}/{i}", prompt, sampling, prompt_id=f"p{index}", sample_index=i)
        for i in range(random.choice((1, 1, 2, 4)))
    ]


SETTINGS: dict[str, Callable[[], tuple[Proposer, DraftLen]]] = {
    "ngram, fixed": lambda: (NgramProposer(min_match=1), FixedDraftLen(3)),
    "ngram, adaptive": lambda: (NgramProposer(min_match=1), Clockless(4)),
    "history, fixed": lambda: (HistoryProposer(max_tokens=300), FixedDraftLen(4)),
    "history, adaptive and trees": lambda: (HistoryProposer(), Clockless(3, tree_nodes=6)),
}


@pytest.mark.parametrize("seed", range(len(SETTINGS)))
def test_a_table_under_random_load_emits_what_each_request_does_alone(seed: int) -> None:
    proposer, draft_len = list(SETTINGS.values())[seed]()
    policy = Recording()
    engine = table_engine(
        TABLES[0], V, policy=policy, proposer=proposer, decode=letters, max_round_tokens=BUDGET
    )
    engine.draft_len = draft_len
    soak = Soak(engine, table_of, table_group, seed)
    soak.run(1000, check_round=lambda: check_table(policy, engine))
    check_everything_happened(soak)
    reference = table_engine(TABLES[0], V, context_len=CONTEXT, num_slots=1, decode=letters)
    for sample in soak.samples:
        check_alone(sample, alone(sample, reference, table_of), tolerance=1e-9)


def check_table(policy: Recording, engine: NativeEngine) -> None:
    """One forward within the budget, and room for what is cached and no more."""
    calls, policy.calls = policy.calls, []
    assert len(calls) <= 1
    for windows in calls:
        chunks = [window for window in windows if not window.num_logits]
        long = [w for w in windows if w.num_logits and len(w.token_ids) > w.num_logits]
        if chunks or long:
            num_tokens = sum(len(window.token_ids) for window in windows)
            short = num_tokens - sum(len(window.token_ids) for window in (*chunks, *long))
            assert num_tokens <= max(BUDGET, short + 1)
    scheduler = engine._scheduler
    assert policy.num_entries <= CAP
    for slot in range(policy.num_slots):
        assert policy._cached[slot] == scheduler._cached[slot]
    held = {row.slot for row in scheduler.live}
    free = [slot for slot in range(policy.num_slots) if slot not in held]
    assert all(len(policy._entries[slot]) == len(policy._cached[slot]) for slot in free)


def check_everything_happened(soak: Soak) -> None:
    """Negative control: the load is no test of what it never did."""
    gauges, counters = soak.engine.gauges(), soak.engine.counters()
    for name in ("prefill_tokens", "refill_tokens", "forked_tokens", "preemptions"):
        assert gauges[f"count/{name}"] > 20, name
    assert counters.accepted > 50 and counters.corrections > 20 and counters.plain > 20
    details = [(sample.finish_reason, sample.finish_detail[:6]) for sample in soak.samples]
    for seen in (
        ("abort", "by req"), ("abort", "weight"), ("length", "contex"), ("length", "max_ne"),
        ("stop", "token "), ("stop", "string"),
    ):  # fmt: skip
        assert seen in details
    assert sum(len(sample.version_spans) > 1 for sample in soak.samples) > 2


# ---- a transformer ------------------------------------------------------------------------


class Capped(TransformerPolicy):
    """Keeps account of a cap as a cache does that shares nothing; a fork is counted once it grows."""

    def __init__(self, policy: TransformerPolicy, cap: int) -> None:
        self.__dict__.update(policy.__dict__)
        self._cap, self._room = cap, [0] * policy.num_slots

    def grow(self, slot: int, length: int) -> bool:
        others = sum(self._room) - self._room[slot]
        if others + length > self._cap:
            return False
        self._room[slot] = max(self._room[slot], length)
        return True

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        self._room[slot] = min(self._room[slot], length)

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        for window in windows:
            assert window.start + len(window.token_ids) <= self._room[window.slot]
        return super().score(windows)

    def swap(self, prepared: Any) -> None:
        super().swap(prepared)
        self._room = [0] * self.num_slots


def llama_group(random: Random, index: int) -> list[RolloutRequest]:
    prompt = random_ids(random.choice((1, 4, 12, 30)), seed=random.randrange(4))
    sampling = SamplingParams(
        max_new_tokens=random.choice((4, 10, 30)),
        temperature=random.choice((0.0, 0.2, 1.0)),
        top_p=random.choice((1.0, 0.9)),
        stop_token_ids=random.choice(((), tuple(range(0, 300, 20)))),
    )
    return [
        request(f"{index}/{i}", prompt, sampling, prompt_id=f"p{index}", sample_index=i)
        for i in range(random.choice((1, 2, 4)))
    ]


@pytest.mark.parametrize("seed", range(2))
def test_a_transformer_under_random_load_emits_what_each_request_does_alone(
    seed: int, tiny_llama: Path
) -> None:
    plain = loaded_policy(tiny_llama, num_slots=1, context_len=48)
    updates = [
        plain.load(packed_weights(tiny_llama, change=lambda _, tensor, c=c: tensor * c))
        for c in (1.0, 1.03)
    ]

    def weights(version: int) -> Any:
        return updates[version % 2]

    proposer = (NgramProposer(min_match=1), HistoryProposer())[seed]
    policy = Capped(loaded_policy(tiny_llama, num_slots=5, context_len=48), cap=80)
    draft_len = (FixedDraftLen(3), FixedDraftLen(5, branching=True))[seed]
    engine = NativeEngine(policy, proposer, draft_len, max_round_tokens=16)
    engine.load(weights(0), version=0, digest="0")
    soak = Soak(engine, weights, llama_group, seed)
    soak.run(150)
    gauges, counters = engine.gauges(), engine.counters()
    assert gauges["count/preemptions"] > 5 and gauges["count/refill_tokens"] > 20
    assert counters.accepted > 3 and counters.corrections > 5
    reference = NativeEngine(plain, NoProposer(), FixedDraftLen(0))
    for sample in soak.samples:
        check_alone(sample, alone(sample, reference, weights), tolerance=1e-4)


# ---- the compiled policy ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format_", "branching", "num_rounds"),
    [("none", False, 2000), ("none", True, 300), ("int8_w8a8", False, 500)],
)
def test_compiled_kernels_under_random_load_emit_what_each_request_does_alone(
    format_: FormatName, branching: bool, num_rounds: int, tiny_llama: Path
) -> None:
    """Bit for bit in every format, W8A8 too, where one rounding more would change the text; trees
    within rounding, for their entries are summed up from other places."""

    def policy(**sizes: Any) -> CompiledPolicy:
        return CompiledPolicy(
            read_config(tiny_llama), FORMATS[format_], context_len=48, dtype=torch.float32, **sizes
        )

    plain, capped = policy(num_slots=1), policy(num_slots=5, max_cached_tokens=80)
    updates = [
        plain.load(packed_weights(tiny_llama, format_, change=lambda _, tensor, c=c: tensor * c))
        for c in (1.0, 1.03)
    ]

    def weights(version: int) -> Any:
        return updates[version % 2]

    draft_len = FixedDraftLen(5, branching=branching)
    engine = NativeEngine(capped, HistoryProposer(), draft_len, max_round_tokens=16)
    engine.load(weights(0), version=0, digest="0")
    soak = Soak(engine, weights, llama_group, seed=3)
    soak.run(num_rounds)
    gauges, counters = engine.gauges(), engine.counters()
    assert gauges["count/preemptions"] > 5 and gauges["count/refill_tokens"] > 20
    assert counters.accepted > 3 and counters.corrections > 5
    assert any(len(sample.version_spans) > 1 for sample in soak.samples)
    reference = NativeEngine(plain, NoProposer(), FixedDraftLen(0))
    for sample in soak.samples:
        tolerance = 1e-4 if branching else 0.0
        check_alone(sample, alone(sample, reference, weights), tolerance=tolerance)
    for slot in range(5):
        capped.truncate(slot, 0)
    assert capped.cache.num_free == capped.cache.num_pages
