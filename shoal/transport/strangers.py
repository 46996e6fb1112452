"""Gloo's own ports, closed to strangers.

Gloo opens a port for every group, needs it until the members are connected, and listens there for as long as the group
lives. It accepts and keeps every connection: a stranger with a thousand connections uses up the files that a process
may have, at which Gloo ends the process. So once a group is connected its port is told to hear nobody.

Linux only: a filter of the kernel's on the listening socket, which drops what comes to it and leaves connections as
they are. Elsewhere Gloo's ports stay as Gloo opens them.
"""

import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.transport.links.sockets import is_ours

_ATTACH_FILTER = 26
"""SO_ATTACH_FILTER, which Python's module does not name."""
_DETACH_FILTER = 27
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter program of one instruction: return 0, which drops every packet."""


@contextmanager
def noted() -> Iterator[set[int]]:
    """The sockets (as numbers of files) that began to listen in this process meanwhile, other than our own doors.

    The set is filled at the end. Whatever another thread opens meanwhile counts too: keep it short.
    """
    opened: set[int] = set()
    before = _listening()
    yield opened
    opened |= _listening() - before


def hear_nobody(files: set[int]) -> None:
    """Nobody new gets through to these listening sockets; connections that are made stay."""
    lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() not in ("0", "n", "no", "false", "")
    if sys.platform != "linux" or lazy:  # members of a lazy group connect when they first speak
        return
    program = ctypes.create_string_buffer(_DROP_ALL)
    for file in files:
        with socket.socket(fileno=os.dup(file)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def hear_again(files: set[int]) -> None:
    """Let these listening sockets hear whoever comes, as before."""
    if sys.platform != "linux":
        return
    for file in files:
        with suppress(OSError), socket.socket(fileno=os.dup(file)) as sock:  # it had no filter
            sock.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def _listening() -> set[int]:
    if sys.platform != "linux":
        return set()
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir() if _listens(int(entry.name))}


def _listens(file: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(file).st_mode) or is_ours(file):
            return False
        with socket.socket(fileno=os.dup(file)) as sock:
            over_network = sock.family in (socket.AF_INET, socket.AF_INET6)
            return over_network and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # closed meanwhile, or a kind of socket that does not listen
        return False
