"""Whether a round of draft trees beats a round of chains: by what trees yielded, tried now and then."""

from rollout.step_cost import StepCost


class TreeYield:
    """What trees of one size have yielded, with forgetting."""

    def __init__(self, nodes: int, every: int, decay: float) -> None:
        self.nodes, self._every, self._decay = nodes, every, decay
        self._rows = self._emitted = self._scored = 0.0
        self._rounds_without = every  # the first round that drafts tries one

    def pays(self, num_rows: int, cost: StepCost, chain_rate: float) -> bool:
        """A tree has a better rate than chains, in emitted tokens a row and second, or it is time to
        try one."""
        self._rounds_without += 1
        if self._rounds_without > self._every:
            tried = True
        elif self._rows:
            scored = num_rows * self._scored / self._rows
            tried = self._emitted / self._rows / float(cost.seconds(scored)) > chain_rate
        else:
            tried = False
        if tried:
            self._rounds_without = 0
        return tried

    def observe(self, num_rows: int, drafted: int, accepted: int) -> None:
        """A round of trees: tokens drafted and accepted over all of its rows."""
        for name, value in (
            ("_rows", num_rows),
            ("_emitted", num_rows + accepted),
            ("_scored", num_rows + drafted),
        ):
            setattr(self, name, self._decay * getattr(self, name) + value)
