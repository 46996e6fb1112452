"""From options and a meeting point to one rank's side of an exchange."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal import exchanges
from shoal.errors import PeerError
from shoal.exchanging.allreduce import Allreduce
from shoal.exchanging.backup import Backup
from shoal.exchanging.base import Exchange
from shoal.exchanging.dasgd import Dasgd
from shoal.exchanging.downpour import Downpour
from shoal.exchanging.meeting import Meeting
from shoal.exchanging.pulse import Pulse
from shoal.exchanging.replica import Replica
from shoal.exchanging.server import LocalShard, RemoteShard, Server, ShardClient, Terms
from shoal.exchanging.shards import Slice, spread
from shoal.exchanging.shared import SharedFolder
from shoal.exchanging.sparse import Selector
from shoal.linking import JSON, Frame, Link, LinkLost, connect, own_address

SHARD_ELEMENTS = 1 << 20
"""In shared memory: weights per shard, unless told otherwise, so that replicas rarely wait for the same one."""
MOST_SHARDS = 16


class Seat:
    """This rank's place in a run: its pulse, and for the first rank of a replica the link to ask on."""

    def __init__(
        self, meeting: Meeting, *, rank: int, replica: int | None, pids: Sequence[int], heartbeat: float
    ) -> None:
        self.meeting, self.rank = meeting, rank
        self.welcome: Mapping[str, Any] = {"replica": replica}
        self._link: Link | None = None
        if rank == 0:
            hello: dict[str, JSON] = {"as": "replica", "replica": replica, "pids": list(pids)}
            self._link = connect(meeting.address, meeting.token, hello, name="the coordinator")
            self.welcome = self._link.receive().head
        self._heartbeat = heartbeat
        self._living: tuple[Link, Pulse] | None = None

    def live(self, replica: int) -> None:
        """Begin to give signs of life as a rank of `replica`."""
        hello: dict[str, JSON] = {"as": "pulse", "replica": replica, "rank": self.rank}
        link = connect(self.meeting.address, self.meeting.token, hello, name="the coordinator")
        self._living = link, Pulse(link, self._heartbeat)

    def ask(self, head: Mapping[str, Any], buffers: Sequence[Any] = ()) -> Frame:
        """The coordinator's answer; only the first rank of a replica asks."""
        self.send(head, buffers)
        return self.hear()

    def send(self, head: Mapping[str, Any], buffers: Sequence[Any] = ()) -> None:
        """Ask, and hear the answer later."""
        self._asking().send(head, buffers)

    def hear(self) -> Frame:
        """The answer to what was asked first."""
        return self._asking().receive()

    def _asking(self) -> Link:
        if self._link is None:
            raise ValueError("only the first rank of a replica asks")
        return self._link

    def leave(self) -> None:
        """Say goodbye and close the links."""
        if self._link is not None:
            with suppress(LinkLost):
                self.ask({"ask": "leave"})
            self._link.close()
        if self._living is not None:
            link, pulse = self._living
            with suppress(LinkLost):
                link.send({"bye": True})
            link.close()
            pulse.stop()

    def hang_up(self) -> None:
        """Close the links without a word, if `leave` has not yet: the coordinator takes it for a loss."""
        if self._link is not None:
            self._link.close()
        if self._living is not None:
            link, pulse = self._living
            link.close()
            pulse.stop()


def join(options: exchanges.ExchangeOptions, replica: Replica, seat: Seat, number: int) -> Exchange:
    """This rank's side of the exchange. All ranks of the replica call it."""
    meeting = seat.meeting
    if isinstance(options, exchanges.Allreduce):
        group = _group(meeting, seat.rank, number) if meeting.replicas > 1 else None
        return Allreduce(replica, group, number=number, replicas=meeting.replicas, bucket_bytes=options.bucket_bytes)
    if isinstance(options, exchanges.Downpour) and options.server_rule == "add":  # any optimizer will do
        momentum, weight_decay = 0.0, 0.0
    else:
        settings = replica.settings()
        momentum, weight_decay = settings["momentum"], settings["weight_decay"]
    if isinstance(options, exchanges.Backup):
        terms = {"rule": "sgd", "momentum": momentum, "weight_decay": weight_decay}
        terms["wanted"] = options.parts_of_batch(meeting.replicas)
        shards = _shards(options, replica, seat, number, terms)
        ask = (lambda head: seat.ask(head).head) if seat.rank == 0 else None
        return Backup(replica, shards, ask=ask, server_momentum=momentum)
    if isinstance(options, exchanges.Downpour):
        rule = options.server_rule
        at_server = momentum if rule == "sgd" else 0.0
        terms = {"rule": rule, "momentum": at_server, "weight_decay": 0.0 if rule == "add" else weight_decay}
        shards = _shards(options, replica, seat, number, terms | _limits(options))
        return Downpour(
            replica,
            shards,
            rule=rule,
            server_momentum=at_server,
            push_every=options.push_every,
            fetch_every=options.fetch_every,
            turn=number,
        )
    if isinstance(options, exchanges.Dasgd):
        return _dasgd(options, replica, seat, number, momentum, weight_decay)
    raise TypeError(f"no exchange for {type(options).__name__}")


def _limits(options: exchanges.Served) -> dict[str, Any]:
    return {"max_staleness": options.max_staleness}


def _dasgd(
    options: exchanges.Dasgd, replica: Replica, seat: Seat, number: int, momentum: float, weight_decay: float
) -> Dasgd:
    selector = None
    if options.sparse != "none":
        selector = Selector(
            kind=options.sparse, density=options.density, threshold=options.threshold, residual=options.residual
        )
    at_worker = options.momentum_at == "worker"
    # Over several steps the replica's own optimizer has momentum and weight decay: it pushes how far it came.
    adds = at_worker and options.push_every > 1
    own_decay = weight_decay if (selector is not None or at_worker) and not adds else 0.0
    at_server = 0.0 if at_worker else momentum
    on_cpu = all(weight.device.type == "cpu" for weight in replica.weights)
    sparse_back = selector is not None and on_cpu and seat.meeting.shared is None
    back = "sampled" if options.sparse == "threshold" else options.sparse  # a gradient's threshold is none for weights
    rule = "add" if adds else "sgd"
    terms = {
        "rule": rule,
        "momentum": at_server,
        "weight_decay": 0.0 if adds else weight_decay - own_decay,
        "decay": options.decay,
        "decay_base": options.decay_base,
        "back": {"kind": back, "density": options.share_back} if sparse_back else None,
    }
    return Dasgd(
        replica,
        _shards(options, replica, seat, number, terms | _limits(options)),
        rule=rule,
        server_momentum=at_server,
        push_every=options.push_every,
        fetch_every=options.fetch_every,
        turn=number,
        selector=selector,
        own_momentum=momentum if at_worker and not adds else 0.0,
        own_decay=own_decay,
        sparse_back=sparse_back,
    )


def _shards(
    options: exchanges.ExchangeOptions, replica: Replica, seat: Seat, number: int, terms: Mapping[str, Any]
) -> list[tuple[Sequence[Slice], ShardClient]]:
    """The shards of what this rank speaks for: in shared memory, or one on each server."""
    kinds = {name: weight.dtype for name, weight in zip(replica.names, replica.weights, strict=True)}
    folder, timeout = seat.meeting.shared, seat.meeting.timeout
    if folder is not None:
        wanted = options.shards if isinstance(options, exchanges.Served) else None
        count = wanted or min(MOST_SHARDS, max(1, sum(replica.sizes.values()) // SHARD_ELEMENTS))
        layout = spread(replica.sizes, count)
        policy = Terms(sizes=(), dtypes=(), **terms).policy()
        shards = SharedFolder(folder).shards(seat.rank, layout, kinds, policy, number)
        held = [slices for slices in layout if slices]
        return [(slices, LocalShard(shard, timeout)) for slices, shard in zip(held, shards, strict=True)]
    servers = seat.ask({"ask": "servers"}).head["servers"] if seat.rank == 0 else None
    servers = next(found for found in replica.transport.gather_objects(servers) if found is not None)
    found: list[tuple[Sequence[Slice], ShardClient]] = []
    for which, (((host, port), token), slices) in enumerate(
        zip(servers, spread(replica.sizes, len(servers)), strict=True)
    ):
        if slices:
            own = Terms([one.size for one in slices], [str(kinds[one.name])[6:] for one in slices], **terms)
            shard = RemoteShard((host, port), token, f"{seat.rank}", own, name=f"server {which}", timeout=timeout)
            found.append((slices, shard))
    return found


def _group(meeting: Meeting, column: int, number: int) -> Any:
    """The ranks that hold the same shards in all replicas, as a process group of their own."""
    if meeting.store is None:
        raise PeerError("replicas in lockstep have no table to meet at.", "This is a bug: please report it.")
    host, port = meeting.store
    patience = timedelta(seconds=meeting.timeout)
    table = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)  # type: ignore[attr-defined]
    own = dist.PrefixStore(f"{meeting.token}/{column}", table)  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(own, number, meeting.replicas, patience)


def serve_in_threads(seat: Seat, number: int, count: int) -> Server | None:
    """With servers as threads of replicas: replica `number`'s own, which it announces; None beyond the wanted count."""
    if number >= count or seat.rank != 0:
        return None
    server = Server(host=own_address(seat.meeting.address[0]))
    seat.ask({"ask": "serve", "number": number, "address": list(server.address), "token": server.token})
    return server
