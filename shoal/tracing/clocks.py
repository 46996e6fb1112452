"""How far the clocks of ranks are apart.

Processes of one host read one clock. Between hosts a gather bounds the difference: nobody has its result before
everybody has begun it. With a_r and b_r what the clock of rank r showed before and after, and d what rank r's clock is
ahead of rank 0's,

    a_r - b_0  <=  d  <=  b_r - a_0

Of several gathers the tightest bounds are taken, and the middle between them: it is wrong by at most half of their
distance, the shortest round trip that was seen.
"""

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.diary import now
from shoal.transport import Transport

ROUNDS = 12
"""Gathers; the first of them also wait for the last rank."""

Reading = tuple[int, int]
"""What a clock showed before and after a gather, in nanoseconds."""


def clock_offsets(transport: Transport, clock: Callable[[], int] = now, host: str | None = None) -> list[int]:
    """What each rank's clock is ahead of rank 0's, in nanoseconds. A collective.

    Exactly 0 on one host; between hosts measured, to about half a round trip. `host`: which clock this rank reads.
    """
    hosts = transport.gather_objects(own_clock() if host is None else host, "clocks")
    if len(set(hosts)) == 1:
        return [0] * transport.world
    readings: list[Reading] = []
    for _ in range(ROUNDS):
        before = clock()
        transport.gather_numbers([], "clocks")
        readings.append((before, clock()))
    return offsets_of(transport.gather_objects(readings, "clocks"), hosts)


def offsets_of(readings: Sequence[Sequence[Reading]], hosts: Sequence[str]) -> list[int]:
    """The same from what all ranks' clocks showed around the same gathers. Ranks of one host have one offset."""
    reference = hosts.index(hosts[0])
    bounds: dict[str, tuple[int, int]] = {}
    for host, own in zip(hosts, readings, strict=True):
        lower = max(a - b_0 for (a, _), (_, b_0) in zip(own, readings[reference], strict=True))
        upper = min(b - a_0 for (_, b), (a_0, _) in zip(own, readings[reference], strict=True))
        before = bounds.get(host, (lower, upper))
        bounds[host] = max(lower, before[0]), min(upper, before[1])
    middle = {host: (lower + upper) // 2 for host, (lower, upper) in bounds.items()}
    return [0 if host == hosts[0] else middle[host] for host in hosts]


def ahead_of(ask: Callable[[], tuple[int, str]], clock: Callable[[], int] = now, host: str | None = None) -> int:
    """What this process's clock is ahead of another's, in nanoseconds, which `ask` reads, and says which one it is.

    0 where both are one; else the middle of the shortest of some round trips.
    """
    best: tuple[int, int] | None = None
    for _ in range(ROUNDS):
        before = clock()
        theirs, whose = ask()
        after = clock()
        if whose == (own_clock() if host is None else host):
            return 0
        trip = after - before, (before + after) // 2 - theirs
        best = trip if best is None else min(best, trip)
    assert best is not None
    return best[1]


def own_clock() -> str:
    """What all processes that read the same clock have in common, and no others: the start of their host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
