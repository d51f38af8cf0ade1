"""A policy with an MTP head beside it: the head reads the hidden states of what the policy scored.

Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2; tensors in `rollout.mtp_weights`): a
head at position i takes the trunk's hidden state of token i and the embedding of token i + 1, runs them
through one decoder block with a cache of its own, and predicts token i + 2. Its own output stands for
the hidden state it does not have yet, so it can go on.

The head is run as a decoder of one layer over the draft vocabulary by whatever runs the policy, on
inputs in place of embeddings. Its positions in a row count from the first token that was scored, the
last of the prompt: what lies before is in that token's hidden state, and no prompt is run. A row that
is run again (new weights, preemption) starts anew there, and so does one that was not drafted for in a
long time: its acceptance suffers for some tokens, its law does not.

What the head reads is kept here by slot, through all that the scheduler does to slots; drafting with it
is `proposers.mtp`. Shapes: H hidden size, D draft vocabulary, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from rollout.decoder import DecoderConfig
from rollout.errors import InvalidWeights
from rollout.mtp_weights import MTP_PREFIX, VERSION, VOCABULARY, check_mtp
from rollout.packing import SCALE
from rollout.policy import HiddenPolicy, Scored, Window

Tensors = Mapping[str, torch.Tensor]
BLOCK = "mtp.layers.0."
MAX_WAITING = 64
"""Hidden states kept for a head that is not asked; older ones are dropped and it starts anew."""


def head_config(config: DecoderConfig, draft_vocab_size: int) -> DecoderConfig:
    """The head as a decoder of its own."""
    return replace(config, num_layers=1, vocab_size=draft_vocab_size, tied_head=True)


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """Weights of the policy and its head, ready to run."""

    target: Any
    head: Any
    hidden_norm: torch.Tensor  # [H] float32
    embedding_norm: torch.Tensor
    proj: torch.Tensor  # [H, 2H]
    vocabulary: torch.Tensor  # [D] int64
    version: int
    """Policy version whose rollouts the head was trained on last."""

    def bytes(self) -> int:
        """Storage of both."""
        joint = (self.hidden_norm, self.embedding_norm, self.proj, self.vocabulary)
        return int(self.target.bytes() + self.head.bytes()) + sum(t.nbytes for t in joint)

    def kernels(self) -> dict[str, str]:
        """Which kernel runs which class of matrix; the head's by names of their own."""
        drafting = {f"draft {name}": kernel for name, kernel in self.head.kernels().items()}
        return {**self.target.kernels(), **drafting}


@dataclass(slots=True)
class _Trail:
    """Hidden states of a slot's last tokens, without a gap up to the last one scored."""

    first: int
    """Position in the row of the head's entry 0."""
    num_run: int = 0
    """Entries that the head has run."""
    waiting: list[torch.Tensor] = field(default_factory=list)
    """[1, H] each, of the positions behind those."""

    @property
    def run_end(self) -> int:
        """Position behind the last entry."""
        return self.first + self.num_run

    @property
    def end(self) -> int:
        """Position behind the last hidden state."""
        return self.run_end + len(self.waiting)


class MtpPolicy:
    """The target as any policy, and a head over the same slots.

    `head` is made for `head_config` of the target's `config`, for as many slots and entries; `quantise`
    makes its packed update of named tensors.
    """

    def __init__(
        self,
        target: HiddenPolicy,
        head: HiddenPolicy,
        config: DecoderConfig,
        quantise: Callable[[Tensors], Tensors],
    ) -> None:
        self.target, self.head, self._config, self._quantise = target, head, config, quantise
        self.vocab_size, self.num_slots = target.vocab_size, target.num_slots
        self.context_len = target.context_len
        self.weights: MtpWeights | None = None
        self._trails: list[_Trail | None] = [None] * self.num_slots

    # ---- what the head reads --------------------------------------------------------------

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        scored = self.target.score_hidden(windows)
        at = 0
        for window in windows:
            end = window.start + len(window.token_ids)
            hidden = scored.hidden[at : at + window.num_logits]
            self._follow(window.slot, end - window.num_logits, hidden)
            at += window.num_logits
        return scored.logits

    def _follow(self, slot: int, start: int, hidden: torch.Tensor) -> None:
        """Notes hidden states [n, H] of the positions from `start` on."""
        trail = self._trails[slot]
        if trail is None or trail.end != start:
            trail = self._begin(slot, start, [])
        if len(trail.waiting) > MAX_WAITING:
            trail = self._begin(slot, start - MAX_WAITING, trail.waiting[-MAX_WAITING:])
        trail.waiting += hidden.split(1)

    def _begin(self, slot: int, first: int, waiting: list[torch.Tensor]) -> _Trail:
        self.head.truncate(slot, 0)
        trail = self._trails[slot] = _Trail(first, waiting=waiting)
        return trail

    def drafts_behind(self, slot: int, length: int) -> bool:
        """The head can draft for a row of so many tokens: it has the hidden states of all of them but
        the last, from its first position on, and has not run them all."""
        trail = self._trails[slot]
        return trail is not None and trail.end == length - 1 and bool(trail.waiting)

    # ---- drafting -------------------------------------------------------------------------

    def catch_up(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Scored:
        """Runs what the head has not seen of some rows, (slot, token ids) each with
        `drafts_behind`: [len(rows), D] and [len(rows), H] behind each row's last token."""
        windows: list[Window] = []
        hidden: list[torch.Tensor] = []
        next_ids: list[int] = []
        for slot, token_ids in rows:
            trail = self._trails[slot]
            assert trail is not None and trail.waiting, "asked for by `drafts_behind`"
            ids = tuple(token_ids[trail.run_end + 1 :])
            assert len(ids) == len(trail.waiting), "one next token a hidden state"
            windows.append(Window(slot, trail.num_run, ids, num_logits=1))
            hidden += trail.waiting
            next_ids += ids
            trail.num_run, trail.waiting = trail.num_run + len(ids), []
        return self.run_head(windows, torch.cat(hidden), next_ids)

    def run_head(
        self, windows: Sequence[Window], hidden: torch.Tensor, next_ids: Sequence[int]
    ) -> Scored:
        """One forward of the head on hidden states [n, H] and the tokens that follow them."""
        weights, eps, size = self.weights, self._config.norm_eps, (hidden.shape[-1],)
        assert weights is not None, "no weights are in force"
        normed = F.rms_norm(hidden, size, weights.hidden_norm, eps)
        embedded = F.rms_norm(self.target.embed(next_ids), size, weights.embedding_norm, eps)
        inputs = F.linear(torch.cat([normed, embedded], dim=-1), weights.proj)  # [n, H]
        return self.head.score_hidden(windows, inputs)

    def num_run(self, slot: int) -> int:
        """Entries of the slot that the head keeps."""
        trail = self._trails[slot]
        return 0 if trail is None else trail.num_run

    def forget_draft(self, slot: int) -> None:
        """Forgets what the head ran for tokens that were drafted only."""
        self.head.truncate(slot, self.num_run(slot))

    # ---- slots ----------------------------------------------------------------------------

    def grow(self, slot: int, length: int) -> bool:
        return self.target.grow(slot, length)

    def truncate(self, slot: int, length: int) -> None:
        self.target.truncate(slot, length)
        trail = self._trails[slot]
        if trail is None or length >= trail.end:
            return
        if length <= trail.run_end:
            self._trails[slot] = None
        else:
            del trail.waiting[length - trail.run_end :]

    def compact(self, slot: int, start: int, kept: Sequence[int]) -> None:
        self.target.compact(slot, start, kept)
        trail = self._trails[slot]
        if trail is not None:
            first = start - trail.run_end
            of_path = [trail.waiting[first + index] for index in kept if first + index >= 0]
            trail.waiting = trail.waiting[: max(0, first)] + of_path

    def fork(self, source: int, target: int, length: int) -> None:
        self.target.fork(source, target, length)
        self._trails[target] = None

    # ---- weights --------------------------------------------------------------------------

    def load(self, weights: Tensors) -> MtpWeights:
        """Prepares an update of the policy that brings its head along. Raises InvalidWeights."""
        mine = {name: tensor for name, tensor in weights.items() if name.startswith(MTP_PREFIX)}
        others = {name: tensor for name, tensor in weights.items() if name not in mine}
        check_mtp(mine, self._config)
        prepared = self.target.load(others)
        vocabulary = mine[VOCABULARY]
        if len(vocabulary) != self.head.vocab_size:
            raise InvalidWeights(
                f"{VOCABULARY}: got {len(vocabulary)} ids, expected {self.head.vocab_size} as before"
            )
        named = {
            name.replace(MTP_PREFIX, "model.", 1): tensor
            for name, tensor in mine.items()
            if name.startswith(BLOCK) or name == "mtp.norm.weight"
        }
        named["model.embed_tokens.weight"] = head_rows(others, self._config, vocabulary)
        return MtpWeights(
            target=prepared,
            head=self.head.load(self._quantise(named)),
            hidden_norm=mine["mtp.hidden_norm.weight"],
            embedding_norm=mine["mtp.embedding_norm.weight"],
            proj=mine["mtp.proj.weight"],
            vocabulary=vocabulary,
            version=int(mine[VERSION]),
        )

    def swap(self, prepared: MtpWeights) -> None:
        self.head.swap(prepared.head)
        self.target.swap(prepared.target)
        device = self.target.embed((0,)).device
        self.weights = replace(
            prepared,
            hidden_norm=prepared.hidden_norm.to(device),
            embedding_norm=prepared.embedding_norm.to(device),
            proj=prepared.proj.to(device),
        )
        self._trails = [None] * self.num_slots


def head_rows(packed: Tensors, config: DecoderConfig, ids: torch.Tensor) -> torch.Tensor:
    """Rows [D, H] float32 of the policy's output head, from its packed update."""
    rows = packed[config.head_name][ids].float()
    scales = packed.get(config.head_name + SCALE)
    return rows if scales is None else rows * scales[ids, None].float()
