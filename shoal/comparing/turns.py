"""Sides that take turns, so that whatever disturbs the machine disturbs all of them. A collective of all ranks."""

import time
from collections.abc import Callable, Mapping

from shoal.transport import Transport

Turn = Callable[[], object]
OnTurn = Callable[[int, int, str], None]


def take_turns(
    sides: Mapping[str, Turn],
    transport: Transport,
    *,
    rounds: int,
    warm_up: int = 2,
    progress: OnTurn = lambda *_: None,
) -> dict[str, list[float]]:
    """Seconds of every side's turn in each round, the slowest rank's; the order turns from round to round."""
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for place, name in enumerate(names[turn:] + names[:turn]):
            progress((number + warm_up) * len(names) + place, (rounds + warm_up) * len(names), name)
            transport.gather_numbers([0.0])
            start = time.perf_counter()
            sides[name]()
            taken = max(row[0] for row in transport.gather_numbers([time.perf_counter() - start]))
            if number >= 0:
                seconds[name].append(taken)
    progress((rounds + warm_up) * len(names), (rounds + warm_up) * len(names), "")
    return seconds
