"""Histories on their way between actors, without Ray: what one learned becomes drafts in another, once;
a death on the way leaves the others whole. tests/actors/test_cluster.py does it with real processes."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.engine_spec import EngineSpec, history_salt
from actors.history_exchange import HistoryExchange
from actors.rollout_actor import RolloutActor
from actors.weights import WeightPublisher, as_tensor
from proposers.history_state import from_tensors
from rollout.checkpoint import read_weights
from rollout.errors import InvalidConfig
from rollout.request import RolloutSample
from rollout.sampling import SamplingParams
from rollout.watch import alarm
from tests.rollout.engines import request
from tests.tiny_model import tiny_folder

LIMIT_S = 60.0
PROBE = [[5, 6, 7, 8]]
GREEDY = SamplingParams(temperature=0, max_new_tokens=17)
SAMPLED = SamplingParams(max_new_tokens=17)


def spec_of(folder: Path, **changes: Any) -> EngineSpec:
    return EngineSpec(
        str(folder), num_slots=8, context_len=64, dtype="float32", draft_len=4, **changes
    )


def actor(folder: Path, **changes: Any) -> RolloutActor:
    """One that serves version 0, without Ray."""
    spec = spec_of(folder, **changes)
    weights = list(read_weights(folder).items())
    publisher = WeightPublisher(spec, PROBE)
    made = RolloutActor("actor", spec, 1, PROBE)
    made.begin(publisher.pack(0, weights), LIMIT_S)
    made.commit(0, publisher.reference(weights), "interrupt", LIMIT_S)
    return made


def sample(of: RolloutActor, sampling: SamplingParams, num: int = 1) -> list[RolloutSample]:
    group = [
        request(f"r{i}", (5, 6, 7), sampling, prompt_id="p", sample_index=i) for i in range(num)
    ]
    of.submit(group)
    samples: list[RolloutSample] = []
    while len(samples) < num:
        report = of.collect(LIMIT_S)
        assert report.samples, "nothing came within the limit"
        samples += report.samples
    return samples


# ---- between engines, without Ray ---------------------------------------------------------


def test_what_one_actor_finished_is_drafted_and_accepted_in_another(tiny_llama: Path) -> None:
    one, other, alone = (actor(tiny_llama) for _ in range(3))
    (first,) = sample(one, GREEDY)
    size, news = one.export_history("new", LIMIT_S)
    other.merge_history(LIMIT_S, news)
    assert size == sum(array.nbytes for array in news.values()) > 0
    (again,), (cold,) = sample(other, GREEDY), sample(alone, GREEDY)
    assert again.token_ids == cold.token_ids == first.token_ids
    assert again.counters.accepted == 13  # 3 rounds of 4 and a bonus, 1 and a bonus
    assert cold.counters.accepted < 13 and cold.counters.rounds > again.counters.rounds


def test_arrays_that_cannot_be_written_are_taken_in(tiny_llama: Path) -> None:
    """The object store's memory is read-only."""
    one, other = actor(tiny_llama), actor(tiny_llama)
    sample(one, SAMPLED, num=3)
    _, news = one.export_history("new", LIMIT_S)
    for array in news.values():
        array.setflags(write=False)
    other.merge_history(LIMIT_S, news)
    assert Counter(rollouts(other, tiny_llama)) == Counter(rollouts(one, tiny_llama))


def test_a_row_that_is_drawn_again_elsewhere_does_not_set_off_the_watch(tiny_llama: Path) -> None:
    """Its first attempt, made with its very noise, is not read: it would always be accepted."""
    one, other = actor(tiny_llama), actor(tiny_llama)
    before = sample(one, SAMPLED, num=8)
    other.merge_history(LIMIT_S, one.export_history("new", LIMIT_S)[1])
    again = sample(other, SAMPLED, num=8)
    tokens = [{s.request.id: s.token_ids for s in samples} for samples in (before, again)]
    assert tokens[0] == tokens[1]
    counters = other.collect(0.0).counters
    assert counters.foretold_reached > 50 and not alarm(counters)


def test_a_history_of_another_model_is_refused_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    deeper = tiny_folder(tmp_path / "deeper", num_hidden_layers=3)
    one, other = actor(tiny_llama), actor(deeper)
    sample(one, SAMPLED)
    with pytest.raises(InvalidConfig, match="LlamaForCausalLM 2x64"):
        other.merge_history(LIMIT_S, one.export_history("all", LIMIT_S)[1])
    assert rollouts(other, deeper) == []


def test_the_salt_tells_tokenizers_apart_and_needs_none(tmp_path: Path) -> None:
    plain, bare, renamed = (tiny_folder(tmp_path / name) for name in ("plain", "bare", "renamed"))
    (bare / "tokenizer.json").unlink()
    table = (renamed / "tokenizer.json").read_text()
    (renamed / "tokenizer.json").write_text(table.replace("<|im_start|>", "<|other|>"))
    salts = [history_salt(folder) for folder in (plain, bare, renamed)]
    assert len(set(salts)) == 3 and salts[1] == "LlamaForCausalLM 2x64"


def rollouts(of: RolloutActor, folder: Path) -> list[tuple[int, ...]]:
    _, arrays = of.export_history("all", LIMIT_S)
    tensors = {name: as_tensor(array) for name, array in arrays.items()}
    return [tuple(one.token_ids) for one in from_tensors(tensors, history_salt(folder))]


def test_proposers_that_forget_have_no_history(tiny_llama: Path) -> None:
    forgetful = RolloutActor("a", replace(spec_of(tiny_llama), proposer="ngram"), 1, PROBE)
    assert not forgetful.info().remembers
    assert RolloutActor("b", spec_of(tiny_llama), 1, PROBE).info().remembers


# ---- the exchange, with scripted members --------------------------------------------------


class Told:
    """A member's handle and memory: sets of names in place of arrays, calls made at once."""

    def __init__(self, name: str, *, remembers: bool = True, fails: Sequence[str] = ()) -> None:
        self.name, self.serving = name, True
        self.info = type("Info", (), {"remembers": remembers})
        self.handle, self.export_history, self.merge_history = self, self, self
        self.new: set[str] = set()
        self.old: list[str] = []
        self._fails = fails

    def options(self, **_: Any) -> "Told":
        return self

    def remote(self, first: Any, *rest: Any) -> Any:
        if isinstance(first, str):
            return self._export(first)
        if "merge" in self._fails:
            return None
        self.old += [name for names in rest for name in sorted(names)]
        return 0

    def _export(self, part: str) -> tuple[int | None, set[str]]:
        told = {"new": self.new, "told": set(self.old), "all": {*self.old, *self.new}}[part]
        if part == "new" and "export" not in self._fails:
            self.old, self.new = [*self.old, *sorted(self.new)], set()
        return (None if "export" in self._fails else len(told)), told

    def ask(self, answer: Any, _: float) -> Any:
        return answer


def exchange(dead: list[str] | None = None) -> HistoryExchange:
    """Members that answer None are dead, and noted."""

    def ask_all(members: Sequence[Any], call: Callable[[Any], Any]) -> dict[str, Any]:
        answers = {member.name: call(member) for member in members}
        lost = [name for name, answer in answers.items() if answer is None]
        (dead if dead is not None else []).extend(lost)
        return {name: answer for name, answer in answers.items() if answer is not None}

    return HistoryExchange(ask_all, LIMIT_S)


def test_every_member_hears_the_others_news_once() -> None:
    members: Any = [Told(name) for name in "abc"]
    for step in "12":
        for member in members:
            member.new.add(member.name + step)
        exchange().share(members)
    expected = ["a1", "a2", "b1", "b2", "c1", "c2"]
    assert [sorted(member.old) for member in members] == [expected] * 3


def test_a_single_member_keeps_its_news_for_those_to_come() -> None:
    alone, forgetful = Told("a"), Told("b", remembers=False)
    alone.new.add("a1")
    exchange().share([alone, forgetful])  # type: ignore[list-item]
    assert (alone.new, alone.old, forgetful.old) == ({"a1"}, [], [])


def test_a_newcomer_stands_where_the_others_stand_and_hears_nothing_twice() -> None:
    one, two, late = Told("one"), Told("two"), Told("late")
    one.new.add("shared")
    exchange().share([one, two])  # type: ignore[list-item]
    one.new.add("news")
    exchange().introduce(late, [one, two])  # type: ignore[arg-type, list-item]
    assert late.old == ["shared"]
    exchange().share([one, two, late])  # type: ignore[list-item]
    assert late.old == two.old == ["shared", "news"]


@pytest.mark.parametrize("moment", ["export", "merge"])
def test_a_member_that_dies_while_sharing_leaves_the_others_whole(moment: str) -> None:
    members: Any = [Told("a"), Told("b", fails=[moment]), Told("c")]
    for member in members:
        member.new.add(member.name)
    dead: list[str] = []
    exchange(dead).share(members)
    assert dead == ["b"]
    whole = {"a", "b", "c"} - ({"b"} if moment == "export" else set())
    assert [set(member.old) for member in (members[0], members[2])] == [whole, whole]


def test_a_newcomer_is_told_by_the_next_where_the_first_is_dead() -> None:
    first, second, late = Told("a", fails=["export"]), Told("b"), Told("late")
    first.old, second.old = ["x"], ["x"]
    exchange().introduce(late, [first, second])  # type: ignore[arg-type, list-item]
    assert late.old == ["x"]


def test_a_collected_history_holds_everything_once() -> None:
    members: Any = [Told("a"), Told("b")]
    for member in members:
        member.new.add(member.name)
    assert exchange().collect(members) == {"a", "b"}
    assert exchange().collect([Told("c", remembers=False)]) is None  # type: ignore[list-item]
