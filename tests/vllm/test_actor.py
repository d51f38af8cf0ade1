"""A rollout actor on vLLM, as a plain object: begin, commit, submit, collect."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.rollout_actor import RolloutActor
from actors.vllm.support import installed_version
from actors.weights import WeightPublisher, as_tensor
from rollout.checkpoint import read_weights
from rollout.engine import run_to_end
from rollout.errors import InvalidWeights
from rollout.packing import digest
from rollout.request import RolloutSample
from rollout.sampling import SamplingParams
from tests.vllm.engines import loaded, requests, spec_of

PROBE = [list(range(30, 44)), list(range(60, 90, 3))]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def actor(folder: Path) -> RolloutActor:
    return RolloutActor("a", spec_of(folder), 1, PROBE)


def collected(actor: RolloutActor, num: int) -> dict[str, RolloutSample]:
    samples: dict[str, RolloutSample] = {}
    while len(samples) < num:
        got = actor.collect(WAIT_S).samples
        assert got, f"{len(samples)} of {num} samples in {WAIT_S} s"
        samples |= {sample.request.id: sample for sample in got}
    return samples


def test_an_actor_publishes_measures_drift_and_answers(actor: RolloutActor, folder: Path) -> None:
    publisher = WeightPublisher(spec_of(folder), PROBE)
    weights, other = read_weights(folder), read_weights(folder)
    other = {name: tensor * 1.1 for name, tensor in other.items()}
    asked = requests("actor", 10, SamplingParams(max_new_tokens=16))
    for version, named in enumerate((weights, other, weights)):
        begun = actor.begin(publisher.pack(version, named.items()), WAIT_S)
        assert begun.weights_bytes and begun.kernels == {"blocks": f"vLLM {installed_version()}"}
        reference = publisher.reference(named.items())
        committed = actor.commit(version, reference, "interrupt", WAIT_S)
        assert abs(committed.drift.kl) < 1e-6 and committed.drift.abs_logp < 1e-4
    wrong = publisher.reference(other.items())
    begun = actor.begin(publisher.pack(3, weights.items()), WAIT_S)
    assert actor.commit(3, wrong, "interrupt", WAIT_S).drift.kl > 1e-3  # control
    actor.submit(asked)
    samples = collected(actor, len(asked))
    native = loaded(spec_of(folder, "native", proposer="none"))
    for sample in run_to_end(native, asked):
        assert samples[sample.request.id].token_ids == sample.token_ids
        assert samples[sample.request.id].version_spans == ((3, 16),)


def test_a_broken_update_is_refused_by_the_actor(actor: RolloutActor, folder: Path) -> None:
    publisher = WeightPublisher(spec_of(folder), PROBE)
    update = publisher.pack(9, read_weights(folder).items())
    name = "model.norm.weight"
    spoilt = np.full_like(update.arrays[name], np.nan)
    arrays = update.arrays | {name: spoilt}
    found = digest({n: as_tensor(array, update.dtypes[n]) for n, array in arrays.items()})
    with pytest.raises(InvalidWeights, match=name):
        actor.begin(replace(update, arrays=arrays, digest=found), WAIT_S)


def test_what_one_actor_remembers_is_told_to_another(actor: RolloutActor) -> None:
    assert actor.info().remembers
    size, arrays = actor.export_history("all", WAIT_S)
    assert size and arrays
    actor.merge_history(WAIT_S, arrays)
