"""Whether a request can be served at all; asked before it costs anything."""

from rollout.engine import EngineLimits
from rollout.errors import InvalidRequest
from rollout.request import RolloutRequest


def check_request(request: RolloutRequest, limits: EngineLimits) -> None:
    """Raises InvalidRequest with what was got, what is expected and what to do."""
    prompt_len = len(request.prompt_ids)
    if not prompt_len:
        raise InvalidRequest(
            f"request {request.id}: empty prompt; give at least one token id (none is added for you)"
        )
    if prompt_len >= limits.context_len:
        raise InvalidRequest(
            f"request {request.id}: prompt of {prompt_len} tokens leaves no room in a context of "
            f"{limits.context_len}; shorten the prompt or raise context_len"
        )
    named = (*request.prompt_ids, *request.sampling.named_ids)
    wrong = next((token for token in named if not 0 <= token < limits.vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"request {request.id}: token id {wrong} is outside the vocabulary [0, {limits.vocab_size})"
        )
    for name in ("run_seed", "sample_index"):
        value = getattr(request, name)
        if not isinstance(value, int) or not -(2**63) <= value < 2**63:
            raise InvalidRequest(
                f"request {request.id}: {name}={value!r}: expected a 64-bit signed integer"
            )
    if request.sampling.stop_strings and not limits.can_decode:
        raise InvalidRequest(
            f"request {request.id}: stop_strings need a tokenizer and this engine has none; "
            "use stop_token_ids"
        )
    if request.sampling.grammar is not None and not limits.can_constrain:
        raise InvalidRequest(
            f"request {request.id}: a grammar needs an engine with compile_grammar and this one has "
            "none; see rollout.grammar"
        )
