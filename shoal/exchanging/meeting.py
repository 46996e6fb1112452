"""Where the replicas of a run meet: a coordinator, and the memory or the servers that hold the weights.

One process opens a `MeetingPlace` and tells the others its `Meeting`; they take a seat there (`joining.py`).
"""

import json
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from shoal import exchanges
from shoal.errors import ConfigError
from shoal.exchanging.coordinator import Answer, Coordinator, Event
from shoal.exchanging.serve import start_server
from shoal.exchanging.shared import SharedFolder
from shoal.linking import Address

END_SECONDS = 5.0
"""From the end of the coordinator to that of all servers' processes, which are killed if they take longer."""


@dataclass(frozen=True)
class Meeting:
    """How a replica finds the others. Survives pickling."""

    address: Address
    token: str
    replicas: int
    """How many there were to be at the beginning."""
    timeout: float
    """Seconds that a replica waits for the others in lockstep, or for a server, before it gives up."""
    shared: Path | None = None
    """The folder of shared weights, where all replicas are on one host and use it."""
    store: tuple[str, int] | None = None
    """The table through which lockstep groups are made."""

    def to_json(self) -> str:
        """For a file or a table. It holds the token."""
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
            store=None if values["store"] is None else tuple(values["store"]),
        )


def server_count(
    options: exchanges.ExchangeOptions, replicas: int, *, one_host: bool, weight_bytes: int
) -> tuple[str, int]:
    """Where the weights are held (`none`, `direct`, `processes`, `threads`) and by how many servers.

    `direct` needs room in shared memory for the weights and what the rule remembers; containers often have little.
    """
    if isinstance(options, exchanges.Backup):
        return "processes", 1
    if not isinstance(options, exchanges.Served):
        return "none", 0
    needed, room = 2 * weight_bytes, SharedFolder.room()
    kind = options.servers
    if kind == "auto":
        kind = "direct" if one_host and needed < room else "processes"
    if kind == "direct" and not one_host:
        raise ConfigError(
            "servers = 'direct' shares memory, but the replicas are on several hosts.",
            "Give servers=processes or servers=threads.",
        )
    if kind == "direct" and needed >= room:
        raise ConfigError(
            f"servers = 'direct' needs {needed >> 20} MiB of shared memory, of which {room >> 20} MiB are free.",
            "Give servers=processes, or the system more (docker run --shm-size).",
        )
    if kind == "direct":
        return "direct", 0
    return kind, options.shards or (replicas if kind == "threads" else 1)


class MeetingPlace:
    """Everything that a run needs beside its replicas, from here until `close`.

    `held`: what `server_count` said. `answer`, `on_event` and `on_error` are the coordinator's.
    """

    def __init__(
        self,
        options: exchanges.ExchangeOptions,
        replicas: int,
        held: tuple[str, int],
        *,
        host: str,
        store: tuple[str, int] | None,
        timeout: float,
        answer: Answer | None = None,
        on_event: Callable[[Event], None] = lambda _: None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self.kind, self.servers = held
        self._shared = SharedFolder.create() if self.kind == "direct" else None
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self.coordinator = Coordinator(
                heartbeat=options.heartbeat,
                replicas=replicas,
                servers=self.servers,
                shared=self._shared,
                wanted=options.parts_of_batch(replicas) if isinstance(options, exchanges.Backup) else 0,
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
        """Those that are processes, if any. `on_end` hears of each that ends, also before it could make itself known.

        It is called in a thread of its own.
        """
        if self.kind != "processes":
            return
        for number in range(self.servers):
            process = start_server(self.meeting.address, self.meeting.token, number)
            self._processes.append(process)
            threading.Thread(target=_watch, args=(process, number, on_end), daemon=True).start()

    def close(self) -> None:
        """Leaves no process, thread or memory."""
        try:
            self.coordinator.close()  # its end is the servers' too
            deadline = time.monotonic() + END_SECONDS
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in self._processes:
                process.kill()  # nothing, to one that has ended
                process.wait()
            self._free()

    def _free(self) -> None:
        if self._shared is not None:
            self._shared.remove()


def _watch(process: "subprocess.Popen[bytes]", number: int, on_end: Callable[[int], None]) -> None:
    process.wait()
    on_end(number)
