"""The mean of a bucket of gradients over ranks, compressed: a communication hook of DistributedDataParallel.

    ddp.register_comm_hook(HookState("int8"), hook)

Keeps     every rank has the same mean, bit for bit. Error feedback follows each parameter, also when DDP lays its
          buckets out anew after the first backward. Without feedback, bf16 on two ranks has the bits of torch's own
          `bf16_compress_hook`.
Costs     bf16 sends 2 (R-1)/R of its payload, in an all-reduce whose sums are rounded to bf16 as well: that is not fed
          back. Sums of the other payloads are no payloads: all ranks gather all of them, so that each sends (R-1)
          payloads, and takes R of them apart. Of what an uncompressed all-reduce sends in float32, bf16 sends half,
          int8 R/8 (from 8 ranks on it saves nothing), sign R/60, topk R/100 at density 0.01.
Failure   that of the group's own operations: whoever waits for the future gets the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch does not say that it exports it
from torch.futures import Future

from shoal.exchanging.compression.codecs import DENSITY, Codec, CodecName, make_codec
from shoal.exchanging.compression.residual import Residual
from shoal.traffic import ring_bytes


class HookState:
    """What `hook` remembers between steps on one rank. One per DDP module.

    `density`: the share that "topk" sends. `group`: the ranks, all unless given; the same as the module's.
    `feedback`: whether what was not sent is added to the next gradient, or lost.
    """

    def __init__(
        self, compress: CodecName | Codec, *, density: float = DENSITY, group: Any = None, feedback: bool = True
    ) -> None:
        self.codec = compress if isinstance(compress, Codec) else make_codec(compress, density)
        self.group = group
        self._feedback = feedback
        self._buckets: dict[int, tuple[tuple[int, ...], Residual]] = {}
        """By a bucket's number: which parameters are in it, and what is left of them."""
        self._left: dict[int, tuple[Tensor, Tensor]] = {}
        """By a parameter's id: the parameter, kept so that no other object gets that id, and what is left of it."""

    def residual(self, bucket: GradBucket) -> Residual:
        """What is left of a bucket's parameters."""
        parameters, buffer = bucket.parameters(), bucket.buffer()
        key = tuple(id(parameter) for parameter in parameters)
        known = self._buckets.get(bucket.index())
        if known is None or known[0] != key:
            like = [
                torch.empty(parameter.numel(), dtype=buffer.dtype, device=buffer.device) for parameter in parameters
            ]
            residual = Residual(self.codec, like, feedback=self._feedback)
            for parameter, left in zip(parameters, residual.state(), strict=False):  # without feedback there is none
                if id(parameter) in self._left:
                    left.copy_(self._left[id(parameter)][1])
                self._left[id(parameter)] = (parameter, left)
            known = self._buckets[bucket.index()] = key, residual
        return known[1]

    def state(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What is left of each of these parameters, flat, to be saved; zeros where nothing is."""
        unknown = [
            torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device) for parameter in parameters
        ]
        return [
            self._left.get(id(parameter), (parameter, zeros))[1]
            for parameter, zeros in zip(parameters, unknown, strict=True)
        ]

    def load_state(self, parameters: Sequence[Tensor], state: Sequence[Tensor]) -> None:
        """Go on with what `state` gave for the same parameters. A `ValueError` where sizes differ."""
        if [parameter.numel() for parameter in parameters] != [parameter.numel() for parameter in state]:
            raise ValueError("what was left is not of these parameters: their sizes differ")
        self._buckets.clear()
        self._left = {
            id(parameter): (parameter, saved.detach().to(parameter.device, copy=True).view(-1))
            for parameter, saved in zip(parameters, state, strict=True)
        }


def hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over all ranks of what they send of this bucket. Collective: all ranks call it for the same bucket."""
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        raise ValueError("gradients of a sparse layout cannot be compressed: use sparse=False")
    residual = state.residual(bucket)
    values = buffer.split_with_sizes(residual.sizes)
    group = dist.group.WORLD if state.group is None else state.group
    return mean(group, state.codec, residual.take(values), buffer.numel(), buffer.dtype)


def mean(group: Any, codec: Codec, payload: Tensor, size: int, dtype: torch.dtype) -> Future[Tensor]:
    """The mean of what the payloads of all ranks say, the same bits on all. `group`: of c10d. Collective.

    Ranks are added in their order and the sum is divided once; of bf16 the group adds.
    """
    ranks = group.size()
    if not size:
        done: Future[Tensor] = Future()
        done.set_result(torch.empty(0, dtype=dtype, device=payload.device))
        return done
    if codec.adds_as is not None:
        total = payload.view(codec.adds_as)

        def divided(future: Future[Any]) -> Tensor:
            future.value()  # raises the group's error, if there is one
            return total.to(dtype, copy=True).div_(ranks)

        return group.allreduce([total]).get_future().then(divided)  # type: ignore[no-any-return]
    payloads = [torch.empty_like(payload) for _ in range(ranks)]

    def decoded(future: Future[Any]) -> Tensor:
        future.value()
        total = codec.decode(payloads[0], size, dtype)
        for other in payloads[1:]:
            total += codec.decode(other, size, dtype)
        return total.div_(ranks)

    return group.allgather([payloads], [payload]).get_future().then(decoded)  # type: ignore[no-any-return]


def mean_bytes(codec: Codec, size: int, dtype: torch.dtype, ranks: int, rank: int) -> int:
    """What `rank` sends for one such mean."""
    payload = codec.nbytes(size, dtype)
    return (ranks - 1) * payload if codec.adds_as is None else ring_bytes(payload, ranks, rank)


@dataclass(frozen=True, eq=False)
class FlatBucket:
    """A bucket made here, with those methods of DDP's buckets that hooks call. Its memory never moves."""

    number: int
    flat: Tensor

    def index(self) -> int:
        """Its number among all buckets."""
        return self.number

    def buffer(self) -> Tensor:
        """The gradients."""
        return self.flat

    def parameters(self) -> list[Tensor]:
        """The tensors whose residuals are kept: here the memory itself."""
        return [self.flat]
