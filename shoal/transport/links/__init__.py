"""Links: connections between processes that come and go, such as a server and workers that may die or join late.

Plain TCP sockets, not a Gloo group of two:

- the end of a peer is seen at once, also in the middle of a large transfer, because the system closes its sockets; Gloo
  tells a sender only at its time-out, unless a thread per link watches;
- a link is made at any time, by one side that knocks at the other's door;
- a time-out does not destroy it: who was silent may speak again;
- nothing that comes from the network is unpickled: a head is JSON, a buffer is bytes.

A process that was stopped (not ended) keeps its sockets: only a time-out, or the heartbeats it misses, tell.

`link.py` is one connection, `door.py` where links are made, `crowd.py` hears many of them, `fields.py` checks what a
peer says, `sockets.py` is what the system is told of them. POSIX only.
"""

from shoal.transport.links.crowd import Crowd, Guest
from shoal.transport.links.door import LOOPBACK, Address, Door, connect, own_address, tell_of_nonsense
from shoal.transport.links.link import (
    GIVE_UP_SECONDS,
    JSON,
    Frame,
    Head,
    Link,
    LinkError,
    LinkLost,
    LinkRefused,
    LinkSilent,
)

__all__ = [
    "Link",
    "Frame",
    "Head",
    "JSON",
    "Address",
    "LOOPBACK",
    "GIVE_UP_SECONDS",
    "Crowd",
    "Guest",
    "Door",
    "connect",
    "own_address",
    "tell_of_nonsense",
    "LinkError",
    "LinkLost",
    "LinkRefused",
    "LinkSilent",
]
