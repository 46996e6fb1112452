"""The shards of the common weights as one rank of a replica reaches them: in shared memory, or on servers."""

import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from shoal.exchanging.membership.meeting import Meeting
from shoal.exchanging.membership.seat import Seat
from shoal.exchanging.replica import Replica
from shoal.exchanging.servers.process import start_server
from shoal.exchanging.servers.server import CONSENSUS, LocalShard, RemoteShard, Server, ShardClient, Terms
from shoal.exchanging.servers.shared_memory import SharedFolder
from shoal.exchanging.servers.slices import Slice, cut_over
from shoal.transport.agreement import agree
from shoal.transport.links import JSON, LinkError, connect, own_address

SHARD_ELEMENTS = 1 << 20
"""In shared memory: weights per shard, unless told otherwise, so that replicas rarely wait for the same one."""
MOST_SHARDS = 16
TELL_SECONDS = 5.0
"""Time in which the coordinator is told that a server has ended, unless it has ended itself."""


def reach_shards(
    replica: Replica, seat: Seat, number: int, terms: Mapping[str, Any], shards: int | None = None
) -> list[tuple[Sequence[Slice], ShardClient]]:
    """The shards of what this rank speaks for: in shared memory, or one on each server.

    `number`: this replica's; `terms`: fields of `Terms`, what shards do; `shards`: how many, in shared memory.
    """
    if seat.world is not None:
        return seat.world.shards(replica, number, terms)
    kinds = {name: weight.dtype for name, weight in zip(replica.names, replica.weights, strict=True)}
    folder, timeout = seat.meeting.shared, seat.meeting.timeout
    if folder is not None:
        count = shards or min(MOST_SHARDS, max(1, sum(replica.sizes.values()) // SHARD_ELEMENTS))
        layout = cut_over(replica.sizes, count)
        policy = Terms(sizes=(), dtypes=(), **terms).policy()
        shared = SharedFolder(folder)
        if terms["rule"] == CONSENSUS:
            mapped = shared.consensus(seat.rank, layout, kinds, policy, number)
        else:
            mapped = shared.shards(seat.rank, layout, kinds, policy)
        filled = [slices for slices in layout if slices]
        return [(slices, LocalShard(shard, timeout)) for slices, shard in zip(filled, mapped, strict=True)]
    servers = agree(replica.transport, lambda: _servers(seat) if seat.rank == 0 else None)
    servers = next(told for told in replica.transport.gather_objects(servers) if told is not None)
    reached: list[tuple[Sequence[Slice], ShardClient]] = []
    for which, (((host, port), token), slices) in enumerate(
        zip(servers, cut_over(replica.sizes, len(servers)), strict=True)
    ):
        if slices:
            own = Terms([part.size for part in slices], [str(kinds[part.name])[6:] for part in slices], **terms)
            shard = RemoteShard(
                (host, port), token, f"{seat.rank}", own, replica=number, name=f"server {which}", timeout=timeout
            )
            reached.append((slices, shard))
    return reached


def _servers(seat: Seat) -> list[Any]:
    """Addresses and tokens of all servers. Those that are to be on this replica's host it starts.

    They end with the coordinator, not with this process: others need them.
    """
    while True:
        told = seat.ask({"ask": "servers"}).head
        if "start" not in told:
            return list(told["servers"])
        for number in told["start"]:
            process = start_server(seat.meeting.address, seat.meeting.token, number)
            threading.Thread(target=_watch, args=(process, seat.meeting, number), daemon=True).start()


def _watch(process: "subprocess.Popen[bytes]", meeting: Meeting, number: int) -> None:
    """Tell the coordinator when a server has ended, perhaps before it could make itself known."""
    process.wait()
    hello: dict[str, JSON] = {"as": "end of server", "number": number}
    with suppress(LinkError):  # it ends with the coordinator
        connect(meeting.address, meeting.token, hello, name="the coordinator", timeout=TELL_SECONDS).close()


def serve_in_threads(seat: Seat, number: int, count: int) -> Server | None:
    """With servers as threads of replicas: replica `number`'s own, which it announces; None beyond the wanted count."""
    if number >= count or seat.rank != 0:
        return None
    server = Server(host=own_address(seat.meeting.address[0]))
    server.patience = seat.meeting.timeout
    seat.ask({"ask": "serve", "number": number, "address": list(server.address), "token": server.token})
    return server
