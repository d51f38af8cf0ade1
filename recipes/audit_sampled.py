"""An exactness audit of a real engine on a real model: requests in, samples out.

The engine is a black box behind `rollout.engine.Engine`. Do the tokens that it emits follow the law
which the sampling parameters name, and are the recorded log-probabilities those of that law?

Another forward answers: float32, of the very weights that the engine runs, by transformers. Its
logits become laws by `reference_law`, float64 code of its own. Then, each a `Finding`:

- counts of the first tokens of one prompt, and of the second tokens behind the most frequent first,
  against exact probabilities (chi-square);
- the randomised probability integral transform of every token, with the vocabulary in order of id and
  of probability: uniform and independent (Smith, J. Forecasting 4, 1985);
- the importance identity E[p'(y) / p(y)] = 1 with p' = p^1.1 normalised, the law at temperature
  T / 1.1, where 0 <= p' / p <= V^0.1 (Jensen: sum p^1.1 >= V^-0.1);
- greedy: every token is the reference's argmax, or as good as it but for rounding;
- speculation on against off: lengths, log-probabilities, where two samples of a prompt part;
- acceptances against what the engine foretold, and its own transform counts;
- the three recorded numbers of every token, recomputed; no token that the law cannot emit;
- the same requests in another order and batch; streams of a group that differ.

Rounding moves tokens over the edge of a filter. A token that rounding may move is on the edge: the law
given that none of them is drawn is the same whichever were kept, so they are left out of the tests,
and a recorded number may lie anywhere between those of the smallest and the largest law. What is on
the edge is a matter of the law and not of the draw, so leaving it out selects nothing.

Not here: whether transformers runs the model rightly; grammars; drafts as such, which a black box
does not show (`recipes.audit_enumerated` has the joint law of whole rounds).
"""

import copy
import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from transformers import AutoModelForCausalLM, DynamicCache

from actors.engine_spec import EngineSpec, make_engine, make_policy, num_ids, pack_folder
from quant.formats import FORMATS
from quant.int8 import dequantise_weight, quantise_weight
from recipes.audit_statistics import (
    LEAST_EXPECTED,
    Finding,
    chi_square,
    family_level,
    independence,
    mean_zero,
    two_sample,
    uniformity,
)
from rollout.checkpoint import read_config, read_tokenizer
from rollout.engine import Closing, Engine
from rollout.errors import InvalidConfig
from rollout.mtp_weights import MTP_PREFIX
from rollout.packing import digest, quantised_matrices
from rollout.policy import Window
from rollout.request import RolloutRequest, RolloutSample, SpecCounters
from rollout.sampling import SamplingParams
from rollout.watch import PIT_BINS, acceptance_p_value

Array = NDArray[np.float64]
Tokens = tuple[int, ...]
BudgetName = Literal["default", "thorough"]

FALSE_ALARM_RATE = 1e-3
"""Of one audit, all its findings together."""
NUM_FINDINGS = 19
"""The most that one audit has; each is tested at its share of the rate."""
ALTERED = 1.1
"""The importance identity is that of the law to this power, normalised."""
POWER_TV, POWER_PAIRED_TV = 0.2, 0.4
"""Total variation at which the power of counts is stated, and that of two samples compared."""
POWER_SHIFT, POWER_CORRELATION = 0.08, 0.2
"""Of the transform: distance of its distribution, correlation of neighbours."""
POWER_WEIGHT, POWER_ACCEPTANCE = 0.03, 0.1
"""Mean of an importance weight minus 1; acceptances a position beyond those foretold."""
SHORT_LEN = 3
"""Tokens of the many samples of one prompt."""
DRAWN_DRAFTS = ("history_sampled", "draft_model", "self_draft", "mtp", "mixture")
"""Proposers that draw; what they draft depends on what was cached or remembered at the time."""
MAX_LOGITS = 2**26
"""Numbers that one forward of the reference returns at most; bounds its memory."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much is generated."""

    short_samples: int
    """Samples of the first prompt, SHORT_LEN tokens each."""
    group_size: int
    """Samples of every prompt, and as many without speculation."""
    new_tokens: int
    """Tokens of those at most."""
    again: int
    """Samples of every group that are generated once more."""


BUDGETS: dict[BudgetName, Budget] = {
    "default": Budget(short_samples=512, group_size=8, new_tokens=32, again=2),
    "thorough": Budget(short_samples=4096, group_size=32, new_tokens=64, again=8),
}


@dataclass(frozen=True, slots=True)
class Rounding:
    """What two forwards of the same weights may differ by, about three times what SmolLM2 showed
    over 160 tokens of text and its whole vocabulary. At a temperature T below 1, 1 / T times it."""

    logprob: float
    """Of one token, the largest."""
    mean_logprob: float
    """Of one token, the mean over many."""
    mass: float
    """Of the probability of a set, the largest: total variation."""
    divergence: float
    """Chi-square divergence of the laws at one position: where n draws make it n * divergence > 1,
    a chi-square test would see rounding, so fewer are looked at."""
    diverging_rate: float
    """Tokens drawn differently by one uniform, of all with the same tokens before."""


ROUNDINGS = {
    "float32": Rounding(1e-3, 1e-4, 1e-4, 1e-8, 0.01),  # measured: 7e-5, 4e-6, 6e-6, 3e-11
    "int8_w8a16": Rounding(0.5, 0.05, 0.05, 2e-3, 0.05),  # .16, .014, .018, 4e-4 to 1e-3
    "bfloat16": Rounding(1.0, 0.12, 0.15, 1e-2, 0.1),  # .32, .038, .05, 3e-3 to 1e-2
    "int8_w8a8": Rounding(5.0, 0.5, 0.5, 0.5, 0.3),  # 2.1, .11, .25, .04 to .25
}


def rounding_of(spec: EngineSpec, sampling: SamplingParams) -> Rounding:
    """By the coarsest rounding between two layers: W8A16 keeps 16 bits of activations and of what is
    cached, at any dtype."""
    kind: str = spec.target_format
    if kind != "int8_w8a8" and spec.torch_dtype != torch.float32:
        kind = "bfloat16"
    rounding = ROUNDINGS["float32" if kind == "none" else kind]
    wider = max(1.0, 1.0 / (sampling.temperature or 1.0))
    return replace(
        rounding,
        logprob=rounding.logprob * wider,
        mean_logprob=rounding.mean_logprob * wider,
        mass=min(1.0, rounding.mass * wider),
        divergence=rounding.divergence * wider**2,
        diverging_rate=min(1.0, rounding.diverging_rate * wider),
    )


@dataclass(frozen=True, slots=True)
class SampledAudit:
    """What one engine did under one set of sampling parameters."""

    findings: tuple[Finding, ...]
    absent: Mapping[str, str]
    """Tests that could not be made, and why."""
    level: float
    """A finding with a p-value below it fails."""
    reference: str
    """The forward that was compared with."""
    weights_digest: str
    tolerance: Rounding
    """What is put down to rounding, at the temperature that was sampled."""
    num_samples: int
    num_tokens: int
    num_on_edge: int
    """Tokens on the edge of a filter, left out of the tests of the law."""
    num_drafted: int
    num_verified: int
    num_accepted: int
    acceptance_rate: float | None
    """Accepted / verified; None when nothing was verified."""
    seconds: Mapping[str, float]
    """`generating`, `reference` (its forwards and laws), `total`."""

    @property
    def failed(self) -> list[str]:
        """Names of the findings that a right engine would not have."""
        return [finding.name for finding in self.findings if finding.p_value < self.level]

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        findings = [finding.to_json() for finding in self.findings]
        return asdict(self) | {"findings": findings, "failed": self.failed}


def run(
    spec: EngineSpec,
    sampling: SamplingParams,
    prompts: Sequence[Tokens],
    *,
    budget: Budget | BudgetName = "default",
    seed: int = 0,
    false_alarm_rate: float = FALSE_ALARM_RATE,
    engine_factory: Callable[[EngineSpec], Engine] = make_engine,
    reference: "Reference | None" = None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> SampledAudit:
    """Audits the engine that `engine_factory` makes of `spec`, on the weights of its folder.

    Of the first prompt many short samples are drawn. A reference made once is good for every audit
    of the same weights; None makes one. Raises InvalidConfig for what cannot be audited,
    InvalidRequest for what the engine refuses.
    """
    started = time.perf_counter()
    if sampling.grammar is not None:
        raise InvalidConfig(
            "a grammar is audited by enumeration only; leave it out of the sampling"
        )
    if not prompts:
        raise InvalidConfig("no prompts; give at least one, such as default_prompts")
    budget = BUDGETS[budget] if isinstance(budget, str) else budget
    rounding = rounding_of(spec, sampling)
    book = _Book(family_level(false_alarm_rate, NUM_FINDINGS), on_finding)
    source = _Source(engine_factory, spec)
    try:
        drawn = _draw(source, sampling, prompts, budget, seed)
    finally:
        source.close()
    _find_answers(book, drawn.all(), source.num_requested)
    reference_started = time.perf_counter()
    reference = reference or make_reference(spec)
    judged = _judge((*drawn.on, *drawn.off), reference, sampling, rounding, seed)
    reference_s = time.perf_counter() - reference_started
    tokens = [one for sample in drawn.on for one in judged[sample.request.id]]
    counters = SpecCounters()
    for sample in (*drawn.on, *drawn.short):
        counters.add(sample.counters)
    _find_possible(book, tokens)
    if sampling.greedy:
        _find_argmax(book, tokens, rounding)
    else:
        _find_counts(book, drawn.short, reference, sampling, rounding)
        _find_transform(book, tokens, read_config(Path(spec.model_folder)).vocab_size)
        _find_differences(book, drawn, judged)
        _find_own_transform(book, counters)
        _find_streams(book, drawn.on, judged)
    _find_acceptance(book, counters)
    _find_recomputed(book, [one for every in judged.values() for one in every], rounding)
    _find_again(book, drawn, spec, rounding)
    return SampledAudit(
        findings=tuple(book.findings),
        absent=book.absent,
        level=book.level,
        reference=reference.name,
        weights_digest=source.digest,
        tolerance=rounding,
        num_samples=len(drawn.all()),
        num_tokens=sum(len(sample.token_ids) for sample in drawn.all()),
        num_on_edge=sum(one.on_edge for one in tokens),
        num_drafted=counters.drafted,
        num_verified=counters.verified,
        num_accepted=counters.accepted,
        acceptance_rate=counters.acceptance_rate,
        seconds={
            "generating": source.seconds,
            "reference": reference_s,
            "total": time.perf_counter() - started,
        },
    )


# ---- the reference's law --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReferenceLaw:
    """The law of one position; V vocabulary, float64."""

    scaled: torch.Tensor  # [V] edited logits / temperature, the largest 0, -inf where banned
    full: torch.Tensor  # [V] log-probabilities at the same temperature before every edit
    sure: torch.Tensor  # [V] bool: kept by the filters however the logits are rounded
    possible: torch.Tensor  # [V] bool: may be kept


def reference_law(
    logits: torch.Tensor,  # [V]
    sampling: SamplingParams,
    prompt_ids: Sequence[int],
    generated: Sequence[int],
    *,
    logprob: float = 0.0,
    mass: float = 0.0,
) -> ReferenceLaw:
    """Bias, bans, penalties, temperature, top-k, top-p, min-p; ties with the last kept are kept.
    `logprob`, `mass`: what rounding may do to either. Greedy: temperature 1, no filter."""
    edited, temperature = logits.double().cpu().clone(), sampling.temperature or 1.0
    full = (edited / temperature).log_softmax(-1)
    for token, amount in sampling.logit_bias:
        edited[token] += amount
    if len(generated) < sampling.min_tokens:
        edited[list(sampling.stop_ids)] = -math.inf
    for *start, last in sampling.bad_words:
        if list(generated[max(0, len(generated) - len(start)) :]) == start:
            edited[last] = -math.inf
    if sampling.penalised:
        times, penalty = Counter(generated), sampling.repetition_penalty
        for token in {*prompt_ids, *generated}:
            value = float(edited[token])
            value = value / penalty if value > 0 else value * penalty
            value -= sampling.frequency_penalty * times[token]
            edited[token] = value - sampling.presence_penalty * (times[token] > 0)
    scaled = edited / temperature
    scaled -= scaled.max()
    sure = possible = scaled > -math.inf
    if not sampling.greedy and (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        ranked = np.sort(scaled.numpy())[::-1]
        possible = possible & (scaled >= _smallest_kept(ranked, sampling, logprob, mass))
        sure = possible & (scaled >= _smallest_kept(ranked, sampling, -logprob, -mass))
    return ReferenceLaw(scaled, full, sure, possible)


def _smallest_kept(ranked: Array, sampling: SamplingParams, logprob: float, mass: float) -> float:
    """The smallest of log weights in falling order [V] that the filters keep. With log weights known
    to +-logprob and sums to +-mass: the smallest that may be kept; below 0, that must be."""
    num = len(ranked)

    def with_ties(count: int) -> int:
        """How many go with the first `count` of `num`; below 0: are above all that may go."""
        if logprob < 0:
            return int((ranked[:num] > ranked[count] - logprob).sum()) if count < num else num
        return int((ranked[:num] >= ranked[count - 1] - logprob).sum())

    if 0 < sampling.top_k < num:
        num = with_ties(sampling.top_k)
    if sampling.top_p < 1 and num:
        cumulative = np.exp(ranked[:num]).cumsum()
        short = cumulative < (sampling.top_p + mass) * cumulative[-1]
        num = with_ties(min(int(short.sum()) + 1, num))
    if sampling.min_p:
        least = ranked[0] + math.log(sampling.min_p) - logprob
        num = min(num, int((ranked >= least).sum()))
    return float(ranked[num - 1]) if num else math.inf


# ---- the reference's forward ----------------------------------------------------------------------


class Reference(Protocol):
    """Logits by another way than the engine's."""

    name: str

    def logits(
        self, prompt: Tokens, sequences: Sequence[Tokens]
    ) -> Iterator[tuple[Tokens, torch.Tensor]]:
        """Every sequence with the logits [len + 1, V] behind the prompt and behind each token."""
        ...


class TransformersReference:
    """transformers in float32, over the weights as the engine rounds them."""

    def __init__(self, spec: EngineSpec) -> None:
        folder, format_ = Path(spec.model_folder), FORMATS[spec.target_format]
        dtype = str(spec.torch_dtype).removeprefix("torch.")
        weights = f"{spec.target_format} dequantised" if format_.scale_dtype else dtype
        self.name = f"transformers in float32, weights {weights}"
        self._device = torch.device(spec.device)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, local_files_only=True
        )
        scale_dtypes = quantised_matrices(read_config(folder), format_)
        for name, weight in self._model.named_parameters():
            if name in scale_dtypes:
                weight.data = dequantise_weight(quantise_weight(weight.data, scale_dtypes[name]))
            else:
                weight.data = weight.data.to(spec.torch_dtype).float()
        self._model.eval().to(self._device)
        self._num_ids = num_ids(folder)

    def _real(self, logits: torch.Tensor) -> torch.Tensor:
        return _real(logits, self._num_ids)

    @torch.inference_mode()
    def logits(
        self, prompt: Tokens, sequences: Sequence[Tokens]
    ) -> Iterator[tuple[Tokens, torch.Tensor]]:
        """The prompt runs once; its cache goes to every sequence. The cache goes in by place: its
        keyword is not the same in all versions of transformers."""
        cached = DynamicCache()
        ids = torch.tensor([prompt], device=self._device)
        first = self._real(self._model(ids, None, None, cached).logits[0, -1:])  # [1, V]
        ordered = sorted(sequences, key=len)
        while ordered:
            longest = len(ordered[-1])
            if not longest:
                yield from ((sequence, first) for sequence in ordered)
                return
            some = ordered[-max(1, MAX_LOGITS // (longest * first.shape[-1])) :]
            del ordered[-len(some) :]
            padded = torch.tensor(
                [(*sequence, *[0] * (longest - len(sequence))) for sequence in some],
                device=self._device,
            )  # [B, T]; what stands behind a sequence does not change what is before
            cache = copy.deepcopy(cached)
            cache.batch_repeat_interleave(len(some))
            out = self._real(self._model(padded, None, None, cache).logits)  # [B, T, V]
            for row, sequence in enumerate(some):
                yield sequence, torch.cat([first, out[row, : len(sequence)]])


class UncachedReference:
    """The project's own decoder, one uncached forward a sequence: for formats whose activations are
    rounded by the kernel, which transformers does not do."""

    def __init__(self, spec: EngineSpec) -> None:
        dtype = str(spec.torch_dtype).removeprefix("torch.")
        self.name = f"own decoder, {spec.target_format} in {dtype}, one uncached forward a sequence"
        self._policy = make_policy(spec, num_slots=1)
        self._policy.swap(self._policy.load(pack_folder(spec)))
        self._num_ids = num_ids(Path(spec.model_folder))

    def logits(
        self, prompt: Tokens, sequences: Sequence[Tokens]
    ) -> Iterator[tuple[Tokens, torch.Tensor]]:
        for sequence in sequences:
            self._policy.truncate(0, 0)
            window = Window(0, 0, (*prompt, *sequence), num_logits=len(sequence) + 1)
            yield sequence, _real(self._policy.score([window]), self._num_ids)


def _real(logits: torch.Tensor, num: int) -> torch.Tensor:
    """Logits [..., V] on the CPU, padding behind the `num` ids of the tokenizer impossible."""
    real = logits.cpu()
    if num < real.shape[-1]:
        real = real.clone()
        real[..., num:] = -torch.inf
    return real


def make_reference(spec: EngineSpec) -> Reference:
    """What an engine of this spec is compared with; good for every audit of the same weights."""
    if spec.target_format == "int8_w8a8":
        return UncachedReference(spec)
    return TransformersReference(spec)


# ---- what is generated ----------------------------------------------------------------------------

TEXTS = (
    "heads, tails, tails, heads, tails, heads, heads, tails,",
    "2 + 3: 2 + 3 = 5\n17 + 4: 17 + 4 = 21\n8 + 6:",
    "Once upon a time there was a",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
    "The tide went out slowly, and with it the noise of the harbour. On the pier an old man was "
    "mending a net; he did not look up when the ferry came in, nor when the first of the",
)
QUESTIONS = ("Name three colours.", "Write one sentence about the sea. Then write it again.")


def default_prompts(model_folder: str) -> list[Tokens]:
    """Eight prompts of different lengths. The first repeats itself, so that every proposer has
    something to draft; questions are put as the model's chat template says, if it has one."""
    tokenizer = read_tokenizer(Path(model_folder))
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        if tokenizer.chat_template
        else question
        for question in QUESTIONS
    ]
    return [tuple(tokenizer.encode(t, add_special_tokens=False)) for t in (*TEXTS, *chats)]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Samples by what they are for, each in order of prompt and sample index."""

    on: list[RolloutSample]
    off: list[RolloutSample]
    """The same prompts without speculation, other indices; empty if it is off anyway."""
    short: list[RolloutSample]
    """Of the first prompt."""
    again: list[RolloutSample]
    """Some of the requests of `on` once more."""

    def all(self) -> list[RolloutSample]:
        return [*self.on, *self.off, *self.short, *self.again]


def _draw(
    source: "_Source",
    sampling: SamplingParams,
    prompts: Sequence[Tokens],
    budget: Budget,
    seed: int,
) -> _Drawn:
    """Sample indices never repeat within a prompt, but for those drawn again."""
    spec, size = source.spec, budget.group_size
    long, short = _cut(sampling, budget.new_tokens), _cut(sampling, SHORT_LEN)
    asked = _requests(prompts, range(size), long, seed)
    others = _requests(prompts, range(size, 2 * size), long, seed)
    many = range(2 * size, 2 * size + (0 if sampling.greedy else budget.short_samples))
    again = [request for request in asked if request.sample_index < budget.again][::-1]
    engine = source.engine(spec)
    on = source.run(engine, asked)
    shorts = source.run(engine, _requests(prompts[:1], many, short, seed))
    del engine  # one at a time is in memory
    off: list[RolloutSample] = []
    if spec.proposer != "none":
        off = source.run(source.engine(replace(spec, proposer="none")), others)
    repeated: list[RolloutSample] = []
    if repeats(spec):
        half = len(again) // 2
        smaller = replace(spec, num_slots=max(1, spec.num_slots // 2))
        repeated = source.run(source.engine(smaller), again[:half], again[half:])
    return _Drawn(on, off, shorts, repeated)


def repeats(spec: EngineSpec) -> bool:
    """A seed gives the same tokens, whatever is drafted. vLLM's own seeds do not."""
    return spec.proposer not in DRAWN_DRAFTS and spec.engine != "vllm_stock"


def _cut(sampling: SamplingParams, new_tokens: int) -> SamplingParams:
    limit = min(sampling.max_new_tokens, new_tokens)
    return replace(sampling, max_new_tokens=limit, min_tokens=min(sampling.min_tokens, limit))


def _requests(
    prompts: Sequence[Tokens], indices: Iterable[int], sampling: SamplingParams, seed: int
) -> list[RolloutRequest]:
    return [
        RolloutRequest(f"prompt {n}, sample {i}", f"{n}", f"prompt {n}", i, ids, sampling, seed)
        for n, ids in enumerate(prompts)
        for i in indices
    ]


class _Source:
    """Fresh engines under one set of weights."""

    def __init__(self, engine_factory: Callable[[EngineSpec], Engine], spec: EngineSpec) -> None:
        self.spec, self._factory, self._weights = spec, engine_factory, pack_folder(spec)
        self.digest = digest(self._weights)
        self.num_requested, self.seconds = 0, 0.0
        self._last: Engine | None = None

    def engine(self, spec: EngineSpec) -> Engine:
        """A new one; the one before is at its end."""
        self.close()
        engine, weights = self._factory(spec), self._weights
        self._last = engine
        if not spec.has_head:
            weights = {n: t for n, t in weights.items() if not n.startswith(MTP_PREFIX)}
        prepared = engine.prepare(weights)
        engine.load(prepared, version=0, digest=self.digest, in_flight="interrupt")
        return engine

    def close(self) -> None:
        if isinstance(self._last, Closing):
            self._last.close()
        self._last = None

    def run(self, engine: Engine, *portions: Sequence[RolloutRequest]) -> list[RolloutSample]:
        """Samples in order of request; a portion joins two rounds after the one before."""
        started = time.perf_counter()
        samples: list[RolloutSample] = []
        for portion in portions:
            engine.submit(portion)
            samples += engine.step() + engine.step()
        while engine.num_unfinished:
            samples += engine.step()
        self.seconds += time.perf_counter() - started
        self.num_requested += sum(map(len, portions))
        answers = {sample.request: sample for sample in samples}
        return [answers[r] for portion in portions for r in portion if r in answers]


def _by_prompt(samples: Iterable[RolloutSample]) -> list[list[RolloutSample]]:
    groups: dict[str, list[RolloutSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.request.prompt_id].append(sample)
    return list(groups.values())


# ---- samples under the reference's law ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JudgedToken:
    """One emitted token. Gaps: how far a recorded number is from every value that it may have."""

    logprob: float
    """The reference's; of a token that the filters drop, as if they had kept it."""
    gaps: Sequence[float]
    """Of logprob, logprob_full and kept_mass."""
    possible: bool
    top_gap: float
    """Log weight of the most probable token minus its own."""
    on_edge: bool = False
    transforms: Sequence[float] = ()
    """By id and by falling probability; none for greedy sampling, on the edge and outside."""
    ratio: float = 1.0
    """p' / p of the altered law."""
    ratio_variance: float = 0.0


def judge_token(
    law: ReferenceLaw,
    sampling: SamplingParams,
    token: int,
    recorded: Sequence[float],
    uniform: float,
) -> JudgedToken:
    """`recorded`: logprob, logprob_full and kept mass; `uniform`: of the transforms."""
    assert 0 <= token < len(law.scaled), f"token {token} is not in the vocabulary"
    top_gap = 0.0 - float(law.scaled[token])
    if sampling.greedy:  # a point mass: recorded as 0, 0 and 1
        gaps = [_gap(value, want, want) for value, want in zip(recorded, (0.0, 0.0, 1.0))]
        return JudgedToken(0.0, gaps, math.isfinite(top_gap), top_gap)
    weights, full = law.scaled.exp(), law.full.exp()  # [V]
    supports = (_with(token, law.possible), _with(token, law.sure))  # largest, smallest
    low, high = (-top_gap - math.log(float((weights * kept).sum())) for kept in supports)
    most, least = (float((full * kept).sum()) for kept in supports)
    own_full = float(law.full[token])
    gaps = [
        _gap(value, *between)
        for value, between in zip(recorded, ((low, high), (own_full, own_full), (least, most)))
    ]
    if not bool(law.sure[token]):
        possible = bool(law.possible[token])
        return JudgedToken(low, gaps, possible, top_gap, on_edge=possible)
    weights *= law.sure
    total = float(weights.sum())
    own = weights[token]
    by_id = weights[:token].sum() + uniform * own
    by_rank = (weights * (weights > own)).sum() + uniform * (weights * (weights == own)).sum()
    transforms = [min(float(mass) / total, 1 - 2.0**-53) for mass in (by_id, by_rank)]
    tilt = (law.scaled * (ALTERED - 1)).exp()  # [V]
    tilted, square = float((weights * tilt).sum()), float((weights * tilt * tilt).sum())
    ratio = float(tilt[token]) * total / tilted
    variance = max(0.0, square * total / tilted**2 - 1)
    return JudgedToken(low, gaps, True, top_gap, False, transforms, ratio, variance)


def _with(token: int, kept: torch.Tensor) -> torch.Tensor:
    """A support [V] with the token that was emitted, which was in it."""
    if bool(kept[token]):
        return kept
    return kept.index_fill(0, torch.tensor([token]), True)


def _gap(value: float, low: float, high: float) -> float:
    return max(0.0, low - value, value - high) if math.isfinite(value) else math.inf


def _judge(
    samples: Sequence[RolloutSample],
    reference: Reference,
    sampling: SamplingParams,
    rounding: Rounding,
    seed: int,
) -> dict[str, list[JudgedToken]]:
    """Every token of every sample, by request id."""
    generator = np.random.default_rng([seed % 2**64, 1])
    uniforms = {sample.request.id: generator.random(len(sample.token_ids)) for sample in samples}
    judged: dict[str, list[JudgedToken]] = {}

    def judge(sample: RolloutSample, logits: torch.Tensor) -> list[JudgedToken]:
        ids = sample.token_ids
        recorded = zip(sample.logprobs, sample.logprobs_full, sample.kept_mass)
        return [
            judge_token(_law(logits[at], sampling, sample, at, rounding), sampling, ids[at], *both)
            for at, both in enumerate(zip(recorded, uniforms[sample.request.id].tolist()))
        ]

    for group in _by_prompt(samples):
        sequences = without_prefixes([sample.token_ids[:-1] for sample in group])
        behind: dict[Tokens, list[RolloutSample]] = defaultdict(list)
        for sample in group:
            behind[sequences[bisect_left(sequences, sample.token_ids[:-1])]].append(sample)
        for sequence, logits in reference.logits(group[0].request.prompt_ids, sequences):
            for sample in behind[sequence]:
                judged[sample.request.id] = judge(sample, logits)
    return judged


def _law(
    logits: torch.Tensor,  # [V]
    sampling: SamplingParams,
    sample: RolloutSample,
    at: int,
    rounding: Rounding,
) -> ReferenceLaw:
    """The law of a sample's token `at`."""
    prompt, before = sample.request.prompt_ids, sample.token_ids[:at]
    slack = {"logprob": rounding.logprob, "mass": rounding.mass}
    return reference_law(logits, sampling, prompt, before, **slack)


def without_prefixes(sequences: Sequence[Tokens]) -> list[Tokens]:
    """Sorted and distinct, but for those that another begins with."""
    ordered = sorted(set(sequences))
    return [a for a, b in pairwise(ordered) if b[: len(a)] != a] + ordered[-1:]


# ---- findings -------------------------------------------------------------------------------------


class _Book:
    """Findings as they come."""

    def __init__(self, level: float, on_finding: Callable[[Finding], None]) -> None:
        self.level, self._on_finding = level, on_finding
        self.findings: list[Finding] = []
        self.absent: dict[str, str] = {}

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._on_finding(finding)

    def certain(self, name: str, holds: bool, num: int, effect: float, detail: str) -> None:
        """A finding without chance."""
        self.add(Finding(name, float(holds), num, effect, effect, detail))

    def miss(self, reason: str, *names: str) -> None:
        self.absent |= dict.fromkeys(names, reason)


def _find_answers(book: _Book, samples: Sequence[RolloutSample], num_requested: int) -> None:
    """Whether every request was answered by a sample that ends as it may."""
    wrong = [f"{s.request.id} {why}" for s in samples if (why := misfit(s)) is not None]
    missing = num_requested - len(samples)
    detail = f"{num_requested} requests, {missing} unanswered, {len(wrong)} ended wrongly"
    detail += f"; {wrong[0]}" if wrong else ""
    bad = missing + len(wrong)
    book.certain("answers", not bad, num_requested, float(bad), detail)


def misfit(sample: RolloutSample) -> str | None:
    """What is wrong with how a sample ends."""
    sampling, ids = sample.request.sampling, sample.token_ids
    ends = [at for at, t in enumerate(ids) if t in sampling.stop_ids and at >= sampling.min_tokens]
    if sample.finish_reason not in ("stop", "length"):
        return f"ended by {sample.finish_reason}: {sample.finish_detail}"
    if len(ids) > sampling.max_new_tokens:
        return f"has {len(ids)} tokens, more than {sampling.max_new_tokens}"
    if ends and ends[0] < len(ids) - 1:
        return f"has {len(ids) - 1 - ends[0]} tokens behind a stop id"
    if sample.finish_reason == "stop" and not ends and not sampling.stop_strings:
        return "stopped without a stop id"
    return None


def _find_possible(book: _Book, tokens: Sequence[JudgedToken]) -> None:
    num = sum(not one.possible for one in tokens)
    detail = f"{num} of {len(tokens)} tokens are banned, or below what the filters keep"
    book.certain("possible tokens", not num, len(tokens), num / max(1, len(tokens)), detail)


def _find_argmax(book: _Book, tokens: Sequence[JudgedToken], rounding: Rounding) -> None:
    largest = max((one.top_gap for one in tokens), default=0.0)
    others = sum(one.top_gap > 0 for one in tokens)
    detail = (
        f"{others} of {len(tokens)} tokens are not the reference's argmax; at most {largest:.2g} "
        f"below it in log-probability, tolerance {rounding.logprob:.2g}"
    )
    book.certain("argmax", largest <= rounding.logprob, len(tokens), largest, detail)


def _find_counts(
    book: _Book,
    samples: Sequence[RolloutSample],
    reference: Reference,
    sampling: SamplingParams,
    rounding: Rounding,
) -> None:
    """First tokens, and second ones behind the most frequent first."""
    names, few = ("first token", "second token"), int(min(1e9, 1 / rounding.divergence))
    if few < 4 * LEAST_EXPECTED:
        book.miss(f"in more than {few} draws rounding alone would show", *names)
        return
    longer = [sample for sample in samples if len(sample.token_ids) > 1]
    if not longer:
        book.miss("no sample of the first prompt has two tokens", *names)
        return
    top = Counter(sample.token_ids[0] for sample in longer).most_common(1)[0][0]
    behind = [sample for sample in longer if sample.token_ids[0] == top]
    [(_, logits)] = reference.logits(samples[0].request.prompt_ids, [(top,)])
    drawn = ([sample for sample in samples if sample.token_ids], behind)
    for at, (name, all_drawn) in enumerate(zip(names, drawn)):
        some = all_drawn[:few]
        law = _law(logits[at], sampling, some[0], at, rounding)
        on_edge = law.possible & ~law.sure
        clear = [s.token_ids[at] for s in some if not bool(on_edge[s.token_ids[at]])]
        if not clear:
            book.miss("every draw is on the edge of a filter", name)
            continue
        weights = (law.scaled.exp() * law.sure).numpy()  # [V]
        counts = np.bincount(clear, minlength=len(weights))
        book.add(chi_square(name, counts, weights / weights.sum(), book.level, POWER_TV))


def _find_transform(book: _Book, tokens: Sequence[JudgedToken], vocab_size: int) -> None:
    by_id, by_rank = "transform by id", "transform by probability"
    neighbours, weights = "transform of neighbours", "importance weights"
    clear = [one for one in tokens if one.transforms]
    if len(clear) < 4 * LEAST_EXPECTED:
        reason = f"only {len(clear)} tokens are not on the edge of a filter"
        book.miss(reason, by_id, by_rank, neighbours, weights)
        return
    transforms = np.array([one.transforms for one in clear])  # [tokens, 2]
    ratios = np.array([one.ratio for one in clear])
    variances = np.array([one.ratio_variance for one in clear])
    bounds = (-1.0, vocab_size ** (ALTERED - 1) - 1)
    pairs = transforms[: len(clear) // 2 * 2, 1].reshape(-1, 2)
    book.add(uniformity(by_id, transforms[:, 0], book.level, POWER_SHIFT))
    book.add(uniformity(by_rank, transforms[:, 1], book.level, POWER_SHIFT))
    book.add(independence(neighbours, pairs, book.level, POWER_CORRELATION))
    book.add(
        mean_zero(weights, ratios - 1, book.level, POWER_WEIGHT, bounds=bounds, variances=variances)
    )


def _find_differences(book: _Book, drawn: _Drawn, judged: Mapping[str, list[JudgedToken]]) -> None:
    """Speculation on against off. Every prompt gives as many to one side as to the other, which makes
    comparing pooled samples conservative."""
    names = ("lengths", "log-probabilities", "parting of on and off", "parting within groups")
    if not drawn.off:
        book.miss("speculation is off: nothing to compare with", *names)
        return

    def lengths(samples: list[RolloutSample]) -> list[float]:
        return [float(len(sample.token_ids)) for sample in samples]

    def logprobs(samples: list[RolloutSample]) -> list[float]:
        of_tokens = [[one.logprob for one in judged[sample.request.id]] for sample in samples]
        return [float(np.mean(values)) for values in of_tokens if values]

    def partings(some: list[RolloutSample], others: list[RolloutSample]) -> list[float]:
        return [float(_agreed(one.token_ids, other.token_ids)) for one, other in zip(some, others)]

    sides: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for on, off in zip(_by_prompt(drawn.on), _by_prompt(drawn.off)):
        third = len(off) // 3
        mixed = partings(on[:third], off[:third])
        plain = partings(off[third : 2 * third], off[2 * third :])
        values = (
            (lengths(on), lengths(off)),
            (logprobs(on), logprobs(off)),
            (mixed, plain),
            (partings(on[::2], on[1::2]), partings(off[::2], off[1::2])),
        )
        for name, (one, other) in zip(names, values):
            sides[name][0].extend(one)
            sides[name][1].extend(other)
    for name, (one, other) in sides.items():
        if one and other:
            book.add(two_sample(name, one, other, book.level, POWER_PAIRED_TV))
        else:
            book.miss("groups are too small", name)


def _agreed(one: Tokens, other: Tokens) -> int:
    """Tokens before the first difference."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other))
    )


def _find_acceptance(book: _Book, counters: SpecCounters) -> None:
    """Power: that the sum passes Freedman's bound, in the normal law."""
    p_value, num = acceptance_p_value(counters), counters.foretold_reached
    if p_value is None:
        reason = "nothing was foretold" if counters.drafted else "nothing was drafted"
        book.miss(reason, "acceptance")
        return
    expected, variance = counters.expected_accepted, counters.expected_variance
    surplus, spread = counters.foretold_accepted - expected, math.sqrt(variance) or 1.0
    log_odds, step = math.log(2 / book.level), max(1, len(counters.reached))
    linear = log_odds * step / 3
    # The root of s^2 = 2 log_odds (V + b s / 3).
    needed = linear + math.sqrt(linear**2 + 2 * log_odds * variance)
    power = float(special.ndtr((num * POWER_ACCEPTANCE - needed) / spread))
    detail = f"{counters.foretold_accepted} accepted at {num} positions, {expected:.1f} foretold"
    mean = surplus / num
    book.add(
        Finding("acceptance", p_value, num, surplus / spread, mean, detail, power, POWER_ACCEPTANCE)
    )


def _find_own_transform(book: _Book, counters: SpecCounters) -> None:
    name, counts = "engine's own transform", counters.pit_counts
    if sum(counts) < LEAST_EXPECTED * PIT_BINS:
        book.miss(f"the engine counted only {sum(counts)} tokens", name)
    else:
        book.add(chi_square(name, counts, [1 / len(counts)] * len(counts), book.level, POWER_TV))


def _find_recomputed(book: _Book, tokens: Sequence[JudgedToken], rounding: Rounding) -> None:
    limits = {
        "logprobs": (rounding.logprob, rounding.mean_logprob),
        "logprobs_full": (rounding.logprob, rounding.mean_logprob),
        "kept_mass": (rounding.mass, rounding.mass),
    }
    for which, (name, (most, mean)) in enumerate(limits.items()):
        gaps = np.array([one.gaps[which] for one in tokens] or [0.0])
        largest, average = float(gaps.max()), float(gaps.mean())
        detail = (
            f"{len(tokens)} tokens off by {largest:.2g} at most and {average:.2g} on average, "
            f"tolerance {most:.2g} and {mean:.2g}"
        )
        book.certain(name, largest <= most and average <= mean, len(tokens), largest, detail)


def _find_again(book: _Book, drawn: _Drawn, spec: EngineSpec, rounding: Rounding) -> None:
    name = "same tokens again"
    if not drawn.again:
        reason = "with drafts that are drawn a seed's tokens depend on what was drafted"
        book.miss("nothing was drawn again" if repeats(spec) else reason, name)
        return
    first = {sample.request.id: sample.token_ids for sample in drawn.on}
    pairs = [(first.get(s.request.id, ()), s.token_ids) for s in drawn.again]
    parted = sum(one != other for one, other in pairs)
    num = sum(_agreed(one, other) for one, other in pairs) + parted
    rate = parted / max(1, num)
    detail = (
        f"{len(pairs) - parted} of {len(pairs)} samples are the same in another order and batch; "
        f"{parted} of {num} tokens differ behind equal ones, tolerated rate "
        f"{rounding.diverging_rate:.2g}"
    )
    book.certain(name, rate <= rounding.diverging_rate, num, rate, detail)


def _find_streams(
    book: _Book, samples: Sequence[RolloutSample], judged: Mapping[str, list[JudgedToken]]
) -> None:
    """The second of a pair equals the first with the probability that the first has, so the chance
    that any of m pairs is equal and has a probability below x is at most m x. Power: that a pair
    which shares its stream is seen."""
    name = "streams of a group"
    probs = {
        s.request.id: math.exp(sum(one.logprob for one in judged[s.request.id])) for s in samples
    }
    pairs = [pair for group in _by_prompt(samples) for pair in combinations(group, 2)]
    if not pairs:
        book.miss("groups of one", name)
        return
    equal = [probs[one.request.id] for one, other in pairs if one.token_ids == other.token_ids]
    least = min(equal, default=1.0)
    telling = sum(prob * len(pairs) < book.level for prob in probs.values())
    detail = f"{len(equal)} of {len(pairs)} pairs of a group are equal"
    detail += f", the least likely with probability {least:.2g}" if equal else ""
    p_value = min(1.0, len(pairs) * least)
    share = len(equal) / len(pairs)
    power = telling / len(probs)
    book.add(Finding(name, p_value, len(pairs), float(len(equal)), share, detail, power, 1.0))
