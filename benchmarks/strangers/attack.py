"""What a stranger may try at a port: bytes that are no frame, a wrong token, words that take for ever, a crowd.

    python -m benchmarks.strangers.attack --crowd 2000 --seconds 12 HOST:PORT ...

Prints, as JSON, how many of its connections each port took and every byte that a port answered. Knows nothing of Shoal
but how a frame looks, and loads no torch.
"""

import argparse
import json
import os
import resource
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

Address = tuple[str, int]
CONNECT_SECONDS = 1.0
"""A port that hears nobody says nothing at all."""
SLOW = 20
TRICKLE_SECONDS = 0.5
"""From one byte to the next."""
SPARE_FILES = 200


def frame(head: bytes, *, size: int | None = None, buffers: Sequence[int] = ()) -> bytes:
    """A frame as links send it; `size` is what it says of its head's length, if that is not the truth."""
    prefix = struct.pack("!4sII", b"SHL1", len(head) if size is None else size, len(buffers))
    return prefix + struct.pack(f"!{len(buffers)}Q", *buffers) + head


WRONG_TOKEN = frame(b'{"token":"00000000000000000000000000000000","hello":{"as":"replica","replica":null,"pids":[1]}}')
WORDS = [
    b"GET / HTTP/1.1\r\n\r\n",
    os.urandom(4096),
    b"\0" * 4096,
    b"\xff" * 64,
    frame(b"", size=(1 << 32) - 1),
    frame(b"{}", size=1 << 20),
    frame(b"[" * 60_000),
    frame(b'{"token":null,"hello":{}}'),
    frame(b'{"token":"","hello":[]}'),
    frame(b"{}", buffers=[1 << 62] * 100),
    b"\x01" + struct.pack("<Q", 5) + b"shoal",  # torch's store: what is kept under this name?
    b"\x00" + struct.pack("<I", 0x3C85F7CE),  # torch's store: am I one of yours?
    WRONG_TOKEN,
]


@dataclass
class Seen:
    """What one port did."""

    took: int = 0
    """Connections that it took."""
    left: int = 0
    """How many of them it kept to the end."""
    answered: bytes = b""


def attack(address: Address, *, crowd: int, seconds: float) -> Seen:
    """All of it at one port. The slow ones and the crowd stay for `seconds`, which should exceed the handshake's."""
    seen = Seen()
    with ExitStack() as stack:
        talking = _crowd(address, len(WORDS), stack)
        for sock, words in zip(talking, WORDS, strict=False):
            _say(sock, words)
        slow, many = _crowd(address, SLOW, stack), _crowd(address, crowd, stack)
        seen.took = len(talking) + len(slow) + len(many)
        _trickle(slow, WRONG_TOKEN, seconds)
        for sock in (*talking, *slow, *many):
            seen.left += _still_there(sock, seen)
    return seen


def _say(sock: socket.socket, words: bytes) -> None:
    with suppress(OSError):  # hung up, as it should be
        sock.send(words)


def _crowd(address: Address, count: int, stack: ExitStack) -> list[socket.socket]:
    """As many connections as that, all at once; those that were taken."""
    asking = []
    for _ in range(count):
        sock = stack.enter_context(socket.socket())
        sock.setblocking(False)
        sock.connect_ex(address)
        asking.append(sock)
    time.sleep(CONNECT_SECONDS)
    return [sock for sock in asking if _reached(sock)]


def _reached(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _trickle(slow: list[socket.socket], words: bytes, seconds: float) -> None:
    """A byte now and then on each."""
    deadline = time.monotonic() + seconds
    position = 0
    while time.monotonic() < deadline:
        for sock in slow:
            _say(sock, words[position % len(words) :][:1])
        position += 1
        time.sleep(TRICKLE_SECONDS)


def _still_there(sock: socket.socket, seen: Seen) -> bool:
    """Whether the port keeps this connection; what it said counts as answered."""
    try:
        while more := sock.recv(4096):
            seen.answered += more
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def room_for(crowd: int) -> int:
    """How many connections this process may hold: `crowd`, if the system lets it raise its limit so far."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = crowd + SPARE_FILES
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(crowd, soft - SPARE_FILES)


def main() -> None:
    """For other hosts: attack what is named, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crowd", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("addresses", nargs="*")
    args = parser.parse_args()
    crowd = room_for(args.crowd)
    found = {}
    for address in args.addresses:
        host, _, port = address.rpartition(":")
        seen = asdict(attack((host, int(port)), crowd=crowd, seconds=args.seconds))
        found[address] = {**seen, "answered": seen["answered"].hex()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
