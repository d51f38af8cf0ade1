"""What a history hands to other actors and to checkpoints."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proposers.history import HistoryProposer
from proposers.history_law import Reader
from rollout.errors import InvalidConfig
from rollout.row import Row
from rollout.streams import SeededDraws
from tests.rollout.engines import request

PROMPT, OTHER = (1, 2, 3), (4, 5, 3)
SAMPLES = itertools.count()


def row(generated: list[int], prompt: tuple[int, ...] = PROMPT) -> Row:
    asked = request("r", prompt, prompt_id="same", sample_index=next(SAMPLES))
    made = Row(asked, SeededDraws(0, "p", 0), context_len=4096)
    made.token_ids += generated
    return made


def finished(proposer: HistoryProposer, one: Row) -> None:
    proposer.observe([one])
    proposer.finish(one)


def told() -> HistoryProposer:
    """Two prompts, two versions, known and unknown chances, and a row in flight."""
    proposer = HistoryProposer(salt="model")
    proposer.publish(3)
    finished(proposer, row([10, 11, 12]))
    finished(proposer, row([10, 13], OTHER))
    proposer.publish(4)
    proposer.remember(PROMPT, [10, 14, 15], [-0.1, -0.2, -0.3])
    proposer.observe([row([20, 21, 22])])
    return proposer


def law(proposer: HistoryProposer, context: tuple[int, ...], version: int = 5) -> dict[int, float]:
    prompt = next(p for p in proposer._store._prompts.values() if list(p.tail) == [1, 2, 3])
    return dict(proposer._look_up.law(prompt, context, Reader(version=version)))


def test_a_loaded_history_tells_the_same_law_as_the_one_exported(tmp_path: Path) -> None:
    """Through a safetensors file, so nothing but plain tensors; votes keep versions and chances."""
    proposer, again = told(), HistoryProposer(salt="model")
    save_file(proposer.export(), tmp_path / "history.safetensors")
    again.load(load_file(tmp_path / "history.safetensors"))
    for context in ((1, 2, 3, 10), (10,), (9, 11)):
        assert law(again, context) == law(proposer, context) != {}
    assert law(again, (10,)) != law(again, (10,), version=3)


def test_rows_in_flight_are_not_exported() -> None:
    """They will be drawn again, with the same noise."""
    again = HistoryProposer(salt="model")
    again.load(told().export())
    gauges = again.gauges()
    assert (gauges["history/sequences"], gauges["history/tokens"]) == (3, 8)
    assert again.propose([row([20])], [4])[0].token_ids == ()


def test_an_empty_history_is_exported_and_loaded() -> None:
    again = HistoryProposer()
    again.load(HistoryProposer().export())
    assert again.gauges()["history/sequences"] == 0


def test_a_history_of_another_model_is_refused_and_changes_nothing() -> None:
    again = HistoryProposer(salt="another model")
    for take in (again.load, again.merge):
        with pytest.raises(InvalidConfig, match="another model"):
            take(told().export())
    assert again.gauges()["history/sequences"] == 0


def test_loading_over_what_was_recorded_is_a_mistake() -> None:
    proposer = told()
    with pytest.raises(AssertionError, match="merge"):
        proposer.load(told().export())


def test_what_is_new_is_shared_once_and_never_passed_on() -> None:
    one, other = HistoryProposer(), HistoryProposer()
    growing = row([30, 31])
    one.observe([growing])
    finished(one, row([10, 11, 12]))
    one.remember(PROMPT, [40, 41])  # told from elsewhere, so others were told as well
    other.merge(one.export_new())
    assert other.gauges()["history/sequences"] == 1
    assert other.propose([row([10])], [4])[0].token_ids == (11, 12)
    for empty in (one.export_new(), other.export_new()):
        assert len(empty["token_lens"]) == 0
    one.finish(growing)
    other.merge(one.export_new())
    assert other.propose([row([30])], [4])[0].token_ids == (31,)


def test_what_is_told_and_what_is_new_are_everything_once() -> None:
    """A newcomer is told the one and hears the other with everybody else."""
    one, other, late, whole = (HistoryProposer(max_tokens=99) for _ in range(4))
    finished(other, row([20, 21]))
    finished(one, row([10, 11, 12]))
    one.merge(other.export_new())
    one.export_new()
    finished(one, row([30, 31, 32, 33]))
    one.observe([row([40])])
    late.merge(one.export_told())
    assert late.gauges()["history/sequences"] == 2
    whole.merge(one.export())
    late.merge(one.export_new())
    assert late.gauges() == whole.gauges()
    assert len(late.export_new()["token_lens"]) == 0
    assert len(one.export_told()["token_lens"]) == 3


def test_what_is_merged_is_the_newest_and_evicts_the_oldest() -> None:
    one, other = HistoryProposer(max_tokens=6), HistoryProposer()
    for first in (10, 20):
        finished(one, row([first, first + 1, first + 2]))
    finished(other, row([30, 31, 32]))
    one.merge(other.export_new())
    drafts = [one.propose([row([first])], [1])[0].token_ids for first in (10, 20, 30)]
    assert drafts == [(), (21,), (31,)]


def test_exported_tensors_are_copies() -> None:
    proposer = told()
    exported = proposer.export()
    before = {name: tensor.clone() for name, tensor in exported.items()}
    proposer.remember(PROMPT, [10, 11, 12])
    finished(proposer, row([60]))
    torch.testing.assert_close(exported, before, rtol=0, atol=0, equal_nan=True)


def test_a_row_does_not_read_what_was_made_with_its_noise() -> None:
    """An attempt that was aborted, also by way of another actor."""

    def sample(index: int, generated: list[int], temperature: float = 1.0) -> Row:
        made = row(generated)
        sampling = type(made.request.sampling)(temperature=temperature, max_new_tokens=9)
        asked = request("r", PROMPT, sampling, prompt_id="p", sample_index=index)
        again = Row(asked, SeededDraws(0, "p", index), context_len=99)
        again.token_ids += generated
        return again

    for draw in ("mode", "counts", "best"):
        first, second = (HistoryProposer(draw=draw) for _ in "ab")
        finished(first, sample(0, [10, 11]))
        second.merge(first.export_new())
        for proposer in (first, second):
            assert proposer.propose([sample(0, [10])], [1])[0].token_ids == ()
            assert proposer.propose([sample(1, [10])], [1])[0].token_ids == (11,)
            assert proposer.propose([sample(0, [10], 0.0)], [1])[0].token_ids == (11,)
