"""`shoal verify` as people call it: exit 0 equal, 1 different with the layer named, 2 refused with one message."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Shoal
from tests.cli.test_refusals import refused

NET = """
from torch import nn

def build(classes=4, input=(1, 8, 8)):
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * input[1] * input[2], classes))
"""
BREAKS_A_RULE = """
from dataclasses import replace
from shoal.operators.windows import Convolution

sound = Convolution.run

def one_row_off(self, call):
    moved = {**call.tensors, "input": call.tensors["input"].roll(1, 2)}
    return sound(self, replace(call, tensors=moved) if call.cut else call)

Convolution.run = one_row_off
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(NET)
    return "mine:build"


def test_equal(shoal: Shoal, net: str, tiny: str, tmp_path: Path) -> None:
    run = shoal("verify", "--model", net, "--data", tiny, "--plan", "owt", "--json", "verdict.json", "--steps", "2")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "under owt on 2 workers" in lines[0]
    assert any(line.split()[:2] == ["0", "n2"] for line in lines)
    assert "Equal: the largest relative difference" in run.stdout
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["schema"] == "shoal.verify/1"
    assert verdict["passed"] is True
    assert verdict["steps"] == 2
    assert verdict["input"] == [4, 1, 8, 8]
    assert verdict["worst"] < 1e-12
    assert [row["layer"] for row in verdict["rows"]] == ["0", "1", "2", "3", "4", "5"]
    assert verdict["culprit"] is None


def test_different(shoal: Shoal, net: str, tmp_path: Path) -> None:
    """A rule that is broken in the ranks too, since each imports the module that breaks it."""
    (tmp_path / "mine.py").write_text(NET + BREAKS_A_RULE)
    run = shoal("verify", "--model", net, "--input", "1,8,8", "--plan", "spatial", "--json", "verdict.json")
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stderr
    assert "DIFFERENT" in run.stdout
    assert "At fault: layer '0' (conv2d, cut h2) computes another output" in " ".join(run.stdout.split())
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["culprit"]["layers"] == ["0"]
    assert verdict["passed"] is False


def test_zoo_network_at_its_small_size(shoal: Shoal) -> None:
    run = shoal("verify", "--model", "lenet5", "--workers", "1", "--all", "--dtype", "float32")
    assert run.returncode == 0, run.stderr
    assert "fc3" in run.stdout
    assert "float32" in run.stdout


def test_as_ranks_of_torchrun(net: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shoal", "verify"]
    run = subprocess.run(
        [*command, "--model", net, "--input", "1,8,8", "--plan", "model"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Equal: ") == 1  # rank 0 alone tells


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--model", "resnet19"], ["'resnet19'", "Did you mean 'resnet18'?"]),
        (["--model", "mine:build"], ["'mine:build'", "--input"]),
        (["--plan", "3x5"], ["'3x5'", "15 ranks"]),
        (["--plan", "nothing.json"], ["'nothing.json'"]),
        (["--dtype", "float16"], ["'float16'", "float32"]),
        (["--epochs", "3"], ["--epochs"]),
        (["--json", "nowhere/verdict.json"], ["'nowhere/verdict.json'"]),
        (["--model", "mine:build", "--input", "2,8,8"], ["(4, 2, 8, 8)", "--input"]),
    ],
)
@pytest.mark.usefixtures("net")
def test_refusals(shoal: Shoal, options: list[str], named: list[str]) -> None:
    message = refused(shoal, "verify", *options)
    for word in named:
        assert word in message


def test_batch_larger_than_the_data(shoal: Shoal, tiny: str) -> None:
    assert "81" in refused(shoal, "verify", "--data", tiny, "--batch", "81")


def test_cut_that_does_not_fit_is_found_by_the_ranks(shoal: Shoal, tmp_path: Path) -> None:
    plan = {"schema": "shoal.plan/1", "name": "mine", "ranks": 2, "layers": {"relu1": "h2", "flatten": "h2"}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run = shoal("verify", "--plan", "plan.json")
    assert run.returncode == 2, run.stderr
    assert "'flatten'" in run.stderr
    assert run.stderr.count("shoal: ") == 1
    assert "Traceback" not in run.stderr
