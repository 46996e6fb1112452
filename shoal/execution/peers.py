"""Sums over the parts of one layer, for rules whose mathematics crosses parts."""

from typing import Any

import torch
from torch import Tensor

from shoal.lowering.placement import Placed
from shoal.transport import Transport

PURPOSE = "layer"
"""These sums have groups of their own: gradients on their way in the background must not delay them."""


class RankPeers:
    """The other parts of a layer, as one rank sees them."""

    def __init__(self, placed: Placed, transport: Transport) -> None:
        self._placed = placed
        self._transport = transport

    def _ranks(self, over: str) -> tuple[int, ...]:
        return self._placed.group(self._transport.rank, over)

    def sum(self, tensor: Tensor, over: str) -> Tensor:
        """Sum over the parts that differ in the axes `over`; backward is the same sum of the gradients."""
        result: Tensor = _PeerSum.apply(tensor, self, over)  # type: ignore[no-untyped-call]
        return result

    def sum_now(self, tensor: Tensor, over: str) -> None:
        """The same sum in place, without a gradient."""
        self._transport.label = self._placed.layer.name  # backward runs a chain of layers at once
        self._transport.sum(tensor, self._ranks(over), PURPOSE)

    def max(self, tensor: Tensor, over: str) -> Tensor:
        """The largest over those parts; carries no gradient."""
        largest = tensor.detach().clone()
        self._transport.max(largest, self._ranks(over), PURPOSE)
        return largest

    def count(self, over: str) -> int:
        """How many parts such a sum joins."""
        return len(self._ranks(over))

    def index(self, over: str) -> int:
        """Which of them this part is."""
        return self._ranks(over).index(self._transport.rank)


class _PeerSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: RankPeers, over: str) -> Tensor:
        ctx.peers, ctx.over = peers, over
        total = tensor.clone(memory_format=torch.contiguous_format)
        peers.sum_now(total, over)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.peers.sum_now(total, ctx.over)
        return total, None, None
