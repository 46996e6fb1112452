"""Timings: what a machine was measured to take, as a value that saves to versioned JSON.

Kernels are named by what their time depends on: operator, arguments, tile shapes, type. Everything that a later reader
needs to trust the numbers (machine, threads, ranks, versions, date) stands beside them.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from shoal.cluster import Cluster
from shoal.errors import InputError
from shoal.files import write_text_atomically

SCHEMA = "shoal.timings/2"


@dataclass(frozen=True)
class InStep:
    """What real steps of one network showed that its kernels alone do not."""

    factors: dict[str, float] = field(default_factory=dict)
    """How many times longer than alone: `OPERATOR forward`, `OPERATOR backward`, and the same of single kernels."""
    between: float | None = None
    """Seconds of a step that are in no layer."""
    update_per_byte: float | None = None
    """Seconds of the optimizer per byte of this network's parameters."""


@dataclass(frozen=True)
class Timings:
    """What was measured on one machine, with so many ranks at work at once."""

    cluster: Cluster
    """The links as measured, and the device by name."""
    ranks: int
    threads: int
    kernels: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Seconds forward, of the gradient of what a layer reads, and of its parameters', where both can be told apart."""
    in_step: dict[str, InStep] = field(default_factory=dict)
    """By network."""
    layer_overhead: float = 0.0
    step_overhead: float = 0.0
    update_per_byte: float = 0.0
    copy_per_byte: float = 0.0
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""

    def with_kernels(self, found: dict[str, tuple[float, float, float]]) -> Self:
        """The same with more kernels."""
        return replace(self, kernels={**self.kernels, **found})

    def only(self, kernels: Collection[str], networks: Collection[str]) -> Self:
        """The same with these kernels, and for these networks, as far as it has them."""
        return replace(
            self,
            kernels={name: times for name, times in self.kernels.items() if name in kernels},
            in_step={name: shown for name, shown in self.in_step.items() if name in networks},
        )

    def save(self, path: str | Path) -> None:
        """Write as JSON; the file appears whole or not at all."""
        content = asdict(replace(self, cluster=None))  # type: ignore[arg-type]
        content["cluster"] = self.cluster.model_dump(mode="json")
        write_text_atomically(Path(path), json.dumps({"schema": SCHEMA, **content}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; anything else is an `InputError`."""
        remedy = "`shoal profile --out FILE` writes such a file."
        try:
            content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"timings {str(path)!r} cannot be read: {error}.", remedy) from None
        if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
            raise InputError(f"timings {str(path)!r} are not of schema {SCHEMA!r}.", remedy)
        try:
            kernels = {name: _three(times) for name, times in content.pop("kernels").items()}
            in_step = {name: InStep(**shown) for name, shown in content.pop("in_step").items()}
            cluster = Cluster.model_validate(content.pop("cluster"))
            return cls(cluster=cluster, kernels=kernels, in_step=in_step, **content)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"timings {str(path)!r} do not have the fields of timings: {error}.", remedy) from None


def _three(times: Any) -> tuple[float, float, float]:
    forward, to_input, to_weights = map(float, times)
    return forward, to_input, to_weights
