"""Seeds, groups and batch composition, for every proposer: what a row's tokens may depend on.

The table policy's logits do not depend on the batch, so equality is exact; the same claims on the
tiny Llama hold because no near-tie lies within its rounding. Rows share their prompt, so that a
history proposer drafts from its neighbours.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout.errors import InvalidRequest
from rollout.native_engine import NativeEngine
from rollout.request import RolloutRequest, RolloutSample
from rollout.sampling import SamplingParams
from rollout.streams import SeededDraws
from rollout.table_policy import Table, random_table
from rollout.transformer_policy import DecoderWeights
from tests.rollout.engines import request, run, table_engine
from tests.rollout.policies import loaded_policy, random_ids
from tests.rollout.proposers_under_test import SEEDED, llama_engine, make, with_trees

V = 4
TABLE = random_table(V, depth=2, seed=8)
DRAFT = random_table(V, depth=1, seed=9)
every_proposer = pytest.mark.parametrize("name", SEEDED)
every_drafting = pytest.mark.parametrize("name", SEEDED[1:])
on_llama = pytest.mark.parametrize("name", ["none", "ngram", "tree", "mixed"])


def engine(name: str, num_slots: int = 8) -> NativeEngine:
    made = table_engine(
        TABLE, V, proposer=make(name, DRAFT), num_slots=num_slots, context_len=128
    )  # fmt: skip
    return with_trees(made, name, draft_len=3)


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> Callable[[str], NativeEngine]:
    """Makes engines over one policy of three slots."""
    policy = loaded_policy(tiny_llama, num_slots=3)
    return lambda name: llama_engine(policy, tiny_llama, name)


def a(
    name: str = "a", seed: int | None = 42, temperature: float = 1.0, length: int = 16, **names: int
) -> RolloutRequest:
    """A request of the prompt that all rows here share."""
    sampling = SamplingParams(seed=seed, temperature=temperature, max_new_tokens=length)
    return request(name, (0, 1, 2, 1), sampling, prompt_id="p", **names)


def tokens(samples: dict[str, RolloutSample]) -> dict[str, tuple[int, ...]]:
    return {name: sample.token_ids for name, sample in samples.items()}


def fresh(name: str, requests: Sequence[RolloutRequest], num_slots: int = 8) -> dict[str, tuple]:
    return tokens(run(engine(name, num_slots), requests))


# ---- one seed, one output -----------------------------------------------------------------


@every_proposer
def test_a_seed_repeats_in_one_batch_and_another_differs(name: str) -> None:
    # case 38: five times the same beside another seed and a greedy row
    five = [a(f"a{i}", temperature=2.0) for i in range(5)]
    others = [a("other", seed=43, temperature=2.0), a("greedy", temperature=0.0)]
    samples = run(engine(name), [*five, *others])
    ours = {samples[r.id].token_ids for r in five}
    assert ours == {fresh(name, [a(temperature=2.0)])["a"]}
    assert not ours & {samples["other"].token_ids, samples["greedy"].token_ids}
    assert (samples["a0"].counters.drafted > 0) == (name != "none")


@on_llama
def test_a_seed_repeats_on_a_transformer(name: str, llama: Callable[[str], NativeEngine]) -> None:
    # case 38: in one batch and in the next
    rows = [a(n, seed=s, temperature=2.0) for n, s in (("a", 42), ("again", 42), ("other", 43))]
    one, next_ = (tokens(run(llama(name), rows)) for _ in range(2))
    assert one == next_ and one["a"] == one["again"] != one["other"]


@every_proposer
def test_greedy_ignores_seeds_and_sampling_does_not(name: str) -> None:
    # case 39
    for temperature, num_different in ((0.0, 1), (0.8, 5)):
        rows = [a(f"a{s}", seed=s, temperature=temperature) for s in (0, 1, 2, -1, 2**40)]
        assert len(set(fresh(name, rows).values())) == num_different


@pytest.mark.parametrize("name", ["dense", "sparse", "mixed"])
@pytest.mark.parametrize(("temperature", "only_certain"), [(0.0, True), (0.8, False)])
def test_acceptance_is_certain_when_greedy_and_a_chance_when_sampling(
    name: str, temperature: float, only_certain: bool
) -> None:
    # case 39: the probabilities that the coins of acceptance are tossed with
    tossed: list[float] = []

    class Recorded(SeededDraws):
        def coin(self, accept_prob: float, start: int, position: int) -> bool:
            tossed.append(accept_prob)
            return super().coin(accept_prob, start, position)

    recording = table_engine(
        TABLE, V, proposer=make(name, DRAFT), draft_len=3, draws_for=lambda _: Recorded(1, "p", 0)
    )
    run(recording, [a(temperature=temperature)])
    assert tossed and all(0 <= prob <= 1 for prob in tossed)
    assert all(prob in (0.0, 1.0) for prob in tossed) == only_certain


# ---- neighbours ---------------------------------------------------------------------------


@every_proposer
def test_an_unseeded_neighbour_of_the_same_prompt_changes_nothing(name: str) -> None:
    # case 40: its tokens change, and with them the drafts of ours (history), but not our tokens
    ours = [a(), a("greedy", seed=None, temperature=0.0)]
    alone, theirs = {r.id: fresh(name, [r])[r.id] for r in ours}, set()
    for run_seed in range(4):
        samples = fresh(name, [a("b", seed=None, run_seed=run_seed), *ours])
        theirs.add(samples.pop("b"))
        assert samples == alone
    assert len(theirs) == 4


@every_proposer
def test_greedy_beside_neighbours_that_come_and_go_is_greedy(name: str) -> None:
    # case 42: two slots besides; 40 tokens are those of the argmax chain
    greedy = a("greedy", seed=None, temperature=0.0, length=40)
    others = [a(f"n{s}", seed=s, length=3 + s) for s in range(8)]
    ids = list(greedy.prompt_ids)
    for _ in range(40):
        ids.append(int(TABLE(tuple(ids)).argmax()))
    assert fresh(name, [greedy, *others], num_slots=3)["greedy"] == tuple(ids[4:])


@on_llama
def test_greedy_on_a_transformer_is_greedy_beside_neighbours(
    name: str, llama: Callable[[str], NativeEngine]
) -> None:
    # case 42
    greedy = a("greedy", temperature=0.0, length=24)
    others = [a(f"n{s}", seed=s, length=2 + s) for s in range(8)]
    samples = run(llama(name), [greedy, *others])
    assert samples["greedy"].token_ids == run(llama("none"), [greedy])["greedy"].token_ids


@every_proposer
def test_an_engine_that_served_a_hundred_others_is_as_good_as_new(name: str) -> None:
    # case 44: others of the same prompt, every third greedy, and a weight swap
    used = engine(name)
    run(used, [a(f"n{i}", seed=i, temperature=float(i % 3), length=2) for i in range(100)])
    used.load(TABLE, version=1, digest="again")
    for mine in (a(), a(temperature=0.0)):
        assert tokens(run(used, [mine])) == fresh(name, [mine])


# ---- groups and engines -------------------------------------------------------------------


@every_proposer
def test_samples_of_a_seeded_group_differ_and_a_smaller_group_is_its_beginning(name: str) -> None:
    # case 46: n = 8 with seed 7, rerun, and n = 4
    group = [a(f"a{i}", seed=7, length=12, sample_index=i) for i in range(8)]
    first = fresh(name, group)
    assert len(set(first.values())) == 8
    assert fresh(name, group, num_slots=3) == first
    assert fresh(name, group[:4]) == {r.id: first[r.id] for r in group[:4]}


@every_proposer
def test_a_greedy_group_is_one_sample(name: str) -> None:
    # case 46: the documented meaning of temperature 0
    group = [a(f"a{i}", seed=7, temperature=0.0, sample_index=i) for i in range(8)]
    assert len(set(fresh(name, group).values())) == 1


@every_proposer
def test_four_engines_of_one_run_make_four_samples_that_any_of_them_reproduces(name: str) -> None:
    # case 48: one run seed, no seed of their own; afterwards in the other order, on used engines
    group = [a(seed=None, sample_index=i, run_seed=3) for i in range(4)]
    engines = [engine(name) for _ in group]
    first = [run(one, [r])["a"].token_ids for one, r in zip(engines, group)]
    assert len(set(first)) == 4
    again = [run(one, [r])["a"].token_ids for one, r in zip(reversed(engines), group)]
    assert again == first


@every_proposer
@pytest.mark.parametrize("one_and_other", [(2**24, 2**24 + 1), (7, 7 + 2**32), (-1, 2**63 - 1)])
def test_all_bits_of_every_seed_count_for_every_proposer(
    name: str, one_and_other: tuple[int, int]
) -> None:
    # case 50: the request's seed, the run's, and the sample index
    names = ("seed", "run_seed", "sample_index")
    rows = [
        a(f"{n} {value}", **({"seed": None} | {n: value})) for n in names for value in one_and_other
    ]
    samples = fresh(name, rows)
    for n in names:
        one, other = (samples[f"{n} {value}"] for value in one_and_other)
        assert one != other


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 1.0, 2.0**24])
@pytest.mark.parametrize("named", ["seed", "run_seed", "sample_index"])
def test_what_is_not_a_64_bit_integer_is_refused_before_anything_is_queued(
    named: str, value: float
) -> None:
    # case 50: beyond the range, and floats, which lose bits
    idle = engine("none")
    with pytest.raises(InvalidRequest, match=named):
        idle.submit([a("good"), a("bad", **{named: value})])  # type: ignore[arg-type]
    assert idle.num_unfinished == 0


# ---- batch size, order, preemption --------------------------------------------------------


@every_proposer
def test_order_and_slots_change_no_row_of_a_mixed_batch(name: str) -> None:
    # case 51: three orders on 1, 2 and 3 slots, every third row greedy
    rows = [a(f"n{i}", seed=i, temperature=float(i % 3 > 0), length=3 + 2 * i) for i in range(6)]
    alone = {r.id: fresh(name, [r])[r.id] for r in rows}
    for order in (1, 2, 3):
        shuffled = [rows[i] for i in np.random.default_rng(order).permutation(6)]
        assert fresh(name, shuffled, num_slots=order) == alone


def preempted(
    used: NativeEngine,
    weights: Table | DecoderWeights | None,
    rows: Sequence[RolloutRequest],
    after: int,
) -> dict[str, tuple]:
    """Loses the caches once, by loading the same weights, when `after` tokens are out."""
    used.submit(rows)
    while used.counters().emitted < after:
        assert not used.step()
    used.load(weights, version=1, digest="again")
    return tokens(run(used, []))


@every_proposer
def test_rows_preempted_at_their_fiftieth_token_go_on_as_if_they_had_not(name: str) -> None:
    # case 51
    for row in (a(length=60), a(temperature=0.0, length=60)):
        assert preempted(engine(name), TABLE, [row], after=50) == fresh(name, [row])


@on_llama
def test_preempted_rows_of_a_transformer_go_on_as_if_they_had_not(
    name: str, llama: Callable[[str], NativeEngine]
) -> None:
    # case 51
    rows = [replace(a(length=30), prompt_ids=random_ids(5, 3)), a("g", temperature=0.0, length=30)]
    used, other = llama(name), llama(name)
    assert preempted(used, used.policy.weights, rows, after=20) == tokens(run(other, rows))


@every_proposer
def test_a_sample_aborted_and_asked_for_again_is_the_same_sample(name: str) -> None:
    # case 51: also when its neighbours have gone on meanwhile
    used = engine(name)
    used.submit([a(), a("b", seed=5), a("greedy", temperature=0.0)])
    for _ in range(3):
        used.step()
    (part,) = used.abort(["a"])
    used.step()
    samples = run(used, [a()])
    whole = samples["a"].token_ids
    assert whole == fresh(name, [a()])["a"] and part.token_ids == whole[: len(part.token_ids)]
    assert samples["greedy"].token_ids == fresh(name, [a(temperature=0.0)])["a"]


# ---- negative controls --------------------------------------------------------------------


def used_up(requests: Sequence[RolloutRequest], name: str) -> tuple[int, ...]:
    """Tokens of row a when one engine-wide counter is behind every uniform."""
    counter = iter(range(10**6))

    class UsedUp(SeededDraws):
        def uniform(self, purpose: bytes, start: int, position: int) -> float:
            return super().uniform(purpose, 0, next(counter))

    faulty = table_engine(
        TABLE, V, proposer=make(name, DRAFT), draft_len=3, draws_for=lambda _: UsedUp(1, "p", 0)
    )
    return run(faulty, requests)["a"].token_ids


@every_drafting
def test_one_counter_for_all_rows_is_seen_by_these_comparisons(name: str) -> None:
    """Negative control for cases 40, 44 and 51."""
    assert used_up([a(), a("b")], name) != used_up([a()], name)
    assert used_up([a("b"), a()], name) != used_up([a(), a("b")], name)
