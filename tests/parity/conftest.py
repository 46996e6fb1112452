"""Pools of ranks, shared by all parity tests of a session."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.parity.pool import Pool, RankError

RunOnRanks = Callable[..., list[Any]]


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


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether every network takes three optimizer steps under every plan (`--thorough`), not only the small ones."""
    return bool(request.config.getoption("--thorough"))
