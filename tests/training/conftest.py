"""What the tests of training leave behind in this process: nothing."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def torch_left_as_found() -> Iterator[None]:
    """`prepare` sets the threads and flushes values near zero, as a process of its own may."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
