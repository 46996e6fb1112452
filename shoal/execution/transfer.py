"""Carry out a list of moves on real tensors. No arithmetic on extents happens here."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.moves import Move
from shoal.operators.base import Need
from shoal.partition import Box, slices
from shoal.transport import Transport


def transfer(
    local: Tensor | None,
    held: Box | None,
    wanted: Need | None,
    moves: Sequence[Move],
    transport: Transport,
    *,
    tag: int,
    like: Tensor,
    add: bool,
) -> Tensor | None:
    """Send my boxes of `local` and put together my tile from what arrives; None where I want nothing.

    `like` gives type and device. With `add`, boxes that meet are added up, in the order of their ranks, so that
    the result does not depend on which message came first.
    """
    rank = transport.rank
    sends, receives, arrived = [], [], []
    for move in moves:
        if move.src == rank:
            assert local is not None
            assert held is not None
            piece = local[slices(move.box, held)]
            if move.dst == rank:
                arrived.append((move.box, piece))
            else:
                sends.append((move.dst, piece.contiguous()))
        elif move.dst == rank:
            buffer = like.new_empty([len(span) for span in move.box])
            receives.append((move.src, buffer))
            arrived.append((move.box, buffer))
    if sends or receives:
        transport.exchange(sends, receives, tag)
    return None if wanted is None else _assemble(wanted, arrived, like, add=add)


def _assemble(wanted: Need, arrived: Sequence[tuple[Box, Tensor]], like: Tensor, *, add: bool) -> Tensor:
    if len(arrived) == 1 and arrived[0][0] == wanted.box and not wanted.padded:
        return arrived[0][1].contiguous()
    inner = tuple(
        slice(before, before + len(span))
        for span, (before, _) in zip(wanted.box, wanted.pad or ((0, 0),) * len(wanted.box), strict=True)
    )
    tile = torch.full(wanted.shape, wanted.fill, dtype=like.dtype, device=like.device)
    if add and wanted.fill:
        tile[inner] = 0.0
    inside = tile[inner]
    for box, piece in arrived:
        place = inside[slices(box, wanted.box)]
        if add:
            place.add_(piece)
        else:
            place.copy_(piece)
    return tile
