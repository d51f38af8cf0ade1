"""Tokens that say which channels of a model are large, for formats with INT8 activations."""

from transformers import PreTrainedTokenizerBase

TEXTS = (
    "The rain had stopped by the time the train pulled into the station, and the platform was full of "
    "people with wet umbrellas who had nowhere in particular to be.",
    "Question: A shop sells 12 apples in the morning and 35 in the afternoon. How many is that?\n"
    "Answer: 12 + 35 = 47. Check: 47 - 35 = 12.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    "
    "return total / len(values) if values else None\n",
)
"""Prose, sums and code."""


def calibration_ids(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[list[int]]:
    """The texts as ids; without a tokenizer, ids spread over the vocabulary."""
    if tokenizer is None:
        return [[(7 + 13 * i) % vocab_size for i in range(48)]]
    return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
