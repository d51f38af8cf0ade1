"""A head that nobody trained yet is whole, knows something, and can draft what the task is about."""

import random
from pathlib import Path

from recipes.mtp_head import MtpHead
from recipes.mtp_start import new_head
from recipes.mtp_training import acceptance
from recipes.mtp_trunk import Trunk
from rollout.checkpoint import read_config, read_weights
from rollout.mtp_weights import VERSION, VOCABULARY, check_mtp

TEXTS = [[90, 77, 90, 3], [3, 77, 12]]


def test_a_new_head_is_whole_and_holds_the_ids_of_the_task(tiny_llama: Path) -> None:
    config = read_config(tiny_llama)
    head = new_head(tiny_llama, TEXTS, draft_vocab=12)
    check_mtp(head, config)
    assert head[VOCABULARY].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 77, 90]
    assert int(head[VERSION]) == 0


def test_a_draft_vocabulary_is_no_larger_than_the_models(tiny_llama: Path) -> None:
    size = read_config(tiny_llama).vocab_size
    assert new_head(tiny_llama, TEXTS, draft_vocab=10**6)[VOCABULARY].tolist() == list(range(size))
    assert len(new_head(tiny_llama, [list(range(50))], draft_vocab=20)[VOCABULARY]) == 20


def test_its_projection_is_fitted_to_the_texts(smollm2: Path) -> None:
    """Else the head accepts next to nothing until it is trained."""
    rng, trunk = random.Random(0), Trunk(smollm2)
    texts = [[17, 216, 33 + rng.randrange(9), 1232, 216, 33 + rng.randrange(9)] for _ in range(12)]
    fitted = new_head(smollm2, texts, draft_vocab=512)
    config, vocabulary = read_config(smollm2), fitted[VOCABULARY]
    raw = MtpHead.from_policy(read_weights(smollm2), config, vocabulary)
    unseen = [[17, 216, 33 + a, 1232, 216, 33 + b] for a, b in ((1, 7), (8, 2), (4, 4), (6, 1))]
    readings = [trunk.read(text[:1], [text[1:]])[0] for text in unseen]
    responses, shared = trunk.responses(readings, vocabulary, 1.0), trunk.shared(vocabulary, 1.0)
    (before,), (after,) = (
        acceptance(head, shared, responses, 1)
        for head in (raw, MtpHead.from_tensors(fitted, config))
    )
    assert after > 2 * before
