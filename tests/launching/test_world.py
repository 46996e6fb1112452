"""Which rank this process is, as torchrun and srun say it."""

import pytest

from shoal.errors import ConfigError
from shoal.launching.world import PORTS, World, hosts_of, surrounding

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node7",
    "MASTER_PORT": "29400",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[08-10],big1", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}  # fmt: skip


def test_torchrun() -> None:
    assert surrounding(TORCHRUN) == World(5, 8, 1, 4, "node7", 29400, "torchrun")


def test_srun() -> None:
    world = surrounding(SRUN)
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 7, 1, 2)
    assert (world.host, world.origin) == ("gpu08", "srun")
    assert world.port in PORTS
    assert world.port == surrounding({**SRUN, "SLURM_PROCID": "0"}).port  # type: ignore[union-attr]
    assert world.port != surrounding({**SRUN, "SLURM_STEP_ID": "1"}).port  # type: ignore[union-attr]


def test_srun_on_one_host_meets_there() -> None:
    world = surrounding({**SRUN, "SLURM_STEP_NODELIST": "gpu08"})
    assert world is not None
    assert world.on_one_host
    assert world.host == "127.0.0.1"


def test_torchrun_below_srun_wins() -> None:
    world = surrounding({**SRUN, **TORCHRUN})
    assert world is not None
    assert world.origin == "torchrun"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"},  # the batch script itself, before any srun
        {**SRUN, "SLURM_NTASKS": "1"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # a shell inside an allocation for seven
    ],
)
def test_alone(environ: dict[str, str]) -> None:
    assert surrounding(environ) is None


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({**TORCHRUN, "RANK": "one"}, ["RANK = 'one'"]),
        ({**TORCHRUN, "RANK": "8"}, ["rank 8 of 8"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR", "torchrun"]),
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_NODELIST"}, ["SLURM_STEP_NODELIST"]),
    ],
)
def test_half_a_world_is_refused(environ: dict[str, str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        surrounding(environ)
    for word in named:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("one", ["one"]),
        ("a,b", ["a", "b"]),
        ("node[01-04,07]", ["node01", "node02", "node03", "node04", "node07"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("x[9-11],y", ["x9", "x10", "x11", "y"]),
    ],
)
def test_lists_of_hosts(nodes: str, hosts: list[str]) -> None:
    assert hosts_of(nodes) == hosts


@pytest.mark.parametrize(("rank", "together"), [(0, True), (2, False), (3, False), (5, True)])
def test_a_replica_may_lie_over_two_hosts_though_each_has_as_many_ranks(rank: int, together: bool) -> None:
    """Two hosts of three ranks: of the replicas of two, the middle one has a rank on each."""
    world = World(rank, 6, rank % 3, 3, "node7", 29400, "torchrun").in_replica(2)
    assert world.on_one_host == together
    assert not world.run_on_one_host
    assert World(rank, 6, rank, 6, "node7", 29400, "torchrun").in_replica(2).run_on_one_host
