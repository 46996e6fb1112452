"""A flat tensor as fewer bytes, and back. Pure: no network, no memory of earlier tensors.

    codec    payload of n float32 elements               decoded
    bf16     2 n bytes                                   rounded to 8 bits of mantissa
    int8     n bytes, and 4 for each block of 512        within 1/254 of the block's largest magnitude
    topk     8 bytes for each of `density` n elements    the largest to the bit, the others zero
    sign     n / 8 bytes, and 4 for each block of 512    the block's mean magnitude with the element's sign

Keeps     the size of a payload depends on size and type of the tensor alone, never on its values: what is predicted is
          what is sent, and ranks can gather payloads without telling each other sizes. The same values give the same
          bytes: int8 rounds to the nearest, because rounding at random would need a state, be worse by up to twice, and
          make a run differ from its repetition; that rounding to the nearest is biased, error feedback makes good.
Costs     a few passes over the tensor, and memory for one or two more of it while they last.
Failure   what is not finite is told, not hidden: bf16 and topk send it as it is, and a block of int8 or sign that has
          such an element arrives as not a number, all of it. A payload that cannot be is a `ValueError`.

Blocks are counted from the tensor's start. A scale has the tensor's type, so that float64 has 8 bytes for one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.exchanging.servers.sparse import Selector

CodecName = Literal["bf16", "int8", "topk", "sign"]

BLOCK = 512
"""Elements that share a scale: large enough that it costs little, small enough for layers to have their own."""
DENSITY = 0.01
"""Share of the elements that topk sends unless told."""
_LARGEST_CODE = 127
_BITS = 8


class Codec(ABC):
    """Makes a payload, a flat tensor of bytes (uint8), of a flat floating tensor, and a tensor of a payload."""

    name: ClassVar[CodecName]
    adds_as: ClassVar[torch.dtype | None] = None
    """As elements of which type payloads can be added up, if they can: then a mean needs no gathering."""

    @abstractmethod
    def nbytes(self, size: int, dtype: torch.dtype) -> int:
        """What a tensor of so many elements takes, whatever its values."""

    def encode(self, values: Tensor) -> Tensor:
        """The payload of `values`, on the same device. A `ValueError` for what is not a flat floating tensor."""
        if values.dim() != 1 or not values.is_floating_point() or values.layout != torch.strided:
            raise ValueError(f"cannot compress a {values.dtype} tensor of shape {tuple(values.shape)}: not flat floats")
        return self._encode(values.detach())

    def decode(self, payload: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """A fresh tensor of what a payload says. A `ValueError` where it cannot be the payload of such a tensor."""
        expected = self.nbytes(size, dtype)
        if payload.dtype != torch.uint8 or payload.shape != (expected,):
            raise ValueError(f"{payload.numel()} bytes, where {self.name} has {expected} for {size} elements")
        # parts of it are seen as wider types, which must begin at multiples of their size
        return self._decode(payload.clone() if payload.storage_offset() % _BITS else payload, size, dtype)

    @abstractmethod
    def _encode(self, values: Tensor) -> Tensor: ...

    @abstractmethod
    def _decode(self, payload: Tensor, size: int, dtype: torch.dtype) -> Tensor: ...


def make_codec(name: CodecName, density: float = DENSITY) -> Codec:
    """The codec of this name. `density` is read by topk alone."""
    match name:
        case "bf16":
            return Bf16()
        case "int8":
            return Int8()
        case "topk":
            return TopK(density)
        case "sign":
            return Sign()
    raise ValueError(f"there is no compression {name!r}: choose one of {', '.join(get_args(CodecName))}")


@dataclass(frozen=True)
class Bf16(Codec):
    """The upper half of every float32. Magnitudes over 3.39e38 become infinite."""

    name = "bf16"
    adds_as = torch.bfloat16

    def nbytes(self, size: int, dtype: torch.dtype) -> int:
        return 2 * size

    def _encode(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16, copy=True).view(torch.uint8)

    def _decode(self, payload: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        return payload.view(torch.bfloat16).to(dtype, copy=True)


class _Blocked(Codec):
    """A scale for each block, then the elements."""

    def nbytes(self, size: int, dtype: torch.dtype) -> int:
        return _blocks_of(size) * dtype.itemsize + self._nbytes_of_elements(size)

    @abstractmethod
    def _nbytes_of_elements(self, size: int) -> int: ...

    @abstractmethod
    def _compress(self, blocks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """A scale per block, and `size` elements as bytes, of blocks that zeros fill up."""

    @abstractmethod
    def _expand(self, elements: Tensor, scales: Tensor, size: int) -> Tensor:
        """The blocks again."""

    def _encode(self, values: Tensor) -> Tensor:
        size, count = values.numel(), _blocks_of(values.numel())
        scales, elements = self._compress(_in_blocks(_wide(values)), size)
        scales = torch.where(scales.isfinite(), scales, torch.nan).to(values.dtype)
        payload = torch.empty(self.nbytes(size, values.dtype), dtype=torch.uint8, device=values.device)
        payload[: count * values.itemsize] = scales.view(torch.uint8)
        payload[count * values.itemsize :] = elements
        return payload

    def _decode(self, payload: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        width = _blocks_of(size) * dtype.itemsize
        scales = _wide(payload[:width].view(dtype))
        return self._expand(payload[width:], scales, size).view(-1)[:size].to(dtype)


@dataclass(frozen=True)
class Int8(_Blocked):
    """Multiples, from -127 to 127, of 1/127 of the largest magnitude of each block; the nearest one.

    Magnitudes so small that 1/127 of them is no float are rounded more coarsely.
    """

    name = "int8"

    def _nbytes_of_elements(self, size: int) -> int:
        return size

    def _compress(self, blocks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        largest = blocks.abs().amax(dim=1)
        step = largest / _LARGEST_CODE
        divisor = torch.where((step > 0) & step.isfinite(), step, torch.inf)  # all zeros, where there is no scale
        codes = (blocks / divisor[:, None]).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
        # NaN has no code and needs none: the block's scale is NaN
        return largest, codes.view(-1)[:size].nan_to_num_(0.0).to(torch.int8).view(torch.uint8)

    def _expand(self, elements: Tensor, scales: Tensor, size: int) -> Tensor:
        return _in_blocks(elements.view(torch.int8)).to(scales.dtype).mul_((scales / _LARGEST_CODE)[:, None])


@dataclass(frozen=True)
class Sign(_Blocked):
    """A bit for the sign of every element, the first in the lowest bit, and the mean magnitude of each block.

    As EF-signSGD (Karimireddy et al. 2019), with blocks in the place of layers. A zero counts as positive.
    """

    name = "sign"

    def _nbytes_of_elements(self, size: int) -> int:
        return -(-size // _BITS)

    def _compress(self, blocks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        lengths = torch.full((len(blocks), 1), BLOCK, device=blocks.device)
        lengths[-1:] = size - (len(blocks) - 1) * BLOCK
        # divided before it is summed: the sum may overflow where the mean does not
        return (blocks.abs() / lengths).sum(dim=1), packed((blocks >= 0).view(-1)[:size])

    def _expand(self, elements: Tensor, scales: Tensor, size: int) -> Tensor:
        signs = _in_blocks(unpacked(elements, size)).to(scales.dtype).mul_(2).sub_(1)
        return signs.mul_(scales[:, None])


@dataclass(frozen=True)
class TopK(Codec):
    """The elements of the largest magnitude, `density` of all, and their places (int32).

    Few elements (`sparse.DENSE_BELOW`), and more than would be smaller with their places, are sent whole and exactly.
    Where fewer than `density` are not zero the payload has its size nonetheless, filled up with zeros to be added.
    """

    density: float = DENSITY
    _selector: Selector = field(init=False, repr=False, compare=False)

    name = "topk"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_selector", Selector(kind="topk", density=self.density))

    def nbytes(self, size: int, dtype: torch.dtype) -> int:
        count = self._selector.most(size, dtype)
        return size * dtype.itemsize if count == size else count * (dtype.itemsize + torch.int32.itemsize)

    def _encode(self, values: Tensor) -> Tensor:
        count = self._selector.most(values.numel(), values.dtype)
        if count == values.numel():
            return values.clone().view(torch.uint8)
        chosen = self._selector.select(values)
        missing = count - chosen.values.numel()
        parts = {values.dtype: chosen.values, torch.int32: chosen.indices}
        return torch.cat([F.pad(parts[kind], (0, missing)).view(torch.uint8) for kind in _widest_first(values.dtype)])

    def _decode(self, payload: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        count = self._selector.most(size, dtype)
        if count == size:
            return payload.view(dtype).clone()
        kinds = _widest_first(dtype)
        lengths = [count * kind.itemsize for kind in kinds]
        parts = dict(zip(kinds, payload.split_with_sizes(lengths), strict=True))
        indices, values = parts[torch.int32].view(torch.int32), parts[dtype].view(dtype)
        if not 0 <= int(indices.min()) <= int(indices.max()) < size:
            raise ValueError(f"places from {int(indices.min())} to {int(indices.max())} in a tensor of {size} elements")
        return torch.zeros(size, dtype=dtype, device=payload.device).index_add_(0, indices, values)


def packed(bits: Tensor) -> Tensor:
    """Eight booleans to a byte, the first in the lowest bit; zeros fill the last one up."""
    if bits.is_cpu:
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    return packed_by_torch(bits)


def unpacked(packs: Tensor, size: int) -> Tensor:
    """The first `size` bits again, as bytes that are 0 or 1."""
    if packs.is_cpu:
        return torch.from_numpy(np.unpackbits(packs.numpy(), count=size, bitorder="little"))
    return unpacked_by_torch(packs, size)


def packed_by_torch(bits: Tensor) -> Tensor:
    """`packed`, on any device; numpy is several times faster on the host."""
    rows = F.pad(bits.to(torch.uint8), (0, -bits.numel() % _BITS)).view(-1, _BITS)
    return (rows << _places(bits)).sum(dim=1, dtype=torch.uint8)


def unpacked_by_torch(packs: Tensor, size: int) -> Tensor:
    """`unpacked`, on any device."""
    return ((packs[:, None] >> _places(packs)) & 1).view(-1)[:size]


def _places(like: Tensor) -> Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=like.device)


def _widest_first(dtype: torch.dtype) -> list[torch.dtype]:
    """The types of values and places, the widest first, so that each begins at a multiple of its size."""
    return sorted((dtype, torch.int32), key=lambda kind: -kind.itemsize)


def _wide(values: Tensor) -> Tensor:
    """The same values in a type that scales can be computed in."""
    return values if values.itemsize >= torch.float32.itemsize else values.float()


def _blocks_of(size: int) -> int:
    return -(-size // BLOCK)


def _in_blocks(values: Tensor) -> Tensor:
    """A row per block, the last one filled up with zeros; the same memory where nothing is missing."""
    missing = -values.numel() % BLOCK
    return (F.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)
