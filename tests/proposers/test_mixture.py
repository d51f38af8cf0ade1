"""History and MTP head on one chain: exact, and the better of the two where it is."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from proposers.history import HistoryProposer
from proposers.mixture import BANDS, WEIGHTS, MixtureProposer, MixtureWeights, mixed
from proposers.mtp import MtpProposer
from rollout.draft import SparseLaw
from rollout.enumerate import EnumeratedDraws, enumerate_outcomes, total_variation
from rollout.proposer import Remembering, TreeProposer
from rollout.sampling import SamplingParams
from rollout.table_mtp import table_mtp, table_weights
from rollout.table_policy import Table, random_table
from rollout.verify import Rule
from tests.rollout.engines import plain_law, request, run, table_engine

V = 3
TARGET, HEAD = random_table(V, depth=2, seed=1), random_table(V, depth=2, seed=2)
EARLIER = ((0, 1, 2), (0, 2, 1), (0, 1, 1), (1, 0, 1), (2, 0, 0), (0, 1, 2))


def law_of(probs: list[float]) -> SparseLaw:
    return SparseLaw(torch.arange(len(probs)), torch.tensor(probs, dtype=torch.float64))


def mixture(policy: Any, earlier: Any = EARLIER) -> MixtureProposer:
    history = HistoryProposer()
    for ids in earlier:
        history.remember((0,), ids)
    return MixtureProposer(history, MtpProposer(policy))


def engine_for(
    target: Table, head: Table, vocab_size: int, draft_len: int, earlier: Any = EARLIER, **how: Any
) -> Any:
    policy: Any = table_mtp(target, head, range(vocab_size), vocab_size=vocab_size)
    proposer = mixture(policy, earlier)
    engine = table_engine(
        target, vocab_size, policy=policy, proposer=proposer, draft_len=draft_len, **how
    )
    engine.load(table_weights(target, head, range(vocab_size)), version=0, digest="table")
    return engine


@pytest.mark.parametrize("rule", ["block", "position"])
def test_the_emitted_law_is_the_targets_by_enumeration(rule: Rule) -> None:
    """Weights are learnt in between: two rows one after the other, of which the second's drafts rest
    on what the first emitted."""
    sampling = SamplingParams(max_new_tokens=3)

    def generate(draws: EnumeratedDraws) -> tuple[int, ...]:
        engine = engine_for(TARGET, HEAD, V, 2, draws_for=lambda _: draws, verification=rule)
        return run(engine, [request(sampling=sampling)])["r0"].token_ids

    law = enumerate_outcomes(generate)
    assert total_variation(law, plain_law(TARGET, (0,), sampling, V)) < 1e-12


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_a_mixture_sums_both_laws(weight: float) -> None:
    law = mixed({0: 0.75, 7: 0.25}, law_of([0.5, 0.3, 0.2]), weight)
    got = dict(zip(law.ids.tolist(), law.probs.tolist()))
    head = 1 - weight
    expected = {
        0: 0.75 * weight + 0.5 * head, 1: 0.3 * head, 2: 0.2 * head, 7: 0.25 * weight,
    }  # fmt: skip
    assert got == pytest.approx({token: p for token, p in expected.items() if p})
    assert law.ids.dtype == torch.int64 and float(law.probs.sum()) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(4))
def test_the_weight_that_is_accepted_most_often_is_found(seed: int) -> None:
    """From tokens of random laws p and their p(x) alone; the best weight is computed from p."""
    rng = np.random.default_rng(seed)
    weights, best = MixtureWeights(), np.zeros(len(WEIGHTS))
    history, head = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    for _ in range(4000):
        share = rng.uniform(0.2, 0.5)
        p = share * history + (0.9 - share) * head + 0.1 * rng.dirichlet(np.ones(6))
        x = rng.choice(6, p=p)
        weights.learn(0.6, p[x], history[x], head[x])
        q = WEIGHTS[:, None] * history + (1 - WEIGHTS[:, None]) * head
        best += np.minimum(p, q).sum(1)
    best /= 4000
    chosen = int(np.argmin(np.abs(WEIGHTS - weights.weight(0.6))))
    assert best[chosen] > best.max() - 0.01  # 4,000 tokens: .95 at most .006 off
    assert weights.expected(0.6) == pytest.approx(best.max(), abs=0.03)
    assert best.max() - best.min() > 0.02  # a wrong weight would show


def test_bands_have_weights_of_their_own() -> None:
    weights = MixtureWeights()
    for _ in range(50):
        weights.learn(0.99, 0.5, 0.5, 0.0)  # history says what the target says
        weights.learn(0.05, 0.5, 0.0, 0.5)
    assert weights.weight(0.99) == 1.0 and weights.weight(0.05) == 0.0
    assert weights.weight(0.6) == pytest.approx((BANDS[3] + BANDS[4]) / 2, abs=0.051)


def sharp(shift: int, size: int) -> Table:
    """Nearly sure of a next token that the last two decide."""
    rows = {
        (a, b): 6.0 * torch.nn.functional.one_hot(torch.tensor((a * 3 + b + shift) % size), size)
        for a in range(-1, size)
        for b in range(-1, size)
    }
    return lambda tokens: rows[(-1, -1, *tokens)[-2:]].double()


def rollouts_of(table: Table, size: int, num: int) -> list[list[int]]:
    rng, rollouts = random.Random(0), []
    for _ in range(num):
        ids = [0]
        for _ in range(40):
            ids += rng.choices(range(size), table(tuple(ids)).softmax(-1).tolist())
        rollouts.append(ids[1:])
    return rollouts


@pytest.mark.parametrize("right", ["head", "history"])
def test_the_one_that_knows_more_is_followed(right: str) -> None:
    """Of a head and a history of which one is right and one is wrong: drafts are accepted about as
    often as if there were no other, which is far more often than the wrong one's."""
    size, target, wrong = 7, sharp(1, 7), sharp(4, 7)
    head, told = (target, wrong) if right == "head" else (wrong, target)

    def acceptance(head: Table, told: Table) -> float:
        engine = engine_for(target, head, size, 3, rollouts_of(told, size, 12))
        rows = [
            request(f"r{i}", (0,), SamplingParams(max_new_tokens=40), prompt_id="p", sample_index=i)
            for i in range(12)
        ]
        run(engine, rows)
        return engine.counters().acceptance_rate or 0.0

    both, best, worst = acceptance(head, told), acceptance(target, target), acceptance(wrong, wrong)
    assert (
        both > 0.75 * best and worst < 0.5 * best
    )  # first drafts of a row are the history's alone


def test_what_the_history_remembers_is_told_as_the_historys() -> None:
    policy: Any = table_mtp(TARGET, HEAD, range(V), vocab_size=V)
    one, other = mixture(policy), mixture(policy, ())
    assert isinstance(one, Remembering) and isinstance(one, TreeProposer)
    other.merge(one.export())
    told = other.gauges()
    assert told["history/sequences"] == len(EARLIER) and "mtp/tokens" in told


def test_greedy_rows_teach_nothing_and_are_served() -> None:
    engine = engine_for(TARGET, HEAD, V, 2)
    samples = run(engine, [request(sampling=SamplingParams(temperature=0.0, max_new_tokens=6))])
    assert len(samples["r0"].token_ids) == 6
    assert math.isfinite(engine.counters().acceptance_rate)
