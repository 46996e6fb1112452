"""A page that is served while a test looks at it."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shoal.transport.page import PageServer


@contextmanager
def served(folder: Path, texts: Mapping[str, bytes]) -> Iterator[str]:
    """Its address."""
    with PageServer(folder, texts) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()
