"""Where a network computes: what `--device` stands for on this machine, alone and on each of several ranks."""

import torch

from shoal.config import EvaluateConfig, TrainConfig
from shoal.errors import ConfigError


def choose_device(wanted: str) -> torch.device:
    """The device of a process alone; a `ConfigError` where it cannot be used."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        reason = str(error).splitlines()[0].rstrip(".")
        devices = f"cpu, {accelerator}" if accelerator else "cpu"
        raise ConfigError(
            f"device {wanted!r} cannot be used: {reason}.", f"This machine has {devices}; see `shoal doctor`."
        ) from None
    return device


def device_of_rank(config: TrainConfig | EvaluateConfig, ranks_here: int) -> str:
    """The device of this rank."""
    kind = kind_of_device(config, ranks_here)
    return f"cuda:{torch.cuda.current_device()}" if kind == "cuda" else kind


def kind_of_device(config: TrainConfig | EvaluateConfig, ranks_here: int) -> str:
    """Where the ranks of this host compute: each on a GPU of its own where asked for, or where there are enough."""
    if config.device == "auto":
        return "cuda" if torch.cuda.device_count() >= ranks_here else "cpu"
    kind = config.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(
            f"device {config.device!r} cannot be shared by {config.workers} workers.",
            "Give cpu, or cuda for a GPU of its own to each worker.",
        )
    return kind
