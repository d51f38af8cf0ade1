"""Every sample has one fate, and the fates add up."""

import json
import random
from collections import Counter

import pytest

from rollout.ledger import FINAL, STATES, Ledger
from rollout.request import RolloutSample, SpecCounters, Timings
from tests.rollout.engines import request


def sample(id_: str, num_tokens: int = 3) -> RolloutSample:
    return RolloutSample(
        request=request(id_),
        token_ids=(1,) * num_tokens,
        logprobs=(-0.5,) * num_tokens,
        logprobs_full=(-0.5,) * num_tokens,
        kept_mass=(1.0,) * num_tokens,
        version_spans=((0, num_tokens),),
        finish_reason="length",
        finish_detail="max_new_tokens",
        mode="full",
        weights_digest="d",
        counters=SpecCounters(),
        timings=Timings(),
    )


def add_up(counts: dict[str, int]) -> bool:
    ended = (*FINAL, "duplicate", "retried", "waiting")
    return counts["generated"] == sum(counts[name] for name in ended)


def nonzero(ledger: Ledger) -> dict[str, int]:
    return {name: count for name, count in ledger.counts().items() if count}


def test_a_sample_goes_from_in_flight_to_waiting_to_its_fate() -> None:
    ledger = Ledger()
    ledger.submitted(["a", "b"])
    assert nonzero(ledger) == {"in_flight": 2}
    assert ledger.delivered(sample("a"))
    assert nonzero(ledger) == {"generated": 1, "in_flight": 1, "waiting": 1}
    ledger.settle(["a"], "accepted")
    assert nonzero(ledger) == {"generated": 1, "in_flight": 1, "accepted": 1}
    assert (ledger.fate("a"), ledger.fate("b"), ledger.fate("c")) == ("accepted", "in_flight", None)


@pytest.mark.parametrize("state", ["waiting", *FINAL])
def test_a_second_delivery_is_a_duplicate_whatever_became_of_the_first(state: str) -> None:
    # case 187
    ledger = Ledger()
    ledger.submitted(["a"])
    ledger.delivered(sample("a"))
    if state != "waiting":
        ledger.settle(["a"], state)  # type: ignore[arg-type]
    assert not ledger.delivered(sample("a", num_tokens=5))
    assert nonzero(ledger) == {"generated": 2, state: 1, "duplicate": 1}
    assert ledger.generated_tokens == 3 + 5


def test_a_delivery_nobody_asked_for_is_a_duplicate() -> None:
    ledger = Ledger()
    assert not ledger.delivered(sample("unknown"))
    assert ledger.fate("unknown") is None and add_up(ledger.counts())


def test_a_retried_error_is_counted_and_delivered_again() -> None:
    # case 105
    ledger = Ledger()
    ledger.submitted(["a"])
    ledger.delivered(sample("a"))
    ledger.retried("a")
    assert nonzero(ledger) == {"generated": 1, "retried": 1, "in_flight": 1}
    assert ledger.delivered(sample("a"))
    assert nonzero(ledger) == {"generated": 2, "retried": 1, "waiting": 1}


@pytest.mark.parametrize("ids", [["b", "a"], ["b", "b"]])
def test_ids_are_used_once_and_a_bad_submission_registers_nothing(ids: list[str]) -> None:
    ledger = Ledger()
    ledger.submitted(["a"])
    with pytest.raises(ValueError, match="used once"):
        ledger.submitted(ids)
    assert ledger.fate("b") is None


def test_only_a_waiting_sample_can_be_given_a_fate() -> None:
    ledger = Ledger()
    ledger.submitted(["a"])
    for id_, state in (("a", "in_flight"), ("b", "unknown")):
        with pytest.raises(ValueError, match=state):
            ledger.settle([id_], "stale")
    ledger.delivered(sample("a"))
    ledger.settle(["a"], "stale")
    with pytest.raises(ValueError, match="stale"):
        ledger.settle(["a"], "accepted")


def random_operation(ledger: Ledger, rng: random.Random, fates: dict[str, str]) -> None:
    """One legal operation, on the ledger and on a plain dict of fates beside it."""
    waiting = [id_ for id_, fate in fates.items() if fate == "waiting"]
    choice = rng.randrange(5)
    if choice == 0 or not fates:
        id_ = f"s{len(fates)}"
        ledger.submitted([id_])
        fates[id_] = "in_flight"
    elif choice in (1, 2):
        id_ = rng.choice(list(fates))
        assert ledger.delivered(sample(id_, rng.randrange(5))) == (fates[id_] == "in_flight")
        if fates[id_] == "in_flight":
            fates[id_] = "waiting"
    elif choice == 3 and waiting:
        id_ = rng.choice(waiting)
        fates[id_] = rng.choice(FINAL)
        ledger.settle([id_], fates[id_])  # type: ignore[arg-type]
    elif choice == 4 and waiting:
        id_ = rng.choice(waiting)
        ledger.retried(id_)
        fates[id_] = "in_flight"


@pytest.mark.parametrize("seed", range(20))
def test_fates_add_up_after_every_operation(seed: int) -> None:
    rng, ledger, fates = random.Random(seed), Ledger(), dict[str, str]()
    for _ in range(300):
        random_operation(ledger, rng, fates)
        counts = ledger.counts()
        assert add_up(counts) and min(counts.values()) >= 0
        beside = Counter(fates.values())
        assert {n: counts[n] for n in (*FINAL, "waiting", "in_flight")} == {
            n: beside[n] for n in (*FINAL, "waiting", "in_flight")
        }
    assert set(ledger.counts()) == {"generated", *STATES}


@pytest.mark.parametrize("seed", range(20))
def test_a_restored_ledger_adds_up_and_keeps_every_final_fate(seed: int) -> None:
    # cases 170, 175: what was in flight or waiting is submitted and delivered again
    rng, ledger, fates = random.Random(seed), Ledger(), dict[str, str]()
    for _ in range(200):
        random_operation(ledger, rng, fates)
    restored = Ledger.from_state(json.loads(json.dumps(ledger.state())))
    counts, before = restored.counts(), ledger.counts()
    assert add_up(counts) and counts["waiting"] == counts["in_flight"] == 0
    kept = (*FINAL, "duplicate", "retried")
    assert {n: counts[n] for n in kept} == {n: before[n] for n in kept}
    unfinished = [id_ for id_, fate in fates.items() if fate not in FINAL]
    restored.submitted(unfinished)
    assert all(restored.delivered(sample(id_)) for id_ in unfinished)
    assert restored.counts()["generated"] == before["generated"] + before["in_flight"]


def test_a_restored_ledger_counts_the_tokens_of_the_deliveries_it_counts() -> None:
    ledger = Ledger()
    ledger.submitted(["accepted", "retried", "waiting"])
    for id_, num_tokens in (("accepted", 3), ("retried", 5), ("waiting", 7), ("accepted", 11)):
        ledger.delivered(sample(id_, num_tokens))
    ledger.settle(["accepted"], "accepted")
    ledger.retried("retried")
    # 3 accepted + 5 retried + 11 duplicate; the 7 that wait are delivered again
    assert ledger.generated_tokens == 26
    assert Ledger.from_state(ledger.state()).generated_tokens == 19


def test_a_settled_id_stays_settled_over_a_restart() -> None:
    # cases 175, 177
    ledger = Ledger()
    ledger.submitted(["a"])
    ledger.delivered(sample("a"))
    ledger.settle(["a"], "accepted")
    restored = Ledger.from_state(ledger.state())
    assert not restored.delivered(sample("a"))
    with pytest.raises(ValueError, match="used once"):
        restored.submitted(["a"])
