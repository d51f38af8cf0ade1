"""The compiled forward against the torch one, and its independence of batch and window."""

import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quant.formats import FORMATS, Format, FormatName, make_head, make_linear
from quant.int8 import Int8Weight
from quant.linear import Linear
from rollout import transformer_policy
from rollout.checkpoint import read_config
from rollout.compiled_policy import CompiledPolicy
from rollout.errors import KernelsUnavailable
from rollout.packing import unpack
from rollout.policy import Window
from rollout.transformer_policy import TransformerPolicy
from tests.rollout.policies import most_of_16_bits, packed_weights, product_of_whole_numbers
from tests.tiny_model import tiny_folder

FORMAT_NAMES: list[FormatName] = ["none", "int8_w8a16", "int8_w8a8"]
MODELS = {
    "llama": {},
    "llama untied": {"tied": False},
    "mistral": {"num_key_value_heads": 1},
    "qwen2": {"hidden_size": 128, "intermediate_size": 112},
    "qwen3": {"head_dim": 80},
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            path = tmp_path_factory.mktemp("tiny") / name.replace(" ", "_")
            made[name] = tiny_folder(path, name.split()[0], **MODELS[name])
        return made[name]

    return folder


def compiled(
    folder: Path,
    format_: FormatName = "none",
    *,
    num_slots: int = 6,
    context_len: int = 128,
    dtype: torch.dtype = torch.float32,
    max_cached_tokens: int | None = None,
) -> CompiledPolicy:
    policy = CompiledPolicy(
        read_config(folder), FORMATS[format_], num_slots=num_slots, context_len=context_len,
        dtype=dtype, max_cached_tokens=max_cached_tokens,
    )  # fmt: skip
    policy.swap(policy.load(packed_weights(folder, format_, dtype=dtype)))
    return policy


class SixteenBits:
    """INT8 weights under activations of 16 bits, exact between them."""

    kernel = "reference"

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        most = most_of_16_bits(self._weight.values.shape[1])
        y = product_of_whole_numbers(self._weight, x, most=most)
        return y if self._bias is None else y + self._bias

    def tensors(self) -> list[torch.Tensor]:
        return [self._weight.values, self._weight.scales]


def reference(folder: Path, format_: FormatName = "none") -> TransformerPolicy:
    """The torch decoder in float32, with the activations of 16 bits that the compiled kernels have: its
    own are bf16, or not rounded."""
    config, packed = read_config(folder), packed_weights(folder, format_)
    policy = TransformerPolicy(
        config, FORMATS[format_], num_slots=6, context_len=128, dtype=torch.float32
    )

    def linear(of: Format, weight: torch.Tensor | Int8Weight, bias: torch.Tensor | None) -> Linear:
        if of.name != "int8_w8a16" or not isinstance(weight, Int8Weight):
            return make_linear(of, weight, bias)
        return SixteenBits(weight, bias)

    def head(weight: torch.Tensor | Int8Weight) -> Linear:
        return SixteenBits(weight) if isinstance(weight, Int8Weight) else make_head(weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_policy, "make_linear", linear)
        patch.setattr(transformer_policy, "make_head", head)
        policy.swap(policy.build(unpack(packed, config, FORMATS[format_], torch.float32)))
    return policy


def ids_of(folder: Path, num: int, seed: int = 0) -> tuple[int, ...]:
    rng, vocab_size = random.Random(seed), read_config(folder).vocab_size
    return tuple(rng.randrange(vocab_size) for _ in range(num))


def random_rounds(folder: Path, seed: int) -> list[list[Window]]:
    """Ragged windows of several slots: prefills, decodes and drafts in one batch."""
    rng = random.Random(seed)
    lengths = [0] * 6
    rows = [ids_of(folder, 128, slot) for slot in range(6)]
    rounds = []
    for _ in range(5):
        windows = []
        for slot in rng.sample(range(6), rng.randint(1, 6)):
            num = rng.choice([1, 1, 2, 5, rng.randint(1, 24)])
            start = lengths[slot]
            ids = rows[slot][start : start + num]
            windows.append(Window(slot, start, ids, num_logits=rng.randint(0, num)))
            lengths[slot] += num
        rounds.append(windows)
    return rounds


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format_", FORMAT_NAMES)
def test_ragged_windows_score_as_the_torch_decoder_scores_them(
    name: str, format_: FormatName, tiny: Callable[[str], Path]
) -> None:
    fast, slow = compiled(tiny(name), format_), reference(tiny(name), format_)
    errors: list[float] = []
    for windows in random_rounds(tiny(name), seed=1):
        got, expected = fast.score(windows), slow.score(windows)
        errors += (got - expected).abs().amax(-1).tolist()
    # What falls on the edge of a step of bf16 (cached keys) or INT8 (activations) goes either way and
    # moves what follows by that step; most tokens have none such.
    assert statistics.median(errors) < 1e-3
    assert max(errors) < {"none": 2e-4, "int8_w8a16": 0.05, "int8_w8a8": 1.0}[format_]


@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_many_pages_scores_as_the_torch_decoder_scores_it(
    name: str, tiny: Callable[[str], Path]
) -> None:
    """Scores of several pages are made side by side, and those that are left one by one; in a prompt,
    and behind it for one token."""
    fast, slow = compiled(tiny(name)), reference(tiny(name))
    ids = ids_of(tiny(name), 118)
    for window in (
        Window(0, 0, ids[:117], num_logits=117),
        Window(0, 117, ids[117:], num_logits=1),
    ):
        torch.testing.assert_close(fast.score([window]), slow.score([window]), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("format_", FORMAT_NAMES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_tokens_logits_are_the_same_bits_in_every_window_and_batch(
    format_: FormatName, threads: int, tiny: Callable[[str], Path]
) -> None:
    """So a row is the same alone and among others, and a draft is verified under the law that plain
    decoding would have sampled from."""
    folder = tiny("llama")
    rows = [ids_of(folder, 128, slot) for slot in range(6)]
    alone = compiled(folder, format_)
    expected = [
        torch.cat([alone.score([Window(s, i, rows[s][i : i + 1], 1)]) for i in range(64)])
        for s in range(6)
    ]
    torch.set_num_threads(threads)
    for seed in range(10):
        policy = compiled(folder, format_)
        for windows in random_rounds(folder, seed):
            logits = iter(policy.score(windows))
            for w in windows:
                end = w.start + len(w.token_ids)
                for position in range(end - w.num_logits, end):
                    got = next(logits)
                    assert position >= 64 or torch.equal(got, expected[w.slot][position])


def test_an_engine_of_bf16_weights_is_near_one_of_float32(tiny: Callable[[str], Path]) -> None:
    folder = tiny("llama")
    window = [Window(0, 0, ids_of(folder, 60), num_logits=60)]
    exact = compiled(folder).score(window).log_softmax(-1)
    narrow = compiled(folder, dtype=torch.bfloat16).score(window).log_softmax(-1)
    assert 1e-4 < float((exact - narrow).abs().mean()) < 0.1


def test_a_tree_scores_as_each_of_its_paths(tiny: Callable[[str], Path]) -> None:
    folder = tiny("llama")
    prompt, ids = ids_of(folder, 20), ids_of(folder, 6, seed=1)
    tree = Window(0, 20, ids, num_logits=6, parents=(-1, 0, 0, 1, 2, -1))
    fast, slow = compiled(folder), reference(folder)
    logits = []
    for policy in (fast, slow):
        policy.score([Window(0, 0, prompt, num_logits=0)])
        logits.append(policy.score([tree]))
    torch.testing.assert_close(logits[0], logits[1], atol=2e-4, rtol=0)
    kept = (0, 2, 4)
    fast.compact(0, 20, kept)
    chain = compiled(folder)
    chain.score([Window(0, 0, (*prompt, *(ids[i] for i in kept)), num_logits=0)])
    after = [p.score([Window(0, 23, (5,), num_logits=1)]) for p in (fast, chain)]
    torch.testing.assert_close(after[0], after[1], atol=1e-5, rtol=0)


def test_forks_go_their_own_ways(tiny: Callable[[str], Path]) -> None:
    folder = tiny("llama")
    prompt = ids_of(folder, 37)
    policy = compiled(folder)
    policy.score([Window(0, 0, prompt, num_logits=0)])
    for slot in range(1, 6):
        policy.fork(0, slot, 37)
    ends = [ids_of(folder, 9, seed=slot) for slot in range(6)]
    logits = policy.score([Window(slot, 37, ends[slot], num_logits=9) for slot in range(6)])
    for slot in range(6):
        alone = compiled(folder).score([Window(0, 0, (*prompt, *ends[slot]), num_logits=9)])
        assert torch.equal(alone, logits[9 * slot : 9 * slot + 9])


def test_a_row_that_is_not_finite_spoils_no_other_and_nothing_after_it(
    tiny: Callable[[str], Path],
) -> None:
    folder = tiny("llama untied")

    def spoil(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        if name == "model.embed_tokens.weight":
            tensor[7] = 3e38  # finite, its square is not
        return tensor

    ids = tuple(i for i in ids_of(folder, 40) if i != 7)
    for format_ in FORMAT_NAMES:
        policy = compiled(folder, format_)
        policy.swap(policy.load(packed_weights(folder, format_, change=spoil)))
        alone = policy.score([Window(0, 0, ids, num_logits=1)])
        policy.truncate(0, 0)
        both = policy.score([Window(0, 0, ids, 1), Window(1, 0, (7, 7, 7), 1)])
        assert torch.equal(both[0], alone[0])
        assert not bool(both[1].isfinite().all())
        policy.truncate(0, 0)
        policy.truncate(1, 0)
        again = policy.score([Window(slot, 0, ids, num_logits=1) for slot in range(6)])
        assert all(torch.equal(row, alone[0]) for row in again)


def test_the_cache_takes_its_arithmetic_size_and_stays_under_its_cap(
    tiny: Callable[[str], Path],
) -> None:
    folder = tiny("llama")
    config = read_config(folder)
    a_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert compiled(folder).cache_bytes() == 6 * 128 * a_token * 4
    assert compiled(folder, "int8_w8a8").cache_bytes() == 6 * 128 * a_token * 2
    capped = compiled(folder, max_cached_tokens=190)
    assert capped.cache_bytes() == 192 * a_token * 4
    assert capped.grow(0, 128) and capped.grow(1, 64) and not capped.grow(2, 1)


def test_weights_are_kept_once(tiny: Callable[[str], Path]) -> None:
    """Panels instead of the matrices they are made of; a tied head and embedding are one."""
    for name in ("llama", "llama untied"):
        folder = tiny(name)
        config = read_config(folder)
        shapes = (config.matrix_shapes() | config.other_shapes()).values()
        numbers = sum(torch.Size(shape).numel() for shape in shapes)
        assert 4 * numbers <= compiled(folder).weights.bytes() <= 4.1 * numbers


def test_sizes_that_the_kernels_cannot_run_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "odd", "qwen3", head_dim=24)
    with pytest.raises(KernelsUnavailable, match="head_dim 24"):
        compiled(folder)


def test_the_time_of_every_step_is_told(tiny: Callable[[str], Path]) -> None:
    policy = compiled(tiny("llama"))
    policy.score([Window(0, 0, (1, 2, 3), num_logits=1)])
    assert all(seconds > 0 for seconds in policy.seconds().values())
    assert {"qkv", "attention", "head"} < set(policy.seconds())
