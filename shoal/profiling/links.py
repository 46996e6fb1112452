"""Measure the links between the ranks at hand, by sending what training sends. A collective: all ranks call it."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from shoal.cluster import Level
from shoal.profiling.kernels import low
from shoal.transport import Transport, Waitable

SIZES = (1 << 10, 16 << 10, 8 << 20, 32 << 20)
"""Two small messages for the latency, two large ones for the speed beyond what a link lets through at once."""
_TAG = (1 << 30) + 1


def host_of_this_process() -> str:
    """What ranks with the same address of loopback share: a host, or a network namespace of it."""
    try:
        space = str(Path("/proc/self/ns/net").readlink())
    except OSError:  # not Linux: namespaces are not known
        space = ""
    return f"{socket.gethostname()} {space}"


def measure_levels(transport: Transport, device: torch.device) -> tuple[Level, ...]:
    """The levels of links between the ranks: within a host and between hosts, as far as there are such.

    Ranks must be numbered host by host with equally many on each, as launchers number them; else all links count as
    the slowest kind.
    """
    if transport.world == 1:
        return ()
    hosts = transport.gather_objects(host_of_this_process())
    names = list(dict.fromkeys(hosts))
    per_host = len(hosts) // len(names)
    regular = len(hosts) % len(names) == 0 and hosts == [name for name in names for _ in range(per_host)]
    levels = []
    if regular and per_host > 1:
        levels.append(_level("host", per_host, 1, transport, device))
    if len(names) > 1:
        step = per_host if regular else 1
        levels.append(_level("network", transport.world, step, transport, device))
    return tuple(levels)


def _level(name: str, size: int, step: int, transport: Transport, device: torch.device) -> Level:
    latency, per_byte = _exchange(transport, device, step)
    wait, skew = _wait(transport, device, step, latency)
    ranks = tuple(range(transport.world)) if name == "network" else _host_group(transport.rank, size)
    sum_latency, sum_per_byte = _sum(transport, device, ranks)
    return Level(
        name=name,
        size=size,
        bandwidth=1 / per_byte,
        latency=latency,
        sum_bandwidth=1 / sum_per_byte,
        sum_latency=sum_latency,
        wait=wait,
        skew=skew,
        contention=_contention(transport, device, ranks),
        shared=name == "network" and step > 1,
        source="measured: messages and sums of 1 KiB to 32 MiB",
    )


def _host_group(rank: int, size: int) -> tuple[int, ...]:
    first = rank // size * size
    return tuple(range(first, first + size))


def _exchange(transport: Transport, device: torch.device, step: int) -> tuple[float, float]:
    """(latency, seconds per byte) of neighbours that send each other messages, all at the same time."""
    return _fit(transport, device, _neighbours(transport, step))


def _neighbours(transport: Transport, step: int) -> Callable[[Tensor], None]:
    """An exchange of messages with the rank `step` away."""
    index = transport.rank // step
    partner = transport.rank + step if index % 2 == 0 else transport.rank - step
    there = 0 <= partner < transport.world

    buffers: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> None:
        if there:
            if tensor.numel() not in buffers:
                buffers[tensor.numel()] = torch.zeros_like(tensor)
            theirs = buffers[tensor.numel()]
            for work in transport.begin_moves([(partner, tensor)], [(partner, theirs)], _TAG):
                work.wait()

    return once


def _sum(transport: Transport, device: torch.device, ranks: tuple[int, ...]) -> tuple[float, float]:
    """(latency, seconds per byte sent) of a sum over ranks."""
    groups = {_host_group(rank, len(ranks)) for rank in range(transport.world)}
    transport.make_groups([("measure", group) for group in groups if max(group) < transport.world])

    def once(tensor: Tensor) -> None:
        work = transport.sum_later(tensor, ranks, "measure", label="measure")
        if work is not None:
            work.wait()

    latency, per_byte = _fit(transport, device, once)
    return latency, per_byte * len(ranks) / (2 * (len(ranks) - 1))


def _fit(transport: Transport, device: torch.device, once: Callable[[Tensor], None]) -> tuple[float, float]:
    """(latency, seconds per byte) from a low quantile of the seconds of every size, the slowest rank's.

    Low, since what is measured is remembered: minutes in which the machine was busy must not be.
    """
    usual: list[float] = []
    for size in SIZES:
        tensor = torch.zeros(size // 4, device=device)
        times = []
        for repeat in range(17 if size < 1 << 20 else 6):
            transport.gather_numbers([0.0])
            start = time.perf_counter()
            once(tensor)
            if repeat:
                times.append(time.perf_counter() - start)
        usual.append(low(times))
    seconds = [max(row) for row in zip(*transport.gather_numbers(usual), strict=True)]
    return fit_line(SIZES, seconds)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(latency, seconds per byte), neither negative: the speed from the two largest sizes, the rest from the others.

    >>> latency, per_byte = fit_line([1000, 2000, 1000000, 2000000], [0.0011, 0.0012, 0.1010, 0.2010])
    >>> round(latency, 6), round(per_byte, 9)
    (0.001, 1e-07)
    """
    per_byte = max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), 1e-13)
    left = [taken - size * per_byte for size, taken in zip(sizes[:-2], seconds[:-2], strict=True)]
    return max(median(left), 1e-7), per_byte


def _wait(transport: Transport, device: torch.device, step: int, latency: float) -> tuple[float, float]:
    """What neighbours that compute between small messages lose at each, beyond the latency: (seconds, seconds more per
    second that they computed), from some milliseconds and from four times as many.
    """
    a = torch.rand(320, 320, device=device)
    tensor = torch.zeros(4096, device=device)
    exchange = _neighbours(transport, step)

    def loop(products: int, rounds: int, meet: Callable[[], None]) -> float:
        transport.gather_numbers([0.0])
        start = time.perf_counter()
        for _ in range(rounds):
            for _ in range(products):
                a @ a
            meet()
        return (time.perf_counter() - start) / rounds

    computed, lost = [], []
    for products, rounds in ((4, 20), (16, 8)):
        rows = []
        for repeat in range(6):
            alone = loop(products, rounds, lambda: None)
            met = loop(products, rounds, lambda: exchange(tensor))
            if repeat:
                rows.append(transport.gather_numbers([alone, met - alone]))
        computed.append(low([max(row[0] for row in row_of) for row_of in rows]))
        lost.append(low([max(row[1] for row in row_of) for row_of in rows]))
    return wait_and_skew(computed, lost, latency)


def wait_and_skew(computed: Sequence[float], lost: Sequence[float], latency: float) -> tuple[float, float]:
    """The line through (seconds computed, seconds lost) twice, less the latency; neither part is negative.

    >>> wait_and_skew([1.0, 4.0], [0.5, 1.1], 0.1)
    (0.2, 0.2)
    >>> wait_and_skew([1.0, 4.0], [0.5, 0.4], 0.1)
    (0.4, 0.0)
    """
    skew = max(0.0, (lost[1] - lost[0]) / max(computed[1] - computed[0], 1e-9))
    skew = min(skew, max(0.0, (lost[0] - latency) / max(computed[0], 1e-9)))
    return max(0.0, round(lost[0] - latency - skew * computed[0], 9)), round(skew, 9)


def _contention(transport: Transport, device: torch.device, ranks: tuple[int, ...]) -> float:
    """How much longer computing takes when a sum goes on behind it, per second that the sum takes alone."""
    x = torch.rand(4, 64, 28, 28, device=device)
    weight = torch.rand(64, 64, 3, 3, device=device)
    data = torch.zeros(4 << 20, device=device)

    def begin() -> list[Waitable | None]:
        return [transport.sum_later(data, ranks, "measure", label="measure") for _ in range(2)]

    def sums() -> float:
        transport.gather_numbers([0.0])
        start = time.perf_counter()
        for work in begin():
            if work is not None:
                work.wait()
        return max(row[0] for row in transport.gather_numbers([time.perf_counter() - start]))

    def compute(rounds: int, *, behind: bool) -> float:
        transport.gather_numbers([0.0])
        start = time.perf_counter()
        works = begin() if behind else []
        for _ in range(rounds):
            torch.nn.functional.conv2d(x, weight, padding=1)
        taken = time.perf_counter() - start
        for work in works:
            if work is not None:
                work.wait()
        return taken

    sums()
    alone = low([sums() for _ in range(4)])
    compute(2, behind=False)
    each = max(row[0] for row in transport.gather_numbers([compute(4, behind=False) / 4]))
    rounds = max(4, int(3 * alone / each))  # long enough for the sums to end within it
    lost = [compute(rounds, behind=True) - compute(rounds, behind=False) for _ in range(4)]
    everyone = [row[0] for row in transport.gather_numbers([median(lost) / alone])]
    return max(0.0, sum(everyone) / len(everyone))


def here() -> str:
    """The machine in words: what a reader of old numbers wants to know."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = "unknown processor"
    return f"{model}, {os.cpu_count()} cores"
