"""The documents: links lead somewhere, the reference has every public name, and tables are what commands print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--config-file",
        str(config),
        "--site-dir",
        str(site),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_pages_are_built_without_a_broken_link_and_every_public_name_is_there(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "reference.html").read_text(encoding="utf-8")
    modules = {"zoo": "zoo.build", "data": "data.load"}
    names = {f"shoal.{modules.get(name, name)}" for name in shoal.__all__ if name != "__version__"}
    assert names - set(re.findall(r'<h3 id="([\w.]+)"', page)) == set(), "add them to docs/reference.md"
    assert "Promise: outputs, gradients and buffers" in page  # the docstring, not only the name


def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)")
    config = "site_name: x\nstrict: true\nvalidation: {links: {not_found: warn}}\n"
    (tmp_path / "mkdocs.yml").write_text(config)
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere.md" in done.stdout + done.stderr


OTHERS = [
    path for path in ROOT.rglob("*.md") if not {"docs", ".venv", "build", "runs"} & set(path.relative_to(ROOT).parts)
]


def test_links_of_the_other_documents_lead_to_files() -> None:
    """Those that are no pages: README.md, CHANGELOG.md, the benchmarks' ..."""
    links = [
        (path.relative_to(ROOT), target)
        for path in OTHERS
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    ]
    assert len(links) > 30
    assert [(path, target) for path, target in links if not (ROOT / path).parent.joinpath(target).exists()] == []


@pytest.mark.parametrize("page", ["planner.md"])
def test_the_table_is_what_the_command_prints(page: str) -> None:
    shown = re.search(r"    \$ shoal (plan .*)\n((?:    .*\n|\n)+)", (DOCS / page).read_text(encoding="utf-8"))
    assert shown is not None
    command = [sys.executable, "-m", "shoal", *shown[1].split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    without_times = [
        [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("search")]
        for text in (shown[2], done.stdout)
    ]
    assert without_times[0] == without_times[1]
