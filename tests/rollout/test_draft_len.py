"""Draft lengths that pay, on machines made of formulas and in engines.

"Plain" below is decoding without drafts and "best fixed" the best constant length of the same machine
and proposer, 0 included; both know what the policy under test has to find out first.
"""

import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from proposers.history import HistoryProposer
from proposers.none import NoProposer
from rollout.asking import Asking, Probes
from rollout.draft import POINT_MASS, Draft, SparseLaw
from rollout.draft_len import (
    FIRST_REACH,
    LULL,
    MOST_CALM,
    REACH,
    REPRICE,
    RETIME,
    AdaptiveDraftLen,
    DraftLen,
    FixedDraftLen,
    convex_steps,
)
from rollout.draft_price import DraftPrice
from rollout.native_engine import NativeEngine
from rollout.proposer import Proposer
from rollout.realised import TIMING, Realised
from rollout.round_cost import RoundCost, Trial
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.stragglers import LUCK, Stragglers
from rollout.table_policy import TablePolicy, random_table
from tests.rollout.engines import request, run
from tests.rollout.proposers_under_test import Watched
from tests.rollout.simulated_rounds import (
    Machine,
    Tokens,
    best_fixed,
    plain_tokens_per_s,
    rows,
    steps_speedup,
    tokens_per_s,
)

CPU = Machine(lambda tokens: 0.008 + 0.0016 * tokens)
"""Milliseconds as measured with SmolLM2 on two cores."""
GPU = Machine(lambda tokens: 0.010 + 0.0001 * max(0.0, tokens - 64))
"""Bandwidth-bound up to 64 tokens."""
MACHINES = {"cpu": CPU, "gpu": GPU}
BATCHES = (1, 4, 32)
OFFERS = {
    "high": Tokens([0.95]),
    "middling": Tokens([0.6]),
    "low": Tokens([0.2]),
    "adversarial": Tokens([0.0]),
    "adversarial and boastful": Tokens([0.0], lambda chance: 0.98),
    "good and modest": Tokens([0.95], lambda chance: 0.3),
    "mixed and told apart": Tokens([0.1, 0.98], lambda chance: chance),
}


# ---- what it earns ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("machine", MACHINES)
def test_cheap_drafts_never_lose(machine: str, offer: str, seed: int) -> None:
    on, offered = MACHINES[machine], OFFERS[offer]
    for num_rows in BATCHES:
        rate = statistics.mean(  # of one row much is luck
            tokens_per_s(
                AdaptiveDraftLen(8), on, offered, num_rows, num_rounds=150, settling=100, seed=one
            )
            for one in range(4 * seed, 4 * seed + max(1, 4 // num_rows))
        )
        assert rate >= 0.98 * plain_tokens_per_s(on, num_rows), num_rows
        assert rate >= 0.92 * best_fixed(on, offered, num_rows, 8), num_rows


def test_drafts_of_a_few_rows_in_turn_pay_the_price_of_few_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Timings may make the whole batch's drafts seem cheap; those of one row cost what a first token
    adds, here more than half an emitted one."""
    chooser, live = settled(Tokens([0.3], lambda chance: chance), num_rows=16), rows(16)

    def kept() -> int:
        """Of drafts that are accepted 3 times in 10, in a round in which they seem to pay."""
        lengths = chooser.choose(live)
        chooser._cut = min(chooser._cut, 0.1)
        drafts = [Draft((1,) * n, (POINT_MASS,) * n, chances=(0.3,) * n) for n in lengths]
        return sum(map(len, chooser.keep(live, drafts)))

    monkeypatch.setattr(Asking, "pays", True)
    assert kept() > 0
    monkeypatch.setattr(Asking, "pays", False)
    monkeypatch.setattr(chooser._asking, "turns", lambda num_rows, rounds: [0])
    monkeypatch.setattr(DraftPrice, "price", lambda *_: (0.1, 1.0))
    chooser._priced = 0, 0
    lengths = chooser.choose(live)
    assert sum(map(bool, lengths)) == 1 and chooser._first_cut > 0.5
    drafts = [Draft((1,) * n, (POINT_MASS,) * n, chances=(0.3,) * n) for n in lengths]
    assert not any(chooser.keep(live, drafts))


@pytest.mark.parametrize("seed", range(4))
def test_rare_hits_that_pay_are_not_given_up_for_a_run_of_bad_luck(seed: int) -> None:
    """One token in five is accepted, scoring a few is free, and asking costs 2% of a step."""
    knee = Machine(lambda tokens: 0.0043 + 0.0007 * max(0.0, tokens - 4), ask_s=1e-4, noise=0.05)
    offered = OFFERS["low"]
    rate = tokens_per_s(
        AdaptiveDraftLen(8), knee, offered, 1, num_rounds=500, settling=100, seed=seed
    )
    assert rate >= 0.95 * best_fixed(knee, offered, 1, 8)


@pytest.mark.parametrize("offer", ["high", "low", "adversarial and boastful"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_draft_model_never_loses(machine: str, offer: str) -> None:
    """Each drafted token costs three tenths of a step."""
    on = replace(MACHINES[machine], draft_step_s=0.3 * MACHINES[machine].step(1))
    for num_rows in BATCHES:
        chooser = AdaptiveDraftLen(8)
        rate = tokens_per_s(chooser, on, OFFERS[offer], num_rows, num_rounds=150, settling=100)
        assert rate >= 0.98 * plain_tokens_per_s(on, num_rows), num_rows
        assert rate >= 0.95 * best_fixed(on, OFFERS[offer], num_rows, 8), num_rows


def test_a_plan_to_draft_nothing_is_told_while_it_holds() -> None:
    dear = replace(CPU, draft_step_s=0.3 * CPU.step(1))
    chooser, live = AdaptiveDraftLen(8), rows(4)
    tokens_per_s(chooser, dear, OFFERS["adversarial"], 4, num_rounds=200)
    told = []
    for _ in range(8):
        assert chooser.choose(live) == [0] * 4
        told.append(chooser.last.why)
    assert any(why.startswith("the last plan, to draft nothing, holds") for why in told)
    assert "no cost was measured yet" not in told


def test_a_plain_step_that_is_timed_ends_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round behind it drafts again, however long a price holds."""
    dear = replace(CPU, draft_step_s=0.1 * CPU.step(1))
    chooser, live, kept = AdaptiveDraftLen(8), rows(2), list[int]()
    tokens_per_s(chooser, dear, OFFERS["high"], 2, num_rounds=200)
    monkeypatch.setattr(chooser, "observe", lambda round_: None)
    monkeypatch.setattr(Realised, "objection", lambda self, *_: TIMING if not kept else None)
    for _ in range(4):
        kept.append(sum(kept_lens(chooser, live)))
    assert kept[0] == 0 and all(kept[1:])


def test_a_plan_holds_while_its_price_and_its_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes .4 ms (4 rows, drafts of up to 32 tokens), behind a forward that takes 10."""
    dear = replace(CPU, draft_step_s=0.1 * CPU.step(1))
    chooser, live = AdaptiveDraftLen(8), rows(2)
    tokens_per_s(chooser, dear, OFFERS["high"], 2, num_rounds=400)
    monkeypatch.setattr(chooser, "observe", lambda round_: None)
    monkeypatch.setattr(Realised, "objection", lambda self, *_: None)
    planned, plan = list[list[int]](), chooser._planned

    def counted(decoding: Sequence[Row]) -> list[int]:
        planned.append([row.serial for row in decoding])
        return plan(decoding)

    monkeypatch.setattr(chooser, "_planned", counted)
    chosen = [chooser.choose(live) for _ in range(4 * RETIME)]
    assert all(any(lengths) for lengths in chosen)
    assert 1 <= len(planned) <= 5
    others = rows(2)
    chooser.choose(others)
    assert planned[-1] == [row.serial for row in others]


def test_a_round_of_prompts_ends_no_plan() -> None:
    """A proposer that has nothing to say this round was not found to be useless."""
    dear = replace(CPU, draft_step_s=0.1 * CPU.step(1))
    chooser, live = AdaptiveDraftLen(8), rows(2)
    tokens_per_s(chooser, dear, OFFERS["high"], 2, num_rounds=200)
    assert any(chooser.choose(live))
    chooser.keep(live, [Draft(), Draft()])
    assert any(chooser.choose(live))


@pytest.mark.parametrize("offer", ["adversarial", "high"])
@pytest.mark.parametrize("num_rows", BATCHES)
def test_the_first_drafts_of_a_dear_proposer_are_short(num_rows: int, offer: str) -> None:
    """32 tokens a row would cost ten steps and more, before anything is known."""
    dear = replace(CPU, draft_step_s=0.3 * CPU.step(1))
    chooser, lengths = AdaptiveDraftLen(32), list[int]()
    choose = chooser.choose
    chooser.choose = lambda *args, **kwargs: noted(choose(*args, **kwargs))  # type: ignore[method-assign]

    def noted(chosen: list[int]) -> list[int]:
        lengths.append(max(chosen))
        return chosen

    tokens_per_s(chooser, dear, OFFERS[offer], num_rows, num_rounds=100)
    assert lengths[:2] == [0, FIRST_REACH]
    for length, longest in zip(lengths[2:], accumulate(lengths[1:], max)):
        assert length <= REACH * longest + 1
    if offer == "adversarial":
        assert max(lengths) <= REACH * FIRST_REACH + 1


def test_the_prompts_that_a_draft_model_runs_first_are_not_taken_for_what_its_tokens_cost() -> None:
    dear = replace(CPU, draft_step_s=0.3 * CPU.step(1), first_ask_s=0.8)
    for num_rows in (1, 4):
        rate = tokens_per_s(
            AdaptiveDraftLen(8), dear, OFFERS["high"], num_rows, num_rounds=150, settling=100
        )
        assert rate >= 0.93 * best_fixed(dear, OFFERS["high"], num_rows, 8), num_rows


@pytest.mark.parametrize("num_rows", BATCHES)
def test_finding_out_what_does_not_pay_costs_little(num_rows: int) -> None:
    """The first rounds included."""
    for offer in ("low", "adversarial and boastful"):
        rate = tokens_per_s(AdaptiveDraftLen(8), CPU, OFFERS[offer], num_rows, num_rounds=300)
        assert rate >= 0.96 * plain_tokens_per_s(CPU, num_rows), offer


def test_a_fixed_length_does_lose() -> None:
    """The negative control of the tests above."""
    rate = tokens_per_s(FixedDraftLen(4), CPU, OFFERS["low"], 32, num_rounds=50)
    assert rate < 0.5 * plain_tokens_per_s(CPU, 32)


def test_estimates_that_tell_tokens_apart_beat_every_fixed_length() -> None:
    """Half of the tokens are nearly certain: those alone are worth scoring in a batch of 8."""
    offered = OFFERS["mixed and told apart"]
    rate = tokens_per_s(AdaptiveDraftLen(8), CPU, offered, 8)
    assert rate > 1.1 * best_fixed(CPU, offered, 8, 8)


# ---- what it chooses ----------------------------------------------------------------------


def settled(offered: Tokens, machine: Machine = CPU, num_rows: int = 1) -> AdaptiveDraftLen:
    chooser = AdaptiveDraftLen(8)
    tokens_per_s(chooser, machine, offered, num_rows, num_rounds=300)
    return chooser


def kept_lens(chooser: DraftLen, live: Sequence[Row], said: float | None = None) -> list[int]:
    """What is kept of full drafts, in one round."""
    lengths = chooser.choose(live)
    drafts = [
        Draft((1,) * n, (POINT_MASS,) * n, chances=None if said is None else (said,) * n)
        for n in lengths
    ]
    return [len(draft) for draft in chooser.keep(live, drafts)]


def test_nothing_is_scored_before_a_step_was_timed() -> None:
    assert AdaptiveDraftLen(8).choose(rows(3)) == [0, 0, 0]


def test_drafts_are_hardly_longer_than_what_was_kept_of_them_lately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drawing what is cut costs as much as drawing what is scored."""
    chooser, live = settled(Tokens([0.75], lambda chance: chance)), rows(1)
    monkeypatch.setattr(Probes, "due", lambda self, rounds: False)

    def asked(said: float) -> int:
        kept_lens(chooser, live, said)
        return chooser.choose(live)[0]

    assert [asked(said=1.0) for _ in range(3)][-1] == 8
    while_wrong = [asked(said=1e-6) for _ in range(100)]
    assert while_wrong == sorted(while_wrong, reverse=True) and while_wrong[-1] == 1
    assert [asked(said=1.0) for _ in range(4)] == [3, 7, 8, 8]


def test_what_was_never_tried_is_tried() -> None:
    chooser = AdaptiveDraftLen(8)
    live = rows(1)
    chooser.observe(RoundCost(0.01, 0.0, 1, True, (Trial(live[0], 0, Draft(), 0, 0, 2),)))
    assert kept_lens(chooser, live)[0] > 0


@pytest.mark.parametrize(("num_rows", "drafts"), [(1, True), (32, False)])
def test_the_same_drafts_pay_for_stragglers_and_not_for_a_full_batch(
    num_rows: int, drafts: bool
) -> None:
    chooser = settled(Tokens([0.6]), num_rows=num_rows)
    assert any(kept_lens(chooser, rows(num_rows))) == drafts


def test_a_draft_is_cut_at_the_first_token_below_the_price() -> None:
    chooser = settled(OFFERS["mixed and told apart"], num_rows=8)
    live = rows(8)
    lengths = chooser.choose(live)
    assert lengths == [8] * 8
    said = (0.98, 0.98, 0.1, 0.98, 0.98, 0.98, 0.98, 0.98)
    drafts = [Draft((1,) * 8, (POINT_MASS,) * 8, chances=said) for _ in live]
    assert {len(draft) for draft in chooser.keep(live, drafts)} == {2}


def test_the_cut_depends_on_chances_and_never_on_tokens() -> None:
    live = rows(4)
    for tokens in ((1, 2, 3, 4), (9, 9, 9, 9)):
        chooser = settled(OFFERS["mixed and told apart"], num_rows=4)
        chooser.choose(live)
        said = (0.98, 0.9, 0.5, 0.1)
        drafts = [Draft(tokens, (POINT_MASS,) * 4, chances=said) for _ in live]
        lens = [len(draft) for draft in chooser.keep(live, drafts)]
        assert lens == lens[:1] * 4
        assert 1 <= lens[0] < 4


def test_what_was_cut_off_teaches_through_the_token_emitted_in_its_place() -> None:
    """The proposer has become good after long failure; nothing of it is scored any more."""
    chooser = settled(OFFERS["adversarial"], num_rows=8)
    live = rows(8)
    assert not any(kept_lens(chooser, live))
    for _ in range(150):
        lengths = chooser.choose(live)
        drafts = [Draft((1,) * n, (POINT_MASS,) * n) for n in lengths]
        kept = chooser.keep(live, drafts)
        trials = tuple(
            Trial(row, n, draft, len(part), len(part), next_token=1)
            for row, n, draft, part in zip(live, lengths, drafts, kept)
        )
        scored = 8 + sum(map(len, kept))
        chooser.observe(RoundCost(CPU.step(scored), 1e-4, scored, True, trials))
    assert max(max(kept_lens(chooser, live)) for _ in range(20)) > 0


def test_a_proposer_that_costs_more_than_it_earns_is_asked_for_few_rows() -> None:
    dear = replace(CPU, ask_s=CPU.step(32) / 32 * 0.015)  # 1.5% of a step, were every row asked
    chooser = AdaptiveDraftLen(8)
    tokens_per_s(chooser, dear, OFFERS["adversarial"], 32, num_rounds=200)
    live = rows(32)
    asked = sum(length > 0 for _ in range(50) for length in chooser.choose(live))
    assert 0 < asked <= 0.6 * 50 * 32


def test_drawn_drafts_that_are_all_cut_off_are_tried_again_by_probes() -> None:
    """What is drawn teaches nothing where it is not scored, and is not believed again by itself."""
    law = SparseLaw(torch.tensor([1]), torch.tensor([1.0]))
    chooser, live = AdaptiveDraftLen(4, probe_every=8), rows(8)

    def run(accepted: bool, num_rounds: int) -> list[int]:
        kept_lens = []
        for _ in range(num_rounds):
            lengths = chooser.choose(live)
            drafts = [Draft((1,) * n, (law,) * n, chances=(0.9,) * n) for n in lengths]
            kept = chooser.keep(live, drafts)
            kept_lens.append(sum(map(len, kept)))
            trials = tuple(
                Trial(row, n, draft, len(part), len(part) * accepted, 2)
                for row, n, draft, part in zip(live, lengths, drafts, kept)
            )
            scored = 8 + kept_lens[-1]
            chooser.observe(RoundCost(CPU.step(scored), 1e-4, scored, True, trials))
        return kept_lens

    refused = run(accepted=False, num_rounds=300)
    assert sum(refused[50:]) <= 2 * 250 / 8
    assert set(refused[50:]) <= {0, 1, 2} and any(refused[50:])
    assert max(run(accepted=True, num_rounds=600)[-50:]) > 8


def test_a_draft_model_that_does_not_pay_is_probed_ever_more_rarely() -> None:
    dear = replace(CPU, draft_step_s=CPU.step(1))
    chooser = AdaptiveDraftLen(8, probe_every=4)
    tokens_per_s(chooser, dear, OFFERS["adversarial"], 4, num_rounds=200)
    live, probes = rows(4), []
    for round_ in range(400):
        lengths = chooser.choose(live)
        if any(lengths):
            probes.append(round_)
            assert sorted(lengths) == [0, 0, 0, 2]
    assert 2 <= len(probes) <= 8


@pytest.mark.parametrize("max_len", [0, 1, 3])
def test_no_length_exceeds_the_maximum(max_len: int) -> None:
    class Watching(AdaptiveDraftLen):
        longest = 0

        def choose(
            self, rows: Sequence[Row], *, can_branch: bool = True, draining: bool = False
        ) -> list[int]:
            lengths = super().choose(rows, can_branch=can_branch, draining=draining)
            self.longest = max(self.longest, *lengths)
            return lengths

    for machine in (CPU, replace(CPU, draft_step_s=0.003)):
        chooser = Watching(max_len, probe_len=9)
        tokens_per_s(chooser, machine, OFFERS["high"], 2, num_rounds=100)
        assert chooser.longest == max_len


def test_no_rows_need_no_lengths() -> None:
    chooser = settled(OFFERS["high"])
    assert chooser.choose([]) == [] and chooser.keep([], []) == []
    assert chooser.choose([], draining=True) == []
    assert FixedDraftLen(3).choose([]) == []


def test_a_fixed_length_is_the_same_for_every_row_and_cuts_nothing() -> None:
    assert kept_lens(FixedDraftLen(3), rows(4), said=0.01) == [3, 3, 3, 3]


def test_rounds_with_prompts_do_not_teach_the_cost_of_decoding() -> None:
    chooser = AdaptiveDraftLen(8)
    trial = Trial(rows(1)[0], 0, Draft(), 0, 0, 2)
    chooser.observe(RoundCost(9.0, 0.0, 500, False, (trial,)))
    assert not chooser.choose(rows(1))[0]


def test_a_choice_says_what_it_rests_on() -> None:
    chooser = settled(OFFERS["high"], num_rows=4)
    kept_lens(chooser, rows(4))
    told = str(chooser.last)
    assert re.match(r"4 rows, plain step 1[345]\.", told) and "must be accepted with" in told
    sums = chooser.gauges()
    assert 0 < sums["draft/kept"] <= sums["draft/offered"]
    assert 0 < sums["draft/price"] < sums["draft/rounds"] < sums["draft/speedup"]


# ---- few rows -----------------------------------------------------------------------------


def test_a_lone_row_scores_what_its_own_round_makes_cheap() -> None:
    """The second token of a step costs 4% of it, each further one 40%: one token of chance .15 is worth
    its price, a second is not; a price by the mean of all rounds lies in between."""
    stepped = Machine(lambda tokens: 0.006 + 0.00025 * (tokens > 1) + 0.0024 * max(0, tokens - 2))
    offered = Tokens([0.15, 0.5], lambda chance: chance)

    def rate_of(chooser: DraftLen, seed: int) -> float:
        return tokens_per_s(chooser, stepped, offered, 1, num_rounds=600, settling=100, seed=seed)

    rate = statistics.mean(rate_of(AdaptiveDraftLen(8), seed) for seed in range(8))
    one = statistics.mean(rate_of(FixedDraftLen(1), seed) for seed in range(8))
    assert one > 1.1 * plain_tokens_per_s(stepped, 1), "the case is one where a token pays"
    assert rate >= 0.98 * one


@pytest.mark.parametrize("seed", range(20))
def test_no_token_is_decided_about_by_what_lies_deeper(seed: int) -> None:
    draw = random.Random(seed)
    chooser = settled(OFFERS["high"], num_rows=4)
    chooser.choose(rows(4))
    assert chooser._cuts, "so few rows are decided by count"

    def falling(start: float, num: int) -> list[float]:
        values = [start * draw.random()]
        while len(values) < num:
            values.append(values[-1] * draw.random() ** 0.3)
        return values

    values = [falling(1.0, 6) for _ in range(4)]
    for depth in range(1, 6):
        other = [[*of_row[:depth], *falling(of_row[depth - 1], 6 - depth)] for of_row in values]
        pairs = zip(chooser._worth_scoring(values), chooser._worth_scoring(other))
        assert all(min(one, depth) == min(two, depth) for one, two in pairs)


def test_convex_steps_stay_below_and_meet_at_the_ends() -> None:
    values = [0.0, 1.0, 1.5, 4.0, 4.2, 7.0]
    steps = convex_steps(values)
    assert steps == sorted(steps) and sum(steps) == pytest.approx(7.0)
    assert all(below <= value + 1e-12 for below, value in zip(accumulate(steps), values[1:]))
    assert convex_steps([1.0, 2.0, 4.0]) == [1.0, 2.0]


# ---- stragglers ---------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "least"), [(8, 1.0), (32, 0.965)])
def test_a_step_that_waits_for_its_last_row_never_loses(num_rows: int, least: float) -> None:
    """Rows of one length, of which some are offered good drafts and others bad ones. To bring the good
    ones ahead is for nothing: where all tokens count the same, .95 and .94 are reached."""
    shared = Machine(lambda tokens: 0.0146 + 0.00036 * tokens)  # vLLM, SmolLM2, two cores
    offered = [
        Tokens(spread(0.1 + 0.6 * row / num_rows), lambda chance: chance) for row in range(num_rows)
    ]
    speedups = [
        steps_speedup(AdaptiveDraftLen(8), shared, offered, 64, num_steps=6, settling=2, seed=seed)
        for seed in range(3)
    ]
    assert sum(speedups) / 3 >= least


def spread(mean: float) -> list[float]:
    """Chances of this mean, most of them near 0 or 1."""
    return [mean * mean, mean, mean + (1.0 - mean) * mean]


def test_a_draining_batch_spends_its_tokens_on_the_rows_it_waits_for() -> None:
    chooser = settled(Tokens([0.75], lambda chance: chance), num_rows=16)
    live = [*rows(15, max_new_tokens=3), *rows(1, max_new_tokens=50)]

    def kept(draining: bool) -> list[int]:
        lengths = chooser.choose(live, draining=draining)
        drafts = [Draft((1,) * n, (POINT_MASS,) * n, chances=(0.75,) * n) for n in lengths]
        return [len(draft) for draft in chooser.keep(live, drafts)]

    evenly = [kept(draining=False) for _ in range(16)]  # some rows are asked in each round
    draining = [kept(draining=True) for _ in range(16)]
    last = max(lens[-1] for lens in draining)
    assert last > max(max(lens[:-1]) for lens in draining)
    assert last > max(lens[-1] for lens in evenly)


def test_the_clock_is_told_what_accepted_tokens_count(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = settled(Tokens([0.75], lambda chance: chance), num_rows=4)
    told: list[float] = []
    monkeypatch.setattr(chooser._realised, "objection", lambda num_rows, rounds: None)
    monkeypatch.setattr(chooser._realised, "observe", lambda *args: told.append(args[-1]))
    ahead, last = rows(1, max_new_tokens=4)[0], rows(1, max_new_tokens=50)[0]
    for lucky in (ahead, last):
        lengths: list[int] = []
        while not all(lengths) or not lengths:
            lengths = chooser.choose([ahead, last], draining=True)
        drafts = [Draft((1,) * n, (POINT_MASS,) * n, chances=(0.75,) * n) for n in lengths]
        trials = tuple(
            Trial(row, n, draft, 2, 2 * (row is lucky), 1)
            for row, n, draft in zip((ahead, last), lengths, drafts)
        )
        chooser.observe(RoundCost(0.01, 1e-4, 6, True, trials))
    mean = 1.0 - LUCK * (1.0 - chooser._first_cut)  # of what a token counts; two of each row
    assert told[0] + told[1] == pytest.approx(4.0 * mean, abs=0.2)
    assert told[0] < 1.5 < 2.0 < told[1]


def test_rows_that_stop_by_themselves_are_noticed() -> None:
    chooser = AdaptiveDraftLen(8)
    row = rows(1)[0]
    row.finish("stop", "end of text")
    for _ in range(1000):
        chooser.observe(RoundCost(0.01, 0.0, 1, True, (Trial(row, 0, Draft(), 0, 0, 2),)))
    behind = [*rows(1, max_new_tokens=20), *rows(1, max_new_tokens=40)]
    worth = chooser._stragglers.worth(behind, 0.0)
    assert worth[behind[0].serial] == pytest.approx(worth[behind[1].serial])


# ---- trees --------------------------------------------------------------------------------


def tree_round(chooser: AdaptiveDraftLen, live: Sequence[Row], nodes: int, accepted: int) -> None:
    """A round of trees, whose time says nothing about costs."""
    draft = Draft.tree(range(nodes), [-1] * nodes)
    trials = tuple(Trial(row, nodes, draft, nodes, accepted, 2) for row in live)
    chooser.observe(RoundCost(1.0, 0.0, len(live) * (1 + nodes), False, trials, branched=True))


def with_trees(num_rows: int = 1) -> tuple[AdaptiveDraftLen, list[Row]]:
    """Chains of up to 4 at chance .5, trees of 8."""
    chooser = AdaptiveDraftLen(4, tree_nodes=8, tree_every=5)
    live = rows(num_rows)
    for _ in range(200):
        lengths = chooser.choose(live, can_branch=False)
        drafts = [Draft((1,) * n, (POINT_MASS,) * n, chances=(0.5,) * n) for n in lengths]
        kept = chooser.keep(live, drafts)
        trials = tuple(
            Trial(row, n, draft, len(part), min(1, len(part)), 2)
            for row, n, draft, part in zip(live, lengths, drafts, kept)
        )
        scored = num_rows + sum(map(len, kept))
        chooser.observe(RoundCost(1 + 0.1 * scored, 1e-5, scored, True, trials))
    return chooser, live


def branches(chooser: AdaptiveDraftLen, live: Sequence[Row], can_branch: bool = True) -> bool:
    """The choice of one round."""
    chooser.choose(live, can_branch=can_branch)
    return chooser.branching


def test_a_tree_is_tried_first_and_then_now_and_then() -> None:
    (chooser, live), tried = with_trees(), []
    for _ in range(13):
        tried.append(branches(chooser, live))
        if tried[-1]:
            tree_round(chooser, live, 8, accepted=0)
    assert tried == [True, *[False] * 5, True, *[False] * 5, True]


def test_trees_are_used_while_they_yield_more_than_chains() -> None:
    chooser, live = with_trees()
    for _ in range(30):
        tree_round(chooser, live, 8, accepted=4)
    assert [branches(chooser, live) for _ in range(4)] == [True] * 4
    for _ in range(60):
        tree_round(chooser, live, 8, accepted=0)
    assert sum(branches(chooser, live) for _ in range(12)) <= 2


def test_the_same_trees_do_not_pay_for_a_full_batch() -> None:
    chooser, live = with_trees(16)
    for _ in range(30):
        tree_round(chooser, live, 8, accepted=2)
    branches(chooser, live)  # the first is a trial
    assert [branches(chooser, live) for _ in range(4)] == [False] * 4


def test_no_tree_is_tried_while_chains_do_not_pay() -> None:
    chooser = AdaptiveDraftLen(4, tree_nodes=8, tree_every=2)
    tokens_per_s(chooser, CPU, OFFERS["adversarial"], 32, num_rounds=200)
    assert not any(branches(chooser, rows(32)) for _ in range(20))


def test_trees_are_scored_whole() -> None:
    chooser, live = with_trees()
    assert branches(chooser, live)
    tree = Draft.tree([1, 2, 3], [-1, -1, 0])
    assert chooser.keep(live, [tree]) == [tree]


def test_without_nodes_or_a_proposer_that_can_branch_nothing_branches() -> None:
    chooser, live = with_trees()
    assert not any(branches(chooser, live, can_branch=False) for _ in range(20))
    plain = settled(OFFERS["high"])
    assert not any(branches(plain, live) for _ in range(60))
    assert not FixedDraftLen(3).branching and FixedDraftLen(3, branching=True).branching


# ---- in an engine -------------------------------------------------------------------------

TABLE = random_table(3, depth=2, seed=1)


class Clockless(AdaptiveDraftLen):
    """Costs of 1 a round and .01 a token, whatever the machine does."""

    def observe(self, round_: RoundCost) -> None:
        seconds = 1 + 0.01 * round_.scored_tokens
        super().observe(replace(round_, seconds=seconds, propose_seconds=1e-5))


def generated(
    proposer: Proposer,
    temperature: float = 1.0,
    chooser: Callable[[], DraftLen] = lambda: Clockless(3, tree_nodes=9, tree_every=2),
) -> dict[str, tuple[int, ...]]:
    """Rows of one prompt under chains of up to 3 and trees of 9, of which one round in 3 tries one."""
    engine = NativeEngine(TablePolicy(TABLE, vocab_size=3), proposer, chooser())
    engine.load(TABLE, version=0, digest="table")
    sampling = SamplingParams(temperature=temperature, max_new_tokens=40)
    requests = [request(f"r{i}", (0, 1), sampling, prompt_id="p", sample_index=i) for i in range(6)]
    return {name: sample.token_ids for name, sample in run(engine, requests).items()}


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_an_engine_that_chooses_between_chains_and_trees_emits_the_plain_tokens(
    temperature: float,
) -> None:
    proposer = Watched(HistoryProposer())
    assert generated(proposer, temperature) == generated(NoProposer(), temperature)
    drafts = [draft for drafts in proposer.drafts for draft in drafts if len(draft)]
    assert {draft.parents is None for draft in drafts} == {True, False}
    assert max(len(draft) for draft in drafts if draft.parents is None) <= 3


def test_a_proposer_that_cannot_branch_is_never_asked_for_a_chain_as_long_as_a_tree() -> None:
    asked: list[int] = []

    class Asked(NoProposer):
        def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
            asked.extend(max_lens)
            return [Draft.of_points([1] * length) for length in max_lens]

    generated(Asked())
    assert asked and max(asked) <= 3


def test_an_engine_scores_what_was_kept_and_says_what_was_offered() -> None:
    seen: list[RoundCost] = []

    class Halves(FixedDraftLen):
        def keep(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> list[Draft]:
            return [draft.truncated(len(draft) // 2) for draft in drafts]

        def observe(self, round_: RoundCost) -> None:
            seen.append(round_)

    class Ones(NoProposer):
        def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
            return [Draft.of_points([1] * length) for length in max_lens]

    assert generated(Ones(), chooser=lambda: Halves(4)) == generated(NoProposer())
    trials = [trial for round_ in seen for trial in round_.trials]
    assert {(trial.asked_len, len(trial.draft), trial.kept_len) for trial in trials} >= {(4, 4, 2)}
    assert all(trial.kept_len == len(trial.draft) // 2 for trial in trials)
    scored = sum(round_.scored_tokens for round_ in seen if round_.plain_tokens)
    assert scored == sum(
        1 + trial.kept_len for round_ in seen if round_.plain_tokens for trial in round_.trials
    )


def test_what_drafts_take_is_everything_but_being_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing lengths, proposing, cutting, and what was learnt from the round before."""
    now, seen = [0.0], list[RoundCost]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow(FixedDraftLen):
        def choose(self, rows: Sequence[Row], **kwargs: Any) -> list[int]:
            now[0] += 1
            return super().choose(rows, **kwargs)

        def keep(self, rows: Sequence[Row], drafts: Sequence[Draft]) -> list[Draft]:
            now[0] += 10
            return super().keep(rows, drafts)

        def observe(self, round_: RoundCost) -> None:
            seen.append(round_)
            now[0] += 100

    class Proposing(NoProposer):
        def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
            now[0] += 1000
            return [Draft.of_points([1] * length) for length in max_lens]

    generated(Proposing(), chooser=lambda: Slow(4))
    took = [(round_.seconds, round_.propose_seconds) for round_ in seen]
    assert took[0] == (0.0, 1011.0)
    assert set(took[1:-1]) == {(0.0, 1111.0)}


def hopeless(num_rows: int) -> AdaptiveDraftLen:
    """It has learnt that nothing is ever accepted."""
    return settled(Tokens([0.0], lambda chance: 0.5), num_rows=num_rows)


def asks_nobody(chooser: AdaptiveDraftLen, live: Sequence[Row]) -> bool:
    """In one round, in which asking takes a tenth of a step."""
    lengths = chooser.choose(live)
    drafts = [Draft((1,) * n, (POINT_MASS,) * n, chances=(0.5,) * n) for n in lengths]
    kept = chooser.keep(live, drafts)
    trials = tuple(
        Trial(row, n, draft, len(part), 0, 2)
        for row, n, draft, part in zip(live, lengths, drafts, kept)
    )
    scored = len(live) + sum(map(len, kept))
    chooser.observe(RoundCost(0.01, 1e-3 * any(lengths), scored, True, trials))
    return not any(lengths)


def test_a_decision_to_ask_nobody_is_not_taken_anew_each_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chooser, live, taken = hopeless(8), rows(8), list[int]()
    for _ in range(1000):
        asks_nobody(chooser, live)
    calls: Counter[str] = Counter()

    def count(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            if name == "_lengths":
                taken.append(kwargs["rounds"])
            return method(*args, **kwargs)

        monkeypatch.setattr(kind, name, counted)

    for kind, name in (
        (AdaptiveDraftLen, "_lengths"), (Stragglers, "observe"), (DraftPrice, "price"),
    ):  # fmt: skip
        count(kind, name)
    before = chooser.gauges()["draft/rounds"]
    asked = sum(not asks_nobody(chooser, live) for _ in range(400))
    assert 0 < asked < 80  # probes still come
    assert 400 / LULL <= len(taken) < 400 / LULL + 3 * asked
    assert calls["observe"] == len(taken)
    assert abs(sum(taken) - 400) < LULL  # no round is lost from what counts rounds,
    assert calls["price"] >= 400 // (REPRICE << MOST_CALM)  # so prices do not grow older
    assert chooser.gauges()["draft/rounds"] == before + 400


def in_a_lull(live: Sequence[Row]) -> AdaptiveDraftLen:
    chooser = hopeless(len(live))
    for _ in range(1000):
        asks_nobody(chooser, live)
        if chooser._lull:
            return chooser
    raise AssertionError("it always asks")


def test_other_rows_end_a_lull() -> None:
    chooser = in_a_lull(rows(8))
    asks_nobody(chooser, rows(1))
    assert chooser.last.num_rows == 1 and not chooser._lulled


def test_a_plain_step_that_is_timed_is_one() -> None:
    """It is put in where drafting pays, so nothing may come of it behind a round that asked nobody."""
    live = rows(8)
    chooser = in_a_lull(live)
    chooser._lull, chooser.last.asked = 0, 0
    size = chooser._realised._by_size[(8).bit_length()]
    size.rest, size.since_plain = 0, size.wait
    assert asks_nobody(chooser, live)
    assert chooser.last.why == TIMING and not chooser._lull


@pytest.mark.parametrize("num", [1, 3])
def test_rounds_that_were_not_looked_at_count(num: int) -> None:
    """Of probes, turns and rests: one question after `num` rounds is worth as many questions."""
    often, once = Probes(6), Probes(6)
    assert [often.due() for _ in range(9)].index(True) == 6
    assert [once.due(num) for _ in range(9)].index(True) == 6 // num
    turns = [Asking(), Asking()]
    for asking in turns:
        asking._rows_a_round = 0.25
    assert sum(len(turns[0].turns(8)) for _ in range(12 * num)) == 3 * num
    assert sum(len(turns[1].turns(8, num)) for _ in range(12)) == 3 * num
