"""Options of the whole suite, and pools of ranks that all tests of a session share."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Two tests at a time, each with a thread per core: those that wait must leave the cores to those that compute. OpenMP
# reads this while torch loads, here and in all processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from tests.parity.pool import Pool, RankError

RunOnRanks = Callable[..., list[Any]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="three optimizer steps for every network under every plan in the parity suite (about 15 minutes more)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases that differ little from others wait for `--thorough`."""
    if not config.getoption("--thorough"):
        for item in items:
            if item.get_closest_marker("thorough"):
                item.add_marker(pytest.mark.skip(reason="other cases are much alike; all of them with --thorough"))


@pytest.fixture(autouse=True)
def torch_left_as_found() -> Iterator[None]:
    """No test leaves to the next one how many threads torch has, or that it flushes values near zero.

    What a rank does in a process of its own does both, and hypothesis draws no floats where such values are flushed.
    """
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[RunOnRanks]:
    """`on_ranks(world, case, ...)`: what the case returned on each rank."""
    pools: dict[int, Pool] = {}

    def run(world: int, case: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        if world not in pools:
            pools[world] = Pool(world)
        try:
            return pools[world].run(case, *args, **options)
        except RankError:
            pools.pop(world).close()
            raise

    yield run
    for pool in pools.values():
        pool.close()
