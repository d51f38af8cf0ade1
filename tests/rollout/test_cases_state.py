"""Cache rollback and bookkeeping of rows, for every proposer: over a table and over the tiny Llama.

The table policy predicts from its cache alone, so a rollback, fork or slot fault changes its answers;
the Llama shows the same through the log-probabilities it records, compared with an uncached forward.
What does not exist here (ranks, recurrent layers) is refused by name, and what ranks would have to
agree on is decided once or follows from the rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig

from actors.engine_spec import EngineSpec, make_engine, make_policy
from proposers.history import HistoryProposer
from proposers.none import NoProposer
from recipes.config import load_config
from rollout.checkpoint import read_config
from rollout.decoder import SUPPORTED, check_architecture
from rollout.draft import NO_DRAFT, Draft
from rollout.draft_len import FixedDraftLen
from rollout.errors import InvalidConfig, UnsupportedModel
from rollout.native_engine import NativeEngine
from rollout.policy import Window
from rollout.request import RolloutRequest, RolloutSample, SpecCounters
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.table_policy import Table, TablePolicy, random_table
from rollout.transformer_policy import TransformerPolicy
from tests.rollout.engines import ScriptedProposer, drawing_proposer, request, run, table_engine
from tests.rollout.policies import (
    engine_over,
    loaded_policy,
    random_ids,
    reference_logits,
)
from tests.rollout.proposers_under_test import (
    DRAFTING,
    DRAWN,
    POINTS,
    PROPOSERS,
    SEEDED,
    Watched,
    llama_engine,
    make,
    with_trees,
)
from tests.tiny_model import tiny_folder

V = 4
TABLE = random_table(V, depth=3, seed=21)
DRAFT = random_table(V, depth=1, seed=23)
every_proposer = pytest.mark.parametrize("name", PROPOSERS)
every_drafting = pytest.mark.parametrize("name", DRAFTING)
every_seeded = pytest.mark.parametrize("name", SEEDED)
every_kind = pytest.mark.parametrize("kind", DRAWN)


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> TransformerPolicy:
    return loaded_policy(tiny_llama, num_slots=4, context_len=128)


@pytest.fixture(scope="module")
def exact(tiny_llama: Path) -> Table:
    """The tiny Llama by one uncached forward a context, as a table."""
    return lru_cache(maxsize=None)(lambda ids: reference_logits(tiny_llama, ids)[-1].double())


def engine(name: str, draft_len: int = 3, **options: Any) -> NativeEngine:
    options = {"context_len": 128} | options
    made = table_engine(TABLE, V, proposer=Watched(make(name, DRAFT)), **options)
    return with_trees(made, name, draft_len)


def watched(engine_: NativeEngine) -> Watched:
    assert isinstance(engine_.proposer, Watched)
    return engine_.proposer


def sized(temperature: float, length: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_new_tokens=length)


def tokens(samples: dict[str, RolloutSample]) -> dict[str, tuple[int, ...]]:
    return {name: sample.token_ids for name, sample in samples.items()}


# ---- acceptance tells a cache fault -------------------------------------------------------


def sharp(table: Table) -> Table:
    """Certain of the table's argmax."""
    return lambda ids: 1000.0 * torch.nn.functional.one_hot(table(ids).argmax(), V).double()


@every_kind
@pytest.mark.parametrize("draft_len", [1, 2, 4, 8])
def test_a_draft_law_equal_to_the_target_is_accepted_whole_in_every_round(
    kind: str, draft_len: int
) -> None:
    # case 71: greedy, drafted by the sharp table; sampled, by the table itself (not point masses)
    tables = {"greedy": sharp(TABLE)} | ({"sampled": TABLE} if kind == "dense" else {})
    inner = {name: drawing_proposer(kind, table) for name, table in tables.items()}
    proposer = ScriptedProposer(lambda row, n: inner[row.request.id]._draft(row, n))
    made = table_engine(TABLE, V, proposer=proposer, draft_len=draft_len)
    rows = [request(name, sampling=sized(float(name == "sampled"), 40)) for name in tables]
    counters = [sample.counters for sample in run(made, rows).values()]
    assert all(c.accepted == c.verified > 0 for c in counters)
    assert all(c.corrections == c.zero_residual_draws == 0 for c in counters)


@pytest.mark.parametrize("name", ["history", "tree", "counts"])
@pytest.mark.parametrize("draft_len", [1, 2, 4, 8])
def test_a_greedy_rollout_that_is_remembered_is_accepted_whole(name: str, draft_len: int) -> None:
    # case 71: three tokens decide the next one, and three are matched
    row = request(prompt=(0, 0, 0), sampling=sized(0, 40))
    proposer = HistoryProposer(
        draw="counts" if name == "counts" else "mode", min_match=3, max_match=3
    )
    proposer.remember((0, 0, 0), run(table_engine(TABLE, V), [row])["r0"].token_ids)
    made = with_trees(table_engine(TABLE, V, proposer=proposer), name, draft_len)
    counters = run(made, [row])["r0"].counters
    assert counters.accepted == counters.verified > 0 == counters.corrections


@pytest.mark.parametrize("draft_len", [1, 4])
def test_a_draft_model_equal_to_a_transformer_is_accepted_whole(
    draft_len: int, llama: TransformerPolicy, exact: Table
) -> None:
    # case 71: sampled; float32 against float64 of the same logits refuses one in about 1e5
    made = engine_over(llama, make("dense", exact), draft_len)
    sample = run(made, [request(prompt=(20, 21, 20), sampling=sized(1, 40))])["r0"]
    assert sample.counters.accepted == sample.counters.verified > 0
    assert sample.counters.corrections == 0


# ---- rows that accept unequally -----------------------------------------------------------

QUALITY = {"r0": -1.0, "r2": 0.0, "r4": 1.0}
"""Drafts from the target's logits times this: opposed, uniform, the target itself."""


def unequal(kind: str, target: Table) -> ScriptedProposer:
    inner = {
        name: drawing_proposer(kind, lambda ids, s=scale: s * target(ids))
        for name, scale in QUALITY.items()
    }
    return ScriptedProposer(lambda row, n: inner[row.request.id]._draft(row, n))


@pytest.mark.parametrize("kind", ["dense", "mixed"])
def test_rows_that_accept_unequally_equal_their_own_runs_for_100_tokens(kind: str) -> None:
    # case 72: prompts of 1, 3 and 5 tokens; the one whose drafts are uniform is greedy
    rows = [
        request(n, [1] * (1 + 2 * i), sized(abs(QUALITY[n]), 100)) for i, n in enumerate(QUALITY)
    ]

    def fresh() -> NativeEngine:
        proposer = unequal(kind, TABLE)
        return table_engine(TABLE, V, proposer=proposer, draft_len=4, context_len=128)

    samples = run(fresh(), rows)
    assert tokens(samples) == {r.id: run(fresh(), [r])[r.id].token_ids for r in rows}
    assert samples["r0"].counters.accepted < samples["r4"].counters.accepted


def test_rows_of_a_transformer_that_accept_unequally_equal_their_own_runs(
    llama: TransformerPolicy, exact: Table
) -> None:
    # case 72: sampled
    rows = [
        request(n, random_ids(3 + 5 * i, i), sized(1, 25)) for i, n in enumerate(QUALITY)
    ]  # fmt: skip

    def fresh() -> NativeEngine:
        return engine_over(llama, unequal("dense", exact), draft_len=4)

    samples = run(fresh(), rows)
    assert tokens(samples) == {r.id: run(fresh(), [r])[r.id].token_ids for r in rows}
    accepted = [samples[n].counters.accepted for n in QUALITY]
    assert accepted == sorted(accepted) and accepted[0] < accepted[2]


# ---- the token after a refusal ------------------------------------------------------------


def assert_conditioned_on_its_own_tokens(sample: RolloutSample, folder: Path) -> None:
    """Recorded log-probabilities are those of one uncached forward over what was emitted."""
    prompt, ids = sample.request.prompt_ids, sample.token_ids
    logits = reference_logits(folder, (*prompt, *ids))[len(prompt) - 1 : -1].double()  # [T, V]
    logits /= sample.request.sampling.temperature
    want = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    got = torch.tensor(sample.logprobs_full, dtype=torch.float64)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@every_proposer
@pytest.mark.parametrize("draft_len", [1, 3])
def test_every_token_of_a_transformer_is_conditioned_on_what_was_emitted(
    name: str, draft_len: int, llama: TransformerPolicy, tiny_llama: Path
) -> None:
    # case 77: refusals at the last and at other draft slots, a prompt shared by three rows (fork)
    rows = [
        request(f"r{i}", (20, 21, 20, 21), sized(0.4, 15), prompt_id="p", sample_index=i)
        for i in range(3)
    ]
    made = llama_engine(llama, tiny_llama, name, draft_len)
    for sample in run(made, rows).values():
        assert_conditioned_on_its_own_tokens(sample, tiny_llama)
    counters = made.counters()
    assert (
        name in ("none", "point", "draft_model") or min(counters.accepted, counters.corrections) > 0
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_path_through_a_tree_leaves_the_cache_of_a_chain(
    temperature: float, llama: TransformerPolicy, tiny_llama: Path
) -> None:
    # cases 72, 77: the known continuation, behind a wrong sibling at either level; what is kept
    # has to move, and what was refused has to go
    rows = [request(f"r{i}", (20, 21 + i, 20), sized(temperature, 20)) for i in range(3)]
    plain = run(engine_over(llama), rows)

    class Branching(NoProposer):
        def propose_trees(
            self, rows: Sequence[Row], max_nodes: Sequence[int], max_depths: Sequence[int]
        ) -> list[Draft]:
            return [self._tree(row, depth) for row, depth in zip(rows, max_depths)]

        def _tree(self, row: Row, max_depth: int) -> Draft:
            at = row.num_generated
            right = plain[row.request.id].token_ids[at : at + min(2, max_depth)]
            pairs = [((token + 1) % 300, token) for token in right]
            return Draft.tree([t for pair in pairs for t in pair], (-1, -1, 1, 1)[: 2 * len(pairs)])

    made = engine_over(llama, Branching())
    made.draft_len = FixedDraftLen(4, branching=True)
    samples = run(made, rows)
    assert tokens(samples) == tokens(plain)
    assert all(sample.counters.rounds == 7 for sample in samples.values())  # 3 tokens a round
    for sample in samples.values() if temperature else ():
        assert_conditioned_on_its_own_tokens(sample, tiny_llama)


@every_kind
@pytest.mark.parametrize("draft_len", [1, 3])
def test_a_refusal_at_the_last_slot_is_followed_by_the_row_of_its_replacement(
    kind: str, draft_len: int
) -> None:
    # case 77: after 0 comes 2, after 1 comes 3, after 2 and 3 comes 1; the last drafted is wrong
    follow = (2, 3, 1, 1)

    def table(ids: tuple[int, ...]) -> torch.Tensor:
        return 1000.0 * torch.eye(V, dtype=torch.float64)[follow[ids[-1]]]

    def draft(row: Row, max_len: int) -> Draft:
        last = len(row.token_ids) + max_len - 1

        def wrong_at_last(ids: tuple[int, ...]) -> torch.Tensor:
            return table(ids).roll(1) if len(ids) == last else table(ids)

        return drawing_proposer(kind, wrong_at_last)._draft(row, max_len)

    rows = [request(f"t{t}", sampling=sized(t, 9)) for t in (0, 1)]
    made = table_engine(table, V, proposer=ScriptedProposer(draft), draft_len=draft_len)
    for sample in run(made, rows).values():
        assert sample.token_ids == (2, 1, 3, 1, 3, 1, 3, 1, 3)
        assert sample.counters.corrections > 0 == sample.counters.bonuses


# ---- laws, slots and tokens stay with their rows ------------------------------------------


@every_kind
def test_every_draft_law_stays_with_its_request(kind: str) -> None:
    # case 78: row i is sure of token i and so are its drafts, of lengths 3, 0, 2; the first ends in
    # its first round, and another is admitted to its slot; a law given to another row is refused
    lens = {"r0": 3, "r1": 0, "r2": 2, "r3": 3}

    def table(ids: tuple[int, ...]) -> torch.Tensor:
        return 1000.0 * torch.eye(V, dtype=torch.float64)[ids[0]]

    inner = drawing_proposer(kind, table)

    def draft(row: Row, max_len: int) -> Draft:
        if row.request.id == "r0":  # while this round is between its drafts and its verification
            made.submit([request("r3", (3,), sized(1, 9))])
        return inner._draft(row, min(max_len, lens[row.request.id]))

    made = table_engine(table, V, proposer=ScriptedProposer(draft), draft_len=3, num_slots=3)
    rows = [request(f"r{i}", (i,), sized(i % 2, 4 if i == 0 else 12)) for i in range(3)]
    samples = run(made, rows)
    assert tokens(samples) == {f"r{i}": (i,) * n for i, n in enumerate((4, 12, 12, 9))}
    counters = made.counters()
    assert counters.accepted == counters.verified > 0 == counters.corrections


@every_seeded
@pytest.mark.parametrize("ending", ["length", "stop", "abort"])
def test_a_slot_serves_its_next_row_as_a_fresh_engine_does(name: str, ending: str) -> None:
    # case 79: one slot; the first row ends with drafts pending; the second has another prompt, the
    # same, one that shares its beginning, and one that goes on as the first did
    first = request("first", (0, 1, 2), sized(1, 9), prompt_id="p")
    if ending == "stop":
        first = replace(first, sampling=replace(first.sampling, stop_token_ids=(3,)))
    before = run(engine(name), [first])["first"].token_ids
    for prompt in ((3, 3), (0, 1, 2), (0, 1, 3), (0, 1, 2, *before[:4])):
        used = engine(name, num_slots=1)
        used.submit([first])
        used.step()
        if ending == "abort":
            used.abort(["first"])
        second = request("second", prompt, sized(len(prompt) % 2, 6), sample_index=1)
        ours, fresh = run(used, [second])["second"], run(engine(name), [second])["second"]
        assert ours.token_ids == fresh.token_ids
        # also as many drafts, unless the first was a rollout of the same prompt to draft from
        assert ours.counters == fresh.counters or name in ("history", "tree")


@pytest.mark.parametrize("name", ["ngram", "tree", "mixed"])
def test_a_slot_of_a_transformer_serves_its_next_row_as_a_fresh_one_does(
    name: str, tiny_llama: Path
) -> None:
    # case 79: one slot, its rows sharing less and less of the first prompt
    policy = loaded_policy(tiny_llama, num_slots=1, context_len=64)
    used = llama_engine(policy, tiny_llama, name)
    for i, prompt in enumerate(((20, 21, 20, 21), (20, 21, 20, 22), (20, 21), (20,), (7, 8, 9))):
        sample = run(used, [request(f"r{i}", prompt, sized(1, 12))])[f"r{i}"]
        assert_conditioned_on_its_own_tokens(sample, tiny_llama)


class Recording(TablePolicy):
    """Keeps every id it was given."""

    def __init__(self) -> None:
        super().__init__(TABLE, vocab_size=V, num_slots=2)
        self.seen: set[int] = set()

    def score(self, windows: Sequence[Window]) -> torch.Tensor:
        self.seen |= {token for window in windows for token in window.token_ids}
        return super().score(windows)


@every_seeded
def test_a_row_preempted_and_admitted_two_steps_later_equals_an_unpreempted_one(
    name: str,
) -> None:
    # case 81: with its drafts pending, beside neighbours that go on; no id below zero is run
    rows = [request(f"r{i}", (i, 1), sized(i % 2, 20)) for i in range(3)]
    policy = Recording()
    used = engine(name, policy=policy)
    used.submit(rows[:2])
    used.step()
    (part,) = used.abort(["r0"])
    used.submit(rows[2:])
    early = [sample for _ in range(2) for sample in used.step()]
    samples = {s.request.id: s for s in early} | run(used, rows[:1])
    assert tokens(samples) == {r.id: run(engine(name), [r])[r.id].token_ids for r in rows}
    assert part.token_ids == samples["r0"].token_ids[: len(part.token_ids)]
    assert policy.seen == set(range(V))


@pytest.mark.parametrize("ids", [[1, -1, -1], [-1], [0, 1, -1]])
def test_a_placeholder_in_a_draft_never_reaches_the_policy(ids: list[int]) -> None:
    # case 81: the row ends as an error, the others go on
    proposer = ScriptedProposer(
        lambda row, n: Draft.of_points(ids if row.request.id == "bad" else [1])
    )
    policy = Recording()
    used = table_engine(TABLE, V, proposer=proposer, draft_len=3, policy=policy)
    samples = run(used, [request("bad", (0, 1)), request("good", (1, 1))])
    assert samples["bad"].finish_reason == "error" and "draft token -1" in (
        samples["bad"].finish_detail
    )
    assert len(samples["good"].token_ids) == 8 and min(policy.seen) >= 0


@every_drafting
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_seen_before_accepts_as_much_and_is_not_run_again(
    name: str, temperature: float
) -> None:
    # case 85: the second visit, and one that lost its cache on the way, within 5 % of the first;
    # history has more to go by the second time
    used = engine(name)
    again = request("r", (0, 1, 2, 1), sized(temperature, 30), prompt_id="p")
    first, second = (run(used, [again])["r"].counters for _ in range(2))
    assert used.gauges()["count/prefill_tokens"] == 3
    used.submit([again])
    used.step()
    used.load(TABLE, version=1, digest="again")
    resumed = run(used, [])["r"].counters
    grows = name in ("history", "tree", "counts")
    for later in (second, resumed):
        assert later == first or (grows and later.accepted >= 0.95 * first.accepted)


# ---- what ranks would have to agree on ----------------------------------------------------


@pytest.mark.parametrize(
    ("option", "refusal"),
    [
        ("actors.tensor_parallel=2", "tensor_parallel=2 with engine=native: only engine=vllm"),
        ("model.tensor_parallel_size=2", r"unknown option model\.tensor_parallel_size"),
    ],
)
def test_ranks_of_the_native_engine_are_refused_by_name(option: str, refusal: str) -> None:
    # cases 82, 83, 86: it has none; in vLLM the first rank decides for all (tests/vllm)
    with pytest.raises(InvalidConfig, match=refusal):
        load_config(None, ["name=x", option])


@every_proposer
def test_drafts_of_a_round_come_from_one_call_for_all_rows(name: str) -> None:
    # cases 82, 86: nobody else searches, so nobody can find another number of tokens; the rounds
    # without a call are those in which no row has room for a draft
    made = engine(name)
    rows = [request(f"r{i}", (i, 1), sized(i % 2, 9 + i)) for i in range(3)]
    run(made, rows)
    proposer, num_rounds = watched(made), int(made.gauges()["count/rounds"])
    assert 0 <= num_rounds - len(proposer.asked) <= 1
    assert all(len(drafts) == len(asked) for drafts, asked in zip(proposer.drafts, proposer.asked))
    assert sum(len(d) for drafts in proposer.drafts for d in drafts) == made.counters().drafted


@every_seeded
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_one_token_short_once_changes_no_token_of_a_point_mass_proposer(
    name: str, temperature: float
) -> None:
    # case 82: the engine goes by the drafts it was given, whatever length they have
    class Short(Watched):
        def answer(self, rows: Sequence[Row], drafts: list[Draft]) -> list[Draft]:
            less = len(self.drafts) == 2  # the second call
            return [draft.truncated(max(0, len(draft) - less)) for draft in drafts]

    rows = [request(f"r{i}", (i, 1), sized(temperature, 12)) for i in range(3)]
    short = engine(name)
    short.proposer = Short(make(name, DRAFT))
    samples = run(short, rows)
    assert all(len(sample.token_ids) == 12 for sample in samples.values())
    if name in POINTS or temperature == 0:
        assert tokens(samples) == tokens(run(table_engine(TABLE, V), rows))


@pytest.mark.parametrize("num_missing", [1, -1])
def test_a_proposer_with_another_number_of_drafts_than_rows_raises_at_once(
    num_missing: int,
) -> None:
    # case 82: never a hang, never a draft given to another row
    class Miscounting(NoProposer):
        def propose(self, rows: Sequence[Row], max_lens: Sequence[int]) -> list[Draft]:
            return [NO_DRAFT] * (len(rows) - num_missing)

    made = table_engine(TABLE, V, proposer=Miscounting(), draft_len=3)
    made.submit([request("a"), request("b")])
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is"):
        made.step()


def counts_by_step(used: NativeEngine, rows: Sequence[RolloutRequest]) -> list[SpecCounters]:
    """Of each step until all is done, less what the engine had counted before."""
    used.submit(rows)
    steps = []
    while used.num_unfinished:
        used.step()
        steps.append(used.counters())
    return steps


@every_seeded
def test_two_engines_accept_equally_in_every_step_without_a_seed(name: str) -> None:
    # case 83: T = 1, no seed; the second engine gets the rows in another order
    rows = [request(f"r{i}", (i, 1), sized(1, 40)) for i in range(3)]
    one, other = (
        [(c.accepted, c.verified, c.emitted) for c in counts_by_step(engine(name), order)]
        for order in (rows, rows[::-1])
    )
    assert one == other and len(one) > 10


@every_seeded
@pytest.mark.parametrize("room", [2, 3, 4])
def test_one_row_that_is_not_drafted_near_the_limit_changes_no_row(name: str, room: int) -> None:
    # case 86: at limit - room one draft is answered with "no"; rows end at the limit all the same
    class Unwilling(Watched):
        def answer(self, rows: Sequence[Row], drafts: list[Draft]) -> list[Draft]:
            return [NO_DRAFT if row.remaining_len == room else d for row, d in zip(rows, drafts)]

    rows = [request(f"r{i}", (1,) * (24 + i), sized(i % 2, 40)) for i in range(4)]
    made = engine(name, context_len=32)
    made.proposer = Unwilling(make(name, DRAFT))
    samples = run(made, rows)
    assert all(len(s.request.prompt_ids) + len(s.token_ids) == 32 for s in samples.values())
    plain = tokens(run(table_engine(TABLE, V, context_len=32), rows))
    same = rows if name in POINTS else rows[::2]  # greedy rows in any case
    assert all(samples[r.id].token_ids == plain[r.id] for r in same)


@every_proposer
def test_no_draft_is_asked_for_beyond_the_token_that_follows_it(name: str) -> None:
    # case 86: the decision is taken for all rows at once, from what each has left
    made = engine(name, draft_len=8, context_len=32)
    run(made, [request(f"r{i}", (1,) * (20 + i), sized(i % 2, 40)) for i in range(8)])
    pairs = [
        pair
        for asked, room in zip(watched(made).asked, watched(made).room)
        for pair in zip(asked, room)
    ]
    assert pairs and all(asked <= room - 1 for asked, room in pairs)


# ---- models with a state that cannot be rolled back ---------------------------------------

RECURRENT = (
    "MambaForCausalLM",
    "Mamba2ForCausalLM",
    "FalconMambaForCausalLM",
    "RwkvForCausalLM",
    "RecurrentGemmaForCausalLM",
    "JambaForCausalLM",
    "Zamba2ForCausalLM",
    "BambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Qwen3NextForCausalLM",
)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_recurrent_and_hybrid_architectures_are_refused_by_name(architecture: str) -> None:
    # case 74
    with pytest.raises(UnsupportedModel, match=f"architecture {architecture}: .*Llama"):
        check_architecture(architecture)


@pytest.mark.parametrize("proposer", ["none", "ngram", "history"])
def test_an_engine_for_a_recurrent_checkpoint_is_refused_at_start_up(
    proposer: Any, tmp_path: Path
) -> None:
    # case 74: a folder that transformers reads, with speculation and without
    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)
    config.architectures = ["MambaForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = EngineSpec(str(tmp_path), proposer=proposer)
    for start in (make_policy, make_engine):
        with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
            start(spec)


@pytest.mark.parametrize("kind", ["linear_attention", "sliding_attention"])
def test_a_known_architecture_with_layers_of_another_kind_is_refused(
    kind: str, tmp_path: Path
) -> None:
    # case 74: the name alone does not say what the layers are
    folder = tiny_folder(tmp_path, "qwen3", layer_types=["full_attention", kind])
    with pytest.raises(UnsupportedModel):
        read_config(folder)


def test_every_supported_architecture_passes() -> None:
    """Negative control for case 74."""
    for architecture in SUPPORTED:
        check_architecture(architecture)
