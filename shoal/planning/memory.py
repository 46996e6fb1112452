"""What a training step holds in memory on one rank, read off the program.

    parameters   this rank's shards, their gradients, and what the optimizer keeps of each
    kept         values and tiles that operators save for backward, each once however many save it
    working      what one layer of backward handles at a time, in the largest such layer: its gradients, and the copies
                 that kernels make of its tensors in a layout of their own
    libraries    compiled kernels and the like, a constant

It does not see the allocator's rests. `benchmarks/memory` holds it against measured peaks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.graph import LayerGraph
from shoal.lowering.placement import Placed
from shoal.lowering.program import Compute, Fetch, Program
from shoal.partition import volume

_SAVES_INPUT = (
    *("conv", "linear", "batch_norm", "group_norm", "layer_norm", "instance_norm", "max_pool", "avg_pool", "gelu"),
    *("silu", "hardswish", "hardsigmoid", "mish", "elu", "leaky_relu", "hardtanh", "relu6", "softplus", "mul", "div"),
    *("pow", "log", "prelu", "celu", "selu"),
)
_SAVES_OUTPUT = ("relu.", "sigmoid", "tanh", "softmax", "exp.", "sqrt", "rsqrt", "dropout", "native_dropout")
LIBRARIES = 32 << 20
CHANNELS_TOGETHER = 16
"""Convolutions pad their input's channels to a multiple of this, in a copy."""
_VIEWS = ("view", "reshape", "flatten", "unsqueeze", "squeeze", "alias", "contiguous", "expand", "permute", "transpose")


def _word(op: str) -> str:
    return op.split(".", 1)[1]


def saves_input(op: str) -> bool:
    """Whether backward of this operator reads what it was given."""
    return _word(op).lstrip("_").startswith(_SAVES_INPUT) and not op.startswith("aten.adaptive")


def saves_output(op: str) -> bool:
    """Whether backward of this operator reads what it gave."""
    return _word(op).lstrip("_").startswith(_SAVES_OUTPUT)


def index_bytes(op: str) -> int:
    """Bytes per element of the output that an operator saves besides its tensors: where each maximum was."""
    return 8 if "max_pool" in op else 0


def is_view(op: str) -> bool:
    """Whether its output is its input's memory."""
    return _word(op).split(".")[0].lstrip("_") in _VIEWS


def kept_values(graph: LayerGraph) -> frozenset[str]:
    """Values that live until backward because an operator saved them; a view stands for what it looks at."""
    root: dict[str, str] = {}
    kept: set[str] = set()
    for layer in graph.layers:
        if layer.reads and is_view(layer.op):
            root[layer.name] = root.get(layer.reads[0], layer.reads[0])
        if saves_output(layer.op):
            kept.add(layer.name)
        if saves_input(layer.op):
            kept.update(root.get(read, read) for read in layer.reads)
    return frozenset(kept)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: int
    kept: int
    working: int
    libraries: int = LIBRARIES

    @property
    def total(self) -> int:
        """The predicted peak above what the process holds before the network is laid."""
        return self.parameters + self.kept + self.working + self.libraries


def step_memory(program: Program, rank: int, itemsize: Mapping[str, int], *, optimizer_slots: int = 1) -> Memory:
    """What one rank holds at the peak of a training step under a program."""
    graph = program.graph
    parameters = 0
    for name, layout in program.states.items():
        box = layout[rank]
        if box is not None:
            copies = 2 + optimizer_slots if graph.states[name].differentiable and name not in graph.changed else 1
            parameters += volume(box) * itemsize[name] * copies
    wanted = kept_values(graph)
    kept = 0
    working = 0
    readers = {
        key: one.placed.layer
        for one in program.instructions
        if isinstance(one, Compute)
        for key in one.sources.values()
    }
    for one in program.instructions:
        if isinstance(one, Compute):
            name, box = one.placed.layer.name, one.placed.writes[rank]
            if box is None:
                continue
            size = volume(box) * itemsize[name]
            if name in wanted and name not in program.only_moved_to and not is_view(one.placed.layer.op):
                kept += size
            kept += volume(box) * index_bytes(one.placed.layer.op)
            needs = one.placed.needs[rank]
            read = sum(
                volume(needs[argument].box) * itemsize[reference.name]
                for argument, reference in one.placed.layer.tensors
                if argument in needs and reference.name in graph.specs
            )
            working = max(working, _working(one.placed, rank, size, read, itemsize[name]))
        elif isinstance(one, Fetch) and not one.identity:
            tile = one.tiles[rank]
            reader = readers.get(one.key)
            if tile is not None and reader is not None and (saves_input(reader.op) or one.value in wanted):
                size = itemsize[one.value]
                for rows in tile.shape:
                    size *= rows
                kept += size
    return Memory(parameters, kept, working)


def _working(placed: Placed, rank: int, written: int, read: int, itemsize: int) -> int:
    """Bytes that backward of one layer handles beyond what was kept: gradients of both sides, and kernels' copies."""
    word = placed.layer.op.split(".")[1]
    if not word.startswith("conv"):
        return written + read
    needs = placed.needs[rank]
    channels = max(1, len(needs["input"].box[1]))
    padded = read * -(-channels // CHANNELS_TOGETHER) * CHANNELS_TOGETHER // channels
    weights = volume(needs["weight"].box) * itemsize
    return 2 * written + read + padded + max(read, padded) // 2 + 2 * weights
