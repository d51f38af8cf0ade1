"""What is repaired in vLLM itself: one list, each entry until upstream has done the same.

Everything else goes through vLLM's plug-in points. Every entry has a test that fails on a vLLM that no
longer needs it (tests/vllm).
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any


@dataclass(frozen=True, slots=True)
class Patch:
    """One repair."""

    name: str
    versions: str
    """The vLLM versions that it was written for and tested on, by their first digits."""
    upstream: str
    remove_when: str
    apply: Callable[[], None]


def repack_tied_head() -> None:
    """On a CPU a head is multiplied from a packed copy. Where it is tied to the embedding, a reload
    writes the embedding and leaves the copy: logits of the old head over the new body."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import layerwise

    original = layerwise.finalize_layerwise_processing

    @wraps(original)
    def finalize(model: Any, model_config: Any) -> None:
        original(model, model_config)
        for module in model.modules():
            is_packed = isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear")
            if is_packed and module.weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    layerwise.finalize_layerwise_processing = finalize


def keep_int8_scales() -> None:
    """The packed INT8 matrix of a CPU points at the scales it was made with. A reload makes it with
    temporary ones and frees them: logits of whatever stands there later."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

    original = CPUInt8ScaledMMLinearKernel.process_weights_for_onednn

    @wraps(original)
    def process(self: Any, layer: Any) -> None:
        original(self, layer)
        self.kept = [getattr(layer, name, None) for name in self.layer_param_names]

    CPUInt8ScaledMMLinearKernel.process_weights_for_onednn = process


def hide_llvmlite() -> None:
    """Every engine's start looks through all loaded modules for kernels, and stumbles over llvmlite,
    which vLLM's own n-gram proposer loads: no second engine starts in its process."""
    from vllm.triton_utils import dispatcher

    original = dispatcher._rebind_kernels

    @wraps(original)
    def rebind(overrides: Any) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]
        hidden = {name: sys.modules.pop(name) for name in names}
        try:
            original(overrides)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = rebind


RELOAD = "https://github.com/vllm-project/vllm/issues/48312"
PATCHES = (
    Patch(
        "repack_tied_head",
        "0.32.",
        RELOAD,
        "a reload packs a CPU head that is tied to the embedding again",
        repack_tied_head,
    ),
    Patch(
        "keep_int8_scales",
        "0.32.",
        RELOAD,
        "the handler of a packed INT8 matrix owns its scales, or a reload keeps them",
        keep_int8_scales,
    ),
    Patch(
        "hide_llvmlite",
        "0.32.",
        "none known",
        "the search reads a value's __dict__ only where that is a dict",
        hide_llvmlite,
    ),
)


@cache
def apply_patches() -> tuple[str, ...]:
    """Applies what this vLLM's version needs, once in a process; the names."""
    from vllm import __version__

    needed = [patch for patch in PATCHES if __version__.startswith(patch.versions)]
    for patch in needed:
        patch.apply()
    return tuple(patch.name for patch in needed)
