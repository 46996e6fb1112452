"""One training step on this rank's part of some batches, with an optimizer's own step or for an exchange to make."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shoal.data.batch_part import Batch
from shoal.diary import BACKWARD_PASS, FORWARD_PASS, now
from shoal.training.job import Job

LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(job: Job) -> AbstractContextManager[object]:
    """Within, the network's forward pass is in the precision that `--amp` says."""
    amp = job.config.amp
    return nullcontext() if amp == "off" else torch.autocast(job.device.type, LOWER[amp])


def backward(job: Job, batches: Sequence[Batch], sizes: Sequence[int] = (), *, weight: float = 1.0) -> Tensor:
    """Gradients of the mean loss of all samples, where the optimizer finds them; what this rank adds to that mean.

    Between ranks gradients are summed once, with the last batch. `sizes`: samples of each batch over all ranks; as the
    settings say unless given. `weight`: of that mean, where it is a part of another.
    """
    sizes = sizes or [job.config.batch] * len(batches)
    even = len(set(sizes)) == 1
    diary = job.network.transport.diary
    job.optimizer.zero_grad(set_to_none=True)
    parts = []
    for number, ((x, y), size) in enumerate(zip(batches, sizes, strict=True), start=1):
        with job.network.gathering(last=number == len(batches)):
            begun = 0 if diary is None else now()
            with autocast(job):
                loss = job.network.loss(x.to(job.device), y.to(job.device))
            mean = loss if len(batches) == 1 else loss / len(batches) if even else loss * (size / sum(sizes))
            mean = mean if weight == 1.0 else mean * weight
            between = 0 if diary is None else now()
            torch.autograd.backward(mean if job.scaler is None else job.scaler.scale(mean))
        parts.append(job.network.part_in_mean(loss, y, size) * (1 if even else size * len(sizes) / sum(sizes)))
        if diary is not None:
            diary.note("forward", FORWARD_PASS, begun, between)
            diary.note("backward", BACKWARD_PASS, between)
    mean_of_all = parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)
    return mean_of_all if weight == 1.0 else mean_of_all * weight


def train_step(job: Job, batches: Sequence[Batch], *, rate: float, sizes: Sequence[int] = ()) -> Tensor:
    """One step of the optimizer; returns what this rank's loss adds to the mean of the batches, on the device.

    `sizes`: as in `backward`.
    """
    set_rate(job, rate)
    loss = backward(job, batches, sizes)
    diary = job.network.transport.diary
    begun = 0 if diary is None else now()
    if job.scaler is None:
        job.optimizer.step()
    else:
        job.scaler.unscale_(job.optimizer)  # the norm that is clipped is that of the gradients themselves
        job.scaler.step(job.optimizer)
        job.scaler.update()
    if job.average is not None:
        job.average.update()
    if diary is not None:
        diary.note("update", "optimizer", begun)
    return loss


def set_rate(job: Job, rate: float) -> None:
    """Let the optimizer step at this rate: its first group, and others in proportion to the rates they began with."""
    groups = job.optimizer.param_groups
    for group, beginning in zip(groups, job.rates, strict=True):
        group["lr"] = rate if beginning == job.rates[0] else rate * beginning / job.rates[0]
