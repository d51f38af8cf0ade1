"""vLLM's engine with our plug-in, in this process."""

import gc
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from vllm import EngineArgs
from vllm.config import WeightTransferConfig
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from actors.engine_spec import EngineSpec
from actors.vllm.layout import w8a8_folder
from actors.vllm.patches import apply_patches
from actors.vllm.support import check_version, installed_version
from actors.vllm.weight_transfer import BACKEND, register
from rollout.checkpoint import read_config
from rollout.errors import InvalidConfig

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core is stepped here
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the seams are those of the V1 runner
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the process has its cores already
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Set before vLLM looks at it; what is set already stays, but for the first two."""
CACHE_SIZE = "VLLM_CPU_KVCACHE_SPACE"
NEEDED = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER")
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
    """Ends an engine, once no other runs: ending one takes the process groups of all along. Its parts
    are taken from it, since vLLM hides them from the collector."""
    _RUNNING.remove(core)
    _RETIRED.append(core)
    if _RUNNING:
        return
    while _RETIRED:
        ended = _RETIRED.pop()
        ended.engine_core.shutdown()
        for part in (ended.engine_core.engine_core, ended.engine_core, ended):
            vars(part).clear()
    gc.collect()


def set_environment() -> None:
    for name, value in ENVIRONMENT.items():
        if name in NEEDED:
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)


def engine_args(spec: EngineSpec) -> EngineArgs:
    """vLLM's options for a spec. Raises InvalidConfig for a context that the model has not."""
    longest = read_config(Path(spec.model_folder)).max_context_len
    if spec.context_len > longest:
        raise InvalidConfig(
            f"engine=vllm with context_len={spec.context_len}: the model has {longest} positions"
        )
    on_cpu = spec.device == "cpu"
    block = CPU_BLOCK if on_cpu else GPU_BLOCK
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
        disable_log_stats=True,
        worker_extension_cls="actors.vllm.worker.RolloutWorker",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        speculative_config=speculation(spec),
    )


def speculation(spec: EngineSpec) -> dict[str, Any] | None:
    """Who drafts: our proposers, or vLLM's own draft model by name."""
    if spec.proposer == "none":
        return None
    length = {"num_speculative_tokens": longest_draft(spec)}
    if spec.proposer == "vllm_draft_model":
        return length | {"method": "draft_model", "model": spec.draft_model}
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
    """Of keys and values: every slot's whole context in blocks, or the cap."""
    config = read_config(Path(spec.model_folder))
    per_slot = -(-(spec.context_len + longest_draft(spec)) // block) * block
    tokens = spec.max_cached_tokens or spec.num_slots * per_slot
    blocks = -(-tokens // block) + 1  # vLLM keeps one for itself
    size = spec.torch_dtype.itemsize
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * size * blocks * block
