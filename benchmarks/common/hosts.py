"""Two hosts on one machine: network namespaces joined by a link whose speed is limited.

Needs root and iproute2. The names carry the process id, so that two benchmarks do not meet; whatever happens, the
namespaces, and with them their links, are removed at the end.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DEVICE = "veth-shoal"


@dataclass(frozen=True)
class Host:
    """Where a rank runs."""

    address: str
    prefix: tuple[str, ...] = ()
    """What stands before a command that is to run there."""
    device: str = "lo"


def loopback(count: int) -> list[Host]:
    """All ranks on this machine as it is."""
    return [Host("127.0.0.1")] * count


@contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[list[Host]]:
    """Two namespaces and a link of `rate` each way (token bucket), alive within the context."""
    names = [f"shoal-{os.getpid()}-{letter}" for letter in "ab"]
    hosts = [
        Host(f"10.77.0.{number}", ("ip", "netns", "exec", name), DEVICE) for number, name in enumerate(names, start=1)
    ]
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", DEVICE, "netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for name, host in zip(names, hosts, strict=True):
            _ip("-n", name, "address", "add", f"{host.address}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            shape = ("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", rate, "burst", "256kb", "latency")
            subprocess.run([*host.prefix, *shape, "50ms"], check=True)
        yield hosts
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
