"""From settings to a simulated run of many replicas."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal import zoo
from shoal.cli import simulate_job
from shoal.cluster import Cluster
from shoal.config import SimulateConfig
from shoal.data import load
from shoal.errors import ConfigError
from shoal.exchanges import ExchangeOptions, Rates, parse_exchange
from shoal.finding.simulated import check_slow
from shoal.swarm import Churn, Setting
from shoal.swarm.swarm import Swarm, refuse
from shoal.swarm.work import StandIn, Training, Work
from shoal.units import parse_quantity


def swarm_of(config: SimulateConfig, progress: Callable[[int, int, float], None], *, traced: bool) -> Swarm:
    """The run that settings describe, ready to run. What does not fit is told before anything is read or computed."""
    assert config.replicas is not None
    assert config.cluster is not None
    options = parse_exchange(config.exchange, config.exchange_options)
    cluster = Cluster.load(config.cluster).resized(config.replicas)
    setting = _setting(config, options, cluster)
    refuse(options, setting)
    options.holding(config.replicas, one_host=setting.one_host, weight_bytes=0)
    if config.step_seconds is None:
        alone = config.model_copy(update={"batch": setting.samples, "workers": 1, "replicas": None, "steps": 1})
        seconds = simulate_job.simulated("data", alone, [])[0].seconds
        setting = _setting(config, options, cluster, seconds)
    work = _training(config, setting) if config.train else StandIn(_weight_bytes(config), config.seed)
    return Swarm(options, setting, work, Rates(config.lr, config.momentum), progress=progress, traced=traced)


def _setting(config: SimulateConfig, options: ExchangeOptions, cluster: Cluster, seconds: float = 1.0) -> Setting:
    replicas = config.replicas or 1
    options.check_replicas(replicas)
    samples, rest = divmod(config.batch, options.parts_of_batch(replicas))
    if rest or not samples:
        raise ConfigError(
            f"batch {config.batch} is not whole samples for each of {options.parts_of_batch(replicas)} replicas.",
            f"Give --batch {max(1, samples) * options.parts_of_batch(replicas)}.",
        )
    churn = Churn(cluster.churn.lifetime, cluster.churn.away) if cluster.churn is not None else None
    link = cluster.levels[-1] if cluster.levels else None
    return Setting(
        replicas=replicas,
        steps=config.steps,
        step_seconds=config.step_seconds or seconds,
        bandwidth=link.bandwidth if link is not None else float("inf"),
        latency=link.latency if link is not None else 0.0,
        jitter=config.jitter,
        slow=check_slow(config.slow_ranks, replicas),
        churn=churn if config.churn is None else Churn.parse(config.churn),
        server_bandwidth=_bandwidth(config.server_bandwidth),
        one_host=link is None or any(level.name == "host" and level.size >= replicas for level in cluster.levels),
        seed=config.seed,
        samples=samples,
    )


def _bandwidth(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_quantity(text, "bytes/s")
    except ValueError as error:
        raise ConfigError(f"server_bandwidth: {error}.", "Write a rate such as 1Gbit/s.") from None


def _weight_bytes(config: SimulateConfig) -> int:
    with torch.device("meta"):
        network = _network(config)
    return sum(parameter.nbytes for parameter in network.parameters())


def _network(config: SimulateConfig) -> Any:
    return zoo.build(config.model, input=config.input, classes=config.classes, options=config.model_options)


def _training(config: SimulateConfig, setting: Setting) -> Work:
    shape = config.input
    if shape is None and config.model in zoo.names():
        shape = inspect.signature(getattr(zoo, config.model)).parameters["input"].default
    splits = load(config.data or "default", shape=shape, classes=config.classes, seed=config.seed)
    parts = [part.batch(np.arange(len(part))) for part in (splits.train, splits.test)]
    sized = config.model_copy(update={"input": shape, "classes": splits.train.classes})
    torch.set_num_threads(1)
    return Training(lambda: _network(sized), parts[0], parts[1], batch=setting.samples, seed=config.seed)
