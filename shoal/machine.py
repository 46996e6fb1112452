"""What this process has of its machine. No torch: the doctor asks before anything else is known to work."""

import os
import sys
from pathlib import Path

import psutil

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's own switch, read when the first tensor is made."""
GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""There where a driver of NVIDIA or AMD is loaded."""


def ask_for_huge_pages() -> None:
    """Let torch take large tensors from huge pages, where the kernel offers them on demand. Before torch loads.

    A step of a large network otherwise touches tens of thousands of new pages. What the user has set stays.
    """
    os.environ.setdefault(HUGE_PAGES, "1")


def cores() -> int:
    """Cores that this process may use, which containers and batch systems often make fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_gpu_driver() -> bool:
    """Whether this host seems to have GPUs, found out without asking them."""
    return any(path.exists() for path in GPU_FILES)


def threads_each(asked: int | None, ranks_here: int) -> int:
    """Threads of each of the ranks that share this host: what the user asked for, or an equal share of the cores."""
    return asked or max(1, cores() // ranks_here)


def peak_resident_bytes() -> int:
    """Largest resident size of this process so far."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def interface_at(address: str) -> str | None:
    """The name of this host's network interface with this address; that of 127.0.0.1 leads to the host itself."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address == address for known in addresses):
            return name
    return None
