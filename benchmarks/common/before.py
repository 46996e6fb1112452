"""Shoal as it is in another checkout, beside this one in one process: before and after a change, turn by turn."""

import importlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

NAME = "shoal_before"


def import_before(checkout: Path) -> Any:
    """The package of another checkout, such as a `git worktree` of an older commit, imported as `shoal_before`.

    A copy with the package's name replaced in its sources; what both patch in torch is patched twice.
    """
    copy = Path(tempfile.mkdtemp(prefix="shoal_before_"))
    shutil.copytree(checkout / "shoal", copy / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    for source in (copy / NAME).rglob("*.py"):
        source.write_text(re.sub(r"\bshoal\b", NAME, source.read_text()))
    sys.path.insert(0, str(copy))
    try:
        return importlib.import_module(NAME)
    finally:
        sys.path.remove(str(copy))
