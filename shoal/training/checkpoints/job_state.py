"""The state of a job on one rank: taken out for a checkpoint, and put in from one, under any plan.

Nothing here is sent between ranks: each saves the boxes that it is the first to hold, and reads those that it holds.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.execution.torch_tools import is_elementwise
from shoal.training.checkpoints.folder import Checkpoint, Draft, file_of_rank
from shoal.training.checkpoints.staging import Staging, room_for
from shoal.training.checkpoints.tensor_files import Part, Parts, SavedTensors
from shoal.training.job import Job
from shoal.training.network import Held


@dataclass(frozen=True)
class Snapshot:
    """Copies of what one rank saves: training may go on while they are written."""

    tensors: Mapping[str, Parts]
    """By kind: model, optimizer, average, and worker-R, of what rank R alone has."""
    own: Mapping[str, Any]
    """What is of this rank alone: texts and numbers."""
    common: Mapping[str, Any]
    """Texts and numbers that are equal on all ranks."""


def take_snapshot(job: Job, staging: Staging | None = None, *, everything: bool = False) -> Snapshot:
    """Copy what this rank saves of network, optimizer and random state. Costs one pass over it, and its memory.

    `staging`: memory for the copy, which the next one into the same overwrites; fresh memory if not given.
    `everything`: also what others would save, for a rank that holds all of it.
    """
    kinds, numbers = _live_parts(job, everything=everything)
    with torch._C.DisableTorchFunctionSubclass():  # cut parameters refuse what would see this rank's part alone
        copies = (staging or Staging()).take(kinds)
    return Snapshot(
        tensors=copies,
        own={"random": _as_texts(keep_random_state(job.device)), "optimizer_numbers": numbers},
        common={
            "average_updates": None if job.average is None else job.average.updates,
            "scaler": None if job.scaler is None else job.scaler.state_dict(),
        },
    )


def room_for_snapshot(job: Job) -> int:
    """Bytes of `Staging` that a snapshot of what the job has by now takes."""
    kinds, _ = _live_parts(job)
    with torch._C.DisableTorchFunctionSubclass():  # a cut parameter refuses to be counted
        return room_for(kinds)


def _live_parts(job: Job, *, everything: bool = False) -> tuple[dict[str, Parts], dict[str, dict[str, Any]]]:
    """What this rank saves, by kind, where training has it; and the numbers that the optimizer remembers."""
    held = job.network.held()
    if everything:
        held = {name: replace(part, saves=True) for name, part in held.items()}
    averages = {} if job.average is None else job.average.parts
    with torch._C.DisableTorchFunctionSubclass():
        tensors, numbers = _of_optimizer(job, held)
        own = job.network.own_tensors(job.optimizer)
        kinds: dict[str, Parts] = {
            "model": {name: _laid_as(part, part.tensor) for name, part in held.items() if part.saves},
            "optimizer": tensors,
            "average": {name: _laid_as(held[name], tensor) for name, tensor in averages.items() if held[name].saves},
            f"worker-{job.network.rank}": {name: Part.of(tensor) for name, tensor in own.items()},
        }
    return {kind: parts for kind, parts in kinds.items() if parts}, numbers


def write_snapshot(draft: Draft, snapshot: Snapshot, rank: int) -> None:
    """The files of one rank."""
    for kind, parts in snapshot.tensors.items():
        draft.write_parts(file_of_rank(kind, rank), parts)
    draft.write_json(f"rank-{rank}.json", snapshot.own)


def put_in(checkpoint: Checkpoint, state: Mapping[str, Any], job: Job, *, batches: int) -> None:
    """Network, optimizer and random state of a checkpoint with this state, after training on so many batches.

    Each rank reads the boxes that it holds. A network with other tensors, and a state that says nonsense, is a
    `CheckpointError`.
    """
    with checkpoint.trusted():
        _put_in(checkpoint, state, job, batches)


def _put_in(checkpoint: Checkpoint, state: Mapping[str, Any], job: Job, batches: int) -> None:
    held, rank = job.network.held(), job.network.rank
    model = checkpoint.tensors("model")
    _check_fit(model, held, checkpoint)
    job.network.load(model.read, batches=batches)
    own = checkpoint.of_rank(rank) or checkpoint.of_rank(0) or {}
    _put_in_optimizer(checkpoint, job, held)
    of_worker = checkpoint.tensors(f"worker-{rank}")
    job.network.put_own_tensors(
        {name: of_worker.read(name) for name in of_worker.names()},
        job.optimizer,
        ranks=state["ranks"],
        batches=batches,
    )
    if job.average is not None:
        averages = checkpoint.tensors("average")
        parts = {name: _own_part(averages, name, held[name], tensor) for name, tensor in job.average.parts.items()}
        job.average.load(state["average_updates"], parts)
    if job.scaler is not None:
        job.scaler.load_state_dict(dict(state["scaler"]))
    put_random_state(_from_texts(own["random"]), job.device)


def _laid_as(held: Held, tensor: Tensor) -> Part:
    """A part that lies where `held` does."""
    assert held.place is not None
    return Part(tensor, held.place)


def _of_optimizer(job: Job, held: Mapping[str, Held]) -> tuple[dict[str, Part], dict[str, dict[str, Any]]]:
    """What the optimizer remembers of the parameters that this rank saves: tensors, and numbers."""
    tensors: dict[str, Part] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in job.network.module.named_parameters():
        if not held[name].saves or parameter not in job.optimizer.state:
            continue
        for what, value in job.optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                part = job.network.part_of(value)
                tensors[f"{name}/{what}"] = _remembered(job, name, held[name], what, part)
            elif isinstance(value, bool | int | float | str):
                numbers.setdefault(name, {})[what] = value
            elif value is not None:
                raise _unknown(job, what, name, f"a {type(value).__name__}")
    return tensors, numbers


def _remembered(job: Job, name: str, held: Held, what: str, value: Tensor) -> Part:
    place = held.place
    assert place is not None
    if place.is_whole or value.ndim == 0:
        return Part.of(value)
    if value.shape != held.tensor.shape:
        raise _unknown(job, what, name, f"a tensor of shape {tuple(value.shape)} of a part of it")
    return _laid_as(held, value)


def _unknown(job: Job, what: str, name: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{type(job.optimizer).__name__} remembers {what!r} of {name!r} as {kind}, which a checkpoint cannot hold.",
        "Use an optimizer that remembers numbers and tensors of a parameter's shape.",
    )


def _put_in_optimizer(checkpoint: Checkpoint, job: Job, held: Mapping[str, Held]) -> None:
    """What it remembered, of the parts that this rank holds."""
    saved = checkpoint.tensors("optimizer")
    parameters = dict(job.network.module.named_parameters())
    groups = {id(parameter): group for group in job.optimizer.param_groups for parameter in group["params"]}
    for key in saved.names():
        name, _, what = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(
                f"checkpoint {str(checkpoint.path)!r} is of another network: it has no parameter {name!r}.",
                "Go on with the network that was trained.",
            )
        parameter = parameters[name]
        shape = saved.shape(key)
        if shape and shape == held[name].shape:
            value = job.network.like_parameter(parameter, _own_part(saved, key, held[name], held[name].tensor))
        elif is_elementwise(job.optimizer) and (shape or not saved.dtype(key).is_floating_point):
            # Torch's kernels trust the sizes of what they find here, and would write beyond it.
            raise CheckpointError(
                f"checkpoint {str(checkpoint.path)!r}: {key!r} is of shape {shape} and {saved.dtype(key)}: "
                f"{type(job.optimizer).__name__} remembers no such of a parameter of shape {held[name].shape}.",
                "Go on from another checkpoint.",
            )
        else:
            value = saved.read(key)
            group = groups[id(parameter)]
            if what != "step" or group.get("fused") or group.get("capturable"):  # as torch's own optimizers have it
                value = value.to(parameter.device)
        job.optimizer.state[parameter][what] = value
    for rank_file in (name for name in checkpoint.files() if name.startswith("rank-")):
        for name, numbers in checkpoint.json(rank_file)["optimizer_numbers"].items():
            job.optimizer.state[parameters[name]].update(numbers)


def _own_part(saved: SavedTensors, key: str, held: Held, like: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut as `held` is, in the form of `like`; empty where it holds nothing."""
    if held.place is None:
        return torch.empty_like(like)
    return torch.empty_like(like, requires_grad=False).copy_(saved.read(key, held.place.box))


def _check_fit(saved: SavedTensors, held: Mapping[str, Held], checkpoint: Checkpoint) -> None:
    wrong = [f"{name!r} is missing" for name in held if name not in saved]
    wrong += [f"{name!r} is not one of its tensors" for name in saved.names() if name not in held]
    wrong += [
        f"{name!r} has the shape {saved.shape(name)}, not {part.shape}"
        for name, part in held.items()
        if name in saved and saved.shape(name) != part.shape
    ]
    wrong += [
        f"{name!r} is of {saved.dtype(name)}, not {part.tensor.dtype}"
        for name, part in held.items()
        if name in saved and saved.dtype(name) != part.tensor.dtype
    ]
    if wrong:
        raise CheckpointError(
            f"checkpoint {str(checkpoint.path)!r} is not of this network: {wrong[0]}.",
            "Go on with the network that was trained.",
        )


def keep_random_state(device: torch.device) -> dict[str, Tensor]:
    """Torch's, of the CPU and of the device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def put_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on with what `keep_random_state` gave; a `ValueError` where it is not that."""
    if state["cpu"].shape != torch.get_rng_state().shape:
        raise ValueError("it holds no random state of torch's")
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _as_texts(state: Mapping[str, Tensor]) -> dict[str, str]:
    return {kind: base64.b64encode(words.cpu().numpy().tobytes()).decode() for kind, words in state.items()}


def _from_texts(state: Mapping[str, str]) -> dict[str, Tensor]:
    return {
        kind: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for kind, text in state.items()
    }
