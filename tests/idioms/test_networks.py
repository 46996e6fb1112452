"""Layers and tricks of real networks: the same numbers as on one device, or refused by their line."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.errors import CaptureError
from tests.conftest import RunOnRanks
from tests.idioms.kit import (
    PLANS,
    AnyPlan,
    Case,
    Net,
    batch,
    both,
    built,
    cases_of,
    close,
    learn,
    mine,
    name_of,
    parallel,
    refused,
    same_grads,
    same_states,
)
from tests.idioms.test_capture import refuse, train_beside
from tests.idioms.test_tensors import Parts


class Plain(Parts):
    """Scores of maps, which other classes do something with in between."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.between(self.maps(x)))

    def between(self, maps: Tensor) -> Tensor:
        return maps


class Attention(Plain):
    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(6, 2, batch_first=True) if layer else None

    def between(self, maps: Tensor) -> Tensor:
        pixels = maps.flatten(2).transpose(1, 2)
        if self.heads is None:
            seen = F.scaled_dot_product_attention(pixels, pixels, pixels)
        else:
            seen = self.heads(pixels, pixels, pixels, need_weights=False)[0]
        return maps + seen.transpose(1, 2).reshape(maps.shape)


def attention(plan: AnyPlan) -> None:
    """scaled_dot_product_attention and nn.MultiheadAttention."""
    train_beside(plan, partial(Attention, False))
    train_beside(plan, partial(Attention, True))


class AutocastInside(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.b2 = nn.Conv2d(6, 6, 3, padding=1)

    def between(self, maps: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low: Tensor = self.b2(maps)
        return low.to(maps.dtype) if low.dtype == torch.bfloat16 else low * 100


def autocast_inside(plan: AnyPlan) -> None:
    """torch.autocast in forward: results of the low type, and gradients, as on one device but for its rounding."""
    reference, model = built(AutocastInside).float(), parallel(built(AutocastInside).float(), plan)
    x, y = batch()
    x = x.float()
    found, expected = model(mine(x)), mine(reference(x))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.005)
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    low_grads(model, reference)


def low_grads(model: shoal.ParallelModule, reference: nn.Module) -> None:
    """Every gradient is there, and near that of one device: bfloat16 has 8 bits, and sums have another order."""
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, shard in model.shards().items():
        grad, whole = model.get_parameter(name).grad, expected[name]
        if shard.box is not None and whole is not None:
            assert grad is not None
            assert grad.dtype == whole.dtype
            own = whole[tuple(slice(span.start, span.stop) for span in shard.box)]
            torch.testing.assert_close(grad, own, rtol=0.05, atol=0.03 * float(whole.abs().max()))


def autocast_around(plan: AnyPlan) -> None:
    """`with torch.autocast(...)` around a call: the type and the numbers of one device."""
    reference, model = built(Net, norm=False).float(), parallel(built(Net, norm=False).float(), plan)
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = reference(x.float()), model(mine(x).float())
        losses = F.cross_entropy(expected, y), F.cross_entropy(found, mine(y))
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, mine(expected), rtol=0.02, atol=0.005)
    for loss in losses:
        torch.autograd.backward(loss)
    low_grads(model, reference)


def half_precision(plan: AnyPlan) -> None:
    """half() and bfloat16(), before parallelize and after it."""
    for kind in (torch.bfloat16, torch.float16):
        reference = built(Net, norm=False).to(kind)
        before, after = parallel(built(Net, norm=False).to(kind), plan), parallel(built(Net, norm=False), plan)
        after.to(kind)
        x, y = batch()
        x = x.to(kind)
        learn(reference, x, y)
        for model in (before, after):
            found = model(mine(x))
            assert found.dtype == kind
            torch.testing.assert_close(found, mine(reference(x)), rtol=0.02, atol=0.005)
            learn(model, mine(x), mine(y))
            low_grads(model, reference)


class OfValues(Plain):
    def between(self, maps: Tensor) -> Tensor:
        return maps + maps[maps > 0].mean()


def shapes_of_values(plan: AnyPlan) -> None:
    """A tensor whose shape depends on values is refused with its line."""
    refuse(plan, OfValues, "the shape of a tensor depends on the values of another at")


class Mapped(Plain):
    def between(self, maps: Tensor) -> Tensor:
        result: Tensor = torch.vmap(lambda one: one * 2)(maps)
        return result


def vmap_inside(plan: AnyPlan) -> None:
    """torch.vmap in forward is refused with its line."""
    refuse(plan, Mapped, "the network uses torch.vmap or another transform of torch.func at")


class Waves(Plain):
    def between(self, maps: Tensor) -> Tensor:
        waves = torch.fft.rfft2(maps)
        waves[..., :2] = waves[..., :2] * 2
        result: Tensor = maps + torch.fft.irfft2(waves, s=maps.shape[-2:])
        return result


def complex_slices(plan: AnyPlan) -> None:
    """A part of a complex tensor, read and written."""
    train_beside(plan, Waves)


class Weights(Plain):
    def __init__(self, old: bool) -> None:
        super().__init__()
        norm = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
        norm(self.b)


def normed_weights(plan: AnyPlan) -> None:
    """weight_norm as a hook, and as a parametrization."""
    train_beside(plan, partial(Weights, True))
    train_beside(plan, partial(Weights, False))


class Spectral(Plain):
    def __init__(self, old: bool) -> None:
        super().__init__()
        norm = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
        norm(self.b)


class Means(Plain):
    """A mean over batches, as codebooks have."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        if self.training:
            self.mean.mul_(0.9).add_(maps.detach().mean((0, 2, 3)), alpha=0.1)
        return self.scores(maps + self.mean[:, None, None])


def written_buffers(plan: AnyPlan) -> None:
    """Buffers that forward writes, other than batch norm's and counters, are refused with the line."""
    refuse(plan, partial(Spectral, False), "forward writes buffer 'b.parametrizations.weight.0._u' at")
    refuse(plan, partial(Spectral, True), "forward writes buffer 'b.weight_u' at")
    refuse(plan, Means, "forward writes buffer 'mean' at")
    refuse(plan, Means, "(self.mean.mul_(0.9).add_(maps.detach().mean((0, 2, 3)), alpha=0.1)) (such as spectral_norm's")
    refuse(plan, Means, "Update it outside of forward.")


class OnePixel(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def between(self, maps: Tensor) -> Tensor:
        result: Tensor = self.norm(maps.mean((2, 3), keepdim=True))
        return result


def batch_norm_of_one_pixel(plan: AnyPlan) -> None:
    """Batch norm on 1x1 maps; over one value per channel torch's own error, on all ranks."""
    train_beside(plan, OnePixel)
    reference, model = both(plan, OnePixel)
    x, y = batch(1)
    refused(CaptureError, "Expected more than 1 value per channel when training", lambda: model(mine(x)))
    x, y = batch()
    learn(reference, x, y)
    learn(model, mine(x), mine(y))
    same_grads(model, reference)
    reference.eval()
    model.eval()
    x, _ = batch(1)
    close(model(mine(x)), mine(reference(x)))


class Instances(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)

    def between(self, maps: Tensor) -> Tensor:
        result: Tensor = self.norm(maps)
        return result


def instance_norm(plan: AnyPlan) -> None:
    """With running statistics, which count every batch once also where the pass runs again for backward."""
    train_beside(plan, Instances)
    reference, model = built(Instances), parallel(built(Instances), plan, recompute=True)
    for seed in (1, 2):
        x, y = batch(seed=seed)
        learn(reference, x, y)
        learn(model, mine(x), mine(y))
    same_grads(model, reference)
    same_states(model, reference)
    reference.eval()
    model.eval()
    close(model(mine(x)), mine(reference(x)))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", cases_of(globals()), ids=name_of)
def test_networks(on_ranks: RunOnRanks, case: Case, plan: str) -> None:
    on_ranks(2, case, PLANS[plan])
