"""In-place operators: renamed where that is right, and told apart where it is not.

After an in-place operator torch.export lets later lines read its result by the new name, so `relu_` may be
read as `relu`. Except where somebody holds another name of the same memory: a view made before, the input
itself, or a state. `has_hidden_writes` finds exactly these graphs; they take torch's own functionalisation.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

# `bernoulli_(p)` draws from p alone; its functional twin of the same name would read the tensor.
_TWINS = {"aten.bernoulli_.float": "aten.bernoulli.p"}


def functional_names(target: Any) -> tuple[str, str]:
    """(operator, short word) without the mark of an in-place operator: (`aten.relu.default`, `relu`)."""
    name = str(target)
    namespace, word, overload = name.split(".", 2)
    plain = _TWINS.get(name, f"{namespace}.{word.removesuffix('_')}.{overload}")
    return plain, word.removesuffix("_").replace("_native_batch_norm_legit_functional", "batch_norm")


def has_hidden_writes(graph: Graph) -> bool:
    """Whether some in-place operator changes memory that is read later under an older name."""
    memory: dict[Node, Node] = {}
    """For each tensor the node that first made its memory."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        written = _written(node)
        shared = [memory.get(other, other) for other in _shared(node)]
        memory[node] = shared[0] if shared else node
        if written is None or _counts_up_a_state(node):
            continue
        root = memory.get(written, written)
        if root.op == "placeholder" or not _has_twin(node):
            return True
        names = [other for other, its_root in memory.items() if its_root is root and other is not node]
        if any(position[user] > position[node] for name in names for user in name.users):
            return True
    return False


def _written(node: Node) -> Node | None:
    """The tensor that a node changes in place."""
    for schema, argument in _arguments(node):
        if schema.alias_info is not None and schema.alias_info.is_write and isinstance(argument, Node):
            return argument
    return None


def _shared(node: Node) -> list[Node]:
    """Tensors whose memory a node's result may share: views, and in-place operators."""
    return [
        argument
        for schema, argument in _arguments(node)
        if schema.alias_info is not None and isinstance(argument, Node)
    ]


def _arguments(node: Node) -> list[tuple[torch.Argument, Any]]:
    if not isinstance(node.target, torch._ops.OpOverload):
        # getitem takes one of the results that its operator made; they share what that operator shared
        return []
    schema = node.target._schema.arguments
    return [
        *zip(schema, node.args, strict=False),
        *((a, node.kwargs[a.name]) for a in schema if a.name in node.kwargs),
    ]


def _has_twin(node: Node) -> bool:
    namespace, word, overload = functional_names(node.target)[0].split(".", 2)
    packet = getattr(getattr(torch.ops, namespace), word, None)
    return packet is not None and overload in packet.overloads()


def _counts_up_a_state(node: Node) -> bool:
    """Batch norm's `num_batches_tracked += 1`, which the reader takes for what it is."""
    target = node.args[0] if node.args else None
    return (
        str(node.target) == "aten.add_.Tensor"
        and isinstance(target, Node)
        and not target.meta["val"].ndim
        and node.args[1:] == (1,)
    )
