"""`rollout train-mtp`: what the policy is read for, what is held out, and the command whole."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from actors.engine_spec import history_salt
from recipes.cli import main
from recipes.mtp_head import MtpHead
from recipes.mtp_trunk import RIDGE, Trunk, fit_projection
from recipes.recorded_rollouts import Recording, Rollout
from recipes.train_mtp import MtpOptions, train_mtp
from rollout.checkpoint import read_config
from rollout.errors import InvalidConfig
from rollout.mtp_weights import load_mtp
from tests.tiny_model import CONFIGS, tiny_folder

PROMPT = (5, 6, 7)
RESPONSES = ((8, 9, 10, 11), (11,), (12, 13))


@torch.no_grad()
def recording_of(folder: Path, samples: int = 7, tokens: int = 12) -> Recording:
    """Sampled from the model at temperature .8, two prompts."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompts = (PROMPT, (20, 21))
    rollouts = []
    for prompt in prompts:
        ids = torch.tensor([prompt] * samples)
        for _ in range(tokens):
            law = (model(ids).logits[:, -1] / 0.8).softmax(-1)
            ids = torch.cat([ids, torch.multinomial(law, 1, generator=generator)], dim=1)
        some = [tuple(row[len(prompt) :]) for row in ids.tolist()]
        rollouts.append(tuple(Rollout(row, (0.0,) * len(row)) for row in some))
    return Recording(prompts, tuple(rollouts), 0.8, "none")


@pytest.mark.parametrize("architecture", CONFIGS)
@torch.no_grad()
def test_readings_are_those_of_each_rollout_alone(architecture: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, architecture)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trunk, vocabulary = Trunk(folder), torch.arange(0, 200, 2)
    readings = trunk.read(PROMPT, RESPONSES)
    taught = trunk.responses(readings, vocabulary, 0.8)
    for ids, reading, response in zip(RESPONSES, readings, taught, strict=True):
        whole = model(torch.tensor([[*PROMPT, *ids]]), output_hidden_states=True)
        foretelling = slice(len(PROMPT) - 1, len(PROMPT) - 1 + len(ids))
        *_, last_input, hidden = whole.hidden_states
        assert reading.token_ids.tolist() == list(ids)
        torch.testing.assert_close(reading.hidden, hidden[0, foretelling])
        torch.testing.assert_close(reading.last_input, last_input[0, foretelling])
        law = (whole.logits[0, foretelling] / 0.8).softmax(-1)[:, vocabulary]
        torch.testing.assert_close(response.law.float(), law, rtol=0.01, atol=1e-6)  # bf16


@torch.no_grad()
def test_the_fit_is_the_ridge_regression_of_the_last_layers_input(tiny_llama: Path) -> None:
    """Reference: least squares with the ridge as further rows."""
    trunk, config = Trunk(tiny_llama), read_config(tiny_llama)
    generator = random.Random(0)
    rollouts = [[generator.randrange(200) for _ in range(9)] for _ in range(30)]
    readings = trunk.read(PROMPT, rollouts)
    head = MtpHead.from_policy(trunk.weights(), config, torch.arange(10))
    fit_projection(head, readings, trunk.embedding)
    parts = [
        torch.cat([r.hidden[:-1] for r in readings]),
        trunk.embedding[torch.cat([r.token_ids[:-1] for r in readings])],
    ]
    seen = torch.cat([F.rms_norm(p, (64,), None, config.norm_eps) for p in parts], dim=-1).double()
    goal = torch.cat([r.last_input[1:] for r in readings]).double()
    ridge = (RIDGE * len(seen)) ** 0.5 * torch.eye(128, dtype=torch.float64)
    rows, goals = torch.cat([seen, ridge]), torch.cat([goal, torch.zeros(128, 64).double()])
    expected = torch.linalg.lstsq(rows, goals).solution.T
    torch.testing.assert_close(head.proj.weight.double(), expected, rtol=1e-3, atol=1e-3)


def test_the_draft_vocabulary_is_what_comes_up_most(tiny_llama: Path) -> None:
    trunk = Trunk(tiny_llama)
    readings = trunk.read(PROMPT, [(8, 8, 8), (9, 9, 8)])
    vocabulary = trunk.draft_vocabulary(readings, 20, temperature=1.0)
    mass = trunk.law(torch.cat([r.hidden for r in readings]), 1.0).sum(0)
    mass[8] += 4
    mass[9] += 2
    assert vocabulary.tolist() == sorted(mass.topk(20).indices.tolist())
    assert {8, 9} <= set(vocabulary.tolist())


def test_training_is_better_than_the_fit_on_samples_that_were_held_out(tiny_llama: Path) -> None:
    recording = recording_of(tiny_llama, samples=36)
    options = MtpOptions(max_steps=60, draft_vocab=200, depths=2)
    head, report = train_mtp(tiny_llama, recording, options, lambda _: None)
    assert (report.tokens, report.tokens_held_out, report.tokens_left_out) == (720, 144, 0)
    assert report.steps == 60 and len(head.vocabulary) == 200
    assert report.acceptance[0] > report.acceptance_fitted[0] + 0.02
    assert max(report.acceptance) < report.kept_mass < 1


def test_held_out_samples_teach_nothing(tiny_llama: Path) -> None:
    """The head is the same whatever the last samples are; another one when a first one changes."""
    recording = recording_of(tiny_llama)  # 7 samples a prompt: the last one is held out
    options = MtpOptions(max_steps=2, draft_vocab=100)
    heads = []
    for changed in (None, -1, 0):
        rollouts = [list(of_prompt) for of_prompt in recording.rollouts]
        if changed is not None:
            rollouts[0][changed] = Rollout((3,) * 12, (0.0,) * 12)
        other = Recording(recording.prompts, tuple(map(tuple, rollouts)), 0.8, "none")
        heads.append(train_mtp(tiny_llama, other, options, lambda _: None)[0].tensors(0))
    torch.testing.assert_close(heads[1], heads[0], rtol=0, atol=0)
    assert not torch.equal(heads[2]["mtp.proj.weight"], heads[0]["mtp.proj.weight"])


def test_what_there_is_no_time_to_read_is_said(tiny_llama: Path) -> None:
    recording = recording_of(tiny_llama, samples=24)  # 4 held out, 20 in rounds of 8
    _, report = train_mtp(tiny_llama, recording, MtpOptions(minutes=1e-9), lambda _: None)
    assert (report.tokens, report.tokens_left_out) == (2 * 8 * 12, 2 * 12 * 12)
    assert report.steps == 0 and report.acceptance == report.acceptance_fitted


def test_the_command_writes_a_head_of_the_model(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording_of(tiny_llama).save(tmp_path / "rollouts.safetensors")
    out = tmp_path / "head.safetensors"
    words = [
        "train-mtp",
        f"--model={tiny_llama}",
        f"--rollouts={tmp_path / 'rollouts.safetensors'}",
    ]
    options = ["--steps=3", "--draft-vocab=64", "--depths=2", "--threads=1", "--json"]
    assert main([*words, f"--out={out}", *options]) == 0
    about = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert about["steps"] == 3 and len(about["acceptance"]) == 2
    tensors = load_mtp(out, read_config(tiny_llama), history_salt(tiny_llama))
    assert len(tensors["mtp.vocabulary"]) == 64


def test_rollouts_that_teach_nothing_are_refused(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, short = Rollout((8, 9), (0.0, 0.0)), Rollout((8,), (0.0,))
    for rollouts, temperature, message in (
        ((one, one), 0.0, "temperature 0"),
        ((one,), 1.0, "at least 2"),
        ((one, short), 1.0, "no rollout of two tokens"),
    ):
        recording = Recording((PROMPT,), (rollouts,), temperature, "none")
        with pytest.raises(InvalidConfig, match=message):
            train_mtp(tiny_llama, recording, MtpOptions(), lambda _: None)
    missing = ["train-mtp", f"--rollouts={tmp_path / 'none'}", f"--out={tmp_path / 'head'}"]
    assert main([*missing, f"--model={tiny_llama}"]) == 2
    assert "scripts/record_rollouts.py writes one" in capsys.readouterr().err
    with pytest.raises(InvalidConfig, match="minutes=0: expected more than 0"):
        MtpOptions(minutes=0)
