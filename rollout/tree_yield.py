"""Whether a round of draft trees beats a round of chains: by what trees yielded, tried now and then."""

from rollout.step_cost import StepCost

FORGET = 0.9
"""Weight that earlier trees keep after the next."""


class TreeYield:
    """What trees of one size have yielded, with forgetting."""

    def __init__(self, nodes: int, every: int) -> None:
        self.nodes, self._every = nodes, every
        self._rows = self._emitted = self._scored = 0.0
        self._rounds_without = every  # the first round in which chains pay tries one

    def pays(self, num_rows: int, cost: StepCost, chain_rate: float) -> bool:
        """A tree has a better rate than chains, in emitted tokens a row and second, or it is time to
        try one."""
        self._rounds_without += 1
        use = self._rounds_without > self._every
        if not use and self._rows:
            scored = num_rows * self._scored / self._rows
            use = self._emitted / self._rows / cost.seconds(scored) > chain_rate
        if use:
            self._rounds_without = 0
        return use

    def observe(self, num_rows: int, drafted: int, accepted: int) -> None:
        """A round of trees: tokens drafted and accepted over all of its rows."""
        self._rows = FORGET * self._rows + num_rows
        self._emitted = FORGET * self._emitted + num_rows + accepted
        self._scored = FORGET * self._scored + num_rows + drafted
