"""A plan's price as a Trace: what each rank would do in one step, in the form of what it did. Pure."""

from shoal.planning.price import Price
from shoal.timeline import Kind, Lane, Slice, Trace

_LANES: dict[str, Lane] = {"move": "network", "gradients": "network"}
"""What travels while ranks compute; the rest they do one after the other."""


def predicted_trace(price: Price, title: str = "") -> Trace:
    """One step. Where a rank computes nothing before the step's end it waits; what is left at the end is overhead."""
    slices: list[Slice] = []
    for kind, rank, layer, start, end in price.timeline:
        slices.append(Slice(_kind(kind), rank, layer, start, end, _LANES.get(kind, "compute"), step=1))
    updating = max((piece.end for piece in slices), default=0.0)
    for rank in range(price.ranks):
        own = sorted((piece for piece in slices if piece.rank == rank and piece.lane == "compute"), key=_begin)
        slices += _waits(rank, own)
        computed = max((piece.end for piece in own), default=0.0)
        if updating > computed:
            slices.append(Slice("wait", rank, "gradients", computed, updating, step=1))
        slices.append(Slice("update", rank, "optimizer", updating, updating + price.update, step=1))
        slices.append(Slice("step", rank, "step 1", 0.0, max(price.seconds, updating + price.update), "steps", 1))
    return Trace(
        title=title or f"plan {price.name}",
        origin="predicted",
        ranks=tuple(f"rank {rank}" for rank in range(price.ranks)),
        slices=tuple(slices),
    )


def _kind(kind: str) -> Kind:
    known: dict[str, Kind] = {
        "forward": "forward",
        "backward": "backward",
        "move": "move",
        "sum": "sum",
        "gradients": "gradients",
    }
    return known[kind]


def _begin(piece: Slice) -> float:
    return piece.start


def _waits(rank: int, own: list[Slice]) -> list[Slice]:
    """What lies between two slices of a rank, labelled by what it waits for."""
    waits, until = [], 0.0
    for piece in own:
        if piece.start > until:
            waits.append(Slice("wait", rank, piece.label, until, piece.start, step=1))
        until = max(until, piece.end)
    return waits
