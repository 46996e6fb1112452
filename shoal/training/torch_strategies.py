"""A network in training that torch's own wrappers lay over the ranks: DDP, FSDP2, post-local SGD.

They train the same job as every plan: the same order of samples, weights at step 0, rates, tests and files, so that a
comparison differs by the strategy alone. What is theirs and not ours:

batch norm  in training by each rank's own samples; tested and saved are rank 0's running statistics
dropout     each rank draws masks of its own
bytes       go through groups of theirs, where nobody counts them
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from shoal.config import TORCH_STRATEGIES, TrainConfig
from shoal.data import BatchPart
from shoal.errors import CheckpointError
from shoal.partition import Box, Span, whole
from shoal.plan import Plan, data_parallel
from shoal.training.checkpoints.tensor_files import Place
from shoal.training.laid import Shape, Shapes, share_of
from shoal.training.network import Criterion, Held, Network, PartOf, count_parameters
from shoal.transport import Transport

POLL_SECONDS = 0.25
"""Time between two questions whether a rank was asked to stop; a question is a message of its own here."""
MOST_BETWEEN = 64
"""Batches between two such questions, at most."""
SHARDED_ALONE = 1_000_000
"""A module with so many elements of its own is a unit of FSDP2's, gathered and freed by itself."""
PERIOD = 4
"""Steps from one mean of post-local SGD to the next, as in torch's documentation."""
WARM_UP = 100
"""Steps of plain DDP before post-local SGD begins, as there; a tenth of a run that has fewer than ten times as many."""
WEIGHTS = "weights"
"""What a rank's own weights are called beside what its optimizer remembers."""


def told_of_torch(model: nn.Module, strategy: str) -> list[str]:
    """What people should know of how this network is trained by a strategy of torch's."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return []
    return [f"{strategy} takes batch norm's statistics over each worker's own samples, as --batch-norm local does."]


class TorchNetwork(Network):
    """What torch's strategies have in common: equal shares of every batch, and a stop on which ranks agree."""

    counts_bytes = False

    def __init__(
        self,
        module: nn.Module,
        config: TrainConfig,
        transport: Transport,
        shapes: Shapes,
        criterion: Criterion,
        build: Callable[[], nn.Module],
        total_steps: int,
    ) -> None:
        """Collective. `build` makes the same module anew; `total_steps` are those of the whole run."""
        by_sample = data_parallel(transport.world)
        plan = Plan(name=config.plan, ranks=by_sample.ranks, layers=by_sample.layers)
        super().__init__(module, plan, criterion, count_parameters(module), transport)
        self.rank, self.ranks = transport.rank, transport.world
        self._shapes, self._build, self._seed = shapes, build, config.seed
        self._batches = 0
        """Trained on, which decide dropout's masks."""
        self._asked_at, self._until_asked, self._between = time.monotonic(), 1, 1
        self._wrap(config, total_steps)

    def _wrap(self, config: TrainConfig, total_steps: int) -> None:
        """Give the module to torch."""
        raise NotImplementedError

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        # By batch and rank, so that a resumed run draws the same masks.
        torch.manual_seed(((self._seed << 32) + self._batches * self.ranks + self.rank) % 2**63)
        self._batches += 1
        return self._criterion(self._forward(x), y)

    def _forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x)
        return result

    def part_in_mean(self, loss: Tensor, y: Tensor, samples: int) -> Tensor:
        return loss.detach().double() / self.ranks

    def agreed(self, wishes: int) -> int:
        # Every few batches, as many on all ranks: a message at each would be part of every step.
        self._until_asked -= 1
        if self._until_asked:
            return 0
        now = time.monotonic()
        rows = self.gather([wishes, (now - self._asked_at) / self._between])
        slowest = max(seconds for _, seconds in rows)
        self._between = max(1, min(MOST_BETWEEN, 2 * self._between, int(POLL_SECONDS / max(slowest, 1e-6))))
        self._asked_at, self._until_asked = now, self._between
        return reduce(or_, (int(wished) for wished, _ in rows))

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        return self.transport.gather_numbers(numbers)

    def training_part(self, samples: int) -> BatchPart:
        return self._part((samples, *self._shapes.train[1:]))

    def _part(self, shape: Shape) -> BatchPart:
        return share_of(shape, self._shapes.labels(shape), self.rank, self.ranks)

    @contextmanager
    def evaluating(self) -> Iterator[tuple[nn.Module, PartOf]]:
        self._share_buffers()
        self.module.eval()
        try:
            yield _OnNoSamplesToo(self.module), lambda size: self._part((size, *self._shapes.test[1:]))
        finally:
            self.module.train()

    def _share_buffers(self) -> None:
        """Rank 0's running statistics on all ranks."""
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)

    def whole(self) -> nn.Module | None:
        full = self._full_state()
        if self.rank:
            return None
        module = self._build()
        module.load_state_dict(full)
        return module

    def _full_state(self) -> Mapping[str, Tensor]:
        """Whole tensors of the network, as they are tested and saved. Collective."""
        return self.module.state_dict()

    def held(self) -> Mapping[str, Held]:
        """Whole on every rank: rank 0 saves it."""
        first = self.rank == 0
        return {
            name: Held(tensor, Place.whole(tensor.shape), tuple(tensor.shape), saves=first)
            for name, tensor in self._full_state().items()
        }

    def load(self, read: Callable[[str, Box], Tensor], *, batches: int) -> None:
        super().load(read, batches=batches)
        self._batches = batches


class _OnNoSamplesToo(nn.Module):
    """Takes part in a forward pass of all ranks also where this one has no sample of it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self._module(x if len(x) else x.new_zeros(1, *x.shape[1:]))
        return scores[: len(x)]


class Replicated(TorchNetwork):
    """The whole network on every rank; gradients are averaged: DistributedDataParallel."""

    def _wrap(self, config: TrainConfig, total_steps: int) -> None:
        device = next(self.module.parameters()).device
        buckets: dict[str, Any] = {} if config.bucket_bytes is None else {"bucket_cap_mb": config.bucket_bytes / 2**20}
        self._ddp = DistributedDataParallel(
            self.module, device_ids=None if device.type == "cpu" else [device.index], **buckets
        )

    def _forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._ddp(x)
        return result

    def gathering(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._ddp.no_sync()


class PostLocal(Replicated):
    """The whole network on every rank, each with weights of its own between two means (Lin et al. 2018).

    Tested and saved is the mean of the ranks' weights as they are then; each rank goes on with its own.
    """

    def _wrap(self, config: TrainConfig, total_steps: int) -> None:
        super()._wrap(config, total_steps)
        self._accumulate = config.accumulate
        warm_up = min(WARM_UP, total_steps // 10)
        own_steps = {"post_local_gradient_allreduce": False}
        self._hook_state = PostLocalSGDState(None, None, warm_up, **own_steps)  # type: ignore[no-untyped-call]
        self._ddp.register_comm_hook(self._hook_state, post_localSGD_hook)
        self._averager = PeriodicModelAverager(PERIOD, warmup_steps=warm_up)

    def trained_by(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda *_: self._averager.average_parameters(self.module.parameters()))

    @contextmanager
    def evaluating(self) -> Iterator[tuple[nn.Module, PartOf]]:
        own = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        self._put(self._means())
        try:
            with super().evaluating() as tested:
                yield tested
        finally:
            self._put(own)

    def _means(self) -> dict[str, Tensor]:
        means = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        for mean in means.values():
            dist.all_reduce(mean.div_(self.ranks))
        return means

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(weights[name])

    def _full_state(self) -> Mapping[str, Tensor]:
        return {**self.module.state_dict(), **self._means()}

    def own_tensors(self, optimizer: torch.optim.Optimizer) -> Mapping[str, Tensor]:
        """Its own weights, and what its optimizer remembers of them."""
        own: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            remembered = {**optimizer.state.get(parameter, {}), WEIGHTS: parameter.detach()}
            own |= {f"{name}/{what}": value for what, value in remembered.items() if isinstance(value, Tensor)}
        return own

    def put_own_tensors(
        self, own: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, *, ranks: int, batches: int
    ) -> None:
        if ranks != self.ranks:
            raise CheckpointError(
                f"--resume: post-local-sgd keeps weights of each worker's own, and of {ranks} workers there are "
                f"{self.ranks} now.",
                "Give --workers as it was.",
            )
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            for key, value in own.items():
                name, _, what = key.rpartition("/")
                parameter = parameters[name]
                if what == WEIGHTS:
                    parameter.copy_(value)
                else:
                    optimizer.state[parameter][what] = value.to(optimizer.state[parameter][what].device)
        steps = batches // self._accumulate
        self._hook_state.iter, self._averager.step = min(steps, self._hook_state.start_localSGD_iter), steps


class Sharded(TorchNetwork):
    """Parameters, gradients and what the optimizer remembers in shards, gathered where they are used: FSDP2."""

    fused = False

    def _wrap(self, config: TrainConfig, total_steps: int) -> None:
        mesh = init_device_mesh(next(self.module.parameters()).device.type, (self.ranks,))
        for module in self.module.modules():
            own = sum(p.numel() for p in module.parameters(recurse=False))
            if module is not self.module and own > SHARDED_ALONE:
                fully_shard(module, mesh=mesh)
        self._sharded = fully_shard(self.module, mesh=mesh)

    def gathering(self, *, last: bool) -> AbstractContextManager[None]:
        self._sharded.set_requires_gradient_sync(last)
        return nullcontext()

    def _full_state(self) -> Mapping[str, Tensor]:
        return {name: _full(value) for name, value in self.module.state_dict().items()}

    def held(self) -> Mapping[str, Held]:
        """FSDP2's shards: rows of the first dim."""
        return {name: self._shard(value) for name, value in self.module.state_dict().items()}

    def _shard(self, value: Tensor) -> Held:
        shape = tuple(value.shape)
        if not isinstance(value, DTensor):
            return Held(value, Place.whole(shape), shape, saves=self.rank == 0)
        local = value.to_local()
        rows = -(-shape[0] // self.ranks)  # as torch.chunk cuts them
        start = min(self.rank * rows, shape[0])
        box = (Span(start, start + len(local)), *whole(shape[1:]))
        return Held(local, Place(box, shape) if len(local) else None, shape, saves=len(local) > 0)

    def load(self, read: Callable[[str, Box], Tensor], *, batches: int) -> None:
        with torch.no_grad():
            for name, held in self.held().items():
                if held.place is not None:
                    held.tensor.copy_(read(name, held.place.box))
        self._batches = batches

    def part_of(self, value: Tensor) -> Tensor:
        return value.to_local() if isinstance(value, DTensor) else value

    def like_parameter(self, parameter: Tensor, part: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return part
        return DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


KINDS: Mapping[str, type[TorchNetwork]] = {"ddp": Replicated, "fsdp2": Sharded, "post-local-sgd": PostLocal}
"""By the name that `--plan` gives them."""
assert tuple(KINDS) == TORCH_STRATEGIES
