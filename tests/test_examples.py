"""Every example runs as its docstring says.

One of a kind is begun as people begin it, `python` or torchrun; the others differ in their code and not in how they
begin, and are begun as copies of a process that has loaded torch.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import as_ranks, script

pytestmark = pytest.mark.timeout(400)
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
    if path.stem == "own_objects":  # starts two workers
        run = subprocess.run(
            [sys.executable, str(path)],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert "epoch 2" in run.stdout
        return
    begun = script(tmp_path, path, TMPDIR=str(tmp_path), OMP_NUM_THREADS="1")
    out, err = begun.communicate(timeout=100)
    assert begun.returncode == 0, err
    assert "epoch 2" in out


def under_torchrun(path: Path, ranks: int, *arguments: str) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run = subprocess.run([*launch, str(path), *arguments], capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def losses(printed: str) -> list[float]:
    return [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]


def one_plan_each() -> Iterator[Any]:
    """Every script under two plans, one of them with --thorough only."""
    for number, path in enumerate(IDIOMS):
        for which, plan in enumerate(("spatial", "model")):
            marks = [] if which == number % 2 else [pytest.mark.thorough]
            yield pytest.param(path, plan, marks=marks, id=f"{path.stem}-{plan}")


@pytest.mark.parametrize(("path", "plan"), [*one_plan_each()])
def test_idioms_have_one_devices_losses(path: Path, plan: str, tmp_path: Path) -> None:
    alone = script(tmp_path, path)
    out, err = alone.communicate(timeout=100)
    assert alone.returncode == 0, err
    wanted = losses(out)
    assert len(wanted) == 4
    assert losses(as_ranks(tmp_path, 2, path, plan)[0]) == pytest.approx(wanted, rel=1e-9)


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
    request: pytest.FixtureRequest, one_device: list[float], plan: str, ranks: int, tmp_path: Path
) -> None:
    if plan in ("model", "owt", "2x2") and not request.config.getoption("--thorough"):
        pytest.skip("the parity suite has these plans; the script under them with --thorough")
    path = FOLDER / "shoal_script.py"
    printed = under_torchrun(path, ranks, plan) if plan == "data" else as_ranks(tmp_path, ranks, path, plan)[0]
    assert losses(printed) == pytest.approx(one_device, rel=1e-8)


def test_the_ddp_script_runs_and_differs_in_one_line(tmp_path: Path) -> None:
    assert len(losses(as_ranks(tmp_path, 2, FOLDER / "ddp_script.py")[0])) == 4
    ddp, ours = ((FOLDER / f"{name}_script.py").read_text().splitlines() for name in ("ddp", "shoal"))
    code = [[line for line in lines[4:] if "nn.parallel" not in line] for lines in (ddp, ours)]
    assert sum(a != b for a, b in zip(*code, strict=True)) == 1


@pytest.mark.parametrize(("name", "ranks"), [("exchange_script", 2), ("replicas_of_groups", 4)])
def test_replicas_have_one_accuracy_in_the_end(name: str, ranks: int, tmp_path: Path) -> None:
    """Under torchrun the first of them is in `tests/cli/test_exchange.py`."""
    printed, _ = as_ranks(tmp_path, ranks, FOLDER / f"{name}.py")
    accuracies = re.findall(r"accuracy (\d\.\d+)", printed)  # ranks may write on one line
    assert len(accuracies) == ranks
    assert len(set(accuracies)) == 1
