"""All that a run needs to go on, in one file that is whole or absent."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from shoal.config import TrainConfig
from shoal.data import Position
from shoal.errors import CheckpointError
from shoal.files import write_atomically
from shoal.training.best import Best
from shoal.training.job import Job

SCHEMA = "shoal.checkpoint/4"

# What may change when a run goes on: nothing that the state so far depends on.
CHANGEABLE = frozenset(
    {
        *("epochs", "patience", "eval_every", "eval_steps", "checkpoint_every", "log_every", "trace", "out"),
        *("workers", "plan", "recompute", "race", "bucket_bytes", "timeout", "threads", "device"),
        *("exchange_options", "slow"),
    }
)


@dataclass
class Progress:
    """How far a run is. The order of samples is a function of the position, so no loader has a state."""

    position: Position
    """The next batch to train on; at the end of an epoch, its test is still to come."""
    steps: int
    """Optimizer steps done."""
    losses: torch.Tensor
    """Sums of the steps' losses, of this epoch and since the last line of metrics; float64, on the device.

    On several ranks, what this rank adds to those sums: they are put together only where they are needed.
    """
    last_loss: float
    """Mean loss of the last whole epoch."""
    step_seconds: list[float]
    wall_seconds: float
    metrics_length: int
    """Bytes of metrics.jsonl that belong to the steps done."""
    sent_bytes: int = 0
    """What all ranks sent in `sent_steps` steps under the present plan, up to where this process took over."""
    sent_steps: int = 0
    tested: int = 0
    """Steps up to which no test is due any more."""
    best: Best = field(default_factory=Best)

    @classmethod
    def start(cls, device: torch.device) -> Self:
        """Before the first step."""
        zeros = torch.zeros(2, dtype=torch.float64, device=device)
        return cls(Position(0, 0), 0, zeros, float("nan"), [], 0.0, 0)


def save(path: Path, job: Job, progress: Progress) -> None:
    """Write network, optimizer, random state and progress: whole tensors, so that any plan can go on from them.

    Costs one copy of the weights and of what the optimizer remembers on rank 0, which writes. Collective.
    """
    state = state_of(job)
    losses = job.network.gather(progress.losses.tolist())
    if job.network.rank:
        return
    write(path, job.config, state, progress, losses=losses)


def write(
    path: Path,
    config: TrainConfig,
    state: Mapping[str, Any],
    progress: Progress,
    *,
    losses: Sequence[Sequence[float]],
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write what `state_of` gave and how far the run is, with the `losses` of every rank.

    `more`: what a run of several replicas adds, numbers, texts, lists and dicts only.
    """
    content = {
        "schema": SCHEMA,
        "config": config.model_dump(mode="json"),
        **state,
        "position": progress.position.to_dict(),
        "steps": progress.steps,
        "losses": torch.tensor(losses, dtype=torch.float64),
        "last_loss": progress.last_loss,
        "step_seconds": torch.tensor(progress.step_seconds, dtype=torch.float64),
        "wall_seconds": progress.wall_seconds,
        "metrics_length": progress.metrics_length,
        "sent_bytes": progress.sent_bytes,
        "sent_steps": progress.sent_steps,
        "tested": progress.tested,
        "best": progress.best.to_dict(),
        **(more or {}),
    }
    write_atomically(path, lambda draft: _put(content, draft))


def _put(content: Mapping[str, Any], draft: Path) -> None:
    """Write it; an `OSError` on a full disk, of which torch's own error says nothing."""
    try:
        with draft.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def state_of(job: Job) -> dict[str, Any]:
    """Network, optimizer and random state, in whole tensors, on rank 0. Collective."""
    model, optimizer = job.network.states(job.optimizer)
    average = job.average
    return {
        "model": model,
        "optimizer": optimizer,
        "random": _random_state(job.device),
        "average": None if average is None else average.state(job.network.put_together(average.parts)),
        "scaler": None if job.scaler is None else job.scaler.state_dict(),
    }


def read(path: Path, config: TrainConfig, device: str | torch.device = "cpu") -> dict[str, Any]:
    """What `path` holds, if it is whole, of this version, and of a run with these settings but for `CHANGEABLE`."""
    content = _loaded(path, device, "Start again without --resume, in another --out.")
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise CheckpointError(
            f"checkpoint {str(path)!r} was not written by this version.", f"It needs the schema {SCHEMA!r}."
        )
    _check_settings(content["config"], config)
    return content


def read_own(path: Path) -> list[bytes]:
    """What each rank of a replica had of its own when the run that goes on was saved."""
    content = _loaded(path, "cpu", "Remove it: its replica then goes on with the common weights.")
    ranks: list[bytes] = content["ranks"]
    return ranks


def own_state_is_missing(path: Path, replica: int) -> str:
    """What to tell people where a replica's own file, which a checkpoint names, is gone."""
    return f"{path.name} is missing: replica {replica} goes on with the common weights, without what it had of its own."


def _loaded(path: Path, device: str | torch.device, remedy: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
        reason = (str(error).splitlines() or ["it is empty"])[0].rstrip(".")
        raise CheckpointError(f"checkpoint {str(path)!r} is damaged: {reason}.", remedy) from None
    return content


def put_in(content: dict[str, Any], job: Job) -> None:
    """Network, optimizer and random state as `read` found them."""
    batches = content["steps"] * job.config.accumulate
    job.network.load(content["model"], content["optimizer"], job.optimizer, batches=batches)
    if job.average is not None:
        average = content["average"]
        job.average.load(average["updates"], job.network.parts_of(average["weights"]))
    if job.scaler is not None:
        job.scaler.load_state_dict(content["scaler"])
    _set_random_state(content["random"], job.device)


def restore(path: Path, job: Job) -> Progress:
    """Put `job` where the run stood that wrote `path`; on as many workers under the same plan it goes on bit for bit.

    A file that is damaged, of another version, or of other settings (but for `CHANGEABLE`) is a
    `CheckpointError`; `job` must then not be used.
    """
    content = read(path, job.config, job.device)
    put_in(content, job)
    same = all(content["config"][name] == getattr(job.config, name) for name in ("plan", "workers", "recompute"))
    return Progress(
        position=Position.from_dict(content["position"]),
        steps=content["steps"],
        losses=_own_losses(content["losses"], job),
        last_loss=content["last_loss"],
        step_seconds=content["step_seconds"].tolist(),
        wall_seconds=content["wall_seconds"],
        metrics_length=content["metrics_length"],
        sent_bytes=content["sent_bytes"] if same else 0,
        sent_steps=content["sent_steps"] if same else 0,
        tested=content["tested"],
        best=Best.from_dict(content["best"]),
    )


def _own_losses(table: torch.Tensor, job: Job) -> torch.Tensor:
    """Each rank its own row, so that sums go on bit for bit; with other ranks than before, rank 0 takes all."""
    if len(table) == job.network.ranks:
        return table[job.network.rank].clone()
    return table.sum(0) if job.network.rank == 0 else torch.zeros_like(table[0])


def _check_settings(before: dict[str, Any], config: TrainConfig) -> None:
    now = config.model_dump(mode="json")
    if before["plan"] != config.plan and "post-local-sgd" in (before["plan"], config.plan):
        raise CheckpointError(
            f"--resume: the run was made with plan = {before['plan']!r}, now it is {config.plan!r}.",
            "With post-local-sgd each worker has weights of its own, which fit no other plan: give --plan as it was.",
        )
    for name, value in now.items():
        if name not in CHANGEABLE and before.get(name) != value:
            raise CheckpointError(
                f"--resume: the run was made with {name} = {before.get(name)!r}, now it is {value!r}.",
                f"These may change when a run goes on: {', '.join(sorted(CHANGEABLE))}.",
            )


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
