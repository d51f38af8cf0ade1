"""New weights into a running vLLM: a backend of its weight-transfer API, over shared memory.

    staged = write_update(tensors)           sender: packed once (actors/vllm/layout.py)
    check_staged(engine, staged)             begin: what can fail is tried, nothing is touched
    swap_weights(engine, staged, version)    commit, between two steps

vLLM's layerwise reload cannot be undone once it has begun, so a worker looks at everything first:
digest, names, whole modules, dtypes, shapes, values. An update that it refuses leaves the weights in
force as they are; an error after that is a fault of the engine, which must be replaced.

A swap drops every cached key and value and makes rows in flight compute theirs again. vLLM can also go
on with the old ones (`pause_generation(mode="keep", clear_cache=False)`): logits of neither policy, so
that is not offered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.engine.llm_engine import LLMEngine

from actors.vllm.layout import QUANTIZATION, check_update, layout
from actors.vllm.patches import apply_patches
from actors.vllm.shared_update import StagedUpdate, map_update, read_update, write_update
from quant.formats import FormatName
from rollout.checkpoint import read_config
from rollout.errors import InvalidConfig, InvalidWeights

__all__ = [
    "BACKEND",
    "Probe",
    "SharedMemoryTransfer",
    "WeightTransferWorker",
    "check_staged",
    "probe_logprobs",
    "put_in_force",
    "register",
    "swap_weights",
    "write_update",
]

BACKEND = "exact_rollout_shm"


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing has to be set up."""


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):
    """Where an update lies."""

    path: str


class SharedMemoryTransfer(WeightTransferEngine[NoInit, SharedUpdate]):
    """The receiving side, in every worker; `self.model` is the target, or the draft model for the
    length of a draft update."""

    init_info_cls = NoInit
    update_info_cls = SharedUpdate
    _checked: dict[str, tuple[int, int, int]]
    """The file that was found good last, by the model that it is for."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._checked = {}

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        """Touches nothing: the reload begins when an update has been read and found good."""

    def check(self, path: Path) -> None:
        """Reads an update for the model it is for; once, since nobody writes to the file. Raises
        InvalidWeights."""
        model, identity = self.model_config.model, _identity(path)
        if self._checked.get(model) == identity:
            return
        config = read_config(Path(model))
        check_update(read_update(path), layout(config, self._format(), self.model_config.dtype))
        self._checked[model] = identity

    def receive_weights(self, update_info: SharedUpdate) -> None:
        path = Path(update_info.path)
        self.check(path)
        tensors, _ = map_update(path)
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        assert loaded, "vLLM took none of the tensors that its own names were checked against"

    def finish_weight_update(self) -> None:
        """Nothing is left to do: an update is finished when it has been received."""

    def shutdown(self) -> None:
        pass

    def _format(self) -> FormatName:
        quantization = self.model_config.quantization
        if quantization is None:
            return "none"
        found = getattr(self.model_config.hf_config, "quantization_config", None)
        if quantization == "compressed-tensors" and _groups(found) == _groups(QUANTIZATION):
            return "int8_w8a8"
        raise InvalidConfig(
            f"{self.model_config.model}: quantised as {quantization}; weights can be sent to a model "
            "in full precision or to a checkpoint that actors/vllm/layout.py wrote"
        )


def _identity(path: Path) -> tuple[int, int, int]:
    """Of a file, whatever its path leads to later. Raises InvalidWeights for one that is gone."""
    try:
        stat = path.stat()
    except OSError as error:
        raise InvalidWeights(f"{path}: no weight update: {error}") from error
    return stat.st_dev, stat.st_ino, stat.st_ctime_ns


def _groups(quantization: Any) -> Any:
    return (quantization or {}).get("config_groups")


class WeightTransferWorker:
    """What a worker extension adds: updates can be tried before they are made."""

    weight_transfer_engine: SharedMemoryTransfer
    _set_draft_weight_update_target: Callable[[], None]

    def check_weight_update(self, path: str, draft: bool = False) -> str | None:
        """What is wrong with an update, of the target or of the draft model, as text, since exceptions
        of other processes lose their type; None if nothing."""
        try:
            if draft:
                self._set_draft_weight_update_target()
            self.weight_transfer_engine.check(Path(path))
        except (InvalidWeights, InvalidConfig) as error:
            return str(error)
        finally:
            self.weight_transfer_engine.reset_weight_update_target()
        return None


def register() -> None:
    """Makes the backend known to vLLM in this process, and repairs what a reload does wrong; a second
    call does nothing. Every process that has a worker needs it before its model is loaded."""
    apply_patches()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)


def check_staged(engine: LLMEngine, staged: StagedUpdate, *, draft: bool = False) -> None:
    """Lets every worker read an update. Raises InvalidWeights with what is wrong; nothing changes."""
    answers = engine.collective_rpc("check_weight_update", args=(str(staged.path), draft))
    if wrong := [answer for answer in answers if answer is not None]:
        raise InvalidWeights(wrong[0])


def swap_weights(
    engine: LLMEngine, staged: StagedUpdate, version: str, *, draft: bool = False
) -> None:
    """Puts an update in force between two steps, for every row, and names it in the outputs that
    follow; `draft` sends it to the draft model of vLLM's own speculation, whose version has no name.
    Raises InvalidWeights, and changes nothing, for an update that `check_staged` would refuse."""
    check_staged(engine, staged, draft=draft)
    put_in_force(engine, {"path": str(staged.path)}, version, draft=draft)


def put_in_force(
    engine: LLMEngine, update_info: dict[str, Any], version: str, *, draft: bool = False
) -> None:
    """One whole update by the back-end that the engine was started with."""
    engine.collective_rpc("start_draft_weight_update" if draft else "start_weight_update")
    engine.collective_rpc("update_weights", kwargs={"update_info": update_info})
    engine.collective_rpc("finish_weight_update")
    if not engine.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("vLLM kept keys and values of the weights before; end this engine")
    if not draft:
        engine.set_weight_version(version)


@dataclass(frozen=True, slots=True)
class Probe:
    """The weights in force on fixed texts."""

    logprobs: torch.Tensor  # [N, V] float32: every position of every text but its last
    others: list[Any]
    """vLLM's outputs of the rows in flight, which went on meanwhile."""


def probe_logprobs(engine: LLMEngine, sequences: Sequence[Sequence[int]]) -> Probe:
    """Full log-probabilities of sequences of ids under the weights in force, as a prompt's (the
    engine needs max_logprobs=-1). Raises InvalidWeights where they are not numbers."""
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False)
    found: dict[str, torch.Tensor] = {}
    others: list[Any] = []
    names = [f"probe-{i}" for i in range(len(sequences))]
    for name, ids in zip(names, sequences):
        engine.add_request(name, {"prompt_token_ids": list(ids)}, wanted)
    while len(found) < len(names):
        for output in engine.step():
            if output.request_id not in names:
                others.append(output)
            elif output.finished:
                found[output.request_id] = _rows(output.prompt_logprobs)
    logprobs = torch.cat([found[name] for name in names])
    if bool(logprobs.isnan().any()):
        raise InvalidWeights("log-probabilities on the probe are not numbers")
    return Probe(logprobs, others)


def _rows(flat: Any) -> torch.Tensor:
    """[positions, V] from vLLM's lists, whose entries stand in order of probability and begin with
    the prompt's own token once more."""
    rows = []
    for start, end in zip(flat.start_indices[1:], flat.end_indices[1:]):
        ids = torch.tensor(flat.token_ids[start:end])
        row = torch.empty(int(ids.max()) + 1)
        row[ids] = torch.tensor(flat.logprobs[start:end])
        rows.append(row)
    return torch.stack(rows)
