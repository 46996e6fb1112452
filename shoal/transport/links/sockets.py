"""Socket options: how our sockets send, when they give a host up; and which sockets are ours."""

import math
import os
import socket
import struct
import sys
import weakref
from contextlib import suppress

_ASK_SECONDS = 10
"""Seconds of silence before the system asks whether the peer's host is there, and between its questions."""
_LONGEST_PAUSE = 5.0
"""Seconds between two tries to send what was not received. The system doubles that pause each time up to two minutes,
so that a link would stay silent for as long again as the network was cut."""
_RTO_MAX_MS = getattr(socket, "TCP_RTO_MAX_MS", 44)
"""Linux's number for it, from 6.15 on; Python does not know its name yet."""

_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def tune(sock: socket.socket) -> None:
    """Make `sock` block, send small frames at once and notice a host that vanished. Buffer sizes stay the system's."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        with suppress(OSError):  # an older system: it is slower after a cut
            sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, round(1000 * _LONGEST_PAUSE))


def limit_cut(sock: socket.socket, seconds: float) -> None:
    """A host that gives no sign of life for `seconds` counts as gone, whether something was sent to it or not."""
    asks = max(1, math.ceil(seconds / _ASK_SECONDS))
    # Linux and macOS differ in the first one's name. Both count to at most 127.
    values = {"TCP_KEEPIDLE": _ASK_SECONDS, "TCP_KEEPALIVE": _ASK_SECONDS}
    values |= {"TCP_KEEPINTVL": math.ceil(seconds / min(asks, 127)), "TCP_KEEPCNT": min(asks, 127)}
    values |= {"TCP_USER_TIMEOUT": min(round(1000 * seconds), 2**31 - 1)}
    for name, value in values.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def limit_waiting(sock: socket.socket, seconds: float | None) -> None:
    """Calls that wait longer than `seconds` without moving a byte raise BlockingIOError. None: they wait for ever.

    The system's own limit, and not `settimeout`: with that, Python would move a buffer in many small calls, and take
    the interpreter's lock after each, which a busy thread may hold for milliseconds.
    """
    micros = 0 if seconds is None else max(1, round(seconds * 1e6))  # 0 means no limit
    value = struct.pack("ll", *divmod(micros, 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def somebody_listens(host: str, port: int, seconds: float) -> bool:
    """Whether a connection to `host` and `port` is taken within `seconds`; it is closed again."""
    try:
        with socket.create_connection((host, port), timeout=seconds):
            return True
    except (OSError, OverflowError):  # a port that is none
        return False


def keep_from_children(sock: socket.socket) -> None:
    """A forked child closes its copy: else a process that died would look alive for as long as its child lives."""
    _ours.add(sock)


def allow_many_files() -> None:
    """Raise the limit of open files as far as this user may: a connection is a file, and the limit is often 1,024."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS has a limit of its own below
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_ours(file: int) -> bool:
    """Whether the file of this number is a socket of ours."""
    return any(sock.fileno() == file for sock in list(_ours))


def _let_go() -> None:
    for sock in list(_ours):
        sock.close()  # no shutdown: the connection is the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
