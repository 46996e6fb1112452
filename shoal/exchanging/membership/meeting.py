"""Where the replicas of a run meet: a coordinator, and the memory or the servers that hold the weights.

One process opens a `MeetingPlace` and tells the others its `Meeting`; they take a seat there (`seat.py`).
"""

import hashlib
import json
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from shoal.exchanges import ExchangeOptions, Holding
from shoal.exchanging.membership.coordinator import Answer, Coordinator, Event
from shoal.exchanging.servers.process import start_server
from shoal.exchanging.servers.shared_memory import SharedFolder
from shoal.transport.links import LOOPBACK, Address

END_SECONDS = 5.0
"""Time that server processes have to end after the coordinator did, before they are killed."""


@dataclass(frozen=True)
class Meeting:
    """How a replica finds the others. Survives pickling."""

    address: Address
    token: str
    replicas: int
    """How many replicas the run begins with."""
    timeout: float
    """Seconds that a replica waits for the others in lockstep, or for a server, before it gives up."""
    shared: Path | None = None
    """The folder of shared weights, where all replicas are on one host and use it."""
    store: str | None = None
    """The table through which lockstep groups are made. Strangers may read it: the token is never written there."""

    @property
    def name(self) -> str:
        """A name that no other run has, and from which the token cannot be guessed."""
        return hashlib.sha256(self.token.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """For a file of this user's own, or a message: it holds the token."""
        return json.dumps({**asdict(self), "shared": None if self.shared is None else str(self.shared)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote."""
        values = json.loads(text)
        return cls(
            address=tuple(values["address"]),
            token=values["token"],
            replicas=values["replicas"],
            timeout=values["timeout"],
            shared=None if values["shared"] is None else Path(values["shared"]),
            store=values["store"],
        )


class MeetingPlace:
    """Everything that a run needs beside its replicas, from here until `close`.

    `holding`: where the common weights are. `servers_here`: whether server processes are started on this host, whose
    network they then share, and not by replicas, each on its own; unless told, where all are on one host. `answer`,
    `on_event` and `on_error` are the coordinator's.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        replicas: int,
        holding: Holding,
        *,
        host: str,
        store: str | None,
        timeout: float,
        servers_here: bool | None = None,
        answer: Answer | None = None,
        on_event: Callable[[Event], None] = lambda _: None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self.kind, self.servers = holding
        self._shared = SharedFolder.create() if self.kind == "direct" else None
        self._processes: list[subprocess.Popen[bytes]] = []
        here = host == LOOPBACK if servers_here is None else servers_here
        self._on_hosts = self.kind == "processes" and not here
        """Whether replicas start the servers."""
        try:
            self.coordinator = Coordinator(
                heartbeat=options.heartbeat,
                timeout=timeout,
                replicas=replicas,
                servers=self.servers,
                servers_on_hosts=self._on_hosts,
                shared=self._shared,
                registers=options.registers,
                wanted=options.gradients_per_update(replicas),
                host=host,
                welcome={"kind": self.kind, "servers": self.servers},
                answer=answer,
                on_event=on_event,
                on_error=on_error,
            )
        except BaseException:
            self._free()
            raise
        self.meeting = Meeting(
            self.coordinator.address,
            self.coordinator.token,
            replicas,
            timeout,
            None if self._shared is None else self._shared.path,
            store,
        )

    def start_servers(self, on_end: Callable[[int], None] = lambda _: None) -> None:
        """Those that are processes of this host, if any.

        `on_end` hears of each that ends, also before it could make itself known, in a thread of its own.
        """
        if self.kind != "processes" or self._on_hosts:
            return
        for number in range(self.servers):
            process = start_server(self.meeting.address, self.meeting.token, number)
            self._processes.append(process)
            threading.Thread(target=_watch, args=(process, number, on_end), daemon=True).start()

    def close(self) -> None:
        """Leaves no process, thread or memory."""
        try:
            self.coordinator.close()  # servers end when the coordinator does
            deadline = time.monotonic() + END_SECONDS
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in self._processes:
                process.kill()  # does nothing where it has ended
                process.wait()
            self._free()

    def _free(self) -> None:
        if self._shared is not None:
            self._shared.remove()


def _watch(process: "subprocess.Popen[bytes]", number: int, on_end: Callable[[int], None]) -> None:
    process.wait()
    on_end(number)
