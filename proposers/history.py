"""Drafts from this run's other rollouts of the same prompt, finished and in flight, across steps.

Wherever the last tokens of a row stood before, in an earlier rollout of its prompt, in a sibling or in
itself, what followed votes on what is next (`proposers.history_law`). `draw` says how a law becomes a
draft:

- `mode`: the most probable token, a point mass; a seed gives the same tokens whatever is recorded;
- `counts`: a token drawn from the law with the row's own fresh randomness, a sparse law;
- `best`: drawn from the law made sharper, but named where one token is nearly certain, which is
  accepted most often. With the last two the emitted law is the target's and which tokens a seed
  gives depends on what was recorded.

As a tree (`propose_trees`) every continuation is a branch, the most probable paths first.

Old rollouts have influenced the weights that verify, so treating one as a sample of its old policy
would be biased. No form does: the first is deterministic, the others draw anew from a frozen
distribution, and verification emits what plain sampling would. For the same reason a row never reads
rollouts that were made with its own noise (an attempt that was aborted, a validation prompt in each
step): what they hold depends on the very numbers that decide about its drafts. Draws from them would be
biased; named tokens would not, but would be accepted more often than foretold, which is how the watch
(`rollout.watch`) tells an engine that is not exact.

Memory is bounded in tokens (`proposers.history_rollouts`). Nothing crosses prompts, and `salt` names
the model and tokenizer whose ids these are: what another exported is refused. `export_new` and
`merge` share rollouts between proposers, `export_told` brings a new one to where the others stand,
`export` and `load` keep them over a restart; all is plain tensors. Rows in flight are not part of them:
they will be drawn again.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from proposers.history_kernels import CompiledLookUp
from proposers.history_law import DRAWS, Draw, LookUp, Options, Reader, ReferenceLookUp
from proposers.history_rollouts import NO_NOISE, Rollout, RolloutStore, prompt_key
from proposers.history_state import from_tensors, to_tensors
from rollout.draft import NO_DRAFT, Draft
from rollout.draft_tree import grow_tree
from rollout.drafting import Drafting
from rollout.errors import InvalidConfig, KernelsUnavailable
from rollout.request import RolloutRequest
from rollout.row import Row
from rollout.streams import row_key

LookUpName = Literal["auto", "compiled", "python"]
Context = tuple[int, ...]

LEAST = 0.05
"""No token is drawn behind a draft that is accepted whole with a smaller chance, by estimate."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    """What is known of a row from its request on."""

    key: bytes
    noise: int
    rollout: Rollout | None = None
    """None until a token of it was observed."""


class HistoryProposer:
    """Longest-match backoff over the run's rollouts of the same prompt.

    `kernels`: `compiled` (built at first use), `python`, or `auto`, which takes the first where it can
    be built. The other options are those of `history_law.Options`. Raises InvalidConfig, and
    KernelsUnavailable for `compiled`.
    """

    def __init__(
        self,
        *,
        draw: Draw = "mode",
        max_tokens: int = 1_000_000,
        min_match: int = 1,
        max_match: int = 16,
        decay: float = 0.95,
        salt: str = "",
        kernels: LookUpName = "auto",
    ) -> None:
        if draw not in DRAWS:
            raise InvalidConfig(f"draw={draw!r}: expected one of {', '.join(DRAWS)}")
        options = Options(decay=decay, min_match=min_match, max_match=max_match)
        self._draw, self._salt, self._max_match = draw, salt, max_match
        self._look_up = make_look_up(kernels, options)
        self._store = RolloutStore(max_tokens)
        self._rows: dict[int, _Known] = {}  # by serial
        self._behind: dict[int, Row] = {}
        """Rows that may have emitted what is not recorded yet, by serial."""
        self._version = 0

    # ---- drafting -------------------------------------------------------------------------

    def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
        self._catch_up()
        return [
            self._chain(row, max_len) if max_len else NO_DRAFT
            for row, max_len in zip(rows, max_lens, strict=True)
        ]

    def _chain(self, row: Row, max_len: int) -> Draft:
        known = self._know(row)
        if (prompt := self._store.prompt(known.key)) is None:
            return NO_DRAFT
        drafting, reader = Drafting(row, max_len), self._reader(known)
        context, reached = row.token_ids[-self._max_match :], 1.0
        while drafting.room and reached > LEAST:
            step = self._look_up.step(prompt, context, reader, self._draw, drafting.room)
            drafting.points(step.points, step.chances[: len(step.points)])
            if step.law is None:
                break
            token = drafting.sample(step.law, step.chances[-1])
            context = [*context, *step.points, token]
            reached *= math.prod(step.chances)
        return drafting.done()

    def propose_trees(
        self, rows: Sequence[Row], max_nodes: Sequence[int], max_depths: Sequence[int]
    ) -> list[Draft]:
        self._catch_up()
        return [
            self._tree(row, nodes, depth) if nodes else NO_DRAFT
            for row, nodes, depth in zip(rows, max_nodes, max_depths, strict=True)
        ]

    def _tree(self, row: Row, max_nodes: int, max_depth: int) -> Draft:
        known = self._know(row)
        if (prompt := self._store.prompt(known.key)) is None:
            return NO_DRAFT
        reader = self._reader(known)
        root = tuple(row.token_ids[-self._max_match :])

        def continuations(context: Context) -> Iterator[tuple[int, float, Context]]:
            for token, chance in self._look_up.law(prompt, context, reader):
                yield token, chance, (*context[1 - self._max_match :], token)

        return grow_tree(root, continuations, max_nodes=max_nodes, max_depth=max_depth)

    def continuations(self, row: Row, drafted: Sequence[int]) -> list[tuple[int, float]]:
        """What may follow the row and some tokens behind it, with probabilities that leave to 1 what
        was never seen; the most probable first."""
        self._catch_up()
        known = self._know(row)
        if (prompt := self._store.prompt(known.key)) is None:
            return []
        context = [*row.token_ids[-self._max_match :], *drafted]
        return self._look_up.law(prompt, context, self._reader(known))

    def _reader(self, known: _Known) -> Reader:
        return Reader(self._version, known.noise, known.rollout)

    def _know(self, row: Row) -> _Known:
        if (known := self._rows.get(row.serial)) is None:
            request = row.request
            known = _Known(prompt_key(request.prompt_ids), noise_of(request))
            self._rows[row.serial] = known
        return known

    # ---- recording ------------------------------------------------------------------------

    def observe(self, rows: Sequence[Row]) -> None:
        """Notes whose tokens are to be recorded: that is done when somebody looks, since in most rounds
        of a batch that drafts nothing nobody does."""
        for row in rows:
            self._behind[row.serial] = row

    def _catch_up(self) -> None:
        if self._behind:
            for row in self._behind.values():
                self._record(row)
            self._behind.clear()

    def _record(self, row: Row) -> None:
        known = self._know(row)
        if known.rollout is None:
            tail = row.request.prompt_ids[-self._max_match :]
            known.rollout = self._store.start(known.key, tail, row.serial, known.noise)
        recorded = len(known.rollout.tokens)
        if new := row.token_ids[row.prompt_len + recorded :]:
            chances = map(math.exp, row.logprobs[recorded:])
            self._store.extend(known.rollout, new, chances, self._version)

    def finish(self, row: Row) -> None:
        if self._behind.pop(row.serial, None) is not None:
            self._record(row)
        known = self._rows.pop(row.serial, None)
        if known is not None and known.rollout is not None:
            self._store.finish(known.rollout)

    def remember(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float] = (),
    ) -> None:
        """Takes in a finished rollout from elsewhere, such as an earlier part of the run; with the
        log-probabilities it was sampled with, where they are known."""
        key, tail = prompt_key(prompt_ids), prompt_ids[-self._max_match :]
        rollout = self._store.start(key, tail)
        self._store.extend(rollout, token_ids, map(math.exp, logprobs), self._version)
        self._store.finish(rollout)

    def publish(self, version: int) -> None:
        self._catch_up()
        self._version = version

    def gauges(self) -> Mapping[str, float]:
        self._catch_up()
        return {
            "history/tokens": float(self._store.num_tokens),
            "history/sequences": float(len(self._store)),
            "history/prompts": float(self._store.num_prompts),
        }

    # ---- sharing --------------------------------------------------------------------------

    def export(self) -> dict[str, torch.Tensor]:
        """All finished rollouts, oldest first."""
        return to_tensors([r for r in self._store if not r.in_flight], self._salt)

    def export_new(self) -> dict[str, torch.Tensor]:
        """The rollouts of rows that finished here since the last call and are still held."""
        new = [r for r in self._store if r.unshared and not r.in_flight]
        for rollout in new:
            rollout.unshared = False
        return to_tensors(new, self._salt)

    def export_told(self) -> dict[str, torch.Tensor]:
        """The rollouts that `export_new` has handed out and those that came from elsewhere."""
        return to_tensors([r for r in self._store if not (r.unshared or r.in_flight)], self._salt)

    def merge(self, exported: Mapping[str, torch.Tensor]) -> None:
        """Takes in what another proposer exported, as the newest. Raises InvalidConfig for what has
        another salt; nothing is taken in then."""
        for one in from_tensors(exported, self._salt):
            rollout = self._store.start(one.key, one.tail[-self._max_match :], noise=one.noise)
            self._store.extend(rollout, one.token_ids, one.chances, one.version)
            self._store.finish(rollout)

    def load(self, exported: Mapping[str, torch.Tensor]) -> None:
        """Goes on from what `export` gave, before anything else was recorded."""
        assert not len(self._store), "a history is loaded into an empty proposer; else merge it"
        self.merge(exported)


def make_look_up(kernels: LookUpName, options: Options) -> LookUp:
    """The compiled look-up or its reference."""
    if kernels not in ("auto", "compiled", "python"):
        raise InvalidConfig(f"kernels={kernels!r}: expected auto, compiled or python")
    if kernels == "python":
        return ReferenceLookUp(options)
    try:
        return CompiledLookUp(options)
    except KernelsUnavailable as error:
        if kernels == "compiled":
            raise
        logger.warning("%s; the history is looked up in Python instead, slower", error)
        return ReferenceLookUp(options)


def noise_of(request: RolloutRequest) -> int:
    """What names the uniforms that a request uses; NO_NOISE for one that uses none."""
    sampling = request.sampling
    if sampling.greedy:
        return NO_NOISE
    seed = request.run_seed if sampling.seed is None else sampling.seed
    key = row_key(seed, request.prompt_id, request.sample_index)
    return int.from_bytes(key[:8], "little", signed=True) or 1
