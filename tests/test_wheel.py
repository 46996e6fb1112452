"""The package as others get it: the wheel builds, holds every file that the code reads, and works once installed."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import shoal

ROOT = Path(__file__).parents[1]
FEW = {
    "click",
    "cloudpickle",
    "isal",
    "numpy",
    "pillow",
    "platformdirs",
    "psutil",
    "pydantic",
    "pyyaml",
    "rich",
    "safetensors",
    "torch",
}
"""All that an installation brings beside what these need. One more is a decision: each costs every user."""


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files in the folder that it is made from."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "shoal", source / "shoal", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, source)
    (built,) = out.glob("*.whl")
    return built


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    ours = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "shoal").rglob("*")
        if file.is_file() and file.suffix not in (".pyc", ".pyo")
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {"shoal/py.typed", "shoal/clusters/p100-4x4.yaml", "shoal/data/digits.npz"} <= ours
    assert packed == ours


def test_it_says_what_it_is_and_needs_little(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        about = Parser().parsestr(archive.read(path).decode())
    assert about["Name"] == "shoal-train"
    assert about["License-Expression"] == "Apache-2.0 AND CC-BY-SA-3.0"
    assert about.get_all("License-File") == ["LICENSE", "shoal/data/digits_source.md"]
    needs = [line for line in about.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert {line.split(">")[0] for line in needs} == FEW


def test_it_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    pip("install", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel)
    program = (
        "import shoal; print(shoal.__file__, len(shoal.data.load('digits').train),"
        " shoal.Cluster.load('p100-4x4').ranks, shoal.__version__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env=environment,
    )
    assert done.stdout.split() == [str(tmp_path / "site" / "shoal" / "__init__.py"), "4000", "16", shoal.__version__]
    scripts = (tmp_path / "site" / "bin" / "shoal").read_text(encoding="utf-8")
    assert "shoal.cli.main" in scripts


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == shoal.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_commits_are_checked_as_make_check_does() -> None:
    """Each tool of `make check` is a hook, and with the same command."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    rule = makefile.split("\ncheck:")[1].split("\n\n")[0]
    checks = [line.strip().replace("$(BIN)/", "").removesuffix(" .") for line in rule.splitlines()[1:]]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in local["hooks"]]
    assert [f".venv/bin/{check}" for check in checks] == entries


def test_nobody_is_told_to_install_another_project_of_our_name() -> None:
    """`shoal` on the public index is not ours."""
    texts = [file for folder in ("shoal", "docs", "examples") for file in (ROOT / folder).rglob("*.*")]
    texts = [file for file in texts if file.suffix in (".py", ".md", ".yaml")] + [ROOT / "README.md", ROOT / "Makefile"]
    assert len(texts) > 100
    told = re.compile(r"pip install [^\n`]*\bshoal(\[|\s|$|'|\")")
    assert told.search("pip install 'shoal[images]'")
    assert [file.name for file in texts if told.search(file.read_text(encoding="utf-8"))] == []
