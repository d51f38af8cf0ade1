"""The compiled linear maps against torch, and what happens where they cannot be built."""

import subprocess
from pathlib import Path

import pytest
import torch

from quant.formats import FORMATS, FormatName
from quant.int8 import LIMIT, Int8Weight, dequantise_weight, quantise_weight
from rollout import compiled_policy, kernels
from rollout.checkpoint import read_config
from rollout.compiled_weights import Packer
from rollout.errors import KernelsUnavailable
from rollout.kernels import Kernels, Model, find_kernels, pointer
from rollout.policy import Window
from tests.rollout.policies import most_of_16_bits, packed_weights, product_of_whole_numbers

SHAPES = [(16, 16), (48, 33), (100, 7), (5, 130), (960, 576)]
"""[rows, cols]: whole panels and parts of one, odd and even widths."""


INSTRUCTIONS = {
    "native": None,
    "AVX-512": ("__AVX512F__", "__AVX512BW__"),
    "AVX-512 VNNI": ("__AVX512F__", "__AVX512BW__", "__AVX512VNNI__"),
}
"""AVX-512 lane by lane (avx512/immintrin.h), so that it is tested where it does not run."""


@pytest.fixture(scope="session", params=INSTRUCTIONS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    macros = INSTRUCTIONS[request.param]
    if macros is None:
        return find_kernels()
    path = tmp_path_factory.mktemp("avx512") / "kernels.so"
    flags = ["-O0", *(f for f in kernels.FLAGS if not f.startswith(("-march", "-O")))]
    include = Path(__file__).parent / "avx512"
    kernels.build("g++", path, [*flags, f"-I{include}", *(f"-D{macro}=1" for macro in macros)])
    made = kernels.load(path)
    assert made.instructions == request.param
    return made


def linear(
    library: Kernels,
    matrix: object,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    int8_inputs: bool,
    threads: int = 1,
) -> torch.Tensor:
    packer = Packer(library)
    packed = packer.linear(matrix, bias, int8_inputs=int8_inputs)  # type: ignore[arg-type]
    y = torch.full((x.shape[0], packed.rows), torch.nan)
    library.library.er_linear(packed, pointer(x), x.shape[0], pointer(y), threads)
    return y


def made(rows: int, cols: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + cols)
    return (
        torch.randn(rows, cols, generator=generator),
        torch.randn(tokens, cols, generator=generator),
        torch.randn(rows, generator=generator),
    )


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("tokens", range(1, 15))
def test_every_kind_of_map_computes_what_torch_computes(
    rows: int, cols: int, tokens: int, library: Kernels
) -> None:
    weight, x, bias = made(rows, cols, tokens)
    narrow, quantised = weight.bfloat16(), quantise_weight(weight, torch.float32)
    for matrix, int8_inputs, expected in (
        (weight, False, x.double() @ weight.double().T),
        (narrow, False, x.double() @ narrow.double().T),
        (quantised, False, product_of_whole_numbers(quantised, x, most=most_of_16_bits(cols))),
        (quantised, True, product_of_whole_numbers(quantised, x, most=LIMIT)),
    ):
        for b in (None, bias):
            y = linear(library, matrix, x, b, int8_inputs=int8_inputs)
            at_most = 1e-6 if matrix is quantised else 1e-5 * cols**0.5
            torch.testing.assert_close(
                y.double(),
                expected.double() + (0 if b is None else b.double()),
                atol=at_most, rtol=1e-6,
            )  # fmt: skip


@pytest.mark.parametrize("int8_inputs", [False, True])
def test_a_token_has_the_same_result_in_every_batch_and_with_every_number_of_threads(
    int8_inputs: bool, library: Kernels
) -> None:
    weight, x, bias = made(100, 130, 40)
    for matrix in (weight, quantise_weight(weight, torch.float32)):
        inputs = int8_inputs and matrix is not weight
        whole = linear(library, matrix, x, bias, int8_inputs=inputs)
        for first, last in [(0, 1), (3, 5), (7, 20), (0, 40), (39, 40)]:
            for threads in (1, 2, 3):
                part = x[first:last].contiguous()
                some = linear(library, matrix, part, bias, int8_inputs=inputs, threads=threads)
                assert torch.equal(some, whole[first:last])


def test_a_token_that_is_not_finite_shows_and_touches_no_other(library: Kernels) -> None:
    weight, x, _ = made(32, 50, 3)
    matrix = quantise_weight(weight, torch.float32)
    for at in (5, 49):  # among whole lanes, and behind them
        for bad in (torch.inf, -torch.inf, torch.nan):
            broken = x.clone()
            broken[1, at] = bad
            for int8_inputs in (False, True):
                y = linear(library, matrix, broken, None, int8_inputs=int8_inputs)
                assert not bool(y[1].isfinite().any())
                assert bool(y[[0, 2]].isfinite().all())


def test_activations_far_from_one_lose_nothing(library: Kernels) -> None:
    """All of a token at one magnitude, tiny or huge, and a token of zeros, or of what is as good."""
    weight, x, _ = made(32, 64, 3)
    quantised = quantise_weight(weight, torch.float32)
    for int8_inputs in (False, True):
        y = linear(library, quantised, x, None, int8_inputs=int8_inputs)
        for factor in (1e-30, 1e30):
            scaled = linear(library, quantised, x * factor, None, int8_inputs=int8_inputs)
            torch.testing.assert_close(scaled / factor, y)
        for factor in (0, 1e-44, 1e-40):
            nothing = linear(library, quantised, x * factor, None, int8_inputs=int8_inputs)
            assert bool((nothing == 0).all())


@pytest.mark.parametrize("cols", [130, 576, 8192])
def test_the_largest_sum_of_whole_numbers_fits_and_all_its_bits_are_used(
    cols: int, library: Kernels
) -> None:
    """Every weight and activation at its limit, so that one step more would overflow."""
    weight = quantise_weight(torch.ones(16, cols), torch.float32)
    y = linear(library, weight, torch.full((1, cols), 3.0), None, int8_inputs=False)
    torch.testing.assert_close(y, torch.full((1, 16), 3.0 * cols), rtol=1e-6, atol=0.0)
    small = torch.full((1, cols), 3.0 / most_of_16_bits(cols))
    small[0, 0] = 3.0
    y = linear(library, weight, small, None, int8_inputs=False)
    torch.testing.assert_close(y, torch.full((1, 16), float(small.sum())), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_an_embedding_is_read_as_it_was_packed(rows: int, cols: int, library: Kernels) -> None:
    weight = made(rows, cols, 1)[0]
    for matrix in (weight, weight.bfloat16(), quantise_weight(weight, torch.float32)):
        packer = Packer(library)
        model = Model(hidden=cols, embedding=packer.linear(matrix, None, int8_inputs=False))
        ids, y = torch.arange(rows, dtype=torch.int32), torch.empty(rows, cols)
        library.library.er_embed(model, pointer(ids), rows, pointer(y))
        quantised = isinstance(matrix, Int8Weight)
        assert torch.equal(y, dequantise_weight(matrix) if quantised else matrix.float())  # type: ignore[arg-type, union-attr]


def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []

    def compile_(command: list[str], **_: object) -> None:
        compiled.append(command)
        Path(command[-1]).write_bytes(b"library")

    monkeypatch.setattr(subprocess, "run", compile_)
    assert kernels.build("g++", tmp_path / "kernels" / "key.so")
    assert not kernels.build("g++", tmp_path / "kernels" / "key.so")
    assert len(compiled) == 1
    assert (tmp_path / "kernels" / "key.so").read_bytes() == b"library"


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_compiler_that_fails_is_named_and_leaves_nothing(compiler: str, tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match=compiler):
        kernels.build(compiler, tmp_path / "key.so")
    assert not list(tmp_path.glob("*.so"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KernelsUnavailable, match="file"):
        kernels.build("g++", tmp_path / "file" / "kernels" / "key.so")


def test_another_processor_compiler_or_source_is_another_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {kernels._key("g++"), kernels._key("c++")}
    monkeypatch.setattr(kernels, "FLAGS", ("-O0",))
    assert len(keys | {kernels._key("g++")}) == 3


@pytest.mark.parametrize("format_", ["none", "int8_w8a16", "int8_w8a8"])
def test_a_forward_is_the_same_on_every_set_of_instructions(
    format_: FormatName, library: Kernels, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, rotation, attention and all: what the lanes of either width compute is near equal. The
    longer window fills several pages that are scored side by side, and one more."""
    windows = [Window(0, 0, tuple(range(3, 80)), 77), Window(1, 0, (5, 6, 7), 3)]
    logits = []
    for made in (find_kernels(), library):
        monkeypatch.setattr(compiled_policy, "find_kernels", lambda made=made: made)
        policy = compiled_policy.CompiledPolicy(
            read_config(tiny_llama), FORMATS[format_], num_slots=2, context_len=96,
            dtype=torch.float32,
        )  # fmt: skip
        policy.swap(policy.load(packed_weights(tiny_llama, format_)))
        logits.append(policy.score(windows))
    errors = (logits[0] - logits[1]).abs().amax(-1)
    assert float(errors.median()) < 1e-4
    assert float(errors.max()) < {"none": 1e-4, "int8_w8a16": 0.05, "int8_w8a8": 1.0}[format_]
