"""The public names are one screen, all there, and cost nothing until they are used."""

import subprocess
import sys
from pathlib import Path

import pytest

import shoal

PUBLIC = [
    *("__version__", "parallelize", "ParallelModule", "full_state_dict", "load_full_state_dict", "clip_grad_norm_"),
    "elementwise_optimizer",
    *(
        "exchange",
        "compression",
        "capture",
        "LayerGraph",
        "verify",
        "Verdict",
        "TrainConfig",
        "train",
        "resume",
        "Listener",
        "RunResult",
        "compare",
        "Comparison",
        "load",
        "save",
        "Trained",
        "Plan",
        "Cut",
        "find_plan",
        "simulate",
        "Cluster",
        "Timings",
        "trace",
        "Trace",
    ),
    *("zoo", "data", "errors"),
]


def test_names_are_pinned() -> None:
    assert shoal.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_there(name: str) -> None:
    assert getattr(shoal, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shoal.nothing


def test_no_function_hides_a_submodule() -> None:
    folder = Path(shoal.__file__).parent
    submodules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert submodules & set(PUBLIC) <= {"zoo", "data", "errors"}


def loaded_after(statement: str, module: str) -> bool:
    code = f"import sys\n{statement}\nprint({module!r} in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    return run.stdout.strip() == "True"


@pytest.mark.parametrize(
    "statement",
    [
        "import shoal",
        "from shoal import Plan, TrainConfig, errors",
        "import shoal.cli.train",
        "import shoal.cli.verify",
        "import shoal.cli.doctor",
        "import shoal.cli.plan",
        "import shoal.cli.simulate",
        "import shoal.cli.papers",
        "import shoal.cli.profile",
        "import shoal.cli.evaluate",
        "import shoal.cli.compare",
        "import shoal.cli.predict",
        "import shoal.cli.export",
        "import shoal.cli.trace",
    ],
)
def test_import_is_light(statement: str) -> None:
    assert not loaded_after(statement, "torch")


def test_the_check_of_lightness_can_fail() -> None:
    assert loaded_after("import shoal; shoal.train", "torch")
