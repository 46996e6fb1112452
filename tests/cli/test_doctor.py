"""`shoal doctor` and the help texts."""

import pytest

from tests.cli.conftest import Shoal


def test_doctor_tells_what_there_is_and_how_to_add_the_rest(
    shoal: Shoal, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = str(tmp_path_factory.mktemp("empty"))
    run = shoal("doctor", SHOAL_DATA=empty, HOME=empty, COLUMNS="100")
    assert run.returncode == 0, run.stderr
    for word in ("cores", "memory", "torch", "gloo", "cpu", "digits", "pets32", "SHOAL_DATA"):
        assert word in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 100


def test_doctor_fits_a_narrow_terminal(shoal: Shoal) -> None:
    run = shoal("doctor", COLUMNS="60")
    assert run.returncode == 0, run.stderr
    assert max(map(len, run.stdout.splitlines())) <= 60


def test_help_lists_every_setting(shoal: Shoal) -> None:
    run = shoal("train", "--help")
    assert run.returncode == 0
    for option in ("--model", "--weight-decay", "--print-config", "--resume", "cosine|step|constant"):
        assert option in run.stdout


def test_version(shoal: Shoal) -> None:
    assert shoal("--version").stdout.startswith("shoal, version ")
