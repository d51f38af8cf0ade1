"""The law of a history: by hand, by brute force, and compiled against its reference."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from proposers import history, history_kernels
from proposers.history import HistoryProposer, make_look_up
from proposers.history_kernels import CompiledLookUp
from proposers.history_law import ANYBODY, DRAWS, LookUp, Options, Reader, ReferenceLookUp
from proposers.history_rollouts import PromptRollouts, Rollout
from rollout.errors import InvalidConfig, KernelsUnavailable

COUNTED = Options(decay=1.0)
BOTH = pytest.mark.parametrize("made", [ReferenceLookUp, CompiledLookUp])
Told = Sequence[tuple[Sequence[int], Sequence[float]]]


def prompt_of(
    tail: Sequence[int], told: Told, *, versions: Sequence[int] = (), noises: Sequence[int] = ()
) -> PromptRollouts:
    """Rollouts as (token ids, the chances that are known), oldest first."""
    prompt = PromptRollouts(b"key", tail)
    for n, (token_ids, chances) in enumerate(told):
        rollout = Rollout(n, prompt, noises[n] if noises else 0)
        prompt.add(rollout)
        rollout.extend(token_ids, chances, versions[n] if versions else 0)
    return prompt


def counted(*rollouts: Sequence[int]) -> Told:
    """Nobody recorded a chance."""
    return [(token_ids, ()) for token_ids in rollouts]


def law(
    look_up: LookUp, prompt: PromptRollouts, context: Sequence[int], reader: Reader = ANYBODY
) -> dict[int, float]:
    return dict(look_up.law(prompt, context, reader))


# ---- by hand ------------------------------------------------------------------------------


@BOTH
def test_counts_are_interpolated_as_witten_and_bell_did(made: type) -> None:
    # behind (1, 2): 5 twice, 6 once, so 2/5, 1/5 and 2/5 open; behind (2): these and 7, so 2/7, 1/7,
    # 1/7 of what is open (3 kinds after 4 occurrences)
    prompt = prompt_of((), counted([1, 2, 5], [1, 2, 6], [1, 2, 5], [3, 2, 7]))
    expected = {5: 2 / 5 + 2 / 5 * 2 / 7, 6: 1 / 5 + 2 / 5 / 7, 7: 2 / 5 / 7}
    assert law(made(COUNTED), prompt, (1, 2)) == pytest.approx(expected, abs=1e-15)


@BOTH
def test_a_longer_match_of_the_same_occurrence_is_believed_more(made: type) -> None:
    # one kind after one occurrence leaves a half open, at every length
    for length in range(1, 7):
        prompt = prompt_of((), counted([1, 2, 3, 4, 5, 6, 9]))
        context = (0, *range(7 - length, 7))
        assert law(made(COUNTED), prompt, context) == {9: 1 - 0.5**length}


@BOTH
def test_recorded_chances_decide_between_tokens_seen_once(made: type) -> None:
    # sqrt .25 and .04; trust 1 and both in one context: .5 and .2, .3 left, three lengths (prompt of 2
    # and the token): 1 - .3^3 of .7
    prompt = prompt_of((8, 9), [([1, 5], (0.9, 0.25)), ([1, 6], (0.9, 0.04))])
    options = Options(decay=1.0, trust=1.0)
    told = law(made(options), prompt, (8, 9, 1))
    assert told == pytest.approx({5: 0.5 / 0.7 * (1 - 0.3**3), 6: 0.2 / 0.7 * (1 - 0.3**3)})


@BOTH
def test_chances_of_different_contexts_are_averaged(made: type) -> None:
    # .9 and .7 (roots of .81, .49) cannot hold in one context: the first leaves .1 to the other token,
    # the second .3: (.9 + .3) / 2 and (.7 + .1) / 2
    prompt = prompt_of((), [([3, 1, 5], (1, 1, 0.81)), ([4, 1, 6], (1, 1, 0.49))])
    told = law(made(Options(decay=1.0, trust=1.0)), prompt, (1,))
    assert told == pytest.approx({5: 0.6, 6: 0.4})
    half = law(made(Options(decay=1.0, trust=0.5)), prompt, (1,))
    assert half == pytest.approx({5: 0.3, 6: 0.2})


@BOTH
def test_a_vote_decays_with_every_version_its_rollout_is_behind(made: type) -> None:
    # weights 1/4 and 1 after two kinds: 1/4 and 1 of 3.25
    prompt = prompt_of((), counted([1, 5], [1, 6]), versions=(3, 5))
    look_up = made(Options(decay=0.5))
    told = law(look_up, prompt, (1,), Reader(version=5))
    assert told == pytest.approx({5: 0.25 / 3.25, 6: 1 / 3.25})
    newer = law(look_up, prompt, (1,), Reader(version=4))  # nothing weighs more than 1
    assert newer == pytest.approx({5: 0.5 / 3.5, 6: 1 / 3.5})


@BOTH
def test_a_match_goes_on_into_the_prompt_but_the_prompt_has_no_vote(made: type) -> None:
    prompt = prompt_of((7, 8, 9), counted([1, 5], [2, 1, 6]))
    look_up = made(COUNTED)
    assert law(look_up, prompt, (7, 8)) == {}
    assert list(law(look_up, prompt, (7, 8, 9))) == [2, 1]  # equals: the newer first
    told = law(look_up, prompt, (7, 8, 9, 1))
    assert told[5] == pytest.approx(1 - 0.5**3 + 0.5**3 / 4) and told[6] == pytest.approx(
        0.5**3 / 4
    )


@BOTH
def test_a_row_reads_itself_but_no_other_rollout_of_its_noise(made: type) -> None:
    prompt = prompt_of((), counted([1, 5], [1, 6, 1], [1, 7]), noises=(4, 4, 3))
    own = next(rollout for rollout in prompt if rollout.serial == 1)
    look_up = made(COUNTED)
    assert law(look_up, prompt, (1,)).keys() == {5, 6, 7}
    assert law(look_up, prompt, (1,), Reader(noise=4)).keys() == {7}
    # its last token, which nothing follows yet, is no occurrence
    assert law(look_up, prompt, (6, 1), Reader(noise=4, own=own)).keys() == {6, 7}
    assert law(look_up, prompt, (6, 1), Reader(noise=9, own=own)).keys() == {5, 6, 7}


@BOTH
def test_only_the_newest_rollouts_are_looked_through(made: type) -> None:
    prompt = prompt_of((), counted([1, 5], [1, 6], [1, 7]))
    for scanned, seen in ((1, {7}), (2, {7}), (3, {6, 7}), (5, {5, 6, 7})):
        assert law(made(Options(max_scanned=scanned)), prompt, (1,)).keys() == seen


@BOTH
def test_a_match_shorter_than_asked_for_says_nothing(made: type) -> None:
    prompt = prompt_of((), counted([1, 2, 5], [3, 2, 6]))
    assert law(made(Options(min_match=2)), prompt, (1, 2)).keys() == {5}
    assert law(made(Options(min_match=2)), prompt, (4, 2)) == {}


@BOTH
def test_best_draws_unless_one_token_is_nearly_certain(made: type) -> None:
    # alone, or far more probable: named; of two kinds: drawn from p^1.3
    options = Options(decay=1.0)
    prompt = prompt_of((), counted(*[[1, 2, 3]] * 3, [1, 2, 4], [1, 2, 4]))
    step = made(options).step(prompt, (0, 1), ANYBODY, "best", 9)
    assert step.points == [2] and step.law is not None
    powers = [3**1.3, 2**1.3]
    assert step.law.ids.tolist() == [3, 4]
    assert step.law.probs.tolist() == pytest.approx([power / sum(powers) for power in powers])
    assert made(options).step(prompt, (0, 1), ANYBODY, "best", 1).law is None  # no room
    assert made(options).step(prompt, (0, 1), ANYBODY, "mode", 9).points == [2, 3]


@BOTH
def test_the_estimate_of_a_drawn_token_lies_between_what_p_and_what_chance_allow(
    made: type,
) -> None:
    # 3/7 and 2/7 known behind (2), drawn from 3/5 and 2/5: at most 5/7, at least (9 + 4) / 35
    prompt = prompt_of((), counted(*[[2, 3]] * 3, [2, 4], [2, 4]))
    step = made(COUNTED).step(prompt, (2,), ANYBODY, "counts", 1)
    assert step.chances == pytest.approx([(5 / 7 * 13 / 35) ** 0.5])
    assert made(COUNTED).step(prompt, (2,), ANYBODY, "mode", 1).chances == pytest.approx([3 / 7])


@BOTH
def test_nothing_is_named_behind_what_is_hardly_ever_accepted_whole(made: type) -> None:
    # in one rollout of nine tokens each is known behind the last with chance 1/2 by Witten and Bell
    prompt = prompt_of((), counted(list(range(1, 10))))
    for least, num in ((0.3, 2), (0.2, 3), (1e-9, 8)):
        options = Options(min_match=1, max_match=1, least=least)
        step = made(options).step(prompt, (1,), ANYBODY, "mode", 8)
        assert len(step.points) == num and step.law is None
        assert math.prod(step.chances[:-1]) > least


# ---- by brute force -----------------------------------------------------------------------


def brute(
    rollouts: Sequence[Sequence[int]], tail: Sequence[int], context: Sequence[int]
) -> Counter:
    """Tokens behind the longest suffix of the context, counted over all positions."""
    for length in range(len(context), 0, -1):
        behind: Counter = Counter()
        for tokens in rollouts:
            whole = (*tail, *tokens)
            for end in range(max(length, len(tail)), len(whole)):
                if whole[end - length : end] == tuple(context[-length:]):
                    behind[whole[end]] += 1
        if behind:
            return behind
    return Counter()


@BOTH
@pytest.mark.parametrize("seed", range(20))
def test_every_occurrence_of_the_longest_match_is_found(made: type, seed: int) -> None:
    """With min_match at the longest length the law is that of the counts there alone."""
    generator = random.Random(seed)
    tail = [generator.randrange(3) for _ in range(generator.randrange(4))]
    rollouts = [[generator.randrange(3) for _ in range(generator.randrange(1, 90))] for _ in "abc"]
    prompt = prompt_of(tail, counted(*rollouts))
    context = tuple((tail + rollouts[0])[: generator.randrange(1, 40)][-6:])
    for length in range(len(context), 0, -1):
        look_up = made(Options(decay=1.0, min_match=length, max_match=length))
        told = law(look_up, prompt, context)
        behind = brute(rollouts, tail, context[-length:])
        if told:
            n, kinds = behind.total(), len(behind)
            assert told == pytest.approx({w: c / (n + kinds) for w, c in behind.items()})
            return
    assert not brute(rollouts, tail, context)


@pytest.mark.parametrize("seed", range(40))
def test_compiled_code_and_reference_tell_the_same_law(seed: int) -> None:
    """Ids in the same order, probabilities within 1e-12; also what `step` makes of them."""
    generator = random.Random(seed)
    vocab = generator.choice([2, 5, 40])
    told, versions, noises = [], [], []
    for _ in range(generator.randrange(1, 9)):
        tokens = [generator.randrange(vocab) for _ in range(generator.randrange(1, 200))]
        known = generator.choice([0, len(tokens) // 2, len(tokens)])
        told.append((tokens, [generator.random() for _ in range(known)]))
        versions.append(generator.randrange(6))
        noises.append(generator.randrange(3))
    tail = [generator.randrange(vocab) for _ in range(generator.randrange(6))]
    prompt = prompt_of(tail, told, versions=versions, noises=noises)
    for rollout in list(prompt)[:: generator.choice([2, 3])][:-1]:
        prompt.remove(rollout)
    options = Options(
        decay=0.8, trust=generator.choice([0.5, 1.0]), max_match=generator.choice([3, 16]),
        min_match=generator.choice([1, 2]), max_scanned=generator.choice([50, 10_000]),
        max_ids=generator.choice([4, 32]), certain=0.4,
    )  # fmt: skip
    reference, compiled = ReferenceLookUp(options), CompiledLookUp(options)
    for _ in range(20):
        own = generator.choice(list(prompt))
        context = [*tail, *own.tokens][: generator.randrange(1, 220)]
        reader = Reader(5, generator.randrange(3), generator.choice([None, own]))
        one, other = (r.law(prompt, context, reader) for r in (reference, compiled))
        assert [t for t, _ in one] == [t for t, _ in other]
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-12, rel=1e-12)
        assert sum(p for _, p in one) <= 1 + 1e-12
        for draw in DRAWS:
            step, fast = (r.step(prompt, context, reader, draw, 5) for r in (reference, compiled))
            assert step.points == fast.points
            assert step.chances == pytest.approx(fast.chances, abs=1e-12)
            assert (step.law is None) == (fast.law is None)
            if step.law is not None and fast.law is not None:
                assert torch.equal(step.law.ids, fast.law.ids)
                torch.testing.assert_close(step.law.probs, fast.law.probs, atol=1e-12, rtol=1e-12)


def test_the_comparison_tells_laws_apart() -> None:
    """Negative control: another trust is another law."""
    prompt = prompt_of((), [([1, 5], (1.0, 0.3)), ([1, 6], (1.0, 0.2))])
    one, other = (
        law(CompiledLookUp(Options()), prompt, (1,)),
        law(ReferenceLookUp(Options(trust=0.6)), prompt, (1,)),
    )
    assert one.keys() == other.keys() and one != pytest.approx(other, abs=1e-3)


# ---- where it cannot be compiled ----------------------------------------------------------


def test_without_a_compiler_the_reference_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*_: object) -> None:
        raise KernelsUnavailable("no compiler here")

    monkeypatch.setattr(history_kernels, "find_history_library", unavailable)
    assert isinstance(make_look_up("auto", Options()), ReferenceLookUp)
    assert "no compiler here" in caplog.text
    with pytest.raises(KernelsUnavailable, match="no compiler here"):
        make_look_up("compiled", Options())
    proposer = HistoryProposer(kernels="python")
    proposer.remember((1, 2), [3, 4])
    assert isinstance(proposer._look_up, ReferenceLookUp)


@pytest.mark.parametrize(
    "options",
    [
        {"draw": "median"}, {"kernels": "fortran"}, {"min_match": 0}, {"min_match": 3, "max_match": 2},
        {"decay": 0.0}, {"decay": math.nan},
    ],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(options: dict) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        history.HistoryProposer(**options)
