"""torch.export without the work whose results nobody here reads: it makes the same graph, sooner.

    Python code of a graph       written anew after each of torch's passes; graphs are read here, not run, so it waits
                                 until somebody asks for it
    `tensor_meta` of a node      what `val` says too
    a node's stack               the network's own lines and those of torch's layers, without the hundred around them
    the network's inputs         noted while torch's functions are watched, which makes every look at a tensor slow
    bindings of symbols          looked for in every node, also where there is no symbol at all
    Python's own collector       runs hundreds of times, and finds next to nothing

What torch does in a thread that captures nothing meanwhile is as ever.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any

import torch
from torch.fx import GraphModule, proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor

from shoal.capturing.place import CAPTURING, LAYERS, TORCH, TRACING
from shoal.capturing.replacing import here, replaced
from shoal.uncollected import uncollected


@contextmanager
def lean() -> Iterator[None]:
    """Within, this thread's traces do nothing in vain."""
    from torch.export import _trace  # it loads much, which only a capture needs

    with ExitStack() as stack:
        stack.enter_context(uncollected())
        stack.enter_context(_use_lazy_graph_module(True))
        stack.enter_context(replaced(proxy, "CapturedTraceback", _Stack))
        for owner, name, own in (
            (proxy_tensor, "_extract_tensor_metadata", _no_summary),
            (proxy_tensor, "track_tensor_tree", _unwatched),
            (_trace, "_replace_unbacked_bindings", _where_symbols_are),
        ):
            plain = getattr(owner, name)
            stack.enter_context(replaced(owner, name, here(partial(own, plain), plain)))
        yield


def _no_summary(_plain: Callable[..., Any], *_: Any, **__: Any) -> None:
    """In the place of a node's `tensor_meta`."""


def _unwatched(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As it is where torch notes the result of an operator."""
    with torch._C.DisableTorchFunction():
        return plain(*args, **kwargs)


def _where_symbols_are(plain: Callable[[GraphModule], None], module: GraphModule) -> None:
    from torch._export.utils import _get_shape_env_from_gm

    shapes = _get_shape_env_from_gm(module)
    if shapes is not None and shapes.var_to_range:
        plain(module)


class _Stack:
    """In the place of torch's `CapturedTraceback`, as far as torch.fx uses it."""

    @staticmethod
    def extract() -> "_Stack":
        return _Stack()

    def summary(self) -> StackSummary:
        """The frames that lead to this node and that `place.line_of` may name, outermost first."""
        frames = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and (file := frame.f_code.co_filename) != TRACING:  # from there on it is the caller's
            name = frame.f_code.co_name
            if name == "forward" or _tells(file):  # torch.fx keeps no frame outside of the first `forward`
                frames.append(FrameSummary(file, frame.f_lineno, name, lookup_line=False))
            frame = frame.f_back
        return StackSummary.from_list(frames[::-1])


@cache
def _tells(file: str) -> bool:
    return file.startswith(LAYERS) or not file.startswith((TORCH, CAPTURING))
