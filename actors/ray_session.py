"""Ray: started quietly and on loopback, or joined; `ray_session` leaves it as it was found."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray._private import ray_constants

NAMESPACE = "exact-rollout"
LOOPBACK = "127.0.0.1"


def start_ray(*, num_cpus: int | None = None, address: str | None = None) -> bool:
    """Connects to `address`, or starts a local Ray; False when one is connected already.

    What is started listens on loopback and has no dashboard.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs workers at niceness 15: beside a learner on the same cores they would starve.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if address is None or address.startswith(LOOPBACK):
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # also silences a warning
        _stay_on_loopback()  # also to join: a process that calls itself otherwise finds no node
    if address is not None:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
        return True
    ray.init(
        address="local",
        num_cpus=num_cpus,
        namespace=NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address=LOOPBACK,
    )
    return True


def _stay_on_loopback() -> None:
    """Ray (seen in 2.60) turns 127.0.0.1 into an outward address on Linux, and then listens on all
    interfaces; on macOS and Windows it does not. This is the switch between the two, for this process
    and, by the environment, for those it starts. To be removed when ray.init keeps a loopback
    `_node_ip_address`; tests/actors/test_ray_session.py looks at what listens."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


@contextmanager
def ray_session(*, num_cpus: int | None = None, address: str | None = None) -> Iterator[None]:
    """`start_ray` for the length of a block; a Ray that was there before stays."""
    started = start_ray(num_cpus=num_cpus, address=address)
    try:
        yield
    finally:
        if started:
            ray.shutdown()
