"""A W8A8 checkpoint for peers, written once: this project's quantiser, the file format they read.

`compressed-tensors`, "int-quantized": weights int8 symmetric per output channel with float32 scales
[out, 1], activations symmetric per token at run time. Embedding and head stay in bf16: peers have no
INT8 for them.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quant.int8 import quantise_weight
from recipes.smollm2 import cache_folder
from rollout.checkpoint import read_config, read_weights
from rollout.packing import SCALE

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


def w8a8_folder(folder: Path) -> Path:
    """The quantised twin of a model folder, in the user's cache, written at first use."""
    target = cache_folder().parent / f"{folder.name}-w8a8"
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=target.parent))
        write_w8a8(folder, partial)
        try:
            partial.rename(target)
        except OSError:  # another process was faster; its copy is as good
            shutil.rmtree(partial)
    return target


def write_w8a8(folder: Path, target: Path) -> None:
    """Quantises the model of `folder` into the empty folder `target`."""
    matrices = read_config(folder).matrix_shapes()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in read_weights(folder).items():
        if name in matrices:
            weight = quantise_weight(tensor, torch.float32)
            tensors[name] = weight.values
            tensors[name + SCALE] = weight.scales[:, None].contiguous()  # [out, 1]
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, target)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION
    (target / "config.json").write_text(json.dumps(config, indent=2))
