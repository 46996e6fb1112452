"""DDP with a compressing hook, on a rank of a pool. Importable, so that spawned processes find it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.exchanging.compression.codecs import CodecName
from shoal.exchanging.compression.hook import HookState

STEPS = 5
RATE = 0.1
DENSITY = 0.05


def network(kind: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(17, 90), nn.ReLU(), nn.Linear(90, 40), nn.ReLU(), nn.Linear(40, 3)).to(kind)


def batch(step: int, rank: int, kind: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 17, generator=draws, dtype=kind), torch.randint(3, (6,), generator=draws)


class Remembering(HookState):
    """Notes which parameters each bucket had, step by step."""

    def __init__(self, name: CodecName, module: nn.Module) -> None:
        super().__init__(name, density=DENSITY)
        self._names = {id(parameter): key for key, parameter in module.named_parameters()}
        self.seen: list[list[str]] = []

    def residual(self, bucket: GradBucket) -> Any:
        self.seen.append([self._names[id(parameter)] for parameter in bucket.parameters()])
        return super().residual(bucket)


def trained(name: CodecName) -> tuple[list[list[list[str]]], dict[str, Tensor], dict[str, Tensor]]:
    """Which names were in which buckets in each step, the weights, and what is left on this rank."""
    module = network()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.02)
    state = Remembering(name, module)
    ddp.register_comm_hook(state, shoal.compression.hook)
    buckets = []
    for step in range(STEPS):
        state.seen = []
        _step(ddp, *batch(step, dist.get_rank()))
        buckets.append(state.seen)
    names = list(dict(module.named_parameters()))
    left = dict(zip(names, state.state(list(module.parameters())), strict=True))
    return buckets, {key: value.detach() for key, value in module.named_parameters()}, left


def as_torch_does() -> tuple[Tensor, Tensor]:
    """Weights after training with our bf16 without feedback, and with torch's own."""
    trained = []
    hooks: list[tuple[Any, Any]] = [
        (HookState("bf16", feedback=False), shoal.compression.hook),
        (None, _torchs),
    ]
    for state, hook in hooks:
        module = network(torch.float32)
        ddp = DistributedDataParallel(module)
        ddp.register_comm_hook(state, hook)
        for step in range(STEPS):
            _step(ddp, *batch(step, dist.get_rank(), torch.float32))
        trained.append(torch.cat([parameter.detach().view(-1) for parameter in module.parameters()]))
    return trained[0], trained[1]


def _torchs(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's own, which DDP refuses by its name where there is no CUDA."""
    return bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


def in_half_the_world() -> float:
    """Rank by rank a group of its own: a mean over one is what this rank sent."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = groups[dist.get_rank()]
    module = network()
    ddp = DistributedDataParallel(module, process_group=own)
    ddp.register_comm_hook(HookState("bf16", group=own, feedback=False), shoal.compression.hook)
    F.cross_entropy(ddp(batch(0, dist.get_rank())[0]), batch(0, dist.get_rank())[1]).backward()  # type: ignore[no-untyped-call]
    plain = network()
    F.cross_entropy(plain(batch(0, dist.get_rank())[0]), batch(0, dist.get_rank())[1]).backward()  # type: ignore[no-untyped-call]
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    return max(float((a.grad - b.grad.bfloat16().double()).abs().max()) for a, b in pairs)  # type: ignore[operator, union-attr]


def with_an_error() -> str:
    """What a sparse gradient is answered with, on every rank."""
    module = nn.EmbeddingBag(50, 4, sparse=True)
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(HookState("int8"), shoal.compression.hook)
    try:
        ddp(torch.arange(6).view(2, 3)).sum().backward()
    except Exception as error:
        return str(error)
    return "nothing"


def _step(ddp: DistributedDataParallel, x: Tensor, y: Tensor) -> None:
    ddp.zero_grad(set_to_none=True)
    torch.autograd.backward(F.cross_entropy(ddp(x), y))
    with torch.no_grad():
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=RATE)
