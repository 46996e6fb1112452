"""Options of the whole suite, and pools of ranks that all tests of a session share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.parity.pool import Pool, RankError

RunOnRanks = Callable[..., list[Any]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="three optimizer steps for every network under every plan in the parity suite (about 15 minutes more)",
    )


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
