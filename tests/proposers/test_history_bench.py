"""What the history benchmark counts, and the file it reads."""

from pathlib import Path

import pytest
import torch

from recipes.recorded_rollouts import Recording, Rollout
from rollout.draft import NO_DRAFT, Draft, SparseLaw
from scripts.bench_history import expected_accepted, history_reading, make_corpus

SOME = (
    Rollout((10, 11, 12), (-0.5, -0.25, -0.125)),
    Rollout((10, 13), (-0.5, -2.0)),
)
RECORDING = Recording(((1, 2), (3, 4, 5)), (SOME, SOME[::-1]), 0.7, "int8_w8a16")


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    RECORDING.save(tmp_path / "new" / "rollouts.safetensors")
    assert Recording.load(tmp_path / "new" / "rollouts.safetensors") == RECORDING


def test_a_draft_is_worth_what_it_shares_with_the_law() -> None:
    # p (.5, .3, .2): the named 1 is accepted with .3; of q .6 and .4 on 0 and 2, .5 + .2 are shared
    p = torch.tensor([0.5, 0.3, 0.2])
    q = SparseLaw(torch.tensor([0, 2]), torch.tensor([0.6, 0.4], dtype=torch.float64))
    assert expected_accepted(Draft.of_points([1, 0]), p) == pytest.approx(0.3)
    assert expected_accepted(Draft((2,), (q,)), p) == pytest.approx(0.7)
    assert expected_accepted(NO_DRAFT, p) == 0.0


def test_a_held_out_rollout_is_read_with_what_came_before_each_token() -> None:
    drafts = history_reading("mode")((1, 2), SOME[:1], Rollout((10, 11, 7, 10), (-0.5,) * 4))
    # nothing ever followed 7
    assert [draft.token_ids for draft in drafts] == [(10,), (11,), (12,), ()]


def test_stored_rollouts_are_of_the_length_asked_for_and_their_prompts_differ() -> None:
    corpus = make_corpus(RECORDING, num_samples=50, length=20)
    assert len(set(corpus.prompts)) == 4
    rollouts = [one for of_prompt in corpus.rollouts for one in of_prompt]
    assert len(rollouts) == 64 and {len(one.token_ids) for one in rollouts} == {20}
