"""Memory of this process and of the machine, from the kernel. Linux only."""

import sys
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


def available_bytes() -> int:
    """What new processes may take on this machine before others have to go."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def require(needed: int, remedy: str) -> None:
    """End this process where the machine has not so much memory to spare."""
    if needed > available_bytes():
        sys.exit(f"needs about {needed / 1e9:.1f} GB of memory; {available_bytes() / 1e9:.1f} are available. {remedy}")


def go_first() -> None:
    """Where memory runs out, let the kernel end this process and what it starts, and nothing else on the machine."""
    Path("/proc/self/oom_score_adj").write_text("1000")
