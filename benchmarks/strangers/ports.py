"""Which ports the processes of a run listen at, as `ss` says."""

import re
import subprocess
from dataclasses import dataclass, replace

import psutil


@dataclass(frozen=True, order=True)
class Port:
    """A listening socket."""

    host: str
    port: int
    pid: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def seen_from(self, host: str) -> "Port":
        """The same where people reach it at `host`, if it listens everywhere."""
        return replace(self, host=host) if self.host in ("*", "0.0.0.0", "::") else self

    @property
    def loopback(self) -> bool:
        """Whether only this host reaches it."""
        return self.host.startswith("127.") or self.host == "::1"


def tree(pid: int) -> list[int]:
    """A process and all that it started."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def ports_of(pids: list[int], prefix: tuple[str, ...] = ()) -> list[Port]:
    """The ports at which these processes listen, on the host whose commands begin with `prefix`."""
    shown = subprocess.run([*prefix, "ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    found = set()
    for line in shown.splitlines():
        host, _, port = line.split()[3].rpartition(":")
        for owner in re.findall(r"pid=(\d+)", line):
            if int(owner) in pids:
                found.add(Port(host.strip("[]").partition("%")[0], int(port), int(owner)))
    return sorted(found)
