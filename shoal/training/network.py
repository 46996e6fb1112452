"""A network in training, as the loop sees it: here whole on one device; over ranks in `laid.py`, and by torch's
own wrappers in `torch_strategies.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.data import BatchPart
from shoal.outline import Outline
from shoal.partition import Cut
from shoal.plan import Plan
from shoal.transport import Transport

if TYPE_CHECKING:
    from shoal.exchanging import Replica
    from shoal.planning.price import Price

PartOf = Callable[[int], BatchPart]
Criterion = Callable[[Tensor, Tensor], Tensor]
"""The mean loss of scores and labels."""
OptimizerState = Mapping[str, Mapping[str, Any]]
"""What the optimizer remembers, by the parameter's name."""


class Network:
    """The whole network in this process, and what the loop asks of any network.

    Methods marked "collective" are called by all ranks.
    """

    rank, ranks = 0, 1
    counts_bytes = True
    """Whether all that it sends goes through our transport, where it is counted."""
    fused = True
    """Whether optimizers may take one pass over each of its parameters."""

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        criterion: Criterion,
        parameters: int,
        transport: Transport | None = None,
    ) -> None:
        self.transport = transport or Transport(alone=True)
        """Between the ranks that the network is laid over; has the diary while steps are recorded."""
        self.module = module
        """What the optimizer trains."""
        self.plan, self._criterion = plan, criterion
        self.parameters = parameters
        """Of the whole network."""
        self.outline: Outline | None = None
        """The network under its plan, where it is cut, on rank 0."""
        self.price: Price | None = None
        """What a step is predicted to cost, where the cost model knows this network on this machine."""

    @property
    def plain(self) -> nn.Module | None:
        """The module where it runs as it is; None where it is laid over ranks."""
        return self.module

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of this rank's part of a batch, for `backward`. Collective."""
        return self._criterion(self.module(x), y)

    def gathering(self, *, last: bool) -> AbstractContextManager[None]:
        """Around each of several passes whose gradients add up; ranks sum them with the `last`. Collective."""
        return nullcontext()

    def trained_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Told once which optimizer steps its parameters."""

    def clip_gradients(self, longest: float) -> None:
        """Scale all gradients down so that their norm over the whole network is at most `longest`. Collective."""
        nn.utils.clip_grad_norm_(self.module.parameters(), longest)

    def part_in_mean(self, loss: Tensor, y: Tensor) -> Tensor:
        """What this rank's loss adds to the mean over the whole batch."""
        return loss.detach()

    def agreed(self, wish: bool) -> bool:
        """Whether a rank wished so when the last batch began; `wish` counts from the next on. Alone: at once."""
        return wish

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """A few numbers of every rank. Collective."""
        return [list(numbers)]

    def training_part(self) -> BatchPart | None:
        """What this rank reads of every training batch; None for all of it."""
        return None

    @contextmanager
    def evaluating(self) -> Iterator[tuple[nn.Module, PartOf | None]]:
        """The network in evaluation mode, and what this rank reads of a batch of some size. Collective."""
        self.module.eval()
        try:
            yield self.module, None
        finally:
            self.module.train()

    def as_replica(self, optimizer: torch.optim.Optimizer, transport: Transport) -> "Replica":
        """This rank's part of the network for an exchange with other replicas."""
        from shoal.exchanging import Replica  # a network without an exchange need not wait for it to load

        return Replica(dict(self.module.named_parameters()), optimizer, transport=transport)

    def bytes_per_step(self, batches: int) -> int:
        """What this rank sends in a training step on so many batches, predicted from the plan alone."""
        return 0

    def bytes_sent(self) -> int:
        """What this rank has sent in training steps so far, as counted."""
        return 0

    def states(self, optimizer: torch.optim.Optimizer) -> tuple[Mapping[str, Tensor], OptimizerState]:
        """Whole tensors of network and optimizer, under the original names, on rank 0; empty elsewhere. Collective."""
        parameters = self.module.named_parameters()
        remembered = {name: dict(optimizer.state[p]) for name, p in parameters if p in optimizer.state}
        return self.module.state_dict(), remembered

    def load(
        self, model: Mapping[str, Tensor], state: OptimizerState, optimizer: torch.optim.Optimizer, *, batches: int
    ) -> None:
        """Take over what `states` gave after training on so many batches."""
        self.module.load_state_dict(model)
        parameters = dict(self.module.named_parameters())
        for name, remembered in state.items():
            optimizer.state[parameters[name]] = dict(remembered)

    def put_together(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole tensors of parts that are cut as parameters are, by name, on rank 0; empty elsewhere. Collective."""
        return parts

    def parts_of(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This rank's parts of what `put_together` gave."""
        return whole

    def whole(self) -> nn.Module | None:
        """The original module with the present weights, on rank 0; None elsewhere. Collective."""
        return self.module


def on_one_device(module: nn.Module, plan: str, criterion: Criterion, transport: Transport | None = None) -> Network:
    """The module itself. On one rank every plan leaves every layer whole."""
    whole = Plan(name=plan, ranks=1, layers=(("*", Cut()),))
    return Network(module, whole, criterion, count_parameters(module), transport)


def count_parameters(module: nn.Module) -> int:
    """Numbers that training may change, or could."""
    return sum(p.numel() for p in module.parameters())
