"""The one process that knows the fleet: dispatch, hand-over, weights, supervision.

State is the queue (order and staleness), the ledger (fates), and for each member which requests it
holds. A supervising thread collects finished samples, sends new requests, and replaces members that
died; the learner's calls touch the same state under one lock. A member serves only while it holds
the current version. Every wait for another process has a limit.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from actors.config import ClusterConfig
from actors.group_queue import GroupQueue, RolloutGroup
from actors.history_exchange import HistoryExchange
from actors.member import Assigned, Member, first_line
from actors.metrics import PHASES, ClusterSnapshot, Publication
from actors.rollout_actor import ActorInfo, Begun, Committed
from rollout.admission import check_request
from rollout.checkpoint import read_config, read_tokenizer
from rollout.engine import EngineLimits
from rollout.errors import ActorFailed, FleetDead, InvalidRequest, InvalidWeights, RolloutTimeout
from rollout.ledger import Final, Ledger
from rollout.request import RolloutRequest, RolloutSample, SpecCounters, Timings

COLLECT_S = 0.5
"""How long a collect call waits in the actor for a first sample."""
POLL_S = 0.1
PROPOSER_GAUGES = ("draft", "history", "ngram", "draft_model", "self_draft", "mtp")
"""First part of the gauges that snapshots carry."""
NO_COPY = (
    "; nobody keeps weights that are sent from GPU to GPU, for another actor to start from: resume "
    "from the run's checkpoint"
)
PREFETCH = 1.5
"""Requests a member holds at most, in units of its slots."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """An update that members have built and do not run."""

    reference: Any
    version: int
    answers: dict[str, Begun]


@dataclass(frozen=True, slots=True)
class _Update:
    """The update in force, kept for members to come."""

    weights: Any
    """Object reference of the WeightUpdate."""
    version: int
    reference: np.ndarray
    started: float
    sent: dict[str, Any] | None
    """How it arrives, where it was only announced: then nobody keeps it."""


@dataclass(frozen=True, slots=True)
class Retired:
    """A sample that no learner will see, and why."""

    sample: RolloutSample
    fate: Final


@dataclass(frozen=True, slots=True)
class Boundary:
    """A moment from which a run can go on."""

    state: dict[str, Any]
    """JSON-able: fates, counters, unfinished request ids, finished samples."""
    retired: list[Retired]
    """Settled since they were last asked for, and settled in `state`."""


class Controller:
    """Fleet, queue and ledger of one cluster."""

    def __init__(self, config: ClusterConfig, probe_ids: Sequence[Sequence[int]]) -> None:
        self._config, self._probe_ids = config, probe_ids
        self._changed = threading.Condition(threading.RLock())
        self._publishing = threading.Lock()
        self._queue = GroupQueue(
            max_staleness=config.max_staleness,
            groups_per_step=config.groups_per_step,
            allow_short_groups=config.allow_short_groups,
        )
        self._ledger = Ledger()
        self._members: dict[str, Member] = {}
        self._histories = HistoryExchange(self._on_all, config.publish_timeout_s)
        self._to_send: deque[RolloutRequest] = deque()
        self._restored: dict[str, RolloutSample] = {}
        self._retries: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._last_loss = ""
        self._retired: list[Retired] = []
        self._publication: Publication | None = None
        self._begun: _Begun | None = None
        self._update: _Update | None = None
        self._failure: Exception | None = None
        self._stopping = False
        self._restarts = self._started = 0
        self._departed_counters = SpecCounters()
        self._departed_sums: Counter[str] = Counter()
        self._first_submit: float | None = None
        self._elapsed_before_s = 0.0
        self._finished = Counter[str]()
        self._stale_by_length: Counter[int] = Counter()
        folder = Path(config.engine.model_folder)
        model = read_config(folder)
        self._limits = EngineLimits(
            vocab_size=model.vocab_size,
            context_len=min(config.engine.context_len, model.max_context_len),
            can_decode=(folder / "tokenizer.json").is_file(),
        )

    # ---- life -----------------------------------------------------------------------------

    def start(self) -> list[ActorInfo]:
        """Starts the members; returns when all are up. Raises ActorFailed."""
        members = [self._create_member() for _ in range(self._config.num_actors)]
        for member in members:
            self._await_up(member)
        threading.Thread(target=self._supervise, name="supervisor", daemon=True).start()
        return [member.info for member in members if member.info]

    def shutdown(self) -> None:
        """Ends every member."""
        with self._changed:
            self._stopping = True
            members, self._members = list(self._members.values()), {}
            self._changed.notify_all()
        for member in members:
            ray.kill(member.handle)

    def _create_member(self) -> Member:
        member = Member.start(f"rollout-{self._started}", self._config, self._probe_ids)
        self._started += 1
        with self._changed:
            self._members[member.name] = member
        return member

    def _await_up(self, member: Member) -> None:
        """Waits for a member, brings it to the current version and to what the others were told of each
        other's rollouts, and lets it serve."""
        member.info = member.ask(member.handle.info.remote(), self._config.start_timeout_s)
        with self._publishing:
            begun: Begun | None = None
            if self._update is not None:
                limit = self._config.publish_timeout_s
                begin = member.handle.begin.remote(self._update.weights, limit)
                begun = member.ask(begin, limit)
                committed = member.ask(self._commit_call(member), limit)
                self._histories.introduce(member, self._serving())
            with self._changed:
                member.serving = True
                if begun is not None and self._published_version() != begun.version:
                    self._put_in_force({member.name: begun}, {member.name: committed})
                self._changed.notify_all()

    # ---- the learner's calls --------------------------------------------------------------

    def submit(
        self, groups: Sequence[Sequence[RolloutRequest]], finished: Sequence[RolloutSample] = ()
    ) -> None:
        """Queues groups; all or none. `finished` are members that a resumed run had already."""
        requests = [request for group in groups for request in group]
        with self._changed:
            self._check()
            for request in requests:
                check_request(request, self._limits)
            try:
                self._ledger.submitted(request.id for request in requests)
                for group in groups:
                    self._queue.add(group)
            except ValueError as error:
                raise InvalidRequest(str(error)) from error
            self._restored |= {sample.request.id: sample for sample in finished}
            self._first_submit = self._first_submit or time.monotonic()
            self._dispatch()

    def next_groups(self, num_groups: int, timeout_s: float) -> list[RolloutGroup]:
        """The next whole groups in dispatch order, none older than the bound.
        Raises RolloutTimeout, FleetDead, or InvalidRequest when they can never come."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._check()
                self._retire(self._queue.drop_failed(), "failed")
                self._retire(self._queue.drop_stale(self._version()), "stale")
                self._dispatch()
                if groups := self._queue.take(num_groups, self._version()):
                    self._retire([s for group in groups for s in group.failed], "failed")
                    self._dispatch()
                    return groups
                self._refuse_impossible(num_groups)
                left = deadline - time.monotonic()
                if left <= 0:
                    counts = self._ledger.counts()
                    raise RolloutTimeout(
                        f"no {num_groups} whole groups in {timeout_s} s; in flight "
                        f"{counts['in_flight']}, waiting {counts['waiting']}"
                    )
                self._changed.wait(min(left, 1.0))

    def _refuse_impossible(self, num_groups: int) -> None:
        held = self._queue.num_open + self._queue.num_queued
        if held < num_groups:
            raise InvalidRequest(
                f"next_groups({num_groups}): only {held} groups are submitted; submit more first"
            )
        if self._queue.num_queued and self._queue.room < num_groups - self._queue.num_open:
            raise InvalidRequest(
                f"next_groups({num_groups}): pacing keeps at most {self._queue.capacity_groups} "
                "groups open between publishes; publish, take fewer, or raise max_staleness"
            )

    def settle(self, sample_ids: Sequence[str], fate: Final) -> None:
        """The learner consumed (`accepted`) or set aside (`filtered`) what it was handed."""
        with self._changed:
            try:
                self._ledger.settle(sample_ids, fate)
            except ValueError as error:
                raise InvalidRequest(str(error)) from error

    def retired(self) -> list[Retired]:
        """Samples that ended stale or failed since the last call."""
        with self._changed:
            retired, self._retired = self._retired, []
            return retired

    def join(self, infos: Sequence[dict[str, Any]]) -> None:
        """Every member opens its end of the learner's transfer (`actors.vllm.pass_through`)."""
        with self._publishing:
            self._check()
            members, limit = self._serving(), self._config.publish_timeout_s
            own = dict(zip((member.name for member in members), infos, strict=True))
            self._on_all(members, lambda m: m.handle.join.remote(own[m.name], limit))
            self._check()

    def begin(self, boxed_update: Sequence[Any], version: int) -> None:
        """First half of a publish: every serving member builds the update beside what it runs. One
        that refuses it fails it for all: the old version stays whole."""
        with self._publishing:
            self._check()
            current = self._update.version if self._update else None
            if current is not None and version <= current:
                raise InvalidWeights(f"version {version}: expected one above {current}")
            # Owned by this process from here on: the learner may leave, a new member will need it.
            limit = self._config.publish_timeout_s
            own = ray.put(ray.get(boxed_update[0], timeout=limit))
            begun = self._on_all(
                self._serving(), lambda m: m.handle.begin.remote(own, limit), abandon=version
            )
            self._begun = _Begun(own, version, begun)

    def commit(
        self,
        version: int,
        reference: np.ndarray,
        started: float,
        sent: dict[str, Any] | None = None,
    ) -> Publication:
        """Second half: all members swap between two rounds. One that dies or stalls is fenced off
        and replaced; when it was the last, the call waits for its replacement. Then members tell each
        other what their proposers learned."""
        with self._publishing:
            self._check()
            if self._begun is None or self._begun.version != version:
                raise InvalidWeights(f"version {version} was not begun")
            begun, self._begun = self._begun, None
            self._update = _Update(begun.reference, version, reference, started, sent)
            limit = self._config.publish_timeout_s
            late = [m for m in self._serving() if m.name not in begun.answers]
            begun.answers.update(
                self._on_all(late, lambda m: m.handle.begin.remote(begun.reference, limit))
            )
            swapped = self._on_all(self._serving(), self._commit_call)
            if swapped:
                with self._changed:
                    self._put_in_force(begun.answers, swapped)
            self._histories.share(self._serving())
        return self._await_version(version)

    def _commit_call(self, member: Member) -> Any:
        assert self._update is not None
        config, update = self._config, self._update
        return member.handle.commit.remote(
            update.version,
            update.reference,
            config.in_flight,
            config.publish_timeout_s,
            update.sent,
        )

    def _serving(self) -> list[Member]:
        with self._changed:
            return [member for member in self._members.values() if member.serving]

    def _await_version(self, version: int) -> Publication:
        limit = self._config.start_timeout_s + self._config.publish_timeout_s
        deadline = time.monotonic() + limit
        with self._changed:
            self._check()
            while self._publication is None or self._publication.version != version:
                self._check()
                if not self._changed.wait(deadline - time.monotonic()):
                    raise RolloutTimeout(f"version {version}: no actor took it in {limit} s")
            return self._publication

    def _put_in_force(self, begun: dict[str, Begun], swapped: dict[str, Committed]) -> None:
        """Records the version that members now run, with the largest drift any of them measured."""
        assert self._update is not None
        name, worst = max(swapped.items(), key=lambda item: item[1].drift.kl)
        self._publication = Publication(
            version=begun[name].version,
            digest=begun[name].digest,
            drift=worst.drift,
            weights_bytes=begun[name].weights_bytes,
            kernels=begun[name].kernels,
            publish_s=time.time() - self._update.started,
            swap_s=max(answer.swap_s for answer in swapped.values()),
            draft_version=begun[name].draft_version,
        )
        self._queue.published()
        self._dispatch()
        self._changed.notify_all()

    def _published_version(self) -> int | None:
        return self._publication.version if self._publication else None

    def _on_all(
        self,
        members: Sequence[Member],
        call: Callable[[Member], Any],
        *,
        abandon: int | None = None,
    ) -> dict[str, Any]:
        """Answers by member; those that fail to answer are fenced off. With `abandon` a refusal (a
        project error) withdraws that version everywhere and is raised."""
        references = {member.name: call(member) for member in members}
        limit = self._config.publish_timeout_s + 5.0  # the actor's own limit ends first
        ray.wait(list(references.values()), num_returns=len(references), timeout=limit)
        answers: dict[str, Any] = {}
        for member in members:
            try:
                answers[member.name] = member.ask(references[member.name], POLL_S)
            except (ActorFailed, RolloutTimeout) as error:
                self._fence(member, str(error))
            except InvalidWeights as error:
                if abandon is None:
                    raise
                for other in members:
                    other.handle.abandon.remote(abandon)
                raise InvalidWeights(f"{member.name} refused the update: {error}") from error
        return answers

    def history(self) -> list[Any]:
        """A boxed reference of what the members' proposers remember, as arrays, rows in flight left
        out; an empty box where none remembers anything."""
        with self._publishing:
            self._check()
            reference = self._histories.collect(self._serving())
        return [] if reference is None else [reference]

    def load_history(self, boxed_arrays: Sequence[Any]) -> None:
        """Has the members' proposers remember what an earlier part of the run did. Raises
        InvalidConfig for the history of another model."""
        with self._publishing:
            self._check()
            self._histories.load(self._serving(), boxed_arrays[0])

    def snapshot(self) -> ClusterSnapshot:
        """Lifetime sums, right now."""
        with self._changed:
            counters = SpecCounters()
            counters.add(self._departed_counters)
            gauges = Counter(self._departed_sums)
            for member in self._members.values():
                counters.add(member.counters)
                gauges.update({k: v for k, v in member.gauges.items() if "/" in k})
            return ClusterSnapshot(
                elapsed_s=self._elapsed_s(),
                ledger=self._ledger.counts(),
                generated_tokens=self._ledger.generated_tokens,
                finished_samples=self._finished["samples"],
                truncated_samples=self._finished["truncated"],
                finished_tokens=self._finished["tokens"],
                counters=counters,
                phase_s={phase: gauges[f"seconds/{phase}"] for phase in PHASES},
                ages=dict(self._queue.ages),
                stale_by_length=dict(self._stale_by_length),
                publication=self._publication,
                actors=sum(member.serving for member in self._members.values()),
                restarts=self._restarts,
                last_loss=self._last_loss,
                groups_held=self._queue.num_open + self._queue.num_queued,
                gauges={
                    name: value
                    for name, value in gauges.items()
                    if name.partition("/")[0] in PROPOSER_GAUGES
                },
                explanations={m.name: m.explanation for m in self._members.values()},
            )

    def config(self) -> ClusterConfig:
        """As launched."""
        return self._config

    def actors(self) -> list[ActorInfo]:
        """The members that serve now."""
        with self._changed:
            return [m.info for m in self._members.values() if m.serving and m.info]

    def boundary(self) -> Boundary:
        """What a resumed run needs, and what was retired up to this very moment."""
        with self._changed:
            requests, samples = self._queue.unfinished()
            snapshot = self.snapshot()
            state = {
                "ledger": self._ledger.state(),
                "elapsed_s": snapshot.elapsed_s,
                "counters": asdict(snapshot.counters),
                "finished_counts": dict(self._finished),
                "unfinished": [request.id for request in requests],
                "finished": [s.to_json() for s in (*samples, *self._restored.values())],
            }
            return Boundary(state, self.retired())

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over fates, counters and clock of an earlier part of the run; before the first
        submit."""
        with self._changed:
            assert self._first_submit is None, "restore comes before the first submit"
            self._ledger = Ledger.from_state(state["ledger"])
            self._elapsed_before_s = state["elapsed_s"]
            self._departed_counters.add(SpecCounters(**state["counters"]))
            self._finished.update(state["finished_counts"])

    # ---- under the lock -------------------------------------------------------------------

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _version(self) -> int:
        if self._update is None:
            raise InvalidRequest("no weights are published; call publish first")
        return self._update.version

    def _elapsed_s(self) -> float:
        running = time.monotonic() - self._first_submit if self._first_submit else 0.0
        return self._elapsed_before_s + running

    def _dispatch(self) -> None:
        """Opens groups as the pace allows and sends their requests to the least loaded members."""
        for request in self._queue.dispatch():
            if (sample := self._restored.pop(request.id, None)) is not None:
                self._ledger.delivered(sample)
                self._queue.deliver(sample)
            else:
                self._to_send.append(request)
        serving = [member for member in self._members.values() if member.serving]
        if self._publication is None or not serving:
            return
        batches: dict[str, list[RolloutRequest]] = {member.name: [] for member in serving}
        while self._to_send:
            # Siblings go to one member, which prefills their prompt once.
            prompt = self._to_send[0].prompt_ids
            member = min(serving, key=lambda m: len(m.assigned))
            if len(member.assigned) >= PREFETCH * self._config.engine.num_slots:
                break  # what waits here is not on any actor's clock and can go to another
            while self._to_send and self._to_send[0].prompt_ids == prompt:
                request = self._to_send.popleft()
                member.assigned[request.id] = Assigned(request, time.monotonic())
                batches[member.name].append(request)
        for member in serving:
            if batches[member.name]:
                member.sent.append(member.handle.submit.remote(batches[member.name]))

    def _receive(self, member: Member, samples: Sequence[RolloutSample]) -> None:
        for sample in samples:
            id_ = sample.request.id
            assigned = member.assigned.pop(id_, None)
            if not self._ledger.delivered(sample):
                continue
            if sample.finish_reason in ("stop", "length"):
                self._finished.update(
                    samples=1,
                    tokens=len(sample.token_ids),
                    truncated=sample.finish_reason == "length",
                )
                self._queue.deliver(sample)
                continue
            by_policy = sample.finish_reason == "abort" and not (assigned and assigned.aborted)
            if by_policy or self._retries[id_] < self._config.max_retries:
                self._retries[id_] += not by_policy
                self._ledger.retried(id_)
                self._to_send.append(_again(sample.request))
            else:
                self._queue.fail(sample)

    def _retire(self, samples: Sequence[RolloutSample], fate: Final) -> None:
        self._ledger.settle((sample.request.id for sample in samples), fate)
        self._retired += [Retired(sample, fate) for sample in samples]
        if fate == "stale":
            self._stale_by_length.update(_length_class(len(s.token_ids)) for s in samples)

    # ---- supervision ----------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            while not self._stopping:
                self._collect()
                self._abort_overdue()
        except Exception as error:  # noqa: BLE001  # a thread has nobody to raise to: `_check` does
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _collect(self) -> None:
        with self._changed:
            members = [member for member in self._members.values() if member.serving]
            for member in members:
                if member.collecting is None:
                    member.collecting = member.handle.collect.remote(COLLECT_S)
                    member.collecting_since = time.monotonic()
            references = {m.collecting: m for m in members}
        if not references:
            time.sleep(POLL_S)
            return
        self._confirm_sent(members)
        ray.wait(list(references), num_returns=1, timeout=COLLECT_S)
        ready, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
        for reference in ready:
            self._take_report(references[reference], reference)
        now = time.monotonic()
        for member in members:
            if member.collecting and now - member.collecting_since > self._config.health_timeout_s:
                self._fence(member, f"no answer for {self._config.health_timeout_s} s")

    def _confirm_sent(self, members: Sequence[Member]) -> None:
        """A member that refuses what it was sent is out of step with this process: fence it."""
        for member in members:
            if not member.sent:
                continue
            done, _ = ray.wait(member.sent, num_returns=len(member.sent), timeout=0)
            for reference in done:
                member.sent.remove(reference)
                try:
                    ray.get(reference, timeout=self._config.health_timeout_s)
                except (RayActorError, RayTaskError, GetTimeoutError) as error:
                    self._fence(member, first_line(error))

    def _take_report(self, member: Member, reference: Any) -> None:
        member.collecting = None
        try:
            report = ray.get(reference, timeout=self._config.health_timeout_s)
        except (RayActorError, RayTaskError, GetTimeoutError) as error:
            self._fence(member, first_line(error))
            return
        with self._changed:
            if member.name not in self._members:
                return
            member.counters, member.gauges = report.counters, report.gauges
            member.explanation = report.explanation
            if report.samples:
                self._receive(member, report.samples)
                self._retire(self._queue.drop_failed(), "failed")
                self._dispatch()
                self._changed.notify_all()

    def _abort_overdue(self) -> None:
        limit = self._config.request_timeout_s
        now = time.monotonic()
        with self._changed:
            for member in list(self._members.values()):
                overdue = [a for a in member.assigned.values() if now - a.since > limit]
                if any(now - assigned.since > 2 * limit for assigned in overdue):
                    self._fence(member, f"a request ran for {2 * limit} s and would not abort")
                elif fresh := [a for a in overdue if not a.aborted]:
                    for assigned in fresh:
                        assigned.aborted = True
                    member.handle.abort.remote([a.request.id for a in fresh])

    def _fence(self, member: Member, reason: str) -> None:
        """Takes a member out of service for good, re-issues what it held, starts another."""
        with self._changed:
            if self._members.pop(member.name, None) is None or self._stopping:
                return
            member.serving = False
            self._departed_counters.add(member.counters)
            self._departed_sums.update(_sums(member.gauges))
            self._reissue([assigned.request for assigned in member.assigned.values()])
            self._restarts += 1
            self._last_loss = f"{member.name}: {reason}"
            keeps_weights = self._config.engine.keeps_weights
            exhausted = not keeps_weights or self._restarts > self._config.max_restarts
            if exhausted and not (keeps_weights and any(m.serving for m in self._members.values())):
                self._failure = FleetDead(
                    f"{self._restarts} actors were lost, the last one {member.name}: {reason}"
                    + ("" if keeps_weights else NO_COPY)
                )
            self._dispatch()
            self._changed.notify_all()
        ray.kill(member.handle)
        if not exhausted:
            threading.Thread(target=self._replace, name="replace", daemon=True).start()

    def _reissue(self, requests: Sequence[RolloutRequest]) -> None:
        """Sends requests of a lost member again, first in line; one that was lost too often with
        its actor is failed, since it may be the cause."""
        self._lost.update(request.id for request in requests)
        again = [_again(r) for r in requests if self._lost[r.id] <= self._config.max_reissues]
        self._to_send.extendleft(reversed(again))
        for request in requests:
            if self._lost[request.id] > self._config.max_reissues:
                sample = _lost_sample(request, self._lost[request.id])
                self._ledger.delivered(sample)
                self._queue.fail(sample)

    def _replace(self) -> None:
        member = self._create_member()
        try:
            self._await_up(member)
        except (ActorFailed, RolloutTimeout, InvalidWeights) as error:
            self._fence(member, str(error))


def _again(request: RolloutRequest) -> RolloutRequest:
    return replace(request, attempt=request.attempt + 1)


def _lost_sample(request: RolloutRequest, times: int) -> RolloutSample:
    """Stands for a request whose actors died."""
    detail = f"lost with {times} actors one after the other"
    return RolloutSample(
        request, (), (), (), (), (), "error", detail, "full", "", SpecCounters(), Timings()
    )


def tokenise_probe(config: ClusterConfig) -> list[list[int]]:
    """The probe texts as ids; without a tokenizer, ids spread evenly over the vocabulary."""
    folder = Path(config.engine.model_folder)
    vocab_size = read_config(folder).vocab_size
    if not (folder / "tokenizer.json").is_file():
        return [[(7 + 13 * i) % vocab_size for i in range(24)]]
    tokenizer = read_tokenizer(folder)
    return [tokenizer.encode(text, add_special_tokens=False) for text in config.probe_texts]


def _sums(gauges: dict[str, float]) -> dict[str, float]:
    """Sums over rounds, which stay true of the cluster when the actor is gone."""
    return {n: value for n, value in gauges.items() if n.startswith(("seconds/", "draft/"))}


def _length_class(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()


OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 32}
RemoteController: Any = ray.remote(**OPTIONS)(Controller)
"""A `Controller` in a process of its own, so that it outlives a learner that reconnects."""
