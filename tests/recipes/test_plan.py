"""`rollout plan`: ceilings and drafts by hand, bytes of real tensors, placement."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.vllm.layout import layout
from quant.formats import FORMATS
from recipes.ceilings import (
    Costs,
    best_draft_len,
    break_even_rate,
    payload,
    speedup,
    tensor_shapes,
    tokens_per_round,
    tokens_per_s,
)
from recipes.cli import main
from recipes.config import RunConfig, cluster_config, load_config
from recipes.plan import Nodes, place
from rollout.checkpoint import read_config, read_weights
from rollout.packing import pack
from tests.tiny_model import tiny_folder

RECIPES = Path(__file__).parents[2] / "recipes"
H100 = 3.35e12
"""Bytes a second of an H100 SXM."""


# ---- formulas -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([0.7] * 5, 2.94),
        ([0.9] * 7, 5.70),
        ([0.85] * 4, 3.71),
        ([0.9, 0.5], 2.35),
        ([0.7, 0.7], 2.19),  # what the mean of the line above would give
        ([], 1.0),
    ],
)
def test_tokens_of_a_round_are_the_sum_of_the_chances_to_get_there(
    rates: list[float], expected: float
) -> None:
    assert tokens_per_round(rates) == pytest.approx(expected, abs=0.005)


def test_one_rate_everywhere_is_the_geometric_sum() -> None:
    assert tokens_per_round([0.8] * 6) == pytest.approx((1 - 0.8**7) / (1 - 0.8))


def test_the_best_length_is_where_one_more_token_costs_what_it_brings() -> None:
    costs = Costs(draft=0.1)
    best = best_draft_len([0.8] * 20, costs)
    assert best.draft_len == 6
    assert best.tokens_per_round == pytest.approx(3.951424)
    assert best.speedup == pytest.approx(2.46964)
    assert speedup([0.8] * 5, costs) == pytest.approx(2.46, abs=0.005)
    assert speedup([0.8] * 9, costs) == pytest.approx(2.35, abs=0.005)
    # extend by one while a^(g+1) > c S_g
    gains = [0.8 ** (g + 1) > 0.1 * speedup([0.8] * g, costs) for g in range(10)]
    assert gains == [True] * 6 + [False] * 4


def test_a_speedup_counts_drafting_verifying_and_overhead() -> None:
    assert speedup([0.875], Costs(0.05)) == pytest.approx(1.78571, abs=1e-5)
    assert speedup([0.8] * 5, Costs(0.06)) == pytest.approx(2.83790769)
    assert tokens_per_s(16e9, H100) * speedup([0.8] * 5, Costs(0.06)) == pytest.approx(594.2, 1e-4)
    # 2 tokens: E = 1 + .5 + .25; steps 1 + 2 * (.1 + .05) + .2
    assert speedup([0.5] * 2, Costs(0.1, verify=0.05, overhead=0.2)) == pytest.approx(1.75 / 1.5)


def test_drafts_that_cost_more_than_they_bring_are_not_made() -> None:
    assert best_draft_len([0.3] * 8, Costs(0.5)).draft_len == 0
    assert best_draft_len([0.3] * 8, Costs(0.5)).speedup == 1.0
    assert break_even_rate(Costs(1.5), 8) is None


def test_break_even_is_where_the_first_length_gains_nothing() -> None:
    assert break_even_rate(Costs(0.1), 8) == pytest.approx(0.1)  # 1 + a = 1 + c
    # with overhead a longer draft pays first: the least a with E(a, g) = 1 + .1 g + .5 for some g
    costs = Costs(0.1, overhead=0.5)
    rate = break_even_rate(costs, 8)
    assert rate is not None and rate < 0.6
    best_of = max(speedup([rate] * g, costs) for g in range(1, 9))
    assert best_of == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("size", "expected"), [(16e9, 209.4), (8e9, 418.8), (4.5e9, 744.4)])
def test_bytes_and_bandwidth_bound_one_row(size: float, expected: float) -> None:
    assert tokens_per_s(size, H100) == pytest.approx(expected, abs=0.06)


def test_a_draft_is_dearer_beside_a_faster_target(capsys: pytest.CaptureFixture[str]) -> None:
    """k = 16 / 4.5, c = .05 -> .17778; one token at .875: 744.44 x 1.875 / 1.17778 = 1185.14, and
    not 1329.37 as at the old price."""
    words = ["--params", "8e9", "--bits", "16", "4.5", "--bandwidth", "3.35e12"]
    found = planned([*words, "--rates", "0.875", "--draft-cost", "0.05"], capsys)
    drafted = found["rows"][1]["drafted"]
    assert drafted["draft_cost"] == pytest.approx(0.17778, abs=1e-5)
    assert drafted["tokens_per_s"] == pytest.approx(1185.14, abs=0.01)
    assert 744.444 * speedup([0.875], Costs(0.05)) == pytest.approx(1329.37, abs=0.01)


# ---- bytes --------------------------------------------------------------------------------


def size_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["none", "int8_w8a16", "int8_w8a8"])
def test_bytes_are_those_of_a_packed_update(name: Any, tied: bool, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "qwen2", tied=tied)
    config, weights = read_config(folder), read_weights(folder)
    packed = pack(weights.items(), config, FORMATS[name], torch.bfloat16)
    found = payload(tensor_shapes(folder), config, name, torch.bfloat16)
    assert found.stored == size_of(packed)
    untied = 0 if tied else packed["model.embed_tokens.weight"].nbytes
    assert found.read == found.stored - untied


def test_bytes_for_vllm_are_those_of_its_layout(tiny_llama: Path) -> None:
    config = read_config(tiny_llama)
    tensors = layout(config, "int8_w8a8", torch.bfloat16)
    size = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in tensors.values())
    shapes = tensor_shapes(tiny_llama)
    found = payload(shapes, config, "int8_w8a8", torch.bfloat16, quantised_head=False)
    assert found.stored == size


# ---- the command --------------------------------------------------------------------------


def planned(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    """The JSON of a plan."""
    assert main(["plan", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_plan_of_given_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--params", "8e9", "--bits", "8", "--bandwidth", "3.35e12"]
    found = planned([*words, "--acceptance", ".8", "--draft-cost", ".1"], capsys)
    (row,) = found["rows"]
    assert row["stored_bytes"] == 8e9 and row["plain_tokens_per_s"] == pytest.approx(418.75)
    assert row["drafted"]["best"]["draft_len"] == 6
    assert row["drafted"]["tokens_per_s"] == pytest.approx(418.75 * 2.46964)
    assert planned(words, capsys)["rows"][0]["drafted"] is None  # nothing said, nothing claimed


def test_a_plan_of_a_recipe_counts_its_model_in_its_format(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(RECIPES / "quickstart.yaml")
    words = [recipe, f"model.path={tiny_llama}", "model.dtype=float32", "--bandwidth", "1e9"]
    found = planned(words, capsys)
    assert [row["weights"] for row in found["rows"]] == ["int8_w8a16", "float32", "int8_w8a8"]
    assert found["rows"][1]["stored_bytes"] == size_of(read_weights(tiny_llama))


def test_the_table_shows_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--params", "8e9", "--bits", "16", "4.5", "--bandwidth", "3.35e12"]
    assert main(["plan", *words, "--acceptance", ".8", "--draft-cost", ".1"]) == 0
    said = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert "16 bits 16 209.4 0.1 0.10 6 3.95 2.47 517.1" in lines
    assert "4.5 bits 4.5 744.4 0.356 0.36 3 2.95 1.43 1063.4" in lines


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--params", "8e9", "--acceptance", ".8"], "drafts need --draft-cost and"),
        (["--params", "8e9", "--draft-cost", ".1"], "drafts need --draft-cost and"),
        (["--params", "8e9", "--overhead", ".1"], "drafts need --draft-cost and"),
        (["--params", "8e9", "--nodes", "1"], "--nodes without a recipe"),
        (["--params", "8e9", "--acceptance", "80", "--draft-cost", ".1"], "rates from 0 to 1"),
        (["--params", "8e9", "--acceptance", ".8", "--draft-cost", "-1"], "costs of at least 0"),
        ([str(RECIPES / "quickstart.yaml"), "model.device=cuda"], "without --bandwidth"),
    ],
)
def test_half_a_question_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bandwidth = ["--bandwidth", "1e9"] if "--bandwidth" not in said else []
    assert said in planned([*words, *bandwidth], capsys, code=2)["error"]


def test_without_a_bandwidth_this_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(["--params", "1e9", "--bits", "8"], capsys)
    assert found["bandwidth"] > 1e8
    assert found["rows"][0]["plain_tokens_per_s"] == pytest.approx(found["bandwidth"] / 1e9)


# ---- placement ----------------------------------------------------------------------------


SPLIT = ["engine=vllm", "quant=int8_w8a8", "model.device=cuda", "actors.tensor_parallel=4"]
SENT = ["actors.weight_transfer=nccl"]


def fleet(*overrides: str) -> RunConfig:
    return load_config(RECIPES / "quickstart.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "nodes", "said"),
    [
        (["actors.num=3"], Nodes(1, 0, 2, 0), "which hold 2"),
        (["actors.num=2", "actors.cpus=3"], Nodes(2, 0, 4, 0), "without actors.address"),
        (["actors.num=2", "actors.cpus=3"], Nodes(1, 0, 4, 0), "which hold 1"),
        (["actors.num=9", "model.device=cuda"], Nodes(1, 8, 96, 80e9), "which hold 8"),
        (["model.device=cuda"], Nodes(1, 8, 96, 1e9), "16.0 GB do not fit on a GPU of 1 GB"),
        ([*SPLIT, "actors.num=3"], Nodes(1, 8, 96, 80e9), "and 4 GPUs of one node do not fit"),
        ([*SPLIT, "actors.tensor_parallel=16"], Nodes(2, 8, 96, 80e9), "which hold 0"),
        ([*SPLIT, *SENT, "actors.num=2"], Nodes(1, 8, 96, 80e9), "for the learner, do not fit"),
        (SPLIT, Nodes(1, 8, 96, 4e9), "16.0 GB do not fit on 4 GPUs of 4 GB"),
    ],
)
def test_a_fleet_that_does_not_fit_is_told_why(
    overrides: list[str], nodes: Nodes, said: str
) -> None:
    placement = place(fleet(*overrides), nodes, weights_bytes=16e9)
    assert not placement.fits and said in placement.text


def test_a_learner_that_sends_by_nccl_takes_one_gpu_of_all() -> None:
    two_of_four = [*SPLIT, "actors.num=2", "actors.address=auto"]
    assert place(fleet(*two_of_four), Nodes(1, 8, 96, 80e9), weights_bytes=16e9).fits
    assert place(fleet(*two_of_four, *SENT), Nodes(1, 9, 96, 80e9), weights_bytes=16e9).fits
    assert place(fleet(*two_of_four, *SENT), Nodes(2, 8, 96, 80e9), weights_bytes=16e9).fits


def test_a_fleet_that_does_not_fit_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(RECIPES / "quickstart.yaml"), "--params", "1e8", "--bandwidth", "1e9"]
    nodes = ["--nodes", "1", "--cpus-per-node", "2"]
    assert planned([*words, *nodes], capsys)["placement"]["fits"]
    found = planned([*words, *nodes, "actors.num=3"], capsys, code=1)
    assert not found["placement"]["fits"]


@pytest.mark.parametrize(
    ("name", "num_nodes", "gpus_left", "params", "tokens_per_s"),
    [("h100_node.yaml", 1, 4, 8e9, 418.75), ("h100_nodes.yaml", 2, 0, 70e9, 4 * 3.35e12 / 70e9)],
)
def test_the_recipes_for_gpus_are_valid_and_fit_their_model(
    name: str,
    num_nodes: int,
    gpus_left: int,
    params: float,
    tokens_per_s: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = RECIPES / name
    config = load_config(recipe)
    assert (config.engine, config.model.device, config.quant) == ("vllm", "cuda", "int8_w8a8")
    fleet = cluster_config(config, Path("policy"))  # what the engine refuses is refused here
    assert fleet.engine.engine == "vllm"
    assert fleet.num_actors * fleet.engine.num_gpus == 8 * num_nodes - gpus_left
    assert "Not run on a GPU yet" in recipe.read_text()
    words = [str(recipe), "--params", f"{params:g}", "--bits", "8", "--bandwidth", "3.35e12"]
    nodes = ["--nodes", str(num_nodes), "--cpus-per-node", "96"]
    found = planned([*words, *nodes], capsys)
    assert found["placement"]["fits"]
    assert found["rows"][0]["plain_tokens_per_s"] == pytest.approx(tokens_per_s)
