"""Every error this project raises for a caller's mistake or a machine's failure, as one tree.

Messages are one line: what was got, what was expected, what to do.
"""


class RolloutError(Exception):
    """Root of the tree; catching it catches everything this project raises by name."""


class InvalidRequest(RolloutError):
    """A request that cannot be served as it stands; refused before it costs anything."""


class InvalidConfig(RolloutError):
    """An option that is unknown, out of range, or contradicts another."""


class InvalidLogits(RolloutError):
    """The policy returned NaN, +inf, or no token with any probability at a position."""


class InvalidDraft(RolloutError):
    """A proposer returned ids or a law that no exact verification can use."""


class UnsupportedModel(RolloutError):
    """A checkpoint that is missing, incomplete, or of an architecture the engine does not run."""


class KernelsUnavailable(RolloutError):
    """The compiled CPU kernels cannot be built here, or cannot run this model."""


class InvalidWeights(RolloutError):
    """A weight update that is incomplete, non-finite, or not for this model; old weights stay."""


class ActorFailed(RolloutError):
    """A rollout actor died or answered with an error; the message names it."""


class FleetDead(RolloutError):
    """No rollout actor is left and none could be started."""


class RolloutTimeout(RolloutError):
    """A wait ran into its stated limit."""


class RunFolderError(RolloutError):
    """A run folder that exists already, cannot be written, or does not hold a resumable run."""
