"""Weights as vLLM reads them: full precision as it is, INT8 as `compressed-tensors` "int-quantized".

In `int8_w8a8` every block matrix X is `X.weight` int8 and `X.weight_scale` float32 [out, 1], quantised
once, from the learner's own precision, by quant/int8.py; activations are quantised per token at run
time. Embedding and head keep the compute dtype: vLLM has no INT8 for them, the native engine has.

vLLM fuses matrices that read the same input into one module, which is loaded from all of its parts
or holds memory that nobody wrote. An update is therefore made of whole modules.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quant.formats import FormatName
from quant.int8 import quantise_weight
from rollout.checkpoint import read_config, read_weights
from rollout.decoder import DecoderConfig
from rollout.errors import InvalidConfig, InvalidWeights
from rollout.packing import SCALE, complete

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules of vLLM's decoders that stand for several of a checkpoint."""
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
"""Of a checkpoint's config.json that is stored in `int8_w8a8`."""


def layout(
    config: DecoderConfig, format_: FormatName, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a full update. Raises InvalidConfig for a format that vLLM
    is not given here."""
    if format_ not in ("none", "int8_w8a8"):
        raise InvalidConfig(
            f"engine=vllm with quant={format_}: set quant=int8_w8a8, or mode=full quant=none"
        )
    matrices, tensors = config.matrix_shapes(), {}
    for name, shape in (matrices | config.other_shapes()).items():
        if name in matrices and format_ == "int8_w8a8":
            tensors[name] = torch.int8, shape
            tensors[name + SCALE] = torch.float32, (shape[0], 1)
        else:
            tensors[name] = dtype, shape
    return tensors


def pack_for_vllm(
    named: Iterable[tuple[str, torch.Tensor]],
    config: DecoderConfig,
    format_: FormatName,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Packs a full set of named weights. Raises InvalidWeights for missing, unknown, misshapen or
    non-finite tensors; a tied head that is sent as well counts as the embedding's alias."""
    matrices, packed = config.matrix_shapes(), {}
    for name, tensor in complete(named, config).items():
        if name in matrices and format_ == "int8_w8a8":
            try:
                weight = quantise_weight(tensor, torch.float32)
            except ValueError as error:
                raise InvalidWeights(f"{name}: {error}") from error
            packed[name] = weight.values
            packed[name + SCALE] = weight.scales[:, None].contiguous()
        else:
            packed[name] = tensor.to(dtype).contiguous()
    check_update(packed, layout(config, format_, dtype))
    return packed


DRAFT = "draft."
"""Before the names of a draft model's tensors that travel with an update."""


def pack_draft(
    named: Iterable[tuple[str, torch.Tensor]], folder: Path, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The full set of weights of vLLM's draft model, to travel with an update. Raises InvalidWeights
    as `pack_for_vllm` does."""
    packed = pack_for_vllm(named, read_config(folder), "none", dtype)
    return {DRAFT + name: tensor for name, tensor in packed.items()}


def split_update(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The policy's tensors of an update, and the draft model's by their own names."""
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(DRAFT)}
    draft = {name[len(DRAFT) :]: tensors[name] for name in tensors if name not in own}
    return own, draft


def check_update(
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    """Everything that can be wrong with an update, full or of some modules. Raises InvalidWeights for
    an empty one, an unknown name, another dtype or shape, a module in part, a scale that is not
    above 0, NaN and infinity. Tensors on the meta device have no values to be wrong."""
    if not tensors:
        raise InvalidWeights("an update without tensors; expected the full set or whole modules")
    if unknown := sorted(set(tensors) - set(expected)):
        raise InvalidWeights(f"{len(unknown)} unknown tensors, first {unknown[0]}")
    whole = _modules(expected)
    for module, names in _modules(tensors).items():
        if missing := sorted(whole[module] - names):
            raise InvalidWeights(
                f"{module} in part, without {', '.join(missing)}: vLLM would leave the rest of it "
                "uninitialised; send all of its tensors in one update"
            )
    for name, tensor in tensors.items():
        if (got := (tensor.dtype, tuple(tensor.shape))) != expected[name]:
            raise InvalidWeights(f"{name}: got {_said(got)}, expected {_said(expected[name])}")
        if tensor.is_meta:
            continue
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InvalidWeights(f"{name}: holds NaN or infinity")
        if name.endswith(SCALE) and not bool((tensor > 0).all()):
            raise InvalidWeights(f"{name}: expected scales above 0")


def module_of(name: str) -> str:
    """vLLM's module that a checkpoint's tensor is loaded into."""
    path, leaf = name.rpartition(".")[0].rpartition(".")[::2]
    fused = next((whole for whole, parts in FUSED.items() if leaf in parts), leaf)
    return f"{path}.{fused}" if path else fused


def _modules(names: Iterable[str]) -> dict[str, set[str]]:
    modules: dict[str, set[str]] = {}
    for name in names:
        modules.setdefault(module_of(name), set()).add(name)
    return modules


def _said(tensor: tuple[torch.dtype, tuple[int, ...]]) -> str:
    return f"{str(tensor[0]).removeprefix('torch.')} {list(tensor[1])}"


def write_w8a8(folder: Path, target: Path) -> None:
    """Quantises the model of `folder` into the empty folder `target`, a checkpoint for vLLM and
    other readers of `compressed-tensors`; what is not quantised keeps the embedding's dtype."""
    config, weights = read_config(folder), read_weights(folder)
    dtype = weights["model.embed_tokens.weight"].dtype
    packed = pack_for_vllm(weights.items(), config, "int8_w8a8", dtype)
    save_file(packed, target / "model.safetensors", metadata={"format": "pt"})
    for file in folder.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.name != "config.json":
            shutil.copy(file, target)
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = QUANTIZATION
    (target / "config.json").write_text(json.dumps(described, indent=2))


def w8a8_folder(folder: Path, cache: Path) -> Path:
    """The quantised twin of a model folder, kept in `cache` under its name, written at first use."""
    target = cache / f"{folder.name}-w8a8"
    if not (target / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=cache))
        write_w8a8(folder, partial)
        try:
            partial.rename(target)
        except OSError:  # another process was faster; its copy is as good
            shutil.rmtree(partial)
    return target
