"""From settings to a verdict: the network, a batch of random numbers or of the user's data, one plan."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal import data, planning, zoo
from shoal.config import VerifyConfig
from shoal.errors import ConfigError
from shoal.launching import joined, run, surrounding
from shoal.machine import threads_each
from shoal.plan import factors_option
from shoal.verdict import Verdict
from shoal.verifying.verify import OnProgress, try_out, verify


@dataclass(frozen=True)
class _Small:
    """A size that leaves every layer of a zoo network something to cut, unevenly, in a second or two."""

    input: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)


_SMALL = {
    "lenet5": _Small((1, 28, 28)),
    "alexnet": _Small((3, 71, 67), {"hidden": 40}),
    "vgg16": _Small((3, 35, 33), {"hidden": 30}),
    "inception_v3": _Small((3, 79, 77)),
    "resnet18": _Small((3, 37, 35)),
    "resnet50": _Small((3, 33, 37)),
    "mobilenet_v2": _Small((3, 33, 35)),
    "unet": _Small((1, 32, 48), {"width": 4, "depth": 3}),
    "acoustic": _Small((1, 40, 61)),
}
CLASSES = 7
"""Unless the user or the data says otherwise: few, and odd."""


def start(config: VerifyConfig, progress: OnProgress | None = None) -> Verdict:
    """Verify as `config` says: in this process alone, on ranks that are started here, or as one rank of a world.

    Bad input is an `InputError`, found before ranks are started where it can be. `progress` hears on rank 0 what is
    going on; for ranks started here it must survive pickling.
    """
    world = surrounding()
    if world is not None and world.size > 1:
        asked = config.workers if config.tells("workers") else None
        config = config.model_copy(update={"workers": world.workers(asked)})
        with joined(world, timeout=config.timeout):
            torch.set_num_threads(threads_each(config.threads, world.local_size or world.size))
            return on_rank(config, progress)
    model, x, _ = _prepare(config)
    try_out(model, x, dtype=getattr(torch, config.dtype), seed=config.seed, name=config.model)
    if config.workers == 1:
        torch.set_num_threads(threads_each(config.threads, 1))
        return on_rank(config, progress)
    threads = threads_each(config.threads, config.workers)
    verdicts = run(on_rank, config, progress, workers=config.workers, threads=threads, timeout=config.timeout)
    return verdicts[0]


def on_rank(config: VerifyConfig, progress: OnProgress | None) -> Verdict:
    """On the ranks that there are. A collective."""
    model, x, y = _prepare(config)
    return verify(
        model,
        x,
        config.plan,
        target=y,
        steps=config.steps,
        tolerance=config.tolerance,
        dtype=getattr(torch, config.dtype),
        seed=config.seed,
        batch_norm=config.batch_norm,
        recompute=config.recompute,
        factors=factors_option(config.factors),
        name=config.model,
        progress=progress,
    )


def _prepare(config: VerifyConfig) -> tuple[nn.Module, Tensor | tuple[int, ...], Tensor | None]:
    """(network, samples or their shape, targets or None), checked as far as it can be without running them."""
    planning.check(config.plan, config.workers)
    config = _with_sizes(config)
    x, y, shape, classes = _batch(config)
    torch.manual_seed(config.seed)
    return zoo.build(config.model, input=shape, classes=classes, options=config.model_options), x, y


def _with_sizes(config: VerifyConfig) -> VerifyConfig:
    """With small sizes for a zoo network whose sizes were left open; a network of the user's own needs its input."""
    if config.data is not None or config.input is not None:
        return config
    if ":" not in config.model and config.model not in zoo.names():
        zoo.build(config.model)  # which says that there is no such network
    small = _SMALL.get(config.model)
    if small is None:
        raise ConfigError(
            f"the shape of a sample for the model {config.model!r} is not known.",
            "Give it with --input C,H,W, or give data with --data.",
        )
    return config.model_copy(update={"input": small.input, "model_options": {**small.options, **config.model_options}})


def _batch(config: VerifyConfig) -> tuple[Tensor | tuple[int, ...], Tensor | None, tuple[int, ...], int]:
    """(samples or their shape, targets or None, one sample's shape, classes)."""
    if config.data is None:
        assert config.input is not None
        return (config.batch, *config.input), None, config.input, config.classes or CLASSES
    split = data.load(config.data, shape=config.input, classes=config.classes, seed=config.seed).train
    if config.batch > len(split):
        raise ConfigError(
            f"batch = {config.batch} is more than the {len(split)} samples of {config.data!r}.",
            "Give a smaller --batch.",
        )
    x, y = split.batch(data.first_indices(config.batch))
    return x, y, split.shape, split.classes
