"""Quantities with a unit, and how people read them."""

from typing import NewType

Seconds = NewType("Seconds", float)
Bytes = NewType("Bytes", int)


def show_bytes(count: int) -> str:
    """A size for people, in binary units.

    >>> show_bytes(512), show_bytes(1536), show_bytes(25 * 2**30)
    ('512 B', '1.5 KiB', '25.0 GiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_seconds(seconds: float) -> str:
    """A duration for people.

    >>> show_seconds(0.0123), show_seconds(7.25), show_seconds(200)
    ('12.3 ms', '7.2 s', '3 min 20 s')
    """
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
