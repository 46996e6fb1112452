"""Every example runs as its docstring says."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
PLAIN = [FOLDER / "own_network.py", FOLDER / "own_objects.py", FOLDER / "plain_loop.py"]
UNDER_TORCHRUN = [FOLDER / "ddp_script.py", FOLDER / "shoal_script.py"]
IDIOMS = [FOLDER / f"{name}.py" for name in ("gan", "adversarial", "multi_scale", "two_inputs", "auxiliary_heads")]
REPLICAS = [FOLDER / "exchange_script.py", FOLDER / "replicas_of_groups.py"]
ELSEWHERE = [FOLDER / "ranks.py", FOLDER / "lightning_script.py"]  # what idioms share; tests/integrations


def test_every_example_is_tested() -> None:
    assert sorted(FOLDER.glob("*.py")) == sorted(PLAIN + UNDER_TORCHRUN + IDIOMS + REPLICAS + ELSEWHERE)


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "epoch 2" in run.stdout


def losses(script: Path, ranks: int, *arguments: str) -> list[float]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return printed([*launch, str(script), *arguments])


def printed(command: list[str]) -> list[float]:
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    return [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("step")]


def one_plan_each() -> Iterator[Any]:
    """Every script under two plans, one of them with --thorough only."""
    for number, path in enumerate(IDIOMS):
        for which, plan in enumerate(("spatial", "model")):
            marks = [] if which == number % 2 else [pytest.mark.thorough]
            yield pytest.param(path, plan, marks=marks, id=f"{path.stem}-{plan}")


@pytest.mark.parametrize(("path", "plan"), [*one_plan_each()])
def test_idioms_have_one_devices_losses(path: Path, plan: str) -> None:
    wanted = printed([sys.executable, str(path)])
    assert len(wanted) == 4
    assert losses(path, 2, plan) == pytest.approx(wanted, rel=1e-9)


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    """The loss curve of the same network without any parallelism."""
    import torch
    from torch.nn import functional as F

    import shoal

    torch.manual_seed(0)
    splits = shoal.data.load("digits")
    model = shoal.zoo.resnet18(input=splits.train.shape, classes=10).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    order = shoal.data.BatchOrder(samples=len(splits.train), batch=16, seed=0)
    curve = []
    for step in range(4):
        x, y = splits.train.batch(order.indices(0, step))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.double()), y)
        torch.autograd.backward(loss)
        optimizer.step()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize(("plan", "ranks"), [("data", 2), ("model", 2), ("owt", 2), ("spatial", 2), ("2x2", 4)])
def test_the_changed_script_has_one_devices_losses(
    request: pytest.FixtureRequest, one_device: list[float], plan: str, ranks: int
) -> None:
    if plan in ("model", "owt", "2x2") and not request.config.getoption("--thorough"):
        pytest.skip("the parity suite has these plans; the script under them with --thorough")
    assert losses(FOLDER / "shoal_script.py", ranks, plan) == pytest.approx(one_device, rel=1e-8)


def test_the_ddp_script_runs_and_differs_in_one_line() -> None:
    assert len(losses(FOLDER / "ddp_script.py", 2)) == 4
    ddp, ours = ((FOLDER / f"{name}_script.py").read_text().splitlines() for name in ("ddp", "shoal"))
    code = [[line for line in lines[4:] if "nn.parallel" not in line] for lines in (ddp, ours)]
    assert sum(a != b for a, b in zip(*code, strict=True)) == 1


@pytest.mark.parametrize(("name", "ranks"), [("exchange_script", 2), ("replicas_of_groups", 4)])
def test_replicas_have_one_accuracy_in_the_end(name: str, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run = subprocess.run(
        [*command, str(FOLDER / f"{name}.py")], capture_output=True, text=True, timeout=110, check=False
    )
    assert run.returncode == 0, run.stderr
    accuracies = re.findall(r"accuracy (\d\.\d+)", run.stdout)  # ranks may write on one line
    assert len(accuracies) == ranks
    assert len(set(accuracies)) == 1
