"""The documents: links lead somewhere, the reference has every public name, and tables are what commands print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from scripts.documented_commands import PAGES, Printed, printed, unknown, wrong
from scripts.documented_table import TABLE

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


def test_every_command_on_the_pages_is_known_and_its_options_exist() -> None:
    """Those that can be run are run by `python -m scripts.documented_commands --run`."""
    commands = [command for page in PAGES for command in printed(page)]
    assert len(commands) > 150
    assert unknown(commands) == [], "say in scripts/documented_table.py what is done with it"
    reasons = {command.where: wrong(command.text) for command in commands}
    assert {where: why for where, why in reasons.items() if why is not None} == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("shoal train --epoch 3", "No such option"),
        ("shoal train --epochs none", "epochs = 'none'"),
        ("torchrun --nproc-per-node 2 -m shoal train --exchanges gossip", "No such option"),
        ("shoal plan shown plan.json", "No such command"),
        ("shoal teach", "there is no command teach"),
        ("shoal predict runs/mine new --topp 3", "No such option"),
        ("python -m benchmarks.nothing", "there is no module benchmarks.nothing"),
        ("python examples/nothing.py one", "there is no file examples/nothing.py"),
        ("make tests", "no target tests"),
        ("pip install '.[keras]'", "there is no extra keras"),
    ],
)
def test_a_command_that_cannot_work_is_found(text: str, why: str) -> None:
    assert why in (wrong(text) or "")


def test_a_command_that_nobody_has_decided_about_is_found() -> None:
    every = [Printed("docs/new.md", 1, text) for text in TABLE]
    assert unknown(every) == []
    assert unknown([*every, Printed("docs/new.md", 3, "shoal train --seed 7")]) == [
        "docs/new.md:3: not in the table: shoal train --seed 7"
    ]
    assert unknown(every[1:]) == [f"in the table, on no page: {every[0].text}"]
