"""From settings to everything a run needs, checked before anything is written.

Whatever can be wrong with the user's input is found here: model, data, sizes, device. A `Job` that exists
can be trained.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal import data, planning
from shoal.config import TORCH_STRATEGIES, TrainConfig
from shoal.data import Augment, BatchOrder, Loader, Splits
from shoal.data.batch_part import Batch
from shoal.errors import ConfigError, ModelError
from shoal.launching import tell_stage
from shoal.machine import threads_each
from shoal.plan import planned_recompute
from shoal.planning.resolve import read_plan
from shoal.training import initial
from shoal.training.average import WeightAverage
from shoal.training.device import choose_device
from shoal.training.laps import check_laps
from shoal.training.network import Criterion, Network, on_one_device
from shoal.training.numbering import Numbering
from shoal.training.own_objects import NO_OBJECTS, PREFIX, OwnObjects, other_weights
from shoal.transport import Transport
from shoal.transport.agreement import agree

ONE_KEEPS_ALL = "one worker trains the network as it is and keeps all activations: recomputing is for several workers."


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
    average: WeightAverage | None = None
    scaler: torch.amp.GradScaler | None = None
    """Keeps small gradients from vanishing in float16."""
    own: OwnObjects = NO_OBJECTS
    rates: tuple[float, ...] = ()
    """Of the optimizer's groups, as they began."""
    told: tuple[str, ...] = ()
    """What people should know of how it began."""

    @property
    def numbering(self) -> Numbering:
        """The samples of each step; what is too little for one at the end is left out, or makes a smaller one."""
        order = self.loader.order
        size = order.batch * self.config.accumulate
        return Numbering(size, order.samples if order.keep_last else order.samples // size * size)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.numbering.per_epoch

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.epochs * self.steps_per_epoch

    def batches(self, epoch: int, step: int) -> list[Batch]:
        """This rank's part of the batches of one step, read here and now."""
        return [self.loader.batch(epoch, number) for number in self._numbers(step)]

    def sizes(self, step: int) -> list[int]:
        """Samples of each batch of a step of an epoch that has any."""
        return [self.loader.order.size(number) for number in self._numbers(step)]

    def _numbers(self, step: int) -> list[int]:
        """Of the batches of a step, but for those of which a replica's share is empty."""
        order, first = self.loader.order, step * self.config.accumulate
        numbers = range(first, min(first + self.config.accumulate, order.steps_per_epoch))
        return [number for number in numbers if order.size(number)]

    def tested(self) -> AbstractContextManager[None]:
        """Within, the network has the weights that are tested and saved: their average, where there is one."""
        return nullcontext() if self.average is None else self.average.shown()


def prepare(
    config: TrainConfig,
    transport: Transport,
    own: OwnObjects = NO_OBJECTS,
    *,
    fresh: bool = True,
    ranks_here: int | None = None,
    planning_progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Job:
    """Build what `config` asks for, and `own` has, on all ranks of `transport`, which raise all `InputError`s here.

    Seeds torch. Same config, machine and thread count: same weights and same batches, bit for bit. `ranks_here` share
    this host's cores; all of them do unless given. `planning_progress` hears how far the search of a plan is. Not
    `fresh`: the weights come from elsewhere, so that those of `--init` are not read.
    """
    threads = threads_each(config.threads, ranks_here or config.workers)
    torch.set_num_threads(threads)
    # Values near zero in a trained network can slow a CPU step several times; to zero they carry nothing.
    torch.set_flush_denormal(True)

    def loaded() -> tuple[Splits, Loader, nn.Module]:
        whole = load_whole(config, own, fresh=fresh)
        tell_stage("have loaded data and network")
        return whole

    splits, loader, model = agree(transport, loaded)
    _check_weights(transport, own)
    device = next(model.parameters()).device
    config = config.model_copy(update={"threads": threads, "device": str(device), "data": splits.name})
    told = tuple(initial.told(model, config)) if fresh else ()
    criterion = _criterion(config, own, device)
    network = on_one_device(model, config.plan, criterion, transport)
    if transport.world == 1 and fresh and planned_recompute(read_plan(config.plan), config.recompute):
        told = (*told, ONE_KEEPS_ALL)
    if transport.world > 1:
        from shoal.training.laid import Shapes, lay_over_ranks  # one worker need not wait for it to load

        shapes = Shapes(_train_shape(loader), (config.batch, *splits.test.shape), splits.train.task == "segment")

        def build() -> nn.Module:
            return own.build(config, splits)

        if config.plan in TORCH_STRATEGIES:
            from shoal.training.torch_strategies import KINDS, told_of_torch

            told = (*told, *(told_of_torch(model, config.plan) if fresh else ()))
            config = config.model_copy(update={"batch_norm": "local"})
            steps = config.epochs * (loader.order.steps_per_epoch // config.accumulate)  # it keeps no smaller batch
            network = KINDS[config.plan](model, config, transport, shapes, criterion, build, steps)
        else:
            network = lay_over_ranks(model, config, transport, shapes, criterion, build, planning_progress)
            # Buckets decide in which order more than two ranks add up; noted, so that the run can be repeated.
            # So do factors in the place of sums; and a plan that recomputes sends more.
            noted: dict[str, object] = {"bucket_bytes": network.module.bucket_bytes}
            if network.module.plan.factors:
                noted["factors"] = ",".join(network.module.plan.factors)
            if network.module.plan.recompute:
                noted["recompute"] = True
            config = config.model_copy(update=noted)
    parts = {size: part for size in loader.order.sizes if (part := network.training_part(size)) is not None}
    loader = Loader(loader.data, loader.order, loader.augment, parts or None)
    return replace(equipped(config, splits, network, loader, device, own), told=told)


def _criterion(config: TrainConfig, own: OwnObjects, device: torch.device) -> Criterion:
    """What training makes smaller."""
    if own.loss is not None:
        return own.loss_on(device)
    smoothing = config.label_smoothing
    return partial(F.cross_entropy, label_smoothing=smoothing) if smoothing else F.cross_entropy


def equipped(
    config: TrainConfig,
    splits: Splits,
    network: Network,
    loader: Loader,
    device: torch.device,
    own: OwnObjects = NO_OBJECTS,
) -> Job:
    """A network and its batches, with what makes steps of gradients."""
    optimizer = make_optimizer(config, network.module.parameters(), own, fused=network.fused)
    network.trained_by(optimizer)
    if config.clip is not None:
        # With the optimizer's own step, whoever asks for it: an exchange averages gradients before.
        longest = config.clip
        optimizer.register_step_pre_hook(lambda *_: network.clip_gradients(longest))
    average = None if config.ema is None else WeightAverage(dict(network.module.named_parameters()), config.ema)
    scaler = torch.amp.GradScaler(device.type) if config.amp == "fp16" else None
    rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
    config = own.settled(config, optimizer)
    return Job(config, splits, network, optimizer, loader, device, average, scaler, own, rates)


def make_optimizer(
    config: TrainConfig, parameters: Iterable[nn.Parameter], own: OwnObjects = NO_OBJECTS, *, fused: bool = True
) -> torch.optim.Optimizer:
    """The optimizer of these parameters that `config` names, unless there is one of the user's own.

    `fused`: in one pass over each parameter, which takes half the time of the update.
    """
    if own.optimizer is not None:
        return own.optimizer_of(parameters)
    options = config.optimizer_settings()
    kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, options.torch_name)
    keywords: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, **options.model_dump()}
    if options.momentum is not None:
        keywords["momentum"] = config.momentum
    if fused and "fused" in signature(kind).parameters:
        keywords["fused"] = True
    return kind(parameters, **keywords)


def _check_weights(transport: Transport, own: OwnObjects) -> None:
    """Refuse a module that is not the same on all ranks, as where torchrun started a script that seeds nothing."""
    given = isinstance(own.model, nn.Module) and transport.world > 1
    if given and len(set(transport.gather_objects(own.digest()))) > 1:
        raise other_weights()


def load_whole(
    config: TrainConfig, own: OwnObjects = NO_OBJECTS, *, fresh: bool = True
) -> tuple[Splits, Loader, nn.Module]:
    """Data and network, whole, on the device, found to fit each other; nearly every `InputError` is raised here."""
    device = choose_device(config.device)
    if config.plan in TORCH_STRATEGIES:
        config.check_equal_shares()
    else:
        planning.check(config.plan, config.workers)
        check_laps(config)
    if own.data is not None:
        splits = own.splits(config)
    else:
        splits = data.load(config.data, shape=config.input, classes=config.classes, seed=config.seed)
    keeps = config.last_batch == "keep"
    order = BatchOrder(samples=len(splits.train), batch=config.batch, seed=config.seed, keep_last=keeps)
    loader = Loader(splits.train, order, Augment.parse(config.augment, seed=config.seed))
    if order.steps_per_epoch < config.accumulate and not keeps:
        raise ConfigError(
            f"accumulate = {config.accumulate} batches of {config.batch} samples are more than the "
            f"{len(splits.train)} to train on.",
            "Give a smaller --accumulate or --batch.",
        )
    torch.manual_seed(config.seed)
    model = own.build(config, splits).to(device)
    _check_precision(model, config)
    if fresh:
        initial.take_weights(model, config)
    _check_fit(model, config.model.removeprefix(PREFIX), splits, loader, own)
    return splits, loader, model


def _check_precision(model: nn.Module, config: TrainConfig) -> None:
    """Refuse to lower what autocast leaves as it is."""
    wide = next((name for name, p in model.named_parameters() if p.dtype == torch.float64), None)
    if config.amp != "off" and wide is not None:
        raise ConfigError(
            f"amp = {config.amp!r} lowers float32, and {wide!r} of the network is float64.",
            "Leave --amp out, or build the network in float32.",
        )


def _train_shape(loader: Loader) -> tuple[int, ...]:
    """Of a whole training batch."""
    sample = loader.data.shape
    return (loader.order.batch, *(loader.augment.out_shape(sample) if loader.augment else sample))


def _check_fit(model: nn.Module, name: str, splits: Splits, loader: Loader, own: OwnObjects) -> None:
    """Refuse a network that does not turn this data's samples into scores for this data's classes.

    Costs a forward pass of one test sample, and of one training sample where augmentation changes its shape.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(f"the model {name!r} has no parameter to train.", "Give a factory of a trainable network.")
    x, y = splits.test.batch(data.first_indices(1))
    own.check_loss(_check_sample(model, name, splits, x, y), y.to(next(model.parameters()).device))
    if loader.augment is not None and loader.augment.out_shape(splits.train.shape) != x.shape[1:]:
        x, y = loader.batch(0, 0)
        _check_sample(model, name, splits, x[:1], y[:1])


def _check_sample(model: nn.Module, name: str, splits: Splits, x: Tensor, y: Tensor) -> Tensor:
    """The scores of one sample: no dropout, no statistics, no gradients, no random draws."""
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
    return scores
