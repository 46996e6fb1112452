"""Sum gradients among the ranks that hold the same shard, in buckets, while backward still runs.

Promise   every rank of a shard ends with the same bits; of gradients from factors, where their kernels are the same.
          What a gradient had accumulated before counts with the mean over those ranks, as with DDP: equal on all of
          them it stays, and what `no_sync` left is averaged.
Cost      2 (P-1)/P of a shard's bytes sent by each of its P ranks; a shard on one rank sends nothing.
          Where factors travel in its place, it sends its rows to each of the others (`lowering/factors.py`).
Order     buckets are filled in the order in which backward finishes parameters, which the program fixes, so
          all ranks start the same sums in the same order even where one of them had nothing to add.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from shoal.execution.factors import Gathering, Own, begin_gathering, own_gradient
from shoal.lowering.factors import Factors
from shoal.lowering.step_traffic import GRADIENTS, Bucket, fill_buckets
from shoal.transport import Transport, Waitable

PURPOSE = "gradient"


class Collector(Protocol):
    """Where backward puts each parameter's gradient as soon as it is final on this rank."""

    def ready(self, name: str, grad: Tensor) -> None:
        """Called once per trainable parameter, in the program's order."""
        ...

    def ready_factors(self, factors: Factors, own: Own | None, shard: Tensor) -> None:
        """The same of a weight whose gradient is to be found from factors. `own`: this rank's; None without a part."""
        ...

    def finish(self) -> Mapping[str, Tensor]:
        """The gradients, by name, when all that was started is done."""
        ...


class Kept:
    """Gradients that stay this rank's own, as inside `no_sync`: of its own loss, as DDP has them.

    `holders`: for every parameter how many ranks hold this rank's shard; a later mean over them divides by it.
    """

    def __init__(self, holders: Mapping[str, int]) -> None:
        self._holders = holders
        self._grads: dict[str, Tensor] = {}

    def ready(self, name: str, grad: Tensor) -> None:
        """Keep it."""
        self._grads[name] = grad

    def ready_factors(self, factors: Factors, own: Own | None, shard: Tensor) -> None:
        """Keep what this rank's rows give."""
        self.ready(factors.weight, own_gradient(own, shard))

    def finish(self) -> Mapping[str, Tensor]:
        """What was kept, multiplied: outside what the layers themselves take."""
        for name in self._grads:
            if self._holders[name] > 1:
                self._grads[name] = self._grads[name] * self._holders[name]
        return self._grads


class GradientSums:
    """Sums over the ranks of each shard. Lives as long as the network; its buffers hold the gradients.

    `shards`: for every trainable parameter, in backward's order, the ranks that hold this rank's shard, and it;
    `factored`: those whose gradients are found from factors, as a rule: they share no bucket with others.
    """

    def __init__(
        self,
        shards: Mapping[str, tuple[tuple[int, ...], Tensor]],
        transport: Transport,
        bucket_bytes: int,
        factored: Collection[str] = (),
    ) -> None:
        self._transport = transport
        self._shards = shards
        sizes = [(name, ranks, str(shard.dtype), shard.nbytes) for name, (ranks, shard) in shards.items()]
        self._buckets = fill_buckets([shard for shard in sizes if shard[0] not in factored], bucket_bytes)
        self._buckets += fill_buckets([shard for shard in sizes if shard[0] in factored], 1)
        self._bucket_of = {name: index for index, bucket in enumerate(self._buckets) for name in bucket.names}
        self._starts = {name: start for bucket in self._buckets for name, start in self._places(bucket)}
        self._buffers: dict[int, Tensor] = {}
        self._waiting: list[set[str]] = []
        self._works: list[Waitable] = []
        self._done: dict[str, Tensor] = {}
        self._before: Mapping[str, Tensor] = {}
        self._gatherings: list[Gathering] = []
        self._accumulating: Callable[[], bool] = bool
        """Until the first pass: no."""

    def begin(self, before: Mapping[str, Tensor], accumulating: Callable[[], bool]) -> None:
        """Before backward. `before`: gradients that were accumulated and that the mean must include.

        `accumulating`: whether some rank has such gradients; asked when the first factors would be sent.
        """
        self._before, self._accumulating = before, accumulating
        self._waiting = [set(bucket.names) for bucket in self._buckets]
        self._works, self._done, self._gatherings = [], {}, []
        for index in [index for index, buffer in self._buffers.items() if _in_use(buffer)]:
            del self._buffers[index]  # somebody keeps a gradient of an earlier step

    def ready(self, name: str, grad: Tensor) -> None:
        """Put the gradient in its bucket; the sum starts when the bucket is full."""
        if name in self._before:
            grad = torch.add(grad, self._before[name], alpha=1 / len(self._shards[name][0]))
        index = self._bucket_of.get(name)
        if index is None:  # nobody else holds this shard
            self._done[name] = grad
            return
        bucket = self._buckets[index]
        if len(bucket.names) == 1:
            buffer = self._done[name] = grad.contiguous()
        else:
            buffer = self._buffer(index)
            start = self._starts[name]
            view = self._done[name] = buffer[start : start + grad.numel()].view(grad.shape)
            view.copy_(grad)
        self._waiting[index].remove(name)
        if not self._waiting[index]:
            work = self._transport.sum_later(
                buffer, bucket.ranks, PURPOSE, label=GRADIENTS, kind="gradients", content=_content(bucket)
            )
            assert work is not None  # a bucket has several ranks
            self._works.append(work)

    def ready_factors(self, factors: Factors, own: Own | None, shard: Tensor) -> None:
        """Let the other ranks have this rank's factors; what all of them give is found in `finish`.

        What had accumulated must be summed all the same: where some rank has such gradients, all sum what they have.
        """
        if self._accumulating():
            self.ready(factors.weight, own_gradient(own, shard))
        else:
            self._gatherings.append(begin_gathering(factors, own, shard, self._transport))

    def finish(self) -> Mapping[str, Tensor]:
        """Wait for all factors and sums; the gradients of sums are views of the buffers."""
        for gathering in self._gatherings:
            self._done[gathering.factors.weight] = gathering.gradient()
        for work in self._works:
            work.wait()
        done, self._done, self._works, self._before, self._gatherings = self._done, {}, [], {}, []
        return done

    def _places(self, bucket: Bucket) -> Iterator[tuple[str, int]]:
        """Where the gradients of a bucket begin in its buffer."""
        sizes = [self._shards[name][1].numel() for name in bucket.names]
        return zip(bucket.names, accumulate(sizes, initial=0), strict=False)

    def _buffer(self, index: int) -> Tensor:
        if index not in self._buffers:
            bucket: Bucket = self._buckets[index]
            shards = [self._shards[name][1] for name in bucket.names]
            self._buffers[index] = shards[0].new_empty(sum(shard.numel() for shard in shards))
        return self._buffers[index]


def _content(bucket: Bucket) -> str:
    """What a bucket sums, for people."""
    first, last = bucket.names[0], bucket.names[-1]
    return first if len(bucket.names) == 1 else f"{first} to {last}"


def _in_use(buffer: Tensor) -> bool:
    """Whether any other tensor lives in a buffer's memory."""
    return _owners(buffer) > _owners(torch.empty(1, device="cpu"))


def _owners(tensor: Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
