"""Layers of a network that runs as it is, on one device: noted by hooks, which are there only while it is recorded.

Forward, a layer (a module without modules in it) lasts from its call to its return. Backward, it lasts from when
autograd begins with it until autograd begins with the next one, or is done; so what the network's own code does between
layers counts to the layer that autograd came from. No hook changes a tensor or the graph.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.diary import Diary, now


class LayerNotes:
    """Notes the layers of `module` in `diary` until it is closed."""

    def __init__(self, module: nn.Module, diary: Diary) -> None:
        self._diary = diary
        self._begun: dict[str, int] = {}
        self._back: tuple[str, int] | None = None
        """The layer that goes back now, and since when."""
        self._handles = [
            handle
            for name, layer in module.named_modules()
            if next(layer.children(), None) is None
            for handle in (
                layer.register_forward_pre_hook(partial(self._before, name)),
                layer.register_forward_hook(partial(self._after, name)),
            )
        ]

    def _before(self, name: str, *_: Any) -> None:
        self._begun[name] = now()

    def _after(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        self._diary.note("forward", name, self._begun.pop(name))
        result = output if isinstance(output, Tensor) else None
        if result is not None and result.grad_fn is not None:
            result.grad_fn.register_prehook(self._going_back(name))

    def _going_back(self, name: str) -> Callable[[tuple[Tensor, ...]], None]:
        def hook(_: tuple[Tensor, ...]) -> None:
            if self._back is None:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._end_backward()
            self._back = name, now()

        return hook

    def _end_backward(self) -> None:
        """Note the layer that went back until now."""
        if self._back is not None:
            name, begun = self._back
            self._back = None
            self._diary.note("backward", name, begun)

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
