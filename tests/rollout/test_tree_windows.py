"""Tree windows against chains: each token of a tree predicts what its own path alone would, in any
company, before and after a path was kept. On the table policy and on every tiny architecture."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import rollout.transformer_policy
from rollout.policy import Policy, Window
from rollout.table_policy import TablePolicy
from rollout.transformer_policy import TransformerPolicy
from tests.rollout.policies import loaded_policy, random_ids
from tests.rollout.test_checkpoint import ROPES
from tests.tiny_model import tiny_folder

V = 300
CONTEXT_LEN = 64
ATOL = 1e-4  # logits of size 1 to 20 in float32, summed in another order
ALONE = 7
"""The slot of the reference."""
VARIANTS: dict[str, dict[str, Any]] = {
    "llama with llama3 rope": {"rope_parameters": ROPES["llama3"]},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}

#   0 - 1 - 4
#    `- 2 - 3 - 5
PARENTS = (-1, 0, 0, 2, 1, 3)
DEPTHS = [0, 1, 1, 2, 2, 3]
PATH = (0, 2, 3, 5)


def whole_context(tokens: tuple[int, ...]) -> torch.Tensor:
    """Independent random logits [V] for every sequence of tokens."""
    generator = torch.Generator().manual_seed(hash(tokens) % 2**63)
    return 5 * torch.randn(V, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module", params=["table", "llama", *VARIANTS])
def shared_policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "table":
        return TablePolicy(whole_context, vocab_size=V, context_len=CONTEXT_LEN)
    if request.param == "llama":
        folder = request.getfixturevalue("tiny_llama")
    else:
        architecture, config = request.param.split()[0], VARIANTS[request.param]
        folder = tiny_folder(tmp_path_factory.mktemp("variant"), architecture, **config)
    return loaded_policy(folder, context_len=CONTEXT_LEN)


@pytest.fixture
def policy(shared_policy: Policy) -> Policy:
    for slot in range(shared_policy.num_slots):
        shared_policy.truncate(slot, 0)
    return shared_policy


# ---- the reference --------------------------------------------------------------------------


def paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Window indices from the root to each token."""
    found: list[tuple[int, ...]] = []
    for index, parent in enumerate(parents):
        found.append((*(found[parent] if parent >= 0 else ()), index))
    return found


def alone(policy: Policy, ids: Sequence[int]) -> torch.Tensor:
    """[V]: the prediction after a sequence run as one chain from an empty slot."""
    policy.truncate(ALONE, 0)
    return policy.score([Window(ALONE, 0, tuple(ids), num_logits=1)])[0]


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=ATOL, rtol=1e-6)


def score_checked(
    policy: Policy, windows: Sequence[Window], cached: Mapping[int, Sequence[int]]
) -> None:
    """Scores the windows in one call and compares every prediction with that of its path."""
    parts = policy.score(windows).split([window.num_logits for window in windows])
    for window, part in zip(windows, parts):
        num = len(window.token_ids)
        parents = window.parents or range(-1, num - 1)
        scored = paths(parents)[num - window.num_logits :]
        for path, got in zip(scored, part, strict=True):
            ids = (*cached[window.slot], *(window.token_ids[i] for i in path))
            assert_same(got, alone(policy, ids))


def fill(policy: Policy, cached: Mapping[int, Sequence[int]]) -> None:
    policy.score([Window(slot, 0, tuple(ids), 0) for slot, ids in cached.items()])


def random_parents(num: int, seed: int, num_pending: int = 0) -> tuple[int, ...]:
    """A chain of pending tokens and `num` nodes behind it, each anywhere below its end."""
    rng = random.Random(seed)
    end = num_pending - 1
    nodes = (rng.randrange(end, index) for index in range(num_pending, num_pending + num))
    return (*range(-1, end), *nodes)


# ---- scoring --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_every_token_of_a_tree_scores_as_its_own_path(policy: Policy, seed: int) -> None:
    """One call: trees of 9, 9 and 7 tokens, the second with 3 pending ones, a tree in an empty
    slot, a chain as long as two of the trees, a shorter one, a plain decode."""
    cached = {slot: random_ids(3 * slot, seed=slot) for slot in (6, 2, 0, 5, 3, 1, 4)}
    fill(policy, cached)
    shapes = {
        6: random_parents(9, seed),
        2: random_parents(6, seed + 10, num_pending=3),
        0: random_parents(5, seed + 20),
        5: random_parents(7, seed + 30),
        3: range(-1, 8),
        1: range(-1, 3),
        4: range(-1, 0),
    }
    windows = []
    for slot, shape in shapes.items():
        ids = random_ids(len(shape), seed=100 * seed + slot)
        parents = shape if isinstance(shape, tuple) else None
        num_logits = 7 if slot == 2 else len(ids)  # the last pending token and the 6 nodes
        windows.append(Window(slot, len(cached[slot]), ids, num_logits, parents))
    score_checked(policy, windows, cached)


def test_a_token_does_not_see_its_siblings(policy: Policy) -> None:
    """Token 1 changes: its own prediction and that of 4 below it do, no other by a single bit."""
    ids = random_ids(6, seed=1)
    fill(policy, {slot: random_ids(5, seed=2) for slot in (0, 1)})
    first = policy.score([Window(0, 5, ids, 6, PARENTS)])
    other = policy.score([Window(1, 5, (ids[0], (ids[1] + 1) % V, *ids[2:]), 6, PARENTS)])
    same = [torch.allclose(one, two, atol=ATOL) for one, two in zip(first, other)]
    assert same == [True, False, True, True, False, True]


def test_a_chain_given_as_parents_is_that_chain(policy: Policy) -> None:
    ids = random_ids(6, seed=3)
    fill(policy, {slot: random_ids(5, seed=4) for slot in (0, 1)})
    as_chain = policy.score([Window(0, 5, ids, 4)])
    again = policy.score([Window(1, 5, ids, 4, (-1, 0, 1, 2, 3, 4))])
    assert torch.allclose(again, as_chain, atol=ATOL)


def test_chains_pay_nothing_for_trees(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = loaded_policy(tiny_llama, context_len=CONTEXT_LEN)
    for target in ("rollout.transformer_policy.ancestors", "rollout.policy.Window.depths"):
        monkeypatch.setattr(target, None)
    cached = {0: random_ids(5, seed=5), 1: random_ids(9, seed=6)}
    fill(policy, cached)
    windows = [Window(0, 5, (1, 2, 3), 3), Window(1, 9, (4,), 1, (-1,))]
    score_checked(policy, windows, cached)
    with pytest.raises(TypeError):
        policy.score([Window(1, 9, (4, 5), 1, (-1, -1))])


# ---- keeping a path -------------------------------------------------------------------------


def test_a_kept_path_continues_as_if_it_had_been_run_alone(policy: Policy) -> None:
    prefix, ids, after = random_ids(7, seed=7), random_ids(6, seed=8), random_ids(3, seed=9)
    fill(policy, {2: prefix})
    policy.score([Window(2, 7, ids, 0, PARENTS)])
    policy.compact(2, 7, PATH)
    accepted = [*prefix, *(ids[i] for i in PATH)]
    score_checked(policy, [Window(2, 11, after, 3)], {2: accepted})


def test_a_refused_tree_leaves_no_trace(policy: Policy) -> None:
    prefix = random_ids(7, seed=10)
    fill(policy, {3: prefix})
    policy.score([Window(3, 7, random_ids(6, seed=11), 0, PARENTS)])
    policy.compact(3, 7, ())
    score_checked(policy, [Window(3, 7, random_ids(2, seed=12), 2)], {3: prefix})


def test_a_fork_of_a_kept_path_continues_as_its_source_and_on_its_own(policy: Policy) -> None:
    prefix, ids = random_ids(7, seed=13), random_ids(6, seed=14)
    fill(policy, {0: prefix, 5: random_ids(30, seed=15)})
    policy.score([Window(0, 7, ids, 0, PARENTS)])
    policy.compact(0, 7, PATH)
    policy.fork(0, 5, 11)
    accepted = [*prefix, *(ids[i] for i in PATH)]
    windows = [Window(0, 11, (1, 2), 2), Window(5, 11, (3, 4, 5), 3, (-1, -1, 0))]
    score_checked(policy, windows, {0: accepted, 5: accepted})


@pytest.mark.parametrize("seed", range(3))
def test_rounds_of_trees_cache_what_was_accepted_and_nothing_else(
    policy: Policy, seed: int
) -> None:
    """Three rows, six rounds: tokens of the last round still to be run, then a tree; a random path
    of it is accepted and one to three tokens follow."""
    rng = random.Random(seed)
    cached = {slot: [*random_ids(2 + 2 * slot, seed=slot)] for slot in (4, 0, 2)}
    fill(policy, cached)
    for _ in range(6):
        windows = []
        for slot, ids in cached.items():
            num_nodes, num_pending = rng.choice([0, 3, 5, 8]), rng.choice([1, 1, 3])
            parents = random_parents(num_nodes, rng.randrange(1000), num_pending)
            tokens = random_ids(len(parents), seed=rng.randrange(1000))
            windows.append(Window(slot, len(ids), tokens, 1 + num_nodes, parents))
        score_checked(policy, windows, cached)
        for window in windows:
            kept = rng.choice(paths(window.parents or ())[-window.num_logits :])
            policy.compact(window.slot, window.start, kept)
            cached[window.slot] += [window.token_ids[i] for i in kept]
    assert len({len(ids) for ids in cached.values()}) > 1


def test_keeping_what_is_in_place_copies_nothing(tiny_llama: Path) -> None:
    policy = loaded_policy(tiny_llama, context_len=CONTEXT_LEN)
    policy.score([Window(0, 0, (1, 2, 3), 0, (-1, 0, 0))])
    before = policy._keys._version, policy._values._version
    policy.compact(0, 0, (0, 1))
    assert (policy._keys._version, policy._values._version) == before
    policy.compact(0, 0, (1,))
    assert (policy._keys._version, policy._values._version) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("kept", [(0,), (0, 2)])
def test_a_refused_token_that_overflowed_does_not_spoil_its_slot(
    tiny_llama: Path, kept: tuple[int, ...]
) -> None:
    """A block scaled by 3e37 makes some tokens overflow. What a refused one left in the cache is
    masked for the next tokens of its row, but 0 * NaN shows through a mask."""
    policy = loaded_policy(
        tiny_llama, change=lambda name, t: 3e37 * t if "layers.0.mlp.down" in name else t
    )
    each = torch.stack([alone(policy, (token,)) for token in range(V)])
    bad = each.isnan().any(-1)
    sick, well = int(bad.nonzero()[0]), int((~bad).nonzero()[0])
    want = alone(policy, (well,) * (len(kept) + 1))
    tree = Window(0, 0, (well, sick, well, sick), 4, (-1, -1, 0, -1))
    assert policy.score([tree, Window(1, 0, (well,) * 30, 0)]).isnan().all()
    policy.compact(0, 0, kept)
    both = policy.score([Window(0, len(kept), (well,), 1), Window(1, 30, (well,), 1)])
    assert_same(both[0], want)


# ---- what a window and a path must be -------------------------------------------------------


def test_depths_and_paths_by_hand() -> None:
    tree, chain = Window(0, 9, (5,) * 6, 6, PARENTS), Window(0, 9, (5,) * 6, 6)
    assert list(tree.depths) == DEPTHS and list(chain.depths) == [0, 1, 2, 3, 4, 5]
    assert tree.path(5) == PATH and tree.path(4) == (0, 1, 4) and tree.path(0) == (0,)
    assert chain.path(3) == (0, 1, 2, 3)
    assert chain.is_chain and Window(0, 9, (5, 5), 2, (-1, 0)).is_chain and not tree.is_chain


@pytest.mark.parametrize("parents", [(0, 0), (-1, 1), (-1, 5), (-2, 0)])
def test_a_parent_that_is_not_an_earlier_token_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="is not an earlier one"):
        Window(0, 0, (1, 2), 2, parents)


def test_parents_for_another_number_of_tokens_are_refused() -> None:
    with pytest.raises(AssertionError, match="window of 2 tokens with 1 parents"):
        Window(0, 0, (1, 2), 2, (-1,))


@pytest.mark.parametrize("kept", [(0, 0), (1, 0), (-1, 0), (0, 2, 1)])
def test_a_kept_path_that_does_not_increase_is_refused(
    policy: Policy, kept: tuple[int, ...]
) -> None:
    fill(policy, {0: (1, 2, 3)})
    with pytest.raises(AssertionError, match="expected to be increasing"):
        policy.compact(0, 0, kept)


def test_a_tree_with_more_tokens_than_entries_are_left_is_refused(policy: Policy) -> None:
    """62 cached of 64 leave 2 entries: three siblings do not fit, though all sit at position 62."""
    fill(policy, {0: random_ids(62, seed=16)})
    with pytest.raises(AssertionError, match="window ends at 65, context 64"):
        policy.score([Window(0, 62, (1, 2, 3), 3, (-1, -1, -1))])


def test_a_tree_may_fill_the_cache_to_its_last_entry(policy: Policy) -> None:
    prefix = random_ids(61, seed=17)
    fill(policy, {0: prefix})
    score_checked(policy, [Window(0, 61, (1, 2, 3), 3, (-1, -1, 1))], {0: prefix})
    policy.compact(0, 61, (1, 2))
    score_checked(policy, [Window(0, 63, (4,), 1)], {0: (*prefix, 2, 3)})


# ---- planted faults -------------------------------------------------------------------------


def largest_error(policy: Policy) -> tuple[float, float]:
    """Of the predictions of a tree, and of one behind its kept path; logits."""
    prefix, ids = random_ids(7, seed=18), random_ids(6, seed=19)
    policy.truncate(0, 0)
    fill(policy, {0: prefix})
    got = policy.score([Window(0, 7, ids, 6, PARENTS)])
    runs = [(*prefix, *(ids[i] for i in path)) for path in paths(PARENTS)]
    in_tree = got - torch.stack([alone(policy, run) for run in runs])
    policy.compact(0, 7, PATH)
    behind = policy.score([Window(0, 11, (1,), 1)])[0] - alone(policy, (*runs[5], 1))
    return float(in_tree.abs().max()), float(behind.abs().max())


def causal(windows: Sequence[Window]) -> torch.Tensor:
    length = len(windows[0].token_ids)
    return torch.ones(len(windows), length, length, dtype=torch.bool).tril()


def left_in_place(policy: Policy, slot: int, start: int, kept: Sequence[int]) -> None:
    policy.truncate(slot, start + len(kept))


FAULTS = {
    "a causal mask": (rollout.transformer_policy, "ancestors", causal),
    "rotated by entry": (Window, "depths", property(lambda window: range(len(window.token_ids)))),
    "the path is not moved": (TransformerPolicy, "compact", left_in_place),
}
TABLE_FAULTS = {
    "a causal context": (Window, "path", lambda window, index: tuple(range(index + 1))),
    "the path is not moved": (TablePolicy, "compact", left_in_place),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_the_transformer_is_seen(
    fault: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = loaded_policy(tiny_llama, context_len=CONTEXT_LEN)
    assert max(largest_error(policy)) < 1e-4
    monkeypatch.setattr(*FAULTS[fault])
    in_tree, behind = largest_error(policy)
    assert behind > 0.1 and (in_tree > 0.1 or "moved" in fault)


@pytest.mark.parametrize("fault", TABLE_FAULTS)
def test_a_planted_fault_of_the_table_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = TablePolicy(whole_context, vocab_size=V, context_len=CONTEXT_LEN)
    assert max(largest_error(policy)) == 0
    monkeypatch.setattr(*TABLE_FAULTS[fault])
    assert max(largest_error(policy)) > 0.1
