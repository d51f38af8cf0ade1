"""vLLM's own speculation by name, drafted by vLLM and verified here: the law stays the target's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.vllm.engine import VllmEngine
from actors.weights import WeightPublisher
from rollout.checkpoint import read_weights
from rollout.engine import run_to_end
from rollout.errors import InvalidWeights
from rollout.request import SpecCounters
from rollout.sampling import SamplingParams
from tests.tiny_model import tiny_folder
from tests.vllm.eagle_head import head_folder
from tests.vllm.engines import HEADS, load, loaded, requests, spec_of
from tests.vllm.test_engine import mixed, same

PLAIN = SamplingParams(max_new_tokens=24)
LIKES_0 = replace(PLAIN, logit_bias=((0, 7.0),))
"""About half of the tokens are 0."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Targets by architecture."""
    root = tmp_path_factory.mktemp("models")
    return {name: tiny_folder(root / name, name, **HEADS) for name in ("llama", "qwen3")}


def drafter(proposer: str, target: Path, path: Path, scale: float) -> dict[str, Any]:
    """Of an engine that drafts with a head, or with the target itself."""
    if proposer == "vllm_draft_model":
        return {"proposer": proposer, "draft_model": str(target)}
    method = proposer.removeprefix("vllm_")
    return {
        "proposer": proposer,
        "draft_model": str(head_folder(path, target, method, scale=scale)),
    }


@pytest.mark.parametrize(
    ("proposer", "architecture"),
    [
        ("vllm_draft_model", "llama"),
        ("vllm_eagle", "llama"),
        ("vllm_eagle3", "llama"),
        ("vllm_eagle3", "qwen3"),
    ],
)
def test_every_law_gives_the_native_engines_samples_whoever_drafts(
    proposer: str, architecture: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    target = folders[architecture]
    fields = drafter(proposer, target, tmp_path / "head", 0.2)
    engine = loaded(spec_of(target, **fields))
    expected = run_to_end(loaded(spec_of(target, "native", proposer="none")), mixed("a"))
    got = run_to_end(engine, mixed("a"), max_rounds=400)
    assert [one.request.id for one, other in zip(got, expected) if not same(one, other)] == []
    counters = engine.counters()
    assert counters.drafted >= counters.verified > 100
    if proposer == "vllm_draft_model":  # the target's own most probable tokens
        assert counters.accepted > 50
    assert isinstance(engine, VllmEngine)
    engine.close()


@pytest.mark.parametrize("proposer", ["vllm_eagle", "vllm_eagle3"])
def test_accepted_drafts_of_a_head_are_counted_by_position_and_survive_an_update(
    proposer: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    target = folders["llama"]
    engine = loaded(spec_of(target, **drafter(proposer, target, tmp_path / "head", 0.0)))
    native = loaded(spec_of(target, "native", proposer="none"))
    asked = requests("zeros", 8, LIKES_0)
    other = {name: tensor * 1.1 for name, tensor in read_weights(target).items()}
    for version in (1, 2):
        got = run_to_end(engine, asked)
        assert all(map(same, got, run_to_end(native, asked)))
        for one in (engine, native):
            load(one, spec_of(target, "vllm" if one is engine else "native"), other, version)
            one.step()
    total = SpecCounters()
    for sample in got:
        total.add(sample.counters)
    assert len(total.reached) == len(total.accepted_by_position) == 4
    assert sum(total.accepted_by_position) == total.accepted > 30
    assert total.reached[0] == sum(sample.counters.rounds for sample in got) - total.plain
    assert total.reached == sorted(total.reached, reverse=True)
    assert isinstance(engine, VllmEngine)
    engine.close()


def test_weights_of_the_draft_model_travel_with_an_update(tmp_path: Path) -> None:
    """A draft model that is another policy is refused nearly always; as the target's twin seldom."""
    target, stranger = (tiny_folder(tmp_path / f"{seed}", seed=seed, **HEADS) for seed in (0, 1))
    spec = spec_of(target, proposer="vllm_draft_model", draft_model=str(stranger))
    engine, publisher = loaded(spec), WeightPublisher(spec, [[1, 2, 3]])
    weights, asked = read_weights(target), requests("twin", 8, replace(PLAIN, temperature=0.3))
    expected = run_to_end(loaded(spec_of(target, "native", proposer="none")), asked)
    rates = []
    for version, draft in enumerate((None, weights, None), start=1):  # the last one is sent again
        update = publisher.pack(version, weights.items(), draft)
        prepared = engine.prepare(update.tensors())
        engine.load(prepared, version=version, digest=update.digest, in_flight="interrupt")
        engine.step()
        samples = run_to_end(engine, asked)
        assert all(map(same, samples, expected))
        counts = [sample.counters for sample in samples]
        rates.append(sum(c.accepted for c in counts) / sum(c.verified for c in counts))
    assert rates[0] < 0.05 and min(rates[1:]) > 0.2
    name = "model.norm.weight"
    bad = {**weights, name: weights[name] * torch.inf}
    with pytest.raises(InvalidWeights, match=name):
        publisher.pack(4, weights.items(), bad)
    torn = {"draft." + name: tensor for name, tensor in weights.items() if "q_proj" not in name}
    with pytest.raises(InvalidWeights, match="qkv_proj in part"):
        engine.prepare({**weights, **torn})
    assert engine.version == 3 and all(map(same, run_to_end(engine, asked), expected))
    assert isinstance(engine, VllmEngine)
    engine.close()


def test_draft_weights_are_refused_where_no_model_of_vllms_drafts(folders: dict[str, Path]) -> None:
    target = folders["llama"]
    weights, engine = read_weights(target), loaded(spec_of(target, proposer="none"))
    with pytest.raises(InvalidWeights, match="weights of a draft model for proposer=none"):
        engine.prepare({**weights, "draft.model.norm.weight": weights["model.norm.weight"]})
