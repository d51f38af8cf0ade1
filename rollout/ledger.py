"""One fate for every sample.

A sample id is *in flight* from submission until an engine delivers it, *waiting* until an optimiser
step has consumed it or something else happened to it, and then has one final fate for good:
accepted, stale, filtered or failed. Two kinds of delivery end without one: a second delivery of an
id (*duplicate*) and an error that is generated again under the same id (*retried*). Always:

    generated = accepted + stale + filtered + failed + duplicate + retried + waiting
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from rollout.request import RolloutSample

Final = Literal["accepted", "stale", "filtered", "failed"]
FINAL: tuple[Final, ...] = ("accepted", "stale", "filtered", "failed")
STATES = (*FINAL, "duplicate", "retried", "waiting", "in_flight")


class Ledger:
    """Counts fates by sample id."""

    def __init__(self) -> None:
        self._fates: dict[str, str] = {}
        self._waiting_tokens: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self.generated_tokens = 0
        """Tokens of every delivery, whatever became of it."""

    def submitted(self, ids: Iterable[str]) -> None:
        """Registers ids. Raises ValueError for one that is known already and registers none."""
        ids = list(ids)
        known = next((id_ for id_ in ids if id_ in self._fates), None)
        if known is not None or len(set(ids)) < len(ids):
            raise ValueError(f"sample id {known or 'given twice'}: ids are used once in a run")
        for id_ in ids:
            self._move(id_, "in_flight")

    def delivered(self, sample: RolloutSample) -> bool:
        """Counts a delivery; False for a duplicate, which the caller drops."""
        id_ = sample.request.id
        self._counts["generated"] += 1
        self.generated_tokens += len(sample.token_ids)
        if self._fates.get(id_) != "in_flight":
            self._counts["duplicate"] += 1
            return False
        self._move(id_, "waiting")
        self._waiting_tokens[id_] = len(sample.token_ids)
        return True

    def retried(self, id_: str) -> None:
        """A delivered error goes back in flight."""
        assert self._fates[id_] == "waiting", f"{id_} is {self._fates[id_]}"
        self._counts["retried"] += 1
        self._waiting_tokens.pop(id_)
        self._move(id_, "in_flight")

    def settle(self, ids: Iterable[str], fate: Final) -> None:
        """Gives waiting samples their final fate. Raises ValueError for any other sample and settles
        none."""
        ids = list(ids)
        for id_ in ids:
            if self._fates.get(id_) != "waiting":
                state = self._fates.get(id_, "unknown")
                raise ValueError(f"sample {id_} is {state}: only a waiting sample can be {fate}")
        for id_ in ids:
            self._move(id_, fate)
            self._waiting_tokens.pop(id_, None)

    def _move(self, id_: str, state: str) -> None:
        if (old := self._fates.get(id_)) is not None:
            self._counts[old] -= 1
        self._fates[id_] = state
        self._counts[state] += 1

    def counts(self) -> dict[str, int]:
        """`generated` and the count of every state."""
        return {name: self._counts[name] for name in ("generated", *STATES)}

    def fate(self, id_: str) -> str | None:
        return self._fates.get(id_)

    def state(self) -> dict[str, Any]:
        """JSON-able. Unfinished and waiting samples are not part of it: whoever resumes submits
        them, and delivers those that were waiting, again."""
        settled = {id_: fate for id_, fate in self._fates.items() if fate in FINAL}
        ended = {name: self._counts[name] for name in ("duplicate", "retried")}
        return {
            "fates": settled,
            **ended,
            "generated_tokens": self.generated_tokens - sum(self._waiting_tokens.values()),
        }

    @staticmethod
    def from_state(state: dict[str, Any]) -> "Ledger":
        ledger = Ledger()
        for id_, fate in state["fates"].items():
            ledger._move(id_, fate)
        for name in ("duplicate", "retried"):
            ledger._counts[name] = state[name]
        ledger._counts["generated"] = len(state["fates"]) + state["duplicate"] + state["retried"]
        ledger.generated_tokens = state["generated_tokens"]
        return ledger
