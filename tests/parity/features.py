"""Cases that run inside the ranks: what a training loop uses beyond one plain step."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.partition import slices, whole
from shoal.plan import Plan


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


class Net(nn.Module):
    """Small, with everything that matters: residual, batch norm, dropout, tied and unused parameters."""

    def __init__(self, dropout: float = 0.0, classes: int = 6) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1)
        self.conv3.weight = self.conv2.weight
        self.unused = nn.Linear(2, 2)
        self.drop2d = nn.Dropout2d(dropout)
        self.drop = nn.Dropout(dropout)
        self.fc1 = nn.Linear(8, 10)
        self.fc2 = nn.Linear(10, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.drop2d(x + self.conv3(F.relu(self.conv2(x))))
        x = F.relu(self.fc1(x.mean((2, 3))))
        result: Tensor = self.fc2(self.drop(x))
        return result


def network(dropout: float = 0.0, classes: int = 6) -> Net:
    torch.manual_seed(3)
    return Net(dropout, classes).double()


def batch(samples: int = 4, classes: int = 6, seed: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, 11, 9, dtype=torch.float64, generator=draw)
    return x, torch.randint(0, classes, (samples,), generator=draw)


def mine(tensor: Tensor) -> Tensor:
    """This rank's even share."""
    return tensor.tensor_split(dist.get_world_size())[dist.get_rank()]


def same_grads(model: shoal.ParallelModule, reference: nn.Module) -> None:
    """Every shard's gradient is its box of the reference's."""
    for name, parameter in reference.named_parameters():
        box = model._states.layouts[name][dist.get_rank()]
        ours = model._states[name].grad
        if parameter.grad is None:
            assert ours is None or not ours.any(), name
        elif box is not None:
            assert ours is not None, name
            torch.testing.assert_close(ours, parameter.grad[slices(box, whole(parameter.shape))])


def loss_on_cut_scores(plan: str, smoothing: float, weighted: bool) -> dict[str, Any]:
    """`loss=`: the mean of the ranks' losses is one device's, and so are the gradients."""
    weight = torch.linspace(0.5, 2, 6, dtype=torch.float64) if weighted else None
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing, ignore_index=2)
    reference, (x, y) = network(), batch(6)
    expected = loss(reference(x), y)
    torch.autograd.backward(expected)
    model = shoal.parallelize(network(), x, plan, loss=loss)
    value = model(mine(x), mine(y))
    close(value, loss(network()(x).detach().tensor_split(dist.get_world_size())[dist.get_rank()],
                                           mine(y)))  # fmt: skip
    torch.autograd.backward(value)
    same_grads(model, reference)
    weights = torch.tensor([float(((mine(y) != 2) * (weight[mine(y)] if weight is not None else 1)).sum())])
    total = weights.clone()
    dist.all_reduce(total)
    mean = value.detach() * weights[0] / total[0]
    dist.all_reduce(mean)
    torch.testing.assert_close(mean, expected.detach(), rtol=1e-6, atol=1e-9)
    model.eval()
    assert model(mine(x)).shape == (len(mine(x)), 6)
    return {label: sent.bytes for label, sent in model.counted.items()}


def accumulation(plan: str) -> None:
    """no_sync, then a synchronised backward: the sum over all of them, as one device accumulates."""
    reference, model = network(), shoal.parallelize(network(), (4, 3, 11, 9), plan)
    for seed in (1, 2, 3):
        x, y = batch(seed=seed)
        torch.autograd.backward(F.cross_entropy(reference(x), y))
        if seed < 3:
            with model.no_sync():
                torch.autograd.backward(F.cross_entropy(model(mine(x)), mine(y)))
        else:
            torch.autograd.backward(F.cross_entropy(model(mine(x)), mine(y)))
    same_grads(model, reference)
    x, y = batch(seed=9)  # and on top of gradients that are synchronised already
    torch.autograd.backward(F.cross_entropy(reference(x), y))
    torch.autograd.backward(F.cross_entropy(model(mine(x)), mine(y)))
    same_grads(model, reference)


def clipping(plan: str, norm_type: float) -> None:
    """clip_grad_norm_ over the whole network."""
    reference, model, (x, y) = network(), shoal.parallelize(network(), (4, 3, 11, 9), plan), batch()
    torch.autograd.backward(F.cross_entropy(reference(x), y))
    torch.autograd.backward(F.cross_entropy(model(mine(x)), mine(y)))
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
    found = shoal.clip_grad_norm_(model, 0.01, norm_type)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=1e-9)
    same_grads(model, reference)


def freezing(plan: str) -> None:
    """Frozen layers get no gradient, whether frozen before or after; the rest is one device's."""
    reference, frozen = network(), network()
    for net in (reference, frozen):
        net.conv1.requires_grad_(False)
    model, (x, y) = shoal.parallelize(frozen, (4, 3, 11, 9), plan), batch()
    torch.autograd.backward(F.cross_entropy(reference(x), y))
    torch.autograd.backward(F.cross_entropy(model(mine(x)), mine(y)))
    same_grads(model, reference)
    both: list[nn.Module] = [reference, model]
    for either in both:
        for parameter in either.parameters():
            parameter.grad = None
        for name, parameter in either.named_parameters():
            parameter.requires_grad_(name.startswith("fc2"))
    torch.autograd.backward(F.cross_entropy(reference(x), y))
    torch.autograd.backward(F.cross_entropy(model(mine(x)), mine(y)))
    same_grads(model, reference)


def other_batches(plan: str | Plan) -> None:
    """Larger, smaller and tiny batches without a new capture; evaluation too."""
    reference, model = network(), shoal.parallelize(network(), (4, 3, 11, 9), plan)
    for samples in (6, 3, 1):
        x, y = batch(samples)
        for net in (reference, model):
            for parameter in net.parameters():
                parameter.grad = None
        expected = reference(x)
        torch.autograd.backward(F.cross_entropy(expected, y))
        output = model(mine(x))
        torch.testing.assert_close(output, mine(expected))
        torch.autograd.backward(F.cross_entropy(output, mine(y)) if len(mine(y)) else output.sum())
        same_grads(model, reference)
    reference.eval(), model.eval()
    x, _ = batch(5)
    with torch.no_grad():
        close(model(mine(x)), mine(reference(x)))
        close(model(mine(x)), mine(reference(x)))


def searched(folder: str) -> None:
    """The plan that is found, raced and remembered here gives one device's numbers; layers that share weights agree."""
    os.environ["SHOAL_CACHE"] = folder
    reference, (x, y) = network(), batch()
    for _ in range(2):  # found, then remembered
        model = shoal.parallelize(network(), x, "auto")
        torch.autograd.backward(F.cross_entropy(model(mine(x)), mine(y)))
        reference.zero_grad()
        torch.autograd.backward(F.cross_entropy(reference(x), y))
        same_grads(model, reference)
    assert model.plan.name in ("auto", "auto-2", "auto-3", "data", "model", "owt", "spatial")
    cuts = dict(model.plan.layers)
    assert cuts["conv2"].degree("c") == cuts["conv3"].degree("c")


def states(plan: str, other: str) -> None:
    """A state taken under one plan and loaded under another; keys and tensors are the original module's."""
    original, (x, y) = network(), batch()
    model = shoal.parallelize(original, x, plan)
    torch.autograd.backward(F.cross_entropy(model(mine(x)), mine(y)))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    full = shoal.full_state_dict(model)
    assert list(full) == list(original.state_dict())
    fresh = network()
    fresh.load_state_dict(full)
    torch.manual_seed(8)
    second = shoal.parallelize(Net().double(), x, other)
    shoal.load_full_state_dict(second, full)
    for net in (fresh, model, second):
        net.eval()
    with torch.no_grad():
        close(model(mine(x)), mine(fresh(x)))
        close(second(mine(x)), mine(fresh(x)))


def local_batch_norm(plan: str) -> None:
    """batch_norm="local": each share its own statistics, as DistributedDataParallel."""
    reference = nn.parallel.DistributedDataParallel(network(), find_unused_parameters=True)
    model, (x, y) = shoal.parallelize(network(), (8, 3, 11, 9), plan, batch_norm="local"), batch(8)
    expected = reference(mine(x))
    output = model(mine(x))
    close(output, expected)
    torch.autograd.backward(F.cross_entropy(expected, mine(y)))
    torch.autograd.backward(F.cross_entropy(output, mine(y)))
    same_grads(model, reference.module)


def autocast(plan: str) -> None:
    """bfloat16 under torch.autocast: as close to float64 as one device's autocast is, within its precision."""
    reference, model, (x, y) = network().float(), shoal.parallelize(network().float(), (4, 3, 11, 9), plan), batch()
    exact = network()(x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = reference(x.float())
        output = model(mine(x).float())
    assert output.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), mine(exact), rtol=0.1, atol=0.05)
    torch.autograd.backward(F.cross_entropy(output.float(), mine(y)))
    torch.autograd.backward(F.cross_entropy(expected.float(), y))
    for name, parameter in reference.named_parameters():
        box = model._states.layouts[name][dist.get_rank()]
        ours = model._states[name].grad
        if box is not None and ours is not None and parameter.grad is not None:
            scale = parameter.grad.abs().max().item() + 1e-3
            assert ours.dtype == torch.float32
            difference = ours - parameter.grad[slices(box, whole(parameter.shape))]
            assert not difference.numel() or difference.abs().max().item() < 0.15 * scale, name


def dropout(plan: str) -> list[Tensor]:
    """Three training steps' outputs; the caller compares them between plans and worlds."""
    x, y = batch()
    model = shoal.parallelize(network(dropout=0.4), x, plan, io="whole", seed=5)
    outputs = []
    for _ in range(3):
        output = model(x)
        torch.autograd.backward(F.cross_entropy(output, y))
        outputs.append(output.detach())
    return outputs


def refusals() -> list[str]:
    """Mistakes in a loop: each a clear message on every rank, and the ranks can go on."""
    model, (x, y) = shoal.parallelize(network(), (4, 3, 11, 9), "data"), batch()
    messages = []
    for attempt in (
        lambda: model(mine(x)[:, :2] if dist.get_rank() else mine(x)),  # one rank's mistake must not hang the other
        lambda: model(mine(x), mine(y)),
        lambda: shoal.load_full_state_dict(model, {}),
        lambda: shoal.parallelize(network(), x, "3x5"),
        lambda: shoal.parallelize(network(), x, io="half"),  # type: ignore[arg-type]
    ):
        try:
            attempt()
        except shoal.errors.ShoalError as error:
            messages.append(str(error))
    output = model(mine(x))
    loss = F.cross_entropy(output, mine(y))
    torch.autograd.backward(loss, retain_graph=True)
    try:
        torch.autograd.backward(loss)
    except shoal.errors.RunError as error:
        messages.append(str(error))
    return messages


def copies_stay_equal(plan: str) -> None:
    """After several steps, ranks that hold the same shard hold the same bits."""
    model = shoal.parallelize(network(), (4, 3, 11, 9), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(4):
        x, y = batch(seed=seed)
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(mine(x)), mine(y)))
        optimizer.step()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: t.detach().clone() for name, t in model._states.tensors().items()})
    for name, layout in model._states.layouts.items():
        for rank, box in enumerate(layout):
            for other in range(rank):
                if box is not None and layout[other] == box:
                    assert torch.equal(everyone[rank][name], everyone[other][name]), (name, rank, other)


def bytes_of_loss(classes: int) -> int:
    """What the loss layer sends in one step under owt."""
    x, y = batch(4, classes)
    model = shoal.parallelize(network(classes=classes), x, "owt", loss=nn.CrossEntropyLoss())
    torch.autograd.backward(model(mine(x), mine(y)))
    return sum(sent.bytes for label, sent in model.counted.items() if label.startswith(("loss", "output")))


class TwoHeads(nn.Module):
    """Two results, and an input that is the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)
        self.other = nn.Linear(6, 4)

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        features = self.conv(x).mean((2, 3))
        return self.head(features) * weight, self.other(features)


def two_heads(plan: str) -> None:
    """A head whose result nobody used has no gradient; what all ranks share stays so for a batch of its own length."""
    reference, weight = TwoHeads().double(), torch.linspace(1, 2, 4, dtype=torch.float64)
    x, y = batch(6, classes=4)
    model = shoal.parallelize(TwoHeads().double(), (x, weight), plan)
    torch.autograd.backward(F.cross_entropy(reference(x, weight)[0], y))
    torch.autograd.backward(F.cross_entropy(model(mine(x), weight)[0], mine(y)))
    for name, parameter in reference.named_parameters():
        assert (parameter.grad is None) == (model.get_parameter(name).grad is None), name
    same_grads(model, reference)
    few = x[:4]
    close(model(mine(few), weight)[0], mine(reference(few, weight)[0]))


def laid_anew_before_backward(plan: str) -> str:
    """A backward pass through a network whose module was laid anew meanwhile is refused on all ranks."""
    x, y = batch(4)
    model = shoal.parallelize(network(), x, plan)
    loss = F.cross_entropy(model(mine(x)), mine(y))
    shoal.parallelize(model, x, "model")
    try:
        torch.autograd.backward(loss)
    except shoal.errors.RunError as error:
        return str(error)
    return ""
