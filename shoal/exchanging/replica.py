"""One replica's network as exchanges see it: what this rank speaks for, and how the replica's other ranks get it.

A replica is one rank, or a group of ranks that hold shards of the network under a plan. A shard that several of them
hold is exchanged by the first of them, which then tells the others: between replicas it travels once.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.transport import Transport

Tell = Callable[[Mapping[str, Tensor]], None]
"""Make tensors that some ranks changed the same on all ranks that hold them; called by all ranks of the replica."""


class Replica:
    """The parameters that the optimizer trains on this rank, as flat tensors in a fixed order.

    `speaks_for`: the names this rank exchanges with other replicas; all unless given. `tell` is needed where the
    replica has several ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        speaks_for: Sequence[str] | None = None,
        tell: Tell | None = None,
        transport: Transport | None = None,
    ) -> None:
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad and id(p) in trained}
        self.optimizer = optimizer
        self.names = [name for name in self.parameters if speaks_for is None or name in speaks_for]
        self.weights = [flat(bare(self.parameters[name])) for name in self.names]
        """Views of the parameters: writing to them is writing to the network."""
        self._spoken_for = [
            (parameter, type(parameter) is nn.Parameter and parameter.is_contiguous())
            for parameter in (self.parameters[name] for name in self.names)
        ]
        """With whether each is a plain one whose elements lie in their own order; its gradient then is of that kind."""
        self._tell = tell
        self.transport = transport or Transport(alone=True)
        """Between the ranks of the replica."""

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each tensor that this rank speaks for."""
        return {name: weight.numel() for name, weight in zip(self.names, self.weights, strict=True)}

    def gradients(self) -> list[Tensor]:
        """Flat gradients of what this rank speaks for; zeros where backward reached none."""
        gradients = []
        for parameter, plain in self._spoken_for:
            gradient = parameter.grad
            # Nearly always so; whatever else is looked at costs more than the exchange of a small network.
            if plain and gradient is not None and not gradient.requires_grad and gradient.is_contiguous():
                gradients.append(gradient.view(-1))
                continue
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            elif gradient.stride() != parameter.stride():  # elements must be in the same order on all replicas
                gradient = parameter.grad = torch.empty_like(bare(parameter)).copy_(bare(gradient))
            gradients.append(flat(bare(gradient)))
        return gradients

    def no_gradients(self) -> None:
        """Those of no sample, where others step on some: zeros, on all ranks of the replica alike."""
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(bare(parameter))

    def tell_weights(self) -> None:
        """Give the weights that this rank changed to the replica's other ranks. All ranks of the replica call it."""
        if self._tell is not None:
            self._tell({name: bare(parameter) for name, parameter in self.parameters.items()})

    def tell_gradients(self) -> None:
        """Give the gradients that this rank changed to the replica's other ranks. All ranks of the replica call it."""
        if self._tell is not None:
            self._tell({name: bare(p.grad) for name, p in self.parameters.items() if p.grad is not None})

    def mark(self) -> str:
        """A digest of this rank's weights: the same only for the same bits. Cost: one pass over them."""
        digest = hashlib.blake2b(digest_size=16)
        for parameter in self.parameters.values():
            digest.update(flat(bare(parameter)).cpu().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def remembered(self, what: str) -> list[Tensor]:
        """Flat tensors that the optimizer keeps under a name for what this rank speaks for; else zeros.

        A checkpoint saves them with the optimizer, so that servers need no file of their own.
        """
        remembered = []
        for name in self.names:
            parameter = self.parameters[name]
            state = self.optimizer.state[parameter]
            if state.get(what) is None:
                state[what] = torch.zeros_like(bare(parameter))
            remembered.append(flat(bare(state[what])))
        return remembered

    def state(self) -> dict[str, Tensor]:
        """Weights of this rank and what its optimizer remembers of each, by name."""
        weights = {f"weight/{name}": bare(parameter) for name, parameter in self.parameters.items()}
        return weights | self.optimizer_state()

    def optimizer_state(self) -> dict[str, Tensor]:
        """What the optimizer of this rank remembers of each weight, by what it is and the weight's name."""
        return {
            f"{what}/{name}": bare(value)
            for name, parameter in self.parameters.items()
            for what, value in self.optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }

    def put_state(self, state: Mapping[str, Tensor]) -> None:
        """What `state` gave; a `ValueError` where the weights are others, as under another plan."""
        for name, parameter in self.parameters.items():
            weight = state.get(f"weight/{name}")
            if weight is None or weight.shape != parameter.shape:
                raise ValueError(f"there is no weight {name} of shape {tuple(parameter.shape)}")
        for name, parameter in self.parameters.items():
            bare(parameter).copy_(state[f"weight/{name}"])
        self.put_optimizer_state({key: value for key, value in state.items() if not key.startswith("weight/")})

    def put_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """What `optimizer_state` gave; a `ValueError` where it is of weights that are not here."""
        for key, value in state.items():
            what, _, name = key.partition("/")
            if name not in self.parameters:
                raise ValueError(f"there is no weight {name} to which {what} belongs")
            self.optimizer.state[self.parameters[name]][what] = value.clone()


def taken_over(optimizer: torch.optim.Optimizer, way_out: str, *, adagrad: bool = False) -> dict[str, float]:
    """Momentum and weight decay of an optimizer, for servers that step in its place.

    They step as torch.optim.SGD, one rate, momentum and weight decay for all parameters; with `adagrad` as
    torch.optim.Adagrad of the same. A `ConfigError` that names what else the optimizer does, with the way out.
    """
    kind = type(optimizer).__name__
    rule = "Adagrad" if adagrad else "SGD"
    if not isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad) if adagrad else torch.optim.SGD):
        raise ConfigError(
            f"here servers step in the place of the optimizer, as {rule}, and cannot do what {kind} does.",
            f"Use torch.optim.{rule} (--optimizer {rule.lower()}); or, to step by {kind}, {way_out}.",
        )
    groups = optimizer.param_groups
    for name, plain in _PLAIN.items():
        other = next((group[name] for group in groups if group.get(name, plain) != plain), plain)
        if other != plain:
            raise ConfigError(
                f"here servers step in the place of the optimizer, and cannot do {name}={other!r} of {kind}.",
                f"Do without it; or, to keep it, {way_out}.",
            )
    for name in ("lr", "momentum", "weight_decay"):
        values = list(dict.fromkeys(float(group.get(name, 0.0)) for group in groups))
        if len(values) > 1:
            raise ConfigError(
                f"here servers step in the place of the optimizer, with one {name} for all parameters, and the groups "
                f"of {kind} have {' and '.join(f'{value:g}' for value in values)}.",
                f"Give all groups the same; or, to keep them, {way_out}.",
            )
    return {name: float(groups[0].get(name, 0.0)) for name in ("momentum", "weight_decay")}


_PLAIN = {"nesterov": False, "dampening": 0, "maximize": False, "lr_decay": 0, "eps": 1e-10}
"""Settings of SGD and Adagrad that servers cannot change, and the values that they have there."""


TAKEN_OVER = ("momentum", "weight_decay", *_PLAIN)
"""All that `taken_over` looks at in an optimizer's only group."""


def bare(tensor: Tensor) -> Tensor:
    """A tensor's memory as an ordinary one, also where it is a part and refuses what sees it as a whole."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, as a view: also of one whose channels come last."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if torch.empty_like(tensor).stride() != tensor.stride():
        raise ValueError(f"a parameter with strides {tensor.stride()} is not one dense block of memory")
    return tensor.as_strided((tensor.numel(),), (1,))
