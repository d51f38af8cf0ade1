"""Weights sent to a running vLLM: in force whole or not at all, and exact afterwards."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear.scaled_mm import cpu as kernels
from vllm.model_executor.model_loader.reload import layerwise
from vllm.v1.engine.llm_engine import LLMEngine

from actors.vllm import weight_transfer
from actors.vllm.launch import retire, start
from actors.vllm.layout import FUSED, pack_for_vllm, w8a8_folder
from actors.vllm.weight_transfer import (
    BACKEND,
    check_staged,
    probe_logprobs,
    register,
    swap_weights,
    write_update,
)
from rollout.checkpoint import read_config, read_weights
from rollout.errors import InvalidWeights
from tests.tiny_model import tiny_folder

TEXTS = [[5, 17, 60, 201, 33, 8, 99, 140], [250, 3, 41, 77, 12, 290]]
Tensors = dict[str, torch.Tensor]


def build_engine(folder: Path, **settings: Any) -> LLMEngine:
    register()
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 2**24,
        "max_logprobs": -1,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": "actors.vllm.worker.RolloutWorker",  # a process has one
    }
    return start(EngineArgs(model=str(folder), **defaults | settings))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape, heads tied."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return [tiny_folder(root / f"v{seed}", seed=seed, **sizes) for seed in (0, 1)]


@pytest.fixture(scope="module")
def updates(folders: list[Path]) -> list[Tensors]:
    return [packed(folder, "none") for folder in folders]


def packed(folder: Path, format_: Any) -> Tensors:
    named = read_weights(folder).items()
    return pack_for_vllm(named, read_config(folder), format_, torch.float32)


@pytest.fixture(scope="module")
def engine(folders: list[Path]) -> Iterator[LLMEngine]:
    """Holds version 0 before and after every test."""
    engine = build_engine(folders[0])
    yield engine
    retire(engine)


@pytest.fixture(scope="module")
def int8_engine(
    folders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLMEngine]:
    engine = build_engine(w8a8_folder(folders[0], tmp_path_factory.mktemp("w8a8")))
    yield engine
    retire(engine)


def exact(folder: Path, ids: list[int]) -> torch.Tensor:
    """[T, V] log-probabilities by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def exact_on_texts(folder: Path) -> torch.Tensor:
    return torch.cat([exact(folder, ids)[:-1] for ids in TEXTS])


def swap(engine: LLMEngine, tensors: Tensors, version: str = "v") -> torch.Tensor:
    """Log-probabilities on the texts after an update."""
    swap_weights(engine, write_update(tensors), version)
    return probe_logprobs(engine, TEXTS).logprobs


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def test_a_swap_puts_exactly_the_new_weights_in_force(
    engine: LLMEngine, folders: list[Path], updates: list[Tensors]
) -> None:
    before = probe_logprobs(engine, TEXTS).logprobs
    after = swap(engine, updates[1])
    assert distance(before, exact_on_texts(folders[0])) < 1e-4
    assert distance(after, exact_on_texts(folders[1])) < 1e-4
    assert distance(before, after) > 0.5
    assert torch.equal(swap(engine, updates[0]), before)


def test_upstream_still_leaves_a_tied_head_as_it_was(
    engine: LLMEngine,
    folders: list[Path],
    updates: list[Tensors],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When this fails, vLLM packs a tied head again: remove the patch `repack_tied_head`."""
    original = layerwise.finalize_layerwise_processing.__wrapped__
    with monkeypatch.context() as patched:
        patched.setattr(layerwise, "finalize_layerwise_processing", original)
        assert distance(swap(engine, updates[1]), exact_on_texts(folders[1])) > 0.1
    assert distance(swap(engine, updates[0]), exact_on_texts(folders[0])) < 1e-4


def test_int8_weights_swap_and_swap_back_exactly(
    int8_engine: LLMEngine, folders: list[Path], tmp_path: Path
) -> None:
    before = probe_logprobs(int8_engine, TEXTS).logprobs
    after = swap(int8_engine, packed(folders[1], "int8_w8a8"))
    started_with_it = build_engine(w8a8_folder(folders[1], tmp_path))
    assert torch.equal(after, probe_logprobs(started_with_it, TEXTS).logprobs)
    retire(started_with_it)
    assert distance(before, after) > 0.5
    assert torch.equal(swap(int8_engine, packed(folders[0], "int8_w8a8")), before)


@pytest.mark.parametrize("repaired", [False, True])
def test_upstream_still_frees_the_scales_that_a_reload_packs_int8_with(
    repaired: bool,
    int8_engine: LLMEngine,
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When this fails without the repair, remove the patch `keep_int8_scales`."""
    given: list[weakref.ref[torch.Tensor]] = []
    pack = kernels.ops.create_onednn_scaled_mm

    def recorded(weight: torch.Tensor, scales: torch.Tensor, *rest: Any) -> Any:
        given.append(weakref.ref(scales))
        return pack(weight, scales, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(kernels.ops, "create_onednn_scaled_mm", recorded)
        if not repaired:
            kernel = kernels.CPUInt8ScaledMMLinearKernel
            original = kernel.process_weights_for_onednn.__wrapped__
            patched.setattr(kernel, "process_weights_for_onednn", original)
        swap_weights(int8_engine, write_update(packed(folders[0], "int8_w8a8")), "v")
    gc.collect()
    alive = [scales() is not None for scales in given]
    assert len(alive) == 2 * 4 and all(alive) == any(alive) == repaired
    swap_weights(int8_engine, write_update(packed(folders[0], "int8_w8a8")), "v")


def test_upstream_still_reads_int8_scales_where_they_lie() -> None:
    """When this fails, a packed matrix owns its scales: remove the patch `keep_int8_scales`."""
    torch.manual_seed(0)
    values = torch.randint(-127, 128, (32, 64), dtype=torch.int8)  # [in, out]
    scales = torch.full((64, 1), 0.01)
    handler = kernels.ops.create_onednn_scaled_mm(
        values.t().contiguous().t(), scales, torch.float32, True, False, 32
    )
    tokens, steps, _ = kernels.ops.onednn_scaled_int8_quant(torch.randn(3, 32), None, None, True)

    def product() -> torch.Tensor:
        out = torch.empty(3, 64)
        kernels.ops.onednn_scaled_mm(handler, tokens, out, steps, None, None, None)
        return out

    before = product()
    scales *= 2
    assert torch.equal(product(), 2 * before)


# ---- refused, and nothing has changed -----------------------------------------------------


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if part not in name}


def only(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if part in name}


def changed(
    part: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: change(t) if part in n else t for n, t in tensors.items()}


REFUSED = {
    "part of a fused module": (only("q_proj"), "qkv_proj in part, without .*k_proj.*v_proj"),
    "all but one part": (
        without("layers.1.mlp.up_proj"),
        "gate_up_proj in part, without .*up_proj",
    ),
    "nothing": (without(""), "without tensors"),
    "unknown name": (
        lambda t: t | {"model.extra": torch.ones(1)},
        "unknown tensors, first model.ex",
    ),
    "another dtype": (changed("norm", torch.Tensor.bfloat16), "got bfloat16 .*expected float32"),
    "another shape": (changed("o_proj", lambda t: t[:-1]), "got float32 .127, 128., expected"),
    "not finite": (changed("model.norm", lambda t: t / 0), "holds NaN or infinity"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_update_is_refused_by_name_and_leaves_the_old_weights_whole(
    name: str, engine: LLMEngine, updates: list[Tensors]
) -> None:
    change, said = REFUSED[name]
    before = probe_logprobs(engine, TEXTS).logprobs
    staged = write_update(change(updates[1]))
    for refusing in (check_staged, lambda e, s: swap_weights(e, s, "bad")):
        with pytest.raises(InvalidWeights, match=said):
            refusing(engine, staged)
    assert torch.equal(probe_logprobs(engine, TEXTS).logprobs, before)
    assert engine.get_weight_version() != "bad"
    assert distance(swap(engine, updates[1]), before) > 0.5  # a good one is taken afterwards
    assert torch.equal(swap(engine, updates[0]), before)


def test_an_update_that_is_gone_or_altered_on_its_way_is_refused(
    engine: LLMEngine, updates: list[Tensors], tmp_path: Path
) -> None:
    before = probe_logprobs(engine, TEXTS).logprobs
    staged = write_update(updates[1])
    check_staged(engine, staged)
    altered = bytearray(staged.path.read_bytes())
    altered[-1] ^= 1
    staged.close()
    with pytest.raises(InvalidWeights, match="no weight update"):
        swap_weights(engine, staged, "gone")
    (tmp_path / "altered").write_bytes(altered)
    with pytest.raises(InvalidWeights, match="holds digest"):
        swap_weights(engine, SimpleNamespace(path=tmp_path / "altered"), "altered")
    assert torch.equal(probe_logprobs(engine, TEXTS).logprobs, before)


def test_scales_that_are_not_positive_are_refused(
    int8_engine: LLMEngine, folders: list[Path]
) -> None:
    bad = changed("layers.0.mlp.down_proj.weight_scale", torch.zeros_like)
    with pytest.raises(InvalidWeights, match="expected scales above 0"):
        check_staged(int8_engine, write_update(bad(packed(folders[1], "int8_w8a8"))))
    with pytest.raises(InvalidWeights, match=r"in part, without .*weight_scale"):
        halves = without("layers.0.mlp.down_proj.weight_scale")
        check_staged(int8_engine, write_update(halves(packed(folders[1], "int8_w8a8"))))


def test_a_part_of_a_fused_module_would_corrupt_silently(
    folders: list[Path], updates: list[Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why it is refused: without the check nothing complains, and it is neither policy. On an engine of
    its own: the rest of the module is memory that nobody wrote, and where that is NaN its cache keeps
    it, whatever weights come next."""
    torn_engine = build_engine(folders[0])
    try:
        whole = swap(torn_engine, updates[0])
        monkeypatch.setattr(weight_transfer, "check_update", lambda *_: None)
        try:
            torn = swap(torn_engine, only("q_proj")(updates[1]))
        except InvalidWeights as error:
            assert "probe are not numbers" in str(error)
        else:
            assert distance(torn, whole) > 0.1
    finally:
        retire(torn_engine)


def test_whole_modules_may_be_sent_alone(
    engine: LLMEngine, folders: list[Path], updates: list[Tensors], tmp_path: Path
) -> None:
    sent = only("layers.1.self_attn")(updates[1])
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    model.load_state_dict(sent, strict=False)
    model.save_pretrained(tmp_path)
    assert distance(swap(engine, sent), exact_on_texts(tmp_path)) < 1e-4
    swap(engine, updates[0])


def test_the_modules_that_vllm_fuses_are_those_that_are_checked(engine: LLMEngine) -> None:
    model = engine.model_executor.driver_worker.worker.model_runner.model
    assert model.packed_modules_mapping == {whole: list(parts) for whole, parts in FUSED.items()}


# ---- rows in flight -----------------------------------------------------------------------


def generated(engine: LLMEngine, updates: list[Tensors], *, clear: bool) -> Any:
    """24 tokens at T=1, half of them before an update."""
    params = SamplingParams(max_tokens=24, logprobs=0, seed=3, ignore_eos=True, detokenize=False)
    engine.set_weight_version("first")
    engine.add_request("row", {"prompt_token_ids": TEXTS[0]}, params)
    for _ in range(12):
        engine.step()
    staged = write_update(updates[1])
    if clear:
        swap_weights(engine, staged, "second")
    else:
        where = {"update_info": {"path": str(staged.path)}}
        engine.collective_rpc("start_weight_update")
        engine.collective_rpc("update_weights", kwargs=where)
        engine.collective_rpc("finish_weight_update")
        engine.set_weight_version("second")
    while True:
        for output in engine.step():
            if output.finished:
                return output.outputs[0]


def error_by_version(output: Any, folders: list[Path]) -> list[float]:
    """Largest error of the returned log-probabilities against the version each token names."""
    errors = []
    ids = list(output.token_ids)
    returned = torch.tensor([step[token].logprob for step, token in zip(output.logprobs, ids)])
    for span, folder in zip(output.weight_versions, folders, strict=True):
        law = exact(folder, TEXTS[0] + ids)[len(TEXTS[0]) - 1 : -1]
        named = law.gather(1, torch.tensor(ids)[:, None])[:, 0]
        errors.append(distance(named[span.start : span.end], returned[span.start : span.end]))
    return errors


def test_every_token_across_an_update_has_the_law_of_the_version_it_names(
    engine: LLMEngine, folders: list[Path], updates: list[Tensors]
) -> None:
    output = generated(engine, updates, clear=True)
    assert [span.version for span in output.weight_versions] == ["first", "second"]
    assert len(output.token_ids) == 24 and max(error_by_version(output, folders)) < 1e-4
    swap(engine, updates[0])


def test_keys_and_values_of_the_old_weights_would_bend_the_law(
    engine: LLMEngine, folders: list[Path], updates: list[Tensors]
) -> None:
    """Why a swap clears every cache: without it the tokens after it have the law of neither."""
    before, after = error_by_version(generated(engine, updates, clear=False), folders)
    assert before < 1e-4 and after > 0.05
    swap(engine, updates[0])


def test_the_draft_model_is_updated_apart_from_the_target(
    folders: list[Path], updates: list[Tensors]
) -> None:
    speculation = {"method": "draft_model", "model": str(folders[0]), "num_speculative_tokens": 2}
    engine = build_engine(folders[0], speculative_config=speculation)
    runner = engine.model_executor.driver_worker.worker.model_runner
    name = "model.embed_tokens.weight"

    def embedding(model: torch.nn.Module) -> torch.Tensor:
        num_ids = len(updates[0][name])  # vLLM's table is padded
        return dict(model.named_parameters())[name][:num_ids].clone()

    engine.set_weight_version("target's")
    before = probe_logprobs(engine, TEXTS).logprobs
    swap_weights(engine, write_update(updates[1]), "draft's", draft=True)
    assert torch.equal(embedding(runner.get_draft_model()), updates[1][name])
    assert torch.equal(probe_logprobs(engine, TEXTS).logprobs, before)
    assert engine.get_weight_version() == "target's"
    swap_weights(engine, write_update(updates[1]), "both")
    assert distance(probe_logprobs(engine, TEXTS).logprobs, exact_on_texts(folders[1])) < 1e-4
    with pytest.raises(InvalidWeights, match="qkv_proj in part"):
        swap_weights(engine, write_update(only("q_proj")(updates[0])), "torn", draft=True)
    assert torch.equal(embedding(runner.get_draft_model()), updates[1][name])
    retire(engine)


# ---- many of them -------------------------------------------------------------------------


def update_files() -> list[str]:
    """Descriptors and mappings of updates that this process holds; the workers are in it."""
    open_files = [
        str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
    ]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in open_files + mapped if "/dev/shm/exact-rollout-" in line]


def test_many_updates_leave_no_memory_behind(engine: LLMEngine, updates: list[Tensors]) -> None:
    laws = [swap(engine, update) for update in updates]
    for i in range(20):
        assert torch.equal(swap(engine, updates[i % 2], f"{i}"), laws[i % 2])
    swap(engine, updates[0])
    gc.collect()
    assert update_files() == []
    staged = write_update(updates[0])
    assert len(update_files()) == 1
    staged.close()
