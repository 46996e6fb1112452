"""Several small files in one message: their names and sizes, then their bytes, one after the other."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from shoal.errors import MessageError


def packed(files: Mapping[str, bytes]) -> bytes:
    """Files as one message."""
    head = json.dumps([[name, len(content)] for name, content in files.items()]).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *files.values()])


def unpacked(message: memoryview) -> dict[str, memoryview]:
    """What `packed` gave, without a copy; a `MessageError` for what is nothing such, or names files elsewhere."""
    try:
        return dict(_files(message))
    except (ValueError, TypeError, UnicodeDecodeError) as error:
        raise MessageError(
            f"a replica sent files that cannot be read: {error}.", "This is a bug: please report it."
        ) from None


def _files(message: memoryview) -> Iterator[tuple[str, memoryview]]:
    size = int.from_bytes(message[:8], "little")
    begin = 8 + size
    entries: Sequence[tuple[str, int]] = json.loads(bytes(message[8:begin]))
    for name, length in entries:
        if PurePath(name).name != name or name.startswith(".") or length < 0 or begin + length > len(message):
            raise ValueError(f"{name!r} of {length} bytes")
        yield name, message[begin : begin + length]
        begin += length
    if begin != len(message):
        raise ValueError(f"{len(message) - begin} bytes belong to no file")
