"""Lightning's Trainer under a plan has one device's losses, and what it saves is whole."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_script.py"

if find_spec("lightning") is None:
    pytest.skip("lightning is not installed: pip install '.[lightning]' to have it tested", allow_module_level=True)


def printed(plan: str) -> tuple[list[float], list[float]]:
    """Losses, and the sum over the weights of the saved checkpoint."""
    run = subprocess.run([sys.executable, str(EXAMPLE), plan], capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    losses, weights = (
        [float(n) for n in re.findall(rf"{word} ([\d.]+)$", run.stdout, re.M)] for word in ("loss", "weights")
    )
    return losses, weights


@pytest.fixture(scope="module")
def one_device() -> tuple[list[float], list[float]]:
    return printed("one")


@pytest.mark.parametrize("plan", ["spatial", pytest.param("data", marks=pytest.mark.thorough), "model"])
def test_one_devices_losses_and_whole_checkpoints(one_device: tuple[list[float], list[float]], plan: str) -> None:
    losses, weights = printed(plan)
    assert (len(losses), len(weights)) == (4, 1)
    assert losses == pytest.approx(one_device[0], rel=1e-8)
    assert weights == pytest.approx(one_device[1], rel=1e-9)


def test_what_cannot_be_laid_is_refused() -> None:
    from lightning.pytorch import LightningModule
    from torch import nn

    from shoal.errors import ConfigError
    from shoal.integrations.lightning import ShoalStrategy

    module = LightningModule()
    module.net = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="has no network 'model'"):
        ShoalStrategy((2, 2))._lay(module)
    module.model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"outside of its network 'model': net\.weight"):
        ShoalStrategy((2, 2))._lay(module)
