"""What every idiom's case uses inside the ranks: networks, batches, and comparisons with one device.

A case is a function of a plan. It runs on two ranks, compares with the plain module on one device (or with DDP), and
asserts refusals on all ranks at once with `refused`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.lowering import owners
from shoal.partition import Box, slices, whole

AnyPlan = str | shoal.Plan
Case = Callable[[AnyPlan], None]

MIXED = shoal.Plan(
    name="mixed",
    ranks=2,
    layers=(("a", shoal.Cut.parse("h2")), ("b*", shoal.Cut.parse("c2")), ("head", shoal.Cut.parse("n2"))),
)
"""Another cut for every layer; each network here has layers of these names, and may call `b` more than once."""

PLANS: Mapping[str, AnyPlan] = {"data": "data", "model": "model", "spatial": "spatial", "mixed": MIXED}
CUT_STATE = "data, optimizer state cut"
"""In the place of a plan: the plan `data` with `optimizer_state="cut"`, also of parameters as small as those here."""


def cases_of(content: Mapping[str, Any]) -> list[Case]:
    """The cases of a test file: its own functions whose one argument is `plan`."""
    return [
        found
        for found in content.values()
        if inspect.isfunction(found)
        and found.__module__ == content["__name__"]
        and list(inspect.signature(found).parameters) == ["plan"]
    ]


def name_of(case: Case) -> str:
    """A case's name, as tests and docs/from_ddp.md say it."""
    return case.__name__


# Networks and batches


class Net(nn.Module):
    """Two convolutions and a head: under every plan of `PLANS` some layer sends something."""

    def __init__(self, norm: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.norm(self.a(x))))
        result: Tensor = self.head(F.relu(self.b(x)).mean((2, 3)))
        return result


def built(kind: Callable[..., nn.Module] = Net, *args: Any, **options: Any) -> Any:
    """A network in float64, the same at every call."""
    torch.manual_seed(3)
    return kind(*args, **options).double()


SHAPE = (6, 3, 8, 6)


def batch(samples: int = 6, seed: int = 4, size: tuple[int, int] = (8, 6)) -> tuple[Tensor, Tensor]:
    """Images and classes, the same on all ranks."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, *size, dtype=torch.float64, generator=draw)
    return x, torch.randint(0, 4, (samples,), generator=draw)


def rank() -> int:
    return dist.get_rank()


def mine(tensor: Tensor, first: int | None = None, dim: int = 0) -> Tensor:
    """This rank's samples: half of them, or the first `first` on rank 0 and the others on rank 1."""
    count = tensor.shape[dim]
    cut = (count + 1) // 2 if first is None else first
    return torch.split(tensor, [cut, count - cut], dim)[rank()]


def weight(tensor: Tensor, first: int) -> float:
    """What this rank's samples count for in the mean over all."""
    return (first if rank() == 0 else len(tensor) - first) / len(tensor)


def parallel(
    model: nn.Module | Callable[[], nn.Module], plan: AnyPlan, example: Any = SHAPE, **options: Any
) -> shoal.ParallelModule:
    """`shoal.parallelize`, without the time that it takes to measure the link."""
    if plan == CUT_STATE:
        with patch.object(owners, "LEAST_ELEMENTS", 1):
            return parallel(model, "data", example, optimizer_state="cut", **options)
    return shoal.parallelize(model, example, plan, bucket_bytes=1 << 16, **options)


def both(plan: AnyPlan, kind: Callable[..., nn.Module] = Net, *args: Any, **options: Any) -> tuple[Any, Any]:
    """(the network on one device, the same over the ranks)."""
    return built(kind, *args, **options), parallel(built(kind, *args, **options), plan)


def learn(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A loss, and its backward pass."""
    loss = F.cross_entropy(model(x), y)
    torch.autograd.backward(loss)
    return loss.detach()


# Comparisons


def close(ours: Tensor, theirs: Tensor) -> None:
    """Equal but for the order of additions."""
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def part(full: Tensor, box: Box | None) -> Tensor:
    """The box of a whole tensor that a rank holds."""
    return full.new_empty([0] * max(full.ndim, 1)) if box is None else full[slices(box, whole(full.shape))]


def own_part(model: shoal.ParallelModule, name: str, full: Tensor) -> Tensor:
    """This rank's part of a tensor that is laid out as a parameter is."""
    return part(full, model.shards()[name].box)


def same_grads(model: shoal.ParallelModule, reference: nn.Module) -> None:
    """Every shard's gradient is its box of the plain module's; what has none there has none here."""
    ours = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        grad = ours[name].grad
        if parameter.grad is None:
            assert grad is None, f"{name} has a gradient"
        elif model.shards()[name].tensor.numel():
            assert grad is not None, f"{name} has no gradient"
            close(grad, own_part(model, name, parameter.grad))


def same_states(model: shoal.ParallelModule, reference: nn.Module) -> None:
    """The whole states are those of the plain module."""
    found, expected = model.state_dict(), reference.state_dict()
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        close(found[key], tensor)


def ordinary(part: Tensor) -> Tensor:
    """A copy of this rank's part of something, of which any number may be taken."""
    with torch._C.DisableTorchFunctionSubclass():
        return part.detach().clone()


def everyones(thing: Any) -> list[Any]:
    """What each rank has of it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def refused(kind: type[BaseException], text: str, attempt: Callable[[], object]) -> None:
    """All ranks refuse it with one and the same message, which has this text in it; they can go on then."""
    said = "nothing"
    try:
        attempt()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    messages = everyones(said)
    assert len(set(messages)) == 1, messages
    assert said.startswith(kind.__name__), said
    assert text in said, said
