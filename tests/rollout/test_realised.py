"""What the clock says of drafting, against any belief."""

import math
import random
from dataclasses import replace

from rollout.draft import Draft
from rollout.draft_len import AdaptiveDraftLen
from rollout.realised import PLAIN_EVERY, REST, TOGETHER, TRIED, Realised, _Rounds
from rollout.round_cost import RoundCost, Trial
from rollout.row import Row
from tests.rollout.simulated_rounds import Machine, Tokens, plain_tokens_per_s, rows, tokens_per_s

STEP_S = 0.01


def decoded(live: list[Row], *, kept: int, accepted: int, seconds: float = STEP_S) -> RoundCost:
    """A round whose first row had a draft."""
    trials = [Trial(row, 0, Draft(), 0, 0, 1) for row in live]
    trials[0] = replace(
        trials[0], asked_len=kept, draft=Draft.of_points([1] * kept), kept_len=kept,
        accepted_len=accepted,
    )  # fmt: skip
    return RoundCost(seconds, 0.0, len(live) + kept, True, tuple(trials))


def see(realised: Realised, round_: RoundCost) -> None:
    """A round whose tokens count the same."""
    realised.observe(round_, STEP_S, round_.num_kept, round_.num_accepted)


def test_a_plain_step_is_timed_among_rounds_that_draft() -> None:
    realised, live = Realised(), rows(4)
    for wait in (TRIED, PLAIN_EVERY, PLAIN_EVERY):
        for _ in range(wait):
            assert realised.objection(4) is None
            see(realised, decoded(live, kept=2, accepted=2))
        assert realised.objection(4) == "to time a plain step"
        see(realised, decoded(live, kept=0, accepted=0))
    assert realised.objection(4) is None


def test_drafting_that_loses_rests_longer_each_time_and_for_that_many_rows_only() -> None:
    realised, live = Realised(), rows(4)
    see(realised, decoded(live, kept=0, accepted=0))
    for rest in (REST, 2 * REST, 4 * REST):
        for _ in range(TOGETHER):
            assert realised.objection(4) is None
            see(realised, decoded(live, kept=4, accepted=2, seconds=1.8 * STEP_S))
        for _ in range(rest):
            assert realised.objection(4) == "drafting has lost by the clock"
            see(realised, decoded(live, kept=0, accepted=0))
        assert realised.objection(3) is None
    assert realised.objection(4) is None


def test_a_loss_that_may_be_chance_is_borne_until_it_is_certain() -> None:
    realised, live = Realised(), rows(4)
    num = 0
    while realised.objection(4) != "drafting has lost by the clock":
        if realised.objection(4) is None:
            see(realised, decoded(live, kept=4, accepted=0, seconds=1.07 * STEP_S))
        else:
            see(realised, decoded(live, kept=0, accepted=0))
        num += 1
        assert num < 8 * PLAIN_EVERY
    assert num > 2 * TRIED  # one comparison was not enough


def test_luck_does_not_end_drafting_that_gains() -> None:
    """A tenth more tokens at the same seconds, which scatter by 6%, on a machine that is now fast and
    now slow."""
    rng, rested = random.Random(0), 0
    for _ in range(20):
        realised, live = Realised(), rows(2)
        for at in range(2000):
            speed = 1.3 if at // 200 % 2 else 1.0
            objection = realised.objection(2)
            rested += objection == "drafting has lost by the clock"
            hits = 0 if objection else int(rng.random() < 0.2)
            took = STEP_S * speed * math.exp(rng.gauss(0.0, 0.06))
            see(realised, decoded(live, kept=0 if objection else 2, accepted=hits, seconds=took))
    assert rested < 0.02 * 20 * 2000


def test_drafting_that_gains_goes_on() -> None:
    realised, live = Realised(), rows(4)
    for _ in range(10):
        see(realised, decoded(live, kept=0, accepted=0))
        for _ in range(PLAIN_EVERY - 1):
            see(realised, decoded(live, kept=4, accepted=3, seconds=1.5 * STEP_S))
            assert realised.objection(4) is None


def test_what_drafting_took_counts_too() -> None:
    realised, live = Realised(), rows(4)
    see(realised, decoded(live, kept=0, accepted=0))
    dear = replace(decoded(live, kept=4, accepted=2), propose_seconds=STEP_S)  # twice for 1.5 times
    for _ in range(TOGETHER):
        assert realised.objection(4) is None
        see(realised, dear)
    assert realised.objection(4) == "drafting has lost by the clock"


def test_tokens_that_nobody_waits_for_are_no_gain() -> None:
    realised, live = Realised(), rows(4)
    see(realised, decoded(live, kept=0, accepted=0))
    for _ in range(TOGETHER):
        assert realised.objection(4) is None
        realised.observe(
            decoded(live, kept=4, accepted=4, seconds=1.5 * STEP_S), STEP_S, 4, gained=0.4
        )
    assert realised.objection(4) == "drafting has lost by the clock"


def test_drafting_that_gained_rests_no_longer_than_the_first_time() -> None:
    realised, live = Realised(), rows(4)

    def lose() -> int:
        """Rounds of rest behind it."""
        rest = 0
        for _ in range(8 * PLAIN_EVERY):
            if objection := realised.objection(4):
                rest += objection == "drafting has lost by the clock"
                see(realised, decoded(live, kept=0, accepted=0))
            elif rest:
                break
            else:
                see(realised, decoded(live, kept=4, accepted=0, seconds=2 * STEP_S))
        return rest

    see(realised, decoded(live, kept=0, accepted=0))
    assert (lose(), lose()) == (REST, 2 * REST)
    for _ in range(TRIED):
        see(realised, decoded(live, kept=4, accepted=4))
    see(realised, decoded(live, kept=0, accepted=0))
    assert lose() == REST


def test_a_rest_is_as_long_in_rounds_however_often_it_is_asked_about() -> None:
    for rounds in (1, 4):
        realised = Realised()
        realised._by_size[(4).bit_length()] = found = _Rounds()
        found.rest = REST
        asked = 0
        while realised.objection(4, rounds):
            asked += 1
        assert asked == REST // rounds


def test_rounds_of_about_as_many_rows_are_judged_together() -> None:
    """As a batch drains: rows end, and a plain round takes less and less."""
    realised = Realised()
    for num in range(15, 7, -1):
        live, plain_s = rows(num), STEP_S * num
        for kept in (0, 4):
            assert realised.objection(num) is None
            took = plain_s * (1.0 if not kept else 1.3)
            realised.observe(decoded(live, kept=kept, accepted=0, seconds=took), plain_s, kept, 0.0)
    assert [bool(realised.objection(num)) for num in (7, 8, 15, 16)] == [False, True, True, False]


def test_rounds_of_fewer_rows_are_not_taken_for_faster_or_slower_ones() -> None:
    """Plain ones of 15 rows beside drafting ones of 8, which take what a plain one of 8 would and gain,
    or half as long again and gain nothing."""
    for slower, gained, lost in ((1.0, 2.0, False), (1.5, 0.0, True)):
        realised = Realised()
        many, few = rows(15), rows(8)
        realised.observe(
            decoded(many, kept=0, accepted=0, seconds=15 * STEP_S), 15 * STEP_S, 0, 0.0
        )
        for _ in range(TOGETHER):
            round_ = decoded(few, kept=4, accepted=0, seconds=slower * 8 * STEP_S)
            realised.observe(round_, 8 * STEP_S, 4, gained)
        assert bool(realised.objection(8)) == lost


def test_drafting_that_may_or_may_not_gain_is_compared_more_often() -> None:
    waits = []
    for accepted in (0, 4):  # of 4 rows, at the seconds of a plain round
        realised, live = Realised(), rows(4)
        see(realised, decoded(live, kept=0, accepted=0))
        waits.append(0)
        while realised.objection(4) is None:
            see(realised, decoded(live, kept=4, accepted=accepted))
            waits[-1] += 1
    assert waits == [TRIED, PLAIN_EVERY]


def test_a_probe_is_not_held_against_drafting() -> None:
    chooser, live = AdaptiveDraftLen(4), rows(4)
    chooser._realised.observe(decoded(live, kept=0, accepted=0), STEP_S, 0, 0.0)
    chooser._probed = live[0].serial
    chooser._asked = {live[0].serial}
    for _ in range(4 * PLAIN_EVERY):
        losing = decoded(live, kept=2, accepted=0, seconds=2 * STEP_S)
        chooser.observe(replace(losing, propose_seconds=1e-5))
    assert chooser._realised.objection(4) is None


def test_a_machine_that_stood_still_is_not_held_against_drafting() -> None:
    realised, live = Realised(), rows(4)
    see(realised, decoded(live, kept=0, accepted=0))
    for round_ in range(PLAIN_EVERY - 1):
        stalled = 100.0 if round_ == 40 else 1.0
        see(realised, decoded(live, kept=4, accepted=3, seconds=stalled * 1.4 * STEP_S))
        assert realised.objection(4) is None
    see(realised, decoded(live, kept=0, accepted=0))  # which all of it is compared with
    assert realised.objection(4) is None


def test_a_belief_that_nothing_puts_right_ends_by_the_clock() -> None:
    """Every token is taken for worth its price, whatever rounds take and emit."""
    on, offered = Machine(lambda tokens: 0.004 + 0.002 * max(0.0, tokens - 4)), Tokens([0.6])

    class Stubborn(AdaptiveDraftLen):
        def _price_round(self, num_rows: int, kept: int, rounds: int) -> None:
            super()._price_round(num_rows, kept, rounds)
            self._cut, self._cuts = 0.0, []

        def _offers(self, num_rows: int, rounds: int) -> list[int]:
            return [self.max_len] * num_rows

    def versus_plain(chooser: AdaptiveDraftLen) -> float:
        rate = tokens_per_s(chooser, on, offered, 4, num_rounds=1500, settling=500)
        return rate / plain_tokens_per_s(on, 4)

    deaf = Stubborn(8)
    deaf._realised.objection = lambda *_: None  # type: ignore[method-assign]
    assert versus_plain(deaf) < 0.5
    assert versus_plain(Stubborn(8)) > 0.9
