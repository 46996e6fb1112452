"""Cases that run inside the ranks: networks whose linear layers run in laps, against one device and a reference."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import shoal
from shoal.errors import ShoalError
from shoal.execution.laying import Captured, capture_modes, lay
from shoal.execution.randomness import LayerRandom
from shoal.lowering import owners
from shoal.lowering.boundary import even_shares
from shoal.lowering.laps import Scheme, lap_samples
from shoal.partition import Span, slices, whole
from shoal.plan import Plan
from shoal.planning import resolve
from shoal.training.laps import step_after_lap
from shoal.transport import Transport
from shoal.verifying.compare import _more, compare
from shoal.verifying.engine_masks import drawing_as
from shoal.verifying.one_device import OneDevice, run_one_device

TOLERANCE = 1e-9
STEPS = 3
SEED = 5
CLASSES = 7


def like_alexnet() -> nn.Module:
    """AlexNet's order of layers: convolutions, pools, then three linear layers with dropout before the first two."""
    front = [nn.Conv2d(3, 6, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(6, 8, 3, padding=1)]
    front += [nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2)]
    rear = [nn.Dropout(), nn.Linear(32, 20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 14), nn.ReLU()]
    return nn.Sequential(*front, nn.Flatten(), *rear, nn.Linear(14, CLASSES))


def lenet5() -> nn.Module:
    return shoal.zoo.build("lenet5", input=(1, 20, 20), classes=CLASSES)


class TwoPaths(nn.Module):
    """A linear layer reads what a convolution reads too; another one's weight is made of parameters on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 5, 3)
        self.early, self.late = nn.Linear(16, CLASSES), weight_norm(nn.Linear(20, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x).relu()
        early = self.early(F.adaptive_max_pool2d(x, 2).flatten(1))
        scores: Tensor = self.late(F.adaptive_avg_pool2d(self.conv2(x).relu(), 2).flatten(1)) + early
        return scores


NETS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "like alexnet": (like_alexnet, (3, 24, 24)),
    "lenet5": (lenet5, (1, 20, 20)),
    "two paths": (TwoPaths, (2, 10, 10)),
}


def built(net: str) -> nn.Module:
    torch.manual_seed(1)
    model = NETS[net][0]().double().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.9  # statistics near the batch's: else an evaluation so soon is ill-conditioned
    return model


def batch_of(net: str, samples: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(samples, *NETS[net][1], dtype=torch.float64, generator=draw)
    return x, torch.randint(0, CLASSES, (samples,), generator=draw)


@lru_cache(maxsize=2)
def subject(net: str, samples: int, weighted: bool) -> tuple[Captured, OneDevice]:
    """The captured network with its loss, and one device's three steps, which draw the masks that the plan draws."""
    weight = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64) if weighted else None
    loss = nn.CrossEntropyLoss(weight, ignore_index=2 if weighted else -100, label_smoothing=0.1 if weighted else 0)
    model, (x, y) = built(net), batch_of(net, samples)
    captured = capture_modes(deepcopy(model), x, loss, y)
    one = run_one_device(
        model, x, y, loss, steps=STEPS, rate=0.02, draws=lambda mode, step: drawing(captured, mode, step)
    )
    return captured, one


def drawing(captured: Captured, training: bool, step: int) -> Any:
    return drawing_as(captured.graphs[training], seed=SEED, step=step)


def compare_laps(
    net: str,
    samples: int,
    plan: str,
    *,
    io: Any = "share",
    shares: tuple[int, ...] | None = None,
    weighted: bool = False,
    recompute: bool = False,
    state: Any = "whole",
) -> dict[str, int]:
    """Three optimizer steps under the plan, all compared with one device's; bytes by layer, counted as predicted."""
    captured, one = subject(net, samples, weighted)
    transport = Transport()
    with patch.object(owners, "LEAST_ELEMENTS", 1):
        model = lay(captured, plan, transport, io=io, seed=SEED, recompute=recompute, optimizer_state=state)
    assert model.plan.laps == resolve(plan, captured.graphs[True], transport.world).laps
    found, sent = compare(one, model, transport, tail=captured.tail, io=io, shares=shares)
    if shares is None:
        expected = model.predicted(input_grad=True)
        assert sent == expected, {
            name: (sent.get(name), expected.get(name))
            for name in {*sent, *expected}
            if sent.get(name) != expected.get(name)
        }
    worst = max(found, key=lambda key: found[key])
    assert found[worst] <= TOLERANCE, f"{' '.join(worst)} differs by {found[worst]:.2e} (relative)"
    kinds = {kind for kind, _ in found}
    assert {"gradient", "input gradient", "later state", "later evaluation"} <= kinds
    assert ("loss" in kinds) == bool((shares or even_shares(samples, transport.world))[transport.rank])
    return {name: one.bytes for name, one in sent.items()}


# Weights that step after every lap, against a plain reference


def criterion_of(weighted: bool) -> nn.CrossEntropyLoss:
    weight = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64) if weighted else None
    return nn.CrossEntropyLoss(weight, ignore_index=2 if weighted else -100)


OPTIMIZERS: Mapping[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate / 10, eps=1e-3),
}


class Masked(nn.Module):
    """Dropout with the masks of a plan: those of these samples, in whatever batch they come."""

    def __init__(self, layer: str, p: float) -> None:
        super().__init__()
        self.layer, self.p = layer, p
        self.step, self.samples = 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        random, rows = LayerRandom(SEED, self.layer, self.step), whole(x.shape)[1:]
        masks = [
            random.box((sample + 1, *x.shape[1:]), (Span(sample, sample + 1), *rows), keep=1 - self.p, like=x)
            for sample in self.samples
        ]
        return x * torch.cat(masks) / (1 - self.p)


class TwoBatchSizes:
    """Krizhevsky's two batch sizes on one device, in plain torch, as written down in docs/plans.md.

    The front runs over the batch. Its features go through the linear layers some samples at a time; these step each
    time on the mean loss of those samples. The front's gradient is that of the mean over all samples, as the linear
    layers were when each sample came; then the front steps.
    """

    def __init__(self, optimizer: str, rate: float, dense_rate: float, criterion: nn.CrossEntropyLoss) -> None:
        model = built("like alexnet")
        assert isinstance(model, nn.Sequential)
        layers = [
            Masked(name, layer.p) if isinstance(layer, nn.Dropout) else layer for name, layer in model.named_children()
        ]
        first = next(place for place, layer in enumerate(layers) if isinstance(layer, nn.Linear))
        self.model, self.front, self.dense = nn.Sequential(*layers), layers[:first], layers[first:]
        make, self.criterion = OPTIMIZERS[optimizer], criterion
        self.steps = [make(nn.Sequential(*part).parameters(), own) for part, own in self._parts(rate, dense_rate)]

    def _parts(self, rate: float, dense_rate: float) -> list[tuple[list[nn.Module], float]]:
        return [(self.front, rate), (self.dense, dense_rate)]

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Under the original names: dropout has none."""
        return self.model.state_dict()

    def _run(self, layers: Sequence[nn.Module], x: Tensor, step: int, samples: list[int]) -> Tensor:
        for layer in layers:
            if isinstance(layer, Masked):
                layer.step, layer.samples = step, samples
            x = layer(x)
        return x

    def weight(self, y: Tensor) -> Tensor:
        each = torch.ones(len(y), dtype=torch.float64) if self.criterion.weight is None else self.criterion.weight[y]
        return (each * (y != self.criterion.ignore_index)).sum()

    def step(self, number: int, x: Tensor, y: Tensor, laps: Sequence[list[int]]) -> Tensor:
        """One step; the mean loss over all samples, as they were seen."""
        front, dense = self.steps
        features = self._run(self.front, x, number, list(range(len(x))))
        grad, total = torch.zeros_like(features), torch.zeros((), dtype=torch.float64)
        for samples in laps:
            part = features.detach()[samples].requires_grad_()
            loss = self.criterion(self._run(self.dense, part, number, samples), y[samples])
            share = self.weight(y[samples]) / self.weight(y)
            dense.zero_grad()
            torch.autograd.backward(loss)
            dense.step()
            assert part.grad is not None
            grad[samples] = part.grad * share
            total += loss.detach() * share
        front.zero_grad()
        torch.autograd.backward(features, grad)
        front.step()
        return total


def two_batch_sizes(scheme: Scheme, samples: int, optimizer: str, weighted: bool, slower: bool) -> None:
    """Four steps, each on other data; all is as the reference has it. `slower`: after laps as the trainer steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    criterion, rate = criterion_of(weighted), 0.02
    reference = TwoBatchSizes(optimizer, rate, rate / ranks if slower else rate, criterion)
    model = shoal.parallelize(built("like alexnet"), (samples, 3, 24, 24), f"owt:{scheme}1", loss=criterion, seed=SEED)
    own = OPTIMIZERS[optimizer](model.parameters(), rate)
    model.after_lap((lambda: step_after_lap(own, ranks)) if slower else own.step)
    shares = even_shares(samples, ranks)
    held = [Span(sum(shares[:r]), sum(shares[: r + 1])) for r in range(ranks)]
    mine = slice(held[rank].start, held[rank].stop)
    laps = [[sample for span in lap for sample in range(span.start, span.stop)] for lap in lap_samples(held, scheme)]
    draw = torch.Generator().manual_seed(8)
    for number in range(1, 5):
        x = torch.randn(samples, 3, 24, 24, dtype=torch.float64, generator=draw)
        y = torch.randint(0, CLASSES, (samples,), generator=draw)
        expected, before = reference.step(number, x, y, laps), model.counted
        own.zero_grad()
        loss = model(x[mine], y[mine])
        torch.autograd.backward(loss)
        dense = {name for name, _ in model.named_parameters() if int(name.split(".")[0]) >= 10}
        assert {name for name, p in model.named_parameters() if p.grad is None} == dense
        own.step()
        assert _more(model.counted, before) == dict(model.predicted())
        seen = torch.tensor(0.0 if model.loss_share is None else loss.item() * model.loss_share, dtype=torch.float64)
        dist.all_reduce(seen)
        torch.testing.assert_close(seen, expected, rtol=1e-9, atol=1e-12)
        assert [group["lr"] for group in own.param_groups] == [rate if optimizer == "sgd" else rate / 10]
    torch.testing.assert_close(shoal.full_state_dict(model), dict(reference.named_tensors()), rtol=1e-9, atol=1e-11)


# What a script does around them


def plain() -> nn.Module:
    """Without dropout and batch norm, so that eager torch is the reference."""
    torch.manual_seed(2)
    front = [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*front, nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, CLASSES)).double()


def plain_batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 2, 8, 8, dtype=torch.float64, generator=draw)
    return x, torch.randint(0, CLASSES, (samples,), generator=draw)


def laid_plain(plan: str | Plan = "owt:c", **options: Any) -> shoal.ParallelModule:
    return shoal.parallelize(plain(), (6, 2, 8, 8), plan, loss=F.cross_entropy, **options)


def mine(tensor: Tensor) -> Tensor:
    return tensor.tensor_split(dist.get_world_size())[dist.get_rank()]


def same_grads(model: shoal.ParallelModule, grads: Mapping[str, Tensor | None], rtol: float = 1e-9) -> None:
    """`grads` of the whole network, None where there is none; differences beside a tensor's largest element."""
    for name, shard in model.shards().items():
        ours, theirs = shard.grad, grads[name]
        assert (ours is None) == (theirs is None), name
        if ours is not None and theirs is not None and shard.box is not None:
            part = theirs[slices(shard.box, whole(theirs.shape))]
            assert ours.dtype == part.dtype
            torch.testing.assert_close(ours, part, rtol=rtol, atol=rtol * float(theirs.abs().max()))


def grads_of(reference: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in reference.named_parameters()}


def around(plan: str) -> None:
    """Losses that are multiplied, accumulated, asked for parts of their gradient; other batches; evaluation."""
    reference, model = plain(), laid_plain(plan)
    for seed, samples in ((1, 6), (2, 5), (3, 9)):  # other numbers of samples than it was captured with
        x, y = plain_batch(samples, seed)
        torch.autograd.backward(F.cross_entropy(reference(x), y) * 0.25)
        if seed < 3:
            with model.no_sync():
                torch.autograd.backward(model(mine(x), mine(y)) * 0.25)
        else:
            torch.autograd.backward(model(mine(x), mine(y)) * 0.25)
    same_grads(model, grads_of(reference))
    x, y = plain_batch(6, 4)
    torch.autograd.backward(F.cross_entropy(reference(x), y))  # on top of gradients that are synchronised already
    torch.autograd.backward(model(mine(x), mine(y)))
    same_grads(model, grads_of(reference))

    names = ["0.weight", "4.bias"]
    wanted = torch.autograd.grad(
        F.cross_entropy(reference(x), y), [dict(reference.named_parameters())[n] for n in names]
    )
    found = torch.autograd.grad(model(mine(x), mine(y)), [dict(model.named_parameters())[n] for n in names])
    for name, ours, theirs in zip(names, found, wanted, strict=True):
        box = model.shards()[name].box
        assert box is not None
        torch.testing.assert_close(
            ours.as_subclass(Tensor), theirs[slices(box, whole(theirs.shape))], rtol=1e-9, atol=0
        )

    with torch.no_grad():
        loss = model(mine(x), mine(y))
        torch.testing.assert_close(loss, F.cross_entropy(reference(mine(x)), mine(y)), rtol=1e-9, atol=0)
        torch.testing.assert_close(model.eval()(mine(x)), reference(mine(x)), rtol=1e-9, atol=1e-12)


def frozen(plan: str, which: str) -> None:
    """Of the front, of the linear layers, and of the first of these."""
    reference, model, (x, y) = plain(), laid_plain(plan), plain_batch(6, 1)
    for net in (reference, model):
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name.partition(".")[0] not in which.split())
    torch.autograd.backward(F.cross_entropy(reference(x), y))
    before = model.counted
    torch.autograd.backward(model(mine(x), mine(y)))
    same_grads(model, grads_of(reference))
    assert _more(model.counted, before) == dict(model.predicted())


def hooks_see_each_gradient() -> None:
    reference, model, (x, y) = plain(), laid_plain(), plain_batch(6, 1)
    for net in (reference, model):
        for parameter in net.parameters():
            parameter.register_hook(lambda grad: 2 * grad)  # type: ignore[no-untyped-call]
    torch.autograd.backward(F.cross_entropy(reference(x), y))
    torch.autograd.backward(model(mine(x), mine(y)))
    same_grads(model, grads_of(reference))


def said(action: Callable[[], object]) -> str:
    """What it is refused with."""
    try:
        action()
    except ShoalError as error:
        return str(error)
    return ""


def refusals() -> list[str]:
    """What is said on this rank; after each the network goes on."""
    (x, y), rank = plain_batch(6, 1), dist.get_rank()
    model = laid_plain("owt:c")
    found = [said(lambda: torch.autograd.backward(model(mine(x), mine(y)) * (1.0 + rank)))]
    found.append(said(lambda: model.after_lap(lambda: None)))
    reference = plain()
    torch.autograd.backward(F.cross_entropy(reference(x), y))
    model.zero_grad()
    torch.autograd.backward(model(mine(x), mine(y)))
    same_grads(model, grads_of(reference))

    stepping = laid_plain("owt:b1")
    if rank == 0:  # and nobody else
        stepping.after_lap(lambda: None)
    found.append(said(lambda: stepping(mine(x), mine(y))))
    stepping.after_lap(lambda: None)
    with stepping.no_sync():
        found.append(said(lambda: stepping(mine(x), mine(y))))
    torch.autograd.backward(stepping(mine(x), mine(y)))
    same_grads(stepping, {n: g if int(n[0]) < 4 else None for n, g in grads_of(reference).items()})
    untouched = plain()
    found.append(said(lambda: shoal.parallelize(untouched, (6, 2, 8, 8), "owt:c")))
    assert untouched.state_dict()["4.weight"].shape == (9, 16)  # refused before anything was cut
    return found


def as_a_file(path: str) -> None:
    """The plan as it was laid, saved and laid again: the same bits."""
    model, (x, y) = laid_plain("owt:b"), plain_batch(6, 1)
    torch.autograd.backward(model(mine(x), mine(y)))
    if dist.get_rank() == 0:
        model.plan.save(path)
    dist.barrier()
    again = laid_plain(path)
    assert again.plan.laps == Plan.load(path).laps == "b"
    torch.autograd.backward(again(mine(x), mine(y)))
    for ours, theirs in zip(model.shards().values(), again.shards().values(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def autocast(plan: str) -> None:
    """Under bfloat16 as near to one device as that is precise; gradients in the parameters' own type."""
    model, (x, y) = shoal.parallelize(plain().float(), (6, 2, 8, 8), plan, loss=F.cross_entropy), plain_batch(6, 1)
    reference = plain().float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, loss = F.cross_entropy(reference(x.float()), y), model(mine(x).float(), mine(y))
    torch.autograd.backward(expected)
    torch.autograd.backward(loss)
    same_grads(model, grads_of(reference), rtol=0.03)
