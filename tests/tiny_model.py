"""Tiny random decoders as Hugging Face folders: safetensors, config and a byte-level tokenizer.

Real in everything but size: transformers loads them offline, every architecture the native engine
runs is there, and their laws are peaked enough that a wrong rotation, norm or bias shows.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
EXTRA: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 24},
}
SPECIAL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def tiny_folder(
    path: Path, architecture: str = "llama", *, seed: int = 0, tied: bool = True, **config: Any
) -> Path:
    """Writes a model of about 100,000 weights; `config` overrides fields of its configuration."""
    tokenizer = _tokenizer()
    sizes = SIZES | {"vocab_size": len(tokenizer), "tie_word_embeddings": tied}
    fields = sizes | EXTRA.get(architecture, {}) | config
    made = CONFIGS[architecture](eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at 1 and biases at 0: neither would be tested
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that has seen short sums; every text round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    sums = [f"{a} + {b}: {a} + {b} = {a + b}\n" for a in range(1, 21) for b in range(1, 21)]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    bpe.train_from_iterator(sums, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=SPECIAL[0], pad_token=SPECIAL[2], model_max_length=512
    )
