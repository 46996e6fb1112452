"""`shoal train --on ray`, on two nodes of this machine: as it does here, also when a part of it is lost."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.on_ray.cluster import Nodes, nodes
from shoal.launching.on_ray import node_for, worlds_on
from shoal.launching.place import Gang
from shoal.training.run_folder import RunFolder
from tests.cli.commands import Begun, begin
from tests.cli.conftest import Shoal, shoal_here, tiny
from tests.cli.test_exchange import NET
from tests.cli.test_train import metrics_of, result_of

__all__ = ["shoal_here", "tiny"]
pytestmark = pytest.mark.timeout(300)
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None or sys.platform == "win32", reason="ray is not installed: pip install '.[ray]'"
)
SETTINGS = ["--model", "mine:net", "--batch", "8", "--log-every", "5", "--threads", "1", "--seed", "3"]
LONG = ["--epochs", "4000", "--eval-every", "4000"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Two nodes of one core each: what needs two workers needs both."""
    with nodes(count=2, cores=1) as made:
        yield made


@pytest.fixture
def train(cluster: Nodes, tiny: str, tmp_path: Path) -> Iterator[Callable[..., Begun]]:
    """`shoal train --on ray ARGUMENTS` into `o`; afterwards nothing of it may be left on the cluster."""
    (tmp_path / "mine.py").write_text(NET)
    begun: list[Begun] = []

    def run(*arguments: str, **variables: str) -> Begun:
        settings = ["train", "--on", "ray", "--data", tiny, *SETTINGS, "--out", "o", *arguments]
        begun.append(begin(tmp_path, "shoal", *settings, **cluster.variables, **variables))
        return begun[-1]

    yield run
    for each in begun:
        each.kill()
        each.wait(30)
    assert cluster.leftovers() == []


def wait_for(condition: Callable[[], object], run: Begun) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def saved(out: Path) -> int:
    checkpoints = RunFolder(out).checkpoints.all()
    return checkpoints[-1].steps if checkpoints else 0


def joined(out: Path) -> list[int]:
    lines = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [event["replica"] for event in events if event["event"] == "joined"]


@needs_ray
def test_a_plan_over_both_nodes_is_one_device(train: Callable[..., Begun], tiny: str, tmp_path: Path) -> None:
    run = train("--workers", "2", "--plan", "spatial", "--epochs", "2")
    printed = run.communicate(timeout=120)
    assert run.returncode == 0, printed
    assert "2 workers, plan spatial, cpu, threads 1" in printed[0]
    assert "epoch 2/2" in printed[0], "what rank 0 hears is shown here"
    alone = begin(tmp_path, "shoal", "train", "--data", tiny, *SETTINGS, "--epochs", "2", "--out", "alone")
    assert (alone.communicate(timeout=120), alone.returncode)[1] == 0
    weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("o", "alone"))
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-4, atol=1e-6)


@needs_ray
@pytest.mark.parametrize("exchange", ["downpour", "allreduce"])
def test_replicas_on_both_nodes(exchange: str, train: Callable[..., Begun], tmp_path: Path) -> None:
    run = train("--replicas", "2", "--exchange", exchange, "--epochs", "8", "--lr", "0.02")
    printed = run.communicate(timeout=120)
    assert run.returncode == 0, printed
    result = result_of(tmp_path / "o")
    assert (result["samples"], result["replicas"], result["exchange"]) == (640, 2, exchange)
    assert result["test_accuracy"] > 0.5
    assert sorted(joined(tmp_path / "o")) == [0, 1]


@needs_ray
def test_a_killed_actor_of_a_plan_starts_the_run_again_from_its_checkpoint(
    train: Callable[..., Begun], cluster: Nodes, tmp_path: Path
) -> None:
    settings = ["--epochs", "60", "--eval-every", "60", "--checkpoint-every", "5steps"]
    run = train("--workers", "2", *settings, "--restarts", "1")
    wait_for(lambda: saved(tmp_path / "o") >= 10, run)
    cluster.kill_actor(1)
    printed = run.communicate(timeout=150)
    assert run.returncode == 0, printed
    assert "rank 1 was lost with its Ray actor" in printed[0]
    result = result_of(tmp_path / "o")
    assert (result["steps"], result["samples"], result["restarts"]) == (600, 4800, 1)


@needs_ray
def test_in_the_place_of_a_lost_node_one_that_comes_back_gives_a_replica(
    train: Callable[..., Begun], cluster: Nodes, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    run = train("--replicas", "2", "--exchange", "downpour", *LONG, "--restarts", "1")
    wait_for(lambda: sorted(joined(out)) == [0, 1], run)
    meeting = json.loads((out / "meeting.json").read_text())
    assert not meeting["address"][0].startswith("127."), "other nodes could not reach it"
    try:
        cluster.lose()
        wait_for(lambda: any(line["event"] == "lost" for line in metrics_of(out)), run)
    finally:
        cluster.add()
    wait_for(lambda: 2 in joined(out), run)
    run.send_signal(signal.SIGINT)
    printed = run.communicate(timeout=60)
    assert run.returncode == 130, printed
    assert "shoal train --resume o" in printed[1]


@needs_ray
def test_a_killed_conductor_is_followed_by_another_that_starts_all_replicas_again(
    train: Callable[..., Begun], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "o")
    run = train("--replicas", "2", "--exchange", "downpour", *LONG, "--checkpoint-every", "200steps", "--restarts", "1")
    wait_for(lambda: saved(folder.path) >= 200, run)
    children = psutil.Process(run.pid).children(recursive=True)
    (conductor,) = (child for child in children if child.name() == "shoal conductor")
    conductor.kill()
    wait_for(lambda: folder.restarts == 1 and folder.went_on[0].seconds_to_go_on is not None, run)
    assert folder.went_on[0].step >= 200
    run.send_signal(signal.SIGINT)
    printed = run.communicate(timeout=60)
    assert run.returncode == 130, printed


@needs_ray
@pytest.mark.parametrize(
    "kind", [[], pytest.param(["--replicas", "2", "--exchange", "allreduce"], marks=pytest.mark.thorough)]
)
def test_an_elastic_run_goes_on_with_the_worker_that_is_left_and_grows_when_its_node_is_back(
    kind: list[str], train: Callable[..., Begun], cluster: Nodes, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "o")
    run = train("--workers", "2", *kind, *LONG, "--checkpoint-every", "50steps", "--elastic", "1:2:1")
    wait_for(lambda: saved(folder.path) > 0, run)
    try:
        cluster.lose()
        wait_for(lambda: [change.workers_after for change in folder.went_on] == [1], run)
        wait_for(lambda: folder.went_on[0].seconds_to_go_on is not None, run)
        time.sleep(3)  # much longer than a second: without room it does not grow
        assert folder.restarts == 1
    finally:
        cluster.add()
    wait_for(lambda: folder.restarts == 2 and folder.went_on[1].seconds_to_go_on is not None, run)
    run.send_signal(signal.SIGINT)
    printed = run.communicate(timeout=60)
    assert run.returncode == 130, printed
    shrunk, grown = folder.went_on
    assert (shrunk.workers_before, shrunk.workers_after, grown.workers_before, grown.workers_after) == (2, 1, 1, 2)
    assert grown.step > shrunk.step
    assert "Going on with 2 workers after step" in printed[0]


@needs_ray
@pytest.mark.thorough
def test_ctrl_c_leaves_a_checkpoint(train: Callable[..., Begun], tmp_path: Path) -> None:
    run = train("--workers", "2", *LONG, "--checkpoint-every", "4000epochs")
    metrics = tmp_path / "o" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, run)
    run.send_signal(signal.SIGINT)
    printed = run.communicate(timeout=60)
    assert run.returncode == 130, printed
    assert saved(tmp_path / "o") > 0


@needs_ray
def test_what_the_cluster_cannot_hold_is_said(train: Callable[..., Begun]) -> None:
    run = train("--workers", "3", "--timeout", "2")
    _, error = run.communicate(timeout=60)
    assert run.returncode == 1, error
    assert "Ray gave no place within 2 seconds to 3 workers of 1 CPU each: its cluster has 2 CPU" in error


def test_without_ray_the_extra_is_named(shoal_here: Shoal, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    run = shoal_here("train", "--on", "ray", "--data", tiny)
    assert run.returncode == 2
    assert "pip install 'shoal-train[ray]'" in run.stderr


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_without_a_cluster_is_refused_at_once(address: str, shoal_here: Shoal, tiny: str) -> None:
    run = shoal_here("train", "--on", "ray", "--data", tiny, RAY_ADDRESS=address)
    assert run.returncode == 2
    assert f"RAY_ADDRESS = '{address}'" in run.stderr


def test_not_on_ray_and_under_torchrun(shoal_here: Shoal, tiny: str) -> None:
    run = shoal_here("train", "--on", "ray", "--data", tiny, RANK="0", WORLD_SIZE="1")
    assert run.returncode == 2
    assert "torchrun started this process" in run.stderr


def gang(ranks: int, *, device: str = "cpu") -> Gang:
    return Gang(range(2, 2 + ranks), 6, b"", 1, 120.0, device, "tcp://10.0.0.1:1", is_replica=True)


def test_ranks_know_who_shares_their_node() -> None:
    worlds = worlds_on(gang(3), ["a", "b", "a"])
    assert [(world.number, world.rank, world.local_rank, world.local_size) for world in worlds] == [
        (2, 0, 0, 2),
        (3, 1, 0, 1),
        (4, 2, 1, 2),
    ]
    assert not any(world.on_one_host for world in worlds)
    assert all(world.on_one_host for world in worlds_on(gang(2), ["a", "a"]))
    assert [world.local_rank for world in worlds_on(gang(2, device="cuda"), ["a", "a"])] == [0, 0], "each sees its own"


def test_replicas_are_spread_over_nodes_that_hold_them_whole() -> None:
    room = {"a": 4, "b": 4, "c": 1}
    placed: list[list[str]] = []
    for _ in range(4):
        node = node_for(room, placed, 2)
        assert node is not None
        placed.append([node] * 2)
    assert [nodes[0] for nodes in placed] == ["a", "b", "a", "b"]
    assert node_for(room, placed, 2) is None
    assert node_for(room, placed, 1) == "c"
