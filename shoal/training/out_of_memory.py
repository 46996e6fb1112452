"""What to say when a step needs more memory than there is."""

import torch

from shoal.config import TrainConfig
from shoal.errors import OutOfMemoryError
from shoal.machine import peak_resident_bytes


def peak_bytes(device: torch.device) -> int:
    """The largest size of this process so far, or the largest allocation on an accelerator."""
    if device.type == "cpu":
        return peak_resident_bytes()
    return torch.accelerator.max_memory_allocated(device)


def out_of_memory(error: Exception, config: TrainConfig) -> OutOfMemoryError | None:
    """What to say of an allocation that failed, on any device; None where `error` is something else."""
    short = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not short and not any(words in str(error) for words in ("allocate memory", "bad_alloc")):
        return None
    explained = OutOfMemoryError(
        f"a step of {config.model!r} with batch {config.batch} on {config.workers} workers, plan "
        f"{config.plan!r}, needs more memory than there is: {(str(error) or type(error).__name__).splitlines()[0]}",
        "Cut the images over more workers (--workers N --plan spatial), take a smaller --batch, or add --recompute.",
    )
    for note in getattr(error, "__notes__", ()):
        explained.add_note(note)
    return explained
