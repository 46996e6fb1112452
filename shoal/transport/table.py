"""Tables: where processes of one run write down their addresses, so that they find each other. Never a secret.

    file://...       of processes that Shoal starts on one host: memory that only this user can open, and no port
    tcp://HOST:PORT  of a world that srun or torchrun started, or of processes that Shoal starts on several hosts:
                     torch's TCPStore, which answers whoever connects

Whoever reaches the port of a TCPStore can read and overwrite what is in it. So nothing in it lets a stranger into a
run: no token is in its keys or values, it listens at the one address that the ranks were told, not at all of them, and
once all ranks are there it hears nobody new.
torchrun's own store, where its agent keeps one, is torchrun's, and as trusted as torchrun itself.
"""

import os
import shutil
import socket
import tempfile
import weakref
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.transport.links.door import listening
from shoal.transport.strangers import hear_again, hear_nobody

Store = Any
"""torch's own: `set`, `get` (which waits), and what groups need to be made."""

_served: dict[str, tuple[Store, int]] = {}
"""Tables that this process keeps for others, by url, and the files of their ports. They live as long as it does."""
_reached: dict[str, Store] = {}
"""Connections to tables of others, by url: one each, since a table may hear nobody new once its world is there."""


class OwnTable:
    """A table for processes that this one starts on this host. It goes with this object, or with this process.

    On Linux it is a file without a name, which nothing leaves behind, not even a SIGKILL; elsewhere one in a folder
    that only this user can enter.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create") and Path("/proc/self/fd").exists():
            file = os.memfd_create("shoal-table")
            self._close = weakref.finalize(self, lambda: os.close(file))
            path = f"/proc/{os.getpid()}/fd/{file}"
        else:
            folder = tempfile.mkdtemp(prefix="shoal-table-")
            self._close = weakref.finalize(self, lambda: shutil.rmtree(folder, ignore_errors=True))
            path = f"{folder}/table"
        self.url = f"file://{path}"
        """What processes give to `table_at`."""

    def close(self) -> None:
        """Remove it, once no process needs it any more."""
        self._close()


class HostTable:
    """A table for processes that this one starts on several hosts, at `host`, an address of this one, and no other.

    It answers for as long as this object lives, since processes may come at any time.
    """

    def __init__(self, host: str, timeout: float) -> None:
        self._store: Store | None
        self._store, _, port = _serve(host, host, 0, timeout)
        self.url = f"tcp://{host}:{port}"
        """What processes give to `table_at`."""

    def close(self) -> None:
        """End it, once no process needs it any more."""
        self._store = None


def table_at(url: str, timeout: float) -> Store:
    """The table at `url`, which another process keeps; waits up to `timeout` seconds for it, and for what it lacks."""
    patience = timedelta(seconds=timeout)
    if url.startswith("file://"):
        # -1: with a number of processes the last of them would remove the file
        table = dist.FileStore(_kept(url.removeprefix("file://")), -1)  # type: ignore[attr-defined]  # by assignment
        table.set_timeout(patience)
        return table
    if url in _served:
        return _served[url][0]
    if url not in _reached:
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        _reached[url] = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=patience)  # type: ignore[attr-defined]
    _reached[url].set_timeout(patience)
    return _reached[url]


def serve_table(host: str, port: int, timeout: float, *, one_host: bool) -> Store:
    """Keep the table of a world at `host`, which names this host; made once per process.

    It listens at that address alone. At all of this host's only where others cannot reach it otherwise: where its own
    name leads it to loopback though there are other hosts, and where it does not know the address it is reached at.
    """
    url = f"tcp://{host}:{port}"
    if url not in _served:
        address = _own(host)
        if address is None or (ip_address(address).is_loopback and not one_host):
            address = "0.0.0.0"
        table, file, _ = _serve(host, address, port, timeout)
        _served[url] = table, file
    return _served[url][0]


def _serve(host: str, address: str, port: int, timeout: float) -> tuple[Store, int, int]:
    """A store of this process that listens at `address` and is reached as `host`; the file of its port, and the port.

    Port 0 lets the system choose.
    """
    with listening(address, port) as sock:
        file, number = os.dup(sock.fileno()), sock.getsockname()[1]
    table = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        number,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        multi_tenant=True,  # a script may make a world of its own at the same port
        master_listen_fd=file,
    )
    return table, file, number


def all_are_here() -> None:
    """Every rank has reached the tables that this process keeps: from now on they hear nobody new.

    Not with CUDA, whose groups connect to the table again for themselves.
    """
    if not torch.cuda.is_available():
        hear_nobody({file for _, file in _served.values()})


def all_may_come() -> None:
    """The world is left; whoever makes another may use the same tables."""
    hear_again({file for _, file in _served.values()})


def table_of_torchrun(rank: int, size: int, timeout: float) -> Store | None:
    """The table that torchrun's agent keeps for its world; None where it keeps none.

    torchrun keeps one table for all attempts (--max-restarts): under the keys of the last one stand the addresses of
    ranks that are gone. So every attempt has keys of its own.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    patience = timedelta(seconds=timeout)
    table = next(iter(dist.rendezvous("env://", rank, size, timeout=patience)))[0]  # type: ignore[attr-defined]
    return under(table, f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")


def under(table: Store, name: str) -> Store:
    """The same table, in which every key begins with `name`."""
    return dist.PrefixStore(name, table)  # type: ignore[attr-defined]


def _kept(path: str) -> str:
    """A name of the same file for this process alone, until it ends: torch opens it again and again, also at the end.

    By then whoever made the table may be gone, and the number of its file another file's.
    """
    return f"/proc/self/fd/{os.open(path, os.O_RDWR | os.O_CLOEXEC)}" if path.startswith("/proc/") else path


def _own(host: str) -> str | None:
    """An address by which this host knows itself as `host`; None where there is none that it may listen at."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)}
    except OSError:
        return None
    for address in sorted(addresses):
        with socket.socket() as sock:
            try:
                sock.bind((address, 0))
            except OSError:
                continue
            return address
    return None
