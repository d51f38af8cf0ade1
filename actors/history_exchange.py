"""What proposers remember, from member to member through the object store.

The controller hands on references: the data goes from the store to those that take it in. What does
not answer is dealt with by whoever asks for an exchange, like any other call that was not answered.
Drafts are all that is at stake: whatever a member remembers, it emits the same law.
"""

from collections.abc import Callable, Sequence
from typing import Any

from actors.member import Member
from actors.rollout_actor import HistoryPart

AskAll = Callable[[Sequence[Member], Callable[[Member], Any]], dict[str, Any]]
"""Makes a call to each member and waits; the answers by name, of those that gave one."""


class HistoryExchange:
    """Moves histories between members whose proposers remember."""

    def __init__(self, ask_all: AskAll, limit_s: float) -> None:
        self._ask_all, self._limit_s = ask_all, limit_s

    def share(self, members: Sequence[Member]) -> None:
        """Tells each member what the others learned since the last time; a single one has nobody to
        tell and keeps its news."""
        members = _remembering(members)
        if len(members) < 2:
            return
        news = self._export(members, "new")
        if len(news) > 1:
            self._ask_all(
                [member for member in members if member.name in news],
                lambda m: self._merge(m, [ref for name, ref in news.items() if name != m.name]),
            )

    def introduce(self, newcomer: Member, others: Sequence[Member]) -> None:
        """Brings a member that remembers nothing yet to where the others stand. Raises ActorFailed or
        RolloutTimeout when the newcomer fails."""
        for other in _remembering(others):
            if told := self._export([other], "told"):
                newcomer.ask(self._merge(newcomer, list(told.values())), self._limit_s)
                return

    def collect(self, members: Sequence[Member]) -> Any | None:
        """Reference of everything that members remember, each of it once; None where none does."""
        self.share(members)
        for member in _remembering(members):
            if exported := self._export([member], "all"):
                return exported[member.name]
        return None

    def load(self, members: Sequence[Member], reference: Any) -> None:
        """Has every member take in a history from elsewhere. Raises InvalidConfig for that of another
        model."""
        self._ask_all(_remembering(members), lambda m: self._merge(m, [reference]))

    def _export(self, members: Sequence[Member], part: HistoryPart) -> dict[str, Any]:
        """References of exports that are there, by member."""
        calls = {
            m.name: m.handle.export_history.options(num_returns=2).remote(part, self._limit_s)
            for m in members
        }
        sizes = self._ask_all(members, lambda m: calls[m.name][0])
        return {name: calls[name][1] for name in sizes}

    def _merge(self, member: Member, references: Sequence[Any]) -> Any:
        return member.handle.merge_history.remote(self._limit_s, *references)


def _remembering(members: Sequence[Member]) -> list[Member]:
    return [m for m in members if m.info is not None and m.info.remembers]
