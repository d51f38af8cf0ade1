"""What a rollout actor has to build, as plain values that travel."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from actors.calibration import calibration_ids
from actors.vllm.layout import pack_for_vllm
from actors.vllm.support import (
    VLLM_DRAFTERS,
    check_spec,
    check_transfer,
    check_version,
    installed_version,
)
from proposers.draft_model import DraftModelProposer
from proposers.history import HistoryProposer
from proposers.history_law import Draw
from proposers.mixture import MixtureProposer
from proposers.mtp import MtpProposer
from proposers.ngram import NgramProposer
from proposers.none import NoProposer
from proposers.self_draft import SelfDraftProposer
from quant.formats import FORMATS, Format, FormatName
from rollout.checkpoint import read_config, read_tokenizer, read_weights
from rollout.compiled_policy import CompiledPolicy
from rollout.decoder import DecoderConfig
from rollout.draft_len import AdaptiveDraftLen, DraftLen, FixedDraftLen
from rollout.engine import Engine
from rollout.errors import InvalidConfig, KernelsUnavailable
from rollout.grammar import CompileGrammar
from rollout.graph_capture import Capture, CudaCapture
from rollout.lossless_policy import LosslessPolicy, Weights
from rollout.mtp_policy import MtpPolicy, head_config
from rollout.mtp_weights import VOCABULARY, load_mtp
from rollout.native_engine import NativeEngine
from rollout.packing import pack
from rollout.policy import Policy
from rollout.proposer import Proposer
from rollout.request import Mode
from rollout.scheduler import MAX_ROUND_TOKENS
from rollout.smoothing import smooth
from rollout.stop_text import Decode
from rollout.transformer_policy import TransformerPolicy, default_dtype
from rollout.verify import Rule
from rollout.vocabulary import check_same_vocabulary, token_table_digest

EngineName = Literal["native", "vllm", "vllm_stock"]
ProposerName = Literal[
    "none",
    "ngram",
    "history",
    "history_sampled",
    "draft_model",
    "self_draft",
    "mtp",
    "mixture",
    "vllm_draft_model",
    "vllm_eagle",
    "vllm_eagle3",
]
TransferName = Literal["shared_memory", "nccl", "ipc"]
KernelsName = Literal["auto", "compiled", "torch"]
FOLDER_PROPOSERS = ("draft_model", *VLLM_DRAFTERS)
"""Those that draft with the weights of a folder."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One actor's engine."""

    model_folder: str
    mode: Mode = "quantised"
    format: FormatName = "int8_w8a16"
    """Of the target's weights; in lossless mode of the draft's, the target being full precision."""
    smoothing: float = 0.5
    """Of int8_w8a8: how much of the activations' outlier channels the weights take over, 0 to 1 (0 is
    off); see `rollout.smoothing`."""
    proposer: ProposerName = "history"
    draft_model: str | None = None
    """Model folder of `draft_model` and vLLM's own; for an EAGLE head the head's."""
    mtp_head: str | None = None
    """File of the head that `mtp` and `mixture` draft with at first; its draft vocabulary stays."""
    draft_len: int | None = None
    """Fixed draft length; None chooses it round by round up to `max_draft_len`."""
    max_draft_len: int = 8
    tree_nodes: int = 0
    """Nodes of the draft trees that compete with chains; 0 drafts chains only."""
    verification: Rule = "block"
    """How sampled drafts are verified; point masses have one rule."""
    history_max_tokens: int = 2_000_000
    num_slots: int = 32
    context_len: int = 1024
    max_cached_tokens: int | None = None
    """Cap of the key/value cache in tokens: rows wait and are preempted under it; None gives every
    slot its whole context. Needs compiled kernels."""
    max_round_tokens: int = MAX_ROUND_TOKENS
    """Tokens of one forward; longer prompts run in chunks beside decoding rows."""
    kernels: KernelsName = "auto"
    """What runs the forward: `compiled` (built at first use, CPU), `torch`, or `auto`, which takes
    compiled kernels where there are any."""
    dtype: str | None = None
    """Compute dtype by name. None is float32 for full precision on a CPU, which is the learner's: to
    bf16 the weights are rounded, and where they were bf16 once, small updates vanish by it. For the
    rest it is bf16 where the machine multiplies it, else float32."""
    device: str = "cpu"
    """Where it computes: cpu, or cuda, where decode rounds are replayed as CUDA graphs."""
    engine: EngineName = "native"
    """Who schedules and computes; law, verification and proposers are the same, but for vllm_stock,
    which is vLLM as it is and there to be audited."""
    tensor_parallel: int = 1
    """Workers of engine=vllm that the model is split over, processes of one machine; on GPUs each has
    its own, on a CPU its share of the threads."""
    weight_transfer: TransferName = "shared_memory"
    """How weights get to the actors: through Ray and shared memory, or with engine=vllm from GPU to GPU
    by vLLM's own back-ends: nccl, or ipc for one actor on the learner's GPU. Those two have not yet run
    on a GPU."""

    def __post_init__(self) -> None:
        if self.engine != "native":
            check_spec(self)
        cap = self.max_cached_tokens
        if cap is not None and cap < self.context_len:
            raise InvalidConfig(
                f"max_cached_tokens={cap}: expected at least context_len={self.context_len}, "
                "so that one row always fits"
            )
        if self.tensor_parallel < 1:
            raise InvalidConfig(f"tensor_parallel={self.tensor_parallel}: expected at least 1")
        if self.tensor_parallel > 1 and self.engine != "vllm":
            raise InvalidConfig(
                f"tensor_parallel={self.tensor_parallel} with engine={self.engine}: only engine=vllm "
                "splits a model over workers; set that, or tensor_parallel=1"
            )
        if not self.keeps_weights:
            check_transfer(self)
        if not 0 <= self.smoothing <= 1:
            raise InvalidConfig(f"smoothing={self.smoothing}: expected a number from 0 to 1")
        if self.max_round_tokens < 1:
            raise InvalidConfig(f"max_round_tokens={self.max_round_tokens}: expected at least 1")
        if self.mode == "lossless" and self.format == "none":
            raise InvalidConfig(
                "mode=lossless with format=none: quantised weights draft; name their format"
            )
        if self.mode == "lossless" and self.proposer not in ("self_draft", "none"):
            raise InvalidConfig(
                f"mode=lossless with proposer={self.proposer}: the quantised weights draft in this "
                "mode; set proposer=self_draft, or mode=full"
            )
        if self.proposer == "self_draft" and self.mode != "lossless":
            raise InvalidConfig(
                f"proposer=self_draft with mode={self.mode}: there are no second weights to draft "
                "with; set mode=lossless"
            )
        if self.proposer in FOLDER_PROPOSERS and self.draft_model is None:
            raise InvalidConfig(
                f"proposer={self.proposer} without draft_model: name its model folder"
            )
        if self.proposer in VLLM_DRAFTERS and self.engine == "native":
            instead = "proposer=draft_model" if "model" in self.proposer else "engine=vllm"
            raise InvalidConfig(
                f"proposer={self.proposer} with engine={self.engine}: it is vLLM that drafts; set "
                f"{instead}"
            )
        if self.has_head and self.mtp_head is None:
            raise InvalidConfig(
                f"proposer={self.proposer} without mtp_head: name a head's file; `rollout train-mtp` "
                "makes one"
            )

    @property
    def keeps_weights(self) -> bool:
        """The weights in force are kept by the controller, for actors to come."""
        return self.weight_transfer == "shared_memory"

    @property
    def has_head(self) -> bool:
        """An MTP head is run beside the policy."""
        return self.proposer in ("mtp", "mixture")

    @property
    def target_format(self) -> FormatName:
        """Of the weights that verify."""
        return "none" if self.mode == "lossless" else self.format

    @property
    def num_gpus(self) -> int:
        return num_gpus(self.device, self.tensor_parallel)

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype:
            return DTYPES[self.dtype]
        learners = self.target_format == "none" and self.device == "cpu"
        return torch.float32 if learners else default_dtype(self.device)


def num_gpus(device: str, tensor_parallel: int) -> int:
    """That an actor is given: one for each worker that its model is split over."""
    return 0 if device == "cpu" else tensor_parallel


def make_proposer(spec: EngineSpec, policy: Policy | None = None) -> Proposer:
    """The proposer a spec names, beside the policy that verifies where it runs that. Raises
    InvalidConfig for a draft model of another vocabulary."""
    makers: dict[str, Callable[[], Proposer]] = {
        "none": NoProposer,
        "ngram": NgramProposer,
        "history": lambda: _history(spec, "mode"),
        "history_sampled": lambda: _history(spec, "best"),
        "draft_model": lambda: _draft_model(spec),
        "self_draft": lambda: _self_draft(spec, policy),
        "mtp": lambda: _mtp(policy),
        "mixture": lambda: MixtureProposer(_history(spec, "mode"), _mtp(policy)),
    }
    return makers[spec.proposer]()


def _history(spec: EngineSpec, draw: Draw) -> HistoryProposer:
    salt = history_salt(Path(spec.model_folder))
    return HistoryProposer(draw=draw, max_tokens=spec.history_max_tokens, salt=salt)


@lru_cache(maxsize=4)
def history_salt(folder: Path) -> str:
    """Names the model whose rollouts a history holds: its architecture, its size, and the digest of
    its tokens where the folder has a tokenizer."""
    config, tokenizer = read_config(folder), find_tokenizer(folder)
    size = f"{config.architecture} {config.num_layers}x{config.hidden_size}"
    return size if tokenizer is None else f"{size} {token_table_digest(tokenizer)}"


def _self_draft(spec: EngineSpec, policy: Policy | None) -> SelfDraftProposer:
    assert isinstance(policy, LosslessPolicy), "self_draft runs on a policy of mode=lossless"
    return SelfDraftProposer(policy, num_ids=num_ids(Path(spec.model_folder)))


def _mtp(policy: Policy | None) -> MtpProposer:
    assert isinstance(policy, MtpPolicy), "an MTP head drafts beside its policy"
    return MtpProposer(policy)


def read_mtp(spec: EngineSpec) -> dict[str, torch.Tensor]:
    """The head's tensors from the file that a spec names. Raises InvalidWeights."""
    assert spec.mtp_head is not None, "checked when the spec was made"
    folder = Path(spec.model_folder)
    return load_mtp(Path(spec.mtp_head), read_config(folder), history_salt(folder))


def _draft_model(spec: EngineSpec) -> DraftModelProposer:
    """With the folder's weights, on a CPU in the format that runs fastest there: what it drafts is
    judged by its own law, so precision buys acceptance only."""
    assert spec.draft_model is not None, "checked when the spec was made"
    folders = [Path(spec.model_folder), Path(spec.draft_model)]
    check_same_vocabulary(*folders)
    draft_spec = replace(
        spec,
        engine="native",
        tensor_parallel=1,
        model_folder=spec.draft_model,
        mode="quantised",
        format="int8_w8a16" if spec.device == "cpu" else "none",
        proposer="none",
        draft_model=None,
        max_cached_tokens=None,
    )
    policy = make_policy(draft_spec)
    policy.swap(policy.load(pack_folder(draft_spec)))
    return DraftModelProposer(
        policy,
        vocab_size=read_config(folders[0]).vocab_size,
        num_ids=min(map(num_ids, folders)),
    )


def make_draft_len(spec: EngineSpec) -> DraftLen:
    """The draft length policy a spec names."""
    if spec.proposer == "none":
        return FixedDraftLen(0)
    if spec.draft_len is not None:
        return FixedDraftLen(spec.draft_len)
    return AdaptiveDraftLen(spec.max_draft_len, tree_nodes=spec.tree_nodes)


def make_policy(
    spec: EngineSpec, *, num_slots: int | None = None, context_len: int | None = None
) -> Policy:
    """The policy a spec names, without weights; sizes may be overridden for a probe. Raises
    KernelsUnavailable where compiled kernels are asked for by name and there are none."""
    folder = Path(spec.model_folder)
    config, format_ = read_config(folder), FORMATS[spec.format]
    policy = _policy(spec, config, FORMATS[spec.target_format], num_slots, context_len)
    if spec.has_head:
        return _with_head(spec, policy, num_slots, context_len)
    if spec.mode != "lossless":
        return policy

    def quantise(weights: Weights) -> Weights:
        named: Iterable[tuple[str, torch.Tensor]] = weights.items()
        if spec.format == "int8_w8a8":  # values in the cache are the target's
            named = _smoothed(spec, named, same_cache=True)
        return pack(named, config, format_, spec.torch_dtype)

    return LosslessPolicy(policy, policy.sharing_cache(format_), quantise)


def _with_head(
    spec: EngineSpec,
    target: CompiledPolicy | TransformerPolicy,
    num_slots: int | None,
    context_len: int | None,
) -> MtpPolicy:
    """The head in the format that runs fastest: what it drafts is judged by its own law."""
    config = head_config(target.config, len(read_mtp(spec)[VOCABULARY]))
    format_ = FORMATS["int8_w8a16" if spec.device == "cpu" else "none"]
    whole = replace(spec, max_cached_tokens=None)
    head = _policy(whole, config, format_, num_slots, context_len)

    def quantise(named: Weights) -> Weights:
        return pack(named.items(), config, format_, spec.torch_dtype)

    return MtpPolicy(target, head, target.config, quantise)


def _policy(
    spec: EngineSpec,
    config: DecoderConfig,
    format_: Format,
    num_slots: int | None,
    context_len: int | None,
) -> CompiledPolicy | TransformerPolicy:
    slots, context = num_slots or spec.num_slots, context_len or spec.context_len
    if spec.kernels != "torch" and spec.device == "cpu":
        try:
            return CompiledPolicy(
                config,
                format_,
                num_slots=slots,
                context_len=context,
                dtype=spec.torch_dtype,
                max_cached_tokens=None if num_slots else spec.max_cached_tokens,
            )
        except KernelsUnavailable as error:
            if spec.kernels == "compiled" or spec.max_cached_tokens is not None:
                raise
            logger.warning("%s; the torch path runs instead, slower", error)
    elif spec.kernels == "compiled" or spec.max_cached_tokens is not None:
        raise KernelsUnavailable(
            f"kernels={spec.kernels} device={spec.device} "
            f"max_cached_tokens={spec.max_cached_tokens}: compiled kernels, which alone cap the "
            "cache, run on device=cpu with kernels=auto or compiled"
        )
    return TransformerPolicy(
        config,
        format_,
        num_slots=slots,
        context_len=context,
        dtype=spec.torch_dtype,
        device=spec.device,
        capture=None if num_slots else _capture(torch.device(spec.device)),
        max_graph_len=1 + max(spec.max_draft_len, spec.draft_len or 0),
    )


def _capture(device: torch.device) -> Capture | None:
    """What records decode rounds on a device. Raises InvalidConfig for a GPU that is not there."""
    if device.type == "cpu":
        return None
    if not torch.cuda.is_available():
        raise InvalidConfig(
            f"device={device}: torch {torch.__version__} sees no GPU; set device=cpu, or install a "
            "torch with CUDA on a machine that has one"
        )
    return CudaCapture(device)


def pack_folder(spec: EngineSpec) -> dict[str, torch.Tensor]:
    """The folder's weights as an update for the engine that a spec names, its head along."""
    packed = pack_weights(spec, read_weights(Path(spec.model_folder)).items())
    return packed | read_mtp(spec) if spec.has_head else packed


def pack_weights(
    spec: EngineSpec, named: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Named weights of the policy in the layout that the engine takes. Raises InvalidWeights."""
    config = read_config(Path(spec.model_folder))
    if spec.target_format == "int8_w8a8":
        named = _smoothed(spec, named)
    if spec.engine != "native":
        return pack_for_vllm(named, config, spec.target_format, spec.torch_dtype)
    return pack(named, config, FORMATS[spec.target_format], spec.torch_dtype)


def _smoothed(
    spec: EngineSpec, named: Iterable[tuple[str, torch.Tensor]], *, same_cache: bool = False
) -> Iterable[tuple[str, torch.Tensor]]:
    """The same model, made ready for INT8 activations."""
    folder = Path(spec.model_folder)
    if not spec.smoothing:
        return named
    config = read_config(folder)
    ids = calibration_ids(find_tokenizer(folder), config.vocab_size)
    return smooth(named, config, ids, spec.smoothing, same_cache=same_cache).items()


@lru_cache(maxsize=4)
def find_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer, read once in a process; None for a folder without one."""
    return read_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def make_decode(spec: EngineSpec) -> Decode | None:
    """Ids to text for stop strings; None for a model folder without tokenizer."""
    tokenizer = find_tokenizer(Path(spec.model_folder))
    if tokenizer is None:
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def num_ids(folder: Path) -> int:
    """Ids that stand for a token: a checkpoint's head may be padded beyond its tokenizer."""
    vocab_size, tokenizer = read_config(folder).vocab_size, find_tokenizer(folder)
    return vocab_size if tokenizer is None else min(vocab_size, len(tokenizer))


def make_compile_grammar(spec: EngineSpec) -> CompileGrammar | None:
    """Grammars over the model's tokenizer; None for a folder without one. llguidance is loaded by
    the first request that brings a grammar, and asked for by name where it is not installed."""
    folder = Path(spec.model_folder)
    if find_tokenizer(folder) is None:
        return None

    @lru_cache(maxsize=1)
    def grammars() -> CompileGrammar:
        from rollout.llguidance_grammar import LlguidanceGrammars

        config = read_config(folder)
        return LlguidanceGrammars(
            folder, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
        )

    return lambda grammar: grammars()(grammar)


def make_engine(
    spec: EngineSpec,
    *,
    policy: Policy | None = None,
    proposer: Proposer | None = None,
    draft_len: DraftLen | None = None,
) -> Engine:
    """The engine, still without weights; parts of a native one that are there already may be handed
    over. Raises InvalidConfig where vLLM is asked for and is not there."""
    if spec.engine != "native":
        assert policy is proposer is draft_len is None, "vLLM's engine makes its own parts"
        return make_vllm_engine(spec)
    policy = policy or make_policy(spec)
    return NativeEngine(
        policy,
        proposer or make_proposer(spec, policy),
        draft_len or make_draft_len(spec),
        mode=spec.mode,
        verification=spec.verification,
        decode=make_decode(spec),
        compile_grammar=make_compile_grammar(spec),
        num_ids=num_ids(Path(spec.model_folder)),
        max_round_tokens=spec.max_round_tokens,
    )


def make_vllm_engine(spec: EngineSpec) -> Engine:
    """Imports vLLM, which nothing else of the project needs."""
    check_version(installed_version())
    if spec.engine == "vllm_stock":
        from actors.vllm.stock import StockVllmEngine

        return StockVllmEngine(spec)  # type: ignore[return-value]  # what an audit asks for
    from actors.vllm.engine import VllmEngine

    return VllmEngine(spec)
