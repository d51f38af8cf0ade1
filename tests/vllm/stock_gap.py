"""How far log-probabilities of vLLM as it is are from the reference's: a folder, a proposer."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from rollout.checkpoint import read_weights
from rollout.engine import run_to_end
from rollout.request import RolloutRequest
from rollout.sampling import SamplingParams
from tests.vllm.engines import full_logprobs, loaded, requests, spec_of


def repetitive() -> list[RolloutRequest]:
    """Prompts in which vLLM's n-gram proposer finds something."""
    law = SamplingParams(max_new_tokens=20, temperature=0.7)
    return [
        replace(request, prompt_ids=(*request.prompt_ids, *request.prompt_ids))
        for request in requests("again", 8, law)
    ]


def main(folder: Path, proposer: str) -> None:
    weights = read_weights(folder)
    gaps = []
    for sample in run_to_end(
        loaded(spec_of(folder, "vllm_stock", proposer=proposer)), repetitive()
    ):
        right = full_logprobs(folder, weights, sample, 0.7)
        gaps += [abs(a - b) for a, b in zip(sample.logprobs, right, strict=True)]
    print(max(gaps), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    os._exit(0)  # vLLM's own end takes long
