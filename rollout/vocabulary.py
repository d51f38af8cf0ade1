"""Whether the ids of two checkpoints stand for the same tokens.

Sizes do not tell: heads are padded to different widths over one tokenizer, and tokenizers of one size
differ. So the tables themselves are compared, by digest: every id and its token, added ones included.
"""

import hashlib
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rollout.checkpoint import read_tokenizer
from rollout.errors import InvalidConfig


def token_table_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over (id, token) in order of id; first 16 hex digits."""
    sha = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[::-1]):
        text = token.encode("utf-8", "surrogatepass")
        sha.update(f"{index} {len(text)} ".encode() + text)
    return sha.hexdigest()[:16]


def check_same_vocabulary(target: Path, draft: Path) -> None:
    """Raises InvalidConfig unless the tokenizers of two model folders map ids alike, and
    UnsupportedModel for a folder without one."""
    tokenizers = [read_tokenizer(folder) for folder in (target, draft)]
    expected, got = map(token_table_digest, tokenizers)
    if got != expected:
        sizes = [len(tokenizer) for tokenizer in tokenizers]
        raise InvalidConfig(
            f"draft model {draft}: token table {got} of {sizes[1]} tokens, expected {expected} of "
            f"{sizes[0]} as in {target}; name a draft model with the target's tokenizer"
        )
