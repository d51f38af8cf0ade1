"""On a real model: speculative samples against exact probabilities from a plain forward.

Three tokens of one prompt, several hundred times, half of the rows at temperature 1 and half at 0.7
with top-p 0.9, in one batch. Each token is binned by its rank in the exact law of its own context.
Hits minus probabilities are martingale differences, whatever the contexts are, so their sum in its
exact covariance is chi-square. All seeds are fixed; over seeds a right engine fails one time in
10,000.
"""

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2
from transformers import DynamicCache

import rollout.native_engine
from proposers.history import HistoryProposer
from proposers.ngram import NgramProposer
from proposers.none import NoProposer
from rollout.checkpoint import read_tokenizer
from rollout.draft import Draft
from rollout.law import TargetLaws
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample, SpecCounters
from rollout.sampling import SamplingParams
from rollout.streams import Draws
from rollout.transformer_policy import TransformerPolicy
from rollout.verdict import Verdict
from tests.rollout.engines import request, run
from tests.rollout.policies import engine_over, filtered_law, hugging_face

TEXT = "heads, tails, tails, heads, tails, heads, heads, tails,"
LENGTH, NUM_RANKS, FALSE_ALARM = 3, 5, 1e-4
SAMPLINGS = (
    SamplingParams(max_new_tokens=LENGTH),
    SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=LENGTH),
)


@pytest.fixture(scope="module")
def prompt(smollm2: Path) -> tuple[int, ...]:
    return tuple(read_tokenizer(smollm2).encode(TEXT, add_special_tokens=False))


def requests(prompt: Sequence[int], indices: Iterable[int]) -> list[RolloutRequest]:
    return [
        request(f"r{i}", prompt, SAMPLINGS[i % 2], prompt_id="p", sample_index=i) for i in indices
    ]


def primed_history(policy: TransformerPolicy, prompt: tuple[int, ...]) -> HistoryProposer:
    """Remembers 16 plain rollouts of the prompt with noise of their own."""
    proposer = HistoryProposer()
    for sample in run(
        engine_over(policy, NoProposer()), requests(prompt, range(1000, 1016))
    ).values():
        proposer.remember(prompt, sample.token_ids)
    return proposer


def draw(
    policy: TransformerPolicy, proposer: Proposer, prompt: tuple[int, ...], indices: range
) -> tuple[list[RolloutSample], SpecCounters]:
    engine = engine_over(policy, proposer, draft_len=2)
    samples = run(engine, requests(prompt, indices))
    return list(samples.values()), engine.counters()


@torch.inference_mode()
def exact_logits(
    folder: Path, prompt: tuple[int, ...], prefixes: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], torch.Tensor]:
    """Next-token logits [V] after the prompt and after every prefix's tokens, by transformers. The
    cache goes in by place: its keyword is not the same in all versions."""
    model = hugging_face(folder)
    cached = DynamicCache()
    logits = {(): model(torch.tensor([prompt]), None, None, cached).logits[0, -1]}
    for first in range(0, len(prefixes), 32):
        some = prefixes[first : first + 32]
        cache = copy.deepcopy(cached)
        cache.batch_repeat_interleave(len(some))
        out = model(torch.tensor(some), None, None, cache).logits  # [n, LENGTH - 1, V]
        logits |= {p[: i + 1]: out[row, i] for row, p in enumerate(some) for i in range(LENGTH - 1)}
    return logits


def misfit(folder: Path, prompt: tuple[int, ...], samples: Sequence[RolloutSample]) -> float:
    """p-value of the samples under the exact law."""
    prefixes = sorted({sample.token_ids[: LENGTH - 1] for sample in samples})
    logits = exact_logits(folder, prompt, prefixes)
    statistic, freedom = 0.0, 0
    for sampling in SAMPLINGS:
        bins = {context: top_bins(row, sampling) for context, row in logits.items()}
        rows = [sample.token_ids for sample in samples if sample.request.sampling == sampling]
        for at in range(LENGTH):
            hits = [(bins[ids[:at]][0] == ids[at]).double() for ids in rows]
            probs = [bins[ids[:at]][1] for ids in rows]
            part, rank = chi_square(torch.stack(hits), torch.stack(probs))
            statistic, freedom = statistic + part, freedom + rank
    return float(chi2.sf(statistic, freedom))


def top_bins(logits: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable ids [C] at one context and their probabilities under the sampled law."""
    law, _ = filtered_law(logits[None], sampling.temperature, sampling.top_p)
    ids = logits.topk(NUM_RANKS).indices  # temperature keeps the order
    return ids, law[0, ids]


def chi_square(hits: torch.Tensor, probs: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom of N draws over C bins and the rest, [N, C] each. A bin that
    expects less than 5 joins the rest; so does the last one where the rest would."""
    kept = probs[:, probs.sum(0) >= 5]
    gap = (hits - probs).sum(0)[probs.sum(0) >= 5]
    if float(len(kept) - kept.sum()) < 5:
        kept, gap = kept[:, :-1], gap[:-1]
    covariance = kept.sum(0).diag() - kept.T @ kept
    return float(gap @ torch.linalg.solve(covariance, gap)), len(gap)


@pytest.mark.parametrize("name", ["history", "ngram"])
def test_speculative_samples_of_a_real_model_follow_its_exact_law(
    name: str, smollm2: Path, smollm2_policy: TransformerPolicy, prompt: tuple[int, ...]
) -> None:
    proposer, indices = NgramProposer(), range(192)
    if name == "history":  # other indices: other noise, so a second, independent comparison
        proposer, indices = primed_history(smollm2_policy, prompt), range(192, 384)
    samples, counters = draw(smollm2_policy, proposer, prompt, indices)
    assert counters.accepted > 50 and counters.corrections > 50
    assert misfit(smollm2, prompt, samples) > FALSE_ALARM


def accept_everything(
    laws: TargetLaws, first: int, draft: Draft, draws: Draws, start: int, **_: object
) -> Verdict:
    end = len(draft)
    drawn = draws.target(laws, first + end, start + end)
    return Verdict(tuple(range(end)), drawn, "bonus" if end else "plain")


def draw_from_the_first_law(
    laws: TargetLaws, first: int, draft: Draft, draws: Draws, start: int, **_: object
) -> Verdict:
    """Right at the first position, then the law of the row's first position again."""
    for depth, token in enumerate(draft.token_ids):
        drawn = draws.target(laws, first, start + depth)
        if drawn != token:
            return Verdict(tuple(range(depth)), drawn, "correction")
    accepted = tuple(range(len(draft)))
    return Verdict(accepted, draws.target(laws, first, start + len(draft)), "bonus")


@pytest.mark.parametrize("fault", [accept_everything, draw_from_the_first_law])
def test_a_faulty_verification_fails_the_same_comparison(
    fault: object,
    smollm2: Path,
    smollm2_policy: TransformerPolicy,
    prompt: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout.native_engine, "verify", fault)
    samples, _ = draw(smollm2_policy, NgramProposer(), prompt, range(64))
    assert misfit(smollm2, prompt, samples) < FALSE_ALARM
