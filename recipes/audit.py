"""`rollout audit`: is this engine, with this proposer and law, exact?

Three parts, each told as it goes:

1. enumerated   the real engine over known tables, joint laws against plain sampling (no chance);
2. controls     planted faults, which the same checks must catch, or the audit is void;
3. sampled      the real engine on the real model, by tests with stated power and false-alarm rate.

The outcome is a certificate (`recipes.certificate`). What it cannot say: that the forward computes
what the checkpoint means beyond the reference named in it, or anything about settings it was not run
with.
"""

import argparse
import difflib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from actors.engine_spec import EngineSpec
from quant.formats import FormatName
from recipes.audit_enumerated import Cell, audit_grid, audit_streams
from recipes.audit_faults import Control, run_controls
from recipes.audit_sampled import default_prompts, make_reference
from recipes.audit_sampled import run as audit_engine
from recipes.audit_statistics import Finding
from recipes.certificate import Certificate, Setting, write_certificate
from recipes.noisy_copy import noisy_copy
from recipes.passport import machine, model_files, project_state, versions
from recipes.smollm2 import model_folder
from rollout.checkpoint import read_config
from rollout.errors import InvalidConfig, InvalidRequest
from rollout.request import Mode
from rollout.sampling import SamplingParams

FALSE_ALARM_RATE = 1e-3
"""Of the whole audit of an exact engine."""
NUM_TESTS = 60
"""About how many tests share it; the level at which powers are stated."""
DEFAULT_PROPOSERS = ("history_sampled",)
"""Its drafts are drawn, so drafting noise, coins, corrections and bonuses are all at work."""
DRAFT_MODELS = ("draft_model", "vllm_draft_model")
"""Proposers that run a model of their own; without a folder for it a noisy copy is made."""


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What to audit."""

    spec: EngineSpec
    """Its proposer is replaced by each of `proposers`."""
    proposers: tuple[str, ...] = DEFAULT_PROPOSERS
    samplings: tuple[SamplingParams, ...] = (SamplingParams(),)
    thorough: bool = False
    seed: int = 0


def audit_command(arguments: argparse.Namespace) -> int:
    """The command line's audit; its exit code."""
    quant: FormatName = arguments.quant
    if arguments.draft_len < 0:
        raise InvalidConfig(f"--draft-len {arguments.draft_len}: expected at least 0")
    mode: Mode = arguments.mode or ("full" if quant == "none" else "quantised")
    if mode != "lossless" and (mode == "full") != (quant == "none"):
        raise InvalidConfig(
            f"--mode {mode} --quant {quant}: full goes with none, quantised with a format"
        )
    drafting = ("self_draft",) if mode == "lossless" else DEFAULT_PROPOSERS
    proposers = tuple(arguments.proposer or drafting)
    if arguments.stock and arguments.engine != "vllm":
        raise InvalidConfig(f"--stock with --engine {arguments.engine}: it is for --engine vllm")
    if arguments.stock and len(arguments.proposer or ()) * len(arguments.sampling or [[]]) != 1:
        raise InvalidConfig(
            "--stock: name one --proposer and one law, since what runs behind a faulty verifier in its "
            "process was seen to be wrong as well"
        )
    if arguments.engine == "vllm" and quant == "int8_w8a8":
        raise InvalidConfig(
            "--engine vllm --quant int8_w8a8: there is no other forward to compare its kernels with; "
            "audit --quant none"
        )
    samplings = tuple(map(read_sampling, arguments.sampling or [[]]))
    with ExitStack() as scratch:
        folder = model_folder(arguments.model)
        named = arguments.draft_model
        draft_folder = model_folder(named) if named else None
        if draft_folder is None and set(DRAFT_MODELS).intersection(proposers):
            made = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="rollout-audit-")))
            draft_folder = noisy_copy(folder, made / "noisy copy of the model")
        spec = EngineSpec(
            str(folder),
            engine="vllm_stock" if arguments.stock else arguments.engine,
            mode=mode,
            format=quant,
            proposer=proposers[0],
            draft_model=str(draft_folder) if draft_folder else None,
            mtp_head=arguments.mtp_head,
            draft_len=arguments.draft_len,
            verification=arguments.verification,
            dtype=arguments.dtype,
        )
        certificate = audit(
            AuditPlan(
                spec,
                proposers=proposers,
                samplings=samplings,
                thorough=arguments.thorough,
                seed=arguments.seed,
            )
        )
    page = write_certificate(certificate, arguments.out / time.strftime("%Y%m%d-%H%M%S"))
    if arguments.json:
        print(json.dumps(certificate.to_json() | {"page": str(page)}))
    else:
        print_certificate(certificate, page)
    return certificate.exit_code


def print_certificate(certificate: Certificate, page: Path, console: Console | None = None) -> None:
    """The verdict and what led to it, for people."""
    console = console or Console(highlight=False)
    outcome = certificate.to_json()
    worst = outcome["enumerated"]["largest_total_variation"]
    caught = sum(control.caught for control in certificate.controls)
    smallest = min(finding.p_value for finding in certificate.findings)
    console.print(f"verdict: {certificate.verdict}", style="bold")
    console.print(f"enumerated: {len(certificate.enumerated)} laws, total variation <= {worst:.1e}")
    console.print(
        f"sampled: {len(certificate.findings)} tests, smallest p-value {smallest:.2g} "
        f"(each fails below {FALSE_ALARM_RATE / len(certificate.findings):.1e})"
    )
    console.print(f"controls: {caught} of {len(certificate.controls)} planted faults caught")
    for name in certificate.failed:
        console.print(f"failed: {name}")
    for name in certificate.missed:
        console.print(f"not caught: {name}")
    console.print(f"page: {page}", soft_wrap=True)


def read_sampling(words: Sequence[str]) -> SamplingParams:
    """Sampling parameters from `name=value` words. Raises InvalidConfig."""
    known = {field.name for field in fields(SamplingParams)}
    if wrong := [word for word in words if "=" not in word]:
        raise InvalidConfig(f"--sampling {wrong[0]}: expected name=value, as in temperature=0.7")
    values = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    assert isinstance(values, dict)
    for name in map(str, values):
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
            raise InvalidConfig(f"--sampling {name}: no such parameter; did you mean {near}?")
    try:
        return SamplingParams.from_json({str(name): value for name, value in values.items()})
    except InvalidRequest as error:
        raise InvalidConfig(f"--sampling {error}") from error


def audit(plan: AuditPlan, console: Console | None = None) -> Certificate:
    """Runs the whole audit; progress goes to `console` (stderr by default)."""
    tell = _Teller(console or Console(file=sys.stderr, highlight=False))
    started = time.monotonic()
    read_config(Path(plan.spec.model_folder))  # refused before minutes are spent
    prompts = default_prompts(plan.spec.model_folder)
    level = FALSE_ALARM_RATE / NUM_TESTS
    with tell.part("enumerating joint laws"):
        cores = len(os.sched_getaffinity(0))
        cells = audit_grid(thorough=plan.thorough, processes=cores, on_cell=tell.cell)
        streams = audit_streams(level=level)
    with tell.part("planting faults"):
        controls = run_controls(on_control=tell.control)
    sampled = _sampled(plan, prompts, tell)
    return Certificate(
        audited=_audited(plan),
        enumerated=cells,
        streams=streams,
        sampled=sampled,
        controls=controls,
        false_alarm_rate=FALSE_ALARM_RATE,
        seconds=time.monotonic() - started,
    )


def _sampled(plan: AuditPlan, prompts: Sequence[tuple[int, ...]], tell: "_Teller") -> list[Setting]:
    """The real engine under every proposer and law; one reference serves all."""
    settings = list(itertools.product(plan.proposers, plan.samplings))
    audited = []
    with tell.part("loading the reference"):
        reference = make_reference(plan.spec)
    for proposer, sampling in settings:
        words = sampling_words(sampling)
        with tell.part(f"sampling the real engine: {proposer}, {words}"):
            part = audit_engine(
                replace(plan.spec, proposer=proposer),  # type: ignore[arg-type]
                sampling,
                prompts,
                budget="thorough" if plan.thorough else "default",
                seed=plan.seed,
                false_alarm_rate=FALSE_ALARM_RATE / len(settings),
                reference=reference,
                on_finding=tell.finding,
            )
        audited.append(Setting(proposer, words, part))
    return audited


def _audited(plan: AuditPlan) -> dict[str, Any]:
    spec = asdict(plan.spec)
    return {
        "engine": spec["engine"],
        "model": model_files(Path(plan.spec.model_folder)),
        "draft_model": spec["draft_model"] and model_files(Path(spec["draft_model"])),
        "settings": {name: spec[name] for name in ("mode", "format", "draft_len", "max_draft_len")}
        | {"verification": spec["verification"], "dtype": str(plan.spec.torch_dtype)},
        "proposers": list(plan.proposers),
        "samplings": [asdict(sampling) for sampling in plan.samplings],
        "seed": plan.seed,
        "thorough": plan.thorough,
        "project": project_state(),
        "machine": machine(),
        "versions": versions(),
    }


def sampling_words(sampling: SamplingParams) -> str:
    """What differs from the defaults, for people."""
    plain = SamplingParams()
    changed = [
        f"{field.name}={getattr(sampling, field.name)}"
        for field in fields(SamplingParams)
        if getattr(sampling, field.name) != getattr(plain, field.name)
    ]
    return " ".join(changed) or "temperature=1"


class _Teller:
    """Progress, a line a part and one for whatever is wrong."""

    def __init__(self, console: Console) -> None:
        self._console, self._num = console, 0

    @contextmanager
    def part(self, text: str) -> Iterator[None]:
        started, self._num = time.monotonic(), 0
        with self._console.status(text):
            yield
        self._console.print(f"{text}: {self._num} done, {time.monotonic() - started:.0f} s")

    def cell(self, cell: Cell) -> None:
        self._num += 1
        if not cell.exact:
            self._console.print(
                f"  not exact: {cell.proposer} under {cell.law}, {cell.rule}: "
                f"total variation {cell.total_variation:.1e}, "
                f"log-probabilities off by {cell.logprob_error:.1e}"
            )

    def control(self, control: Control) -> None:
        self._num += 1
        if not control.caught:
            self._console.print(f"  NOT caught: {control.name}")

    def finding(self, finding: Finding) -> None:
        self._num += 1
        if finding.p_value < FALSE_ALARM_RATE / NUM_TESTS:
            self._console.print(f"  {finding.name}: p = {finding.p_value:.1e}; {finding.detail}")
