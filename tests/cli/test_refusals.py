"""Bad input: exit code 2, one message with the value and the remedy, no traceback, nothing left behind."""

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Shoal


def refused(shoal: Shoal, *arguments: str, **variables: str) -> str:
    run = shoal(*arguments, **variables)
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert all(line.startswith("loading ") for line in run.stdout.splitlines())  # and nothing after that
    said = run.stderr.removeprefix("loading ...\n")  # progress, where this machine takes its time
    assert said.startswith("shoal: ")
    assert said.count("shoal: ") == 1
    assert 2 <= len(said.strip().splitlines()) <= 8, said  # the problem, then the remedy
    return said


def test_wrong_model_name(shoal_here: Shoal, tiny: str) -> None:
    message = refused(shoal_here, "train", "--model", "resnet19", "--data", tiny, "--out", "out")
    assert "'resnet19'" in message
    assert "Did you mean 'resnet18'?" in message
    assert "package.module:factory" in message


def test_missing_data(shoal_here: Shoal, tmp_path: Path) -> None:
    message = refused(shoal_here, "train", "--data", "pets32", SHOAL_DATA=str(tmp_path / "nowhere"), HOME=str(tmp_path))
    assert "pets32" in message
    assert "SHOAL_DATA" in message


def test_unknown_data(shoal_here: Shoal) -> None:
    message = refused(shoal_here, "train", "--data", "digitz")
    assert "'digitz'" in message
    assert "digits" in message


def test_batch_larger_than_the_data_set(shoal_here: Shoal, tiny: str, tmp_path: Path) -> None:
    message = refused(shoal_here, "train", "--data", tiny, "--batch", "81", "--out", "out")
    assert "81" in message
    assert "80" in message
    assert not (tmp_path / "out").exists()


def test_corrupt_file(shoal_here: Shoal, tmp_path: Path) -> None:
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and then nothing")
    message = refused(shoal_here, "train", "--data", "npz:broken.npz")
    assert "broken.npz" in message


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX files")
def test_unwritable_output_folder(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")  # root may write anywhere, but not below a file
    message = refused(shoal, "train", "--data", tiny, "--out", "file/run")
    assert "'file/run'" in message
    assert "--out" in message


def test_output_folder_that_holds_a_run(shoal: Shoal, tiny: str) -> None:
    assert shoal("train", "--data", tiny, "--epochs", "1", "--batch", "40", "--out", "out").returncode == 0
    message = refused(shoal, "train", "--data", tiny, "--out", "out")
    assert "already holds a run" in message
    assert "--resume out" in message


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ("epohcs: 3\n", ["'epohcs'", "Did you mean 'epochs'?", "'recipe.yaml'"]),
        ("epochs: [3\n", ["'recipe.yaml', line", "not YAML"]),
        ("epochs: many\n", ["epochs = 'many'", "Passes over"]),
    ],
)
def test_recipe_with_a_typo(shoal_here: Shoal, tmp_path: Path, recipe: str, named: list[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe)
    message = refused(shoal_here, "train", "recipe.yaml")
    for word in named:
        assert word in message


def test_recipe_that_is_not_there(shoal_here: Shoal) -> None:
    assert "'nothing.yaml'" in refused(shoal_here, "train", "nothing.yaml")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], ["'trian'", "Did you mean 'train'?"]),
        (["train", "--epohcs", "3"], ["--epohcs", "--epochs"]),
        (["train", "--epochs"], ["--epochs", "argument"]),
        (["train", "--epochs", "-1"], ["epochs = '-1'", "greater than 0"]),
        (["train", "--device", "abacus"], ["'abacus'", "cpu"]),
        (["train", "--workers", "none"], ["workers = 'none'", "auto is one per core"]),
        (["train", "--plan", "dta"], ["'dta'", "Did you mean 'data'?"]),
        (["train", "--plan", "2x2"], ["'2x2' needs 4 ranks", "there are 1"]),
        (["train", "--plan", "nowhere.json"], ["'nowhere.json'", "cannot be read"]),
        (["train", "--workers", "2", "--device", "abacus"], ["'abacus'", "2 workers"]),
        (["train", "--augment", "flap"], ["flap", "flip"]),
        (["train", "--resume", "nowhere"], ["'nowhere'", "checkpoints/"]),
        (["train", "--model", "shoal.zoo:nothing"], ["shoal.zoo:nothing"]),
    ],
)
def test_options(shoal_here: Shoal, arguments: list[str], named: list[str]) -> None:
    message = refused(shoal_here, *arguments)
    for word in named:
        assert word in message


def test_network_that_does_not_fit_the_data(shoal_here: Shoal, tiny: str) -> None:
    message = refused(shoal_here, "train", "--data", tiny, "--model", "alexnet")
    assert "8x8" in message or "(1, 8, 8)" in message


def test_network_for_another_task(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n"
    )
    message = refused(shoal, "train", "--data", tiny, "--model", "mine:net")
    assert "(1, 3)" in message
    assert "(1, 4)" in message


def test_a_loss_that_is_no_number_is_a_failed_run(shoal: Shoal, tiny: str) -> None:
    run = shoal("train", "--data", tiny, "--batch", "8", "--epochs", "9", "--lr", "1e30", "--out", "out")
    assert run.returncode == 1
    assert "--lr" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            "--exchange sync --optimizer adam",
            ["as SGD, and cannot do what Adam", "--optimizer sgd", "'allreduce'"],
        ),
        ("--exchange downpour --optimizer adagrad", ["as SGD, and cannot do what Adagrad does", "rule='add'"]),
        ("--exchange softsync --clip 1", ["clip = 1", "with softsync servers step", "--clip", "allreduce"]),
        ("--exchange gossip --ema 0.9", ["ema = 0.9", "with gossip no replica sees", "allreduce"]),
        ("--exchange allreduce --amp fp16", ["amp = 'fp16'", "allreduce", "--amp bf16"]),
        ("--exchange hogwild --optimizer-options nesterov=true", ["cannot do nesterov=True of SGD", "'allreduce'"]),
    ],
)
def test_what_an_exchange_cannot_do(given: str, named: list[str], shoal_here: Shoal, tiny: str, tmp_path: Path) -> None:
    arguments = ["--data", tiny, "--batch", "8", "--replicas", "2", "--out", "out", *given.split()]
    message = refused(shoal_here, "train", *arguments)
    for words in named:
        assert words in message
    assert not (tmp_path / "out").exists()
