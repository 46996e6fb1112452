"""The weights of a network in one file, whatever plan it is laid by."""

from os import PathLike
from pathlib import Path

from torch import nn

from shoal.execution import ParallelModule, full_state_dict
from shoal.files import write_atomically
from shoal.training.checkpoints.tensor_files import Part, blocks_of, write_blocks
from shoal.training.weights import save_weights
from shoal.using.trained import Trained


def save(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write a network's parameters and buffers, whole, under its own names, as safetensors: whole or absent.

    `shoal train --init` and `load_state_dict` take them. Of a network that is laid over ranks all ranks call it, and
    rank 0 writes; of what `shoal.load` gave, `shoal.load` reads it again.
    """
    target = Path(path)
    if isinstance(model, Trained):
        write_atomically(target, lambda draft: save_weights(model.module, draft, model.inference))
        return
    whole = full_state_dict(model, rank0_only=True) if isinstance(model, ParallelModule) else model.state_dict()
    if whole:
        parts = {name: Part.of(tensor.detach().cpu()) for name, tensor in whole.items()}
        write_atomically(target, lambda draft: write_blocks(draft, blocks_of(parts)))
