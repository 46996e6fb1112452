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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from shoal.config import TORCH_STRATEGIES, TrainConfig
from shoal.data import BatchPart
from shoal.errors import CheckpointError
from shoal.plan import Plan, data_parallel
from shoal.training.laid import Shape, Shapes, share_of
from shoal.training.network import Criterion, Network, OptimizerState, PartOf, count_parameters
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

    def part_in_mean(self, loss: Tensor, y: Tensor) -> Tensor:
        return loss.detach().double() / self.ranks

    def agreed(self, wish: bool) -> bool:
        # Every few batches, as many on all ranks: a message at each would be part of every step.
        self._until_asked -= 1
        if self._until_asked:
            return False
        now = time.monotonic()
        rows = self.gather([wish, (now - self._asked_at) / self._between])
        slowest = max(seconds for _, seconds in rows)
        self._between = max(1, min(MOST_BETWEEN, 2 * self._between, int(POLL_SECONDS / max(slowest, 1e-6))))
        self._asked_at, self._until_asked = now, self._between
        return any(wished for wished, _ in rows)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        return self.transport.gather_numbers(numbers)

    def training_part(self) -> BatchPart:
        return self._part(self._shapes.train)

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

    def load(
        self, model: Mapping[str, Tensor], state: OptimizerState, optimizer: torch.optim.Optimizer, *, batches: int
    ) -> None:
        super().load(model, state, optimizer, batches=batches)
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

    def states(self, optimizer: torch.optim.Optimizer) -> tuple[Mapping[str, Tensor], OptimizerState]:
        """The mean, and beside it a row for every rank of its own weights and of what its optimizer remembers."""
        rows = {}
        for name, parameter in self.module.named_parameters():
            own = {**optimizer.state.get(parameter, {}), WEIGHTS: parameter.detach()}
            rows[name] = {what: self._all_rows(value) for what, value in own.items()}
        return self._full_state(), rows

    def _all_rows(self, value: Any) -> Any:
        """Of all ranks; what is no tensor is the same on all."""
        if not isinstance(value, Tensor):
            return value
        rows = [torch.empty_like(value) for _ in range(self.ranks)]
        dist.all_gather(rows, value.contiguous())
        return torch.stack(rows)

    def load(
        self, model: Mapping[str, Tensor], state: OptimizerState, optimizer: torch.optim.Optimizer, *, batches: int
    ) -> None:
        if any(len(remembered[WEIGHTS]) != self.ranks for remembered in state.values()):
            raise CheckpointError(
                f"--resume: post-local-sgd keeps weights of each worker's own, and there are other workers than the "
                f"{self.ranks} of now.",
                "Give --workers as it was.",
            )
        own = {
            name: {what: value[self.rank] if isinstance(value, Tensor) else value for what, value in rows.items()}
            for name, rows in state.items()
        }
        weights = {name: remembered.pop(WEIGHTS) for name, remembered in own.items()}
        super().load({**model, **weights}, own, optimizer, batches=batches)
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

    def states(self, optimizer: torch.optim.Optimizer) -> tuple[Mapping[str, Tensor], OptimizerState]:
        remembered = {
            name: {what: _full(value) for what, value in optimizer.state[p].items()}
            for name, p in self.module.named_parameters()
            if p in optimizer.state
        }
        return self._full_state(), remembered

    def _full_state(self) -> Mapping[str, Tensor]:
        return {name: _full(value) for name, value in self.module.state_dict().items()}

    def load(
        self, model: Mapping[str, Tensor], state: OptimizerState, optimizer: torch.optim.Optimizer, *, batches: int
    ) -> None:
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, value in self.module.state_dict().items():
                value.copy_(_sharded_as(model[name], value))
        for name, remembered in state.items():
            parameter = parameters[name]
            optimizer.state[parameter] = {
                what: _sharded_as(value, parameter) if _is_like(value, parameter) else value
                for what, value in remembered.items()
            }
        self._batches = batches


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _sharded_as(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a tensor that all ranks have whole."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


KINDS: Mapping[str, type[TorchNetwork]] = {"ddp": Replicated, "fsdp2": Sharded, "post-local-sgd": PostLocal}
"""By the name that `--plan` gives them."""
assert tuple(KINDS) == TORCH_STRATEGIES
