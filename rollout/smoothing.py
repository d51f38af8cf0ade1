"""Smoothing a decoder for INT8 activations: the same model, with its outlier channels in the weights.

The factors of `quant.smoothing` go where they cost nothing: what a norm, the values or the
up-projection put out is divided by s within that layer's own weights, and the columns of the map that
reads it are multiplied by s. In float the model is unchanged; what changes is what INT8 makes of it.

SmolLM2 on its own rollouts (8 texts, 1,017 tokens), against float32: KL .060 -> .021 nats a token, TV
.107 -> .062 with strength .5; .4 and .6 give .070 and .069. Without quantised activations KL is .007
and TV .035.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from quant.formats import FORMATS
from quant.linear import Linear
from quant.smoothing import smoothing_factors
from rollout.decoder import DecoderConfig
from rollout.packing import complete
from rollout.policy import Window
from rollout.transformer_policy import TransformerPolicy

MAPS = ("qkv", "out", "gate_up", "down")
"""The linear maps of a block by what they are called in `rollout.decoder_forward.Block`."""
Tensors = dict[str, torch.Tensor]


def smooth(
    named: Iterable[tuple[str, torch.Tensor]],
    config: DecoderConfig,
    sequences: Sequence[Sequence[int]],
    strength: float,
    *,
    same_cache: bool = False,
) -> Tensors:
    """The full set of named weights in float32, smoothed by what `sequences` of ids activate. A tied
    head that is named as well is left out. `same_cache` leaves the values alone, and the output map
    that reads them, so that keys and values are those of the model as it was. Raises InvalidWeights
    for an incomplete set."""
    whole = {name: tensor.float() for name, tensor in complete(named, config).items()}
    for layer, maxima in enumerate(activation_maxima(whole, config, sequences)):
        at = f"model.layers.{layer}"
        _smooth_inputs(whole, at, maxima, strength)
        if not same_cache:
            _smooth_values(whole, config, at, maxima["out"], strength)
    return whole


def activation_maxima(
    named: Mapping[str, torch.Tensor], config: DecoderConfig, sequences: Sequence[Sequence[int]]
) -> list[Tensors]:
    """For each layer the largest magnitude [C] of every input channel of its maps."""
    policy = TransformerPolicy(
        config,
        FORMATS["none"],
        num_slots=len(sequences),
        context_len=max(map(len, sequences)),
        dtype=torch.float32,
    )
    built = policy.build(named)
    watched: list[dict[str, _Watched]] = []
    blocks: list[Any] = []
    for block in built.blocks:
        watched.append({name: _Watched(getattr(block, name)) for name in MAPS})
        in_their_place: dict[str, Any] = dict(watched[-1])
        blocks.append(dataclasses.replace(block, **in_their_place))
    policy.swap(dataclasses.replace(built, blocks=tuple(blocks)))
    policy.score([Window(i, 0, tuple(ids), num_logits=0) for i, ids in enumerate(sequences)])
    return [{name: one.maxima for name, one in layer.items()} for layer in watched]


class _Watched:
    """A linear map that keeps the largest magnitudes of what it is given."""

    def __init__(self, linear: Linear) -> None:
        self._linear, self.kernel = linear, linear.kernel
        self.maxima = torch.zeros(())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.maxima = torch.maximum(self.maxima, x.abs().amax(0))
        return self._linear(x)

    def tensors(self) -> list[torch.Tensor]:
        return self._linear.tensors()


def _smooth_inputs(whole: Tensors, at: str, maxima: Tensors, strength: float) -> None:
    """What the two norms and the up-projection of a layer put out."""

    def factors(map_: str, names: Sequence[str]) -> torch.Tensor:
        columns = torch.stack([whole[name].abs().amax(0) for name in names]).amax(0)
        return smoothing_factors(maxima[map_], columns, strength)

    attention = [f"{at}.self_attn.{name}_proj.weight" for name in "qkv"]
    mlp = [f"{at}.mlp.{name}_proj.weight" for name in ("gate", "up")]
    for norm, map_, readers in (
        ("input_layernorm", "qkv", attention),
        ("post_attention_layernorm", "gate_up", mlp),
    ):
        s = factors(map_, readers)
        whole[f"{at}.{norm}.weight"] = whole[f"{at}.{norm}.weight"] / s
        for name in readers:
            whole[name] = whole[name] * s
    down = f"{at}.mlp.down_proj.weight"
    s = factors("down", [down])
    whole[down], whole[mlp[1]] = whole[down] * s, whole[mlp[1]] / s[:, None]


def _smooth_values(
    whole: Tensors, config: DecoderConfig, at: str, maxima: torch.Tensor, strength: float
) -> None:
    """What attention hands to the output map, mixed values."""
    out = f"{at}.self_attn.o_proj.weight"
    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    shared = smoothing_factors(  # query heads that read the same values share their factors
        maxima.view(heads).amax(1), whole[out].abs().amax(0).view(heads).amax(1), strength
    )  # [J, D]
    whole[out] = whole[out] * shared[:, None].expand(heads).reshape(-1)
    values = f"{at}.self_attn.v_proj"
    whole[f"{values}.weight"] = whole[f"{values}.weight"] / shared.view(-1, 1)
    if config.qkv_bias:
        whole[f"{values}.bias"] = whole[f"{values}.bias"] / shared.view(-1)
