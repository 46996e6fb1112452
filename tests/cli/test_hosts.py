"""Replicas on two hosts, which are network namespaces of this test: what works on one host works between them."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.common.hosts import DEVICE, Host, two_hosts
from tests.cli.commands import Begun, Command
from tests.cli.test_exchange import LONG, goes_on, lines, mine, under_way, wait_for
from tests.cli.test_train import result_of

__all__ = ["mine"]


def _may_make_hosts() -> bool:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"shoal-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


pytestmark = [
    pytest.mark.skipif(not _may_make_hosts(), reason="needs iproute2 and the right to make network namespaces"),
    pytest.mark.timeout(300),
]

Start = Callable[..., list[Begun]]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with two_hosts("1gbit") as found:
        yield found


def processes_on(host: Host) -> list[psutil.Process]:
    """Whatever runs there, started by whom it may be."""
    name = host.prefix[-1]
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout.split()
    return [psutil.Process(int(pid)) for pid in found if psutil.pid_exists(int(pid))]


def begin_on(host: Host, folder: Path, *arguments: str, **variables: str) -> Begun:
    """`shoal train ARGUMENTS` on a host."""
    environment = {**os.environ, "NO_COLOR": "1", **variables}
    return Command(folder, ("train", *arguments), environment, network=host.prefix[-1])


@pytest.fixture
def start(hosts: list[Host], tmp_path: Path) -> Iterator[Start]:
    """`shoal train ARGUMENTS` on both hosts, as torchrun would start it."""
    started: list[Begun] = []

    def run(*arguments: str) -> list[Begun]:
        for rank, host in enumerate(hosts):
            world = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29_411}
            variables = {name: str(value) for name, value in world.items()}
            where = {"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": host.device, "OMP_NUM_THREADS": "1"}
            started.append(begin_on(host, tmp_path, *arguments, **variables, **where))
        return started

    yield run
    for one in started:
        one.kill()
        one.wait()
    _, alive = psutil.wait_procs([child for host in hosts for child in processes_on(host)], timeout=10)
    for child in alive:
        child.kill()
    assert not alive


def only_thorough(config: pytest.Config) -> None:
    if not config.getoption("--thorough"):
        pytest.skip("other cases have the same links; all of them with --thorough")


@pytest.mark.parametrize(
    "options",
    [
        ["downpour"],
        ["downpour", "servers=threads,n_sync=2"],
        ["dasgd", "density=0.1,n_sync=1"],
        ["backup", "backups=0"],
        ["allreduce"],
        ["sync"],
        ["softsync"],
        ["easgd"],
        ["admm"],
        ["local"],
        ["local", "compress=int8"],
        ["gossip"],
        ["gossip", "mode=pair,compress=int8"],
    ],
    ids="-".join,
)
def test_replicas_on_two_hosts_train_together(
    start: Start, mine: list[str], tmp_path: Path, options: list[str], pytestconfig: pytest.Config
) -> None:
    if options not in (["dasgd", "density=0.1,n_sync=1"], ["allreduce"], ["gossip"]):
        only_thorough(pytestconfig)
    name, *more = options
    chosen = ["--exchange", name, *(["--exchange-options", more[0]] if more else [])]
    epochs = 3 if name in ("allreduce", "sync", "backup", "local") else 100  # long enough for the one that comes later
    tests = ["--eval-every", str(epochs), "--checkpoint-every", str(epochs)]
    runs = start(*mine, "--epochs", str(epochs), *tests, "--replicas", "2", *chosen, "--out", "run")
    for one in runs:
        printed = one.communicate(timeout=120)
        assert one.returncode == 0, printed
    result = result_of(tmp_path / "run")
    assert (result["samples"], result["replicas"], result["exchange"]) == (80 * epochs, 2, name)
    each = result["exchanged"]["replicas"]
    assert all(each[number]["steps"] > 0 and each[number]["sent_bytes"] > 0 for number in "01")
    assert result["test_accuracy"] > 0.5


def test_servers_are_on_all_hosts(start: Start, hosts: list[Host], mine: list[str], tmp_path: Path) -> None:
    options = ["--exchange", "downpour", "--exchange-options", "servers=processes,shards=3"]
    first, second = start(*mine, *LONG, "--replicas", "2", *options, "--out", "run")
    out = tmp_path / "run"
    wait_for(under_way(out, [0, 1]), first)
    assert [len(servers_on(host)) for host in hosts] == [2, 1]
    first.send_signal(signal.SIGINT)
    printed = first.communicate(timeout=60)
    assert first.returncode == 130, printed
    printed = second.communicate(timeout=60)
    assert second.returncode == 130, printed
    assert not psutil.wait_procs([one for host in hosts for one in servers_on(host)], timeout=30)[1]


def servers_on(host: Host) -> list[psutil.Process]:
    return [one for one in processes_on(host) if _is_server(one)]


def _is_server(process: psutil.Process) -> bool:
    try:
        return "servers.process" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has just ended
        return False


def pull_the_cable(host: Host, *, pulled: bool) -> None:
    subprocess.run([*host.prefix, "ip", "link", "set", DEVICE, "down" if pulled else "up"], check=True)


CUT_SECONDS = 40.0


def test_a_cut_that_is_shorter_than_the_time_out_ends_nothing(
    start: Start, hosts: list[Host], mine: list[str], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Replicas and servers on both sides of it: nobody can go on, and all do when it is over."""
    only_thorough(pytestconfig)
    options = ["--exchange", "downpour", "--exchange-options", "heartbeat=1,servers=processes,shards=2"]
    first, second = start(*mine, *LONG, "--replicas", "2", *options, "--out", "run")
    out = tmp_path / "run"
    wait_for(under_way(out, [0, 1]), first)
    assert [len(servers_on(host)) for host in hosts] == [1, 1]
    pull_the_cable(hosts[1], pulled=True)
    wait_for(lambda: lines(out, "frozen") and lines(out, "server_frozen"), first)
    time.sleep(CUT_SECONDS)
    assert second.poll() is None
    pull_the_cable(hosts[1], pulled=False)
    wait_for(lambda: lines(out, "back") and lines(out, "server_back"), first)
    wait_for(under_way(out, [0, 1]), first)
    goes_on(out, first)
    assert not lines(out, "lost")
    first.send_signal(signal.SIGINT)
    printed = first.communicate(timeout=60)
    assert first.returncode == 130, printed


@pytest.mark.parametrize("servers", ["processes", "threads"])
def test_a_host_that_dies_freezes_or_loses_its_network_holds_up_nobody_and_one_may_join(
    start: Start, hosts: list[Host], mine: list[str], tmp_path: Path, servers: str, pytestconfig: pytest.Config
) -> None:
    if servers == "threads":
        only_thorough(pytestconfig)
    # In threads: one server, on the host that stays.
    options = ["--exchange", "downpour", "--exchange-options", f"heartbeat=1,servers={servers},shards=1"]
    first, second = start(*mine, *LONG, "--replicas", "2", *options, "--out", "run")
    out = tmp_path / "run"
    wait_for(under_way(out, [0, 1]), first)

    second.send_signal(signal.SIGSTOP)
    wait_for(lambda: len(lines(out, "frozen")) == 1, first)
    goes_on(out, first)
    second.send_signal(signal.SIGCONT)
    wait_for(lambda: len(lines(out, "back")) == 1, first)
    wait_for(under_way(out, [0, 1]), first)

    pull_the_cable(hosts[1], pulled=True)
    wait_for(lambda: len(lines(out, "frozen")) == 2, first)
    goes_on(out, first)
    pull_the_cable(hosts[1], pulled=False)
    wait_for(lambda: len(lines(out, "back")) == 2, first)
    wait_for(under_way(out, [0, 1]), first)

    second.kill()
    wait_for(lambda: lines(out, "lost"), first)
    goes_on(out, first)
    assert lines(out, "steps")[-1]["active"] == [0]

    late = begin_on(hosts[1], tmp_path, "--join", "run")
    try:
        wait_for(under_way(out, [0, 2]), first)
        first.send_signal(signal.SIGINT)
        printed = first.communicate(timeout=60)
        assert "shoal:" not in late.communicate(timeout=60)[1]
        assert late.returncode == 0
    finally:
        late.kill()
        late.wait()
    assert "replica 1 was lost" in printed[0]
    assert "--resume" in printed[1]
