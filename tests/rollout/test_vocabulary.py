"""Vocabularies are the same when their tables are, not when their sizes are."""

from pathlib import Path

import pytest

from rollout.checkpoint import read_tokenizer
from rollout.errors import InvalidConfig, UnsupportedModel
from rollout.vocabulary import check_same_vocabulary, token_table_digest
from tests.tiny_model import tiny_folder


def test_heads_of_different_widths_over_one_tokenizer_are_one_vocabulary(
    tiny_llama: Path, tmp_path: Path
) -> None:
    # case 87
    check_same_vocabulary(tiny_llama, tiny_folder(tmp_path / "padded", vocab_size=512))


def test_an_added_token_makes_another_vocabulary(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(tiny_llama)
    before = token_table_digest(tokenizer)
    tokenizer.add_tokens(["<added>"])
    assert token_table_digest(tokenizer) != before
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match=rf"{before} of"):
        check_same_vocabulary(tiny_llama, tmp_path)


def test_a_folder_without_a_tokenizer_cannot_be_compared(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        check_same_vocabulary(tiny_llama, tmp_path)
