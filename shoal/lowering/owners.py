"""Which rows of a parameter a rank keeps where the optimizer's state is cut: every row on one rank. Integers only.

Layers of several ranks may read the same box of a parameter (its use). With the state whole each of them keeps that
box, its gradient and what the optimizer remembers of it, and all take the same step. With the state cut each of them
keeps some rows of the box (its home): gradients are added up there, the optimizer steps there, and before the next
forward pass the others get the new rows. A home is to a use what owners of a value are to the tiles of its readers.
"""

from collections.abc import Collection, Mapping
from typing import Literal

from shoal.lowering.placement import sharers
from shoal.moves import Layout
from shoal.partition import cut, volume

OptimizerState = Literal["whole", "cut"]
"""Of a parameter that several ranks have the same part of: what the optimizer remembers of it, on each, or in parts."""
FROM_OWNERS = "weights from their owners"
"""The label of new rows on their way to the ranks whose layers read them."""
TO_OWNERS = "gradients to their owners"
"""The label of gradients on their way to the ranks that keep the rows."""
LEAST_ELEMENTS = 1 << 14
"""A smaller box is not cut: messages for it would cost more than its state, and all of them are a few percent."""


def cut_homes(uses: Mapping[str, Layout], learning: Collection[str]) -> dict[str, Layout]:
    """Where every state lives if that of the optimizer is cut. `learning`: those that it steps over."""
    return {name: _by_rows(layout) if name in learning else layout for name, layout in uses.items()}


def _by_rows(layout: Layout) -> Layout:
    kept = list(layout)
    for box, ranks in sharers(layout).items():
        if len(ranks) > 1 and box and len(box[0]) >= len(ranks) and volume(box) >= LEAST_ELEMENTS:
            for rank, rows in zip(ranks, cut(len(box[0]), len(ranks)), strict=True):
                kept[rank] = (rows.shifted(box[0].start), *box[1:])
    return tuple(kept)
