"""Shoal trains convolutional networks on many devices.

    import shoal
    model = shoal.zoo.build("resnet18", input=(3, 32, 32), classes=37)
    result = shoal.train(shoal.TrainConfig(model="lenet5", data="digits", epochs=2))

Importing `shoal` is light: torch loads when the first name that needs it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal._version import __version__

if TYPE_CHECKING:
    from shoal import data, errors, zoo
    from shoal.capturing import capture
    from shoal.cluster import Cluster
    from shoal.comparing import compare
    from shoal.comparison import Comparison
    from shoal.config import TrainConfig
    from shoal.exchanging import compression
    from shoal.execution import (
        ParallelModule,
        clip_grad_norm_,
        elementwise_optimizer,
        full_state_dict,
        load_full_state_dict,
    )
    from shoal.finding import find_plan, parallelize, simulate
    from shoal.graph import LayerGraph
    from shoal.partition import Cut
    from shoal.plan import Plan
    from shoal.replicas.own_loop import exchange
    from shoal.result import RunResult
    from shoal.running import resume, train
    from shoal.timeline import Trace
    from shoal.timings import Timings
    from shoal.tracing.own_loop import trace
    from shoal.training import Listener
    from shoal.using import Trained, load, save
    from shoal.verdict import Verdict
    from shoal.verifying import verify

__all__ = [
    "__version__",
    "parallelize",
    "ParallelModule",
    "full_state_dict",
    "load_full_state_dict",
    "clip_grad_norm_",
    "elementwise_optimizer",
    "exchange",
    "compression",
    "capture",
    "LayerGraph",
    "verify",
    "Verdict",
    "TrainConfig",
    "train",
    "resume",
    "Listener",
    "RunResult",
    "compare",
    "Comparison",
    "load",
    "save",
    "Trained",
    "Plan",
    "Cut",
    "find_plan",
    "simulate",
    "Cluster",
    "Timings",
    "trace",
    "Trace",
    "zoo",
    "data",
    "errors",
]

_HOME = {
    "parallelize": "shoal.finding",
    "ParallelModule": "shoal.execution",
    "full_state_dict": "shoal.execution",
    "load_full_state_dict": "shoal.execution",
    "clip_grad_norm_": "shoal.execution",
    "elementwise_optimizer": "shoal.execution",
    "exchange": "shoal.replicas.own_loop",
    "compression": "shoal.exchanging",
    "capture": "shoal.capturing",
    "LayerGraph": "shoal.graph",
    "verify": "shoal.verifying",
    "Verdict": "shoal.verdict",
    "TrainConfig": "shoal.config",
    "train": "shoal.running",
    "resume": "shoal.running",
    "Listener": "shoal.training",
    "RunResult": "shoal.result",
    "compare": "shoal.comparing",
    "Comparison": "shoal.comparison",
    "load": "shoal.using",
    "save": "shoal.using",
    "Trained": "shoal.using",
    "Plan": "shoal.plan",
    "Cut": "shoal.partition",
    "find_plan": "shoal.finding",
    "simulate": "shoal.finding",
    "Cluster": "shoal.cluster",
    "Timings": "shoal.timings",
    "trace": "shoal.tracing.own_loop",
    "Trace": "shoal.timeline",
}
_SUBMODULES = ("zoo", "data", "errors")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"shoal.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
