"""The transformer policy against Hugging Face's forward in float32, on tiny models and a real one."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from proposers.history import HistoryProposer
from proposers.ngram import NgramProposer
from rollout.checkpoint import read_tokenizer
from rollout.draft import Draft
from rollout.policy import Window
from rollout.proposer import Proposer
from rollout.request import RolloutRequest, RolloutSample
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.transformer_policy import TransformerPolicy
from tests.rollout.engines import ScriptedProposer, request, run
from tests.rollout.policies import (
    engine_over,
    filtered_law,
    loaded_policy,
    packed_weights,
    random_ids,
    reference_logits,
)
from tests.rollout.test_checkpoint import ROPES
from tests.tiny_model import tiny_folder

ATOL = 5e-5  # logits of size 1 to 20 in float32, summed in another order
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=100)
VARIANTS = {
    "llama": {},
    "llama untied": {"tied": False},
    "llama one head a group": {"num_key_value_heads": 4},
    "llama with linear rope": {"rope_parameters": ROPES["linear"]},
    "llama with llama3 rope": {"rope_parameters": ROPES["llama3"]},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}


@pytest.fixture(scope="module", params=[*VARIANTS, "smollm2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    path = tmp_path_factory.mktemp("variant")
    return tiny_folder(path, request.param.split()[0], **VARIANTS[request.param])


@pytest.fixture(scope="module")
def policy(folder: Path, smollm2: Path, smollm2_policy: TransformerPolicy) -> TransformerPolicy:
    return smollm2_policy if folder == smollm2 else loaded_policy(folder, context_len=64)


def window(slot: int, start: int, ids: Sequence[int], num_logits: int | None = None) -> Window:
    return Window(slot, start, tuple(ids), len(ids) if num_logits is None else num_logits)


def assert_same_logits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=ATOL, rtol=1e-5)


def test_every_offset_of_a_ragged_batch_scores_as_one_long_forward(
    policy: TransformerPolicy, folder: Path
) -> None:
    """Three rows in slots 5, 0, 3, cut at different places into windows of different lengths."""
    rows = {5: random_ids(24, seed=1), 0: random_ids(17, seed=2), 3: random_ids(9, seed=3)}
    cuts = {5: (0, 1, 8, 20, 24), 0: (0, 11, 12, 13, 17), 3: (0, 3, 4, 8, 9)}
    scored = {slot: [] for slot in rows}
    for turn in range(4):
        windows = [
            window(slot, cuts[slot][turn], ids[cuts[slot][turn] : cuts[slot][turn + 1]])
            for slot, ids in rows.items()
        ]
        parts = policy.score(windows).split([w.num_logits for w in windows])
        for slot, part in zip(rows, parts):
            scored[slot].append(part)
    for slot, ids in rows.items():
        assert_same_logits(torch.cat(scored[slot]), reference_logits(folder, ids))


def test_prefill_decode_and_verify_may_share_a_call(
    policy: TransformerPolicy, folder: Path
) -> None:
    decode, verify, prompt = (random_ids(n, seed=n) for n in (13, 18, 21))
    policy.score([window(6, 0, decode[:12], 0), window(2, 0, verify[:14], 0)])
    got = policy.score(
        [window(4, 0, prompt, 0), window(6, 12, decode[12:]), window(2, 14, verify[14:], 3)]
    )
    want = [reference_logits(folder, decode)[-1:], reference_logits(folder, verify)[-3:]]
    assert_same_logits(got, torch.cat(want))
    last = policy.score([window(4, 20, prompt[20:])])  # what the prefill left in the cache
    assert_same_logits(last, reference_logits(folder, prompt)[-1:])


def test_a_refused_draft_leaves_no_trace(policy: TransformerPolicy, folder: Path) -> None:
    ids, refused = random_ids(20, seed=4), random_ids(6, seed=5)
    policy.score([window(1, 0, ids[:12], 0)])
    policy.score([window(1, 12, (*ids[12:14], *refused))])  # two accepted, six refused
    policy.truncate(1, 14)
    got = [policy.score([window(1, at, ids[at : at + 1])]) for at in range(14, 20)]
    assert_same_logits(torch.cat(got), reference_logits(folder, ids)[14:])


def test_a_fork_continues_as_its_source_and_then_on_its_own(
    policy: TransformerPolicy, folder: Path
) -> None:
    prompt, tails = random_ids(15, seed=6), [random_ids(5, seed=s) for s in (7, 8)]
    policy.score([window(7, 0, random_ids(40, seed=9), 0)])  # what the target slot held before
    policy.score([window(2, 0, prompt, 0)])
    policy.fork(2, 7, 15)
    got = policy.score([window(2, 15, tails[0]), window(7, 15, tails[1])])
    want = [reference_logits(folder, (*prompt, *tail))[15:] for tail in tails]
    assert_same_logits(got, torch.cat(want))


def test_a_slot_forgets_the_longer_row_that_used_it_before(
    policy: TransformerPolicy, folder: Path
) -> None:
    short, long = random_ids(6, seed=10), random_ids(40, seed=11)
    policy.score([window(0, 0, long, 0), window(1, 0, long, 0)])
    policy.truncate(0, 0)
    policy.score([window(0, 0, short[:5], 0)])
    got = policy.score([window(0, 5, short[5:]), window(1, 40, short[5:])])  # both read 41 deep
    want = [reference_logits(folder, ids)[-1:] for ids in (short, (*long, short[5]))]
    assert_same_logits(got, torch.cat(want))


def test_a_window_beyond_the_context_is_refused(tiny_llama: Path) -> None:
    policy = loaded_policy(tiny_llama, context_len=16)
    policy.score([window(0, 0, random_ids(16, seed=0))])
    with pytest.raises(AssertionError, match="window ends at 17, context 16"):
        policy.score([window(0, 16, (1,))])


def test_a_forward_without_predictions_returns_none(tiny_llama: Path) -> None:
    logits = loaded_policy(tiny_llama).score([window(0, 0, (1, 2, 3), 0)])
    assert logits.shape == (0, 300)


def test_no_windows_give_no_logits(tiny_llama: Path) -> None:
    assert loaded_policy(tiny_llama).score([]).shape == (0, 300)


def test_nothing_is_scored_without_weights(tiny_llama: Path) -> None:
    loaded = loaded_policy(tiny_llama)
    empty = TransformerPolicy(loaded.config, loaded.format, num_slots=1, context_len=8)
    with pytest.raises(AssertionError, match="no weights are in force"):
        empty.score([window(0, 0, (1,))])


# ---- through the engine -------------------------------------------------------------------


def tokens(samples: Mapping[str, RolloutSample]) -> dict[str, tuple[int, ...]]:
    return {name: sample.token_ids for name, sample in samples.items()}


def proposers() -> dict[str, Proposer]:
    return {"ngram": NgramProposer(min_match=1), "history": HistoryProposer()}


@pytest.mark.parametrize("name", proposers())
def test_greedy_speculation_emits_the_tokens_of_plain_decoding(name: str, tiny_llama: Path) -> None:
    policy = loaded_policy(tiny_llama)
    requests = [request(f"r{i}", random_ids(3 + 4 * (i % 3), seed=i % 3), GREEDY) for i in range(6)]
    plain = run(engine_over(policy), requests)
    engine = engine_over(policy, proposers()[name], draft_len=4)
    speculative = run(engine, requests)
    assert engine.counters().accepted > 0 and engine.counters().corrections > 0
    assert tokens(speculative) == tokens(plain)


@pytest.mark.parametrize("name", proposers())
def test_greedy_speculation_on_a_real_model_emits_the_tokens_of_plain_decoding(
    name: str, smollm2: Path, smollm2_policy: TransformerPolicy
) -> None:
    text = "red, blue, green, red, blue, green, red, blue, yellow, red,"
    ids = read_tokenizer(smollm2).encode(text)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=16)
    requests = [request(f"r{i}", ids[: len(ids) - i], sampling) for i in range(3)]
    engine = engine_over(smollm2_policy, proposers()[name], draft_len=3)
    if name == "history":
        run(engine, requests)  # what the second visit drafts from
    speculative = tokens(run(engine, requests))
    assert engine.counters().accepted > 0
    assert speculative == tokens(run(engine_over(smollm2_policy), requests))


def oracle(continuation: Sequence[int], num_right: int = 99) -> ScriptedProposer:
    """Drafts the known continuation; from token `num_right` of each draft on, another one."""

    def draft(row: Row, max_len: int) -> Draft:
        ahead = continuation[row.num_generated : row.num_generated + max_len]
        ids = [t if i < num_right else (t + 1) % 300 for i, t in enumerate(ahead)]
        return Draft.of_points(ids)

    return ScriptedProposer(draft)


@pytest.mark.parametrize("draft_len", [1, 2, 4, 8])
def test_a_draft_equal_to_the_greedy_target_is_accepted_whole(
    draft_len: int, tiny_llama: Path
) -> None:
    policy = loaded_policy(tiny_llama)
    plain = run(engine_over(policy), [request(sampling=GREEDY)])["r0"].token_ids
    sample = run(
        engine_over(policy, oracle(plain), draft_len), [request(sampling=GREEDY)]
    )["r0"]  # fmt: skip
    assert sample.token_ids == plain
    assert sample.counters.accepted == sample.counters.verified
    assert sample.counters.rounds == -(-100 // (draft_len + 1))


def test_rows_that_accept_unequally_each_equal_their_own_run(tiny_llama: Path) -> None:
    """Prompts of 3, 8 and 13 tokens whose drafts of 4 are right for 0, 2 and 4 tokens."""
    policy = loaded_policy(tiny_llama)
    requests = [request(f"r{i}", random_ids(3 + 5 * i, seed=i), GREEDY) for i in range(3)]
    alone = {r.id: run(engine_over(policy), [r])[r.id].token_ids for r in requests}
    rows = {f"r{i}": oracle(alone[f"r{i}"], num_right=2 * i) for i in range(3)}
    proposer = ScriptedProposer(lambda row, n: rows[row.request.id].propose([row], [n])[0])
    samples = run(engine_over(policy, proposer, draft_len=4), requests)
    assert tokens(samples) == alone
    assert samples["r0"].counters.accepted == 0
    assert samples["r1"].counters.rounds == 34  # three tokens a round
    assert samples["r2"].counters.rounds == 20


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_recorded_logprobs_equal_a_teacher_forced_recompute(
    model: str,
    temperature: float,
    top_p: float,
    tiny_llama: Path,
    smollm2: Path,
    smollm2_policy: TransformerPolicy,
) -> None:
    if model == "tiny":
        folder, policy, length = tiny_llama, loaded_policy(tiny_llama), 60
    else:
        folder, policy, length = smollm2, smollm2_policy, 16
    sampling = SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=length)
    requests = [request(f"r{i}", (20, 21, 20, 21, 20), sampling) for i in range(3)]
    samples = run(engine_over(policy, NgramProposer(min_match=1), draft_len=3), requests)
    assert sum(sample.counters.verified for sample in samples.values()) > 0
    for sample in samples.values():
        assert_logprobs_of_policy(folder, sample, temperature, top_p)


def assert_logprobs_of_policy(
    folder: Path, sample: RolloutSample, temperature: float, top_p: float
) -> None:
    ids = (*sample.request.prompt_ids, *sample.token_ids)
    logits = reference_logits(folder, ids)[len(sample.request.prompt_ids) - 1 : -1]  # [T, V]
    law, mass = filtered_law(logits, temperature, top_p)
    whole, _ = filtered_law(logits, temperature, top_p=1.0)
    at = torch.tensor(sample.token_ids)[:, None]
    for got, want in (
        (sample.logprobs, law.gather(-1, at)[:, 0].log()),
        (sample.logprobs_full, whole.gather(-1, at)[:, 0].log()),
        (sample.kept_mass, mass),
    ):
        torch.testing.assert_close(torch.tensor(got).double(), want, atol=1e-4, rtol=0)


def test_a_seed_gives_the_same_tokens_whatever_is_drafted(tiny_llama: Path) -> None:
    policy = loaded_policy(tiny_llama)
    requests = [request(f"r{i}", (20, 21, 20, 21, 20)) for i in range(8)]
    plain = run(engine_over(policy), requests)
    drafted = run(engine_over(policy, NgramProposer(min_match=1), draft_len=3), requests)
    assert tokens(drafted) == tokens(plain)


def mixed_lengths(prefix: str) -> list[RolloutRequest]:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=6)
    return [request(f"{prefix}{n}", random_ids(n, seed=n), sampling) for n in (30, 3, 25, 8)]


def test_weights_that_overflow_end_their_rows_and_nothing_else(tiny_llama: Path) -> None:
    """NaN left in a cache shows through any mask, as 0 * NaN; the next weights must not see it."""
    healthy = loaded_policy(tiny_llama, num_slots=4)
    want = run(engine_over(healthy), mixed_lengths("a"))
    engine = engine_over(loaded_policy(tiny_llama, num_slots=4))
    overflow = packed_weights(
        tiny_llama, change=lambda name, t: 3e38 * t.sign() if "layers.0.mlp.down" in name else t
    )
    engine.load(engine.prepare(overflow), version=1, digest="overflow")
    broken = run(engine, [*mixed_lengths("b"), request("c", random_ids(40, seed=0))])
    assert {sample.finish_reason for sample in broken.values()} == {"error"}
    engine.load(engine.prepare(packed_weights(tiny_llama)), version=2, digest="good")
    assert tokens(run(engine, list(reversed(mixed_lengths("a"))))) == tokens(want)


def test_a_row_that_overflows_does_not_spoil_its_slot(tiny_llama: Path) -> None:
    """With a block scaled by 3e37 some tokens overflow and others do not. The next row of the slot
    is shorter than its neighbour, so its scores reach to where the old row's NaN were."""
    policy = loaded_policy(
        tiny_llama, change=lambda name, t: 3e37 * t if "layers.0.mlp.down" in name else t
    )
    alone = torch.stack([policy.score([window(0, 0, (token,))])[0] for token in range(300)])
    bad = alone.isnan().any(-1)
    sick, well = bad.nonzero()[0].tolist() * 20, (~bad).nonzero()[0].tolist()
    assert policy.score([window(0, 0, sick), window(1, 0, well * 30)])[:20].isnan().all()
    policy.truncate(0, 0)
    both = policy.score([window(0, 0, well), window(1, 30, well)])
    assert torch.equal(both[0], alone[well[0]])
