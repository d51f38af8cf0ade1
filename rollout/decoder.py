"""What a dense decoder is made of: sizes, tensor names, which of them are quantised.

Llama, Mistral, Qwen2 and Qwen3 (SmolLM2 is a Llama): pre-norm blocks with rotary grouped-query
attention and a gated MLP. Tensor names are those of Hugging Face checkpoints.
"""

from dataclasses import dataclass

from rollout.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of one model. Plain numbers, so that it travels to actors."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    inv_freq: tuple[float, ...]
    """Rotary frequencies [head_dim / 2], scaling applied."""
    rope_scale: float
    """Multiplies cos and sin (attention scaling of extended-context variants; 1 otherwise)."""
    qkv_bias: bool
    qk_norm: bool
    tied_head: bool
    max_context_len: int
    eos_token_ids: tuple[int, ...]

    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """The block matrices, [out, in] by name: what a weight format applies to, beside the head."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        block = {
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        return {
            f"model.layers.{layer}.{name}.weight": shape
            for layer in range(self.num_layers)
            for name, shape in block.items()
        }

    @property
    def head_name(self) -> str:
        """Of the output head's weight [V, hidden]: the embedding's where they are tied."""
        return "model.embed_tokens.weight" if self.tied_head else "lm_head.weight"

    def other_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every other tensor: embedding, norms, biases, an untied head."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        if not self.tied_head:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            shapes[f"{prefix}.input_layernorm.weight"] = (self.hidden_size,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (self.hidden_size,)
            if self.qk_norm:
                shapes[f"{prefix}.self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{prefix}.self_attn.k_norm.weight"] = (self.head_dim,)
            if self.qkv_bias:
                for name, heads in (
                    ("q", self.num_heads),
                    ("k", self.num_kv_heads),
                    ("v", self.num_kv_heads),
                ):
                    shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (heads * self.head_dim,)
        return shapes

    def aliases(self) -> frozenset[str]:
        """Names that stand for a tensor listed under another name."""
        return frozenset({"lm_head.weight"}) if self.tied_head else frozenset()


SUPPORTED = {
    "LlamaForCausalLM": (False, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
}
"""Architecture -> (query/key/value biases, query/key norms)."""


def check_architecture(name: str) -> None:
    """Raises UnsupportedModel: recurrent layers, experts and sliding windows are not run here."""
    if name not in SUPPORTED:
        raise UnsupportedModel(
            f"architecture {name}: the native engine runs {', '.join(SUPPORTED)}"
        )
