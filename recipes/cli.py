"""The `rollout` command.

Exit codes: 0 done, 1 the run or the check failed, 2 bad use (options, model, folder), 130 stopped by
the user. Errors are one line on stderr; `--json` puts one JSON object on the last line of stdout.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from actors.threads import thread_environment

# Before torch is imported by anything below: waiting threads must not spin (see actors.threads).
for _name, _value in thread_environment(len(os.sched_getaffinity(0))).items():
    os.environ.setdefault(_name, _value)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers.utils import logging as transformers_logging

from actors.engine_spec import ProposerName
from recipes.config import documented_options, load_config, resumed_config
from rollout.errors import (
    InvalidConfig,
    InvalidRequest,
    RolloutError,
    RunFolderError,
    UnsupportedModel,
)

BAD_USE = (InvalidConfig, InvalidRequest, RunFolderError, UnsupportedModel)


def main(words: Sequence[str] | None = None) -> int:
    """Parses the command line and runs one command; its exit code."""
    transformers_logging.disable_progress_bar()
    arguments = _parse(words)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except BAD_USE as error:
        return _fail(arguments, error, 2)
    except (RolloutError, FloatingPointError) as error:
        return _fail(arguments, error, 1)
    except KeyboardInterrupt:
        return _fail(arguments, KeyboardInterrupt("stopped at once"), 130)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes a list of positionals in one piece only; key=value may stand anywhere."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    if wrong := [w for w in rest if w.startswith("-") or "=" not in w]:
        parser.error(f"unrecognised: {' '.join(wrong)}")
    if rest and not hasattr(arguments, "overrides"):
        parser.error(f"this command takes no options of a recipe: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _fail(arguments: argparse.Namespace, error: BaseException, code: int) -> int:
    print(f"rollout: {error}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollout",
        description="Exact speculative rollouts for RL post-training, on Ray.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = _command(commands, "run", _run, "train from a recipe, or go on with a run")
    run.add_argument("recipe", nargs="?", type=Path, help="YAML file of options")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="options over the recipe's")
    run.add_argument("--resume", type=Path, metavar="RUN", help="go on with a run folder")
    run.add_argument(
        "--explain",
        action="store_true",
        help="say each step why the last round of every actor drafted as much as it did",
    )
    run.epilog = "options:\n" + _options_text()
    launch = _command(commands, "launch", _launch, "keep a named rollout cluster up")
    launch.add_argument("recipe", type=Path, help="YAML file; model, mode, actors and draft count")
    launch.add_argument("overrides", nargs="*", metavar="key=value")
    launch.add_argument("--detach", action="store_true", help="return once the cluster is up")
    stop = _command(commands, "stop", _stop, "end a named cluster")
    stop.add_argument("name")
    status = _command(commands, "status", _status, "show a named cluster, or a run folder")
    status.add_argument(
        "target", nargs="?", help="cluster name or run folder; all clusters if none"
    )
    report = _command(commands, "report", _report, "write a run's page again")
    report.add_argument("run", type=Path)
    _add_audit(commands)
    _add_plan(commands)
    _add_train_mtp(commands)
    _command(commands, "doctor", _doctor, "check this machine and installation")
    return parser


def _add_audit(commands: Any) -> None:
    audit = _command(commands, "audit", _audit, "certify that an engine samples the target law")
    audit.add_argument(
        "--engine", default="native", choices=("native", "vllm"), help="who generates"
    )
    audit.add_argument(
        "--stock",
        action="store_true",
        help="vLLM as it is, without the plug-in: where it is not exact the audit must say so",
    )
    audit.add_argument("--model", default="smollm2", help="model folder, or smollm2 (default)")
    audit.add_argument(
        "--mode",
        default=None,
        choices=("quantised", "full", "lossless"),
        help="whose law is sampled, as in a recipe (default by --quant: full for none)",
    )
    audit.add_argument(
        "--quant",
        default="none",
        choices=("none", "int8_w8a16", "int8_w8a8"),
        help="format of the weights that are sampled, or in lossless mode draft; none (default) is "
        "full precision, where the reference is sharpest",
    )
    audit.add_argument(
        "--proposer",
        nargs="+",
        default=None,
        choices=get_args(ProposerName),
        help="who drafts; several are audited one after the other (default history_sampled, in "
        "lossless mode self_draft)",
    )
    audit.add_argument(
        "--draft-model",
        default=None,
        help="model folder of draft_model and vllm_draft_model (default: a copy of the model with "
        "noise in its weights, made for the audit)",
    )
    audit.add_argument(
        "--mtp-head", default=None, help="file of the head that mtp and mixture draft with"
    )
    audit.add_argument(
        "--sampling",
        nargs="+",
        action="append",
        default=None,
        metavar="NAME=VALUE",
        help="a law, as temperature=0.7 top_p=0.9; may be given several times (default T=1)",
    )
    audit.add_argument("--draft-len", type=int, default=4, help="drafted tokens a round")
    audit.add_argument("--verification", default="block", choices=("block", "position"))
    audit.add_argument("--dtype", default=None, choices=("float32", "bfloat16"))
    audit.add_argument("--seed", type=int, default=0, help="of everything drawn")
    audit.add_argument("--thorough", action="store_true", help="more of everything, minutes")
    audit.add_argument("--out", type=Path, default=Path("audits"), help="certificates go here")
    audit.epilog = (
        "Exit codes: 0 exact, 1 not exact, 2 void (a planted fault was not caught) or not run."
    )


def _add_train_mtp(commands: Any) -> None:
    train = _command(commands, "train-mtp", _train_mtp, "train an MTP head on recorded rollouts")
    train.add_argument("--model", default="smollm2", help="model folder, or smollm2 (default)")
    train.add_argument(
        "--rollouts", type=Path, required=True, help="file of scripts/record_rollouts.py"
    )
    train.add_argument("--out", type=Path, required=True, help="file to write, safetensors")
    train.add_argument("--minutes", type=float, default=10.0, help="time it may take, all in all")
    train.add_argument("--steps", type=int, default=None, help="optimiser steps at most")
    train.add_argument("--draft-vocab", type=int, default=4096, help="ids that may be drafted")
    train.add_argument("--depths", type=int, default=3, help="tokens ahead that are taught")
    train.add_argument("--threads", type=int, default=2, help="cores to compute with")
    train.add_argument("--seed", type=int, default=0, help="of the order of the rollouts")
    train.epilog = (
        "Held out are the last samples of every prompt, one in six: the acceptance printed at the end "
        "is that on other samples of the same prompts."
    )


def _add_plan(commands: Any) -> None:
    plan = _command(commands, "plan", _plan, "what bytes, bandwidth and drafts allow; does it fit")
    plan.add_argument("recipe", nargs="?", type=Path, help="its model, format and fleet")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="options over the recipe's")
    weights = plan.add_mutually_exclusive_group()
    weights.add_argument("--model", help="model folder, or smollm2: its tensors are counted")
    weights.add_argument("--params", type=float, help="number of weights, where there is no folder")
    plan.add_argument(
        "--bits", type=float, nargs="+", default=[16.0, 8.0], help="of a weight, with --params"
    )
    plan.add_argument(
        "--bandwidth", type=float, help="bytes/s; measured here, which should be idle, if not given"
    )
    rates = plan.add_mutually_exclusive_group()
    rates.add_argument("--acceptance", type=float, help="of drafts, at every position")
    rates.add_argument("--rates", type=float, nargs="+", help="by position, conditional")
    plan.add_argument("--max-draft-len", type=int, default=16, help="longest draft looked at")
    plan.add_argument(
        "--draft-cost", type=float, help="of a drafted token, in steps of the first row's target"
    )
    plan.add_argument(
        "--verify-cost",
        type=float,
        default=0.0,
        help="added to a step by a drafted token, in steps",
    )
    plan.add_argument(
        "--overhead", type=float, default=0.0, help="of a round with drafts, in steps"
    )
    plan.add_argument("--nodes", type=int, help="places the recipe's actors on as many machines")
    plan.add_argument("--gpus-per-node", type=int, default=8)
    plan.add_argument("--cpus-per-node", type=int, help="cores of a machine; as here if not given")
    plan.add_argument("--gpu-memory", type=float, default=80e9, help="bytes of a GPU")
    plan.epilog = "Exit code 1: the fleet does not fit."


def _command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.set_defaults(command=function)
    return parser


def _options_text() -> str:
    lines = []
    for name, default, doc, choices in documented_options():
        words = f" [{' | '.join(choices)}]" if len(choices) > 1 else ""
        shown = "null" if default is None else default
        lines.append(f"  {name}={shown}{words}\n      {doc}")
    return "\n".join(lines)


def _run(arguments: argparse.Namespace) -> int:
    from recipes.run import run
    from recipes.summary import print_summary

    if arguments.resume is not None:
        if not (arguments.resume / "config.yaml").is_file():
            raise RunFolderError(f"{arguments.resume}: no config.yaml; expected a run folder")
        words = [str(arguments.recipe), *arguments.overrides] if arguments.recipe else []
        config = resumed_config(arguments.resume / "config.yaml", words)
    elif arguments.recipe is None:
        raise InvalidConfig(
            "no recipe: give a YAML file, as in rollout run recipes/quickstart.yaml"
        )
    else:
        config = load_config(arguments.recipe, arguments.overrides)
    summary = run(config, arguments.resume, explain=arguments.explain)
    if arguments.json:
        print(json.dumps(summary))
    else:
        print_summary(summary)
    return 130 if summary["ended"] == "interrupted" else 0


def _launch(arguments: argparse.Namespace) -> int:
    from recipes.clusters import launch

    return launch(arguments.recipe, arguments.overrides, arguments.detach, arguments.json)


def _stop(arguments: argparse.Namespace) -> int:
    from recipes.clusters import stop

    return stop(arguments.name, arguments.json)


def _status(arguments: argparse.Namespace) -> int:
    from recipes.clusters import status

    return status(arguments.target, arguments.json)


def _report(arguments: argparse.Namespace) -> int:
    from recipes.report import write_report

    if not arguments.run.is_dir():
        raise RunFolderError(f"{arguments.run}: no such run folder")
    page = write_report(arguments.run)
    print(json.dumps({"report": str(page)}) if arguments.json else page)
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from recipes.audit import audit_command

    try:
        return audit_command(arguments)
    except BAD_USE:
        raise
    except RolloutError as error:  # 1 would say that the engine was found wrong
        return _fail(arguments, error, 2)


def _train_mtp(arguments: argparse.Namespace) -> int:
    from recipes.train_mtp import train_mtp_command

    return train_mtp_command(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from recipes.plan import plan_command

    return plan_command(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from recipes.doctor import examine, print_findings

    findings = examine()
    if arguments.json:
        print(json.dumps({"findings": [finding.to_json() for finding in findings]}))
    else:
        print_findings(findings)
    return 0 if all(finding.ok for finding in findings if finding.needed) else 1


if __name__ == "__main__":
    sys.exit(main())
