"""The tensors of an MTP head: names, shapes, their check, and the file they are kept in.

An MTP head (multi-token prediction, arXiv:2412.19437, section 2.2) drafts the token after the next
one. At position i it sees h_i, the trunk's hidden state behind its final norm, and the embedding of
token x_{i+1}, and predicts x_{i+2}:

    input  = proj [norm(h_i); norm(embedding(x_{i+1}))]          hidden first
    output = norm(block(input))                                  one decoder block, causal
    logits = rows of the policy's output head, those of the draft vocabulary, applied to the output

Deeper tokens come by recursion: the head's own output at i stands for h_{i+1}. The block attends over
the head's positions of the row's own response, the first of which is the prompt's last token; rotary
positions count from 0 there. Embedding and output head are the policy's own and are not stored here.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollout.decoder import DecoderConfig
from rollout.errors import InvalidWeights

MTP_PREFIX = "mtp."
VOCABULARY = "mtp.vocabulary"
"""Sorted ids that may be drafted, [D] int64."""
VERSION = "mtp.version"
"""Policy version whose rollouts the head was trained on last, int64 scalar."""


def mtp_shapes(config: DecoderConfig, draft_vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a head by name. The block has the names of the policy's own first layer."""
    hidden = config.hidden_size
    block = {
        MTP_PREFIX + name.removeprefix("model."): shape
        for name, shape in (config.matrix_shapes() | config.other_shapes()).items()
        if name.startswith("model.layers.0.")
    }
    return {
        "mtp.hidden_norm.weight": (hidden,),
        "mtp.embedding_norm.weight": (hidden,),
        "mtp.proj.weight": (hidden, 2 * hidden),
        **block,
        "mtp.norm.weight": (hidden,),
        VOCABULARY: (draft_vocab_size,),
        VERSION: (),
    }


def check_mtp(tensors: Mapping[str, torch.Tensor], config: DecoderConfig) -> None:
    """Raises InvalidWeights for missing or unknown names, wrong shapes or dtypes (float32, but for
    the two int64 ones), NaN or infinity, and a draft vocabulary that is not sorted, distinct ids."""
    if VOCABULARY not in tensors:
        raise InvalidWeights(f"an MTP head without {VOCABULARY}; expected its sorted draftable ids")
    vocabulary = tensors[VOCABULARY]
    if vocabulary.ndim != 1 or not len(vocabulary):
        raise InvalidWeights(f"{VOCABULARY}: got shape {tuple(vocabulary.shape)}, expected (D,)")
    shapes = mtp_shapes(config, len(vocabulary))
    if wrong := sorted(set(shapes) ^ set(tensors)):
        what = "missing" if wrong[0] in shapes else "unknown"
        raise InvalidWeights(
            f"{wrong[0]} is {what}: got {len(tensors)} tensors, expected the {len(shapes)} of an MTP "
            f"head for {config.architecture}"
        )
    for name, shape in shapes.items():
        tensor, dtype = tensors[name], _dtype(name)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise InvalidWeights(
                f"{name}: got {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}"
            )
        if not bool(tensor.isfinite().all()):
            raise InvalidWeights(f"{name}: holds NaN or infinity")
    if not bool((vocabulary.diff() > 0).all()):
        raise InvalidWeights(f"{VOCABULARY}: expected ids in rising order, each once")
    if int(vocabulary[0]) < 0 or int(vocabulary[-1]) >= config.vocab_size:
        raise InvalidWeights(
            f"{VOCABULARY}: got ids {int(vocabulary[0])} to {int(vocabulary[-1])}, expected them in "
            f"0..{config.vocab_size - 1}"
        )


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name in (VOCABULARY, VERSION) else torch.float32


def save_mtp(path: Path, tensors: Mapping[str, torch.Tensor], salt: str) -> None:
    """Writes a head as safetensors; `salt` names the model it belongs to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"model": salt})


def load_mtp(path: Path, config: DecoderConfig, salt: str) -> dict[str, torch.Tensor]:
    """Reads and checks a head. Raises InvalidWeights for a file that is missing or no safetensors
    file, and for a head of another model."""
    if not path.is_file():
        raise InvalidWeights(f"{path}: no such file; `rollout train-mtp` writes an MTP head")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
    except SafetensorError as error:
        raise InvalidWeights(f"{path}: not a safetensors file: {error}") from error
    if about.get("model") != salt:
        raise InvalidWeights(
            f"{path}: a head of the model {about.get('model')!r}, expected {salt!r}; train one on "
            "this model's rollouts"
        )
    check_mtp(tensors, config)
    return tensors
