"""One training step on this rank's part of a batch, with an optimizer's own step or for an exchange to make."""

import torch
from torch import Tensor

from shoal.training.job import Job


def backward(job: Job, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of the loss, where the optimizer finds them; the loss of this rank's part, with its graph freed."""
    job.optimizer.zero_grad(set_to_none=True)
    loss = job.network.loss(x.to(job.device), y.to(job.device))
    torch.autograd.backward(loss)
    return loss


def train_step(job: Job, x: Tensor, y: Tensor, *, rate: float) -> Tensor:
    """One step of the optimizer; returns what this rank's loss adds to the batch's, on the device."""
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    loss = backward(job, x, y)
    job.optimizer.step()
    return job.network.part_in_mean(loss, y)
