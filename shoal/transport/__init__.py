"""The only files that touch the network.

`base.py` is the seam of ranks that work as one, `groups.py` the groups below it, `one_host.py` sums of ranks
of one host through shared memory, `table.py` where processes find each
other, `links/` connections between processes that come and go, `strangers.py` keeps Gloo's ports to ourselves,
`agreement.py` is what ranks agree on, `memory.py` ranks as threads.
"""

from shoal.transport.base import Transport, Waitable
from shoal.transport.memory import MemoryTransport, run_ranks

__all__ = ["MemoryTransport", "Transport", "Waitable", "run_ranks"]
