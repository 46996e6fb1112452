"""Whether the files of a run's folder are whole."""

import json
from pathlib import Path

import yaml

from shoal.errors import ShoalError
from shoal.plan import Plan
from shoal.training.run_folder import RunFolder


def what_is_not_whole(path: Path) -> list[str]:
    """What is wrong with the files that a run left when it ended."""
    folder = RunFolder(path)
    wrong = [f"half a file is left: {draft.name}" for draft in path.glob(".*.tmp")]
    for file, read in (
        (folder.config, lambda: yaml.safe_load(folder.config.read_text())["model"]),
        (folder.plan, lambda: Plan.load(folder.plan)),
        (folder.metrics, lambda: _read_lines(folder.metrics)),
    ):
        try:
            if file.exists():
                read()
        except (ShoalError, OSError, ValueError, RuntimeError, KeyError, TypeError, EOFError) as error:
            wrong.append(f"{file.name} is not whole: {type(error).__name__}: {error}")
    checkpoints = folder.checkpoints
    wrong += [f"half a checkpoint is left: {draft.name}" for draft in checkpoints.path.glob(".*.tmp")]
    damaged = {checkpoint.path.name: checkpoint.damage() for checkpoint in checkpoints.all()}
    return wrong + [f"{name} is not whole: {why}" for name, why in damaged.items() if why is not None]


def _read_lines(path: Path) -> None:
    text = path.read_text()
    if text and not text.endswith("\n"):
        raise ValueError("its last line is not")
    for line in text.splitlines():
        json.loads(line)
