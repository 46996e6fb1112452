"""What AlexNet and VGG-16 send per step, counted on real processes, is what arithmetic says."""

from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from tests.conftest import RunOnRanks

# (pixels, conv parameters, all parameters, sizes of the linear layers' inputs and of the last output)
NETS = {
    "alexnet": (64, 2_469_696, 61_100_840, (9216, 4096, 4096, 1000)),
    "vgg16": (32, 14_714_688, 138_357_544, (25088, 4096, 4096, 1000)),
}
BATCH = 4


def to_owners_and_back() -> int:
    """Bytes that this rank sent in one step of four layers, of which only the weights are large enough to be cut."""
    sizes = (192, 512, 130, 160, 10)
    layers = [nn.Linear(before, after) for before, after in pairwise(sizes)]
    laid = shoal.parallelize(nn.Sequential(*layers), (8, 192), optimizer_state="cut")
    assert {name for name, shard in laid.shards().items() if shard.tensor.shape != shard.shape} == CUT
    torch.autograd.backward(laid(torch.randn(2, 192)).sum())
    assert {name: sent for name, sent in laid.counted.items() if name != "states"} == laid.predicted()
    return sum(sent.bytes for sent in laid.predicted().values())


CUT = {"0.weight", "1.weight", "2.weight"}


def test_to_owners_and_back_is_as_much_as_a_ring(on_ranks: RunOnRanks) -> None:
    parameters = 192 * 512 + 512 + 512 * 130 + 130 + 130 * 160 + 160 + 160 * 10 + 10
    assert sum(on_ranks(4, to_owners_and_back)) == 2 * (4 - 1) * parameters * 4


def count(net: str, plan: str, factors: Literal["always", "never"] = "never") -> int:
    """Bytes that this rank sent in one step."""
    pixels = NETS[net][0]
    torch.manual_seed(0)
    model = shoal.zoo.build(net, input=(3, pixels, pixels), classes=1000)
    laid = shoal.parallelize(model, (BATCH, 3, pixels, pixels), plan, factors=factors)
    share = BATCH // torch.distributed.get_world_size()
    before = sum(sent.bytes for sent in laid.counted.values())
    torch.autograd.backward(F.cross_entropy(laid(torch.randn(share, 3, pixels, pixels)), torch.zeros(share).long()))
    counted = sum(sent.bytes for sent in laid.counted.values()) - before
    assert counted == sum(sent.bytes for sent in laid.predicted().values())
    return counted


@pytest.mark.parametrize("net", NETS)
def test_factors_send_rows_in_the_place_of_weights(on_ranks: RunOnRanks, net: str) -> None:
    _, convolutions, _, widths = NETS[net]
    ring = 2 * (2 - 1) * (convolutions + sum(widths[1:])) * 4  # of these and of the linear layers' biases
    rows = BATCH * sum(a + b for a, b in pairwise(widths)) * 4  # each rank's, to the other
    assert sum(on_ranks(2, count, net, "data", "always")) == ring + rows


@pytest.mark.parametrize("net", NETS)
def test_data_sends_a_ring_of_all_parameters(on_ranks: RunOnRanks, net: str) -> None:
    _, _, parameters, _ = NETS[net]
    assert sum(on_ranks(2, count, net, "data")) == 2 * (2 - 1) * parameters * 4


@pytest.mark.parametrize("net", NETS)
def test_owt_sends_a_ring_of_the_convolutions_and_the_features_of_all_samples(on_ranks: RunOnRanks, net: str) -> None:
    _, convolutions, _, (first, *hidden, classes) = NETS[net]
    ring = 2 * (2 - 1) * convolutions * 4
    # forward and back: every rank's features to the other; parts of each hidden layer; scores to their samples
    features = 2 * BATCH * first * 4 * (2 - 1)
    between = 2 * BATCH * sum(hidden) * 4 * (2 - 1)
    scores = 2 * BATCH * classes * 4 // 2
    assert sum(on_ranks(2, count, net, "owt")) == ring + features + between + scores
