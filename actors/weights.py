"""Weight updates on their way from the learner to the actors, through Ray's object store.

The learner's process packs and quantises once, digests, and puts one object; every actor maps it
without a copy. Torch tensors travel as numpy arrays (those are what the store shares), bf16 as its
bits. Where they are sent from GPU to GPU an update is announced through the store, without them.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from actors.engine_spec import EngineSpec, pack_weights, read_mtp
from actors.vllm.layout import pack_draft
from quant.formats import FORMATS
from rollout.checkpoint import read_config
from rollout.errors import InvalidWeights
from rollout.mtp_weights import check_mtp
from rollout.packing import digest
from rollout.probe import DriftProbe
from rollout.transformer_policy import TransformerPolicy


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One packed version."""

    version: int
    digest: str
    arrays: dict[str, np.ndarray]
    dtypes: dict[str, str]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The packed tensors, sharing the arrays' memory. Raises InvalidWeights when their digest
        is not the update's."""
        tensors = self.views()
        if (got := digest(tensors)) != self.digest:
            raise InvalidWeights(
                f"version {self.version} arrived with digest {got}, sent as {self.digest}"
            )
        return tensors

    def views(self) -> dict[str, torch.Tensor]:
        """The packed tensors as they are, sharing the arrays' memory."""
        return {name: as_tensor(array, self.dtypes[name]) for name, array in self.arrays.items()}

    def announced(self) -> "AnnouncedUpdate":
        """What there is to know of it before it is sent."""
        return AnnouncedUpdate(
            self.version, self.digest, {name: t.to("meta") for name, t in self.views().items()}
        )


@dataclass(frozen=True, slots=True)
class AnnouncedUpdate:
    """A packed version that is sent from GPU to GPU (`actors.vllm.pass_through`)."""

    version: int
    digest: str
    """As packed: nobody works it out again where the tensors arrive."""
    described: dict[str, torch.Tensor]
    """On the meta device: names, dtypes and shapes."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.described


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays over the tensors' memory and the torch dtype of each."""
    arrays = {
        name: (t.view(torch.int16) if t.dtype == torch.bfloat16 else t).cpu().numpy()
        for name, t in tensors.items()
    }
    return arrays, {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}


def as_tensor(array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
    """A tensor over an array's memory, of the array's own dtype unless that stood for another."""
    with warnings.catch_warnings():  # store memory is read-only; nothing here writes to it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


class WeightPublisher:
    """Packs named learner weights for one engine spec."""

    def __init__(self, spec: EngineSpec, probe_ids: Sequence[Sequence[int]]) -> None:
        self._spec = spec
        self._config = read_config(Path(spec.model_folder))
        self._full = TransformerPolicy(
            self._config,
            FORMATS["none"],
            num_slots=max(1, len(probe_ids)),
            context_len=max(map(len, probe_ids)),
            dtype=torch.float32,
        )
        self._probe = DriftProbe(self._full, probe_ids)
        self._draft = read_mtp(spec) if spec.has_head else {}

    def pack(
        self,
        version: int,
        named: Iterable[tuple[str, torch.Tensor]],
        draft: Mapping[str, torch.Tensor] | None = None,
    ) -> WeightUpdate:
        """`draft`: the MTP head as it is now, or the weights of vLLM's draft model; None sends the
        last ones again. Raises InvalidWeights for an incomplete or non-finite set, and for a head
        where none drafts."""
        if draft is not None:
            self._draft = self._packed_draft(draft)
        cpu = [(name, tensor.detach().cpu()) for name, tensor in named]
        packed = pack_weights(self._spec, cpu)
        arrays, dtypes = to_arrays(packed | self._draft)
        return WeightUpdate(version, digest(packed | self._draft), arrays, dtypes)

    def _packed_draft(self, draft: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        spec = self._spec
        if not spec.keeps_weights:
            raise InvalidWeights(
                f"weights that draft with weight_transfer={spec.weight_transfer}: only the policy's "
                "are sent; publish without them, or set weight_transfer=shared_memory"
            )
        if spec.proposer == "vllm_draft_model" and spec.draft_model is not None:
            cpu = [(name, tensor.detach().cpu()) for name, tensor in draft.items()]
            return pack_draft(cpu, Path(spec.draft_model), spec.torch_dtype)
        if not spec.has_head:
            raise InvalidWeights(
                f"an MTP head for proposer={self._spec.proposer}, which does not draft with one"
            )
        head = {name: tensor.detach().cpu() for name, tensor in draft.items()}
        check_mtp(head, self._config)
        return head

    def reference(self, named: Iterable[tuple[str, torch.Tensor]]) -> np.ndarray:
        """Full-precision log-probabilities [N, V] on the probe sequences of weights that `pack` has
        accepted."""
        full = {name: tensor.detach().cpu().float() for name, tensor in named}
        return self._probe.logits(self._full.build(full)).log_softmax(-1).numpy()
