#!/usr/bin/env python
"""Tokens a second: this engine against Hugging Face, vLLM and llama.cpp on the same CPU.

    python scripts/bench_engine.py [--batches 1,4,8,16,32] [--repeats 3] [--tokens 128] [--json]
        [--engines native,vllm,hf_bf16,…] [--vllm-python PATH] [--llama-python PATH] [--quick]
        [--history 16] [--out bench]

Regime: SmolLM2-135M-Instruct, chat prompts of 35 to 56 tokens, T=1, top-p 1, 128 new tokens whatever
the model would like to stop at. Seconds run from prompts to last token, prefill included; nobody may
reuse the prompt of an earlier run. Contenders alternate: within a repeat and batch size every engine
runs once, the order rotates, and what lives in another process is stopped while it waits. Each engine
and batch size is warmed up by a short run that is not counted. Speculative rows use the defaults
(history proposer, adaptive draft length) after 16 recorded rollouts a prompt, and whatever timed runs
add; no run draws the tokens of another again. vLLM counts with the faster of two ways to start it; the
clearly slower one is measured once a batch size. `native` stands for this engine's rows, `vllm` for
those of vLLM and for `vllm_controller`: our vLLM engine with an adaptive draft length against plain
sampling by vLLM, measured by `bench_vllm.py` at 1, 8 and 32 rows before the others start, where the
interpreter of `--vllm-python` has the project as well.

Before anything is timed the engine has to be right (`bench_exact.py`); else the exit code is 1.

Beside the speeds: the roofline of a step from bandwidth and arithmetic measured in the same run
(`bench_roofline.py`), time shares, memory, the time to start (`bench_startup.py`), and the targets with
what bounds those that are not met. What is not installed is named with its install line. Not measured:
long contexts, serving with arrivals, GPUs, acceptance in a training run (the recorded rollouts are of
the very weights that run).
"""

import argparse
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from actors.threads import thread_environment

# Before torch is imported by anything below: waiting threads must not spin (see actors.threads).
for _name, _value in thread_environment(len(os.sched_getaffinity(0))).items():
    os.environ.setdefault(_name, _value)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers.utils import logging as transformers_logging

from proposers.history import HistoryProposer
from quant.linear import has_bf16_gemm
from recipes.smollm2 import model_folder
from rollout.checkpoint import read_tokenizer
from rollout.draft_len import FixedDraftLen
from rollout.errors import UnsupportedModel
from scripts.bench_contenders import Contender, Setting
from scripts.bench_exact import Inexact, check_exact
from scripts.bench_ours import (
    OURS,
    QUANTISED_PLAIN,
    QUANTISED_SPECULATIVE,
    OurEngine,
    make_ours,
)
from scripts.bench_peers import (
    CONTROLLER_INSTALL,
    IDLE_RATE,
    VARIANT,
    PeerFailed,
    controller_against_plain,
    has_module,
    start_peer,
)
from scripts.bench_plot import plot
from scripts.bench_report import LABELS, OVERHEAD_BATCH, Missing, Outcome, table
from scripts.bench_roofline import measure_roofline
from scripts.bench_startup import startup_seconds
from scripts.bench_summary import Measured, policy_name, summarise

FULL = {"batches": "1,4,8,16,32", "repeats": 3, "tokens": 128, "history": 16}
QUICK = {"batches": "1,4", "repeats": 1, "tokens": 16, "history": 2}
Thing = TypeVar("Thing")
CONTROLLER = "vllm_controller"
"""Among the engines by name; a comparison of its own."""
CONTROLLER_BATCHES = (1, 8, 32)
WARM_UP_TOKENS = 32
CLEARLY_SLOWER = 0.8
"""Of two ways to start an engine, below this share of the other's speed."""
OVERHEAD_PAIRS = 7
TOPICS = (
    "the tides of the sea", "a bakery in a small town", "how bridges are built", "the planet Mars",
    "growing tomatoes on a balcony", "the history of the bicycle", "learning to play the violin",
    "why leaves turn red in autumn",
)  # fmt: skip
TASKS = (
    "Describe {}.",
    "Explain {} to a child of eight years, with one example from everyday life.",
    "List three surprising facts about {}.",
    "Write a short letter to a friend in which you tell about {} and ask two questions at the end.",
)


def make_prompts(num: int, tokenizer: Any) -> list[list[int]]:
    """Distinct chat prompts of different lengths, as token ids."""
    texts = [task.format(topic) for topic in TOPICS for task in TASKS]
    assert num <= len(texts), f"{num} rows need as many prompts; there are {len(texts)}"
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts[:num]
    ]


def default_engines() -> tuple[str, ...]:
    """vLLM in float32 only where bf16 is emulated and float32 could be its better setting."""
    return (*(n for n in LABELS if n != "vllm_float32" or not has_bf16_gemm()), CONTROLLER)


def named_engines(words: str) -> tuple[str, ...]:
    """Engines by name, each once; `native` and `vllm` stand for several."""
    several = {
        "native": tuple(OURS),
        "vllm": tuple(name for name in default_engines() if name.startswith("vllm_")),
    }
    return tuple(dict.fromkeys(n for word in words.split(",") for n in several.get(word, (word,))))


# ---- measuring ----------------------------------------------------------------------------


def rotated(things: Sequence[Thing], by: int) -> list[Thing]:
    """The same, starting with another one each time."""
    by %= len(things)
    return [*things[by:], *things[:by]]


def alternate(
    contenders: Mapping[str, Contender],
    setting: Setting,
    repeats: int,
    tell: Callable[[str], None],
) -> Measured:
    """Every contender at every batch size, `repeats` times, in rotating order."""
    measured, seed = Measured(), itertools.count(1)  # 0 is the recording's: nothing is drawn again
    for repeat in range(repeats):
        for batch_index, batch in enumerate(setting.batches):
            taking_part = [n for n, c in contenders.items() if batch <= c.max_rows]
            prompts, run_seed, warm_up_seed = setting.prompts[:batch], next(seed), next(seed)
            for name in rotated(taking_part, repeat + batch_index):
                if name in measured.failed or outrun(measured, name, batch):
                    continue
                contender = contenders[name]
                turn = f"repeat {repeat + 1}/{repeats}, B={batch}: {name}"
                tell(turn)
                try:
                    if not repeat:
                        warm_up = min(WARM_UP_TOKENS, setting.num_tokens)
                        contender.generate(prompts, warm_up, warm_up_seed)
                    seconds = contender.generate(prompts, setting.num_tokens, run_seed)
                except PeerFailed as error:
                    measured.failed[name] = str(error)
                    continue
                rate = batch * setting.num_tokens / seconds
                measured.tok_s.setdefault(name, {}).setdefault(batch, []).append(rate)
                tell(f"{turn}: {rate:.1f} tok/s")
                if isinstance(contender, OurEngine) and contender.last is not None:
                    run = contender.last
                    measured.runs.setdefault(name, {}).setdefault(batch, []).append(run)
    return measured


def outrun(measured: Measured, name: str, batch: int) -> bool:
    """Another way to start the same engine was clearly faster at this batch size: this one need not
    be measured again."""
    kind = name.split(VARIANT)[0]
    first = {
        other: rates[batch][0]
        for other, rates in measured.tok_s.items()
        if other.split(VARIANT)[0] == kind and batch in rates
    }
    return name in first and first[name] < CLEARLY_SLOWER * max(first.values())


def zero_speculation(
    ours: OurEngine, setting: Setting, num_pairs: int, tell: Callable[[str], None]
) -> list[tuple[float, float]]:
    """Seconds without a proposer, and with one whose draft length is always 0; pair by pair."""
    loaded, prompts = ours.loaded, setting.prompts[:OVERHEAD_BATCH]
    plain = OurEngine("plain", loaded, loaded.engine())
    idle = OurEngine(
        "idle",
        loaded,
        loaded.engine(proposer=HistoryProposer(), draft_len=FixedDraftLen(0)),
    )
    pairs = []
    for pair in range(-1, num_pairs):
        tell(f"overhead of a proposer that drafts nothing: {pair + 1}/{num_pairs}")
        order = (plain, idle) if pair % 2 else (idle, plain)
        seconds = {e.name: e.generate(prompts, setting.num_tokens, 5000 + pair) for e in order}
        if pair >= 0:  # the first is a warm-up
            pairs.append((seconds["plain"], seconds["idle"]))
    return pairs


def record_history(
    ours: Mapping[str, OurEngine], setting: Setting, num_samples: int, tell: Callable[[str], None]
) -> None:
    """One speculative engine makes the earlier rollouts, all learn from them."""
    speculative = [engine for name, engine in ours.items() if OURS[name].speculative]
    if not speculative:
        return
    first, *others = speculative
    tell(f"recording {num_samples} rollouts of each of {len(setting.prompts)} prompts")
    samples = first.record(setting.prompts, num_samples, setting.num_tokens)
    for engine in others:
        engine.remember(samples)


def compare_controller(
    arguments: argparse.Namespace, setting: Setting, tell: Callable[[str], None]
) -> tuple[dict[str, Any], list[Missing]]:
    """Our vLLM engine against plain vLLM by batch size, or why not."""
    if CONTROLLER not in arguments.engines:
        return {}, []
    if setting.vllm_python is None:
        return {}, [Missing(CONTROLLER, "vLLM is not installed", CONTROLLER_INSTALL)]
    tell("vLLM with an adaptive draft length against plain vLLM")
    batches = [b for b in setting.batches if b in CONTROLLER_BATCHES] or setting.batches
    try:
        found = controller_against_plain(
            setting.vllm_python,
            batches,
            num_tokens=setting.num_tokens,
            num_earlier=arguments.history,
            quick=arguments.quick,
        )
    except PeerFailed as error:
        return {}, [Missing(CONTROLLER, f"did not run: {error}", CONTROLLER_INSTALL)]
    return found, []


# ---- the command --------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", help=f"rows in the batch; {FULL['batches']}")
    parser.add_argument("--repeats", type=int, help=f"runs of each engine; {FULL['repeats']}")
    parser.add_argument("--tokens", type=int, help=f"new tokens a row; {FULL['tokens']}")
    parser.add_argument(
        "--history", type=int, help=f"recorded rollouts; {FULL['history']} a prompt"
    )
    parser.add_argument("--engines", help=f"some of native,vllm,{','.join(LABELS)},{CONTROLLER}")
    parser.add_argument("--vllm-python", type=Path, help="an interpreter that has vllm")
    parser.add_argument("--llama-python", type=Path, help="an interpreter that has llama_cpp")
    parser.add_argument("--quick", action="store_true", help="a trial: says that it runs, no more")
    parser.add_argument("--json", action="store_true", help="the JSON line only")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="folder of plot and JSON")
    arguments = parser.parse_args()
    fill_in(arguments, QUICK if arguments.quick else FULL)
    arguments.batches = _batches(parser, arguments.batches)
    arguments.engines = _engines(parser, arguments.engines)
    for name in ("repeats", "tokens", "history"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: expected at least 1")
    return arguments


def _batches(parser: argparse.ArgumentParser, words: str) -> tuple[int, ...]:
    most = len(TOPICS) * len(TASKS)
    try:
        batches = tuple(sorted({int(word) for word in words.split(",")}))
    except ValueError:
        parser.error(f"--batches {words}: expected numbers with commas between them")
    if not 1 <= batches[0] <= batches[-1] <= most:
        parser.error(f"--batches {words}: expected 1 to {most} rows")
    return batches


def _engines(parser: argparse.ArgumentParser, words: str | None) -> tuple[str, ...]:
    names = named_engines(words) if words else default_engines()
    known = (*LABELS, CONTROLLER)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--engines {unknown[0]}: expected some of native,vllm,{','.join(known)}")
    return names


def python_with(module: str, named: Path | None) -> Path | None:
    """The interpreter to run a peer: the one named, else this one if it has the module."""
    if named is not None:
        return named if has_module(named, module) else None
    return Path(sys.executable) if importlib.util.find_spec(module) else None


def fill_in(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Gives options that were left out their value of a full run or a trial."""
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def own_stdout() -> TextIO:
    """Standard output for answers alone: whatever else is printed from now on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def make_tell() -> Callable[[str], None]:
    """Progress on stderr: one line that is rewritten, or lines where nobody watches."""
    start = "\r\033[K" if sys.stderr.isatty() else ""
    end = "" if start else "\n"

    def tell(text: str) -> None:
        if text or start:
            print(f"{start}{text}", end=end, file=sys.stderr, flush=True)

    return tell


def run(arguments: argparse.Namespace, tell: Callable[[str], None], stack: ExitStack) -> Outcome:
    """Checks, starts, measures. Raises Inexact before anything is timed."""
    tell("measuring the roofline")
    roofline = measure_roofline()
    folder = model_folder("smollm2")
    setting = Setting(
        folder=folder,
        prompts=make_prompts(max(*arguments.batches, OVERHEAD_BATCH), read_tokenizer(folder)),
        batches=arguments.batches,
        num_tokens=arguments.tokens,
        vllm_python=python_with("vllm", arguments.vllm_python),
        llama_python=python_with("llama_cpp", arguments.llama_python),
    )
    controller, missing = compare_controller(arguments, setting, tell)
    tell("starting new processes, to time it")
    startup = startup_seconds(folder)
    ours = make_ours(
        [name for name in arguments.engines if name in OURS],
        folder,
        num_slots=len(setting.prompts),
        context_len=setting.context_len,
    )
    tell("checking that what is timed is right")
    policies = {policy_name(e.loaded): e.loaded for e in ours.values()}
    checked = check_exact(policies, folder, setting.prompts[:3])
    contenders: dict[str, Contender] = dict(ours)
    for name in (name for name in arguments.engines if name not in (*OURS, CONTROLLER)):
        tell(f"starting {name}")
        started, not_started = start_peer(name, setting)
        missing += not_started
        for contender in started:
            contenders[contender.name] = contender
            stack.callback(contender.close)
    record_history(ours, setting, arguments.history, tell)
    measured = alternate(contenders, setting, arguments.repeats, tell)
    missing += [
        Missing(name, f"failed while it ran: {why}", "run it alone by --engines")
        for name, why in measured.failed.items()
    ]
    contenders = {name: c for name, c in contenders.items() if name not in measured.failed}
    pairs = []
    if quantised := [ours[name] for name in QUANTISED_PLAIN if name in ours]:
        num_pairs = 1 if arguments.quick else OVERHEAD_PAIRS
        pairs = zero_speculation(quantised[0], setting, num_pairs, tell)
    settings = {name: getattr(arguments, name) for name in ("repeats", "history", "quick")}
    return summarise(
        settings,
        setting,
        ours,
        contenders,
        roofline,
        checked,
        measured,
        pairs,
        missing,
        startup,
        controller,
    )


def main() -> None:
    transformers_logging.disable_progress_bar()
    arguments = parse()
    tell = make_tell()
    try:
        with ExitStack() as stack:
            outcome = run(arguments, tell, stack)
    except (Inexact, UnsupportedModel) as error:
        tell("")
        sys.exit(f"bench_engine: {error}; nothing is timed")
    tell("")
    as_json = json.dumps(outcome.to_json(QUANTISED_PLAIN, QUANTISED_SPECULATIVE))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "engine.json").write_text(as_json + "\n")
    plot(outcome, arguments.out / "engine.png", title_of(outcome))
    if not arguments.json:
        print(heading(outcome))
        print(table(outcome, QUANTISED_PLAIN, QUANTISED_SPECULATIVE))
        print(f"\nwritten: {arguments.out}/engine.json, {arguments.out}/engine.png")
    print(as_json)


def title_of(outcome: Outcome) -> str:
    about = outcome.about["machine"]
    return (
        f"SmolLM2-135M, T=1, {outcome.num_tokens} new tokens a row; {about['processor']}, "
        f"{about['threads']} threads, {about['cpu_capability']}"
    )


def heading(outcome: Outcome) -> str:
    """The machine, what was checked, and what of it should not be believed."""
    lines = [title_of(outcome)]
    for one in outcome.about["checked"]:
        equal = "equal" if one["greedy_equal"] else "equal but for near-ties"
        lines.append(
            f"checked {one['name']}: greedy with drafts {equal}; log-probabilities within "
            f"{one['logprob_error']:.2g} nats on average (tolerance {one['tolerance']:.2g})"
        )
    first, again = (outcome.about["startup_s"][name] for name in ("compiling", "cached"))
    lines.append(
        f"a new process has its first token after {first:.0f} s, {again:.0f} s once compiled"
    )
    for name, by_batch in outcome.about["best_variants"].items():
        ways = ", ".join(f"B={batch} {variant}" for batch, variant in by_batch.items())
        lines.append(f"{LABELS[name]} was fastest at {ways}")
    for name, rate in outcome.about["idle_cpu_rate"].items():
        if rate is not None and rate > IDLE_RATE:
            lines.append(f"beware: {name} used {rate:.2f} cores while others ran")
    if outcome.about["settings"]["quick"]:
        lines.append("a trial (--quick): these numbers say that it runs, no more")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
