"""What does not go with a plan whose linear layers run in laps, and how the trainer steps them after every lap.

Rate      a step after a lap is taken at 1/K of the rate, for K ranks: a lap has 1/K of the step's samples, and K steps
          of 1/K are together as long as one. So Krizhevsky's configurations had it: 0.04 and, in linear layers, 0.01 on
          four devices. Momentum and weight decay are those of every step.
"""

import torch

from shoal.config import TrainConfig
from shoal.errors import ConfigError
from shoal.plan import steps_in_laps
from shoal.planning.resolve import planned_laps


def check_laps(config: TrainConfig) -> None:
    """Refuse settings that a plan in laps cannot honour, with a `ConfigError` that names them."""
    laps = planned_laps(config.plan)
    if laps is None:
        return
    if config.amp == "fp16":
        raise ConfigError(
            f"amp = 'fp16' scales the loss after plan {config.plan!r} has been through its linear layers.",
            "Use --amp bf16, or the plan without laps, as owt.",
        )
    if not steps_in_laps(laps):
        return
    refused = {
        "clip": config.clip is not None,
        "accumulate": config.accumulate > 1,
        "replicas": config.replicas > 1,
        "exchange": config.exchange is not None,
    }
    for name, given in refused.items():
        if given:
            raise ConfigError(
                f"{name} = {getattr(config, name)!r} does not go with plan {config.plan!r}: its linear layers step "
                "after every lap, before the gradients of the others are known.",
                f"Use owt:{laps[0]}, whose weights step once, or leave --{name} out.",
            )


def step_after_lap(optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Step what has a gradient, at the rate that belongs to a lap of a step on so many ranks."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate / ranks
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
