"""Carry out a list of moves on real tensors. No arithmetic on extents happens here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.moves import Move
from shoal.operators.base import Need
from shoal.partition import Box, slices
from shoal.transport import Transport, Waitable


@dataclass
class Arriving:
    """A tile on its way to this rank, or what this rank still has to send. Waited for once; then it is the tile."""

    wanted: Need | None
    pieces: list[tuple[Box, Tensor]]
    like: Tensor
    add: bool
    works: Sequence[Waitable] = ()
    sent: list[Tensor] = field(default_factory=list)
    """Kept until they have left."""

    def wait(self) -> Tensor | None:
        """The tile, whole; None where this rank wants nothing."""
        for work in self.works:
            work.wait()
        self.works, self.sent = (), []
        return None if self.wanted is None else _assemble(self.wanted, self.pieces, self.like, add=self.add)


def begin_transfer(
    local: Tensor | None,
    held: Box | None,
    wanted: Need | None,
    moves: Sequence[Move],
    transport: Transport,
    *,
    tag: int,
    like: Tensor,
    add: bool,
) -> Arriving:
    """Start to send my boxes of `local` and to receive those of my tile; `wait()` then puts the tile together.

    Messages travel while the caller computes something else; `local` must not change meanwhile. `like` gives type and
    device. With `add`, boxes that meet are added up, in the order of their ranks, so that the result does not depend on
    which message came first. A peer that is gone, or silent for the group's time-out, is a PeerError of the wait.
    """
    rank = transport.rank
    arriving = Arriving(wanted, [], like, add)
    sends, receives = [], []
    for move in moves:
        if move.src == rank:
            assert local is not None
            assert held is not None
            piece = local[slices(move.box, held)]
            if move.dst == rank:
                arriving.pieces.append((move.box, piece))
            else:
                sends.append((move.dst, piece.contiguous()))
        elif move.dst == rank:
            buffer = like.new_empty([len(span) for span in move.box])
            receives.append((move.src, buffer))
            arriving.pieces.append((move.box, buffer))
    if sends or receives:
        arriving.works = transport.begin_moves(sends, receives, tag)
        arriving.sent = [tensor for _, tensor in sends]
    return arriving


def inner(wanted: Need) -> tuple[slice, ...]:
    """Where the box of a tile lies within it: its padding left out."""
    pad = wanted.pad or ((0, 0),) * len(wanted.box)
    return tuple(slice(before, before + len(span)) for span, (before, _) in zip(wanted.box, pad, strict=True))


def _assemble(wanted: Need, arrived: Sequence[tuple[Box, Tensor]], like: Tensor, *, add: bool) -> Tensor:
    if len(arrived) == 1 and arrived[0][0] == wanted.box and not wanted.padded:
        return arrived[0][1].contiguous()
    if add or wanted.padded:
        tile = torch.full(wanted.shape, wanted.fill, dtype=like.dtype, device=like.device)
    else:  # every row arrives once
        tile = torch.empty(wanted.shape, dtype=like.dtype, device=like.device)
    inside = tile[inner(wanted)]
    if add and wanted.fill:
        inside.zero_()
    for box, piece in arrived:
        place = inside[slices(box, wanted.box)]
        if add:
            place.add_(piece)
        else:
            place.copy_(piece)
    return tile
