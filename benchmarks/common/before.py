"""Shoal as it is in another checkout, beside this one in one process: before and after a change, turn by turn."""

import atexit
import importlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

NAME = "shoal_before"


def import_before(checkout: Path) -> Any:
    """The package of another checkout, such as a `git worktree` of an older commit, imported as `shoal_before`.

    A copy with the package's name replaced in its sources; what both patch in torch is patched twice. Processes that it
    starts, such as servers, find the copy too, which is there until this process ends.
    """
    copy = Path(tempfile.mkdtemp(prefix="shoal_before_"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    shutil.copytree(checkout / "shoal", copy / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    for source in (copy / NAME).rglob("*.py"):
        source.write_text(re.sub(r"\bshoal\b", NAME, source.read_text()))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(copy))
    try:
        return importlib.import_module(NAME)
    finally:
        sys.path.remove(str(copy))
