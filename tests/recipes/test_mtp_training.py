"""Teaching an MTP head: losses by hand, what is counted at which depth, steps that go on."""

from pathlib import Path

import pytest
import torch

from recipes.mtp_head import MtpHead
from recipes.mtp_training import (
    DEPTH_DECAY,
    DepthLaws,
    MtpTrainer,
    Response,
    Shared,
    acceptance,
    depth_laws,
)
from rollout.checkpoint import read_config, read_weights

VOCABULARY = torch.arange(0, 200, 2)
TEMPERATURE = 0.8


def trainer_of(folder: Path, depths: int = 2) -> MtpTrainer:
    head = MtpHead.from_policy(read_weights(folder), read_config(folder), VOCABULARY)
    return MtpTrainer(head, learning_rate=1e-3, depths=depths)


def shared_of(folder: Path) -> Shared:
    embedding = read_weights(folder)["model.embed_tokens.weight"]
    return Shared(embedding, embedding[VOCABULARY], TEMPERATURE)


def response(num: int, seed: int = 0) -> Response:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 200, (num,), generator=generator)
    law = torch.randn(num, len(VOCABULARY), generator=generator).mul(2).softmax(-1) * 0.9
    return Response(ids, torch.randn(num, 64, generator=generator), law)


def test_both_losses_by_hand() -> None:
    # p (.5, .3) and .2 outside the draft vocabulary; q (.25, .75)
    laws = DepthLaws(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[0.5, 0.3]]))
    nll = -0.5 * torch.tensor(0.25).log() - 0.3 * torch.tensor(0.75).log()
    assert laws.loss("cross_entropy").item() == pytest.approx(nll.item())
    assert laws.accepted().item() == pytest.approx(0.25 + 0.3)
    assert laws.loss("total_variation").item() == pytest.approx(1 - 0.55)


def test_nothing_is_accepted_above_what_the_draft_vocabulary_holds() -> None:
    law = torch.tensor([[0.5, 0.3]])
    assert DepthLaws((law / 0.8).log(), law).accepted().item() == pytest.approx(0.8)


@torch.no_grad()
def test_a_batch_counts_what_each_response_alone_counts(tiny_llama: Path) -> None:
    """Depth k at state i is held against the law of token i + k; padding counts nowhere."""
    head, shared = trainer_of(tiny_llama).head, shared_of(tiny_llama)
    responses = [response(n, seed=n) for n in (6, 1, 3)]
    batch = depth_laws(head, shared, responses, depths=3)
    for depth, laws in enumerate(batch, start=1):
        expected = []
        for one in responses:
            if len(one.token_ids) <= depth:
                continue
            embedded = shared.embedding[one.token_ids][None]
            output = head(one.hidden[None], embedded, depth)[depth - 1][0, :-1]
            logits = output @ shared.output.T / TEMPERATURE
            expected.append(torch.minimum(logits.softmax(-1), one.law[depth:]).sum(-1))
        assert len(laws.law) == sum(map(len, expected))
        torch.testing.assert_close(laws.accepted(), torch.cat(expected).sum())


@torch.no_grad()
def test_acceptance_is_sums_over_sums_whatever_the_batch(tiny_llama: Path) -> None:
    head, shared = trainer_of(tiny_llama).head, shared_of(tiny_llama)
    responses = [response(n, seed=n) for n in (6, 2, 3, 9)]
    whole = acceptance(head, shared, responses, 2, batch=4)
    assert acceptance(head, shared, responses, 2, batch=1) == pytest.approx(whole, rel=1e-5)
    assert 0 < whole[0] < 0.9


@pytest.mark.parametrize("kind", ["cross_entropy", "total_variation"])
def test_training_raises_acceptance_of_what_it_sees(tiny_llama: Path, kind: str) -> None:
    trainer, shared = trainer_of(tiny_llama), shared_of(tiny_llama)
    responses = [response(8, seed=s) for s in range(3)]
    before = acceptance(trainer.head, shared, responses, 2)
    for _ in range(40):
        trainer.step(shared, responses, kind=kind)  # type: ignore[arg-type]  # its two words
    after = acceptance(trainer.head, shared, responses, 2)
    assert all(late > early + 0.1 for early, late in zip(before, after, strict=True))


def test_a_step_tells_what_was_before_it(tiny_llama: Path) -> None:
    trainer, shared = trainer_of(tiny_llama), shared_of(tiny_llama)
    responses = [response(8)]
    with torch.no_grad():
        laws = depth_laws(trainer.head, shared, responses, 2)
        losses = [float(x.loss("cross_entropy")) / len(x.law) for x in laws]
    before = acceptance(trainer.head, shared, responses, 2)
    stats = trainer.step(shared, responses)
    assert stats is not None
    assert stats.loss == pytest.approx(losses[0] + DEPTH_DECAY * losses[1], rel=1e-5)
    assert stats.acceptance == pytest.approx(before, rel=1e-5)
    assert stats.metrics() == {
        "mtp/loss": stats.loss,
        "mtp/acceptance_depth1": stats.acceptance[0],
        "mtp/acceptance_depth2": stats.acceptance[1],
    }


def test_responses_without_a_second_token_teach_nothing(tiny_llama: Path) -> None:
    trainer = trainer_of(tiny_llama)
    before = trainer.tensors()
    assert trainer.step(shared_of(tiny_llama), [response(1), response(1)]) is None
    assert trainer.step(shared_of(tiny_llama), []) is None
    torch.testing.assert_close(trainer.tensors(), before, rtol=0, atol=0)


def test_a_resumed_trainer_takes_the_same_step(tiny_llama: Path) -> None:
    first, shared = trainer_of(tiny_llama), shared_of(tiny_llama)
    first.step(shared, [response(8)])
    config = read_config(tiny_llama)
    heads = [MtpHead.from_tensors(first.tensors(), config) for _ in range(2)]
    second, fresh = (MtpTrainer(head, learning_rate=1e-3, depths=2) for head in heads)
    second.load_optimiser({k: t.clone() for k, t in first.optimiser_tensors().items()})
    for trainer in (first, second, fresh):
        trainer.step(shared, [response(8, seed=1)])
    torch.testing.assert_close(second.tensors(), first.tensors(), rtol=0, atol=0)
    name = "mtp.proj.weight"  # negative control: without the optimiser's state it is another step
    assert not torch.equal(fresh.tensors()[name], first.tensors()[name])
