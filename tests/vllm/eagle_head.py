"""EAGLE heads in the files of their authors, small: one layer over the target's hidden states."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

AUX_LAYERS = (0, 1, 2)
"""Where an EAGLE-3 head looks; a model of two layers has three places."""


def head_folder(path: Path, target: Path, method: str, *, scale: float, seed: int = 3) -> Path:
    """A random head for a target's folder; with scale 0 all its logits are equal, so that it drafts
    token 0 again and again."""
    config = json.loads((target / "config.json").read_text())
    third = method == "eagle3"
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "model_type": "llama"}
    config |= {"architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"]}
    for name in ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window"):
        config.pop(name, None)
    if third:
        config |= {"draft_vocab_size": config["vocab_size"]}
        config |= {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)}
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    into = 2 * hidden if third else hidden  # EAGLE-3 joins embedding and hidden state here
    block = "midlayer" if third else "layers.0"
    shapes = {
        "fc.weight": (hidden, len(AUX_LAYERS) * hidden if third else 2 * hidden),
        f"{block}.self_attn.q_proj.weight": (q_size, into),
        f"{block}.self_attn.k_proj.weight": (kv_size, into),
        f"{block}.self_attn.v_proj.weight": (kv_size, into),
        f"{block}.self_attn.o_proj.weight": (hidden, q_size),
        f"{block}.mlp.gate_proj.weight": (inner, hidden),
        f"{block}.mlp.up_proj.weight": (inner, hidden),
        f"{block}.mlp.down_proj.weight": (hidden, inner),
        f"{block}.post_attention_layernorm.weight": (hidden,),
    }
    if third:
        norms = f"{block}.input_layernorm.weight", f"{block}.hidden_norm.weight", "norm.weight"
        shapes |= dict.fromkeys(norms, (hidden,))
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else scale * torch.randn(shape, generator=draw)
        for name, shape in shapes.items()
    }
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path
