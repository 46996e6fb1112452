"""Loads, by being imported, all that most ranks need. The helper of `forked.py` does so before it forks the first one;
in any other process it does nothing.

It ends in between when the process that wanted it is gone, since a command that was refused leaves nothing behind.

The helper was started with stop signals blocked, and keeps them so: whoever sends one to all processes of a run (a
service manager, a batch system) means the ranks. These get them, and so does any other process that is forked here. It
is in a session of its own, so that what the terminal sends cannot reach a rank that is not ready for it.
"""

import importlib
import os
import signal
import sys
from contextlib import suppress

from shoal.launching.forked import STOP_SIGNALS

_helper, _launcher = os.getpid(), os.getppid()


def _unblock() -> None:
    if os.getppid() == _helper:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    os.register_at_fork(after_in_child=_unblock)
    with suppress(PermissionError):  # it has one already
        os.setsid()
    for _name in ("numpy", "torch", "shoal.training.rank", "shoal.replicas.worker", "sympy", "torch._dynamo"):
        if os.getppid() != _launcher:
            os._exit(0)
        importlib.import_module(_name)
