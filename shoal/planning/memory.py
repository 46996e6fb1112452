"""What a training step holds in memory on one rank, read off the program.

    parameters   this rank's shards, their gradients, and what the optimizer keeps of each
    kept         values and tiles that operators save for backward, each once however many save it
    working      the gradients and tiles that one layer of backward handles at a time, the largest such layer

It does not see what kernels use inside, the allocator's rests, and the interpreter itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.graph import LayerGraph
from shoal.lowering.program import Compute, Fetch, Program
from shoal.partition import volume

_SAVES_INPUT = (
    *("conv", "linear", "batch_norm", "group_norm", "layer_norm", "instance_norm", "max_pool", "avg_pool", "gelu"),
    *("silu", "hardswish", "hardsigmoid", "mish", "elu", "leaky_relu", "hardtanh", "relu6", "softplus", "mul", "div"),
    *("pow", "log", "prelu", "celu", "selu"),
)
_SAVES_OUTPUT = ("relu.", "sigmoid", "tanh", "softmax", "exp.", "sqrt", "rsqrt", "dropout", "native_dropout")
_VIEWS = ("view", "reshape", "flatten", "unsqueeze", "squeeze", "alias", "contiguous", "expand", "permute", "transpose")


def _word(op: str) -> str:
    return op.split(".", 1)[1]


def saves_input(op: str) -> bool:
    """Whether backward of this operator reads what it was given."""
    return _word(op).lstrip("_").startswith(_SAVES_INPUT) and not op.startswith("aten.adaptive")


def saves_output(op: str) -> bool:
    """Whether backward of this operator reads what it gave."""
    return _word(op).lstrip("_").startswith(_SAVES_OUTPUT)


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

    @property
    def total(self) -> int:
        """The predicted peak."""
        return self.parameters + self.kept + self.working


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
            if "max_pool" in one.placed.layer.op:
                kept += volume(box) * 8  # where each maximum was
            needs = one.placed.needs[rank]
            read = sum(
                volume(needs[argument].box) * itemsize[reference.name]
                for argument, reference in one.placed.layer.tensors
                if argument in needs and reference.name in graph.specs
            )
            working = max(working, size + read)
        elif isinstance(one, Fetch) and not one.identity:
            tile = one.tiles[rank]
            reader = readers.get(one.key)
            if tile is not None and reader is not None and (saves_input(reader.op) or one.value in wanted):
                size = itemsize[one.value]
                for rows in tile.shape:
                    size *= rows
                kept += size
    return Memory(parameters, kept, working)
