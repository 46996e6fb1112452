"""Gradients that make one update together."""

import threading

import pytest
import torch

from shoal.exchanging.servers.rounds import Rounds
from shoal.exchanging.servers.rules import make_rule
from shoal.exchanging.servers.shard import Policy, Push, empty_shard


@pytest.mark.parametrize("rates", [(0.5, 0.25), (0.25, 0.5)])
def test_the_rate_of_an_update_does_not_depend_on_who_came_last(rates: tuple[float, float]) -> None:
    policy = Policy(make_rule("sgd", momentum=0.0, weight_decay=0.0))
    shard = empty_shard([3], [torch.float64], policy, threading.Lock())
    rounds = Rounds(shard, 2)
    for rate in rates:
        assert rounds.add(Push([torch.ones(3, dtype=torch.float64)], 0, rate)).applied
    assert shard.version == 1
    assert shard.weights[0].tolist() == [-0.5] * 3
