"""Ray as this project starts it."""

from pathlib import Path

import ray

from actors.ray_session import LOOPBACK, ray_session


def listening_ports() -> set[tuple[str, str]]:
    """(address, port) of every listening TCP socket, as the kernel writes them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A":
                address, _, port = local.partition(":")
                found.add((address, port))
    return found


def test_everything_ray_opens_listens_on_loopback_and_is_gone_afterwards() -> None:
    before = listening_ports()
    with ray_session(num_cpus=1):
        opened = listening_ports() - before
        assert ray.nodes()[0]["NodeManagerAddress"] == LOOPBACK
        assert opened, "Ray listens somewhere"
        everywhere = [a for a, _ in opened if not a.strip("0") or not a.endswith("0100007F")]
        assert everywhere == []
    assert not ray.is_initialized()


def test_a_ray_that_was_there_before_stays() -> None:
    with ray_session(num_cpus=1):
        with ray_session(num_cpus=1):
            pass
        assert ray.is_initialized()
