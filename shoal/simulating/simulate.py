"""A list of tasks on a cluster, as a trace: the same value that a real run records."""

from collections.abc import Iterator

import numpy as np

from shoal.lowering.step_traffic import GRADIENTS
from shoal.lowering.tasks import Gathered, Moved, Summed, Task, Tasks
from shoal.simulating.durations import Durations
from shoal.simulating.play import Noise, Played, play
from shoal.simulating.speeds import Speeds
from shoal.timeline import Kind, Lane, Message, Slice, Trace
from shoal.traffic import ring_bytes

SHOWN_RANKS = 64
"""A trace has a row for each of so many ranks; of more, one row for all ranks that do the same at the same time."""
_KINDS: dict[str, Kind] = {
    "forward": "forward",
    "input gradient": "backward",
    "weight gradient": "backward",
    "copy": "move",
    "move": "move",
    "sum": "sum",
    "update": "update",
}


def simulate(
    tasks: Tasks, speeds: Speeds, *, steps: int = 1, noise: Noise | None = None, title: str = "simulated"
) -> Trace:
    """What every rank would do and when, in `steps` steps on these devices and links. Pure; milliseconds per step.

    `noise`: how ranks differ; without any, ranks that have the same to do are played once.
    """
    return trace_of(play(Durations(tasks, speeds), steps=steps, noise=noise), title)


def trace_of(played: Played, title: str) -> Trace:
    """The trace of what was played."""
    ranks = played.durations.tasks.ranks
    shown = range(ranks) if ranks <= SHOWN_RANKS else [int(rank) for rank in played.first_ranks]
    slices = [piece for row, rank in enumerate(shown) for piece in _slices(played, row, rank)]
    messages = tuple(_messages(played)) if ranks <= SHOWN_RANKS else ()
    return Trace(title, "predicted", tuple(_names(played, list(shown))), tuple(slices), messages)


def _names(played: Played, shown: list[int]) -> Iterator[str]:
    counts = np.bincount(played.classes)
    for rank in shown:
        others = int(counts[played.classes[rank]]) - 1
        folded = played.durations.tasks.ranks > SHOWN_RANKS and others
        yield f"rank {rank} and {others:,} like it" if folded else f"rank {rank}"


def _slices(played: Played, row: int, rank: int) -> Iterator[Slice]:
    """The tasks of one rank, its steps, counted from 1, and in between what it waits for."""
    tasks, number = played.durations.tasks.tasks, int(played.classes[rank])
    starts, ends = played.starts[:, number].reshape(played.steps, -1), played.ends[:, number].reshape(played.steps, -1)
    begin = until = 0.0
    for step in range(played.steps):
        end = float(np.nanmax(ends[step], initial=begin))
        yield Slice("step", row, f"step {step + 1}", begin, end, "steps", step + 1)
        begin = end
        for task, start, stop in zip(tasks, starts[step].tolist(), ends[step].tolist(), strict=True):
            if not stop >= start:
                continue
            kind = "gradients" if task.label == GRADIENTS else _KINDS[task.kind]
            lane: Lane = "compute" if task.resource == "compute" or task.waits else "network"
            if lane == "compute" and start > until:
                yield Slice("wait", row, task.label or "gradients", until, start, step=step + 1)
            if stop > start:
                yield Slice(kind, row, task.label, start, stop, lane, step + 1, _sent(task, rank, played.durations))
            until = max(until, stop) if lane == "compute" else until


def _sent(task: Task, rank: int, durations: Durations) -> int:
    match task.work:
        case Moved() if task.kind == "move":
            return int(durations.flows(task.work).sent[:, rank].sum()) * task.work.itemsize
        case Summed(groups=groups, bytes=sizes):
            group, size = next((g, s) for g, s in zip(groups, sizes, strict=True) if rank in g)
            return ring_bytes(size, len(group), group.index(rank))
        case Gathered(groups=groups, by_rank=by_rank):
            return by_rank[rank] * (len(next(group for group in groups if rank in group)) - 1)
        case _:
            return 0


def _messages(played: Played) -> Iterator[Message]:
    """One for each pair of ranks of which one gets something from the other."""
    tasks, classes = played.durations.tasks.tasks, played.classes
    for place, (starts, ends) in enumerate(zip(played.starts, played.ends, strict=True)):
        task = tasks[place % len(tasks)]
        if task.kind == "move" and isinstance(task.work, Moved):
            pairs = played.durations.pairs(task.work)
            for dst, src in zip(*np.nonzero(pairs), strict=True):
                sent, received = float(starts[classes[src]]), float(ends[classes[dst]])
                yield Message(int(src), int(dst), task.label, sent, received, int(pairs[dst, src]) * task.work.itemsize)
