"""The ladder samples with the engine that a run's actors have."""

from pathlib import Path

from actors.engine_spec import EngineSpec
from recipes.ladder import Ladder
from rollout.checkpoint import read_tokenizer, read_weights
from rollout.sampling import SamplingParams
from tests.rollout.engines import request
from tests.tiny_model import tiny_folder


def test_its_rungs_emit_tokens_of_the_tokenizer_only(tmp_path: Path) -> None:
    # case 87: the head is 200 rows wider, and random, so padded rows have as much mass as others
    num_tokens = len(read_tokenizer(tiny_folder(tmp_path / "narrow")))
    folder = tiny_folder(tmp_path / "wide", vocab_size=num_tokens + 200)
    spec = EngineSpec(str(folder), dtype="float32", context_len=64)
    ladder = Ladder(spec, read_weights(folder), [(5, 6, 7)], history=[])
    sampling = SamplingParams(max_new_tokens=16, temperature=2.0)
    requests = [request(f"r{i}", (5,), sampling, sample_index=i) for i in range(8)]
    for weights in ("full precision", "quantised"):
        for speculative in (False, True):
            _, samples = ladder._run(weights, speculative, requests)
            assert [sample.request.id for sample in samples] == [r.id for r in requests]
            assert max(token for sample in samples for token in sample.token_ids) < num_tokens


def test_in_lossless_mode_its_rung_is_of_full_precision_and_counts_both_weights(
    tiny_llama: Path,
) -> None:
    spec = EngineSpec(
        str(tiny_llama),
        mode="lossless",
        proposer="self_draft",
        draft_len=2,  # whether drafts pay is decided by the clock
        dtype="float32",
        context_len=64,
    )
    ladder = Ladder(spec, read_weights(tiny_llama), [(5, 6, 7)], history=[])
    sampling = SamplingParams(max_new_tokens=16)
    rungs = ladder.measure(
        [request(f"r{i}", (5, 6), sampling, sample_index=i) for i in range(4)], 1
    )
    by_name = {rung.name: rung for rung in rungs}
    lossless = by_name["speculative full precision"]
    assert lossless.acceptance_rate is not None and lossless.acceptance_rate > 0.5
    assert lossless.drift_kl < 1e-6 < by_name["plain quantised"].drift_kl
    assert lossless.weights_bytes > by_name["plain quantised"].weights_bytes
    assert lossless.kernel == by_name["plain full precision"].kernel
