"""The learner: packing, advantages, the loss by hand, and one real step."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import recipes.grpo
from actors.group_queue import RolloutGroup
from recipes.config import LearnerConfig
from recipes.grpo import (
    Learner,
    PackedGroup,
    Scores,
    group_advantages,
    pack_group,
    responses_of,
)
from recipes.mtp_head import MtpHead
from recipes.mtp_training import MtpTrainer, Response, acceptance
from rollout.checkpoint import read_config, read_weights
from rollout.request import RolloutRequest, RolloutSample, SpecCounters, Timings
from rollout.sampling import SamplingParams

PROMPT = (5, 6, 7)
RESPONSES = ((8, 9, 10), (11,), (12, 13))


def group_of(
    responses: tuple[tuple[int, ...], ...] = RESPONSES, logprob: float = -1.0
) -> RolloutGroup:
    samples = []
    for index, ids in enumerate(responses):
        n = len(ids)
        request = RolloutRequest(f"g/{index}", "g", "p", index, PROMPT, SamplingParams())
        samples.append(
            RolloutSample(
                request,
                ids,
                (logprob,) * n,
                (logprob,) * n,
                (1.0,) * n,
                ((0, n),) if n else (),
                "stop",
                "",
                "full",
                "d",
                SpecCounters(),
                Timings(),
            )
        )
    return RolloutGroup("g", "p", tuple(samples), len(samples))


@pytest.fixture(scope="module")
def learner(tiny_llama: Path) -> Learner:
    return Learner(tiny_llama, LearnerConfig(learning_rate=1e-3), temperature=0.7)


def test_packed_logprobs_equal_those_of_each_rollout_alone(learner: Learner) -> None:
    packed = learner._logprobs(pack_group(group_of()))
    alone = []
    for ids in RESPONSES:
        logits = learner.model(input_ids=torch.tensor([[*PROMPT, *ids]])).logits[0]
        log_probs = (logits / 0.7).log_softmax(-1)
        alone += [log_probs[len(PROMPT) - 1 + t, token] for t, token in enumerate(ids)]
    torch.testing.assert_close(packed, torch.stack(alone), atol=1e-4, rtol=1e-4)


def test_an_empty_rollout_takes_no_place_in_the_pack() -> None:
    packed = pack_group(group_of(((8, 9), (), (10,))))
    assert packed.targets.tolist() == [8, 9, 10]
    assert packed.sample.tolist() == [0, 0, 2]
    assert packed.predictors.tolist() == [2, 3, 2]  # prompt's last, first response token, prompt's


def test_advantages_are_relative_to_the_group() -> None:
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0])  # mean 1/4, deviation sqrt(3)/4
    assert advantages.tolist() == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], rel=1e-4)


@pytest.mark.parametrize("rewards", [[1.0], [0.5, 0.5], [0.0] * 8])
def test_equal_rewards_and_lone_samples_have_no_advantage(rewards: list[float]) -> None:
    assert group_advantages(rewards).tolist() == [0.0] * len(rewards)  # case 179


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 1.0, -1.0),
        (1.5, 1.0, -1.2),  # clipped at 1 + 0.2
        (0.5, 1.0, -0.5),  # the smaller of 0.5 and clipped 0.8
        (1.5, -1.0, 1.5),  # the worse of 1.5 and 1.2
        (9.0, -1.0, 2.0),  # truncated at the cap
        (0.5, -1.0, 0.8),
    ],
)
def test_the_loss_by_hand(learner: Learner, ratio: float, advantage: float, loss: float) -> None:
    got = learner._loss(torch.tensor([math.log(ratio)]), torch.tensor([advantage]))
    assert got.item() == pytest.approx(loss, rel=1e-5)


def test_a_step_makes_rewarded_rollouts_more_likely(tiny_llama: Path) -> None:
    learner = Learner(tiny_llama, LearnerConfig(learning_rate=1e-3), temperature=1.0)
    packed = pack_group(group_of())
    before = learner._logprobs(packed).detach()
    on_policy = group_of()
    samples = list(on_policy.samples)
    for index, sample in enumerate(samples):
        own = before[packed.sample == index].tolist()
        samples[index] = replace(sample, logprobs=tuple(own), logprobs_full=tuple(own))
    stats = learner.step([replace(on_policy, samples=tuple(samples))], [[1.0, 0.0, 0.0]])
    after = learner._logprobs(packed).detach()
    assert (after - before)[packed.sample == 0].sum() > 0
    assert (after - before)[packed.sample == 2].sum() < 0
    assert stats.k1 == pytest.approx(0, abs=1e-5) and stats.ess == pytest.approx(1, abs=1e-5)


def test_mismatch_metrics_by_hand(learner: Learner) -> None:
    stats = learner._stats(torch.tensor([math.log(2.0), 0.0]), 0.0, 0.0, 0.0)  # pi/mu = 2 and 1
    assert stats.k1 == pytest.approx(-math.log(2) / 2)
    assert stats.k3 == pytest.approx((2 - 1 - math.log(2)) / 2)
    assert stats.chi2 == pytest.approx((4 + 1) / 2 - 1)
    assert stats.ess == pytest.approx(9 / (2 * 5))
    assert stats.clipped_rate == 0.5


def test_a_resumed_learner_takes_the_same_step(tiny_llama: Path) -> None:
    config = LearnerConfig(learning_rate=1e-3)
    first, second = (Learner(tiny_llama, config, temperature=1.0) for _ in range(2))
    first.step([group_of()], [[1.0, 0.0, 0.0]])
    saved = {n: p.detach().clone() for n, p in first.model.named_parameters()}
    second.load(saved, {k: t.clone() for k, t in first.optimiser_tensors().items()})
    for learner in (first, second):
        learner.step([group_of()], [[0.0, 1.0, 0.0]])
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


# ---- the MTP head beside the policy --------------------------------------------------------


def head_trainer(folder: Path, learning_rate: float = 1e-3) -> MtpTrainer:
    vocabulary = torch.arange(0, 300, 2)
    head = MtpHead.from_policy(read_weights(folder), read_config(folder), vocabulary)
    return MtpTrainer(head, learning_rate=learning_rate, depths=2)


def test_the_policy_steps_the_same_with_and_without_the_heads_training(tiny_llama: Path) -> None:
    """Bit for bit: gradients of the step, parameters, the optimiser's state and what is reported."""
    config, trainer = LearnerConfig(learning_rate=1e-3), head_trainer(tiny_llama)
    before, seen = trainer.tensors(), []
    for mtp in (None, trainer):
        learner, gradients = Learner(tiny_llama, config, 0.7, mtp), []
        learner.optimiser.register_step_pre_hook(
            lambda *_, learner=learner, gradients=gradients: gradients.append(
                [p.grad.clone() for p in learner.model.parameters()]
            )
        )
        for rewards in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]):
            stats = learner.step([group_of(), group_of()], [rewards, rewards])
        parameters = {n: p.detach() for n, p in learner.model.named_parameters()}
        seen.append((gradients, parameters, learner.optimiser_tensors(), stats.k3, stats.loss))
        assert (stats.mtp is None) == (mtp is None)
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)
    assert not torch.equal(trainer.tensors()["mtp.proj.weight"], before["mtp.proj.weight"])


def test_a_head_that_reached_into_the_policy_would_be_seen(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above: hidden states that keep their gradients."""
    inner = recipes.grpo.responses_of

    def attached(group: PackedGroup, scores: Scores, vocabulary: torch.Tensor) -> list[Response]:
        lens = [len(r.token_ids) for r in inner(group, scores, vocabulary)]
        states = scores.hidden.split(lens)
        return [replace(r, hidden=h) for r, h in zip(inner(group, scores, vocabulary), states)]

    monkeypatch.setattr(recipes.grpo, "responses_of", attached)
    learner = Learner(tiny_llama, LearnerConfig(), 0.7, head_trainer(tiny_llama))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        learner.step([group_of()], [[1.0, 0.0, 0.0]])


def test_the_head_is_taught_the_policys_own_states_and_laws(learner: Learner) -> None:
    """Reference: each rollout alone."""
    vocabulary, packed = torch.arange(0, 300, 2), pack_group(group_of())
    responses = responses_of(packed, learner.score(packed), vocabulary)
    assert not any(r.hidden.requires_grad or r.law.requires_grad for r in responses)
    for ids, response in zip(RESPONSES, responses, strict=True):
        whole = learner.model(torch.tensor([[*PROMPT, *ids]]), output_hidden_states=True)
        foretelling = slice(len(PROMPT) - 1, len(PROMPT) - 1 + len(ids))
        assert response.token_ids.tolist() == list(ids)
        hidden = whole.hidden_states[-1][0, foretelling]
        torch.testing.assert_close(response.hidden, hidden, atol=1e-4, rtol=1e-4)
        law = (whole.logits[0, foretelling] / 0.7).softmax(-1)[:, vocabulary]
        torch.testing.assert_close(response.law, law, atol=1e-4, rtol=1e-4)


def test_an_empty_rollout_gives_the_head_nothing(learner: Learner) -> None:
    packed = pack_group(group_of(((8, 9), (), (10,))))
    responses = responses_of(packed, learner.score(packed), torch.arange(300))
    assert [r.token_ids.tolist() for r in responses] == [[8, 9], [10]]


def test_the_head_notes_the_version_of_the_rollouts_it_saw(tiny_llama: Path) -> None:
    group = group_of()
    later = [replace(s, version_spans=((3, 1), (4, len(s.token_ids) - 1))) for s in group.samples]
    learner = Learner(tiny_llama, LearnerConfig(), 0.7, head_trainer(tiny_llama))
    learner.step([group_of(), replace(group, samples=tuple(later))], [[1.0, 0.0, 0.0]] * 2)
    tensors = learner.mtp_tensors()
    assert tensors is not None and tensors["mtp.version"].item() == 4
    assert Learner(tiny_llama, LearnerConfig(), 0.7).mtp_tensors() is None


def test_a_head_that_is_trained_follows_a_policy_that_changes(tiny_llama: Path) -> None:
    """Against its twin that stands still, on the policy after some steps."""
    trainer = head_trainer(tiny_llama)
    frozen = MtpHead.from_tensors(trainer.tensors(), read_config(tiny_llama))
    learner = Learner(tiny_llama, LearnerConfig(learning_rate=3e-3), 1.0, trainer)
    for _ in range(15):
        learner.step([group_of()], [[1.0, 0.0, 0.0]])
    packed = pack_group(group_of())
    with torch.no_grad():
        responses = responses_of(packed, learner.score(packed), trainer.head.vocabulary)
        shared = learner.shared(trainer.head.vocabulary)
        (kept, *_), (stood, *_) = (
            acceptance(head, shared, responses, 2) for head in (trainer.head, frozen)
        )
    assert kept > stood + 0.05
