"""Work during which Python does not look for cycles of garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For work that keeps nearly all it makes, and makes millions of small values: within, the collector does not run.

    It would go through all of them, and through all that the process has imported, again and again to find next to
    nothing: a third of a search for 64 devices. What is counted by references is freed as ever; cycles, also those of
    other threads, wait until the block ends, also by an error. A collector that was off stays off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
