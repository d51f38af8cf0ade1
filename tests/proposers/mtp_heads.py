"""MTP heads to draft with: random ones for a model folder, and what they are to compute."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from quant.formats import FORMATS, FormatName
from rollout.checkpoint import read_config
from rollout.mtp_policy import MtpPolicy, head_config
from rollout.mtp_weights import VERSION, VOCABULARY, mtp_shapes
from rollout.packing import pack
from tests.rollout.policies import hugging_face, packed_weights

Tensors = dict[str, torch.Tensor]


def random_head(folder: Path, draft_vocab_size: int = 40, seed: int = 0) -> Tensors:
    """A head of the right shapes whose laws are peaked enough to show a wrong input."""
    config, generator = read_config(folder), torch.Generator().manual_seed(seed)
    head = {
        name: 0.3 * torch.randn(shape, generator=generator)
        for name, shape in mtp_shapes(config, draft_vocab_size).items()
    }
    for name in head:
        if "norm" in name:
            head[name] += 1.0
    ids = torch.randperm(config.vocab_size, generator=generator)[:draft_vocab_size]
    return head | {VOCABULARY: ids.sort().values, VERSION: torch.tensor(3)}


def mtp_policy(
    folder: Path, make: Any, head: Tensors, *, format_: FormatName = "none", **sizes: Any
) -> MtpPolicy:
    """Target and head in one format, with their weights in force."""
    config = read_config(folder)
    small = head_config(config, len(head[VOCABULARY]))
    options = {"num_slots": 4, "context_len": 96, "dtype": torch.float32} | sizes

    def quantise(named: Any) -> Any:
        return pack(named.items(), small, FORMATS[format_], torch.float32)

    policy = MtpPolicy(
        make(config, FORMATS[format_], **options),
        make(small, FORMATS[format_], **options),
        config,
        quantise,
    )
    policy.swap(policy.load(packed_weights(folder, format_) | head))
    return policy


@torch.inference_mode()
def reference_logits(
    folder: Path, head: Tensors, token_ids: Sequence[int], prompt_len: int, drafted: Sequence[int]
) -> torch.Tensor:
    """Logits [D] of the token behind a row of a Llama and some drafted ones, from the definition."""
    model: Any = hugging_face(folder)
    hidden = model.model(torch.tensor([list(token_ids[:-1])])).last_hidden_state[
        0, prompt_len - 1 :
    ]
    block = LlamaDecoderLayer(model.config, 0).eval()
    start = "mtp.layers.0."
    block.load_state_dict(
        {n.removeprefix(start): t for n, t in head.items() if n.startswith(start)}
    )
    rotary, eps, size = (
        LlamaRotaryEmbedding(model.config),
        model.config.rms_norm_eps,
        hidden.shape[-1:],
    )
    behind = torch.tensor([*token_ids[prompt_len:], *drafted])
    for num in range(len(hidden), len(behind) + 1):  # one pass a drafted token: all that is there
        embedded = model.model.embed_tokens(behind[:num])
        joint = torch.cat(
            [F.rms_norm(hidden, size, head["mtp.hidden_norm.weight"], eps),
             F.rms_norm(embedded, size, head["mtp.embedding_norm.weight"], eps)], dim=-1,
        )  # fmt: skip
        inputs = F.linear(joint, head["mtp.proj.weight"])[None]
        mask = torch.full((num, num), -torch.inf).triu(1)[None, None]
        angles = rotary(inputs, torch.arange(num)[None])
        out = block(inputs, attention_mask=mask, position_embeddings=angles)
        out = out[0] if isinstance(out, tuple) else out
        normed = F.rms_norm(out.reshape(num, -1), size, head["mtp.norm.weight"], eps)
        hidden = torch.cat([hidden, normed[-1:]])
    return F.linear(normed[-1], model.lm_head.weight[head[VOCABULARY]])
