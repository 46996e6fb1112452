"""Our link beside a Gloo group of two members on a store of its own: a round trip, and how soon a death is seen.

    python -m benchmarks.links.bench [--rounds 30] [--link 1gbit]

Round trips: two processes of one thread; a tensor goes there and back, the sides taking turns. Deaths, over loopback
only: a process sends 200 MB to one that is stopped in the middle and killed 0.3 s later; the time from the kill to the
sender's error.
"""

import argparse
import multiprocessing as mp
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.ranks import is_rank, start_ranks
from benchmarks.common.turns import Measured, take_turns
from shoal.transport.links import Door, Link, LinkLost, connect

SIZES = {"512 B": (512, 50), "8 MB": (8_000_000, 4)}
"""Bytes, and round trips per turn."""
MUCH = 200_000_000
GLOO_SECONDS = 5.0
"""Time-out of the Gloo group whose member dies."""
BASE = "gloo"


def main() -> None:
    """Start the processes, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--link", default="loopback", help='"loopback", or a speed between two hosts: "1gbit"')
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument("--death", choices=["link", "gloo"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.death:
        be_a_sender(args.death)
    elif is_rank():
        round_trips(args.rounds)
    else:
        start_ranks("benchmarks.links.bench", sys.argv[1:], args.link)
        if args.link == "loopback" and args.deaths:
            deaths(args.deaths)


# Round trips, on two ranks


def round_trips(rounds: int) -> None:
    """Measure every size and print a table for each."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    link = linked(rank)
    store = dist.PrefixStore("pair", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    pair = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
    if rank == 0:
        print("| a tensor of | side | there and back, median ms | / gloo | quartiles |")
        print("|---|---|---|---|---|", flush=True)
    for name, (size, repeats) in SIZES.items():
        by_gloo = repeated(repeats, lambda x, y: over_gloo(pair, rank, x, y), size)
        by_link = repeated(repeats, lambda x, y: over_link(link, rank, x, y), size)
        measured = take_turns({BASE: by_gloo, "gloo again": by_gloo, "link": by_link}, rounds=rounds)
        if rank == 0:
            print_rows(name, measured, repeats)
    dist.barrier()
    link.close()
    dist.destroy_process_group()


def linked(rank: int) -> Link:
    """The link between the two ranks; rank 0 keeps the door until its process ends."""
    arrived: queue.Queue[Link] = queue.Queue()

    def keep(link: Link, _hello: dict[str, Any]) -> None:
        arrived.put(link)
        threading.Event().wait()

    where: list[Any] = [None]
    if rank == 0:
        door = Door(keep, on_error=raise_it, host=os.environ["MASTER_ADDR"])
        where = [(door.address, door.token)]
    dist.broadcast_object_list(where)
    return arrived.get() if rank == 0 else connect(*where[0], name="rank 0")


def raise_it(_link: Link, _hello: dict[str, Any], error: Exception) -> None:
    raise error


def repeated(repeats: int, once: Callable[[Tensor, Tensor], None], size: int) -> Callable[[], None]:
    x, y = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def step() -> None:
        for _ in range(repeats):
            once(x, y)

    return step


def over_link(link: Link, rank: int, x: Tensor, y: Tensor) -> None:
    if rank == 0:
        link.send({"kind": "push"}, [x])
        link.receive([y])
    else:
        link.receive([y])
        link.send({"kind": "push"}, [y])


def over_gloo(pair: Any, rank: int, x: Tensor, y: Tensor) -> None:
    if rank == 0:
        pair.send([x], 1, 0).wait()
        pair.recv([y], 1, 0).wait()
    else:
        pair.recv([y], 0, 0).wait()
        pair.send([y], 0, 0).wait()


def print_rows(size: str, measured: Measured, repeats: int) -> None:
    for side, seconds in measured.seconds.items():
        low, middle, high = statistics.quantiles(measured.ratios(side, BASE), n=4)
        each = 1000 * statistics.median(seconds) / repeats
        print(f"| {size} | {side} | {each:.3f} | **{middle:.3f}** | {low:.3f} to {high:.3f} |", flush=True)


# Deaths: every one in processes of its own, since a Gloo group that lost a member may not close


def deaths(count: int) -> None:
    print(f"\n| a killed receiver is seen by | after s, {count} times |\n|---|---|", flush=True)
    found: dict[str, list[float]] = {"link": [], "gloo": []}
    for _ in range(count):
        for side, seconds in found.items():
            command = [sys.executable, "-m", "benchmarks.links.bench", "--death", side]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
            ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=120)
            seconds.append(float(ran.stdout))
    for side, seconds in found.items():
        name = f"gloo, time-out {GLOO_SECONDS:g} s" if side == "gloo" else side
        print(f"| {name} | {', '.join(f'{one:.4f}' for one in sorted(seconds))} |", flush=True)


def be_a_sender(side: str) -> None:
    """Send to a process that is killed meanwhile; print the seconds from the kill to the error, and end."""
    seconds = send_by_link() if side == "link" else send_by_gloo()
    print(seconds, flush=True)
    os._exit(0)


def send_by_link() -> float:
    arrived: queue.Queue[Link] = queue.Queue()

    def keep(link: Link, _hello: dict[str, Any]) -> None:
        arrived.put(link)
        threading.Event().wait()

    door = Door(keep, on_error=raise_it)
    victim = mp.get_context("spawn").Process(target=take_by_link, args=(door.address, door.token))
    victim.start()
    link = arrived.get()
    link.receive()
    return time_of_death(victim, lambda: link.send({}, [torch.zeros(MUCH, dtype=torch.uint8)]))


def take_by_link(address: tuple[str, int], token: str) -> None:
    link = connect(address, token, name="the sender")
    into = torch.zeros(MUCH, dtype=torch.uint8)
    link.send({"ready": True})
    link.receive([into])


def send_by_gloo() -> float:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    victim = mp.get_context("spawn").Process(target=take_by_gloo, args=(store.port,))
    victim.start()
    pair = gloo_pair(store, 0)
    ready = torch.zeros(1)
    pair.recv([ready], 1, 0).wait()
    return time_of_death(victim, lambda: pair.send([torch.zeros(MUCH, dtype=torch.uint8)], 1, 0).wait())


def take_by_gloo(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    pair = gloo_pair(store, 1)
    into = torch.zeros(MUCH, dtype=torch.uint8)
    pair.send([torch.zeros(1)], 0, 0).wait()
    pair.recv([into], 0, 0).wait()


def gloo_pair(store: Any, rank: int) -> Any:
    own = dist.PrefixStore("pair", store)  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(own, rank, 2, timedelta(seconds=GLOO_SECONDS))


def time_of_death(victim: Any, send: Callable[[], object]) -> float:
    """Seconds from the kill of `victim`, in the middle of `send`, to its error."""
    killed: list[float] = []

    def kill() -> None:
        time.sleep(0.02)
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(0.3)
        killed.append(time.perf_counter())
        victim.kill()

    threading.Thread(target=kill).start()
    try:
        send()
    except (LinkLost, RuntimeError):
        seen = time.perf_counter()
    else:
        sys.exit("all was sent before the receiver was stopped: send more")
    victim.join()
    if not killed or victim.exitcode != -signal.SIGKILL:
        sys.exit("the sender failed before the receiver was killed")
    return seen - killed[0]


if __name__ == "__main__":
    main()
