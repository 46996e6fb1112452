"""One replica's network as exchanges see it: what this rank speaks for, and how the rest of its replica hears of it.

A replica is one rank, or a group of ranks that hold shards of the network under a plan. A shard that several of them
hold is exchanged by the first of them, which then tells the others: between replicas it travels once.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.transport import Transport

Spread = Callable[[Mapping[str, Tensor]], None]
"""Make tensors that some ranks changed the same on all ranks that hold them; called by all ranks of the replica."""


class Replica:
    """The parameters that the optimizer trains on this rank, as flat tensors in a fixed order.

    `speaks_for`: the names this rank exchanges with other replicas; all unless given. `spread` is needed where the
    replica has several ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        speaks_for: Sequence[str] | None = None,
        spread: Spread | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.optimizer = optimizer
        self.names = [name for name in self.parameters if speaks_for is None or name in speaks_for]
        self.weights = [flat(self.parameters[name].detach()) for name in self.names]
        """Views of the parameters: writing to them is writing to the network."""
        self._spread = spread
        self.transport = transport or Transport(alone=True)
        """Between the ranks of the replica."""

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each tensor that this rank speaks for."""
        return {name: weight.numel() for name, weight in zip(self.names, self.weights, strict=True)}

    def gradients(self) -> list[Tensor]:
        """Flat gradients of what this rank speaks for; zeros where backward reached none."""
        found = []
        for name in self.names:
            parameter = self.parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.stride() != parameter.stride():  # flattened alike on all replicas, or not at all
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
            found.append(flat(parameter.grad))
        return found

    def spread(self) -> None:
        """What this rank's weights became, on all ranks of the replica. Collective in the replica."""
        if self._spread is not None:
            self._spread({name: parameter.detach() for name, parameter in self.parameters.items()})

    def spread_gradients(self) -> None:
        """What this rank's gradients became, on all ranks of the replica. Collective in the replica."""
        if self._spread is not None:
            self._spread({name: p.grad for name, p in self.parameters.items() if p.grad is not None})

    def settings(self) -> Mapping[str, float]:
        """Momentum and weight decay of the optimizer, for servers that step in its place.

        A `ValueError` for anything but plain SGD with one setting for all parameters.
        """
        groups = self.optimizer.param_groups
        plain = isinstance(self.optimizer, torch.optim.SGD) and not any(
            group["nesterov"] or group["dampening"] or group["maximize"] for group in groups
        )
        kept = {(group["momentum"], group["weight_decay"], group["lr"]) for group in groups if plain}
        if len(kept) != 1:
            raise ValueError("servers step as plain SGD with one rate, momentum and weight decay for all parameters")
        momentum, weight_decay, _ = kept.pop()
        return {"momentum": momentum, "weight_decay": weight_decay}

    def remembered(self, what: str) -> list[Tensor]:
        """Flat tensors that the optimizer keeps under a name for what this rank speaks for; else zeros.

        A checkpoint saves them with the optimizer, so that servers need no file of their own.
        """
        found = []
        for name in self.names:
            parameter = self.parameters[name]
            state = self.optimizer.state[parameter]
            if state.get(what) is None:
                state[what] = torch.zeros_like(parameter, requires_grad=False)
            found.append(flat(state[what]))
        return found


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, as a view: also of one whose channels come last."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if torch.empty_like(tensor).stride() != tensor.stride():
        raise ValueError(f"a parameter with strides {tensor.stride()} is no dense block of memory")
    return tensor.as_strided((tensor.numel(),), (1,))
