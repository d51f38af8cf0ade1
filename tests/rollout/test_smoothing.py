"""A smoothed model is the same model, and INT8 makes less of a difference to it."""

from pathlib import Path

import pytest
import torch

from quant.formats import FORMATS
from quant.smoothing import smoothing_factors
from rollout.checkpoint import read_config, read_weights
from rollout.errors import InvalidWeights
from rollout.packing import pack
from rollout.policy import Window
from rollout.smoothing import smooth
from rollout.transformer_policy import TransformerPolicy
from tests.tiny_model import CONFIGS, tiny_folder

TOLD, ASKED = [[5, 9, 17, 3, 30, 8, 44, 12], [7, 7, 21]], (11, 4, 40, 23, 9, 30, 17, 5, 5, 60, 31)


def logits(folder: Path, named: dict[str, torch.Tensor], format_: str) -> torch.Tensor:
    config, how = read_config(folder), FORMATS[format_]  # type: ignore[index]
    policy = TransformerPolicy(config, how, num_slots=1, context_len=64, dtype=torch.float32)
    policy.swap(policy.load(pack(named.items(), config, how, torch.float32)))
    return policy.score([Window(0, 0, ASKED, num_logits=len(ASKED))])


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("strength", [0.3, 0.5, 1.0])
def test_a_smoothed_model_computes_the_same(
    architecture: str, strength: float, tmp_path: Path
) -> None:
    """Grouped heads, biases and norms of queries and keys among them."""
    folder = tiny_folder(tmp_path, architecture, tied=architecture != "qwen2")
    named = dict(read_weights(folder))
    smoothed = smooth(named.items(), read_config(folder), TOLD, strength)
    assert any(not torch.equal(smoothed[n], named[n].float()) for n in smoothed)
    expected, got = (logits(folder, one, "none") for one in (named, smoothed))
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("same_cache", [True, False])
def test_values_in_the_cache_stay_where_another_model_reads_them(
    architecture: str, same_cache: bool, tmp_path: Path
) -> None:
    """And else they do not, so the first half says something."""
    folder = tiny_folder(tmp_path, architecture)
    named, config = dict(read_weights(folder)), read_config(folder)
    caches = []
    for one in (named, smooth(named.items(), config, TOLD, 0.5, same_cache=same_cache)):
        policy = TransformerPolicy(
            config, FORMATS["none"], num_slots=1, context_len=64, dtype=torch.float32
        )
        policy.swap(policy.load(pack(one.items(), config, FORMATS["none"], torch.float32)))
        policy.score([Window(0, 0, ASKED, num_logits=1)])
        caches.append((policy._keys.clone(), policy._values.clone()))
    (keys, values), (new_keys, new_values) = caches
    torch.testing.assert_close(new_keys, keys, atol=1e-3, rtol=1e-3)
    assert torch.allclose(new_values, values, atol=1e-3) == same_cache


@pytest.mark.parametrize("seed", range(3))
def test_outlier_channels_cost_int8_activations_less(seed: int, tmp_path: Path) -> None:
    """Two channels of every norm 40 times as large, as trained models have them."""
    folder = tiny_folder(tmp_path, seed=seed)
    named = {name: tensor.float() for name, tensor in read_weights(folder).items()}
    for name in named:
        if name.endswith("layernorm.weight"):
            named[name][[3, 17]] *= 40
            reader = name.replace("input_layernorm", "self_attn.q_proj")
            reader = reader.replace("post_attention_layernorm", "mlp.up_proj")
            others = {
                reader,
                reader.replace("q_proj", "k_proj"),
                reader.replace("q_proj", "v_proj"),
            }
            for other in others | {reader.replace("up_proj", "gate_proj")}:
                named[other][:, [3, 17]] /= 40
    smoothed = smooth(named.items(), read_config(folder), TOLD, 0.5)
    exact = logits(folder, named, "none")
    before, after = (
        float((logits(folder, one, "int8_w8a8") - exact).abs().mean()) for one in (named, smoothed)
    )
    assert after < 0.5 * before


def test_factors_are_those_of_the_paper() -> None:
    s = smoothing_factors(torch.tensor([16.0, 1.0, 0.0]), torch.tensor([0.25, 1.0, 0.0]), 0.5)
    assert s.tolist() == pytest.approx([8.0, 1.0, 1.0])  # 4 / .5; untouched channels stay


def test_a_tied_head_that_is_named_as_well_is_left_out(tiny_llama: Path) -> None:
    named = dict(read_weights(tiny_llama))
    twice = named | {"lm_head.weight": named["model.embed_tokens.weight"]}
    assert smooth(twice.items(), read_config(tiny_llama), TOLD, 0.5).keys() == named.keys()


def test_an_incomplete_set_is_refused_by_name(tiny_llama: Path) -> None:
    named = dict(read_weights(tiny_llama))
    del named["model.norm.weight"]
    with pytest.raises(InvalidWeights, match=r"missing, first model\.norm\.weight"):
        smooth(named.items(), read_config(tiny_llama), TOLD, 0.5)
