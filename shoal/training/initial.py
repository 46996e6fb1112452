"""The first weights of a run from a file of another: all of them, or those that fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from shoal.config import TrainConfig
from shoal.errors import CheckpointError

MOST_NAMED = 8
"""Tensors that a message names; of more it says how many."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """Which tensors of a file are those of a network, and what is wrong with the others."""

    fitting: tuple[str, ...]
    others: tuple[str, ...]
    """One phrase each."""
    wanted: int
    """Tensors of the network."""


def compare(held: dict[str, Shape], wanted: dict[str, Shape], aliases: dict[str, set[str]]) -> Fit:
    """Names and shapes of a file and of a network. Pure.

    `aliases`: for each name the names of the same memory in the network, of which a file has one.

    >>> compare({"a": (2,), "b": (3,)}, {"a": (2,), "b": (4,), "c": (1,)}, {}).others
    ('b has the shape (3,) and not (4,)', 'c is not in the file')
    """
    fitting, others = [], []
    for name, shape in wanted.items():
        if held.get(name) == shape:
            fitting.append(name)
        elif name in held:
            others.append(f"{name} has the shape {held[name]} and not {shape}")
        elif not any(held.get(alias) == shape for alias in aliases.get(name, ())):
            others.append(f"{name} is not in the file")
    others += [f"{name} is not in the network" for name in held if name not in wanted]
    return Fit(tuple(fitting), tuple(others), len(wanted))


def take_weights(model: nn.Module, config: TrainConfig) -> None:
    """Put the weights of the file `--init` into a network, where one is given; buffers too.

    A `CheckpointError` for a file that cannot be read, or that is not all of this network; with `--init-partial` only
    where nothing of it fits.
    """
    path = config.init
    if path is None:
        return
    fit = _fit(model, path)
    if fit.others and not config.init_partial:
        raise CheckpointError(
            f"--init {str(path)!r} is not of this network: {_listed(fit.others)}.",
            "Give the weights of this network, or --init-partial to take what fits.",
        )
    if not fit.fitting:
        raise CheckpointError(
            f"--init {str(path)!r} has nothing of this network: {_listed(fit.others)}.",
            "Give a file whose tensors have the names of this network's.",
        )
    state = model.state_dict()
    with torch.no_grad(), safe_open(str(path), framework="pt") as file:
        for name in fit.fitting:
            state[name].copy_(file.get_tensor(name))


def told(model: nn.Module, config: TrainConfig) -> list[str]:
    """For people: what of a network is not from the file `--init`."""
    if config.init is None:
        return []
    fit = _fit(model, config.init)
    if not fit.others:
        return []
    return [f"{len(fit.fitting)} of {fit.wanted} tensors are from {str(config.init)!r}: {_listed(fit.others)}."]


def _fit(model: nn.Module, path: Path) -> Fit:
    state = model.state_dict()
    by_memory: dict[tuple[int, Shape], set[str]] = {}
    for name, tensor in state.items():
        if tensor.numel():
            by_memory.setdefault((tensor.data_ptr(), tuple(tensor.shape)), set()).add(name)
    aliases = {name: names - {name} for names in by_memory.values() for name in names}
    return compare(_shapes(path), {name: tuple(tensor.shape) for name, tensor in state.items()}, aliases)


def _shapes(path: Path) -> dict[str, Shape]:
    """Of every tensor of a file, without reading any."""
    try:
        if path.is_dir():
            raise IsADirectoryError(f"it is a folder, whose file may be {str(path / 'model.safetensors')!r}")
        with safe_open(str(path), framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        reason = "there is none" if isinstance(error, FileNotFoundError) else str(error).splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"--init {str(path)!r} cannot be read as safetensors: {reason}.",
            "Give a .safetensors file, such as the model.safetensors of a run.",
        ) from None


def _listed(phrases: Sequence[str]) -> str:
    more = f", and {len(phrases) - MOST_NAMED} more" if len(phrases) > MOST_NAMED else ""
    return ", ".join(phrases[:MOST_NAMED]) + more
