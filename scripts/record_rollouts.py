#!/usr/bin/env python
"""Records rollouts of SmolLM2 by this project's engine, for benchmarks that need some of them.

    python scripts/record_rollouts.py OUT.safetensors [--prompts 12] [--samples 17] [--tokens 160]
        [--temperature 1.0] [--quant int8_w8a16] [--seed 0] [--rows 32] [--json]

Three kinds of prompts in turn: short sums with two examples (as the quickstart trains on), word
problems and open questions, the last two in the chat format. Every sample of a prompt is drawn with
noise of its own, ends at the model's end of text or after `--tokens`, and is stored as token ids with
the log-probability of each under the law it was sampled from. Plain decoding, one policy version.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from actors.engine_spec import EngineSpec, make_engine, pack_folder
from quant.formats import FORMATS, FormatName
from recipes.arithmetic import ArithmeticTask
from recipes.recorded_rollouts import Recording, Rollout
from recipes.smollm2 import model_folder
from rollout.checkpoint import read_config, read_tokenizer
from rollout.request import RolloutRequest, RolloutSample
from rollout.sampling import SamplingParams

PROBLEMS = (
    "A baker sells {a} loaves in the morning and {b} in the afternoon, at {c} coins each. How many "
    "coins does she take in? Think step by step.",
    "A train travels {a} km in the first hour and {b} km in each of the next {c} hours. How far does "
    "it go in all? Think step by step.",
    "Tom has {a} marbles. He gives {c} marbles to each of {c} friends and buys {b} more. How many has "
    "he now? Think step by step.",
    "There are {a} rows of {c} chairs, and {b} chairs stand in the hall. How many chairs are there? "
    "Think step by step.",
)
QUESTIONS = (
    "Explain in a few sentences how the tides of the sea come about.",
    "Write a short letter to a friend about growing tomatoes on a balcony.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List three surprising facts about the planet Mars.",
    "Describe a bakery in a small town on a winter morning.",
    "Why do leaves turn red in autumn?",
)


def make_prompts(num: int, tokenizer: Any, seed: int) -> list[tuple[int, ...]]:
    """Sums, word problems and questions in turn."""
    generator = random.Random(f"prompts {seed}")
    sums = ArithmeticTask(num_problems=num, max_operand=60, seed=seed)
    texts = []
    for index in range(num):
        kind, turn = index % 3, index // 3
        if kind == 0:
            texts.append(sums.problem(turn)[0].prompt)
            continue
        numbers = {name: generator.randrange(3, 60) for name in "abc"}
        asked = PROBLEMS if kind == 1 else QUESTIONS
        texts.append(_chat(asked[turn % len(asked)].format(**numbers), tokenizer))
    return [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def _chat(text: str, tokenizer: Any) -> str:
    message = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))


def record(
    prompts: Sequence[tuple[int, ...]],
    *,
    num_samples: int,
    num_tokens: int,
    temperature: float,
    quant: FormatName,
    seed: int,
    num_rows: int,
    tell: Callable[[str], None],
    folder: Path | None = None,
    stop_strings: tuple[str, ...] = (),
) -> Recording:
    """Plain decoding of `num_samples` rollouts a prompt, of SmolLM2 or the model of `folder`."""
    folder = folder or model_folder("smollm2")
    spec = EngineSpec(
        str(folder),
        mode="full" if quant == "none" else "quantised",
        format=quant,
        proposer="none",
        num_slots=num_rows,
        context_len=max(map(len, prompts)) + num_tokens,
    )
    engine = make_engine(spec)
    engine.load(engine.prepare(pack_folder(spec)), version=0, digest="recorded")
    sampling = SamplingParams(
        temperature=temperature,
        max_new_tokens=num_tokens,
        eos_token_ids=read_config(folder).eos_token_ids,
        stop_strings=stop_strings,
    )
    requests = [
        RolloutRequest(f"{p}/{s}", f"g{p}", f"p{p}", s, ids, sampling, run_seed=seed)
        for p, ids in enumerate(prompts)
        for s in range(num_samples)
    ]
    engine.submit(requests)
    ended: dict[str, RolloutSample] = {}
    while engine.num_unfinished:
        if made := engine.step():
            ended |= {sample.request.id: sample for sample in made}
            tell(f"T={temperature}: {len(ended)} of {len(requests)} rollouts")
    rollouts = [
        Rollout(ended[request.id].token_ids, ended[request.id].logprobs) for request in requests
    ]
    by_prompt = [rollouts[at : at + num_samples] for at in range(0, len(rollouts), num_samples)]
    return Recording(tuple(prompts), tuple(map(tuple, by_prompt)), temperature, quant)


def tell(text: str) -> None:
    """Progress on stderr; one line that is rewritten where somebody watches."""
    start, end = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
    print(f"{start}{text}", end=end, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--samples", type=int, default=17, help="rollouts of each prompt")
    parser.add_argument("--tokens", type=int, default=160, help="longest rollout")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--quant", choices=tuple(FORMATS), default="int8_w8a16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=32, help="rollouts at a time")
    parser.add_argument("--json", action="store_true", help="the JSON line only")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    prompts = make_prompts(
        arguments.prompts, read_tokenizer(model_folder("smollm2")), arguments.seed
    )
    started = time.perf_counter()
    recording = record(
        prompts,
        num_samples=arguments.samples,
        num_tokens=arguments.tokens,
        temperature=arguments.temperature,
        quant=arguments.quant,
        seed=arguments.seed,
        num_rows=arguments.rows,
        tell=(lambda _: None) if arguments.json else tell,
    )
    recording.save(arguments.out)
    about = {
        "out": str(arguments.out),
        "prompts": len(prompts),
        "rollouts": len(prompts) * arguments.samples,
        "tokens": recording.num_tokens,
        "seconds": round(time.perf_counter() - started, 1),
    }
    if not arguments.json:
        tell("")
        print("{tokens} tokens of {rollouts} rollouts in {seconds} s: {out}".format(**about))
    print(json.dumps(about))


if __name__ == "__main__":
    main()
