"""In-place operators: renamed where that is right, and told apart where it is not.

After an in-place operator torch.export lets later lines read its result by the new name, so `relu_` may be
read as `relu`. Except where somebody holds another name of the same memory: a view made before, the input
itself, or a state. `has_hidden_writes` finds exactly these graphs; they take torch's own functionalisation.

Who shares memory is not guessed from signatures: the tensors of an exported graph carry storages, and views
share theirs with their base, also through `chunk`, `split` and `unbind`.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from shoal.capturing.custom_functions import may_be_its_input
from shoal.graph import Layer
from shoal.operators.base import Operator, operator_named
from shoal.operators.registry import facts_of


def functional_names(target: OpOverload) -> tuple[str, str]:
    """(operator, short word) without the mark of an in-place operator: (`aten.relu.default`, `relu`)."""
    word = str(target).split(".")[1].removesuffix("_").removeprefix("_")
    return str(twin(target) or target), facts_of(str(target)).called or word


@cache
def twin(target: OpOverload) -> OpOverload | None:
    """The operator that computes what `target` writes in place, with the same arguments; itself if it writes nothing.

    Names deceive: `pow_.Scalar` takes a tensor to a number, `pow.Scalar` a number to a tensor. Types do not.
    """
    if not target._schema.is_mutable:
        return target
    namespace, word, overload = str(target).split(".", 2)
    packet = getattr(getattr(torch.ops, namespace), word.removesuffix("_"), None)
    if packet is None or not word.endswith("_"):
        return None
    candidates = sorted(packet.overloads(), key=lambda name: name != overload)
    types = [str(argument.type) for argument in target._schema.arguments]
    for name in candidates:
        candidate: OpOverload = getattr(packet, name)
        if [str(a.type) for a in candidate._schema.arguments] == types and not candidate._schema.is_mutable:
            return candidate
    return None


def operator_of(layer: Layer) -> Operator:
    """The torch operator that a layer names."""
    return operator_named(layer.op)


def has_hidden_writes(graph: Graph, counters: set[Node]) -> bool:
    """Whether some in-place operator changes memory that is read later under an older name.

    `counters` are the nodes that count up a buffer, which the reader takes for what they are.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    names = _names_of_memory(graph)
    given = {memory for memory, nodes in names.items() if nodes[0].op == "placeholder"}
    for node in graph.nodes:
        if node in counters:
            continue
        for memory in changed_memory(node):
            older = [name for name in names[memory] if position[name] < position[node]]
            read_later = any(position[user] > position[node] for name in older for user in name.users)
            if memory in given or read_later:
                return True
        if writes(node) and (len(written_nodes(node)) != 1 or twin(node.target) is None):
            return True
    return _reads_statistics(graph)


def doubtful_write(graph: Graph) -> Node | None:
    """An in-place operator on memory that may be that of another tensor which is read later: no graph can tell."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    names, links = _names_of_memory(graph), _doubtful_links(graph)
    for node in graph.nodes:
        for memory in changed_memory(node):
            older = [
                name for other in links.get(memory, ()) for name in names[other] if position[name] < position[node]
            ]
            if any(position[user] > position[node] for name in older for user in name.users):
                return node  # type: ignore[no-any-return]
    return None


def _doubtful_links(graph: Graph) -> dict[int, set[int]]:
    """For pieces of memory those others that they may be."""
    links: dict[int, set[int]] = {}
    for node in graph.nodes:
        name = str(node.target)
        if facts_of(name).may_be_input(len(node.all_input_nodes)) or may_be_its_input(name):
            results = [memory_of(result) for result in (node, *node.users)]
            inputs = {memory for memory in map(memory_of, node.all_input_nodes) if memory is not None}
            other = {memory for memory in results if memory is not None}
            group = (inputs | other).union(*(links.get(memory, set()) for memory in inputs | other))
            links.update(dict.fromkeys(group, group))
    return links


def memory_of(node: Node) -> int | None:
    """A number for the memory behind a node's tensor, the same for all its views."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def writes(node: Node) -> bool:
    """Whether a node changes values in place. `detach_` changes none."""
    return (
        isinstance(node.target, OpOverload)
        and node.target._schema.is_mutable
        and not facts_of(str(node.target)).detaches
    )


def changed_memory(node: Node) -> set[int]:
    """The memory that a node writes to."""
    return {memory for argument in written_nodes(node) if (memory := memory_of(argument)) is not None}


def written_nodes(node: Node) -> list[Node]:
    """The tensors that a node changes in place."""
    if not writes(node):
        return []
    return [
        item
        for schema, argument in _bound(node)
        if schema.alias_info is not None and schema.alias_info.is_write
        for item in (argument if isinstance(argument, list | tuple) else [argument])
        if isinstance(item, Node)
    ]


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments that a node gives its operator, by their names."""
    return {schema.name: argument for schema, argument in _bound(node)}


def _bound(node: Node) -> Iterator[tuple[torch.Argument, Any]]:
    if not isinstance(node.target, OpOverload):
        return
    schema = node.target._schema.arguments
    yield from zip(schema, node.args, strict=False)
    yield from ((a, node.kwargs[a.name]) for a in schema if a.name in node.kwargs)


def _names_of_memory(graph: Graph) -> dict[int, list[Node]]:
    """For every piece of memory the nodes that name it, oldest first."""
    names: dict[int, list[Node]] = {}
    for node in graph.nodes:
        memory = memory_of(node)
        if memory is not None:
            names.setdefault(memory, []).append(node)
    return names


def _reads_statistics(graph: Graph) -> bool:
    """Whether running statistics that a norm changes in this pass are read by anything but norms."""
    kept = {
        given[name]
        for node in graph.nodes
        if (facts := facts_of(str(node.target))).statistics and facts.trains(given := arguments_of(node))
        for name in facts.statistics
        if isinstance(given[name], Node)
    }
    return any(not facts_of(str(user.target)).statistics for node in kept for user in node.users)
