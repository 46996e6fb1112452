"""What the parity tests alone need."""

import pytest

from tests.conftest import RunOnRanks as RunOnRanks


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether every network takes three optimizer steps under every plan (`--thorough`), not only the small ones."""
    return bool(request.config.getoption("--thorough"))
