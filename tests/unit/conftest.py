"""What the tests of one module at a time share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from shoal.data import search

# Time limits per example fail on a busy machine and say nothing about the code; pytest-timeout catches hangs.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors are computed faster by one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No data set can be found except below the returned folder, which is $SHOAL_DATA."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user-data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    monkeypatch.setattr(search, "DEBIAN", tmp_path / "debian")
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "sets"))
    (tmp_path / "sets").mkdir()
    return tmp_path / "sets"
