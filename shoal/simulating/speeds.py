"""What the cost model must know of devices and links; measured or from a cluster's data sheet."""

from dataclasses import dataclass
from typing import Protocol

from shoal.cluster import Cluster
from shoal.operators.base import Op, Part, Rule


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Seconds of one part of a layer."""

    forward: float
    to_input: float = 0.0
    """Backward, of the gradient of what it reads; of a layer whose gradients are found at once, all of backward."""
    to_weights: float = 0.0
    """Backward, of its parameters' gradients, where they can be found apart."""

    @property
    def backward(self) -> float:
        """Both gradients."""
        return self.to_input + self.to_weights

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward


def part_key(op: Op, part: Part, cut: frozenset[str]) -> tuple[object, ...]:
    """What tells one part of one layer of a network from all others; the letters of the `cut` included."""
    return op.layer.name, tuple([(letter, span.start, span.stop) for letter, span in part.items()]), cut


class Speeds(Protocol):
    """How fast everything is."""

    @property
    def cluster(self) -> Cluster:
        """The links."""
        ...

    @property
    def layer_overhead(self) -> float:
        """Seconds that each layer costs beyond its kernels, in both passes together."""
        ...

    @property
    def step_overhead(self) -> float:
        """Seconds that each step costs beyond its layers."""
        ...

    @property
    def update_per_byte(self) -> float:
        """Seconds of the optimizer per byte of parameters."""
        ...

    @property
    def copy_per_byte(self) -> float:
        """Seconds to put a byte of a tile where it belongs."""
        ...

    def kernel(self, op: Op, rule: Rule, part: Part, cut: frozenset[str], *, input_grad: bool) -> KernelTime:
        """One part of a layer. `cut`: the letters along which the layer has several parts."""
        ...
