"""Reading a Hugging Face checkpoint folder: safetensors only, no code from the folder is run."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollout.decoder import SUPPORTED, DecoderConfig, check_architecture
from rollout.errors import UnsupportedModel

STATIC_ROPE = ("default", "linear", "llama3")
"""Rotary variants whose frequencies do not depend on the sequence length."""


def read_config(folder: Path) -> DecoderConfig:
    """The decoder a folder holds. Raises UnsupportedModel and says what is wrong."""
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{folder}: no config.json; expected a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedModel(f"{folder}: transformers cannot read it: {reason}") from error
    name = (config.architectures or [type(config).__name__])[0]
    check_architecture(name)
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UnsupportedModel(f"{folder}: sliding-window attention is not run here")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedModel(f"{folder}: layers of {', '.join(sorted(kinds))} are not run here")
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"{folder}: activation {config.hidden_act}; expected silu")
    if getattr(config, "mlp_bias", False):
        raise UnsupportedModel(f"{folder}: biases in the MLP are not run here")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inv_freq, rope_scale = _rope(folder, config, head_dim)
    qkv_bias, qk_norm = SUPPORTED[name]
    if getattr(config, "attention_bias", False):
        raise UnsupportedModel(f"{folder}: attention_bias on the output map is not run here")
    eos = config.eos_token_id
    return DecoderConfig(
        architecture=name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        inv_freq=inv_freq,
        rope_scale=rope_scale,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tied_head=bool(config.tie_word_embeddings),
        max_context_len=config.max_position_embeddings,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _rope(folder: Path, config: PreTrainedConfig, head_dim: int) -> tuple[tuple[float, ...], float]:
    parameters: dict[str, Any] = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in STATIC_ROPE:
        raise UnsupportedModel(f"{folder}: rope type {kind}; expected one of {STATIC_ROPE}")
    if kind != "default":
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return tuple(inv_freq.tolist()), float(scale)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0


def check_weights(folder: Path) -> list[Path]:
    """The folder's safetensors files. Raises UnsupportedModel when one is missing."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        if not (folder / name).is_file():
            raise UnsupportedModel(f"{folder}: {name} is missing; only safetensors are read")
    return [folder / name for name in names]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's safetensors files, in their stored dtype."""
    weights: dict[str, torch.Tensor] = {}
    for path in check_weights(folder):
        try:
            with safe_open(path, framework="pt") as file:
                weights |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise UnsupportedModel(f"{path}: not a safetensors file: {error}") from error
    return weights


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer. Raises UnsupportedModel when there is none."""
    if not (folder / "tokenizer.json").is_file():
        raise UnsupportedModel(f"{folder}: no tokenizer.json; expected a fast tokenizer")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    return tokenizer
