"""Resident memory of this process, from the kernel. Linux only."""

from pathlib import Path


def resident_bytes() -> int:
    """Now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The largest since `forget_peak`, or since the process began."""
    return _status("VmHWM")


def forget_peak() -> None:
    """From now on the peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
