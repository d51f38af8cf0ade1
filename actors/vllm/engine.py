"""vLLM behind the engine protocol: it schedules, computes and caches; rows are ours.

The engine core lives in this process and is stepped from here, so a weight update falls between two
steps by construction. Its one worker does too; with `tensor_parallel` there are several, processes of
this machine that the model is split over (`actors.vllm.executor`), and the first one has the rows.
Requests wait here and are handed over as slots are free; what they generate is kept by the rows of the
worker (`actors.vllm.rounds`), so an abort or an update loses nothing. At an update every request in
flight is taken out of vLLM, the weights are swapped, all cached keys and values dropped, and the
requests go on, their tokens so far being their prompt.

Stepping here costs what a second process would hide: the scheduler's work is serial with the forward.
Asynchronous scheduling is off: drafts are made from the tokens of the step before.
"""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams as VllmSamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from actors.engine_spec import EngineSpec, make_compile_grammar, make_decode
from actors.vllm.launch import launch, retire
from actors.vllm.layout import check_update, layout, split_update
from actors.vllm.pass_through import AnnouncedWeights
from actors.vllm.shared_update import StagedUpdate, write_update
from actors.vllm.support import installed_version
from actors.vllm.verifier import TICKET
from actors.vllm.weight_transfer import check_staged, probe_logprobs, swap_weights
from actors.vllm.worker import Refused
from rollout.admission import check_request
from rollout.checkpoint import read_config
from rollout.engine import EngineLimits, InFlight
from rollout.errors import InvalidWeights, RolloutError
from rollout.proposer import Remembering
from rollout.request import RolloutRequest, RolloutSample, SpecCounters


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """An update that every worker has read and found good."""

    staged: StagedUpdate
    draft: StagedUpdate | None
    """Of vLLM's draft model, where its weights came along."""
    version_of_vllm: str

    def bytes(self) -> int:
        return self.staged.num_bytes + (0 if self.draft is None else self.draft.num_bytes)

    def kernels(self) -> dict[str, str]:
        """Who computes what."""
        return {"blocks": f"vLLM {self.version_of_vllm}"}

    def put_in_force(self, core: LLMEngine, version: str) -> None:
        swap_weights(core, self.staged, version)
        if self.draft is not None:
            swap_weights(core, self.draft, "", draft=True)


Prepared = StagedWeights | AnnouncedWeights


@dataclass(slots=True)
class _Flight:
    """A request that is not answered yet."""

    ticket: int
    request: RolloutRequest
    token_ids: Sequence[int]
    """What vLLM is given as its prompt."""
    begun: bool = False
    """vLLM has had it."""
    name: str = ""
    """By which vLLM knows it, while it has it."""


@dataclass(frozen=True, slots=True)
class _Load:
    weights: Prepared
    version: int
    digest: str
    in_flight: InFlight


class VllmEngine:
    """See `rollout.engine.Engine`. Raises InvalidConfig for what cannot be served exactly."""

    def __init__(self, spec: EngineSpec) -> None:
        config = read_config(Path(spec.model_folder))
        decode, self._compile_grammar = make_decode(spec), make_compile_grammar(spec)
        self._limits = EngineLimits(
            config.vocab_size,
            spec.context_len,
            can_decode=decode is not None,
            can_constrain=self._compile_grammar is not None,
        )
        self._spec, self._num_slots = spec, spec.num_slots
        self._core = launch(spec)
        try:
            self._ask_all("rollout_install", spec, self._limits)
        except RolloutError:
            retire(self._core)
            raise
        self._layout = layout(config, spec.target_format, spec.torch_dtype)
        self.version: int | None = None
        self._tickets = itertools.count()
        self._waiting: deque[_Flight] = deque()
        self._flying: dict[int, _Flight] = {}
        self._ended: list[RolloutSample] = []
        self._due: _Load | None = None

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The answer of the worker that has the rows. Raises its RolloutError."""
        return self._answers(method, arguments, everywhere=False)[0]

    def _ask_all(self, method: str, *arguments: Any) -> None:
        """Raises the first RolloutError of any worker."""
        self._answers(method, arguments, everywhere=True)

    def _answers(self, method: str, arguments: tuple[Any, ...], *, everywhere: bool) -> list[Any]:
        asked = method, arguments, everywhere
        answers: list[Any] = self._core.collective_rpc("rollout_ask", args=asked)
        for answer in answers:
            if isinstance(answer, Refused):
                raise answer.error
        return answers

    # ---- requests -------------------------------------------------------------------------

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._flying) + len(self._ended)

    def check(self, requests: Sequence[RolloutRequest]) -> None:
        """Raises InvalidRequest for the first request that cannot be served."""
        for request in requests:
            check_request(request, self._limits)
            grammar = request.sampling.grammar
            if grammar is not None and self._compile_grammar is not None:
                self._compile_grammar(grammar)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self.check(requests)
        for request in requests:
            ticket = next(self._tickets)
            self._ask("rollout_add", ticket, request)
            if request.sampling.max_new_tokens:
                self._waiting.append(_Flight(ticket, request, request.prompt_ids))
            else:
                self._ended.append(self._ask("rollout_end", ticket, "length", "max_new_tokens"))

    def abort(self, request_ids: Sequence[str]) -> list[RolloutSample]:
        named = set(request_ids)
        waiting = [flight for flight in self._waiting if flight.request.id in named]
        flying = [flight for flight in self._flying.values() if flight.request.id in named]
        self._recall(flying)
        self._waiting = deque(one for one in self._waiting if one.request.id not in named)
        return [
            self._ask("rollout_end", flight.ticket, "abort", "by request")
            for flight in (*waiting, *flying)
        ]

    def _recall(self, flights: Sequence[_Flight]) -> None:
        """Takes requests out of vLLM; their rows stay as they are."""
        self._core.abort_request([flight.name for flight in flights], internal=True)
        for flight in flights:
            del self._flying[flight.ticket]

    def _hold(self, flights: Sequence[_Flight]) -> None:
        """Takes requests out of vLLM; they go on before all that wait."""
        self._recall(flights)
        self._wait_first(flights)

    def _wait_first(self, flights: Sequence[_Flight]) -> None:
        for flight in reversed(flights):
            flight.token_ids = self._ask("rollout_token_ids", flight.ticket)
            self._waiting.appendleft(flight)

    def _hand_over(self) -> None:
        """Fills the slots; while an update is due only with what had begun."""
        while self._waiting and len(self._flying) < self._num_slots:
            if self.load_is_due and not self._waiting[0].begun:
                return
            flight = self._waiting.popleft()
            flight.begun = True
            prompt_len, limit = len(flight.request.prompt_ids), self._limits.context_len
            longest = min(limit, prompt_len + flight.request.sampling.max_new_tokens)
            params = VllmSamplingParams(
                temperature=0.0,  # the law is ours: rollout/law.py
                max_tokens=longest - len(flight.token_ids),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={TICKET: flight.ticket},
            )
            prompt = {"prompt_token_ids": list(flight.token_ids)}
            flight.name = self._core.add_request(f"{flight.ticket}", prompt, params)
            self._flying[flight.ticket] = flight

    # ---- weights --------------------------------------------------------------------------

    def prepare(self, weights: Mapping[str, torch.Tensor]) -> Prepared:
        """The update in shared memory, read and checked by every worker; or what was announced of one
        that another back-end brings, checked. Raises InvalidWeights."""
        own, draft = split_update(weights)
        check_update(own, self._layout)
        if draft and self._spec.proposer != "vllm_draft_model":
            raise InvalidWeights(f"weights of a draft model for proposer={self._spec.proposer}")
        if not self._spec.keeps_weights:
            assert not draft, "refused where it is packed"
            return AnnouncedWeights(own, installed_version())
        staged = self._stage(own)
        staged_draft = self._stage(draft, draft=True) if draft else None
        return StagedWeights(staged, staged_draft, installed_version())

    def _stage(self, weights: Mapping[str, torch.Tensor], *, draft: bool = False) -> StagedUpdate:
        staged = write_update(weights)
        check_staged(self._core, staged, draft=draft)
        return staged

    def load(self, prepared: Prepared, *, version: int, digest: str, in_flight: InFlight) -> None:
        self._due = _Load(prepared, version, digest, in_flight)

    def gpus(self) -> tuple[str, ...]:
        """Of the workers."""
        return tuple(self._answers("rollout_gpu", (), everywhere=True))

    def join(self, init_info: dict[str, Any]) -> None:
        """Opens this end of a transfer whose sender waits (`actors.vllm.pass_through`), instead of one
        before. Raises InvalidConfig."""
        self._ask_all("rollout_join", init_info)

    @property
    def load_is_due(self) -> bool:
        return self._due is not None

    def _swap_if_due(self) -> None:
        due = self._due
        held = bool(self._waiting) and self._waiting[0].begun
        if due is None or (due.in_flight == "finish" and (self._flying or held)):
            return
        flights = list(self._flying.values())
        self._recall(flights)
        due.weights.put_in_force(self._core, str(due.version))
        self._ask("rollout_publish", due.version, due.digest)
        self.version, self._due = due.version, None
        if due.in_flight == "abort":
            detail = f"weights changed to version {due.version}"
            self._ended += [
                self._ask("rollout_end", one.ticket, "abort", detail) for one in flights
            ]
            return
        self._wait_first(flights)

    def probe(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """By vLLM's own forward. Rows in flight are taken out and go on afterwards, mostly from cached
        blocks."""
        self._hold(list(self._flying.values()))
        return probe_logprobs(self._core, sequences).logprobs

    # ---- the round ------------------------------------------------------------------------

    def step(self) -> list[RolloutSample]:
        self._swap_if_due()
        if self.version is not None:
            self._hand_over()
        if self._flying:
            self._ask("rollout_begin", not self._waiting)
            self._core.step()
            landed = self._ask("rollout_take_ended")
            self._recall([self._flying[ticket] for ticket, _ in landed])
            self._ended += [sample for _, sample in landed]
        ended, self._ended = self._ended, []
        return ended

    def renew(self, *, speculative: bool) -> None:
        """Goes on with a proposer that has seen nothing, or without one; for comparisons."""
        assert not self.num_unfinished, "a proposer is changed while nothing is in flight"
        self._ask("rollout_renew", speculative)

    def close(self) -> None:
        """Gives the model's and the cache's memory back; nothing may be asked of it afterwards."""
        if self._spec.tensor_parallel == 1:
            self._ask("rollout_release")
        retire(self._core)

    # ---- results --------------------------------------------------------------------------

    @property
    def memory(self) -> Remembering | None:
        return _Memory(self) if self._ask("rollout_remembers") else None

    def counters(self) -> SpecCounters:
        counters: SpecCounters = self._ask("rollout_counters")
        return counters

    def gauges(self) -> Mapping[str, float]:
        return {
            **self._ask("rollout_gauges"),
            "rows/live": float(len(self._flying)),
            "rows/waiting": float(len(self._waiting)),
        }

    def explain(self) -> str:
        return str(self._ask("rollout_explain"))


class _Memory:
    """What the proposer remembers, in the worker that has the rows."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def export(self) -> dict[str, torch.Tensor]:
        return self._exported("export")

    def export_new(self) -> dict[str, torch.Tensor]:
        return self._exported("export_new")

    def export_told(self) -> dict[str, torch.Tensor]:
        return self._exported("export_told")

    def _exported(self, name: str) -> dict[str, torch.Tensor]:
        exported: dict[str, torch.Tensor] = self._engine._ask("rollout_export", name)
        return exported

    def merge(self, exported: Mapping[str, torch.Tensor]) -> None:
        self._engine._ask("rollout_merge", [exported])
