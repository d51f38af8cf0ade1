"""vLLM's plug-in points do what the plug-in takes for granted: one contract a test."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.sample import rejection_sampler

from actors.vllm.patches import apply_patches
from actors.vllm.rounds import Rounds
from actors.vllm.scheduled import Scheduled
from actors.vllm.verifier import ExactSampler, ExactVerifier
from actors.vllm.worker import RolloutWorker
from rollout.engine import Engine, run_to_end
from rollout.errors import InvalidConfig
from rollout.sampling import SamplingParams
from tests.vllm.engines import loaded, requests, spec_of
from tests.vllm.stock_gap import repetitive

PLAIN = SamplingParams(max_new_tokens=20)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return loaded(spec_of(folder))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Scheduled]]]:
    """What the rounds were told of every forward."""
    seen: list[list[Scheduled]] = []
    verify = Rounds.verify

    def told(self: Rounds, batch: Any, logits: torch.Tensor) -> Any:
        rows = sum(1 + len(one.draft_ids) + one.num_padded for one in batch)
        assert logits.shape[0] == rows
        seen.append(list(batch))
        return verify(self, batch, logits)

    monkeypatch.setattr(Rounds, "verify", told)
    yield seen


def test_steps_go_to_the_verifier_where_somebody_drafts_and_else_to_the_sampler(
    engine: Engine, folder: Path, batches: list[list[Scheduled]], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for kind in (ExactSampler, ExactVerifier):
        monkeypatch.setattr(kind, "forward", _noting(called, kind.__name__, kind.forward))
    run_to_end(engine, requests("steps", 4, PLAIN))
    drafting, num = set(called), len(called)
    assert num == len(batches) and drafting == {"ExactVerifier"}
    run_to_end(loaded(spec_of(folder, proposer="none")), requests("steps", 4, PLAIN))
    assert set(called[num:]) == {"ExactSampler"} and len(called) == len(batches)


def _noting(called: list[str], name: str, forward: Any) -> Any:
    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        called.append(name)
        return forward(self, *arguments, **named)

    return noted


def test_the_logits_of_a_request_stand_side_by_side(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its drafted tokens, then the bonus's; with drafts of several lengths in one batch."""
    forward, mixed = ExactVerifier.forward, []

    def checked(self: Any, metadata: Any, *rest: Any, **named: Any) -> Any:
        counts = torch.tensor(metadata.num_draft_tokens)
        ends = (counts + 1).cumsum(0) - 1
        assert metadata.bonus_logits_indices.tolist() == ends.tolist()
        others = sorted(set(range(int(ends[-1]) + 1)) - set(ends.tolist()))
        assert metadata.target_logits_indices.tolist() == others
        mixed.append(len(set(counts.tolist())) > 1)
        return forward(self, metadata, *rest, **named)

    monkeypatch.setattr(ExactVerifier, "forward", checked)
    run_to_end(engine, requests("side", 6, PLAIN))
    assert any(mixed)


def test_a_request_that_joins_by_one_token_is_padded_and_its_padding_never_read(
    engine: Engine, folder: Path, batches: list[list[Scheduled]]
) -> None:
    """A prompt of one cache block and a token: the block is there from the sample before."""
    long = [replace(r, prompt_ids=tuple(range(50, 83))) for r in requests("pad", 4, PLAIN)]
    native = loaded(spec_of(folder, "native", proposer="none"))
    expected = run_to_end(native, long)
    got = [run_to_end(engine, [request])[0] for request in long]
    assert max(one.num_padded for batch in batches for one in batch) == 4
    assert [sample.token_ids for sample in got] == [sample.token_ids for sample in expected]


def test_a_part_of_a_prompt_gives_no_token(folder: Path, batches: list[list[Scheduled]]) -> None:
    split = loaded(spec_of(folder, max_round_tokens=16, num_slots=2, draft_len=2))
    asked = [replace(r, prompt_ids=tuple(range(100, 170))) for r in requests("part", 2, PLAIN)]
    samples = run_to_end(split, asked)
    assert any(one.partial for batch in batches for one in batch)
    assert all(len(sample.token_ids) == 20 for sample in samples)


def test_the_kernel_that_returns_garbage_on_a_cpu_is_never_called(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's verifier expands temperatures over drafted tokens into memory that nobody wrote."""

    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("expand_batch_to_tokens was called")

    stock = loaded(spec_of(folder, "vllm_stock", proposer="ngram"))
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", called)
    filtered = replace(PLAIN, temperature=0.7, top_k=20, top_p=0.9)
    samples = run_to_end(engine, requests("expand", 4, filtered))
    assert sum(sample.counters.verified for sample in samples)
    with pytest.raises(AssertionError, match="was called"):
        run_to_end(stock, repetitive())


def test_stock_speculation_on_a_cpu_records_laws_that_were_not_sampled(folder: Path) -> None:
    """Fails on a vLLM that no longer does: then say so where it is said that it does. In processes of
    their own, since what runs behind it in its process was seen to be wrong as well."""
    off = {}
    for proposer in ("none", "ngram"):
        command = [sys.executable, "-m", "tests.vllm.stock_gap", str(folder), proposer]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        off[proposer] = float(done.stdout.splitlines()[-1])
    assert off["none"] < 1e-4
    assert off["ngram"] > 0.1


def test_the_search_for_kernels_still_stumbles_over_llvmlite() -> None:
    """Fails on a vLLM that no longer needs `hide_llvmlite`."""
    import llvmlite.binding.ffi
    from vllm.triton_utils import dispatcher

    assert hasattr(llvmlite.binding.ffi.lib, "__dict__")
    apply_patches()
    dispatcher._rebind_kernels([])
    with pytest.raises(AttributeError, match="get"):
        dispatcher._rebind_kernels.__wrapped__([])


def test_another_model_runner_is_refused(folder: Path) -> None:
    worker = RolloutWorker()
    worker.model_runner = SimpleNamespace()
    with pytest.raises(InvalidConfig, match="V1 model runner"):
        worker.rollout_install(spec_of(folder), None)  # type: ignore[arg-type]


def test_a_context_that_the_model_has_not_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="context_len=513: the model has 512 positions"):
        loaded(spec_of(folder, context_len=513))


def test_no_name_of_ours_is_one_of_vllms_worker() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    ours = {name for name in dir(RolloutWorker) if name.startswith("rollout_")}
    assert ours and not any(hasattr(Worker, name) for name in ours)
