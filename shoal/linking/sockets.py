"""What the system is told about our sockets: how they send, when they give a host up, and whose they are."""

import os
import socket
import struct
import weakref

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence before the system asks, between its questions, and how many stay unanswered: a host that vanished
without closing its connections is given up after 25 s. Linux and macOS differ in the first one's name."""

_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def tune(sock: socket.socket) -> None:
    """Make `sock` block, send small frames at once and notice a host that vanished. Buffer sizes stay the system's."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
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


def keep_from_children(sock: socket.socket) -> None:
    """A forked child closes its copy: else a process that died would look alive for as long as its child lives."""
    _ours.add(sock)


def _let_go() -> None:
    for sock in list(_ours):
        sock.close()  # no shutdown: the connection is the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
