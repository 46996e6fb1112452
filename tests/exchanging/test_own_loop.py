"""`shoal.exchange` in a loop of one's own: alone it is plain SGD, and however it ends it leaves nothing behind."""

import os
import subprocess
import sys
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
    (server,) = (
        child for child in psutil.Process().children(recursive=True) if "exchanging.serve" in " ".join(child.cmdline())
    )
    server.kill()
    with pytest.raises(ShoalError):  # two steps are not pushed yet
        exchange.close()


def test_an_optimizer_that_servers_cannot_replace_is_refused() -> None:
    model = network()
    with pytest.raises(ConfigError, match="cannot be used with 'downpour'"):
        shoal.exchange(model, torch.optim.Adam(model.parameters()), "downpour")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("downpour", {"warm_start": 5}, "warm_start = 5 is for shoal train"),
        ("backup", {"backups": 1}, "leaves none of 1 replicas"),
        ("downpour", {"servers": "threads", "shards": 2}, "there are 1 replicas to hold them"),
    ],
)
def test_options_that_mean_nothing_here_are_refused(name: str, options: dict[str, object], message: str) -> None:
    model = network()
    with pytest.raises(ConfigError, match=message):
        shoal.exchange(model, sgd(model), name, **options)


def test_a_network_that_is_laid_over_ranks_is_refused() -> None:
    laid = shoal.parallelize(network(), batch(0)[0])
    with pytest.raises(ConfigError, match="every rank is a replica"):
        shoal.exchange(laid, sgd(laid))


SCRIPT = """
import os, time, torch, shoal
from tests.exchanging.together import network, sgd

rank = int(os.environ["RANK"])
time.sleep(1 - rank)  # rank 1 is there first
model = network(seed=rank)
optimizer = sgd(model)
with shoal.exchange(model, optimizer, "downpour", servers="processes", shards=3):
    expected = network(seed=0)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))
"""


def test_the_weights_of_rank_0_become_everybodys_also_where_it_is_late(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [*command, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
