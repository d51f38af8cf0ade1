"""Transformer policies and engines over model folders, and the forward they are compared with."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from proposers.none import NoProposer
from quant.formats import FORMATS, FormatName
from quant.int8 import LIMIT, Int8Weight
from rollout.checkpoint import read_config, read_weights
from rollout.draft_len import FixedDraftLen
from rollout.native_engine import NativeEngine
from rollout.packing import pack
from rollout.proposer import Proposer
from rollout.transformer_policy import TransformerPolicy


def packed_weights(
    folder: Path,
    format_: FormatName = "none",
    *,
    dtype: torch.dtype = torch.float32,
    change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
) -> dict[str, torch.Tensor]:
    """The folder's weights as an update, each tensor put through `change` first."""
    named = [(name, change(name, tensor.float())) for name, tensor in read_weights(folder).items()]
    return pack(named, read_config(folder), FORMATS[format_], dtype)


def loaded_policy(
    folder: Path,
    format_: FormatName = "none",
    *,
    num_slots: int = 8,
    context_len: int = 256,
    dtype: torch.dtype = torch.float32,
    change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
) -> TransformerPolicy:
    """A policy with the folder's weights in force."""
    policy = TransformerPolicy(
        read_config(folder),
        FORMATS[format_],
        num_slots=num_slots,
        context_len=context_len,
        dtype=dtype,
    )
    policy.swap(policy.load(packed_weights(folder, format_, dtype=dtype, change=change)))
    return policy


def engine_over(
    policy: TransformerPolicy, proposer: Proposer | None = None, draft_len: int = 0
) -> NativeEngine:
    """An engine over a loaded policy, at version 0."""
    engine = NativeEngine(policy, proposer or NoProposer(), FixedDraftLen(draft_len))
    engine.load(policy.weights, version=0, digest="first")
    return engine


@lru_cache(maxsize=8)
def hugging_face(folder: Path) -> PreTrainedModel:
    """The same folder as transformers runs it, float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """[T, V]: one uncached forward over the whole sequence."""
    return hugging_face(folder)(torch.tensor([list(ids)]), use_cache=False).logits[0]


def filtered_law(
    logits: torch.Tensor, temperature: float, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Law [T, V] after temperature and top-p in float64, and the mass [T] that top-p kept."""
    full = (logits.double() / temperature).softmax(-1)
    ranked, order = full.sort(-1, descending=True)
    kept = torch.zeros_like(full, dtype=torch.bool)
    kept.scatter_(-1, order, ranked.cumsum(-1) - ranked < top_p)
    mass = (full * kept).sum(-1)
    return full * kept / mass[:, None], mass


def random_ids(num: int, seed: int, vocab_size: int = 300) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab_size, (num,), generator=generator).tolist())


def same_tensors(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def most_of_16_bits(cols: int) -> int:
    """The largest whole number that the compiled kernels round an activation to."""
    return min(2**15 - 1, (2**31 - 1) // (LIMIT * cols))


def product_of_whole_numbers(weight: Int8Weight, x: torch.Tensor, *, most: int) -> torch.Tensor:
    """x W^T [N, out] with the activations [N, in] of each token rounded to so many steps either way."""
    steps = x.abs().amax(-1) / most
    whole = (x / steps[:, None]).round()
    sums = (whole.double() @ weight.values.double().T).float()  # before it is narrowed, exact
    return sums * steps[:, None] * weight.scales.float()
