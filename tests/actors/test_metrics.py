"""Rates are differences of sums over differences of sums."""

from dataclasses import replace

import pytest

from actors.metrics import ClusterSnapshot, metrics_row
from rollout.request import SpecCounters


def snapshot(**changes: object) -> ClusterSnapshot:
    return replace(ClusterSnapshot.zero(), **changes)  # type: ignore[arg-type]


def test_generated_and_accepted_are_two_rates() -> None:  # case 201
    now = snapshot(
        elapsed_s=30.0,
        counters=SpecCounters(plain=100, rounds=100),
        ledger=ClusterSnapshot.zero().ledger | {"accepted": 60, "generated": 100},
    )
    row = metrics_row(ClusterSnapshot.zero(), now)
    assert row["rollout/tokens_per_s"] == pytest.approx(100 / 30)
    assert row["accepted/samples_per_hour"] == pytest.approx(60 / (30 / 3600))


def test_an_interval_without_drafts_has_no_acceptance_rate() -> None:  # case 195
    row = metrics_row(ClusterSnapshot.zero(), snapshot(elapsed_s=1.0))
    assert "spec/acceptance_rate" not in row and "staleness/mean" not in row


def test_acceptance_is_of_the_interval_and_pooled() -> None:  # case 199
    before = snapshot(counters=SpecCounters(rounds=1, verified=1, accepted=1, reached=[1],
                                            accepted_by_position=[1]))  # fmt: skip
    now = snapshot(counters=SpecCounters(rounds=2, verified=10, accepted=1, reached=[2],
                                         accepted_by_position=[1]))  # fmt: skip
    row = metrics_row(before, now)
    assert row["spec/acceptance_rate"] == 0.0  # 0 of 9 in the interval
    assert metrics_row(ClusterSnapshot.zero(), now)["spec/acceptance_rate"] == 0.1  # 1/1 and 0/9


def test_observed_minus_expected_is_zero_when_acceptance_is_as_predicted() -> None:
    counters = SpecCounters(
        rounds=4, verified=4, accepted=3, reached=[4], accepted_by_position=[3],
        foretold_reached=4, foretold_accepted=3, expected_accepted=3.0, expected_variance=0.75,
    )  # fmt: skip
    row = metrics_row(ClusterSnapshot.zero(), snapshot(counters=counters))
    assert row["spec/observed_minus_expected"] == 0.0
    assert (row["exact/acceptance_p_value"], row["exact/alarm"]) == (1.0, 0.0)
    assert row["spec/pos_0/conditional_rate"] == 0.75


def test_acceptance_far_from_what_was_foretold_raises_the_alarm() -> None:
    # 100 of 100 accepted where 50 +- 5 are expected: s = 50, V + s / 3 = 41.7, p < 2 exp(-30)
    counters = SpecCounters(
        rounds=100, verified=100, accepted=100, reached=[100], accepted_by_position=[100],
        foretold_reached=100, foretold_accepted=100, expected_accepted=50.0, expected_variance=25.0,
    )  # fmt: skip
    row = metrics_row(ClusterSnapshot.zero(), snapshot(counters=counters))
    assert row["exact/alarm"] == 1.0 and row["exact/acceptance_p_value"] < 1e-12


def test_time_shares_add_up_to_one() -> None:
    phases = {"plan": 1.0, "propose": 2.0, "score": 3.0, "verify": 1.0, "commit": 1.0}
    row = metrics_row(ClusterSnapshot.zero(), snapshot(phase_s=phases))
    shares = [v for k, v in row.items() if k.startswith("spec/time/")]
    assert sum(shares) == pytest.approx(1.0) and row["spec/time/verify_share"] == 0.5


def test_staleness_is_of_the_interval() -> None:
    row = metrics_row(snapshot(ages={0: 5}), snapshot(ages={0: 5, 1: 3, 2: 1}))
    assert row["staleness/mean"] == pytest.approx(5 / 4) and row["staleness/max"] == 2


def test_draft_lengths_are_explained_by_what_their_rounds_rested_on() -> None:
    def at(**gauges: float) -> ClusterSnapshot:
        return snapshot(gauges={f"draft/{name}": value for name, value in gauges.items()})

    before = at(rounds=10, plain=10, price=9.0, speedup=10.0, offered=40, kept=0)
    now = at(rounds=14, plain=11, price=10.0, speedup=15.0, offered=80, kept=10)
    drafting = {k: v for k, v in metrics_row(before, now).items() if "draft" in k}
    assert drafting == {
        "spec/draft/price": 0.25,
        "spec/draft/expected_speedup": 1.25,
        "spec/draft/plain_rounds_share": 0.25,
        "spec/draft/kept_share": 0.25,
    }
    # the sums fell: an actor went and took its part of them along
    assert not [name for name in metrics_row(now, before) if "draft" in name]
