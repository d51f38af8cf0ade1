import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import recipes.report
from recipes.report import PLOTS, ladder_verdicts, write_report

Row = dict[str, Any]
INPUTS = ("config.yaml", "passport.json", "metrics.jsonl", "samples.jsonl", "summary.json")


def metrics_row(step: int) -> Row:
    names = (
        "reward/mean accepted/samples_per_hour accepted/samples_per_hour_window accepted/samples "
        "rollout/tokens_per_s spec/tokens_per_target_step spec/time/propose_share "
        "spec/draft/price spec/draft/plain_rounds_share spec/draft/kept_share "
        "spec/time/verify_share spec/time/commit_share spec/time/other_share quant/drift_kl "
        "quant/drift_abs_logp staleness/mean staleness/max mismatch/k1 mismatch/k3 mismatch/ess"
    )
    clock = {"time": float(step), "learner/step": step, "rollout/version": step}
    return clock | dict.fromkeys(names.split(), 0.25) | {"ledger/accepted": 8 * step}


def sample(index: int, **changes: Any) -> Row:
    """Six tokens in two target steps; of three verified draft tokens one was accepted."""
    counters = {
        "rounds": 2, "drafted": 4, "verified": 3, "accepted": 1,
        "reached": [2, 1], "accepted_by_position": [1, 0],
    }  # fmt: skip
    row = {"id": f"s{index}", "step": index, "token_ids": [1] * 6, "counters": counters}
    return (
        row
        | {"text": "hello", "finish_reason": "stop", "reward": 0.5, "fate": "accepted"}
        | changes
    )


def ladder_row(name: str, speed: float, spread: float = 1.0) -> Row:
    return {
        "name": name,
        "tokens_per_s": speed,
        "tokens_per_s_min": speed - spread,
        "tokens_per_s_max": speed + spread,
    }


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds a page; tests of the words around the plots go without."""
    monkeypatch.setattr(recipes.report, "PLOTS", ())


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page(write_run(tmp_path_factory.mktemp("run")))


def write_run(run_dir: Path, samples: list[Row] | None = None, **summary: Any) -> Path:
    samples = [sample(index) for index in range(1, 7)] if samples is None else samples
    rows = [metrics_row(step) for step in range(1, 7)]
    ladder = [ladder_row("plain full precision", 30), ladder_row("speculative full precision", 60)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (run_dir / "config.yaml").write_text("draft_len: 4\n")
    (run_dir / "passport.json").write_text('{"commit": "0123abc"}')
    final = {"name": "arithmetic", "ladder": ladder, "ended": "finished"} | summary
    (run_dir / "summary.json").write_text(json.dumps(final))
    return run_dir


def page(run_dir: Path) -> str:
    return write_report(run_dir).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    (found,) = re.findall(rf"<figure><h3>{re.escape(title)}</h3>.*?</figure>", text, re.DOTALL)
    return str(found)


def tile(text: str, label: str) -> str:
    (value,) = re.findall(rf"<div>{re.escape(label)}<b>(.*?)</b>", text)
    return str(value)


def test_every_plot_is_drawn_from_a_whole_run(whole_page: str) -> None:
    for plot in PLOTS:
        assert "<svg" in section(whole_page, plot.title), plot.title
    assert "no data" not in whole_page
    assert 'class="problems"' not in whole_page


def test_an_empty_folder_still_makes_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    text = page(tmp_path)
    for name in INPUTS:
        assert f"{name} is missing." in text
    for plot in PLOTS:
        assert "no data" in section(text, plot.title), plot.title


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.usefixtures("no_plots")
def test_any_one_input_may_be_missing(tmp_path: Path, name: str) -> None:
    (write_run(tmp_path) / name).unlink()
    assert f"{name} is missing." in page(tmp_path)


def test_a_cut_last_line_is_left_out_and_reported(tmp_path: Path) -> None:
    write_run(tmp_path)
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-40])
    text = page(tmp_path)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert f"{name}: lines that could not be read and were left out: 1, the last line" in text
    assert "<svg" in section(text, "Reward over steps")


@pytest.mark.usefixtures("no_plots")
def test_a_line_that_a_resumed_run_wrote_over_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path) / "metrics.jsonl"
    path.write_text('{"learner/st\n[1, 2]\n' + path.read_text())
    assert "metrics.jsonl: lines that could not be read and were left out: 2." in page(tmp_path)


@pytest.mark.usefixtures("no_plots")
def test_cut_json_documents_are_reported(tmp_path: Path) -> None:
    write_run(tmp_path)
    for name in ("summary.json", "passport.json"):
        (tmp_path / name).write_text('{"name": "arith')
    text = page(tmp_path)
    assert "summary.json is cut short" in text and "passport.json is cut short" in text


def test_whatever_the_run_wrote_is_escaped(tmp_path: Path) -> None:
    evil = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>"
    write_run(
        tmp_path,
        samples=[sample(1, text=evil, id=evil, fate=evil, finish_reason=evil)],
        name=evil,
        ended=evil,
        ladder=[ladder_row(f"plain {evil}", 1), ladder_row(f"speculative {evil}", 2)],
    )
    (tmp_path / "config.yaml").write_text(evil)
    (tmp_path / "passport.json").write_text(json.dumps({"commit": evil}))
    text = page(tmp_path)
    assert "<script" not in text and "<img" not in text
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in text


class References(HTMLParser):
    """Collects what a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe", "object", "embed", "image"):
            self.found.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data") and not (value or "").startswith("#"):
                self.found.append(f"{name}={value}")


def test_the_page_loads_nothing_from_outside(whole_page: str) -> None:
    references = References()
    references.feed(whole_page)
    assert references.found == []
    assert "http://" not in whole_page and "https://" not in whole_page
    assert not re.search(r"@import|url\((?!#)", whole_page)


def test_markers_of_one_plot_never_point_into_another(whole_page: str) -> None:
    ids = re.findall(r'\bid="([^"]*)"', whole_page)
    assert ids
    assert len(ids) == len(set(ids))


# cases 193, 199
@pytest.mark.usefixtures("no_plots")
def test_acceptance_and_tokens_per_step_are_sums_over_sums(tmp_path: Path) -> None:
    lucky = {"rounds": 1, "verified": 1, "accepted": 1, "reached": [1], "accepted_by_position": [1]}
    unlucky = {
        "rounds": 9, "verified": 9, "accepted": 0, "reached": [9], "accepted_by_position": [0],
    }  # fmt: skip
    samples = [
        sample(1, counters=lucky, token_ids=[1, 1]),
        sample(2, counters=unlucky, token_ids=[1] * 9),
    ]
    text = page(write_run(tmp_path, samples=samples))
    assert tile(text, "Acceptance rate") == "0.100"  # 1 of 10; the mean of the rates is 0.5
    assert tile(text, "Tokens per target step") == "1.10"  # 11 tokens in 10 target steps


def test_positions_show_how_often_they_were_reached(tmp_path: Path) -> None:
    samples = [sample(index, counters={"reached": [400, 123]}) for index in range(2)]
    drawn = section(page(write_run(tmp_path, samples=samples)), "Acceptance by draft position")
    assert ">800<" in drawn and ">246<" in drawn


@pytest.mark.usefixtures("no_plots")
def test_the_summary_is_believed_before_other_sources(tmp_path: Path) -> None:
    text = page(write_run(tmp_path, acceptance_rate=0.75, tokens_per_second=1234.5))
    assert tile(text, "Acceptance rate") == "0.750"
    assert tile(text, "Tokens / s") == "1,234.5"


@pytest.mark.usefixtures("no_plots")
def test_reward_thirds_are_means_over_samples_of_the_first_and_last_steps(tmp_path: Path) -> None:
    rewards = {1: [0.0, 0.0, 0.3], 2: [0.9], 3: [1.0, 0.5]}
    samples = [
        sample(step, id=f"{step}.{index}", reward=reward)
        for step, values in rewards.items()
        for index, reward in enumerate(values)
    ]
    text = page(write_run(tmp_path, samples=samples))
    assert tile(text, "Reward") == "0.100 → 0.750"


# case 208
@pytest.mark.usefixtures("no_plots")
def test_values_that_were_nan_are_pointed_out(tmp_path: Path) -> None:
    path = write_run(tmp_path) / "metrics.jsonl"
    row = metrics_row(7) | {"reward/mean": None, "sink/nan_count": 1}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    assert "Values logged as NaN or infinite, gaps in the plots: 1." in page(tmp_path)


@pytest.mark.parametrize(
    ("plain", "speculative", "spread", "words"),
    [
        (30, 60, 1, "speculation won on this machine (60.0 against 30.0"),
        (60, 30, 1, "speculation lost on this machine (30.0 against 60.0"),
        (30, 31, 1, "speculation neither won nor lost on this machine"),
        (
            30,
            60,
            math.nan,
            "won on this machine (60.0 against 30.0 tokens/s for plain decoding, 2.00",
        ),
    ],
)
def test_the_ladder_says_who_won(
    plain: float, speculative: float, spread: float, words: str
) -> None:
    ladder = [
        ladder_row("plain quantised", plain, spread),
        ladder_row("speculative quantised", speculative, spread),
    ]
    (sentence,) = ladder_verdicts(ladder)
    assert sentence.startswith("Quantised: ") and words in sentence


def test_single_measurements_have_no_spread() -> None:
    ladder = [ladder_row("plain quantised", 30, 0.0), ladder_row("speculative quantised", 60, 0.0)]
    assert "no spread recorded" in ladder_verdicts(ladder)[0]


def test_a_ladder_without_counterparts_or_speeds_claims_nothing() -> None:
    assert ladder_verdicts([ladder_row("speculative quantised", 5)]) == []
    speedless: list[Row] = [{"name": "plain x"}, {"name": "speculative x", "tokens_per_s": 5.0}]
    assert ladder_verdicts(speedless) == ["X: a speed is missing, so there is no verdict."]


def test_the_same_run_gives_the_same_plots(tmp_path: Path, whole_page: str) -> None:
    again = page(write_run(tmp_path))
    for plot in PLOTS[:3]:
        assert section(again, plot.title) == section(whole_page, plot.title)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give the folder that a run wrote"):
        write_report(tmp_path / "absent")
