"""Speeds from measurements, and from data sheets: the two answers to what the cost model asks."""

from dataclasses import dataclass, field
from math import prod

from shoal.cluster import Cluster
from shoal.errors import InputError
from shoal.operators.base import Op, Part, Rule
from shoal.operators.registry import WHOLE
from shoal.partition import Span
from shoal.profiling.in_step import BACKWARD, FORWARD, tile_name
from shoal.profiling.kernels import kernel_key
from shoal.profiling.roofline import flops, roofline
from shoal.simulating.speeds import KernelTime
from shoal.timings import InStep, Timings


class UnmeasuredError(InputError):
    """A layer of which the timings know nothing."""

    def __init__(self, layer: str) -> None:
        super().__init__(
            f"the timings hold no measurement of layer {layer!r} at this size.",
            "Run `shoal profile` with the same --model, --input, --classes and --batch.",
        )


@dataclass
class Measured:
    """What was measured; a tile that was not is composed of those that were.

    A part that is cut along several axes takes the whole's time, times what each of its cuts alone makes of it.
    """

    timings: Timings
    dtype: str = "float32"
    in_step: InStep = field(default_factory=InStep)
    """What real steps of this network showed."""
    _asked: dict[str, KernelTime] = field(default_factory=dict, init=False)

    @property
    def cluster(self) -> Cluster:
        """The links as measured."""
        return self.timings.cluster

    @property
    def layer_overhead(self) -> float:
        """As measured."""
        return self.timings.layer_overhead

    @property
    def step_overhead(self) -> float:
        """As measured, in real steps where there were any."""
        return self.timings.step_overhead if self.in_step.between is None else self.in_step.between

    @property
    def update_per_byte(self) -> float:
        """As measured, in real steps where there were any."""
        shown = self.in_step.update_per_byte
        return self.timings.update_per_byte if shown is None else shown

    @property
    def copy_per_byte(self) -> float:
        """As measured."""
        return self.timings.copy_per_byte

    def kernel(self, op: Op, rule: Rule, part: Part, cut: frozenset[str], *, input_grad: bool) -> KernelTime:
        """One part of a layer."""
        key = kernel_key(op, rule, part, cut, self.dtype, input_grad=input_grad)
        if key not in self._asked:
            known = self.timings.kernels.get(key)
            alone = self._composed(op, rule, part, cut, input_grad=input_grad) if known is None else KernelTime(*known)
            self._asked[key] = self._in_step(key, op.layer.op, alone)
        return self._asked[key]

    def _in_step(self, key: str, operator: str, alone: KernelTime) -> KernelTime:
        """What it takes in a step. The factors are of the kernel and half of what a layer costs besides, each pass."""
        half = self.layer_overhead / 2

        def factor(which: str) -> float:
            factors = self.in_step.factors
            return factors.get(tile_name(key, which), factors.get(f"{operator} {which}", 1.0))

        forward = max(0.0, factor(FORWARD) * (alone.forward + half) - half)
        backward = max(0.0, factor(BACKWARD) * (alone.backward + half) - half)
        share = alone.to_input / alone.backward if alone.backward else 1.0
        return KernelTime(forward, backward * share, backward * (1 - share))

    def _composed(self, op: Op, rule: Rule, part: Part, cut: frozenset[str], *, input_grad: bool) -> KernelTime:
        whole = {axis.letter: Span(0, axis.size) for axis in rule.axes(op)} if rule is not WHOLE else {}
        base = self._known(op, rule, whole, frozenset(), input_grad=input_grad)
        if base is None:
            raise UnmeasuredError(op.layer.name)
        work = max(flops(op, whole, rule), 1.0)
        shares: list[tuple[float, ...]] = []
        for letter in sorted(cut):
            single_part = {**whole, letter: part[letter]}
            single = self._known(op, rule, single_part, frozenset(letter), input_grad=input_grad)
            share = max(flops(op, single_part, rule), 1.0) / work
            shares.append(
                tuple(
                    of_single / of_base if single and of_base else share
                    for of_single, of_base in zip(_passes(single or base), _passes(base), strict=True)
                )
            )
        return KernelTime(*(seconds * prod(share[i] for share in shares) for i, seconds in enumerate(_passes(base))))

    def _known(self, op: Op, rule: Rule, part: Part, cut: frozenset[str], *, input_grad: bool) -> KernelTime | None:
        seconds = self.timings.kernels.get(kernel_key(op, rule, part, cut, self.dtype, input_grad=input_grad))
        return None if seconds is None else KernelTime(*seconds)


def _passes(time: KernelTime) -> tuple[float, float, float]:
    return time.forward, time.to_input, time.to_weights


@dataclass(frozen=True)
class Analytic:
    """From a cluster's data sheet: no device is needed, and no more is known than a roofline shows."""

    cluster: Cluster
    itemsize: int = 4
    layer_overhead: float = 0.0
    step_overhead: float = 0.0

    @property
    def update_per_byte(self) -> float:
        """A momentum step reads three tensors and writes two."""
        return 5 / self.cluster.device.memory_bandwidth

    @property
    def copy_per_byte(self) -> float:
        """A copy reads and writes."""
        return 2 / self.cluster.device.memory_bandwidth

    def kernel(self, op: Op, rule: Rule, part: Part, cut: frozenset[str], *, input_grad: bool) -> KernelTime:  # noqa: ARG002
        """One part of a layer."""
        return roofline(op, part, rule, self.cluster.device, self.itemsize, input_grad=input_grad)
