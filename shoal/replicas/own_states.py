"""What replicas have of their own, in a checkpoint: box by box, so that it fits any plan.

Of some tensors an exchange keeps the elements in the order of memory, without a shape (`FLAT`). In files they have the
shape of the weight that they belong to.
"""

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from shoal.config import TrainConfig
from shoal.exchanging import Exchange
from shoal.exchanging.replica import flat
from shoal.training.checkpoints.restoring import settings_before
from shoal.training.checkpoints.tensor_files import Part, SavedTensors
from shoal.training.network import Network

FLAT = ("residual", "dual")
"""What belongs to a weight and is kept without its shape."""


def own_carried_over(state: Mapping[str, Any], config: TrainConfig) -> Set[int]:
    """The replicas that go on with what they had of their own: all that handed it in, or none.

    None where the exchange is another, or the number of replicas: what they have of their own belongs together.
    """
    before = settings_before(state)
    names = [None if options is None else options.name for options in _options_of(before, config)]
    if names[0] != names[1] or before.replicas != config.replicas:
        return frozenset()
    return frozenset(state.get("own", ()))


def _options_of(*configs: TrainConfig) -> list[Any]:
    return [config.exchange_settings() for config in configs]


def own_parts(exchange: Exchange, network: Network) -> dict[str, Part]:
    """What this rank is to save of its replica's own state."""
    held, parts = network.held(), {}
    for key, value in exchange.own_state().items():
        what, _, name = key.partition("/")
        if not name:
            if network.rank == 0:
                parts[key] = Part.of(_copy(value))
            continue
        place = held[name].place
        if not held[name].saves or place is None:
            continue
        if what in FLAT:
            shaped = torch.empty_like(held[name].tensor)
            flat(shaped).copy_(value.view(-1))
            value = shaped
        parts[key] = Part(_copy(value), place) if value.ndim else Part.of(_copy(value))
    return parts


def own_state_from(saved: SavedTensors, exchange: Exchange, network: Network) -> dict[str, Tensor]:
    """What `own_parts` of all ranks gave, as this rank's own state."""
    held, state = network.held(), {}
    for key in saved.names():
        what, _, name = key.partition("/")
        if not name:
            state[key] = saved.read(key)
            continue
        if name not in held:
            raise ValueError(f"there is no weight {name}")
        place, tensor = held[name].place, held[name].tensor
        speaks = name in exchange.replica.names
        if what in FLAT and not speaks:
            continue
        if not saved.shape(key):
            value = saved.read(key)
        elif place is None:
            value = torch.empty_like(tensor)
        else:
            value = torch.empty_like(tensor).copy_(saved.read(key, place.box))
        state[key] = flat(value) if what in FLAT else value
    return state


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)
