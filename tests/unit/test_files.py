"""Files that are whole or absent, and that others may read as any new file."""

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shoal.files import write_atomically


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_a_file_is_for_whoever_may_read_a_new_one(tmp_path: Path, mask: int) -> None:
    """By itself safetensors makes files for their owner alone."""
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "model.safetensors", lambda draft: save_file({"weight": torch.zeros(2)}, draft))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o666 & ~mask
