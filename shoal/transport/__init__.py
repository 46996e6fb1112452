"""The only files that touch the network."""

from shoal.transport.base import Transport, Waitable
from shoal.transport.memory import MemoryTransport, run_ranks

__all__ = ["MemoryTransport", "Transport", "Waitable", "run_ranks"]
