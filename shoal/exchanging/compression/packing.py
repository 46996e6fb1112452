"""A list of flat tensors as the buffers of one message, whole or compressed, and back. Pure.

Tensors of one type are compressed as one, in their order, so that few bytes are scales. Here such a tensor is a *flat*.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.exchanging.compression.codecs import Codec
from shoal.exchanging.compression.residual import of_one_kind


class Packer:
    """For tensors of these sizes and types, in host memory.

    Keeps     sizes of buffers depend on no value. Whole buffers lose nothing.
    Costs     `flats` copies; `tensors` and whole buffers share memory with what they are made of.
    Failure   buffers that cannot be of such tensors are a `ValueError`.
    """

    def __init__(self, codec: Codec, sizes: Sequence[int], kinds: Sequence[torch.dtype]) -> None:
        self.codec = codec
        self._together = of_one_kind(kinds)
        self._parts = [[sizes[number] for number in numbers] for numbers in self._together]
        self._kinds = [kinds[numbers[0]] for numbers in self._together]
        self._sizes = [sum(parts) for parts in self._parts]

    def flats(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of each type as one new tensor."""
        return [torch.cat([tensors[number] for number in numbers]) for numbers in self._together]

    def tensors(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The tensors again, in their order: views."""
        by_number: dict[int, Tensor] = {}
        for numbers, parts, flat in zip(self._together, self._parts, flats, strict=True):
            by_number |= dict(zip(numbers, flat.split_with_sizes(parts), strict=True))
        return [by_number[number] for number in sorted(by_number)]

    def packed(self, flats: Sequence[Tensor], *, whole: bool) -> list[Tensor]:
        """Buffers to send."""
        return [flat.view(torch.uint8) if whole else self.codec.encode(flat) for flat in flats]

    def empty(self, *, whole: bool) -> list[Tensor]:
        """Buffers to receive such a message into."""
        sizes = zip(self._sizes, self._kinds, strict=True)
        return [torch.empty(self._nbytes(size, kind, whole), dtype=torch.uint8) for size, kind in sizes]

    def unpacked(self, buffers: Sequence[Tensor], *, whole: bool) -> list[Tensor]:
        """What was packed, as far as the codec keeps it."""
        if len(buffers) != len(self._sizes):
            raise ValueError(f"{len(buffers)} buffers, where {len(self._sizes)} belong")
        given = zip(buffers, self._sizes, self._kinds, strict=True)
        return [self._unpacked(buffer, size, kind, whole) for buffer, size, kind in given]

    def _nbytes(self, size: int, kind: torch.dtype, whole: bool) -> int:
        return size * kind.itemsize if whole else self.codec.nbytes(size, kind)

    def _unpacked(self, buffer: Tensor, size: int, kind: torch.dtype, whole: bool) -> Tensor:
        if not whole:
            return self.codec.decode(buffer, size, kind)
        if buffer.numel() != size * kind.itemsize:
            raise ValueError(f"{buffer.numel()} bytes, where {size} elements have {size * kind.itemsize}")
        return buffer.view(kind)
