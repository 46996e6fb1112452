"""What a replica has of its own goes through a checkpoint whole, and that of another exchange is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.exchanging.gossip import Gossip
from tests.exchanging.test_averaging import acquainted, drained, sides
from tests.exchanging.together import Side, at_once, batch, meeting

KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "easgd": ("easgd", 0, {"period": 2}),
    "admm": ("admm", 1, {"period": 1}),
    "admm, in memory": ("admm", 0, {"period": 1}),
    "gossip": ("gossip", 0, {"period": 1, "mode": "push"}),
    "local": ("local", 1, {"period": 2}),
    "local, int8": ("local", 1, {"period": 2, "compress": "int8"}),
    "average once": ("local", 0, {"average": "once"}),
}


def trained(side: Any, steps: int = 3) -> list[Side]:
    """Two replicas after some steps, with nothing on its way."""
    pair = sides(side, 2)
    if isinstance(pair[0].exchange, Gossip):
        acquainted(pair)

    def train(replica: Side) -> None:
        for number in range(steps):
            replica.step(*batch(2 * number + replica.number, kind=torch.float64))

    at_once([partial(train, replica) for replica in pair])
    if isinstance(pair[0].exchange, Gossip):
        drained(pair)
    return pair


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_replica_has_of_its_own_comes_back_whole(kind: str) -> None:
    name, servers, options = KINDS[kind]
    with meeting(name, 2, servers=servers, **options) as (side, _):
        saved = [replica.exchange.own_state() for replica in trained(side)]
        assert all(torch.isfinite(tensor).all() for state in saved for tensor in state.values())
    with meeting(name, 2, servers=servers, **options) as (side, _):
        pair = trained(side, steps=0)
        for replica, state in zip(pair, saved, strict=True):
            replica.exchange.put_own_state(state)
            again = replica.exchange.own_state()
            assert again.keys() == state.keys()
            for key, tensor in state.items():
                assert torch.equal(again[key], tensor), key


@pytest.mark.parametrize(
    ("saved_by", "given_to"), [("local", "average once"), ("average once", "local"), ("easgd", "admm")]
)
def test_what_another_exchange_saved_is_refused(saved_by: str, given_to: str) -> None:
    states: list[dict[str, Tensor]] = []
    for kind in (saved_by, given_to):
        name, servers, options = KINDS[kind]
        with meeting(name, 2, servers=servers, **options) as (side, _):
            pair = trained(side)
            if states:
                with pytest.raises(ValueError, match=r"there (is|are) no "):
                    pair[0].exchange.put_own_state(states[0])
            states.append(pair[0].exchange.own_state())
