"""The verdict of an audit follows from its parts, and the page says what the JSON says."""

import json
from pathlib import Path

import pytest

from recipes.audit_enumerated import Case, examine
from recipes.audit_faults import Control
from recipes.audit_statistics import Finding
from recipes.certificate import Certificate, write_certificate

CAUGHT = Control("always accept", "Bent.", caught=True, by="enumeration", effect=0.3)
MISSED = Control("residual softmaxed", "Bent.", caught=False, by="enumeration", effect=0.0)


def finding(p_value: float) -> Finding:
    return Finding("first <token>", p_value, 100, 1.0, 0.01, "counts against the law", 0.9, 0.05)


def certificate(p_value: float = 0.5, controls: tuple[Control, ...] = (CAUGHT,)) -> Certificate:
    return Certificate(
        audited={"engine": "native"},
        enumerated=[examine(Case("none", "plain", num_tokens=2))],
        streams=[finding(p_value)],
        sampled=[],
        controls=controls,
        false_alarm_rate=1e-3,
        seconds=1.0,
    )


def test_an_audit_without_failures_whose_controls_are_caught_is_exact() -> None:
    good = certificate()
    assert (good.verdict, good.exit_code, good.failed, good.missed) == ("exact", 0, [], [])


def test_a_p_value_below_its_share_of_the_false_alarm_rate_is_a_failure() -> None:
    assert certificate(p_value=2e-3).verdict == "exact"  # one test, the whole rate of 1e-3
    bad = certificate(p_value=5e-4)
    assert (bad.verdict, bad.exit_code, bad.failed) == ("not exact", 1, ["first <token>"])


@pytest.mark.parametrize("p_value", [0.5, 1e-9])
@pytest.mark.parametrize("controls", [(CAUGHT, MISSED), ()])
def test_an_audit_with_a_missed_control_or_none_is_void(
    p_value: float, controls: tuple[Control, ...]
) -> None:
    void = certificate(p_value, controls)
    assert (void.verdict, void.exit_code) == ("void", 2)


def test_both_files_are_written_and_agree(tmp_path: Path) -> None:
    page = write_certificate(certificate(p_value=5e-4), tmp_path / "audits" / "one")
    row = json.loads((page.parent / "certificate.json").read_text())
    text = page.read_text()
    assert row["verdict"] == "not exact" and "not exact" in text
    assert row["controls"][0]["name"] in text and row["controls"][0]["caught"] is True
    assert row["enumerated"]["largest_total_variation"] <= 1e-12


def test_the_page_escapes_what_it_shows_and_fetches_nothing(tmp_path: Path) -> None:
    text = write_certificate(certificate(), tmp_path).read_text()
    assert "first &lt;token&gt;" in text and "<token>" not in text
    assert "http://" not in text and "https://" not in text and "<script" not in text
