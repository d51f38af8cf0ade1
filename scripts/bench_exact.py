"""Is what is about to be timed right? Refuses the benchmark when it is not.

Two claims, a few seconds each, on every policy that will run:

- Greedy rows with drafts equal those without, bit for bit where both forwards round alike. Forwards of
  different widths need not; then the first token that differs must be a near-tie of the two.
- The log-probabilities of sampled tokens, plain and verified, are those of a plain forward of the same
  format: Hugging Face's float32 model over the quantised weights and, for W8A8, quantised activations.

How far two right forwards may be apart is measured, not guessed: the reference is run once more with
what enters its matrices moved by a rounding, and a few times the distance is the tolerance. That
matters for W8A8, which is chaotic: an activation rounded up instead of down moves what follows by a
whole step, so on SmolLM2 a change of 1e-7 in the embeddings moves log-probabilities by .1 nats or more.

The law of the emitted tokens is tested by enumeration elsewhere (`tests/rollout/test_exactness.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from proposers.history import HistoryProposer
from quant.formats import FORMATS, Format
from quant.int8 import Int8Weight, dequantise_weight, quantise_tokens
from rollout.checkpoint import read_config, read_weights
from rollout.draft_len import FixedDraftLen
from rollout.packing import SCALE, pack
from rollout.request import RolloutSample
from rollout.sampling import SamplingParams
from scripts.bench_contenders import Prompts
from scripts.bench_ours import LoadedPolicy, OurEngine

NUM_TOKENS, DRAFT_LEN, WRONG_EVERY = 12, 4, 5
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
"""Relative, of one operation."""
FLOORS = 3.0
SLACK = {torch.float32: 2e-3, torch.bfloat16: 0.05}
"""Tolerance of a mean |error| of log-probabilities: so many measured floors and these nats."""


class Inexact(Exception):
    """What came out is not what the weights say."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the check of one policy found."""

    name: str
    greedy_equal: bool
    """No near-tie was needed."""
    logprob_error: float
    """Mean over sampled tokens, nats."""
    logprob_error_max: float
    tolerance: float


class FormatLinear(nn.Module):
    """A block matrix of a format, on float32."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, int8_inputs: bool
    ) -> None:
        super().__init__()
        self._weight, self._bias, self._int8_inputs = weight, bias, int8_inputs
        self.rounding = 0.0
        """Inputs are moved by as much, relative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rounding:
            x = x * (1 + self.rounding * (2 * torch.rand_like(x) - 1))
        if self._int8_inputs:
            values, scales = quantise_tokens(x.flatten(0, -2))  # [N, in], [N]
            x = (values * scales[:, None]).view_as(x)
        return F.linear(x, self._weight, self._bias)


class Reference:
    """One model, a plain forward under any format."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._weights, self._config = read_weights(folder), read_config(folder)
        self._linears = {
            name: module
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear) and f"{name}.weight" in self._config.matrix_shapes()
        }

    def use(self, format_: Format) -> None:
        """The format of the forwards that follow."""
        packed = pack(self._weights.items(), self._config, format_, torch.float32)
        int8_inputs = format_.name == "int8_w8a8"
        for name, linear in self._linears.items():
            module = FormatLinear(
                _dense(packed, f"{name}.weight"), linear.bias, int8_inputs=int8_inputs
            )
            self._model.set_submodule(name, module)
        self._model.model.embed_tokens.weight.data = _dense(packed, "model.embed_tokens.weight")
        if not self._config.tied_head:
            self._model.lm_head.weight.data = _dense(packed, "lm_head.weight")

    @torch.inference_mode()
    def logprobs(
        self, prompt: Sequence[int], emitted: Sequence[int], *, rounding: float = 0.0
    ) -> torch.Tensor:
        """[len(emitted), V]: the law of each emitted token behind those before it."""
        for module in self._model.modules():
            if isinstance(module, FormatLinear):
                module.rounding = rounding
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            ids = torch.tensor([[*prompt, *emitted]])
            logits = self._model(ids, use_cache=False).logits[0]  # [T, V]
        laws: torch.Tensor = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        return laws


def _dense(packed: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A matrix of a packed update in float32."""
    if name + SCALE not in packed:
        return packed[name]
    return dequantise_weight(Int8Weight(packed[name], packed[name + SCALE]))


def check_exact(policies: dict[str, LoadedPolicy], folder: Path, prompts: Prompts) -> list[Checked]:
    """Checks the policies by name. Raises Inexact for the first that is wrong."""
    reference = Reference(folder)
    return [_check(name, loaded, reference, prompts) for name, loaded in policies.items()]


def _check(name: str, loaded: LoadedPolicy, reference: Reference, prompts: Prompts) -> Checked:
    reference.use(FORMATS[loaded.spec.format])
    plain = OurEngine(name, loaded, loaded.engine())
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS)
    expected = plain.run(prompts, greedy, seed=0).samples
    drafted = _drafted(name, loaded, expected)
    got = drafted.run(prompts, greedy, seed=0)
    counters = got.counters
    if not 0 < counters.accepted < counters.verified:
        raise Inexact(f"{name}: of {counters.verified} drafts {counters.accepted} were accepted")
    sampled = SamplingParams(max_new_tokens=NUM_TOKENS)
    samples = [s for engine in (plain, drafted) for s in engine.run(prompts, sampled, 1).samples]
    laws = [reference.logprobs(s.request.prompt_ids, s.token_ids) for s in samples]
    quantised = loaded.spec.format != "none"
    dtype = torch.bfloat16 if quantised else loaded.spec.torch_dtype  # as activations or cache are
    floor = _floor(samples[: len(prompts)], laws, reference, ROUNDING[dtype])
    tolerance = FLOORS * floor + SLACK[dtype]
    errors = torch.cat(
        [(torch.tensor(s.logprobs) - _own(s, law)).abs() for s, law in zip(samples, laws)]
    )
    if not errors.mean() <= tolerance:
        raise Inexact(
            f"{name}: log-probabilities are off by {float(errors.mean()):.4f} nats on average, "
            f"tolerance {tolerance:.4f}"
        )
    gap = max(_first_gap(one, two, reference) for one, two in zip(expected, got.samples))
    if gap > max(tolerance, float(errors.max())):
        raise Inexact(f"{name}: greedy drafts changed a token that is ahead by {gap:.4f} nats")
    equal = all(one.token_ids == two.token_ids for one, two in zip(expected, got.samples))
    return Checked(name, equal, float(errors.mean()), float(errors.max()), tolerance)


def _floor(
    samples: Sequence[RolloutSample],
    laws: Sequence[torch.Tensor],
    reference: Reference,
    rounding: float,
) -> float:
    """Mean |change| of the samples' log-probabilities when the reference rounds."""
    changes = []
    for sample, law in zip(samples, laws):
        moved = reference.logprobs(sample.request.prompt_ids, sample.token_ids, rounding=rounding)
        changes.append((_own(sample, moved) - _own(sample, law)).abs())
    return float(torch.cat(changes).mean())


def _own(sample: RolloutSample, law: torch.Tensor) -> torch.Tensor:
    """The entries of a sample's own tokens; law [T, V]."""
    return law.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]


def _drafted(name: str, loaded: LoadedPolicy, rollouts: Iterable[RolloutSample]) -> OurEngine:
    """Drafts the rollouts with every few tokens wrong, so that some are accepted and some not."""
    proposer = HistoryProposer()
    for sample in rollouts:
        ids = list(sample.token_ids)
        ids[::WRONG_EVERY] = [token ^ 1 for token in ids[::WRONG_EVERY]]
        proposer.remember(sample.request.prompt_ids, ids)
    engine = loaded.engine(proposer=proposer, draft_len=FixedDraftLen(DRAFT_LEN))
    return OurEngine(name, loaded, engine)


def _first_gap(one: RolloutSample, two: RolloutSample, reference: Reference) -> float:
    """How far apart the reference holds the two tokens at which rows first differ; 0 if nowhere."""
    pairs = zip(one.token_ids, two.token_ids)
    first = next((i for i, (mine, other) in enumerate(pairs) if mine != other), None)
    if first is None:
        return 0.0
    law = reference.logprobs(one.request.prompt_ids, one.token_ids)[first]
    return float((law[one.token_ids[first]] - law[two.token_ids[first]]).abs())
