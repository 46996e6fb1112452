"""A network in training, as the loop sees it: here whole on one device; over ranks in `laid.py`, and by torch's
own wrappers in `torch_strategies.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.data import BatchPart
from shoal.errors import CheckpointError
from shoal.outline import Outline
from shoal.partition import Box, Cut, whole
from shoal.plan import Plan
from shoal.training.checkpoints.tensor_files import Place
from shoal.transport import Transport

if TYPE_CHECKING:
    from shoal.exchanging import Replica
    from shoal.planning.price import Price

PartOf = Callable[[int], BatchPart]
Criterion = Callable[[Tensor, Tensor], Tensor]
"""The mean loss of scores and labels."""
STOP, SAVE = 1, 2
"""What a rank may wish: that the run stops, that it is saved."""


@dataclass(frozen=True)
class Held:
    """This rank's part of one tensor of the network."""

    tensor: Tensor
    """The network's own memory."""
    place: Place | None
    """Which part it is; None where this rank holds nothing of it."""
    shape: tuple[int, ...]
    """Of the whole."""
    saves: bool
    """Whether this rank is the one that saves it, of those that hold the same."""


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

    def part_in_mean(self, loss: Tensor, y: Tensor, samples: int) -> Tensor:
        """What this rank's loss adds to the mean over the whole batch, which has so many samples."""
        return loss.detach()

    def agreed(self, wishes: int) -> int:
        """What ranks wished when the last batch began, of `STOP` and `SAVE`; `wishes` count from the next batch on.

        Alone: at once.
        """
        return wishes

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """A few numbers of every rank. Collective."""
        return [list(numbers)]

    def training_part(self, samples: int) -> BatchPart | None:
        """What this rank reads of every training batch of so many samples; None for all of it."""
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

    def held(self) -> Mapping[str, "Held"]:
        """This rank's part of every tensor of the network, under the original names."""
        found = {}
        for name, tensor in self.module.state_dict().items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"the network keeps {name!r} as a {type(tensor).__name__}, which a checkpoint cannot hold.",
                    "Keep it in a buffer, as a tensor.",
                )
            found[name] = Held(tensor, Place.whole(tensor.shape), tuple(tensor.shape), saves=True)
        return found

    def load(self, read: Callable[[str, Box], Tensor], *, batches: int) -> None:
        """Take over the tensors of a network that was trained on so many batches. `read` gives a box of one of them."""
        self.module.load_state_dict({name: read(name, whole(held.shape)) for name, held in self.held().items()})

    def own_tensors(self, optimizer: torch.optim.Optimizer) -> Mapping[str, Tensor]:
        """What this rank alone has, where ranks keep weights of their own beside what is `held`."""
        return {}

    def put_own_tensors(
        self, own: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, *, ranks: int, batches: int
    ) -> None:
        """Go on with what `own_tensors` gave on one of so many `ranks`, after training on so many batches."""

    def part_of(self, value: Tensor) -> Tensor:
        """This rank's memory of a tensor that is cut as a parameter is."""
        return value

    def like_parameter(self, parameter: Tensor, part: Tensor) -> Tensor:
        """This rank's part of a tensor that is cut as `parameter` is, in the form in which an optimizer has it."""
        return part

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
