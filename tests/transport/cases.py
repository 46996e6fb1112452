"""What every rank transport promises, as work for the ranks of one. Importable, so that spawned processes find it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.errors import PeerError, RunError
from shoal.transport import Transport
from shoal.transport.agreement import agree

Work = Callable[[Transport], Any]


def over_gloo(work: Work) -> Any:
    """On one rank of a pool."""
    return work(Transport())


def everyone(transport: Transport) -> tuple[int, ...]:
    return tuple(range(transport.world))


# What ranks tell each other


def headers(transport: Transport) -> object:
    return transport.header("forward", [transport.rank, 0.5, float("inf")])


def full_headers(transport: Transport) -> object:
    with pytest.raises(ValueError, match="8 numbers do not fit"):
        transport.header("forward", [1.0] * 8)
    return transport.header("forward", [1.0] * 7)


def different_calls(transport: Transport) -> str:
    with pytest.raises(RunError) as caught:
        transport.header("state_dict" if transport.rank == 0 else "forward", [])
    assert transport.header("forward", [1.0]) == [[1.0]] * transport.world  # and all can go on
    return str(caught.value)


def gathers(transport: Transport) -> object:
    numbers = transport.gather_numbers([float(transport.rank)] * 9 * transport.rank)
    return numbers, transport.gather_objects({"rank": "x" * transport.rank})


def one_fails(transport: Transport) -> str:
    with pytest.raises(ArithmeticError if transport.rank == 1 else PeerError) as caught:
        agree(transport, lambda: 6 // (1 - transport.rank))
    return str(caught.value).partition("\n")[0]


# Payload


def payload(transport: Transport) -> object:
    """Every operation once: (values, bytes counted by label)."""
    rank, ranks = transport.rank, everyone(transport)
    transport.make_groups([("layer", ranks), ("gradient", ranks)])
    transport.counted.clear()
    transport.label = "sum"
    summed = torch.full((3,), float(rank + 1))
    transport.sum(summed, ranks, "layer")
    later = torch.full((2,), rank + 1.0, dtype=torch.float64)
    work = transport.sum_later(later, ranks, "gradient", label="later")
    assert work is not None
    work.wait()
    transport.label = "max"
    largest = torch.tensor([float(rank), -float(rank)])
    transport.max(largest, ranks, "layer")
    transport.label = "tell"
    told = torch.tensor([rank + 5])
    transport.tell(told, ranks, "layer")
    transport.label = "move"
    mine, theirs = torch.full((4,), rank, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    after, before = (rank + 1) % transport.world, (rank - 1) % transport.world
    for move in transport.begin_moves([(after, mine)], [(before, theirs)], tag=3):
        move.wait()
    tensors = [tensor.tolist() for tensor in (summed, later, largest, told, theirs)]
    return tensors, {label: sent.bytes for label, sent in sorted(transport.counted.items())}


def alone_in_a_group(transport: Transport) -> object:
    """A sum of one rank is what it has, and costs nothing."""
    own = (transport.rank,)
    transport.make_groups([("layer", own)])
    tensor = torch.tensor([float(transport.rank)])
    transport.sum(tensor, own, "layer")
    transport.max(tensor, own, "layer")
    transport.tell(tensor, own, "layer")
    assert transport.sum_later(tensor, own, "layer", label="") is None
    return tensor.item(), transport.counted


# A header whose answer is read before anything else is sent

NEXT: dict[str, Callable[[Transport, torch.Tensor], object]] = {
    "sum": lambda transport, tensor: transport.sum(tensor, everyone(transport), "layer"),
    "sum_later": lambda transport, tensor: transport.sum_later(tensor, everyone(transport), "layer", label="x"),
    "max": lambda transport, tensor: transport.max(tensor, everyone(transport), "layer"),
    "tell": lambda transport, tensor: transport.tell(tensor, everyone(transport), "layer"),
    "begin_moves": lambda transport, tensor: transport.begin_moves(
        [((transport.rank + 1) % transport.world, tensor)],
        [((transport.rank - 1) % transport.world, torch.empty_like(tensor))],
        tag=3,
    ),
    "header": lambda transport, _: transport.header("next", [1.0]),
    "gather_numbers": lambda transport, _: transport.gather_numbers([1.0]),
    "gather_objects": lambda transport, _: transport.gather_objects("x"),
    "header_later": lambda transport, _: transport.header_later("next", [1.0], lambda _rows: None),
    "read_header": lambda transport, _: transport.read_header(),
}


class Refused(Exception):  # noqa: N818
    """What a check of these tests says."""


def refuse(_rows: object) -> None:
    raise Refused


def later_headers(transport: Transport) -> None:
    """Whatever is next, the header is read first, once; refused, nothing of what was next is sent."""
    ranks = everyone(transport)
    transport.make_groups([("layer", ranks)])
    rows = [[float(rank), 7.0] for rank in ranks]
    for name, follows in NEXT.items():
        seen: list[Any] = []
        transport.header_later("backward", [transport.rank, 7.0], seen.append)
        assert seen == [], name
        work = follows(transport, torch.full((2,), float(transport.rank)))
        assert seen == [rows], name
        for handle in work if isinstance(work, list) else [work]:
            if hasattr(handle, "wait"):
                handle.wait()
        transport.read_header()
        assert seen == [rows], name

        tensor = torch.full((2,), float(transport.rank))
        transport.counted.clear()
        transport.header_later("backward", [], refuse)
        with pytest.raises(Refused):
            follows(transport, tensor)
        assert tensor.tolist() == [float(transport.rank)] * 2, name
        transport.read_header()  # it is read
        # What had been sent in spite of it would arrive now, in the place of this.
        after = torch.full((2,), float(transport.rank + 1))
        transport.sum(after, ranks, "layer")
        assert after.tolist() == [float(sum(rank + 1 for rank in ranks))] * 2, name
        told = torch.tensor([float(transport.rank + 1)] * 2)
        transport.tell(told, ranks, "layer")
        assert told.tolist() == [1.0, 1.0], name


def later_headers_of_different_calls(transport: Transport) -> str:
    seen: list[Any] = []
    transport.header_later("state_dict" if transport.rank == 0 else "backward", [], seen.append)
    with pytest.raises(RunError) as caught:
        transport.read_header()
    assert seen == []
    assert transport.header("forward", [1.0]) == [[1.0]] * transport.world
    return str(caught.value)
