"""Ray around the algorithm: placement, life-cycle, weights, queue, supervision.

calibration       tokens that say which channels of a model are large
cluster           what a learner holds: launch, submit, publish, next_groups, accept
config            how a rollout cluster is set up
controller        the one process that knows the fleet
engine_loop       an engine that runs in a thread of its own
engine_spec       what a rollout actor has to build, as values that travel
group_queue       groups in dispatch order, paced, whole, never too old
history_exchange  what proposers remember, from member to member through the object store
member            one rollout actor as the controller sees it
metrics           what a cluster has done, and the metric row between two moments
ray_session       Ray on this machine, started and left as it was found
rollout_actor     the actor that hosts one engine
threads           as many threads as the cores a process was given
weights           weight updates on their way through the object store
"""

__all__ = [
    "calibration",
    "cluster",
    "config",
    "controller",
    "engine_loop",
    "engine_spec",
    "group_queue",
    "history_exchange",
    "member",
    "metrics",
    "ray_session",
    "rollout_actor",
    "threads",
    "weights",
]
