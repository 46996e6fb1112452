"""`shoal simulate` as people call it, and wrongly."""

import json
from pathlib import Path

import pytest

import shoal as package
from shoal.timeline import Trace
from tests.cli.conftest import Shoal
from tests.cli.test_plan import plan_file
from tests.cli.test_refusals import refused

LENET = ["--model", "lenet5", "--batch", "16", "--cluster", "titan-4"]


def test_a_plan_what_if_and_its_trace(shoal: Shoal, tmp_path: Path) -> None:
    run = shoal("simulate", "owt", *LENET, "--what-if", "bandwidth=2x", "--what-if", "devices=8", "--trace", "t.json")
    assert run.returncode == 0, run.stderr
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert "lenet5 under owt on 4 ranks (titan-4), simulated: batch 16" in run.stdout
    assert "bandwidth=2x" in run.stdout
    trace = Trace.load(tmp_path / "t.json")
    assert trace.origin == "predicted"
    assert len(trace.ranks) == 4
    assert {"forward", "backward", "move", "update"} <= {piece.kind for piece in trace.slices}


def test_numbers_for_programs(shoal: Shoal, tmp_path: Path) -> None:
    file = plan_file(tmp_path, "mine", 2, fc1="c2")
    run = shoal("simulate", file, *LENET, "--slow", "1=0.5", "--what-if", "compute=2x,bandwidth=4x", "--json")
    assert run.returncode == 0, run.stderr
    first, faster = json.loads(run.stdout)
    assert first["ranks"] == 2
    assert first["plan"] == "mine"
    assert 0 < faster["step_seconds"] < first["step_seconds"]
    assert faster["bytes_per_step"] == first["bytes_per_step"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", *LENET, "--what-if", "speed=2x"], "'speed' cannot be changed"),
        (["data", *LENET, "--what-if", "bandwidth=2"], "'2' is not a factor"),
        (["data", *LENET, "--what-if", "devices=many"], "'many' is not a number"),
        (["data", *LENET, "--slow", "7=0.5"], "slow rank 7"),
        (["data", *LENET, "--slow", "half"], "'half' is not RANK=SPEED"),
        (["data", *LENET, "--workers", "9"], "has 4 ranks; 9 were asked for"),
        (["dta", *LENET], "there is no plan 'dta'"),
        (["data", "--model", "lenet5"], "a simulation needs speeds"),
        (["mine.json", *LENET, "--what-if", "devices=4"], "plan 'mine' is for 2 ranks; 4 are asked for"),
    ],
)
def test_refusals(shoal: Shoal, tmp_path: Path, arguments: list[str], message: str) -> None:
    plan_file(tmp_path, "mine", 2)
    assert message in refused(shoal, "simulate", *arguments)


def test_from_python() -> None:
    net = package.zoo.build("lenet5")
    even = package.simulate(net, (16, 1, 28, 28), "data", cluster="titan-4", ranks=2)
    slow = package.simulate(net, (16, 1, 28, 28), "data", cluster="titan-4", ranks=2, slow={1: 0.5}, steps=2)
    assert even.ranks == ("rank 0", "rank 1")
    assert slow.seconds > 2 * even.seconds
    assert sorted(slow.steps()) == [1, 2]
    with pytest.raises(package.errors.InputError, match="no cluster 'titan'"):
        package.simulate(net, (16, 1, 28, 28), cluster="titan")
