"""Let an eager module draw the random masks that the engine draws: those of (seed, layer, step).

An eager pass reaches its random operators in the order in which the captured network has them, so the i-th draw is
the i-th random layer's. All of them are masks of ones and zeros, since capture refuses other draws. A network that
draws on its own in another way is refused, not compared with masks of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import ModelError
from shoal.execution.randomness import LayerRandom
from shoal.graph import Layer, LayerGraph
from shoal.lowering.placement import op_of
from shoal.operators.registry import draws, facts_of
from shoal.partition import whole


@contextmanager
def drawing_as(graph: LayerGraph, *, seed: int, step: int) -> Iterator[None]:
    """Within, one eager forward pass draws what the engine draws in this step."""
    layers = [layer for layer in graph.layers if draws(op_of(layer, graph).operator, layer.arguments)]
    with _Draws(layers, seed, step) as mode:
        yield
    if mode.taken != len(layers):
        raise _unlike(f"{mode.taken} times on its own, {len(layers)} times as it was captured")


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
    def __init__(self, layers: list[Layer], seed: int, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers, self.seed, self.step = layers, seed, step
        self.taken = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {schema.name: value for schema, value in zip(func._schema.arguments, args, strict=False)}
        given.update(kwargs or {})
        if not draws(func, given):
            return func(*args, **(kwargs or {}))
        if self.taken == len(self.layers):
            raise _unlike(f"with {func} where its captured form draws nothing")
        layer = self.layers[self.taken]
        self.taken += 1
        keep = given.get("p", 0.5)  # the schema's default is left out
        if not facts_of(str(func)).masks or not func._schema.is_mutable or isinstance(keep, Tensor):
            raise _unlike(f"with {func} where layer {layer.name!r} is {layer.op}")
        noise: Tensor = args[0]
        random = LayerRandom(self.seed, layer.name, self.step)
        return noise.copy_(random.box(tuple(noise.shape), whole(noise.shape), keep=keep, like=noise))


def _unlike(how: str) -> ModelError:
    return ModelError(
        f"the network draws random numbers {how}, so it cannot be compared with one device.",
        "Draw with nn.Dropout and its kin, or leave the random part out for verifying (such as dropout=0).",
    )
