"""Replayed decode rounds against the same rounds run as they are; the recorder keeps a CUDA graph's
rules on a CPU (`rollout.graph_capture.TapeCapture`). Nothing here ran on a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.ngram import NgramProposer
from quant.formats import FORMATS, FormatName
from rollout.checkpoint import read_config
from rollout.decode_graphs import DecodeGraphs, Shape, padded_entries, padded_rows
from rollout.decoder_forward import DecoderWeights, Step
from rollout.graph_capture import CudaCapture, TapeCapture
from rollout.policy import Scored, Window
from rollout.sampling import SamplingParams
from rollout.transformer_policy import TransformerPolicy
from tests.rollout.engines import request, run
from tests.rollout.policies import engine_over, loaded_policy, packed_weights, random_ids

ATOL = 5e-5  # logits of size 1 to 20 in float32, summed in another order
NUM_SLOTS = 10
FORMAT_NAMES: list[FormatName] = ["none", "int8_w8a16", "int8_w8a8"]
Change = Callable[[str, torch.Tensor], torch.Tensor]


def replaying_policy(
    folder: Path,
    format_: FormatName = "none",
    *,
    context_len: int = 64,
    max_graph_len: int = 4,
    num_slots: int = NUM_SLOTS,
) -> TransformerPolicy:
    policy = TransformerPolicy(
        read_config(folder),
        FORMATS[format_],
        num_slots=num_slots,
        context_len=context_len,
        dtype=torch.float32,
        capture=TapeCapture(),
        max_graph_len=max_graph_len,
    )
    policy.swap(policy.load(packed_weights(folder, format_)))
    return policy


def graphs_of(policy: TransformerPolicy) -> DecodeGraphs:
    assert policy.graphs is not None
    return policy.graphs


def num_replayed(policy: TransformerPolicy) -> float:
    return graphs_of(policy).gauges()["graphs/replayed"]


def prompts(slots: Sequence[int]) -> list[Window]:
    """Longer than any recorded round; lengths 5, 8, 11, ... by slot."""
    return [Window(slot, 0, random_ids(5 + 3 * slot, seed=slot), 0) for slot in slots]


def decode_round(
    slots: Sequence[int], lengths: Sequence[int], *, behind: int = 0, seed: int = 0
) -> list[Window]:
    """Windows behind `prompts` and `behind` more tokens, every token scored."""
    return [
        Window(slot, 5 + 3 * slot + behind, random_ids(num, seed=100 * seed + slot), num)
        for slot, num in zip(slots, lengths, strict=True)
    ]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=ATOL, rtol=1e-5)


@pytest.fixture(scope="module")
def pair(tiny_llama: Path) -> tuple[TransformerPolicy, TransformerPolicy]:
    """One that replays and one that does not, the prompts of all slots cached."""
    policies = (
        replaying_policy(tiny_llama),
        loaded_policy(tiny_llama, num_slots=NUM_SLOTS, context_len=64),
    )
    for policy in policies:
        policy.score(prompts(range(NUM_SLOTS)))
    return policies


# ---- the same logits ------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_replayed_rounds_score_as_eager_ones_at_every_number_of_rows(
    length: int, pair: tuple[TransformerPolicy, TransformerPolicy]
) -> None:
    """Twice a shape: the second time other tokens at other positions of other slots."""
    replaying, eager = pair
    before = num_replayed(replaying)
    for num_rows in range(1, 10):
        for behind, slots in enumerate((range(num_rows), range(9, 9 - num_rows, -1))):
            windows = decode_round(slots, [length] * num_rows, behind=behind, seed=num_rows)
            for policy in pair:  # what is in front of the round
                policy.score([Window(slot, 5 + 3 * slot, (7,) * 5, 0) for slot in slots])
            assert_close(replaying.score(windows), eager.score(windows))
    assert num_replayed(replaying) == before + 18


@pytest.mark.parametrize("lengths", [(1, 3, 2, 4), (4, 1, 1), (2, 1), (1, 1, 1, 1, 2)])
def test_ragged_windows_are_padded_to_the_longest(
    lengths: Sequence[int], pair: tuple[TransformerPolicy, TransformerPolicy]
) -> None:
    replaying, eager = pair
    slots, before = (6, 0, 3, 9, 2)[: len(lengths)], num_replayed(replaying)
    windows = decode_round(slots, lengths)
    assert_close(replaying.score(windows), eager.score(windows))
    behind = [Window(w.slot, w.start + len(w.token_ids), (5,), 1) for w in windows]
    assert_close(replaying.score(behind), eager.score(behind))
    assert num_replayed(replaying) == before + 2


def test_only_the_tokens_asked_for_are_returned(
    pair: tuple[TransformerPolicy, TransformerPolicy],
) -> None:
    replaying, eager = pair
    windows = [Window(w.slot, w.start, w.token_ids, 1 + w.slot % 2)
               for w in decode_round((4, 1, 8), (3, 2, 3))]  # fmt: skip
    got = replaying.score(windows)
    assert got.shape == (1 + 2 + 1, 300)
    assert_close(got, eager.score(windows))


def test_a_window_may_end_at_the_last_entry_of_its_slot(
    pair: tuple[TransformerPolicy, TransformerPolicy],
) -> None:
    """Beside a longer one: its padding would lie beyond the context."""
    replaying, eager = pair
    for policy in pair:
        policy.score([Window(0, 0, random_ids(63, seed=1), 0), Window(1, 0, (3, 1, 4, 1, 5), 0)])
    windows = [Window(0, 63, (1,), 1), Window(1, 5, (1, 2, 3, 4), 4)]
    before = num_replayed(replaying)
    assert_close(replaying.score(windows), eager.score(windows))
    assert num_replayed(replaying) == before + 1
    for policy in pair:
        policy.score(prompts((0, 1)))


def test_attention_reaches_as_far_as_the_longest_row_needs(tiny_llama: Path) -> None:
    replaying = replaying_policy(tiny_llama, context_len=512, num_slots=2)
    eager = loaded_policy(tiny_llama, context_len=512, num_slots=2)
    for policy in (replaying, eager):
        policy.score([Window(0, 0, random_ids(255, seed=1), 0), Window(1, 0, (1,) * 9, 0)])
    for start in (255, 256):
        windows = [Window(0, start, (7,), 1), Window(1, start - 246, (8,), 1)]
        assert_close(replaying.score(windows), eager.score(windows))
    assert list(graphs_of(replaying)._graphs) == [Shape(2, 1, 256), Shape(2, 1, 512)]


def test_logits_stay_as_they_were_when_the_next_round_is_replayed(
    pair: tuple[TransformerPolicy, TransformerPolicy],
) -> None:
    replaying, _ = pair
    first = replaying.score(decode_round((2, 3), (1, 1), seed=1))
    kept = first.clone()
    first_again = replaying.score(decode_round((2, 3), (1, 1), seed=2))
    assert torch.equal(first, kept) and not torch.equal(first, first_again)


@pytest.mark.parametrize("format_", FORMAT_NAMES)
def test_a_replay_after_an_update_runs_the_new_weights(
    format_: FormatName, tiny_llama: Path
) -> None:
    """W8A8 magnifies a rounding to a step of its activations, so it is compared more coarsely."""
    replaying = replaying_policy(tiny_llama, format_)
    last = torch.zeros(2, 300)
    for factor in (1.0, -3.0, 0.1):

        def change(name: str, tensor: torch.Tensor, factor: float = factor) -> torch.Tensor:
            return tensor if "norm" in name else factor * tensor

        packed = packed_weights(tiny_llama, format_, change=change)
        replaying.swap(replaying.load(packed))
        cold = loaded_policy(tiny_llama, format_, num_slots=NUM_SLOTS, context_len=64)
        cold.swap(cold.load(packed))
        for policy in (replaying, cold):
            policy.score(prompts((0, 1)))
        windows = decode_round((0, 1), (1, 1))
        got, want = replaying.score(windows), cold.score(windows)
        atol = 0.3 if format_ == "int8_w8a8" else 0.1 if format_ == "int8_w8a16" else ATOL
        torch.testing.assert_close(got, want, atol=atol, rtol=0)
        assert (got - last).abs().max() > 1
        last = got
    assert graphs_of(replaying).gauges()["graphs/captured"] == 1


def test_weights_that_are_handed_over_stay_as_they_are(tiny_llama: Path) -> None:
    """The closing table of a run puts the same two sets in force in turn."""
    replaying = replaying_policy(tiny_llama)
    first = replaying.load(packed_weights(tiny_llama))
    second = replaying.load(packed_weights(tiny_llama, change=lambda _, t: -t))
    before = [tensor.clone() for tensor in first.tensors()]
    for prepared in (first, second, first):
        replaying.swap(prepared)
    assert all(map(torch.equal, first.tensors(), before))
    assert replaying.weights is not None
    assert all(map(torch.equal, replaying.weights.tensors(), before))


def test_models_that_share_a_cache_replay_their_own_weights(tiny_llama: Path) -> None:
    logits = []
    for target in (replaying_policy(tiny_llama), loaded_policy(tiny_llama, num_slots=NUM_SLOTS)):
        twin = target.sharing_cache(FORMATS["none"])
        twin.swap(twin.load(packed_weights(tiny_llama, change=lambda _, t: -2 * t)))
        target.score(prompts((0, 1)))
        logits.append([policy.score(ROUND) for policy in (target, twin, target)])
    for got, want in zip(*logits):
        assert_close(got, want)
    assert not torch.allclose(logits[0][0], logits[0][1], atol=0.1)


# ---- padding --------------------------------------------------------------------------------


def written(policy: TransformerPolicy, windows: Sequence[Window]) -> torch.Tensor:
    """[S, context_len]: which entries of the rows' slots the round changed."""
    before = policy._keys.clone(), policy._values.clone()
    policy.score(windows)
    now = policy._keys, policy._values
    changed = sum((a != b).any(dim=(0, 2, 4)) for a, b in zip(before, now))
    return changed[:NUM_SLOTS].bool()


def expected(windows: Sequence[Window]) -> torch.Tensor:
    entries = torch.zeros(NUM_SLOTS, 64, dtype=torch.bool)
    for window in windows:
        entries[window.slot, window.start : window.start + len(window.token_ids)] = True
    return entries


@pytest.mark.parametrize("lengths", [(1,) * 3, (3,) * 5, (1, 4, 2)])
def test_padding_writes_to_no_slot_of_a_row(lengths: Sequence[int], tiny_llama: Path) -> None:
    policy = replaying_policy(tiny_llama)
    policy.score(prompts(range(NUM_SLOTS)))
    slots = range(9, 9 - len(lengths), -1)
    for seed in (1, 2):  # the first round records
        windows = decode_round(slots, lengths, seed=seed)
        assert torch.equal(written(policy, windows), expected(windows))
    assert num_replayed(policy) == 2


def test_padding_on_a_rows_slot_would_be_seen(tiny_llama: Path) -> None:
    """Negative control: slot 0 takes the padding."""
    policy = replaying_policy(tiny_llama)
    policy.score(prompts(range(NUM_SLOTS)))
    graphs_of(policy)._scratch = 0
    windows = decode_round((9, 8, 7), (1, 1, 1), seed=1)
    assert not torch.equal(written(policy, windows), expected(windows))


def test_what_lies_in_the_slot_of_the_padding_reaches_no_row(tiny_llama: Path) -> None:
    """NaN there spoils what padding computes, and nothing else."""
    policy, eager = replaying_policy(tiny_llama), loaded_policy(tiny_llama, num_slots=NUM_SLOTS)
    for one in (policy, eager):
        one.score(prompts(range(NUM_SLOTS)))
    for cache in (policy._keys, policy._values):
        cache[:, NUM_SLOTS] = torch.nan
    for lengths in ((1, 1, 1), (1, 4, 2)):
        windows = decode_round((5, 2, 7), lengths)
        assert_close(policy.score(windows), eager.score(windows))


def test_a_replay_that_is_not_finite_is_noticed(tiny_llama: Path) -> None:
    policy = replaying_policy(tiny_llama)
    policy.score(prompts((0, 1)))
    policy._values[:, 1, :, 2] = torch.nan
    assert policy.score(decode_round((0, 1), (1, 1))).isfinite().all(-1).tolist() == [True, False]
    policy.truncate(1, 0)
    assert policy._values[:, 1].isfinite().all()


# ---- what is replayed -----------------------------------------------------------------------


def test_rows_and_entries_are_padded_to_sizes_that_come_again() -> None:
    sizes = [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert [padded_rows(num) for num in range(1, 10)] == sizes
    assert [padded_rows(num) for num in (17, 32, 33, 48, 49, 64, 65)] == [
        32,
        32,
        48,
        48,
        64,
        64,
        80,
    ]
    assert [padded_entries(end, 4096) for end in (1, 256, 257, 1025)] == [256, 256, 512, 2048]
    assert [padded_entries(end, 300) for end in (1, 257, 300)] == [256, 300, 300]


def shape_of(lengths: Sequence[int], *, max_len: int = 9, **fields: Any) -> Shape | None:
    graphs = DecodeGraphs(
        lambda step: (Scored(*[torch.empty(0)] * 2), torch.empty(0)), TapeCapture(), scratch=64,
        context_len=64, vocab_size=2, hidden_size=1, dtype=torch.float32,
        device=torch.device("cpu"), max_len=max_len,
    )  # fmt: skip
    return graphs.shape([Window(i, 0, (0,) * n, **{"num_logits": n} | fields)
                         for i, n in enumerate(lengths)])  # fmt: skip


def test_rounds_that_only_decode_have_a_shape() -> None:
    assert shape_of([1]) == Shape(1, 1, 64)
    assert shape_of([5] * 33) == Shape(48, 5, 64)
    assert shape_of([1, 1, 9]) == Shape(4, 9, 64)  # 36 tokens for 11: they are free
    assert shape_of([3, 3], num_logits=1) == Shape(2, 3, 64)


def test_prompts_trees_and_wasteful_rounds_have_none() -> None:
    assert shape_of([10]) is None
    assert shape_of([3], num_logits=0) is None
    assert shape_of([3], parents=(-1, -1, 0)) is None
    assert shape_of([1] * 31 + [9]) is None  # 288 tokens for 40
    assert shape_of([9] * 64) is None  # 576 tokens: arithmetic hides their launches
    assert shape_of([]) is None


def test_the_recording_that_was_used_longest_ago_makes_room(tiny_llama: Path) -> None:
    policy = replaying_policy(tiny_llama)
    policy.score(prompts(range(NUM_SLOTS)))
    graphs = graphs_of(policy)
    graphs._max_graphs = 2
    for num in (1, 2, 1, 4, 1, 2):
        policy.score(decode_round(range(num), [1] * num))
    assert list(graphs._graphs) == [Shape(1, 1, 64), Shape(2, 1, 64)]
    assert graphs.gauges() == {
        "graphs/captured": 4.0, "graphs/replayed": 6.0, "graphs/eager": 1.0, "graphs/kept": 2.0,
    }  # fmt: skip


# ---- through the engine -----------------------------------------------------------------------


@pytest.mark.parametrize("draft_len", [0, 3])
def test_an_engine_emits_the_same_tokens_with_and_without_replay(
    draft_len: int, tiny_llama: Path
) -> None:
    """More rows than slots, greedy and sampled ones of several lengths, over an update."""
    laws = [SamplingParams(temperature=i % 2, max_new_tokens=8 + 2 * i) for i in range(5)]
    requests = [request(f"r{i}", (20, 21, 20, 21 + i % 2, 20), law) for i, law in enumerate(laws)]
    emitted, policies = [], []
    for policy in (
        replaying_policy(tiny_llama, num_slots=3),
        loaded_policy(tiny_llama, num_slots=3, context_len=64),
    ):
        engine = engine_over(policy, NgramProposer(min_match=1), draft_len)
        samples = run(engine, requests)
        update = engine.prepare(packed_weights(tiny_llama, change=lambda _, t: 1.1 * t))
        engine.load(update, version=1, digest="second")
        again = run(engine, requests)
        emitted.append(
            [(s.token_ids, s.version_spans) for r in (samples, again) for s in r.values()]
        )
        policies.append(policy)
    assert emitted[0] == emitted[1]
    assert num_replayed(policies[0]) > 20
    assert policies[1].graphs is None


# ---- planted faults -----------------------------------------------------------------------------


@pytest.fixture
def recorded(tiny_llama: Path) -> TransformerPolicy:
    """A policy that has recorded the shape of `ROUND`."""
    policy = replaying_policy(tiny_llama)
    policy.score(prompts((0, 1)))
    policy.score(ROUND)
    return policy


ROUND = decode_round((0, 1), (1, 1))


def test_weights_put_in_force_beside_the_recorded_ones_are_seen(
    recorded: TransformerPolicy, tiny_llama: Path
) -> None:
    packed = packed_weights(tiny_llama, change=lambda _, t: -2 * t)
    old, new = recorded.score(ROUND), recorded.load(packed)
    recorded.weights, kept = new, recorded.weights
    assert torch.equal(recorded.score(ROUND), old)  # of the old weights, as a graph would
    del kept
    with pytest.raises(AssertionError, match="memory that is gone"):
        recorded.score(ROUND)


def test_an_update_that_forgets_a_tensor_is_seen(
    recorded: TransformerPolicy, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_weights(tiny_llama, change=lambda _, t: -2 * t)
    cold = loaded_policy(tiny_llama, num_slots=NUM_SLOTS, context_len=64)
    cold.swap(cold.load(packed))
    whole = DecoderWeights.tensors
    monkeypatch.setattr(DecoderWeights, "tensors", lambda weights: whole(weights)[:-1])
    recorded.swap(recorded.load(packed))
    for policy in (recorded, cold):
        policy.score(prompts((0, 1)))
    assert not torch.allclose(recorded.score(ROUND), cold.score(ROUND), atol=0.01)


def test_a_table_that_is_made_anew_is_seen(recorded: TransformerPolicy) -> None:
    recorded._cos = recorded._cos.clone()
    with pytest.raises(AssertionError, match="memory that is gone"):
        recorded.score(ROUND)


def test_inputs_that_are_not_copied_are_seen(
    recorded: TransformerPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the scratch slot would be decoded, over and over."""
    graphs = graphs_of(recorded)
    right, inputs = recorded.score(ROUND), graphs._inputs
    monkeypatch.setattr(graphs, "_inputs", lambda windows, shape: inputs((), shape))
    assert not torch.allclose(recorded.score(ROUND), right, atol=0.01)


HOST_FAULTS: dict[str, Callable[[Step], Any]] = {
    "reads a number": lambda step: int(step.ids[0]),
    "asks whether": lambda step: bool((step.ids > 0).any()),
    "makes a tensor of a list": lambda step: step.ids + torch.tensor([1]),
    "counts": lambda step: step.ids.nonzero(),
    "selects by a mask": lambda step: step.ids[step.ids > 0],
}


@pytest.mark.parametrize("fault", HOST_FAULTS)
def test_a_forward_that_needs_the_host_is_refused(fault: str, tiny_llama: Path) -> None:
    policy = replaying_policy(tiny_llama)
    policy.score(prompts((0, 1)))
    graphs, forward = graphs_of(policy), policy._forward

    def faulty(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        HOST_FAULTS[fault](step)
        return forward(step)

    graphs._forward = faulty
    with pytest.raises(AssertionError, match="needs the host"):
        policy.score(ROUND)


def test_what_a_recording_made_on_the_way_is_spoilt_behind_it() -> None:
    source, target, leaked = torch.tensor([1.0, 2.0]), torch.zeros(2), []

    def work() -> None:
        doubled = 2 * source
        leaked.append(doubled)
        target.copy_(doubled.view(2) + 1)

    replay = TapeCapture()(work)
    assert leaked[-1].isnan().all()
    source.copy_(torch.tensor([5.0, 6.0]))
    replay()
    assert target.tolist() == [11.0, 13.0] and leaked[-1].isnan().all()


def test_a_recording_runs_in_place_on_what_was_there() -> None:
    state, view = torch.arange(6.0), []

    def work() -> None:
        view[:] = [state.view(2, 3)[1]]
        view[0].add_(state[:3].sum())

    replay = TapeCapture()(work)  # runs it twice: 3 + 3, 4 + 3, 5 + 3, and once more
    assert state.tolist() == [0, 1, 2, 9, 10, 11]
    state[0] = 10
    replay()
    assert state.tolist() == [10, 1, 2, 22, 23, 24]


# ---- the real recorder, over fakes -----------------------------------------------------------------


class FakeCuda:
    """Stands for `torch.cuda`; writes down what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.where = "current"

    def graph_pool_handle(self) -> str:
        return "pool"

    def Stream(self, device: torch.device) -> "FakeStream":
        return FakeStream(self, "side")

    def current_stream(self) -> "FakeStream":
        return FakeStream(self, self.where)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        self.where = stream.name
        yield
        self.where = "current"

    def CUDAGraph(self) -> "FakeCuda":
        return self

    def replay(self) -> None:
        self.log.append("replay")

    @contextmanager
    def graph(self, graph: Any, *, pool: str, stream: "FakeStream", **_: Any) -> Iterator[None]:
        self.where = f"recording on {stream.name} in {pool}"
        yield
        self.where = "current"


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: "FakeStream") -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


def test_a_cuda_graph_is_recorded_behind_runs_on_its_stream_and_in_one_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    capture = CudaCapture(torch.device("cpu"))
    replays = [capture(lambda: cuda.log.append(f"run: {cuda.where}")) for _ in range(2)]
    one = ["side waits for current", *["run: side"] * 3, "current waits for side",
           "run: recording on side in pool"]  # fmt: skip
    assert cuda.log == one * 2
    replays[0]()
    assert cuda.log[-1] == "replay"
