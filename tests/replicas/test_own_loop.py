"""`shoal.exchange` in a loop of one's own: alone it is plain SGD, and however it ends it leaves nothing behind.

What several ranks do is in `own_loop_cases.py`; a world of them runs many cases, because starting one takes long.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.nn import functional as F

import shoal
from shoal.errors import ConfigError, RunError, ShoalError
from shoal.exchanging.servers import shared_memory as shared
from shoal.replicas.in_step import InStep
from shoal.replicas.roll_call import Presence, replicas_of
from tests.cli.commands import load
from tests.exchanging.together import batch, network, sgd
from tests.replicas.own_loop_cases import OPTIMIZERS, backward, in_groups, start_and_die
from tests.replicas.worlds import said_of, world

pytestmark = pytest.mark.timeout(400)
EVERY = [
    ("allreduce", {}),
    ("backup", {"backups": 0}),
    ("downpour", {}),
    ("downpour", {"n_sync": 2}),
    ("downpour", {"servers": "processes", "shards": 2}),
    ("downpour", {"servers": "threads"}),
    ("dasgd", {"sparse": "none", "decay": "none"}),
]


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """What the ranks are copies of stays when a test is over."""
    load()


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
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, exchange: "shoal.replicas.own_loop.OwnLoop | None"
) -> None:
    for number in range(5):
        x, y = batch(number)
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x), y))
        (optimizer if exchange is None else exchange).step()


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_alone_it_is_plain_sgd_to_the_bit(name: str, options: dict[str, object]) -> None:
    expected, exchanged = network(), network()
    train(expected, sgd(expected), None)
    optimizer = sgd(exchanged)
    with shoal.exchange(exchanged, optimizer, name, **options) as exchange:
        train(exchanged, optimizer, exchange)
        exchange.settle()
        exchange.close()  # once more at the end of the block, which must do nothing
    for plain, trained in zip(expected.parameters(), exchanged.parameters(), strict=True):
        assert torch.equal(plain, trained)


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_an_error_in_the_loop_is_raised_and_leaves_nothing(name: str, options: dict[str, object]) -> None:
    model = network()
    optimizer = sgd(model)
    exchange = shoal.exchange(model, optimizer, name, **options)
    train(model, optimizer, exchange)
    with pytest.raises(ZeroDivisionError), exchange:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("name", "options"),
    [("downpour", {"compress": "sign", "servers": "threads"}), ("dasgd", {"density": 0.05}), ("gossip", {})],
)
def test_what_is_this_replicas_own_is_saved_and_goes_on_to_the_bit(name: str, options: dict[str, object]) -> None:
    def trained(begin: int, end: int, saved: Any = None) -> tuple[Any, dict[str, Any]]:
        half, model = saved, network()
        optimizer = sgd(model)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        with shoal.exchange(model, optimizer, name, **options) as exchange:
            exchange.load_state_dict({} if saved is None else saved[2])
            for number in range(begin, end):
                backward(model, optimizer, *batch(number))
                exchange.step()
                if number == 7:
                    exchange.settle()
                    half = deepcopy((model.state_dict(), optimizer.state_dict(), exchange.state_dict()))
        return half, model.state_dict()

    half, whole = trained(0, 12)
    _, resumed = trained(8, 12, half)
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)
    assert half[2]


def test_a_server_that_dies_is_an_error_after_which_nothing_is_left() -> None:
    model = network()
    optimizer = sgd(model)
    exchange = shoal.exchange(model, optimizer, "downpour", servers="processes", n_sync=3)
    train(model, optimizer, exchange)
    (server,) = (
        child
        for child in psutil.Process().children(recursive=True)
        if "exchanging.servers.process" in " ".join(child.cmdline())
    )
    server.kill()
    with pytest.raises(ShoalError):  # two steps are not pushed yet
        exchange.close()


@pytest.mark.parametrize("name", ["downpour", "sync"])
def test_a_server_that_dies_at_its_start_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("shoal.exchanging.membership.meeting.start_server", start_and_die)
    model = network()
    with pytest.raises(RunError, match=r"server 0 was lost, and with it a part of the weights"):
        shoal.exchange(model, sgd(model), name, servers="processes", shards=1)


SERVERS_STEP = [
    ("sync", {}, "use the exchange 'allreduce'"),
    ("backup", {"backups": 0}, "use the exchange 'allreduce'"),
    ("downpour", {}, "give rule='add'"),
    ("downpour", {"rule": "sgd", "n_sync": 3}, "give rule='add'"),
    ("dasgd", {"n_sync": 1}, "give momentum_at='worker' and n_sync over 1"),
    ("dasgd", {"momentum_at": "server"}, "give momentum_at='worker' and n_sync over 1"),
]
CANNOT: list[tuple[Callable[[torch.nn.Module], torch.optim.Optimizer], str]] = [
    (lambda model: torch.optim.Adam(model.parameters()), "cannot do what Adam does"),
    (lambda model: torch.optim.Adagrad(model.parameters()), "cannot do what Adagrad does"),
    (lambda model: torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True), "nesterov=True"),
    (lambda model: torch.optim.SGD(model.parameters(), momentum=0.9, dampening=0.5), "dampening=0.5"),
    (lambda model: torch.optim.SGD(model.parameters(), maximize=True), "maximize=True"),
    (lambda model: torch.optim.SGD(in_groups(model)), "one lr for all parameters, .* have 0.01 and 0.003"),
    (
        lambda model: torch.optim.SGD(
            [{"params": [p], "weight_decay": 0.1 * (p.ndim > 1)} for p in model.parameters()]
        ),
        "one weight_decay for all parameters",
    ),
    (
        lambda model: torch.optim.SGD([{"params": [p], "momentum": 0.9 * (p.ndim > 1)} for p in model.parameters()]),
        "one momentum for all parameters",
    ),
]


@pytest.mark.parametrize(("make", "message"), CANNOT, ids=[message for _, message in CANNOT])
@pytest.mark.parametrize(("name", "options", "way_out"), SERVERS_STEP)
def test_what_servers_cannot_do_is_refused_by_name_with_the_way_out(
    name: str,
    options: dict[str, object],
    way_out: str,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer],
    message: str,
) -> None:
    model = network()
    with pytest.raises(ConfigError, match=message) as refused:
        shoal.exchange(model, make(model), name, **options)
    assert way_out in refused.value.remedy


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("name", "options"),
    [("allreduce", {}), ("downpour", {"rule": "add"}), ("downpour", {"n_sync": 3}), ("dasgd", {"sparse": "none"})],
)
def test_alone_any_optimizer_with_groups_is_itself_where_replicas_step(
    name: str, options: dict[str, object], kind: str
) -> None:
    expected, exchanged = network(), network()
    train(expected, OPTIMIZERS[kind](in_groups(expected)), None)
    optimizer = OPTIMIZERS[kind](in_groups(exchanged))
    with shoal.exchange(exchanged, optimizer, name, **options) as exchange:
        train(exchanged, optimizer, exchange)
    for plain, trained in zip(expected.parameters(), exchanged.parameters(), strict=True):
        assert torch.equal(plain, trained)


def test_adagrad_at_the_servers_is_torchs_own() -> None:
    expected, exchanged = network(), network()
    train(expected, torch.optim.Adagrad(expected.parameters(), lr=0.1, fused=True), None)
    optimizer = torch.optim.Adagrad(exchanged.parameters(), lr=0.1)
    with shoal.exchange(exchanged, optimizer, "downpour", rule="adagrad") as exchange:
        train(exchanged, optimizer, exchange)
    for plain, trained in zip(expected.parameters(), exchanged.parameters(), strict=True):
        assert torch.equal(plain, trained)


def test_momentum_that_adagrad_at_the_servers_would_drop_is_refused() -> None:
    model = network()
    with pytest.raises(ConfigError, match=r"as Adagrad, and cannot do momentum=0\.9 of SGD\.") as caught:
        shoal.exchange(model, sgd(model), "downpour", rule="adagrad")
    assert caught.value.remedy.startswith("Give momentum=0, or torch.optim.Adagrad; or, to keep it, give rule='add'")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.exchange(model, optimizer, "downpour", rule="adagrad") as exchange:
        train(model, optimizer, exchange)


def test_what_is_changed_later_and_servers_do_not_hear_of_is_refused() -> None:
    model = network()
    optimizer = sgd(model)
    with shoal.exchange(model, optimizer, "downpour") as exchange:
        optimizer.param_groups[0]["lr"] = 0.01  # which they are told with every push
        train(model, optimizer, exchange)
        optimizer.param_groups[0]["momentum"] = 0.5
        with pytest.raises(ConfigError, match=r"momentum of the optimizer is 0\.5; .* it was 0\.9"):
            exchange.step()
    with shoal.exchange(model, optimizer) as exchange:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        with pytest.raises(ConfigError, match="has 7 parameters, and had 6"):
            exchange.step()


def test_a_parameter_that_is_not_the_networks_is_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match="has 1 parameter that the network does not have"):
        shoal.exchange(model, optimizer)


@pytest.mark.parametrize("name", ["allreduce", "downpour"])
def test_parameters_that_the_optimizer_does_not_have_stay_as_they_are(name: str) -> None:
    model = network()
    first = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(list(model.parameters())[-2:], lr=0.1)
    with shoal.exchange(model, optimizer, name) as exchange:
        train(model, optimizer, exchange)
    same = [torch.equal(before, after) for before, after in zip(first, model.parameters(), strict=True)]
    assert same == [True] * 4 + [False] * 2


def test_a_schedule_of_torchs_own_does_not_warn() -> None:
    model = network()
    optimizer = sgd(model)
    with shoal.exchange(model, optimizer, "downpour") as exchange:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # warnings are errors here
        train(model, optimizer, exchange)
        schedule.step()


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


def test_a_network_that_is_laid_over_one_rank_is_a_replica() -> None:
    expected, module = network(), network()
    train(expected, sgd(expected), None)
    laid = shoal.parallelize(module, batch(0)[0])
    optimizer = sgd(laid)
    with shoal.exchange(laid, optimizer, "downpour") as exchange:
        train(laid, optimizer, exchange)
        assert (exchange.number, exchange.replicas) == (0, 1)
    for whole, part in zip(expected.parameters(), laid.parameters(), strict=True):
        torch.testing.assert_close(whole, part)


def present(
    *ranks: tuple[int, ...], shards: tuple[Any, ...] = (), exchange: str = "'sync'", frozen: str = ""
) -> list[Presence]:
    return [Presence(own, exchange, shards, 0, frozen, 1) for own in ranks]


def test_replicas_count_by_their_lowest_rank() -> None:
    assert replicas_of(present((3, 0), (1, 2), (1, 2), (3, 0))) == [(3, 0), (1, 2)]
    assert replicas_of(present((0,), (1,), (2,))) == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (present((0, 1), (1, 2), (1, 2)), "rank 0 is laid over ranks 0 and 1, that of rank 1 over ranks 1 and 2"),
        (present((0, 1), (1, 0)), "rank 0 is laid over ranks 0 and 1, that of rank 1 over ranks 1 and 0"),
        (present((0, 1), (0, 1), (2,)), "equally many ranks, not 2 and 1"),
        ([*present((0,)), *present((1,), exchange="'dasgd'")], "rank 0 exchanges by 'sync', rank 1 by 'dasgd'"),
        (
            [*present((0,), shards=(("w", (2, 3), "f"),)), *present((1,), shards=(("w", (1, 3), "f"),))],
            r"of 'w' rank 0 exchanges \(2, 3\) of f, rank 1 \(1, 3\) of f",
        ),
        ([*present((0,), shards=(("w", (2,), "f"),)), *present((1,))], "rank 1 nothing of it"),
        (
            [*present((0,)), *present((1,), frozen="a")],
            "are not the same on ranks 0 and 1",
        ),
    ],
)
def test_ranks_that_are_no_replicas_of_each_other_are_refused(said: list[Presence], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replicas_of(said)


OWN_WEIGHTS = ["easgd", "admm", "gossip", "pairs", "local", "once"]
UNEQUAL = [
    "direct",
    "processes",
    "threads",
    "n_sync",
    "stale",
    "backup",
    "dasgd",
    "dasgd_server",
    "softsync",
    "hogwild",
]
TWO = [
    *(f"unequal:{name}" for name in (*UNEQUAL, *OWN_WEIGHTS)),
    *("equal:allreduce", "equal:sync_threads", "uneven:allreduce", "uneven:sync_threads"),
    *("lost:direct", "lost:allreduce", "lost:dasgd", "lost:backup", "lost_in_step:allreduce", "lost_in_step:sync"),
    *("different", "optimizers", "own_steps", "dead_server:processes", "strangers:direct"),
]
FOUR = [
    *("exact:allreduce", "exact:sync_threads", "misfits"),
    *(f"groups:{name}" for name in ("allreduce", "direct", "n_sync", "processes", "threads", "backup0", "dasgd")),
    *(f"groups:{name}" for name in OWN_WEIGHTS),
]


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """What two ranks say, each of which is a replica."""
    return said_of(2, *TWO, seconds=350)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    """What four ranks say, of which two are a replica."""
    return said_of(4, *FOUR, seconds=350)


@pytest.mark.parametrize("case", [case for case in TWO if case.startswith(("unequal", "equal"))])
def test_after_finish_all_have_the_same_weights_to_the_bit(two: list[dict[str, Any]], case: str) -> None:
    assert two[0][case] == two[1][case]
    assert len(set(two[0][case])) == 3  # and they went on from there


@pytest.mark.parametrize("name", ["allreduce", "sync_threads"])
def test_replicas_in_step_with_unequal_batches_are_told_so_on_all_ranks(two: list[dict[str, Any]], name: str) -> None:
    case = f"uneven:{name}"
    assert two[0][case] == two[1][case]
    wanted = [("replica 0 (rank 0)", 2, "replica 1 (rank 1)", 3), ("replica 1 (rank 1)", 2, "replica 0 (rank 0)", 3)]
    wanted.append(("replica 0 (rank 0)", 0, "replica 1 (rank 1)", 1))
    for (kind, problem, _), (done, steps, other, step) in zip(two[0][case], wanted, strict=True):
        assert kind == "RunError"
        assert f"{done} has finished after {steps} steps, and {other} takes its step {step}" in problem


def test_news_of_a_finish_that_come_after_all_went_on_are_old() -> None:
    steps = InStep("sync", 0, str, survives=False)
    interrupted: list[str] = []
    steps.go_on(after=1)
    steps.hear({"finished": 1, "steps": 0, "round": 0}, lambda: interrupted.append("late"))
    with steps.step(lambda: None):
        pass
    steps.hear({"finished": 1, "steps": 1, "round": 2}, lambda: interrupted.append("now"))
    with pytest.raises(RunError, match="1 has finished after 1 steps"), steps.step(lambda: None):
        pass
    assert not interrupted


@pytest.mark.parametrize("case", [case for case in TWO if case.startswith("lost:")])
def test_a_replica_that_was_lost_is_not_awaited(two: list[dict[str, Any]], case: str) -> None:
    assert len(two[0][case]) == 1
    assert two[1][case] == []


@pytest.mark.parametrize("name", ["allreduce", "sync"])
def test_a_step_that_cannot_be_made_names_who_is_gone(two: list[dict[str, Any]], name: str) -> None:
    kind, problem, _ = two[0][f"lost_in_step:{name}"]
    assert kind == "PeerError"
    assert problem == f"replica 1 (rank 1) was lost, and {name!r} cannot make a step without it."


def test_a_server_that_dies_at_its_start_is_told_of_at_once_on_all_ranks(two: list[dict[str, Any]]) -> None:
    """Not after the time-out, which is longer than a world may take here."""
    for said in two:
        kind, problem, remedy = said["dead_server:processes"]
        assert kind == "RunError"
        assert problem.startswith("server ")
        assert problem.endswith(" was lost, and with it a part of the weights.")
        assert remedy.startswith("Look at what it printed above")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the port stays open")
def test_where_replicas_found_each_other_nobody_else_is_heard(two: list[dict[str, Any]]) -> None:
    for said in two:
        assert said["strangers:direct"]["during"] == "not heard"
    assert two[0]["strangers:direct"]["after"] == "heard"


def test_what_ranks_give_differently_all_refuse_in_the_same_words(two: list[dict[str, Any]]) -> None:
    assert two[0]["different"] == two[1]["different"]
    for (_, problem, _), words in zip(
        two[0]["different"],
        [
            "rank 0 exchanges by 'downpour', rank 1 by 'downpour' (n_sync=2)",
            "rank 0 exchanges by 'dasgd', rank 1 by 'downpour'",
            "rank 1: here servers step",
            "rank 1: the exchange 'downpour' has no option 'n_snyc'",
            "rank 0 exchanges nothing of it",
            "replicas 0, 1 are done and have different weights",
        ],
        strict=True,
    ):
        assert words in problem


def test_any_optimizer_with_groups_is_one_devices_with_allreduce(two: list[dict[str, Any]]) -> None:
    for said in two:
        assert set(said["optimizers"]) == set(OPTIMIZERS)
        assert max(said["optimizers"].values()) < 1e-9


def test_replicas_that_step_by_adam_end_with_the_same_weights(two: list[dict[str, Any]]) -> None:
    assert two[0]["own_steps"] == two[1]["own_steps"]


@pytest.mark.parametrize("name", ["allreduce", "sync_threads"])
def test_replicas_of_groups_are_one_device_with_the_whole_batch(four: list[dict[str, Any]], name: str) -> None:
    for said in four:
        assert set(said[f"exact:{name}"]) == {"data", "model", "owt", "spatial"}
        assert max(said[f"exact:{name}"].values()) < 1e-9


@pytest.mark.parametrize("case", [case for case in FOUR if case.startswith("groups")])
def test_replicas_of_groups_end_with_the_same_weights(four: list[dict[str, Any]], case: str) -> None:
    assert [said[case][:2] for said in four] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert len({said[case][2] for said in four}) == 1
    assert all(said[case][3:] == [True, True] for said in four)


def test_groups_that_are_no_replicas_of_each_other_are_refused_on_all_ranks(four: list[dict[str, Any]]) -> None:
    assert all(said["misfits"] == four[0]["misfits"] for said in four)
    cut, sizes, mixed = (problem for _, problem, _ in four[0]["misfits"])
    assert "cut alike: of '0.bias' rank 0 exchanges (7,)" in cut
    assert "ranks 0, 1 and 2 are one replica and rank 3 another" in sizes
    assert "not 2 and 1" in mixed


@pytest.mark.parametrize("name", ["direct", "allreduce"])
def test_the_others_finish_when_one_was_killed(name: str) -> None:
    case = f"killed:{name}"
    with world(3, case) as ranks:
        assert [rank.end(300) for rank in ranks] == [0, 0, -signal.SIGKILL], [rank.errors for rank in ranks]
        assert ranks[0].said[case] == ranks[1].said[case]


@pytest.mark.parametrize("name", ["direct", "allreduce"])
def test_one_that_is_frozen_is_not_awaited_and_has_the_same_when_it_wakes(name: str) -> None:
    with world(2, f"frozen:{name}") as ranks:
        pid = ranks[1].hear("stops", 300)
        finished = ranks[0].hear("finished", 60)
        os.kill(pid, signal.SIGCONT)  # not before
        assert [rank.end(100) for rank in ranks] == [0, 0], [rank.errors for rank in ranks]
        assert ranks[0].said[f"frozen:{name}"] == ranks[1].said[f"frozen:{name}"] == [finished]


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


def torchrun(script: Path) -> "subprocess.CompletedProcess[str]":
    """The script on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [*command, str(script)],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_weights_of_rank_0_become_everybodys_also_where_it_is_late(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = torchrun(tmp_path / "script.py")
    assert run.returncode == 0, run.stderr


PATIENT = """
import os, time, shoal
from pathlib import Path
from shoal.replicas import own_loop
from tests.exchanging.together import batch, network, sgd
from torch.nn import functional as F

rank = int(os.environ["RANK"])
both = Path(__file__).with_name("both")
model = network()
optimizer = sgd(model)
with shoal.exchange(model, optimizer, "downpour", servers="processes") as exchange:
    if rank == 1:
        both.touch()
    while not both.exists():
        time.sleep(0.01)
    own_loop.TIMEOUT = 1.0
    for number in range(1 + 40 * rank):  # rank 1 trains on for four seconds
        time.sleep(0.1 * rank)
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        exchange.step()
print(f"rank {rank} has left")
"""


def test_rank_0_waits_for_as_long_as_another_trains(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PATIENT)
    run = torchrun(tmp_path / "script.py")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("has left") == 2
