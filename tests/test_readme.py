"""What the README says is true: its paths exist, its words and defaults are the code's, its snippet
runs."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.cluster import Prompt
from actors.metrics import ClusterSnapshot, metrics_row
from recipes.cli import _parser
from recipes.config import documented_options
from recipes.mtp_training import MtpStats
from rollout.checkpoint import read_weights
from rollout.request import SpecCounters

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_path_it_links_or_names_exists() -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", README)
    paths = r"(?<![\w/])(scripts/\w+(?:\.py)?|\w+/[\w/]+\.(?:py|yaml)|tests/[\w./]+)"
    named = re.findall(paths, README)
    assert linked and named
    assert [path for path in {*linked, *named} if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", ["engine", "mode", "quant", "proposer"])
def test_words_and_defaults_are_those_of_the_options(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \| (.+) \| `(\w+)` \|$", README, flags=re.M)
    options = {n: (default, choices) for n, default, _, choices in documented_options()}
    default, choices = options[name]
    assert (row[1], tuple(re.findall(r"`(\w+)`", row[0]))) == (default, choices)


def test_every_command_it_shows_is_one_of_the_command_line() -> None:
    shown = set(re.findall(r"`rollout ([\w-]+)", README))
    (commands,) = (a.choices for a in _parser()._actions if isinstance(a.choices, dict))
    assert shown == set(commands)


def test_every_metric_it_explains_is_logged() -> None:
    counters = SpecCounters(
        rounds=2, drafted=2, verified=2, accepted=1, corrections=1, reached=[2],
        accepted_by_position=[1], foretold_reached=2, foretold_accepted=1, expected_accepted=1.0,
        expected_variance=0.5, pit_counts=[20] * 16,
    )  # fmt: skip
    now = ClusterSnapshot(
        **{
            **{f: getattr(ClusterSnapshot.zero(), f) for f in ClusterSnapshot.__slots__},
            "elapsed_s": 1.0, "counters": counters, "ages": {1: 1}, "phase_s": {"score": 1.0},
            "gauges": {"draft/rounds": 2.0, "draft/offered": 1.0},
            "publication": SimpleNamespace(
                drift=SimpleNamespace(kl=0.1, abs_logp=0.1, tv=0.1), weights_bytes=1, version=1,
                publish_s=1.0, swap_s=1.0, draft_version=0,
            ),
        }
    )  # fmt: skip
    logged = set(metrics_row(ClusterSnapshot.zero(), now)) | {
        f"mismatch/{name}" for name in ("k1", "k3", "chi2", "ess", "clipped_rate")
    }
    logged |= set(MtpStats(loss=1.0, acceptance=(0.5, 0.4)).metrics())
    table = README.split("| metric |")[1].split("\n\n")[0]
    explained = {name for cell in re.findall(r"^\| (`.+?) \|", table, flags=re.M)
                 for pattern in re.findall(r"`([^`]+)`", cell) for name in expand(pattern)}  # fmt: skip
    assert len(explained) > 12
    assert [n for n in explained if not any(re.fullmatch(n, name) for name in logged)] == []


def expand(pattern: str) -> Iterator[str]:
    """`a/{b,c}` -> a/b, a/c; `*` and `{i}` match anything, as regular expressions."""
    pattern = pattern.replace("{i}", "*")
    found = re.search(r"\{([^}]+)\}", pattern)
    for word in found[1].split(",") if found else [""]:
        yield (pattern.replace(found[0], word) if found else pattern).replace("*", ".+")


def test_the_trainer_snippet_runs(tiny_llama: Path) -> None:
    (code,) = re.findall(r"```python\n(.+?)```", README, flags=re.S)
    weights = read_weights(tiny_llama)
    steps: list[Any] = []
    names = {
        "policy": SimpleNamespace(named_parameters=weights.items),
        "prompts": [Prompt(f"g{i}", f"p{i}", [5, 6, 7 + i]) for i in range(16)],
        "num_steps": 2,
        "loss": lambda policy, groups: groups,
        "optimiser_step": steps.append,
    }
    try:
        exec(code.replace("path/to/model", str(tiny_llama)), names)
    finally:
        ray.shutdown()
    assert [[len(g.samples) for g in groups] for groups in steps] == [[8] * 8, [8] * 8]
