"""Where links are made: one process keeps a door, others knock at its address with its token.

Promise   a handler sees only callers that know the token; whoever else connects is hung up on without a word.
Cost      one thread that lets callers in, and one per caller let in; a link costs one round trip to make.
Failure   strangers, who have not shown the token, cost no thread, at most `MOST_STRANGERS` files, and little memory:
          each has `HANDSHAKE_SECONDS` for everything that it has to say, however slowly it says it, and where there
          are too many, the address that has most of them loses its oldest one.

The token keeps strangers out; it travels in the clear, so it does not protect on a network that others listen to.
"""

import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeAlias

from shoal.errors import ConfigError
from shoal.transport.links.link import JSON, PREFIX_BYTES, Link, LinkError, LinkLost, LinkSilent, announced, understood
from shoal.transport.links.sockets import keep_from_children

LOOPBACK = "127.0.0.1"
HANDSHAKE_SECONDS = 5.0
"""Time that a caller has to say who it is, from the first byte to the last."""
MOST_STRANGERS = 64
"""Most callers at a time that have not yet said who they are."""
CONNECT_SECONDS = 30.0
"""Time that a peer has to open its door: a process that loads torch on a busy host takes a while."""
BACKLOG = 1024
"""Connections that the system queues for us; fewer where its limit is lower."""
CLOSE_SECONDS = 5.0
"""Time that handlers have to end after their links were closed."""

_LARGEST_HELLO = 64 << 10
"""Most bytes that are read from a caller that has not shown the token yet."""
_PAUSE_SECONDS = 0.05
"""Between two tries."""
_TRIES = 3
"""Tries of a caller that is hung up on: among many strangers it may have been taken for one of them."""

_log = logging.getLogger(__name__)

Address: TypeAlias = tuple[str, int]
Handler: TypeAlias = Callable[[Link, dict[str, Any]], bool | None]
OnError: TypeAlias = Callable[[Link, dict[str, Any], Exception], None]


class Door:
    """Listens at an address of this host and gives every caller that knows the token a thread of its own.

    That thread runs `handler(link, hello)` with what the caller said of itself; when it returns, the link is closed,
    unless it returns True: then somebody else hears it, and it is closed with the door.
    The link has no time-out and the caller's address as its name: the handler may set both. A handler that raises
    `LinkLost` ended as usual; with any other `LinkError`, such as a `LinkRefused`, its caller's nonsense ended that
    link, which is logged; any other exception goes to `on_error(link, hello, error)`, in the same thread.
    """

    def __init__(self, handler: Handler, *, on_error: OnError, host: str = LOOPBACK, port: int = 0) -> None:
        """Listen at `port` of `host`, an address of this host; port 0 lets the system choose. Else a `ConfigError`."""
        self.token = secrets.token_hex(16)
        """What a caller must know."""
        self._handler = handler
        self._on_error = on_error
        self._socket = listening(host, port)
        name, number = self._socket.getsockname()[:2]
        self.address: Address = (name, number)
        """Host and port where it listens; of no use to others where host is 0.0.0.0: see `own_address`."""
        self._guests: dict[threading.Thread, Link] = {}
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        """Of all guests, also of those who have left: such a thread lives for a moment longer."""
        self._kept: weakref.WeakSet[Link] = weakref.WeakSet()
        """Links whose handler returned True: somebody else receives from them."""
        self._changing = threading.Lock()
        self._closed = False
        self._socket.setblocking(False)
        self._wakes, self._wake = socket.socketpair()
        for sock in (self._wakes, self._wake):
            keep_from_children(sock)
        self._porter = threading.Thread(target=self._let_in, name=f"shoal-door-{number}", daemon=True)
        self._porter.start()

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Let nobody in any more, close all links that came through, and wait for their threads.

        False if some handler had not ended after `seconds`; it is left behind as a daemon. Any thread may call it, also
        a handler, which is not waited for.
        """
        with self._changing:
            self._closed = True
            links, threads = [*self._guests.values(), *self._kept], list(self._threads)
        with suppress(OSError):  # closed before
            self._wake.send(b"!")
        for link in links:
            link.close()
        deadline = time.monotonic() + seconds
        others = [thread for thread in (self._porter, *threads) if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self._porter.is_alive():
            self._wakes.close()
            self._wake.close()
        return not any(thread.is_alive() for thread in others)

    def __enter__(self) -> "Door":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _let_in(self) -> None:
        """The life of the thread that listens: it hears strangers until they have said who they are."""
        with selectors.DefaultSelector() as selector, self._socket:
            strangers = _Strangers(selector)
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            while not self._closed:
                ready = [key.data for key, _ in selector.select(strangers.patience()) if key.data is not None]
                for stranger in ready:
                    self._hear(strangers, stranger)
                strangers.drop_late()
                self._accept(strangers)
            strangers.drop_all()

    def _accept(self, strangers: "_Strangers") -> None:
        """One caller, if one is there: those who speak already are heard in between."""
        try:
            sock, caller = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:  # it hung up at once; or no file is free: others may still come
            strangers.drop_oldest()
            time.sleep(_PAUSE_SECONDS)
            return
        self._hear(strangers, strangers.add(sock, caller))

    def _hear(self, strangers: "_Strangers", stranger: "_Stranger") -> None:
        head = stranger.hear()
        if head is None:
            if stranger.over:
                strangers.drop(stranger)
            return
        strangers.forget(stranger)
        token, hello = head.get("token"), head.get("hello")
        known = isinstance(token, str) and hmac.compare_digest(
            token.encode(errors="surrogatepass"), self.token.encode()
        )
        try:
            if known and isinstance(hello, dict):
                self._welcome(stranger, hello)
            else:
                stranger.sock.close()
        except (OSError, LinkError, RuntimeError):  # it hung up already; or no thread can be started
            stranger.sock.close()

    def _welcome(self, stranger: "_Stranger", hello: dict[str, Any]) -> None:
        link = Link(stranger.sock, stranger.name, HANDSHAKE_SECONDS)
        thread = threading.Thread(
            target=self._attend, args=(link, hello), name=f"shoal-link-{stranger.name}", daemon=True
        )
        with self._changing:
            if self._closed:
                link.close()
                return
            thread.start()
            self._guests[thread] = link
            self._threads.add(thread)

    def _attend(self, link: Link, hello: dict[str, Any]) -> None:
        """The life of a caller's thread."""
        kept = False
        try:
            link.send({"welcome": True})
            link.timeout = None
            kept = self._handle(link, hello)
        except LinkError:  # it was gone before it was let in
            return
        finally:
            with self._changing:
                self._guests.pop(threading.current_thread(), None)
                kept = kept and not self._closed
                if kept:
                    self._kept.add(link)
            if not kept:
                link.close()

    def _handle(self, link: Link, hello: dict[str, Any]) -> bool:
        """Run the handler; whether somebody else receives from the link from now on."""
        try:
            return bool(self._handler(link, hello))
        except LinkLost:
            return False
        except LinkError as error:
            tell_of_nonsense(link, error)
        except Exception as error:
            self._on_error(link, hello, error)
        return False


def tell_of_nonsense(link: Link, error: LinkError) -> None:
    """Log that a peer's link was ended because what it sent was malformed."""
    _log.warning("the link to %s was ended: %s", link.name, error.problem)


class _HungUpError(LinkError):
    """The peer closed the connection instead of an answer."""


class _Stranger:
    """A caller that has not said who it is, and what it has said so far."""

    def __init__(self, sock: socket.socket, caller: tuple[Any, ...]) -> None:
        self.sock, self.host = sock, str(caller[0])
        self.name = f"{caller[0]}:{caller[1]}"
        self.deadline = time.monotonic() + HANDSHAKE_SECONDS
        self.over = False
        """Whether it hung up, or did not begin as a caller of ours does."""
        self._said = bytearray()
        self._wanted = PREFIX_BYTES
        sock.setblocking(False)
        keep_from_children(sock)

    def hear(self) -> dict[str, Any] | None:
        """The head of its first frame once all of it is there, and not a byte beyond it."""
        try:
            while more := self.sock.recv(self._wanted - len(self._said)):
                self._said += more
                if len(self._said) == PREFIX_BYTES:
                    size, buffers = announced(self._said, _LARGEST_HELLO) or (0, 0)
                    if not size or buffers:
                        break
                    self._wanted += size
                elif len(self._said) == self._wanted:
                    head = understood(self._said[PREFIX_BYTES:])
                    self.over = head is None
                    return head
        except BlockingIOError:
            return None
        except OSError:
            pass
        self.over = True
        return None


class _Strangers:
    """Those who knocked and have not said who they are, oldest first, which are few at any time."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._waiting: dict[_Stranger, None] = {}

    def patience(self) -> float | None:
        """Seconds until the time of the oldest stranger is over."""
        oldest = next(iter(self._waiting), None)
        return None if oldest is None else max(0.0, oldest.deadline - time.monotonic())

    def add(self, sock: socket.socket, caller: tuple[Any, ...]) -> _Stranger:
        """Add one; if there are too many then, remove the oldest of the address that has most."""
        stranger = _Stranger(sock, caller)
        self._selector.register(sock, selectors.EVENT_READ, stranger)
        self._waiting[stranger] = None
        if len(self._waiting) > MOST_STRANGERS:
            self.drop_oldest()
        return stranger

    def forget(self, stranger: _Stranger) -> None:
        """Remove one that is no stranger any more."""
        self._selector.unregister(stranger.sock)
        self._waiting.pop(stranger)

    def drop(self, stranger: _Stranger) -> None:
        """Hang up."""
        self.forget(stranger)
        stranger.sock.close()

    def drop_oldest(self) -> None:
        """Hang up on the oldest of the address from which most came."""
        if self._waiting:
            busiest = Counter(stranger.host for stranger in self._waiting).most_common(1)[0][0]
            self.drop(next(stranger for stranger in self._waiting if stranger.host == busiest))

    def drop_late(self) -> None:
        """Remove those whose time is over."""
        now = time.monotonic()
        for stranger in [stranger for stranger in self._waiting if stranger.deadline <= now]:
            self.drop(stranger)

    def drop_all(self) -> None:
        """Hang up on all of them: the door closes."""
        for stranger in list(self._waiting):
            self.drop(stranger)


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
    starting. A peer that cannot be reached or gives no answer within `timeout` seconds is a `LinkError`, as is, after
    three tries, one that hangs up because the token is not its.
    """
    deadline = time.monotonic() + timeout
    for left in reversed(range(_TRIES)):
        sock = _reached(address, name, max(_PAUSE_SECONDS, deadline - time.monotonic()), timeout)
        link = Link(sock, name, max(_PAUSE_SECONDS, deadline - time.monotonic()))
        try:
            _greet(link, token, hello or {}, f"{name} at {address[0]}:{address[1]}", timeout)
            link.timeout = None
        except _HungUpError:
            link.close()
            if not left or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)
        except BaseException:
            link.close()
            raise
        else:
            return link
    raise AssertionError("the last try returns or raises")


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


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this host; a `ConfigError` where it cannot. Children do not inherit it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}: {getattr(error, 'strerror', None) or error}.",
            "Give an address of this host, and a port that is free; 0 lets the system choose one.",
        ) from None
    keep_from_children(sock)
    return sock


def _reached(address: Address, name: str, left: float, timeout: float) -> socket.socket:
    """A socket connected to `address`, tried for until the `left` of `timeout` seconds are over."""
    deadline = time.monotonic() + left
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
        raise _HungUpError(
            f"{peer} refused the connection after the first words.",
            "The token may be that of another run, the peer may just be ending, or something else listens there.",
        ) from error
