"""Options: documented, checked, refused with a way out."""

import os
from pathlib import Path

import pytest

from recipes.config import (
    RunConfig,
    cluster_config,
    documented_options,
    engine_spec,
    load_config,
    resumed_config,
    to_yaml,
)
from rollout.errors import InvalidConfig

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
VLLM_ON_GPU = ("engine=vllm", "quant=int8_w8a8", "model.device=cuda")


def test_every_option_has_a_sentence() -> None:
    without = [name for name, _, doc, _ in documented_options() if not doc.endswith((".", ";"))]
    assert without == []


def test_the_quickstart_recipe_is_valid() -> None:
    assert load_config(QUICKSTART).name == "quickstart"


def test_overrides_win_over_the_recipe() -> None:
    config = load_config(QUICKSTART, ["steps=3", "learner.clip=0.1", "proposer=ngram"])
    assert (config.steps, config.learner.clip, config.proposer) == (3, 0.1, "ngram")


def test_the_resolved_config_loads_as_itself(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, ["draft.length=3"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("proposr=none", "proposer"),
        ("learner.learing_rate=1", "learner.learning_rate"),
        ("learning_rate=1", "learner.learning_rate"),
        ("sampling.temprature=1", "sampling.temperature"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(override: str, nearest: str) -> None:
    with pytest.raises(InvalidConfig, match=f"did you mean {nearest}"):
        load_config(QUICKSTART, [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mode=full", "quant=int8_w8a8"], "set quant=none or mode=quantised"),
        (["quant=none"], "nothing is quantised"),
        (["mode=lossless", "quant=none"], "name a format, or set mode=full"),
        (["mode=lossless", "proposer=ngram"], "drop proposer, or set mode=full quant=none"),
        (["proposer=self_draft"], "set mode=lossless"),
        (["mode=lossless", "draft.length=17"], r"lower draft\.length or raise draft\.max_length"),
        (["mode=lossless", "draft.model=m"], "set proposer=draft_model or drop"),
        (["draft.length=9"], r"lower draft\.length or raise draft\.max_length"),
        (["proposer=none", "draft.length=2"], "nobody drafts"),
        (["mtp.path=head.safetensors"], "the head would not be used; set proposer=mtp or mixture"),
        (["proposer=mtp", "mtp.online=false"], r"without mtp\.path"),
        (["proposer=mtp", "mtp.depths=0"], r"mtp\.depths=0: expected at least 1"),
        (["quant=int3"], "quant=int3: expected one of auto, int8_w8a16, int8_w8a8, none"),
        (["engine=tgi"], "engine=tgi: expected one of native, vllm"),
        (["engine=vllm", "quant=int8_w8a16"], "engine=vllm with format=int8_w8a16"),
        (["engine=vllm", "quant=int8_w8a8", "model.kernels=torch"], "kernels=torch"),
        (
            ["proposer=vllm_mtp"],
            "have no MTP layers for vLLM to draft with; set proposer=vllm_eagle3",
        ),
        (["proposer=vllm_eagle", "engine=vllm"], r"proposer=vllm_eagle without draft\.model"),
        (["actors.tensor_parallel=2"], "tensor_parallel=2 with engine=native: only engine=vllm"),
        (["actors.tensor_parallel=0"], "actors.tensor_parallel=0: expected at least 1"),
        (["actors.weight_transfer=rdma"], "expected one of shared_memory, nccl, ipc"),
        (["actors.weight_transfer=nccl"], "weight_transfer=nccl with engine=native"),
        (
            ["actors.weight_transfer=nccl", "engine=vllm", "quant=int8_w8a8"],
            "weight_transfer=nccl with device=cpu",
        ),
        (
            ["actors.weight_transfer=ipc", *VLLM_ON_GPU, "actors.num=2"],
            "weight_transfer=ipc with num_actors=2",
        ),
        (["steps=0"], "steps=0: expected at least 1"),
        (["steps=many"], "steps"),
        (["sampling.temperature=0"], "one rollout"),
        (["sampling.top_p=0"], r"top_p=0\.0: expected a number in \(0, 1\]"),
        (["sampling.min_tokens=99"], "at most max_new_tokens"),
        (["actors.num=0"], "actors.num=0"),
        (["model.device=cuda", "model.kernels=compiled"], "or set model.device=cpu"),
        (["model.device=cuda", "actors.max_cached_tokens=999"], "or set model.device=cpu"),
        (["steps"], "expected key=value"),
    ],
)
def test_contradictions_and_bad_values_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        load_config(QUICKSTART, overrides)


def test_a_missing_recipe_and_a_missing_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no such recipe"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bare.yaml").write_text("steps: 3\n")
    with pytest.raises(InvalidConfig, match="name"):
        load_config(tmp_path / "bare.yaml")


def test_defaults_alone_make_a_run() -> None:
    assert isinstance(load_config(None, ["name=x"]), RunConfig)


@pytest.mark.parametrize("override", ["seed=1", "learner.group_size=4", "task.max_operand=9"])
def test_going_on_may_not_change_what_the_samples_are(override: str) -> None:
    with pytest.raises(InvalidConfig, match="cannot go on with"):
        resumed_config(QUICKSTART, [override])
    assert resumed_config(QUICKSTART, ["steps=99"]).steps == 99


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["draft.tree_nodes=-1"], "expected at least 0"),
        (["draft.tree_nodes=8", "proposer=ngram"], "needs proposer=history"),
        (["draft.tree_nodes=8", "draft.length=3"], "draft.length=null"),
        (["draft.verification=tree"], "expected one of block, position"),
    ],
)
def test_options_of_trees_and_verification_that_contradict_are_refused(
    overrides: list[str], said: str
) -> None:
    with pytest.raises(InvalidConfig, match=said):
        load_config(None, ["name=t", *overrides])


def test_options_of_trees_and_verification_reach_the_engine() -> None:
    config = load_config(None, ["name=t", "draft.tree_nodes=8", "draft.verification=position"])
    spec = engine_spec(config, Path("model"))
    assert (spec.tree_nodes, spec.verification) == (8, "position")


def test_a_split_model_reaches_the_engine() -> None:
    words = ["engine=vllm", "quant=int8_w8a8", "actors.tensor_parallel=2"]
    assert engine_spec(load_config(QUICKSTART, words), Path("m")).tensor_parallel == 2
    assert engine_spec(load_config(QUICKSTART), Path("m")).tensor_parallel == 1


def test_a_way_for_weights_reaches_the_fleet_and_no_engine_beside_it() -> None:
    config = load_config(QUICKSTART, ["actors.weight_transfer=nccl", *VLLM_ON_GPU])
    assert cluster_config(config, Path("m")).engine.weight_transfer == "nccl"
    assert engine_spec(config, Path("m")).weight_transfer == "shared_memory"


def test_the_device_reaches_the_engine() -> None:
    assert engine_spec(load_config(None, ["name=t"]), Path("model")).device == "cpu"
    config = load_config(None, ["name=t", "model.device=cuda"])
    assert engine_spec(config, Path("model")).device == "cuda"


@pytest.mark.parametrize(
    ("overrides", "format_"),
    [
        ([], "int8_w8a16"),
        (["engine=vllm"], "int8_w8a8"),
        (["engine=vllm", "mode=full"], "none"),
        (["mode=full"], "none"),
        (["quant=int8_w8a8"], "int8_w8a8"),
    ],
)
def test_a_format_that_nobody_names_is_one_that_the_engine_runs(
    overrides: list[str], format_: str
) -> None:
    assert engine_spec(load_config(QUICKSTART, overrides), Path("model")).format == format_


@pytest.mark.parametrize(
    ("cores", "overrides", "spin"),
    [
        (4, ["actors.cpus=3"], True),
        (4, ["actors.cpus=4"], False),  # the learner's is the fifth
        (4, ["actors.cpus=2", "actors.num=2"], False),
        (4, ["actors.cpus=2", "learner.threads=3"], False),
        (4, ["actors.cpus=3", "actors.address=auto"], False),  # nobody knows whose those are
        (4, ["actors.cpus=3", "engine=native"], False),
    ],
)
def test_threads_spin_on_cores_of_their_own_only(
    cores: int, overrides: list[str], spin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    config = load_config(QUICKSTART, ["engine=vllm", *overrides])
    assert cluster_config(config, Path("model")).threads_spin is spin


def test_lossless_alone_names_who_drafts_in_what_format_and_how_far() -> None:
    config = load_config(QUICKSTART, ["mode=lossless"])
    spec = engine_spec(config, Path("model"))
    assert (spec.mode, spec.proposer, spec.format) == ("lossless", "self_draft", "int8_w8a16")
    assert (spec.target_format, spec.max_draft_len) == ("none", 16)
    other = engine_spec(load_config(QUICKSTART), Path("model"))
    assert (other.proposer, other.max_draft_len) == ("history", 8)


def test_a_draft_model_reaches_the_engine_as_a_folder() -> None:
    words = ["name=t", "proposer=draft_model", "draft.model=some/folder"]
    spec = engine_spec(load_config(None, words), Path("model"))
    assert (spec.proposer, spec.draft_model) == ("draft_model", str(Path("some/folder").resolve()))
