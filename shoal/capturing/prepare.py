"""Things that torch.export writes down in a way that is easily misread, rewritten before anybody reads them.

    with torch.no_grad(): ...    a graph of its own, which torch's functionalisation later forgets to be without
                                 gradients; here its lines are inlined and its results end in `detach`
    with torch.autocast(): ...   a graph of its own too; here its lines are inlined with their casts (casting.py)
    dropout in evaluation        its own input, which torch.export takes for a copy; here it is left out

Refuses   an in-place operator outside of autograd's sight (under no_grad or through `detach`) on a tensor that
          autograd follows: values change there and gradients do not, which a functional graph cannot say.
          Shapes that depend on values, and whatever is no operator (torch.vmap, torch.cond).
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from shoal.capturing.casting import OFF, Region, casts_of
from shoal.capturing.functional import arguments_of, changed_memory, memory_of, written_nodes
from shoal.capturing.place import line_of
from shoal.errors import CaptureError
from shoal.operators.registry import facts_of

_NO_GRAD = "shoal.no_grad"
"""Mark on nodes that stood in a region without gradients."""

_CAST = "shoal.cast"
"""Mark on nodes whose autocast is settled."""

_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_PLAIN, _TO_REAL = torch.ops.aten.resolve_conj.default, torch.ops.aten.view_as_real.default
_PYTHONS = tuple(vars(operator).values())
"""Python's own functions, which torch.export uses on numbers and lists."""
_TRANSFORMS = ("add_batch_dim", "remove_batch_dim", "vmap_increment_nesting", "vmap_decrement_nesting", "make_dual",
               "lazy_load_decompositions", "jvp_increment_nesting", "enter_dual_level")  # fmt: skip


def prepare(program: ExportedProgram) -> None:
    """Rewrite an exported program in place, so that what is left is plain operators with plain meaning."""
    module = program.graph_module
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        _inline_regions(module)
        _refuse_unreadable(module.graph)
        _drop_dropouts(module.graph)
    module.graph.lint()
    module.recompile()
    signature = program.graph_signature
    _refuse_unseen_writes(module.graph, followed={*signature.inputs_to_parameters, *signature.user_inputs})


def make_differentiable(program: ExportedProgram) -> None:
    """Rewrite what torch's functionalisation makes of a write to a part of a complex tensor: it has no derivative."""
    graph = program.graph
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if facts_of(str(node.target)).real_only and isinstance(value, Tensor) and value.is_complex():
            given: list[Any] = [*node.args, *[0] * (3 - len(node.args))]
            whole, part, dim, *others = given
            with graph.inserting_before(node):
                pieces = [_added(graph, node, _TO_REAL, _added(graph, node, _PLAIN, piece)) for piece in (whole, part)]
                real = _added(graph, node, node.target, *pieces, dim % value.ndim, *others, **node.kwargs)
                made = _added(graph, node, torch.ops.aten.view_as_complex.default, real)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _added(graph: Graph, like: Node, operator: Any, *arguments: Any, **named: Any) -> Node:
    node = graph.call_function(operator, arguments, named)
    values = [argument.meta["val"] if isinstance(argument, Node) else argument for argument in arguments]
    node.meta = {**like.meta, "val": operator(*values, **named)}
    return node


def _refuse_unreadable(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not isinstance(node.target, OpOverload) and node.target not in _PYTHONS:
            name = getattr(node.target, "__name__", str(node.target)).strip("_")
            what = "torch.vmap or another transform of torch.func" if name in _TRANSFORMS else name
            raise CaptureError(
                f"the network uses {what}{line_of(node)}, which a plan cannot follow.",
                "Write it with operators on the whole batch, or leave that part outside of shoal.parallelize.",
            )
        values = node.meta.get("val")
        for value in values if isinstance(values, list | tuple) else [values]:
            if isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape):
                raise CaptureError(
                    f"the shape of a tensor depends on values{line_of(node)}: the result of {node.target}.",
                    "Keep the shape fixed (torch.where, a mask that is multiplied, topk with a fixed k), or leave that "
                    "part of the network outside of shoal.parallelize.",
                )


def _inline_regions(module: GraphModule) -> None:
    """Write the lines of inner graphs into the outer one."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (_SET_GRAD, _AUTOCAST):
            continue
        if node.target is _SET_GRAD:
            enabled, region, *arguments = node.args
            casting = OFF
        else:
            device, dtype, on, _, region, *arguments = node.args
            enabled, casting = True, Region(device, dtype, on)
        inner: GraphModule = getattr(module, region.target)
        _inline_regions(inner)
        with graph.inserting_before(node):
            results = _copied(inner.graph, graph, arguments, no_grad=not enabled, casting=casting)
            if not enabled:
                results = [_detached(graph, result) for result in results]
        for user in list(node.users):  # one getitem for each result
            user.replace_all_uses_with(results[user.args[1]], propagate_meta=False)
            graph.erase_node(user)
        graph.erase_node(node)
        if not region.users:
            graph.erase_node(region)


def _copied(inner: Graph, outer: Graph, arguments: Sequence[Any], *, no_grad: bool, casting: Region = OFF) -> list[Any]:
    """The lines of `inner`, written into `outer`; what they return."""
    given = iter(arguments)
    copies: dict[Node, Any] = {}
    for node in inner.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op == "call_function":
            casts = {} if node.meta.get(_CAST) else casts_of(node, casting)
            here = {**copies, **{old: _cast(outer, copies[old], dtype, node) for old, dtype in casts.items()}}
            copies[node] = outer.node_copy(node, here.__getitem__)
            copies[node].meta.setdefault(_NO_GRAD, no_grad)
            copies[node].meta[_CAST] = node.meta.get(_CAST, casting is not OFF)  # the innermost autocast counts
        elif node.op == "output":
            return [copies[value] if isinstance(value, Node) else value for value in node.args[0]]
    raise AssertionError("a graph ends with its output")


def _cast(graph: Graph, value: Node, dtype: torch.dtype, reader: Node) -> Node:
    node = graph.call_function(torch.ops.aten.to.dtype, (value, dtype))
    node.meta = {"val": value.meta["val"].to(dtype), "stack_trace": reader.meta.get("stack_trace"), _CAST: True}
    return node


def _detached(graph: Graph, value: Any) -> Any:
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    if not isinstance(tensor, Tensor):
        return value
    node = graph.call_function(torch.ops.aten.detach.default, (value,))
    node.meta = {**value.meta, _NO_GRAD: True}
    return node


def _drop_dropouts(graph: Graph) -> None:
    for node in list(graph.nodes):
        if facts_of(str(node.target)).idle(arguments_of(node)):
            source = node.args[0]
            _share_memory(node, source)
            node.replace_all_uses_with(source, propagate_meta=False)
            graph.erase_node(node)


def _share_memory(supposed_copy: Node, source: Node) -> None:
    """Let everything that named the supposed copy's memory name the source's instead."""
    memory, tensor = memory_of(supposed_copy), source.meta["val"]
    for node in supposed_copy.graph.nodes:
        if memory_of(node) == memory:
            view = node.meta["val"]
            node.meta["val"] = tensor.as_strided(view.shape, view.stride(), view.storage_offset())


def _refuse_unseen_writes(graph: Graph, followed: set[str]) -> None:
    """`followed`: names of the inputs that may need a gradient, which are parameters and the caller's tensors."""
    seen: set[Node] = set()
    """Tensors that autograd follows."""
    blind: set[Node] = set()
    """Names of memory through which autograd sees nothing: `detach`, and views of it."""
    names: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for memory in changed_memory(node):
            unseen = node.meta.get(_NO_GRAD) or any(argument in blind for argument in written_nodes(node))
            if unseen and any(name in seen for name in names[memory]):
                raise CaptureError(
                    f"the network changes a tensor in place where autograd does not see it{line_of(node)}.",
                    "Write the new values to a new tensor (y = y.clamp(0) instead of y.clamp_(0)), or change it "
                    "outside of the network.",
                )
        if _is_seen(node, seen, followed):
            seen.add(node)
            for memory in changed_memory(node):  # what is written into a tensor, all its names have
                seen.update(name for name in names[memory] if name not in blind)
        elif facts_of(str(node.target)).detaches or any(argument in blind for argument in node.all_input_nodes):
            blind.add(node)
        memory_here = memory_of(node)
        if memory_here is not None:
            names.setdefault(memory_here, []).append(node)


def _is_seen(node: Node, seen: set[Node], followed: set[str]) -> bool:
    """Whether autograd follows a node's result, which it does as soon as it follows one argument."""
    value = node.meta.get("val")
    exact = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    if exact or facts_of(str(node.target)).detaches or node.meta.get(_NO_GRAD):
        return False
    return node.name in followed if node.op == "placeholder" else any(source in seen for source in node.all_input_nodes)
