"""`shoal.exchange` in a loop of one's own: alone it is plain SGD, and however it ends it leaves nothing behind."""

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.nn import functional as F

import shoal
from shoal.errors import ConfigError, ShoalError
from shoal.exchanging import shared
from tests.exchanging.together import batch, network, sgd

EVERY = [
    ("allreduce", {}),
    ("backup", {"backups": 0}),
    ("downpour", {}),
    ("downpour", {"n_sync": 2}),
    ("downpour", {"servers": "processes", "shards": 2}),
    ("downpour", {"servers": "threads"}),
    ("dasgd", {"sparse": "none", "decay": "none"}),
]


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    def there() -> tuple[set[str], set[int], set[Path]]:
        threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("shoal")}
        processes = {child.pid for child in psutil.Process().children(recursive=True)}
        return threads, processes, set(shared._kept)  # folders of this process: other runs may have theirs

    before = there()
    yield
    assert there() == before


def train(
    model: torch.nn.Module, optimizer: torch.optim.SGD, exchange: "shoal.training.own_loop.OwnLoop | None"
) -> None:
    for number in range(5):
        x, y = batch(number)
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))
        (optimizer if exchange is None else exchange).step()


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_alone_it_is_plain_sgd_to_the_bit(name: str, options: dict[str, object]) -> None:
    expected, found = network(), network()
    train(expected, sgd(expected), None)
    optimizer = sgd(found)
    with shoal.exchange(found, optimizer, name, **options) as exchange:
        train(found, optimizer, exchange)
        exchange.settle()
        exchange.close()  # once more at the end of the block, which must do nothing
    for one, other in zip(expected.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_an_error_in_the_loop_is_raised_and_leaves_nothing(name: str, options: dict[str, object]) -> None:
    model = network()
    optimizer = sgd(model)
    exchange = shoal.exchange(model, optimizer, name, **options)
    train(model, optimizer, exchange)
    with pytest.raises(ZeroDivisionError), exchange:
        raise ZeroDivisionError


def test_a_server_that_dies_is_an_error_after_which_nothing_is_left() -> None:
    model = network()
    optimizer = sgd(model)
    exchange = shoal.exchange(model, optimizer, "downpour", servers="processes", n_sync=3)
    train(model, optimizer, exchange)
    (server,) = psutil.Process().children(recursive=True)
    server.kill()
    with pytest.raises(ShoalError):  # two steps are not pushed yet
        exchange.close()


def test_an_optimizer_that_servers_cannot_replace_is_refused() -> None:
    model = network()
    with pytest.raises(ConfigError, match="cannot be used with 'downpour'"):
        shoal.exchange(model, torch.optim.Adam(model.parameters()), "downpour")
