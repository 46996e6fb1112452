"""The real command line, in a process of its own."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.cli.main import main
from tests.cli.commands import begin

Shoal = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shoal(tmp_path: Path) -> Shoal:
    """Run `shoal ARGUMENTS` in an empty folder, without colours, and give what it printed."""

    def run(*arguments: str, timeout: float = 200, **variables: str) -> subprocess.CompletedProcess[str]:
        begun = begin(tmp_path, "shoal", *arguments, **variables)
        try:
            out, err = begun.communicate(timeout=timeout)
        finally:
            begun.kill()
        assert begun.returncode is not None
        return subprocess.CompletedProcess(["shoal", *arguments], begun.returncode, out, err)

    return run


@pytest.fixture
def shoal_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shoal:
    """The same in this process, which need not load torch again: for commands that end before they start anything."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["shoal", *arguments])
        for name, value in {"NO_COLOR": "1", **variables}.items():
            monkeypatch.setenv(name, value)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capfd.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return subprocess.CompletedProcess(["shoal", *arguments], code, printed.out, printed.err)

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """`--data` of a set that trains in a second: 80 + 20 grey images of 8x8 in four classes."""
    draws = np.random.default_rng(0)
    y = np.arange(100) % 4
    x = draws.normal(y[:, None, None] * 40.0 + 60.0, 10.0, size=(100, 8, 8)).clip(0, 255).astype(np.uint8)
    np.savez(tmp_path / "tiny.npz", x=x, y=y)
    return "npz:tiny.npz"
