"""Tensors in safetensors files: whole ones, and parts of cut ones with their places in the whole.

A part stands under the name of the whole tensor; where it lies is in the file's metadata, so that every file can be
read by itself, and by any other program. Files are written here and not by the package `safetensors`, whose writer
keeps all other threads of the process waiting; they are read with it.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.partition import Box, Span, overlap, slices, volume, whole
from shoal.training.checkpoints.disk_file import PAGE, DiskFile

try:
    from isal.isal_zlib import crc32
except ImportError:  # a processor for which there is none
    from zlib import crc32

PLACES = "shoal.places"
"""The key of a file's metadata under which the places of its parts stand."""
_BLOCK = 4 << 20
"""Bytes that are written and added to the checksum at a time."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Place:
    """Where a part lies: its box, in a whole tensor of this shape."""

    box: Box
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Place":
        """All of a tensor."""
        return cls(whole(shape), tuple(shape))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.box == whole(self.shape)


@dataclass(frozen=True)
class Part:
    """A tensor, or a part of one."""

    tensor: Tensor
    place: Place

    @classmethod
    def of(cls, tensor: Tensor, place: Place | None = None) -> "Part":
        """A whole tensor unless a place is given."""
        return cls(tensor, place or Place.whole(tensor.shape))


@dataclass(frozen=True)
class Seal:
    """What a whole file is known by: its size, and a checksum of this kind, one of `CHECKSUMS`."""

    bytes: int
    kind: str
    checksum: str


class Digest(Protocol):
    """What adds a checksum up, as those of `hashlib`."""

    def update(self, block: bytes | memoryview, /) -> object:
        """Add what comes next in the file."""

    def hexdigest(self) -> str:
        """Of all that was added."""


class Crc32:
    """CRC-32, as of zip files: finds what disks and file systems do, and is no proof against somebody who deceives.

    Costs an eighth of SHA-256, which took a processor from training for longer than all else of a checkpoint; half of
    it where there is no ISA-L, which sums the same in a quarter of zlib's time.
    """

    def __init__(self) -> None:
        self._value = 0

    def update(self, block: bytes | memoryview, /) -> None:
        """Add what comes next in the file."""
        self._value = crc32(block, self._value)

    def hexdigest(self) -> str:
        """Of all that was added."""
        return f"{self._value:08x}"


CHECKSUMS: dict[str, Callable[[], Digest]] = {"crc32": Crc32, "sha256": hashlib.sha256}
"""By name. Files are written with the first; those of earlier versions have the others."""


Parts = Mapping[str, Part]


def blocks_of(parts: Parts) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of these parts, on the CPU. A type that such files do not have is refused."""
    for name, part in parts.items():
        if part.tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name!r} is of type {part.tensor.dtype}, which a checkpoint cannot hold.",
                f"Use one of {', '.join(str(dtype) for dtype in _DTYPES)}.",
            )
    ordered = in_file_order(parts)
    places = {
        name: {"shape": part.place.shape, "box": [[span.start, span.stop] for span in part.place.box]}
        for name, part in parts.items()
        if not part.place.is_whole
    }
    header: dict[str, Any] = {"__metadata__": {PLACES: json.dumps(places)}} if places else {}
    end = 0
    for name, part in ordered:
        begin, end = end, end + part.tensor.nbytes
        header[name] = {"dtype": _DTYPES[part.tensor.dtype], "shape": part.tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE)  # so that tensors may go to the disk directly
    yield len(text).to_bytes(8, "little") + text
    for data in _stretches([part.tensor.detach().contiguous() for _, part in ordered]):
        for begin in range(0, len(data), _BLOCK):
            yield data[begin : begin + _BLOCK]


def in_file_order(parts: Parts) -> list[tuple[str, Part]]:
    """Long elements first, so that each tensor begins where its elements may."""
    return sorted(parts.items(), key=lambda item: -item[1].tensor.element_size())


def _stretches(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The memory of tensors, one after another; of those that lie one behind the other already, as one stretch.

    So a state of many small tensors takes a few calls, each of which lets other threads of Python go on.
    """
    stretch: Tensor | None = None
    for tensor in tensors:
        data = tensor.view(-1).view(torch.uint8)
        if stretch is not None and _follows(data, stretch):
            stretch = stretch.as_strided((len(stretch) + len(data),), (1,))
            continue
        if stretch is not None:
            yield view_of(stretch)
        stretch = data
    if stretch is not None:
        yield view_of(stretch)


def _follows(data: Tensor, before: Tensor) -> bool:
    same = data.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    return same and data.storage_offset() == before.storage_offset() + len(before)


def view_of(tensor: Tensor) -> memoryview:
    """The memory of a flat tensor of bytes on the CPU."""
    array: Any = tensor.numpy()
    return memoryview(array)


def bytes_of(parts: Parts) -> bytes:
    """A safetensors file of these parts, to be sent."""
    return b"".join(blocks_of(parts))


def write_blocks(path: Path, blocks: Iterable[bytes | memoryview]) -> Seal:
    """Write a file to the disk and add up its checksum on the way. Other threads go on meanwhile."""
    kind = next(iter(CHECKSUMS))
    digest = CHECKSUMS[kind]()
    with DiskFile(path) as file:
        for block in blocks:
            digest.update(block)
            file.write(block)
    return Seal(file.size, kind, digest.hexdigest())


def seal_of(path: Path, kind: str) -> Seal:
    """Of the file as it is on the disk, with a checksum of this kind."""
    digest, size = CHECKSUMS[kind](), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return Seal(size, kind, digest.hexdigest())


class SavedTensors:
    """Tensors of several files by name, read box by box, each from the parts that overlap it. Nothing is read before.

    A `CheckpointError` names a file that is not such.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._pieces: dict[str, list[tuple[Any, Place]]] = {}
        for path in paths:
            try:
                file: Any = safe_open(str(path), framework="pt")
                places = json.loads((file.metadata() or {}).get(PLACES, "{}"))
                for name in file.keys():  # noqa: SIM118  (it is no mapping)
                    held = tuple(file.get_slice(name).get_shape())
                    place = _place(places[name], held) if name in places else Place.whole(held)
                    self._pieces.setdefault(name, []).append((file, place))
            except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise CheckpointError(
                    f"{str(path)!r} is not a file of tensors: {str(error).splitlines()[0].rstrip('.')}.",
                    "Go on from another checkpoint.",
                ) from None

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole tensor."""
        return self._pieces[name][0][1].shape

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor's elements."""
        said = self._pieces[name][0][0].get_slice(name).get_dtype()
        return next(dtype for dtype, its in _DTYPES.items() if its == said)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, or all of it, in memory of its own."""
        shape = self.shape(name)
        box = whole(shape) if box is None else box
        if not shape:
            tensor: Tensor = self._pieces[name][0][0].get_tensor(name)
            return tensor.clone()
        result: Tensor | None = None
        there = 0
        for file, place in self._pieces[name]:
            shared = overlap(box, place.box)
            if shared is None:
                continue
            piece: Tensor = file.get_slice(name)[slices(shared, place.box)]
            if result is None:
                result = torch.empty([len(span) for span in box], dtype=piece.dtype)
            result[slices(shared, box)] = piece
            there += volume(shared)
        if result is None or there != volume(box):
            if not prod(shape):
                empty: Tensor = self._pieces[name][0][0].get_tensor(name)
                return empty.clone()
            raise CheckpointError(f"not all parts of {name!r} are there.", "Go on from another checkpoint.")
        return result


def _place(said: Any, held: tuple[int, ...]) -> Place:
    """What a file says of a part of this shape; a `ValueError` where that cannot be."""
    shape, box = tuple(said["shape"]), tuple(Span(start, stop) for start, stop in said["box"])
    fits = len(box) == len(shape) and all(
        type(size) is int and type(span.start) is int and type(span.stop) is int and 0 <= span.start < span.stop <= size
        for size, span in zip(shape, box, strict=True)
    )
    if not fits or tuple(map(len, box)) != held:
        raise ValueError(f"the place {said!r} is not that of a part of shape {held}")
    return Place(box, shape)
