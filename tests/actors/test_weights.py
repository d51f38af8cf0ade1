"""Weights as they travel."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.engine_spec import EngineSpec
from actors.weights import WeightPublisher, to_arrays
from rollout.checkpoint import read_weights
from rollout.errors import InvalidWeights


def publisher(folder: Path, **options: object) -> WeightPublisher:
    return WeightPublisher(EngineSpec(str(folder), **options), [[1, 2, 3, 4]])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format_", ["none", "int8_w8a16", "int8_w8a8"])
def test_tensors_come_out_as_they_went_in(tiny_llama: Path, dtype: str, format_: str) -> None:
    update = publisher(tiny_llama, dtype=dtype, format=format_, mode="full").pack(
        3, read_weights(tiny_llama).items()
    )
    tensors = update.tensors()
    again, dtypes = to_arrays(tensors)
    assert dtypes == update.dtypes
    assert all(np.array_equal(again[name], update.arrays[name]) for name in again)
    assert tensors["model.norm.weight"].dtype == getattr(torch, dtype)
    quantised = format_ != "none"
    assert (tensors["model.embed_tokens.weight"].dtype == torch.int8) == quantised


def test_an_announcement_has_everything_but_the_bytes(tiny_llama: Path) -> None:
    update = publisher(tiny_llama, dtype="bfloat16").pack(3, read_weights(tiny_llama).items())
    announced = pickle.loads(pickle.dumps(update.announced()))
    assert (announced.version, announced.digest) == (3, update.digest)
    sent, told = update.tensors(), announced.tensors()
    assert list(told) == list(sent) and all(tensor.is_meta for tensor in told.values())
    assert all((t.dtype, t.shape) == (sent[n].dtype, sent[n].shape) for n, t in told.items())
    assert len(pickle.dumps(announced)) < update.arrays["model.embed_tokens.weight"].nbytes


def test_only_the_policys_weights_are_sent_from_gpu_to_gpu(tiny_llama: Path) -> None:
    fields = {"engine": "vllm", "mode": "full", "format": "none", "device": "cuda"}
    drafting = {"proposer": "vllm_draft_model", "draft_model": str(tiny_llama)}
    weights = read_weights(tiny_llama)
    sent = publisher(tiny_llama, **fields, **drafting, weight_transfer="nccl")
    sent.pack(0, weights.items())
    with pytest.raises(InvalidWeights, match="weight_transfer=nccl: only the policy's are sent"):
        sent.pack(1, weights.items(), weights)


def test_a_changed_byte_is_refused(tiny_llama: Path) -> None:
    update = publisher(tiny_llama).pack(0, read_weights(tiny_llama).items())
    name = "model.norm.weight"
    arrays = update.arrays | {name: update.arrays[name].copy()}
    arrays[name].view(np.uint8)[0] ^= 1
    with pytest.raises(InvalidWeights, match="arrived with digest"):
        dataclasses.replace(update, arrays=arrays).tensors()


def test_the_reference_is_full_precision_whatever_the_format(tiny_llama: Path) -> None:
    weights = read_weights(tiny_llama)
    one = publisher(tiny_llama, format="int8_w8a8").reference(weights.items())
    other = publisher(tiny_llama, format="none", mode="full").reference(weights.items())
    assert np.array_equal(one, other) and one.shape[0] == 3  # all but the last of 4 tokens
