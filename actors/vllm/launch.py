"""vLLM's engine with our plug-in, in this process, and its worker too unless there are several."""

import gc
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from vllm import EngineArgs
from vllm.config import WeightTransferConfig
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from actors.engine_spec import EngineSpec
from actors.vllm.executor import RankExecutor
from actors.vllm.layout import w8a8_folder
from actors.vllm.patches import apply_patches
from actors.vllm.support import VLLM_DRAFTERS, check_version, installed_version
from actors.vllm.weight_transfer import BACKEND, register
from rollout.checkpoint import read_config
from rollout.errors import InvalidConfig

NEEDED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core is stepped here
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the seams are those of the V1 runner
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
}
DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the process has its cores already
    "VLLM_NO_USAGE_STATS": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",  # each layer keeps those of 32 numbers of tokens anyway
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about parts that are replaced here
}
"""Set before vLLM looks at it; of the defaults what is set already stays."""
CACHE_SIZE = "VLLM_CPU_KVCACHE_SPACE"
_RUNNING: list[LLMEngine] = []
_RETIRED: list[LLMEngine] = []
"""Engines of this process: in use, and not."""
CPU_BLOCK, GPU_BLOCK = 32, 16
"""Tokens of a cache block: prompts are shared in whole blocks, and vLLM's 128 on a CPU share nothing
of a short one."""


def launch(spec: EngineSpec) -> LLMEngine:
    """Starts an engine on the folder's weights. Raises InvalidConfig for a vLLM that is not tested."""
    register()
    return start(engine_args(spec))


def start(arguments: EngineArgs) -> LLMEngine:
    """An engine whose core is stepped in this process. Raises InvalidConfig for a vLLM that is not
    tested."""
    check_version(installed_version())
    set_environment()
    apply_patches()
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    size = os.environ.pop(CACHE_SIZE, None)  # it would override the spec's
    config = arguments.create_engine_config()
    if size is not None:
        os.environ[CACHE_SIZE] = size
    core = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    _RUNNING.append(core)
    return core


def retire(core: LLMEngine) -> None:
    """Ends an engine: its workers at once where they are processes, what is in this one once no other
    runs, since that takes the process groups of all along. Its parts are taken from it, since vLLM
    hides them from the collector."""
    _RUNNING.remove(core)
    _RETIRED.append(core)
    executor = core.engine_core.engine_core.model_executor
    if isinstance(executor, RankExecutor):
        executor.shutdown()
    if _RUNNING:
        return
    while _RETIRED:
        ended = _RETIRED.pop()
        ended.engine_core.shutdown()
        for part in (ended.engine_core.engine_core, ended.engine_core, ended):
            vars(part).clear()
    gc.collect()


def set_environment() -> None:
    os.environ.update(NEEDED)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def engine_args(spec: EngineSpec) -> EngineArgs:
    """vLLM's options for a spec. Raises InvalidConfig for a context that the model has not."""
    longest = read_config(Path(spec.model_folder)).max_context_len
    if spec.context_len > longest:
        raise InvalidConfig(
            f"engine=vllm with context_len={spec.context_len}: the model has {longest} positions"
        )
    on_cpu, num_workers = spec.device == "cpu", spec.tensor_parallel
    _check_workers(spec)
    block = CPU_BLOCK if on_cpu else GPU_BLOCK
    backend = BACKEND if spec.keeps_weights else spec.weight_transfer
    return EngineArgs(
        model=str(start_folder(spec)),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=str(spec.torch_dtype).removeprefix("torch."),
        enforce_eager=on_cpu,
        max_model_len=spec.context_len,
        max_num_seqs=spec.num_slots,
        max_num_batched_tokens=max(
            spec.max_round_tokens, spec.num_slots * (1 + longest_draft(spec))
        ),
        max_logprobs=-1,
        block_size=block,
        kv_cache_memory_bytes=cache_bytes(spec, block) if on_cpu else None,
        enable_prefix_caching=True,
        async_scheduling=False,
        tensor_parallel_size=num_workers,
        distributed_executor_backend=RankExecutor if num_workers > 1 else None,
        disable_log_stats=True,
        worker_extension_cls="actors.vllm.worker.RolloutWorker",
        weight_transfer_config=WeightTransferConfig(backend=backend),
        speculative_config=speculation(spec),
    )


def _check_workers(spec: EngineSpec) -> None:
    """Raises InvalidConfig for a model that cannot be split over so many workers, or too few GPUs."""
    config, num = read_config(Path(spec.model_folder)), spec.tensor_parallel
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % num or config.intermediate_size % num or (kv_heads % num and num % kv_heads):
        raise InvalidConfig(
            f"tensor_parallel={num}: the model's {heads} heads, {kv_heads} key and value heads and "
            f"{config.intermediate_size} inner features cannot be split over so many workers"
        )
    if num > 1 and spec.device != "cpu" and torch.cuda.device_count() < num:
        raise InvalidConfig(
            f"tensor_parallel={num} with device={spec.device}: this process sees "
            f"{torch.cuda.device_count()} GPUs, and an actor's workers are on one machine; lower "
            "tensor_parallel, or run it where there are as many"
        )


def speculation(spec: EngineSpec) -> dict[str, Any] | None:
    """Who drafts: our proposers, or vLLM's own by name, which name the most probable tokens."""
    if spec.proposer == "none":
        return None
    length = {"num_speculative_tokens": longest_draft(spec)}
    if spec.proposer in VLLM_DRAFTERS:
        return length | {"method": VLLM_DRAFTERS[spec.proposer], "model": spec.draft_model}
    return length | {"method": "custom_class", "model": "actors.vllm.proposer.RowProposer"}


def longest_draft(spec: EngineSpec) -> int:
    if spec.proposer == "none":
        return 0
    return max(1, spec.max_draft_len if spec.draft_len is None else spec.draft_len)


def start_folder(spec: EngineSpec) -> Path:
    """The checkpoint that vLLM starts from. One in W8A8 is kept in the user's cache folder: its
    config decides, its weights are replaced by the first update."""
    folder = Path(spec.model_folder)
    if spec.target_format == "none":
        return folder
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
    return w8a8_folder(folder, base / "exact-rollout" / "vllm" / key)


def cache_bytes(spec: EngineSpec, block: int) -> int:
    """Of a worker's keys and values: every slot's whole context in blocks, or the cap."""
    config = read_config(Path(spec.model_folder))
    per_slot = -(-(spec.context_len + longest_draft(spec)) // block) * block
    tokens = spec.max_cached_tokens or spec.num_slots * per_slot
    blocks = -(-tokens // block) + 1  # vLLM keeps one for itself
    size = spec.torch_dtype.itemsize
    num_heads = -(-config.num_kv_heads // spec.tensor_parallel)  # those of one worker
    width = config.num_layers * num_heads * config.head_dim + _draft_width(spec)
    return 2 * width * size * blocks * block


def _draft_width(spec: EngineSpec) -> int:
    """Numbers that vLLM's own drafter keeps of a token's keys, in one worker."""
    if spec.proposer not in VLLM_DRAFTERS:
        return 0
    assert spec.draft_model is not None, "checked when the spec was made"
    described = json.loads((Path(spec.draft_model) / "config.json").read_text())
    num_heads = described["num_attention_heads"]
    head_dim = described.get("head_dim") or described["hidden_size"] // num_heads
    kv_heads = described.get("num_key_value_heads") or num_heads
    return int(described["num_hidden_layers"] * -(-kv_heads // spec.tensor_parallel) * head_dim)
