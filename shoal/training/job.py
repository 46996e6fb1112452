"""From settings to everything a run needs, checked before anything is written.

Whatever can be wrong with the user's input is found here: model, data, sizes, device. A `Job` that exists
can be trained.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from shoal import data, planning, zoo
from shoal.config import TrainConfig
from shoal.data import Augment, BatchOrder, Loader, Splits
from shoal.errors import ModelError
from shoal.machine import threads_each
from shoal.training.device import choose_device
from shoal.training.network import Network, on_one_device
from shoal.transport import Transport
from shoal.transport.agreement import agree


@dataclass(frozen=True)
class Job:
    """One network, its data in their order, and the optimizer, on their device; on one rank or on each of many."""

    config: TrainConfig
    """With every `auto` and `default` replaced by what it stood for."""
    splits: Splits
    network: Network
    optimizer: torch.optim.Optimizer
    loader: Loader
    """Gives this rank's part of every training batch."""
    device: torch.device

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.epochs * self.loader.order.steps_per_epoch


def prepare(
    config: TrainConfig,
    transport: Transport,
    *,
    ranks_here: int | None = None,
    planning_progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Job:
    """Build what `config` asks for, on all ranks of `transport`. All `InputError`s are raised here, on all ranks.

    Seeds torch. Same config, machine and thread count: same weights and same batches, bit for bit. `ranks_here` share
    this host's cores; all of them do unless given. `planning_progress` hears how far the search of a plan is.
    """
    threads = threads_each(config.threads, ranks_here or config.workers)
    torch.set_num_threads(threads)
    # Values near zero in a trained network can slow a CPU step several times; to zero they carry nothing.
    torch.set_flush_denormal(True)
    splits, loader, model = agree(transport, lambda: load_whole(config))
    device = next(model.parameters()).device
    config = config.model_copy(update={"threads": threads, "device": str(device), "data": splits.name})
    network = on_one_device(model, config.plan)
    if transport.world > 1:
        from shoal.training.laid import Shapes, lay_over_ranks  # one worker need not wait for it to load

        shapes = Shapes(_train_shape(loader), (config.batch, *splits.test.shape), splits.train.task == "segment")
        network = lay_over_ranks(model, config, transport, shapes, lambda: _build(config, splits), planning_progress)
        # Buckets decide in which order more than two ranks add up; noted, so that the run can be repeated.
        config = config.model_copy(update={"bucket_bytes": network.module.bucket_bytes})
    loader = Loader(loader.data, loader.order, loader.augment, network.training_part())
    optimizer = make_optimizer(config, network.module.parameters())
    return Job(config, splits, network, optimizer, loader, device)


def make_optimizer(config: TrainConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `config` names, of these parameters."""
    options = config.optimizer_settings()
    kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, options.torch_name)
    keywords: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, **options.model_dump()}
    if options.momentum is not None:
        keywords["momentum"] = config.momentum
    if "fused" in signature(kind).parameters:  # one pass over each parameter: half the time of the update
        keywords["fused"] = True
    return kind(parameters, **keywords)


def load_whole(config: TrainConfig) -> tuple[Splits, Loader, nn.Module]:
    """Data and network, whole, on the device, found to fit each other; nearly every `InputError` is raised here."""
    device = choose_device(config.device)
    planning.check(config.plan, config.workers)
    splits = data.load(config.data, shape=config.input, classes=config.classes, seed=config.seed)
    order = BatchOrder(samples=len(splits.train), batch=config.batch, seed=config.seed)
    loader = Loader(splits.train, order, Augment.parse(config.augment, seed=config.seed))
    torch.manual_seed(config.seed)
    model = _build(config, splits).to(device)
    _check_fit(model, config.model, splits, loader)
    return splits, loader, model


def _build(config: TrainConfig, splits: Splits) -> nn.Module:
    return zoo.build(
        config.model,
        input=splits.train.shape,
        classes=splits.train.classes,
        options=config.model_options,
    )


def _train_shape(loader: Loader) -> tuple[int, ...]:
    """Of a whole training batch."""
    sample = loader.data.shape
    return (loader.order.batch, *(loader.augment.out_shape(sample) if loader.augment else sample))


def _check_fit(model: nn.Module, name: str, splits: Splits, loader: Loader) -> None:
    """Refuse a network that does not turn this data's samples into scores for this data's classes.

    Costs a forward pass of one test sample, and of one training sample where augmentation changes its shape.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(f"the model {name!r} has no parameter to train.", "Give a factory of a trainable network.")
    x, y = splits.test.batch(data.first_indices(1))
    _check_sample(model, name, splits, x, y)
    if loader.augment is not None and loader.augment.out_shape(splits.train.shape) != x.shape[1:]:
        x, y = loader.batch(0, 0)
        _check_sample(model, name, splits, x[:1], y[:1])


def _check_sample(model: nn.Module, name: str, splits: Splits, x: Tensor, y: Tensor) -> None:
    """One sample through the network: no dropout, no statistics, no gradients, no random draws."""
    device = next(model.parameters()).device
    try:
        with torch.inference_mode():
            scores = model.eval()(x.to(device))
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        shape = tuple(x.shape[1:])
        raise ModelError(
            f"the model {name!r} cannot take a sample of {splits.name!r}, shape {shape}: {reason}.",
            "Choose a model for this shape, or give the data another one with --input C,H,W.",
        ) from error
    finally:
        model.train()
    wanted = (1, splits.test.classes, *y.shape[1:])
    if not isinstance(scores, torch.Tensor) or tuple(scores.shape) != wanted:
        got = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise ModelError(
            f"the model {name!r} returns {got} for one sample of {splits.name!r}, which needs {wanted}.",
            f"Choose a network for a task of kind {splits.test.task!r} with {splits.test.classes} classes.",
        )
