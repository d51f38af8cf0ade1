"""`lossless` mode: the quantised weights draft over the target's own cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine_spec import EngineSpec, make_engine, pack_folder
from proposers.self_draft import MAX_PENDING, SelfDraftProposer
from quant.formats import FORMATS, FormatName
from rollout.checkpoint import read_config
from rollout.compiled_policy import CompiledPolicy
from rollout.conditions import Condition
from rollout.draft_len import FixedDraftLen
from rollout.engine import run_to_end
from rollout.errors import InvalidConfig
from rollout.law import TargetLaws
from rollout.lossless_policy import LosslessPolicy, TwinWeights
from rollout.native_engine import NativeEngine
from rollout.policy import Policy, Window
from rollout.request import RolloutRequest, RolloutSample
from rollout.sampling import SamplingParams
from rollout.table_policy import random_table
from tests.proposers.model_drafts import model_engine
from tests.rollout.engines import request, run
from tests.rollout.policies import packed_weights

V = 5
TABLE = random_table(V, depth=3, seed=7)
OTHER = random_table(V, depth=3, seed=8)


def sized(num: int, **how: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=num, **how)


def itself(draft_len: int, **options: Any) -> NativeEngine:
    """The draft is the target, so that whatever is refused shows a fault."""
    return model_engine("self_draft", TABLE, TABLE, V, draft_len=draft_len, **options)


# ---- rows as they come and go -------------------------------------------------------------


def test_a_prompt_is_run_by_the_target_alone() -> None:
    engine = itself(4, num_slots=2)
    run(engine, [request("r", (1,) * (MAX_PENDING + 1), sized(6))])
    # its first round is plain: one token, then 4 drafted and one more
    counters = engine.counters()
    assert (counters.rounds, counters.plain, counters.drafted) == (2, 1, 4)


def test_siblings_that_share_a_cached_prompt_are_drafted_for_at_once() -> None:
    engine = itself(4, num_slots=4)
    group = [request(f"r{i}", (1,) * 30, sized(5), prompt_id="p", sample_index=i) for i in range(4)]
    samples = run(engine, group)
    rounds = [samples[f"r{i}"].counters.rounds for i in range(4)]
    assert rounds == [2, 1, 1, 1]


@pytest.mark.parametrize("cap", [48, 60, 90])
def test_under_a_cap_rows_are_preempted_and_drafted_for_as_before(cap: int) -> None:
    engine = itself(3, num_slots=4, context_len=48, max_cached_tokens=cap)
    requests = [request(f"r{i}", (i % V,) * (1 + 3 * i), sized(30)) for i in range(8)]
    samples = run(engine, requests)
    counters = engine.counters()
    assert counters.accepted == counters.verified > 60
    for r in requests:
        assert len(samples[r.id].token_ids) == min(30, 48 - len(r.prompt_ids))
    assert engine.gauges()["count/preemptions"] > 0 or cap == 90


@pytest.mark.parametrize("in_flight", ["interrupt", "finish", "abort"])
def test_a_swap_changes_draft_and_target_together(in_flight: Any) -> None:
    engine = itself(4)
    requests = [request(f"r{i}", (0, 1, i % V), sized(40)) for i in range(12)]
    engine.submit(requests[:6])
    for _ in range(4):
        engine.step()
    engine.load(TwinWeights(OTHER, OTHER), version=1, digest="other", in_flight=in_flight)
    samples = run(engine, requests[6:])
    counters = engine.counters()
    assert counters.accepted == counters.verified > 100
    assert {version for s in samples.values() for version, _ in s.version_spans} >= {1}


def test_rows_at_the_context_limit_end_there() -> None:
    engine = model_engine("self_draft", TABLE, OTHER, V, draft_len=7, context_len=24)
    samples = run(engine, [request(f"r{i}", (1,) * (i + 1), sized(100)) for i in range(8)])
    for i in range(8):
        sample = samples[f"r{i}"]
        assert (len(sample.token_ids), sample.finish_detail) == (24 - (i + 1), "context_len")


# ---- on real weights ----------------------------------------------------------------------


def spec_of(folder: Path, **options: Any) -> EngineSpec:
    fields: dict[str, Any] = {
        "dtype": "float32", "num_slots": 4, "context_len": 64, "draft_len": 6,
    }  # fmt: skip
    return EngineSpec(str(folder), mode="lossless", proposer="self_draft", **fields | options)


def float32_policy(folder: Path) -> CompiledPolicy:
    return CompiledPolicy(
        read_config(folder), FORMATS["none"], num_slots=4, context_len=64, dtype=torch.float32
    )


def emitted(
    spec: EngineSpec, requests: list[RolloutRequest]
) -> tuple[NativeEngine, list[RolloutSample]]:
    engine = make_engine(spec)
    engine.load(engine.prepare(pack_folder(spec)), version=0, digest="folder")
    return engine, run_to_end(engine, requests)


def assert_recorded_as_one_forward_has_it(policy: Policy, samples: list[RolloutSample]) -> None:
    """Bit for bit: one forward over the whole sequence by the weights alone."""
    for sample in samples:
        policy.truncate(0, 0)
        ids, num = (*sample.request.prompt_ids, *sample.token_ids), len(sample.token_ids)
        logits = policy.score([Window(0, 0, ids[:-1], num_logits=num)])
        laws = TargetLaws(logits, [Condition(sample.request.sampling)] * num)
        sampled, full, kept = laws.logprobs(range(num), sample.token_ids)
        assert sample.logprobs == tuple(sampled) and sample.logprobs_full == tuple(full)
        assert sample.kept_mass == tuple(kept)


@pytest.mark.parametrize("format_", ["int8_w8a16", "int8_w8a8"])
@pytest.mark.parametrize("sampling", [sized(24), sized(24, temperature=0.7, top_p=0.9)])
def test_log_probabilities_are_those_of_full_precision_bit_for_bit(
    format_: FormatName, sampling: SamplingParams, tiny_llama: Path
) -> None:
    spec = spec_of(tiny_llama, format=format_, smoothing=0.0)  # some drafts are refused
    requests = [request(f"r{i}", tuple(range(5, 8 + 5 * i)), sampling) for i in range(6)]
    engine, samples = emitted(spec, requests)
    plain = float32_policy(tiny_llama)
    plain.swap(plain.load(packed_weights(tiny_llama)))
    assert_recorded_as_one_forward_has_it(plain, samples)
    counters = engine.counters()
    assert 0.5 * counters.verified < counters.accepted < counters.verified
    assert {sample.mode for sample in samples} == {"lossless"}


@pytest.mark.parametrize("draft_len", [1, 2, 4, 8])
def test_drafts_of_the_target_itself_are_accepted_whole_on_a_real_forward(
    draft_len: int, tiny_llama: Path
) -> None:
    # case 71
    target = float32_policy(tiny_llama)
    twins = LosslessPolicy(target, target.sharing_cache(FORMATS["none"]), dict)
    engine = NativeEngine(
        twins, SelfDraftProposer(twins), FixedDraftLen(draft_len), mode="lossless"
    )
    engine.load(twins.load(packed_weights(tiny_llama)), version=0, digest="twins")
    laws = [sized(20), sized(20, temperature=0.0), sized(20, temperature=0.6, top_k=50)]
    run(engine, [request(f"r{i}", range(5, 8 + 4 * i), laws[i % 3]) for i in range(6)])
    counters = engine.counters()
    assert counters.accepted == counters.verified > 50


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_greedy_tokens_are_those_of_plain_full_precision(kernels: Any, tiny_llama: Path) -> None:
    requests = [
        request(f"r{i}", tuple(range(5, 8 + 5 * i)), sized(30, temperature=0.0)) for i in range(6)
    ]
    spec = spec_of(tiny_llama, kernels=kernels)
    engine, samples = emitted(spec, requests)
    _, plain = emitted(replace(spec, mode="full", format="none", proposer="none"), requests)
    assert [s.token_ids for s in samples] == [s.token_ids for s in plain]
    assert engine.counters().accepted > 100


def test_the_quickstarts_model_drafts_for_itself(smollm2: Path) -> None:
    spec = spec_of(smollm2, num_slots=2, draft_len=8)
    requests = [request(f"r{i}", tuple(range(100, 110 + i)), sized(16)) for i in range(2)]
    engine, samples = emitted(spec, requests)
    assert isinstance(engine.policy, LosslessPolicy)
    assert_recorded_as_one_forward_has_it(engine.policy.target, samples)
    counters = engine.counters()
    assert counters.accepted > 0.5 * counters.verified > 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "none"}, "name their format"),
        ({"proposer": "history"}, "set proposer=self_draft, or mode=full"),
        ({"mode": "full", "format": "none"}, "set mode=lossless"),
    ],
)
def test_what_cannot_draft_for_itself_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        replace(EngineSpec("model", mode="lossless", proposer="self_draft"), **options)


def test_an_actors_update_is_full_precision_in_lossless_mode(tiny_llama: Path) -> None:
    packed = pack_folder(spec_of(tiny_llama))
    assert {tensor.dtype for tensor in packed.values()} == {torch.float32}
