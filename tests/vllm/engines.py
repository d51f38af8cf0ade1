"""Engines on a tiny model that vLLM's CPU attention takes, and requests for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from actors.engine_spec import EngineSpec, make_engine, pack_weights
from rollout.checkpoint import read_weights
from rollout.engine import Engine, InFlight
from rollout.packing import digest
from rollout.request import RolloutRequest, RolloutSample
from rollout.sampling import SamplingParams

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM's CPU attention takes heads of 32 and more."""
CONTEXT_LEN = 96


def spec_of(folder: Path, engine: str = "vllm", **fields: Any) -> EngineSpec:
    """Full precision, float32."""
    made: dict[str, Any] = {
        "mode": "full",
        "format": "none",
        "proposer": "history",
        "draft_len": 4,
        "num_slots": 8,
        "context_len": CONTEXT_LEN,
        "dtype": "float32",
        "kernels": "torch" if engine == "native" else "auto",
    }
    if fields.get("proposer") == "none":
        made["draft_len"] = None
    return EngineSpec(str(folder), engine=engine, **made | fields)  # type: ignore[arg-type]


def load(
    engine: Engine,
    spec: EngineSpec,
    weights: Mapping[str, torch.Tensor],
    version: int,
    in_flight: InFlight = "interrupt",
) -> None:
    """Asks for named weights to be put in force."""
    packed = pack_weights(spec, weights.items())
    prepared = engine.prepare(packed)
    engine.load(prepared, version=version, digest=digest(packed), in_flight=in_flight)


def make_idle(engine: Engine, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Puts an engine that a module shares back under version 0."""
    assert not engine.num_unfinished
    if engine.version != 0:
        load(engine, spec_of(folder), weights, 0)
        engine.step()


def loaded(spec: EngineSpec, version: int = 0) -> Engine:
    """An engine on its folder's weights."""
    engine = make_engine(spec)
    load(engine, spec, read_weights(Path(spec.model_folder)), version)
    return engine


def requests(
    name: str, num: int, sampling: SamplingParams, *, group_size: int = 2, run_seed: int = 7
) -> list[RolloutRequest]:
    """Groups of prompts that differ in length."""
    made = []
    for index in range(num):
        group, member = divmod(index, group_size)
        prompt = tuple(range(10 + group, 22 + 8 * group))
        ids = f"{name}-{index}", f"{name}-{group}", f"prompt {group}"
        made.append(RolloutRequest(*ids, member, prompt, sampling, run_seed))
    return made


@torch.inference_mode()
def reference_logits(folder: Path, weights: Mapping[str, torch.Tensor], ids: Sequence[int]) -> Any:
    """[len, V] of transformers in float32, one uncached forward."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    return model(torch.tensor([list(ids)])).logits[0]


def full_logprobs(
    folder: Path, weights: Mapping[str, torch.Tensor], sample: RolloutSample, temperature: float
) -> list[float]:
    """Of the sample's tokens over the whole vocabulary, by the reference."""
    prompt = sample.request.prompt_ids
    logits = reference_logits(folder, weights, (*prompt, *sample.token_ids))
    table = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(table, sample.token_ids, strict=True)]
