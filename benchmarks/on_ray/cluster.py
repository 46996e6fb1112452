"""A Ray cluster of several nodes on this machine, which may be lost and come back, for as long as a context lasts."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}
"""What a node is given beside its cores: Shoal sends little through Ray."""
NOTICE = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""So that a node that is gone is missed after seconds, not after half a minute."""


class Nodes:
    """A cluster with its head and other nodes, each of so many cores."""

    def __init__(self, cluster: Any, cores: int) -> None:
        self._cluster, self._cores = cluster, cores
        self.others: list[Any] = []
        """Nodes beside the head, which may be lost."""

    @property
    def variables(self) -> dict[str, str]:
        """By which a command finds the cluster."""
        return {"RAY_ADDRESS": self._cluster.address}

    def add(self) -> None:
        """One more node, or one that comes back."""
        self.others.append(self._cluster.add_node(num_cpus=self._cores, **NODE))

    def lose(self) -> None:
        """The last node that came goes, with all that runs on it, without a word."""
        self._cluster.remove_node(self.others.pop(), allow_graceful=False)

    def processes(self) -> list[psutil.Process]:
        """Whatever runs on the nodes."""
        roots = [
            info.process.pid
            for node in self._cluster.list_all_nodes()
            for infos in node.all_processes.values()
            for info in infos
        ]
        family: list[psutil.Process] = []
        for root in roots:
            with suppress(psutil.NoSuchProcess):
                family += psutil.Process(root).children(recursive=True)
        return family

    def ranks(self) -> dict[int, psutil.Process]:
        """Processes of ranks, by their numbers."""
        names: dict[str, psutil.Process] = {}
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                names[process.name()] = process
        begins = "shoal rank "
        return {int(name.removeprefix(begins)): names[name] for name in names if name.startswith(begins)}

    def kill_actor(self, rank: int) -> None:
        """The actor of a rank, which takes that with it."""
        actor = next(parent for parent in self.ranks()[rank].parents() if parent.name().startswith("ray::"))
        actor.kill()

    def leftovers(self, seconds: float = 10.0) -> list[str]:
        """What runs of Shoal have left on the cluster, after a moment in which it may go."""
        import ray

        deadline = time.monotonic() + seconds
        # No longer than this: while it is connected Ray prints here what it says of nodes that are lost.
        ray.init(address=self._cluster.address, logging_level="WARNING", log_to_driver=False)
        try:
            while (left := self._left()) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            ray.shutdown()
        return left

    def _left(self) -> list[str]:
        import ray
        from ray._private.state import actors

        groups = ray.util.placement_group_table().values()
        return [
            *(f"rank {number}" for number in self.ranks()),
            *(f"actor {row['ActorID']}" for row in actors().values() if row["State"] != "DEAD"),
            *(f"placement group {row['placement_group_id']}" for row in groups if row["state"] != "REMOVED"),
        ]


@contextmanager
def nodes(count: int = 2, cores: int = 1) -> Iterator[Nodes]:
    """A cluster of `count` nodes."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cores, "_system_config": NOTICE, **NODE})
    try:
        made = Nodes(cluster, cores)
        for _ in range(count - 1):
            made.add()
        yield made
    finally:
        cluster.shutdown()
