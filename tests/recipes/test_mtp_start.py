"""A head that nobody trained yet is whole, and can draft what the task is about."""

from pathlib import Path

from recipes.mtp_start import new_head
from rollout.checkpoint import read_config
from rollout.mtp_weights import VERSION, VOCABULARY, check_mtp


def test_a_new_head_is_whole_and_holds_the_ids_of_the_task(tiny_llama: Path) -> None:
    config = read_config(tiny_llama)
    head = new_head(tiny_llama, [90, 77, 90, 3], draft_vocab=12)
    check_mtp(head, config)
    assert head[VOCABULARY].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 77, 90]
    assert int(head[VERSION]) == 0


def test_a_draft_vocabulary_is_no_larger_than_the_models(tiny_llama: Path) -> None:
    size = read_config(tiny_llama).vocab_size
    assert new_head(tiny_llama, [1], draft_vocab=10**6)[VOCABULARY].tolist() == list(range(size))
    assert len(new_head(tiny_llama, range(50), draft_vocab=20)[VOCABULARY]) == 20
