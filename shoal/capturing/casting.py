"""torch.autocast inside of a network: its casts, made explicit.

Which operators autocast lowers is torch's own knowledge. So each operator of the region is run on shapes under that
autocast, and the casts that it makes of its arguments are seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.capturing.place import line_of
from shoal.errors import CaptureError
from shoal.operators.registry import facts_of


@dataclass(frozen=True)
class Region:
    """One `with torch.autocast(...)`."""

    device: str
    dtype: torch.dtype | None
    enabled: bool

    @contextmanager
    def on(self) -> Iterator[None]:
        """As in the network, but without its memory of casts."""
        with torch.autocast(self.device, self.dtype, self.enabled, cache_enabled=False):
            yield


OFF = Region("cpu", None, enabled=False)


def casts_of(node: Node, region: Region) -> dict[Node, torch.dtype]:
    """The arguments that the region casts for this operator, and to what.

    An operator that casts in a way that is not a cast of its arguments (one that is made of others) is refused.
    """
    if not region.enabled or not isinstance(node.target, torch._ops.OpOverload):
        return {}
    casts, result = _seen(node, region)
    try:
        same = _types(_seen(node, OFF, casts)[1]) == _types(result)
    except RuntimeError:  # it mixes types, which only an autocast inside of it brings together
        same = False
    if not same:
        raise CaptureError(
            f"the network uses {node.target} under torch.autocast{line_of(node)}, whose casts cannot be followed.",
            "Put torch.autocast around the call of the network, not inside of it, or cast by x.to(dtype).",
        )
    return casts


def _seen(
    node: Node, region: Region, casts: dict[Node, torch.dtype] | None = None
) -> tuple[dict[Node, torch.dtype], Any]:
    """(casts of arguments, results) of one operator, run on shapes with some arguments cast before."""
    nodes = list(node.all_input_nodes)
    mode = detect_fake_mode([source.meta.get("val") for source in nodes])
    if mode is None:  # nothing to cast
        return {}, None
    with mode, torch.no_grad():
        values = {source: _copy(source.meta["val"], (casts or {}).get(source)) for source in nodes}
        arguments = pytree.tree_map(lambda leaf: values[leaf] if isinstance(leaf, Node) else leaf, node.args)
        named = pytree.tree_map(lambda leaf: values[leaf] if isinstance(leaf, Node) else leaf, node.kwargs)
        with _Casts() as seen, region.on():
            target: Any = node.target
            result = target(*arguments, **named)
    return {source: seen.made[id(value)] for source, value in values.items() if id(value) in seen.made}, result


def _types(values: Any) -> list[torch.dtype]:
    return [value.dtype for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _copy(value: Any, dtype: torch.dtype | None) -> Any:
    return torch.empty_like(value, dtype=dtype) if isinstance(value, Tensor) else value


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every cast."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if facts_of(str(func)).casts and result.dtype != args[0].dtype:
            self.made[id(args[0])] = result.dtype
        return result
