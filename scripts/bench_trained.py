"""The policy that the benchmarks of drafts train once: the quickstart's after 20 steps of GRPO.

Beside it stands what proposers may know of its prompts: earlier samples of each by these weights, of
natural length (in training they would be a few versions older), and an MTP head trained on them. All of
it is kept in the run's folder and made by the first call that asks for it.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from actors.engine_spec import history_salt
from quant.formats import FormatName
from recipes.arithmetic import ArithmeticTask
from recipes.recorded_rollouts import Recording
from recipes.smollm2 import model_folder
from recipes.train_mtp import MtpOptions, train_mtp
from rollout.checkpoint import read_config, read_tokenizer
from rollout.mtp_weights import save_mtp
from rollout.request import RolloutRequest
from rollout.sampling import SamplingParams
from scripts.record_rollouts import record

Tell = Callable[[str], None]

STEPS = 20
LAST_CHECKPOINT = f"step-{STEPS:06d}"
NUM_PROMPTS, MAX_TOKENS = 8, 256
EARLIER = 16
"""Samples of each prompt."""
TRAIN_TIMEOUT_S = 1200


def trained_run(out: Path, recipe: Path) -> Path:
    """The folder of a run of the quickstart of `STEPS` steps: of an earlier call, or trained now."""
    if not (found := _runs(out)):
        command = [
            sys.executable, "-m", "recipes.cli", "run", str(recipe), f"steps={STEPS}",
            "max_minutes=null", f"checkpoint_every={STEPS}", "ladder.enabled=false",
            "wandb.mode=disabled", f"out={out}", "--json",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TRAIN_TIMEOUT_S)
        found = _runs(out)
    return found[-1]


def _runs(out: Path) -> list[Path]:
    return sorted(path.parent.parent for path in out.glob(f"*/checkpoints/{LAST_CHECKPOINT}"))


def policy_folder(checkpoint: Path, folder: Path, model: str = "smollm2") -> Path:
    """A model folder of a checkpoint's weights, made if it is not there."""
    if not (folder / "model.safetensors").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for file in model_folder(model).iterdir():
            if file.suffix != ".safetensors":
                (folder / file.name).write_bytes(file.read_bytes())
        weights = load_file(checkpoint / "model.safetensors")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True, slots=True)
class Trained:
    """A policy and its prompts."""

    folder: Path
    """Of the model."""
    earlier: Recording
    sampling: SamplingParams

    @staticmethod
    def of(run: Path, quant: FormatName, tell: Tell) -> "Trained":
        """What a run's last checkpoint says."""
        folder = policy_folder(run / "checkpoints" / LAST_CHECKPOINT, run / "policy")
        kept = folder / f"earlier-{quant}.safetensors"
        if not kept.is_file():
            tell(f"recording {EARLIER} samples of each of {NUM_PROMPTS} prompts")
            record(
                _prompts(folder), num_samples=EARLIER, num_tokens=MAX_TOKENS, temperature=1.0,
                quant=quant, seed=0, num_rows=32, tell=lambda _: None, folder=folder,
            ).save(kept)  # fmt: skip
        eos = read_config(folder).eos_token_ids
        sampling = SamplingParams(max_new_tokens=MAX_TOKENS, eos_token_ids=eos)
        return Trained(folder, Recording.load(kept), sampling)

    def requests(self, first: int, num: int) -> list[RolloutRequest]:
        """Samples first, first + 1, ... of every prompt; those before EARLIER are the recorded ones."""
        return [
            RolloutRequest(f"{p}/{first + s}", f"g{p}", f"p{p}", first + s, ids, self.sampling)
            for p, ids in enumerate(self.earlier.prompts)
            for s in range(num)
        ]

    def head(self, options: MtpOptions, tell: Tell) -> tuple[Path, dict[str, Any]]:
        """The file of an MTP head trained on the earlier samples, and the report of its training."""
        path = self.folder / f"mtp-{self.earlier.quant}-{options.max_steps}.safetensors"
        if not path.with_suffix(".json").is_file():
            head, report = train_mtp(self.folder, self.earlier, options, tell)
            save_mtp(path, head.tensors(version=0), history_salt(self.folder))
            path.with_suffix(".json").write_text(json.dumps(report.to_json()))
        return path, json.loads(path.with_suffix(".json").read_text())


def _prompts(folder: Path) -> list[tuple[int, ...]]:
    tokenizer = read_tokenizer(folder)
    task = ArithmeticTask(seed=0, num_problems=NUM_PROMPTS, max_operand=20)
    return [tuple(tokenizer.encode(p.prompt, add_special_tokens=False)) for p in task.problems]
