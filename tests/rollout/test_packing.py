"""Weight updates: complete or refused, atomic, and the only weights afterwards."""

from pathlib import Path

import pytest
import torch

from quant.formats import FORMATS, FormatName
from quant.int8 import quantise_weight
from rollout.checkpoint import read_config, read_weights
from rollout.errors import InvalidWeights
from rollout.packing import digest, pack, unpack
from rollout.policy import Window
from rollout.request import RolloutRequest
from rollout.sampling import SamplingParams
from rollout.transformer_policy import TransformerPolicy
from tests.rollout.engines import request, run
from tests.rollout.policies import (
    engine_over,
    loaded_policy,
    packed_weights,
    random_ids,
    same_tensors,
)
from tests.tiny_model import tiny_folder

NAMES: list[FormatName] = ["none", "int8_w8a16", "int8_w8a8"]
QUANTISED: list[FormatName] = ["int8_w8a16", "int8_w8a8"]
MATRIX = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
IDS = random_ids(12, seed=5)


def pack_as(
    folder: Path, named: dict[str, torch.Tensor], format_: FormatName = "none"
) -> dict[str, torch.Tensor]:
    return pack(named.items(), read_config(folder), FORMATS[format_], torch.float32)


def logits_of(policy: TransformerPolicy) -> torch.Tensor:
    return policy.score([Window(0, 0, IDS, num_logits=len(IDS))])


@pytest.mark.parametrize("name", [MATRIX, NORM, EMBEDDING])
def test_a_missing_tensor_is_refused_by_name(name: str, tiny_llama: Path) -> None:
    named = read_weights(tiny_llama)
    del named[name]
    with pytest.raises(InvalidWeights, match=f"1 of 20 tensors are missing, first {name}"):
        pack_as(tiny_llama, named)


def test_an_empty_update_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(InvalidWeights, match="20 of 20 tensors are missing"):
        pack_as(tiny_llama, {})


@pytest.mark.parametrize("name", ["model.layers.2.mlp.down_proj.weight", "mtp.lm_head.weight"])
def test_an_unknown_tensor_is_refused_by_name(name: str, tiny_llama: Path) -> None:
    named = read_weights(tiny_llama) | {name: torch.zeros(300, 64)}
    with pytest.raises(InvalidWeights, match=f"1 unknown tensors, first {name}"):
        pack_as(tiny_llama, named)


@pytest.mark.parametrize("format_", NAMES)
@pytest.mark.parametrize("name", [MATRIX, EMBEDDING])
def test_a_tensor_of_another_layout_is_refused_though_it_has_as_many_numbers(
    name: str, format_: FormatName, tiny_llama: Path
) -> None:
    named = read_weights(tiny_llama)
    named[name] = named[name].T.contiguous()
    with pytest.raises(InvalidWeights, match=f"{name}: got shape"):
        pack_as(tiny_llama, named, format_)


@pytest.mark.parametrize("format_", NAMES)
@pytest.mark.parametrize("name", [MATRIX, NORM, EMBEDDING])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_the_sender(
    bad: float, name: str, format_: FormatName, tiny_llama: Path
) -> None:
    named = {n: t.clone() for n, t in read_weights(tiny_llama).items()}
    named[name].view(-1)[3] = bad
    with pytest.raises(InvalidWeights, match=f"{name}: .*NaN or infinity"):
        pack_as(tiny_llama, named, format_)


def test_a_number_that_overflows_in_the_cast_is_refused(tiny_llama: Path) -> None:
    """The largest float32, 3.4028e38, rounds to infinity in bf16."""
    named = {n: t.clone() for n, t in read_weights(tiny_llama).items()}
    named[NORM][0] = torch.finfo(torch.float32).max
    with pytest.raises(InvalidWeights, match=NORM):
        pack(named.items(), read_config(tiny_llama), FORMATS["none"], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_learner_dtype_is_cast_once_by_value(dtype: torch.dtype, tiny_llama: Path) -> None:
    named = {name: t.to(dtype) for name, t in read_weights(tiny_llama).items()}
    packed = pack_as(tiny_llama, named)
    assert {t.dtype for t in packed.values()} == {torch.float32}
    assert all(torch.equal(packed[name], named[name].float()) for name in named)


@pytest.mark.parametrize("format_", QUANTISED)
def test_quantisation_starts_from_the_learners_own_precision(
    format_: FormatName, tiny_llama: Path
) -> None:
    """A float32 step of 0.1 % survives, also where the actors compute in bf16."""
    named = {name: 1.001 * t for name, t in read_weights(tiny_llama).items()}
    packed = pack(named.items(), read_config(tiny_llama), FORMATS[format_], torch.bfloat16)
    scale_dtype = FORMATS[format_].scale_dtype
    assert scale_dtype is not None
    want = quantise_weight(named[MATRIX], scale_dtype)
    assert torch.equal(packed[MATRIX], want.values)
    assert torch.equal(packed[MATRIX + "_scale"], want.scales)


def test_a_tied_head_that_is_sent_as_well_is_the_embeddings_alias(tiny_llama: Path) -> None:
    named = read_weights(tiny_llama)
    both = named | {"lm_head.weight": named[EMBEDDING]}
    assert same_tensors(pack_as(tiny_llama, both), pack_as(tiny_llama, named))


def test_a_tied_head_follows_the_embedding_and_an_untied_one_does_not(
    tiny_llama: Path, tmp_path: Path
) -> None:
    untied_folder = tiny_folder(tmp_path, tied=False)
    for folder, follows in ((tiny_llama, True), (untied_folder, False)):
        old = loaded_policy(folder).weights
        new = loaded_policy(folder, change=lambda n, t: 2 * t if n == EMBEDDING else t).weights
        assert old is not None and new is not None
        (old_head,), (new_head,) = old.head.tensors(), new.head.tensors()
        assert torch.equal(new_head, 2 * old_head if follows else old_head)


def test_an_untied_model_without_its_head_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, tied=False)
    named = read_weights(folder)
    del named["lm_head.weight"]
    with pytest.raises(InvalidWeights, match=r"first lm_head\.weight"):
        pack_as(folder, named)


@pytest.mark.parametrize("format_", NAMES)
def test_unpacking_gives_back_what_was_packed(format_: FormatName, tiny_llama: Path) -> None:
    packed = packed_weights(tiny_llama, format_)
    tensors = unpack(packed, read_config(tiny_llama), FORMATS[format_], torch.float32)
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, packed[name])
        else:
            assert torch.equal(tensor.values, packed[name])
            assert torch.equal(tensor.scales, packed[name + "_scale"])


SCALE = MATRIX + "_scale"
DAMAGE = {
    "missing": lambda packed: packed.pop(SCALE),
    "unknown": lambda packed: packed.update(extra=torch.zeros(1)),
    "misshapen": lambda packed: packed.update({MATRIX: packed[MATRIX].T}),
    "other dtype": lambda packed: packed.update({NORM: packed[NORM].half()}),
    "not int8": lambda packed: packed.update({MATRIX: packed[MATRIX].float()}),
    "NaN": lambda packed: packed.update({NORM: packed[NORM] * torch.nan}),
    "NaN scale": lambda packed: packed.update({SCALE: packed[SCALE] * torch.nan}),
    "zero scale": lambda packed: packed.update({SCALE: packed[SCALE] * 0}),
    "negative scale": lambda packed: packed.update({SCALE: -packed[SCALE]}),
    "one scale for all": lambda packed: packed.update({SCALE: packed[SCALE][:1]}),
    "scale of another dtype": lambda packed: packed.update({SCALE: packed[SCALE].half()}),
}


@pytest.mark.parametrize("format_", QUANTISED)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_update_is_refused_and_the_old_weights_stay_whole(
    damage: str, format_: FormatName, tiny_llama: Path
) -> None:
    policy = loaded_policy(tiny_llama, format_)
    before, weights = logits_of(policy), policy.weights
    packed = packed_weights(tiny_llama, format_, change=lambda _, t: -2 * t)
    DAMAGE[damage](packed)
    with pytest.raises(InvalidWeights):
        policy.load(packed)
    assert policy.weights is weights
    assert torch.equal(logits_of(policy), before)


def test_an_update_of_another_format_is_refused(tiny_llama: Path) -> None:
    for format_ in NAMES:
        policy = loaded_policy(tiny_llama, format_)
        for other in NAMES:
            if other != format_:
                with pytest.raises(InvalidWeights):
                    policy.load(packed_weights(tiny_llama, other))


def test_preparing_an_update_changes_nothing_until_the_swap(tiny_llama: Path) -> None:
    policy = loaded_policy(tiny_llama)
    before = logits_of(policy)
    prepared = policy.load(packed_weights(tiny_llama, change=lambda _, t: -t))
    assert torch.equal(logits_of(policy), before)
    policy.swap(prepared)
    assert not torch.equal(logits_of(policy), before)


@pytest.mark.parametrize("format_", NAMES)
def test_three_updates_in_a_row_each_equal_a_cold_start(
    format_: FormatName, tiny_llama: Path
) -> None:
    """Times 10, 0.1 and -3: every scale changes each time, so a stale one would show."""
    policy = loaded_policy(tiny_llama, format_)
    for factor in (10.0, 0.1, -3.0):

        def change(name: str, tensor: torch.Tensor, factor: float = factor) -> torch.Tensor:
            return factor * tensor if "layernorm" not in name else tensor

        policy.swap(policy.load(packed_weights(tiny_llama, format_, change=change)))
        cold = loaded_policy(tiny_llama, format_, change=change)
        assert torch.equal(logits_of(policy), logits_of(cold))


@pytest.mark.parametrize("format_", NAMES)
def test_sending_the_same_weights_again_changes_nothing(
    format_: FormatName, tiny_llama: Path
) -> None:
    policy = loaded_policy(tiny_llama, format_)
    before = logits_of(policy)
    policy.swap(policy.load(packed_weights(tiny_llama, format_)))
    assert torch.equal(logits_of(policy), before)


def greedy_requests(num: int = 3) -> list[RolloutRequest]:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12)
    return [request(f"r{i}", random_ids(9, seed=i), sampling) for i in range(num)]


@pytest.mark.parametrize("format_", NAMES)
def test_an_update_that_flips_the_argmax_is_followed_and_voids_the_cache(
    format_: FormatName, tiny_llama: Path, tmp_path: Path
) -> None:
    other = tiny_folder(tmp_path, seed=1)
    engine = engine_over(loaded_policy(tiny_llama, format_))
    old = run(engine, greedy_requests())
    run(engine, greedy_requests())
    assert engine.gauges()["count/prefill_tokens"] == 3 * 8  # the second time from the cache
    for folder, version in ((other, 1), (tiny_llama, 2), (other, 3)):
        engine.load(
            engine.prepare(packed_weights(folder, format_)), version=version, digest=f"{version}"
        )
        new = run(engine, greedy_requests())
        cold = run(engine_over(loaded_policy(folder, format_)), greedy_requests())
        assert engine.gauges()["count/prefill_tokens"] == 3 * 8 * (1 + version)
        for name, sample in new.items():
            assert sample.token_ids == cold[name].token_ids
            assert (sample.token_ids != old[name].token_ids) == (folder is other)
            assert sample.version_spans == ((version, 12),)
            assert sample.weights_digest == f"{version}"


def test_rows_in_flight_go_on_under_the_new_weights_from_their_own_tokens(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """After the swap the cache is filled again: the rest equals a cold start on prompt + tokens."""
    other = tiny_folder(tmp_path, seed=1)
    engine = engine_over(loaded_policy(tiny_llama))
    engine.submit(greedy_requests(1))
    for _ in range(5):
        engine.step()
    engine.load(engine.prepare(packed_weights(other)), version=1, digest="second")
    sample = run(engine, [])["r0"]
    assert sample.version_spans == ((0, 5), (1, 7))
    prompt = (*random_ids(9, seed=0), *sample.token_ids[:5])
    rest = request("rest", prompt, SamplingParams(temperature=0.0, max_new_tokens=7))
    cold = run(engine_over(loaded_policy(other)), [rest])["rest"]
    assert sample.token_ids[5:] == cold.token_ids


def test_digest_does_not_depend_on_the_order(tiny_llama: Path) -> None:
    packed = packed_weights(tiny_llama, "int8_w8a16")
    assert digest(packed) == digest(dict(reversed(packed.items())))


@pytest.mark.parametrize("format_", NAMES)
def test_digest_sees_one_bit_of_any_tensor(format_: FormatName, tiny_llama: Path) -> None:
    packed = packed_weights(tiny_llama, format_)
    seen = {digest(packed)}
    for name in packed:
        changed = {n: t.clone() for n, t in packed.items()}
        changed[name].view(-1)[-1:].view(torch.uint8)[0] ^= 1
        seen.add(digest(changed))
    assert len(seen) == 1 + len(packed)


def test_digest_sees_names_shapes_and_dtypes() -> None:
    zeros = torch.zeros(4)
    variants = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.view(2, 2)},
        {"a": zeros.view(torch.int32)},
        {"a": zeros[:2], "b": zeros[:2]},
    ]
    assert len({digest(variant) for variant in variants}) == len(variants)


def test_digest_is_of_values_not_of_memory_layout() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert digest({"a": matrix}) == digest({"a": matrix.T.contiguous().T})
