"""Where links are made: one process keeps a door, others knock at its address with its token.

Promise   a handler sees only callers that know the token; whoever else connects is hung up on without a word.
Cost      a thread per caller, and one that lets them in; a link costs one round trip to make.
Failure   a caller that says nothing, or nonsense, holds its own thread for `HANDSHAKE_SECONDS` and nobody else.

The token keeps strangers out; it travels in the clear, so it does not protect on a network that others listen to.
"""

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeAlias

from shoal.errors import ConfigError
from shoal.linking.link import JSON, Link, LinkError, LinkLost, LinkSilent
from shoal.linking.sockets import keep_from_children

LOOPBACK = "127.0.0.1"
HANDSHAKE_SECONDS = 5.0
"""What a caller has to say who it is."""
CONNECT_SECONDS = 30.0
"""What a peer has to open its door: a process that loads torch on a busy host takes some."""
CLOSE_SECONDS = 5.0
"""What handlers have to end after their links were closed."""

_LARGEST_HELLO = 64 << 10
"""Bytes that are read from somebody who has not shown a token yet."""
_PAUSE_SECONDS = 0.05
"""Between two tries."""

Address: TypeAlias = tuple[str, int]
Handler: TypeAlias = Callable[[Link, dict[str, Any]], None]
OnError: TypeAlias = Callable[[Link, dict[str, Any], Exception], None]


class Door:
    """Listens at an address of this host and gives every caller that knows the token a thread of its own.

    That thread runs `handler(link, hello)` with what the caller said of itself; when it returns, the link is closed.
    The link has no time-out and the caller's address as its name: the handler may set both. A handler that raises
    `LinkLost` ended as usual; any other exception goes to `on_error(link, hello, error)`, in the same thread.
    """

    def __init__(self, handler: Handler, *, on_error: OnError, host: str = LOOPBACK, port: int = 0) -> None:
        """Listen at `port` of `host`, an address of this host; port 0 lets the system choose. Else a `ConfigError`."""
        self.token = secrets.token_hex(16)
        """What a caller must know."""
        self._handler = handler
        self._on_error = on_error
        self._socket = _listening(host, port)
        name, number = self._socket.getsockname()[:2]
        self.address: Address = (name, number)
        """Host and port where it listens; of no use to others where host is 0.0.0.0: see `own_address`."""
        self._guests: dict[threading.Thread, Link] = {}
        self._changing = threading.Lock()
        self._closed = False
        self._porter = threading.Thread(target=self._let_in, name=f"shoal-door-{number}", daemon=True)
        self._porter.start()

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Let nobody in any more, close all links that came through, and wait for their threads.

        False if some handler had not ended after `seconds`; it is left behind as a daemon. Any thread may call it, also
        a handler, which is not waited for.
        """
        with self._changing:
            self._closed = True
            guests = dict(self._guests)
        self._wake()
        for link in guests.values():
            link.close()
        deadline = time.monotonic() + seconds
        others = [thread for thread in (self._porter, *guests) if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._socket.close()
        return not any(thread.is_alive() for thread in others)

    def __enter__(self) -> "Door":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # macOS does not shut what is not connected; there, closing it wakes
            self._socket.close()

    def _let_in(self) -> None:
        """The life of the thread that listens."""
        while not self._closed:
            try:
                sock, caller = self._socket.accept()
            except OSError:  # closed here; or a caller hung up at once, or no file is free: others may still come
                if not self._closed:
                    time.sleep(_PAUSE_SECONDS)
                continue
            try:
                self._welcome(sock, f"{caller[0]}:{caller[1]}")
            except (OSError, RuntimeError):  # it hung up already; or there is no thread to be had
                sock.close()
                time.sleep(_PAUSE_SECONDS)

    def _welcome(self, sock: socket.socket, name: str) -> None:
        link = Link(sock, name, HANDSHAKE_SECONDS)
        thread = threading.Thread(target=self._attend, args=(link,), name=f"shoal-link-{name}", daemon=True)
        with self._changing:
            if self._closed:
                link.close()
                return
            thread.start()
            self._guests[thread] = link

    def _attend(self, link: Link) -> None:
        """The life of a caller's thread."""
        try:
            with link:
                hello = self._hello(link)
                if hello is not None:
                    self._handle(link, hello)
        finally:
            with self._changing:
                self._guests.pop(threading.current_thread(), None)

    def _hello(self, link: Link) -> dict[str, Any] | None:
        """What the caller says of itself; None where it is a stranger."""
        try:
            head, lengths = link.receive_head(_LARGEST_HELLO)
            token, hello = head.get("token"), head.get("hello")
            known = isinstance(token, str) and hmac.compare_digest(
                token.encode(errors="surrogatepass"), self.token.encode()
            )
            if not known or not isinstance(hello, dict) or lengths:
                return None
            link.send({"welcome": True})
            link.timeout = None
        except LinkError:
            return None
        return hello

    def _handle(self, link: Link, hello: dict[str, Any]) -> None:
        try:
            self._handler(link, hello)
        except LinkLost:
            return
        except Exception as error:
            self._on_error(link, hello, error)


def connect(
    address: Address,
    token: str,
    hello: Mapping[str, JSON] | None = None,
    *,
    name: str,
    timeout: float = CONNECT_SECONDS,
) -> Link:
    """A link to whoever keeps the door at `address`, called `name` in messages; it has no time-out of its own yet.

    `hello` is what its handler gets, 64 KiB at most. Tries again while nobody listens, since the peer may still be
    starting. A peer that cannot be reached or gives no answer within `timeout` seconds is a `LinkError`, as is, at
    once, one that hangs up because the token is not its.
    """
    deadline = time.monotonic() + timeout
    sock = _reached(address, name, timeout)
    link = Link(sock, name, max(_PAUSE_SECONDS, deadline - time.monotonic()))
    try:
        _greet(link, token, hello or {}, f"{name} at {address[0]}:{address[1]}", timeout)
        link.timeout = None
    except BaseException:
        link.close()
        raise
    return link


def own_address(towards: str) -> str:
    """The address at which `towards`, a host's name or address, reaches this host; loopback for loopback.

    Asks the system which of its addresses it would speak from; nothing is sent. A `ConfigError` where there is no way.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(target)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"there is no way from this host to {towards!r}: {error.strerror or error}.",
            "Check the name or address, and that this host is connected to its network.",
        ) from None


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}: {getattr(error, 'strerror', None) or error}.",
            "Give an address of this host, and a port that is free; 0 lets the system choose one.",
        ) from None
    keep_from_children(sock)
    return sock


def _reached(address: Address, name: str, timeout: float) -> socket.socket:
    """A socket connected to `address`, tried for until `timeout` seconds are over."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            sock = socket.create_connection(address, timeout=max(_PAUSE_SECONDS, deadline - time.monotonic()))
            if not _reaches_itself(sock):
                return sock
            sock.close()
            reason = "nobody listens there"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() + _PAUSE_SECONDS > deadline:
            raise LinkError(
                f"{name} cannot be reached at {address[0]}:{address[1]}: {reason}; tried for {timeout:g} seconds.",
                "See whether that process runs, and whether this host may connect to it (address, firewall).",
            )
        time.sleep(_PAUSE_SECONDS)


def _reaches_itself(sock: socket.socket) -> bool:
    """Where nobody listens at a port of this host, the system may give that very port to the end that asks for it."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:  # the peer is gone already, which the greeting will tell
        return False


def _greet(link: Link, token: str, hello: Mapping[str, JSON], peer: str, timeout: float) -> None:
    """Say who this is and wait for the answer."""
    try:
        link.send({"token": token, "hello": dict(hello)})
        link.receive_head(_LARGEST_HELLO)
    except LinkSilent:
        raise LinkError(
            f"{peer} took the connection but gave no answer within {timeout:g} seconds.",
            "That process may be frozen or overloaded, or something else listens there.",
        ) from None
    except LinkLost as error:
        raise LinkError(
            f"{peer} refused the connection after the first words.",
            "The token may be that of another run, the peer may just be ending, or something else listens there.",
        ) from error
