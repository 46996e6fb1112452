"""`shoal plan`, `show`, `diff` and `shoal profile` as people call them."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal import Plan, Timings
from tests.cli.conftest import Shoal
from tests.cli.test_refusals import refused

SHEET = ["--model", "alexnet", "--input", "3,64,64", "--cluster", "titan-4", "--batch", "32"]
LENET = ["--model", "lenet5", "--batch", "16"]


def plan_file(folder: Path, name: str, ranks: int, **layers: str) -> str:
    content = {"schema": "shoal.plan/1", "name": name, "ranks": ranks, "layers": {"*": f"n{ranks}", **layers}}
    (folder / f"{name}.json").write_text(json.dumps(content))
    return f"{name}.json"


def test_from_a_data_sheet(shoal: Shoal, tmp_path: Path) -> None:
    run = shoal(
        "plan", *SHEET, "--workers", "4", "--pin", "features.*=n4", "--pin", "classifier.1=c2",
        "--out", "plan.json", "--picture", "plan.svg",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("alexnet under auto on 4 ranks (titan-4): batch 32 x 3 x 64 x 64")
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["features.2"][1:3] == ["n4", "4"]
    assert "c2" in rows["classifier.1"]
    assert "predicted step" in run.stdout
    assert "lower bound" in run.stdout
    assert "auto (chosen)" in run.stdout
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.ranks == 4
    assert str(dict(plan.layers)["classifier.1"]) == "c2"
    ElementTree.parse(tmp_path / "plan.svg")


def test_fixed_strategies_stand_beside_it(shoal: Shoal) -> None:
    run = shoal("plan", *LENET, "--cluster", "titan-4", "--workers", "2", COLUMNS="120")
    assert run.returncode == 0, run.stderr
    for name in ("data", "model", "owt", "spatial"):
        assert any(name in line.split()[:5] for line in run.stdout.splitlines()), name
    assert "conv1 + relu" in run.stdout
    assert "next best" in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 120


def test_under_a_limit_a_plan_may_recompute_and_says_what_that_costs_and_saves(shoal: Shoal, tmp_path: Path) -> None:
    unet = ["--model", "unet", "--model-options", "width=8,depth=2", "--input", "3,64,64", "--classes", "2"]
    given = ["plan", *unet, "--batch", "8", "--cluster", "titan-4", "--workers", "2"]
    run = shoal(*given, "--memory", "8KiB")
    (smallest,) = re.findall(r"smallest found needs ([\d,]+) and recomputes\. Give more memory", run.stderr)
    limit = smallest.replace(",", "")
    run = shoal(*given, "--memory", limit, "--out", "again.json")
    assert run.returncode == 0, run.stderr
    text = " ".join(run.stdout.split())
    assert "recomputes activations are computed a second time in backward: +" in text
    assert "beside the same cuts without, which do not fit" in text
    assert "data, recomputing" in text
    assert Plan.load(tmp_path / "again.json").recompute
    run = shoal("plan", "show", "again.json")
    assert "Activations are computed a second time in backward." in run.stdout
    assert "or recompute" in refused(shoal, *given, "--memory", limit, "--no-recompute")


@pytest.mark.timeout(300)
def test_profile_then_plan_from_it_then_measured(shoal: Shoal, tmp_path: Path) -> None:
    cache = {"SHOAL_CACHE": str(tmp_path / "cache")}
    run = shoal("profile", *LENET, "--workers", "2", "--out", "timings.json", **cache)
    assert run.returncode == 0, run.stderr
    assert "slowest kernels" in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert len(Timings.load(tmp_path / "timings.json").kernels) > 20

    run = shoal("plan", *LENET, "--timings", "timings.json", "--out", "plan.json")
    assert run.returncode == 0, run.stderr
    assert "timings timings.json" in run.stdout
    run = shoal("plan", "show", "plan.json", *LENET, "--timings", "timings.json")
    assert run.returncode == 0, run.stderr
    assert "predicted step" in run.stdout
    assert "profile" in refused(shoal, "plan", *LENET, "--timings", "timings.json", "--workers", "4")
    message = refused(shoal, "plan", "--model", "lenet5", "--batch", "24", "--timings", "timings.json")
    assert "no measurement of layer" in message
    assert "shoal profile" in message

    run = shoal("plan", *LENET, "--workers", "2", "--out", "raced.json", timeout=250, **cache)
    assert run.returncode == 0, run.stderr
    assert "this machine, measured" in run.stdout
    assert "measured  error" in run.stdout
    assert Plan.load(tmp_path / "raced.json").ranks == 2
    run = shoal("plan", *LENET, "--workers", "2", timeout=250, **cache)
    assert run.returncode == 0, run.stderr
    assert "Remembered from before; --fresh" in run.stdout


def test_show_without_a_network(shoal: Shoal, tmp_path: Path) -> None:
    plan_file(tmp_path, "mine", 2, fc1="c2", fc2="c2", fc3="c2")
    run = shoal("plan", "show", "mine.json")
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()]
    assert ["plan", "mine", "for", "2", "ranks"] in rows
    assert ["*", "1", "n2", "2"] in rows
    assert ["fc1", "…", "fc3", "3", "c2", "2"] in rows


def test_diff(shoal: Shoal, tmp_path: Path) -> None:
    a, b = plan_file(tmp_path, "a", 2), plan_file(tmp_path, "b", 2, fc1="c2")
    run = shoal("plan", "diff", a, b)
    assert run.returncode == 0, run.stderr
    assert ["fc1", "-", "c2"] in [line.split() for line in run.stdout.splitlines()]
    run = shoal("plan", "diff", a, b, *LENET, "--cluster", "titan-4")
    assert run.returncode == 0, run.stderr
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert any(line.split()[:3] == ["fc1", "n2", "c2"] for line in run.stdout.splitlines())
    assert not any(line.startswith("conv1 ") and "c2" in line for line in run.stdout.splitlines())
    assert "predicted step" in run.stdout
    run = shoal("plan", "diff", a, a, *LENET, "--cluster", "titan-4")
    assert "Both plans cut every layer alike." in run.stdout


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--cluster", "titan-5"], ["'titan-5'", "Did you mean 'titan-4'?"]),
        (["--cluster", "nowhere.yaml"], ["'nowhere.yaml'"]),
        (["--cluster", "titan-4", "--workers", "8"], ["'titan-4' has 4 ranks", "8"]),
        (["--cluster", "titan-4", "--timings", "t.json"], ["--cluster", "--timings", "Give one"]),
        (["--timings", "t.json"], ["'t.json'", "shoal profile"]),
        (["--pin", "fc1"], ["'fc1'", "PATTERN=CUT"]),
        (["--pin", "fc1=x4"], ["'x4' is not a cut"]),
        (["--cluster", "titan-4", "--pin", "fx1=c2"], ["'fx1'", "Did you mean 'fc1'?"]),
        (["--cluster", "titan-4", "--pin", "fc1=h2"], ["'fc1'", "cannot be cut h2"]),
        (["--cluster", "titan-4", "--pin", "fc1=c8"], ["'fc1'", "8 ranks"]),
        (["--pin", "fx1=c2"], ["'fx1'", "Did you mean 'fc1'?"]),
        (["--cluster", "titan-4", "--memory", "8KiB"], ["8,192 bytes", "more memory"]),
        (["--memory", "8Gb"], ["'8Gb'", "GiB"]),
        (["--model", "lenet6"], ["'lenet6'", "Did you mean 'lenet5'?"]),
        (["--model", "mine:build"], ["'mine:build'", "--input"]),
        (["--out", "nowhere/plan.json"], ["'nowhere/plan.json'"]),
        (["--picture", "plan.gif"], ["'plan.gif'", ".svg"]),
        (["shwo", "plan.json"], ["'shwo'"]),
        (["show", "nowhere.json"], ["'nowhere.json'"]),
        (["show"], ["FILE"]),
        (["show", "four.json", "--model", "lenet5"], ["'lenet5'", "--cluster"]),
        (["show", "four.json", "--cluster", "titan-4"], ["--model"]),
        (["show", "eight.json", "--model", "lenet5", "--cluster", "titan-4"], ["'titan-4' has 4 ranks", "8"]),
        (["--batch", "8", "show", "four.json"], ["stand after it"]),
        (["diff", "four.json", "eight.json"], ["4 ranks", "8"]),
    ],
)
def test_refusals(shoal_here: Shoal, tmp_path: Path, options: list[str], named: list[str]) -> None:
    plan_file(tmp_path, "four", 4)
    plan_file(tmp_path, "eight", 8)
    message = refused(shoal_here, "plan", *options)
    for word in named:
        assert word in message
