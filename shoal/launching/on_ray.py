"""Processes on a Ray cluster: a place as `place.py` has it.

Actors      one for each rank. It starts the rank as a process of its own on its node, exactly as it would be started
            here (`process.py`), so that the work is done in a main thread and signals mean the same; and it passes on
            what the rank says. It needs its rank's cores, and on CUDA one GPU, which is all that the rank sees.
Placement   one placement group for each gang: packed on as few nodes as possible, and the gangs of replicas spread over
            the nodes, each on one where few others are (`node_for`).
Threads     one in this process for each gang. All calls of Ray are made there: a signal's handler, which may interrupt
            anything, only leaves an order for it.
Failure     an actor or a node that is gone is a process that died. No actor and no placement group outlives the place.
"""

import logging
import multiprocessing as mp
import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

from shoal.errors import ConfigError, NoPlaceError
from shoal.launching.failure import Failure
from shoal.launching.place import Gang, Table
from shoal.launching.process import OnStage, Process, environment, environment_of, start
from shoal.launching.world import World
from shoal.machine import interface_at

PASSED_ON = ("SHOAL_", "GLOO_", "NCCL_", "TORCH_")
"""How the variables of this process begin that ranks find on every node."""
ANSWER_SECONDS = 10.0
"""Time that a cluster has to take a connection."""
HEAR_SECONDS = 1.0
"""Most time that an actor waits for a word of its rank before it answers that there is none."""
TOGETHER_SECONDS = 0.05
"""Words that come within this time are passed on together, and orders are carried out."""
PREFER_SECONDS = 5.0
"""Time that a preferred node has to take a gang, before it goes wherever Ray has room."""
LOOK_SECONDS = 0.5
"""Time between two looks whether there is room for more."""
SETTLE_SECONDS = 2.0
"""Time that further places have, once one is there, to come with the same node."""
TELL_SECONDS = 1.0
"""Between two words on how many ranks have a place."""
PLACED = "have a place on the Ray cluster"

Order = Literal["terminate", "kill", "goodbye"]


@contextmanager
def on_ray(on_stage: OnStage = lambda *_: None) -> Iterator["RayPlace"]:
    """The Ray cluster that this process belongs to, or is told of by RAY_ADDRESS; else one that is made of this host.

    `on_stage` hears how many ranks have a place. A `ConfigError` where Ray is not installed or cannot be reached.
    """
    connected_here = _connect()
    try:
        place = RayPlace(on_stage)
        try:
            yield place
        finally:
            place.close()
    finally:
        if connected_here:
            _ray().shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "on = 'ray' needs the package ray, which is not installed.",
            "pip install 'shoal-train[ray]', or leave --on out: workers are then started on this host.",
        ) from None
    return ray


def _connect() -> bool:
    """Whether this process was not connected before."""
    ray = _ray()
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://") or (ray.is_initialized() and ray.util.client.ray.is_connected()):
        raise ConfigError(
            f"RAY_ADDRESS = {address!r} is a Ray client, and the process that conducts a run must be on a node.",
            "Run the command on the cluster: ray job submit -- shoal train --on ray ...",
        )
    if ray.is_initialized():
        return False
    _check_answers(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Shoal tells nobody that it runs
    with _signals_kept():
        try:
            ray.init(address="auto", logging_level=logging.WARNING)
        except ConnectionError:
            if address:
                raise _no_answer(address) from None
            ray.init(include_dashboard=False, logging_level=logging.WARNING)
    return True


def _check_answers(address: str) -> None:
    """Refuse at once an address at which nobody listens: Ray itself tries for minutes."""
    from shoal.transport.links.sockets import somebody_listens

    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and not somebody_listens(host, int(port), ANSWER_SECONDS):
        raise _no_answer(address)


def _no_answer(address: str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster answers at RAY_ADDRESS = {address!r}.",
        "Start one there with: ray start --head, or unset RAY_ADDRESS to use a cluster of this host.",
    )


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray sets a handler for SIGTERM, which in this process asks for an end in good order."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def node_for(room: Mapping[str, int], taken: Sequence[Sequence[str]], ranks: int) -> str | None:
    """The node for a gang of so many `ranks` on which fewest other gangs are; None where it fits whole on none.

    `room`: ranks that each node could take if it were empty. `taken`: for every other gang, the nodes of its ranks.

    >>> node_for({"a": 4, "b": 4}, [["a", "a"]], 2)
    'b'
    """
    ranks_on = Counter(node for nodes in taken for node in nodes)
    gangs_on = Counter(node for nodes in taken for node in set(nodes))
    fitting = [node for node in room if room[node] - ranks_on[node] >= ranks]
    return min(fitting, key=lambda node: (gangs_on[node], ranks_on[node], node), default=None)


def worlds_on(gang: Gang, nodes: Sequence[str]) -> list[World]:
    """Who the processes of a gang are, whose ranks are on these nodes."""
    sizes = Counter(nodes)
    seen: Counter[str] = Counter()
    worlds = []
    for number, node in zip(gang.numbers, nodes, strict=True):
        # Of the GPUs of its node an actor sees its own alone, as the first.
        local_rank = 0 if gang.device == "cuda" else seen[node]
        worlds.append(gang.world(number, local_rank, sizes[node]))
        seen[node] += 1
    return worlds


class RayPlace:
    """Processes as actors of the cluster that this process is connected to, until `close`."""

    one_host = False

    def __init__(self, on_stage: OnStage) -> None:
        self.address: str = _ray().util.get_node_ip_address()
        self._on_stage = on_stage
        self._gangs: list[_RayGang] = []
        self._changing = threading.Lock()

    def device(self, asked: str, workers: int) -> str:
        """Where ranks compute: each on a GPU of its own where asked for, or where the cluster has enough of them."""
        if asked == "auto":
            return "cuda" if _ray().cluster_resources().get("GPU", 0) >= workers else "cpu"
        kind = asked.partition(":")[0]
        if kind not in ("cpu", "cuda"):
            raise ConfigError(f"device {asked!r} is not for workers on Ray.", "Give cpu, or cuda for a GPU to each.")
        return kind

    def table(self, timeout: float) -> Table:
        """At this node's address, which other nodes reach."""
        from shoal.transport.table import HostTable

        return HostTable(self.address, timeout)

    def start(self, gang: Gang, processes: list[Process]) -> None:
        """Ask Ray for their places; a thread goes on from there."""
        started = _RayGang(gang, self)
        processes += started.processes
        node = self._preferred_node(started) if gang.is_replica else None
        started.nodes = [] if node is None else [node] * len(gang.numbers)
        with self._changing:
            self._gangs.append(started)
        started.begin()

    def close(self) -> None:
        """Leave no actor, thread and placement group."""
        for gang in self._gangs:
            gang.end()

    def _preferred_node(self, gang: "_RayGang") -> str | None:
        """Where a replica's gang should be, so that replicas are spread over the nodes."""
        taken = [other.nodes for other in self._gangs if other.is_alive]
        need = gang.need
        room = {
            node["NodeID"]: min(int(node["Resources"].get(kind, 0) // count) for kind, count in need.items())
            for node in _ray().nodes()
            if node["Alive"]
        }
        return node_for(room, taken, len(gang.processes))

    def tell_placed(self) -> None:
        """Tell how many ranks have a place, of those that the run began with."""
        with self._changing:
            gangs = [other for other in self._gangs if not other.is_patient]
        placed = sum(len(other.processes) for other in gangs if other.has_place)
        self._on_stage(PLACED, placed, sum(len(other.processes) for other in gangs))


@dataclass
class _RayProcess:
    """A rank on the cluster, as a launcher sees a process."""

    number: int
    orders: "SimpleQueue[tuple[int, Order]]"
    """Of the whole gang, with the rank's number: carried out by its thread."""
    exitcode: int | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _files: tuple[int, int] = field(default_factory=os.pipe)

    @property
    def sentinel(self) -> int:
        return self._files[0]

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def terminate(self) -> None:
        self.orders.put((self.number, "terminate"))

    def kill(self) -> None:
        self.orders.put((self.number, "kill"))

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def note_end(self, code: int) -> None:
        """It has ended; whoever waits at its sentinel wakes."""
        if self._ended.is_set():
            return
        self.exitcode = code
        self._ended.set()
        os.close(self._files[1])

    def close(self) -> None:
        """Nobody waits at its sentinel any more."""
        os.close(self._files[0])


class _RayGang:
    """The actors of one gang and their placement group, from the thread that asks for them until `end`."""

    def __init__(self, gang: Gang, place: RayPlace) -> None:
        self._gang, self._place = gang, place
        self._orders: SimpleQueue[tuple[int, Order]] = SimpleQueue()
        self.processes: list[Process] = []
        self._pipes: dict[int, Connection] = {}
        self._ranks: dict[int, _RayProcess] = {}
        for number in gang.numbers:
            ours, self._pipes[number] = mp.Pipe()
            self._ranks[number] = _RayProcess(number, self._orders)
            self.processes.append(Process(number, self._ranks[number], ours))
        self.nodes: list[str] = []
        """Of its ranks; until they have a place, where they should be, if that is known."""
        self.has_place = False
        self._actors: dict[int, Any] = {}
        self._group: Any = None
        self._folder = Path.cwd()
        self._variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        self._thread = threading.Thread(target=self._live, name="shoal-ray", daemon=True)

    @property
    def need(self) -> dict[str, int]:
        """What Ray is asked for each rank."""
        return _need(self._gang.threads, self._gang.device)

    @property
    def is_alive(self) -> bool:
        """Whether some rank of it lives, or is to come."""
        return any(rank.is_alive() for rank in self._ranks.values())

    @property
    def is_patient(self) -> bool:
        """Whether others train while it waits for a place."""
        return self._gang.patient

    def begin(self) -> None:
        """Ask for places, in a thread."""
        self._thread.start()

    def end(self) -> None:
        """Kill what lives and give the places back."""
        for rank in self._ranks.values():
            rank.kill()
        self._thread.join()
        for rank in self._ranks.values():
            rank.close()

    def _live(self) -> None:
        try:
            if self._find_place():
                self._start_actors()
                self._pass_on()
        except Exception as error:  # whatever it is, the launcher reports it
            for number in self._ranks:
                self._tell(number, Failure.of(error, number))
                self._note_end(number, 1)
        finally:
            for number in self._ranks:
                self._note_end(number, -signal.SIGKILL)
            self._give_back()

    def _find_place(self) -> bool:
        """Wait for the placement group. False where all ranks were killed meanwhile."""
        deadline = float("inf") if self.is_patient else time.monotonic() + self._gang.timeout
        node = self.nodes[0] if self.nodes else None
        self._ask_for(node)
        later, told = time.monotonic() + PREFER_SECONDS, time.monotonic()
        while not self._group.wait(TOGETHER_SECONDS):
            self._carry_out_orders()
            now = time.monotonic()
            if not self.is_alive:
                return False
            if now > deadline:
                raise _no_place(self._gang, self.need)
            if node is not None and now > later:
                node, self.nodes = None, []
                self._give_back()
                self._ask_for(None)
            if now > told + TELL_SECONDS and not self.is_patient:
                told = now
                self._place.tell_placed()
        placed = _ray().util.placement_group_table(self._group)["bundles_to_node_id"]
        self.nodes, self.has_place = [placed[index] for index in range(len(self.processes))], True
        return True

    def _ask_for(self, node: str | None) -> None:
        from ray.util.placement_group import placement_group

        bundles = [self.need for _ in self.processes]
        only = None if node is None else [{"ray.io/node-id": node} for _ in bundles]
        self._group = placement_group(bundles, strategy="PACK", bundle_label_selector=only)

    def _give_back(self) -> None:
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors.values():
            with suppress(Exception):  # it is gone
                _ray().kill(actor)
        if self._group is not None:
            with suppress(Exception):  # Ray itself may be gone, and the group with it
                remove_placement_group(self._group)

    def _start_actors(self) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        made = _ray().remote(ShoalRank)
        for index, world in enumerate(worlds_on(self._gang, self.nodes)):
            self._actors[world.number] = made.options(
                num_cpus=self.need["CPU"],
                num_gpus=self.need.get("GPU", 0),
                max_concurrency=2,  # it hears its rank while it is told to end it
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote(world, self._gang.payload, self._gang.threads, self._gang.timeout, self._gang.device)

    def _pass_on(self) -> None:
        """Until all have ended: what ranks say goes to the launcher, and its orders to the ranks."""
        ray = _ray()
        asked = {actor.begin.remote(self._folder, self._variables): number for number, actor in self._actors.items()}
        while asked:
            ready, _ = ray.wait(list(asked), timeout=TOGETHER_SECONDS)
            for reference in ready:
                number = asked.pop(reference)
                if self._heard(number, reference):
                    asked[self._actors[number].hear.remote()] = number
            self._carry_out_orders()
            asked = {reference: number for reference, number in asked.items() if self._ranks[number].is_alive()}

    def _heard(self, number: int, reference: Any) -> bool:
        """Take an actor's answer; whether its rank goes on."""
        ray = _ray()
        try:
            said, code = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            self._tell(number, Failure.of(error.cause, number))
            code, said = 1, []
        except ray.exceptions.RayError as error:
            what = f"was lost with its Ray actor on node {self._node_of(number)} ({type(error).__name__})"
            self._tell(number, Failure(number, "died", time.time(), what))
            code, said = 1, []
        for report in said:
            self._send(number, report)
        if code is not None:
            self._note_end(number, code)
        return code is None

    def _node_of(self, number: int) -> str:
        return self.nodes[number - self._gang.numbers[0]][:8]

    def _tell(self, number: int, failure: Failure) -> None:
        self._send(number, pickle.dumps(failure))

    def _send(self, number: int, report: bytes) -> None:
        with suppress(OSError):  # the launcher has heard enough
            self._pipes[number].send_bytes(report)

    def _note_end(self, number: int, code: int) -> None:
        self._ranks[number].note_end(code)
        self._pipes[number].close()

    def _carry_out_orders(self) -> None:
        for number, pipe in self._pipes.items():
            if not pipe.closed:
                self._pass_down(number, pipe)
        with suppress(Empty):
            while True:
                self._carry_out(*self._orders.get_nowait())

    def _pass_down(self, number: int, pipe: Connection) -> None:
        """What the launcher sends goes to the rank; that it closed the pipe is its goodbye."""
        try:
            while pipe.poll():
                word, actor = pipe.recv_bytes(), self._actors.get(number)
                if actor is not None:
                    actor.pass_down.remote(word)
        except (EOFError, OSError):
            self._carry_out(number, "goodbye")

    def _carry_out(self, number: int, order: Order) -> None:
        if not self._ranks[number].is_alive():
            return
        actor = self._actors.get(number)
        if order == "kill":
            if actor is not None:
                _ray().kill(actor)
            self._note_end(number, -signal.SIGKILL)
        elif actor is not None:
            actor.order.remote(order)
        elif order == "terminate":  # it has not begun
            self._note_end(number, -signal.SIGTERM)


def _need(threads: int, device: str) -> dict[str, int]:
    return {"CPU": threads} | ({"GPU": 1} if device == "cuda" else {})


def _no_place(gang: Gang, need: Mapping[str, float]) -> NoPlaceError:
    def shown(resources: Mapping[str, float], kinds: Sequence[str]) -> str:
        return " and ".join(f"{resources.get(kind, 0):g} {kind}" for kind in kinds)

    ray, kinds = _ray(), list(need)
    return NoPlaceError(
        f"Ray gave no place within {gang.timeout:g} seconds to {len(gang.numbers)} workers of {shown(need, kinds)} "
        f"each: its cluster has {shown(ray.cluster_resources(), kinds)}, of which "
        f"{shown(ray.available_resources(), kinds)} are free.",
        "Give fewer --workers or --threads, add nodes, or give Ray more time with --timeout.",
    )


class Room:
    """Places for more workers, asked for while a run trains on `workers` of them.

    `larger`: numbers of workers to which it may grow, least first. Ray may add nodes for what is asked. What it granted
    is kept for the run until `close`.
    """

    def __init__(self, workers: int, larger: Sequence[int], threads: int, device: str) -> None:
        self._larger = list(larger)
        self._more = [many - few for few, many in pairwise([workers, *larger])]
        self._need = _need(threads, device)
        self._granted = 0
        """Of the numbers, the first so many."""
        self._since: float | None = None
        """When the last of them was granted."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="shoal-ray-room", daemon=True)

    @property
    def workers(self) -> int | None:
        """On how many workers there is room for the run; None as long as it has no more than it had."""
        return self._larger[self._granted - 1] if self._granted else None

    def is_there(self) -> bool:
        """Whether to grow now: not before all that may come with a node had a moment to. Asks for it if need be."""
        if self._thread.ident is None:
            self._thread.start()
        waits = self._granted < len(self._larger)
        return self._since is not None and (not waits or time.monotonic() - self._since > SETTLE_SECONDS)

    def close(self) -> None:
        """Give all places back."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _ask(self) -> None:
        from ray.util.placement_group import placement_group, remove_placement_group

        groups: list[Any] = []
        try:
            groups += (placement_group([self._need] * more, strategy="PACK") for more in self._more)
            for group in groups:  # a larger number of workers needs all that the smaller ones do
                while not group.wait(TOGETHER_SECONDS):
                    if self._closing.wait(LOOK_SECONDS):
                        return
                self._granted, self._since = self._granted + 1, time.monotonic()
            self._closing.wait()
        except Exception as error:  # the run trains on as it is
            logging.getLogger(__name__).warning("Ray was asked for more places, and failed: %s", error)
        finally:
            for group in groups:
                with suppress(Exception):
                    remove_placement_group(group)


# In the actors


class ShoalRank:
    """One rank's actor, which has it as a process of its own."""

    def __init__(self, world: World, payload: bytes, threads: int, timeout: float, device: str) -> None:
        self._world, self._payload, self._threads = world, payload, threads
        self._timeout, self._device = timeout, device
        self._process: Process | None = None
        self._goodbye = threading.Event()

    def begin(self, folder: Path, variables: Mapping[str, str]) -> tuple[list[bytes], int | None]:
        """Start the rank, in `folder`, with these variables beside the node's own."""
        address = _ray().util.get_node_ip_address()
        try:
            os.chdir(folder)
        except OSError as error:
            raise ConfigError(
                f"node {address} cannot enter the folder {str(folder)!r}: {error.strerror}.",
                "Start the run in a folder on a disk that all nodes see.",
            ) from None
        values = {**variables, **environment_of(self._threads)}
        if not self._world.on_one_host and (interface := interface_at(address)):
            values.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", interface))
        with environment(**values):
            self._process = start(self._world, self._payload, self._threads, self._timeout, self._device)
        return [], None

    def hear(self) -> tuple[list[bytes], int | None]:
        """What the rank has said, waiting for that a while; and its exit code once it has ended."""
        assert self._process is not None, "it has begun"
        said: list[bytes] = []
        pipe, process = self._process.pipe, self._process.process
        try:
            deadline = time.monotonic() + HEAR_SECONDS
            while not pipe.poll(TOGETHER_SECONDS) and time.monotonic() < deadline:
                if self._goodbye.is_set():
                    pipe.close()  # a rank waits for this after its report
            time.sleep(TOGETHER_SECONDS)
            while pipe.poll():
                said.append(pipe.recv_bytes())
        except (EOFError, OSError):  # closed, by the rank or here
            process.join(HEAR_SECONDS)
        return said, process.exitcode

    def pass_down(self, word: bytes) -> None:
        """What the launcher says to the rank."""
        if self._process is not None:
            with suppress(OSError):  # it has ended
                self._process.pipe.send_bytes(word)

    def order(self, order: Order) -> None:
        """What the launcher does to the rank."""
        if self._process is None:
            return
        if order == "goodbye":
            self._goodbye.set()
        else:
            self._process.process.terminate()
