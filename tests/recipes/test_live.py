import io

import pytest
from rich.console import Console

from recipes.live import LiveView

ROW = {
    "learner/step": 12,
    "reward/mean": 0.4123,
    "accepted/samples_per_hour": 12345.6,
    "rollout/tokens_per_s": 345.6,
    "spec/tokens_per_target_step": 2.314,
    "spec/acceptance_rate": 0.712,
    "staleness/mean": 0.9,
    "staleness/max": 2,
    "sync/version": 11,
    "fleet/actors": 4,
    "fleet/restarts": 1,
}


def drawn(view: LiveView, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(view.render())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def numbers(view: LiveView) -> str:
    """The row of numbers, one blank between two."""
    return " ".join(drawn(view).splitlines()[-2].split())


def test_every_number_of_a_row_is_shown_in_eighty_columns() -> None:
    view = LiveView(60, "arithmetic", enabled=False)
    view.update(ROW)
    assert numbers(view) == "12 0.412 12,346 345.6 2.31 0.712 0.90/2 11 4/1"
    assert "12/60" in drawn(view)
    assert "…" not in drawn(view)


def test_missing_metrics_show_as_an_en_dash() -> None:
    view = LiveView(60, "arithmetic", enabled=False)
    assert numbers(view) == "– – – – – – –/– – –/–"
    view.update(ROW | {"spec/acceptance_rate": None})
    assert numbers(view).split()[5] == "–"


def test_a_row_of_other_metrics_leaves_the_numbers_standing() -> None:
    view = LiveView(60, "arithmetic", enabled=False)
    view.update(ROW)
    view.update({"rollout/tokens_per_s": 7.0})
    assert numbers(view).startswith("12 0.412 12,346 7.0 ")


# case 208
def test_nan_is_shown_and_not_hidden() -> None:
    view = LiveView(60, "arithmetic", enabled=False)
    view.update(ROW | {"reward/mean": float("nan"), "learner/step": float("nan")})
    assert numbers(view).startswith("nan nan ")


def test_the_phase_is_the_last_one_said() -> None:
    view = LiveView(60, "arithmetic", enabled=False)
    assert "phase: starting" in drawn(view)
    view.phase("waiting for rollouts [2/4]")
    assert "phase: waiting for rollouts [2/4]" in drawn(view)


def test_nothing_is_printed_when_disabled(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(60, "arithmetic", enabled=False) as view:
        view.phase("training")
        view.update(ROW)
    assert capsys.readouterr() == ("", "")


def test_nothing_is_printed_when_stderr_is_not_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LiveView(60, "arithmetic") as view:
        view.update(ROW)
    assert capsys.readouterr() == ("", "")


def test_an_enabled_view_draws_on_stderr_only(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(60, "[bold]title", enabled=True) as view:
        view.update(ROW)
    out, err = capsys.readouterr()
    assert out == ""
    assert "[bold]title" in err  # names are text, not markup
    assert "12,346" in err


def test_an_error_in_the_run_passes_through_the_view() -> None:
    with pytest.raises(KeyError), LiveView(60, "arithmetic", enabled=True):
        raise KeyError("the run's own")


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="steps=0"):
        LiveView(0, "arithmetic")
