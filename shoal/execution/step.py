"""One pass of a parallel network as autograd sees it: one node whose inputs are the network's inputs and parameters.

Promise   what autograd promises of any node: gradients reach exactly the tensors that a backward pass asks for, hooks
          on them fire, nothing else is written. Parameters get the gradient of the mean of the ranks' losses, weighted
          by their samples; an input gets that of this rank's own loss.
Failure   a second derivative, a second backward pass through one forward pass, and backward passes that are not the
          same on all ranks are a `RunError` on all of them.
Cost      one gather of 64 bytes for each backward pass, beside what the plan moves.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.errors import RunError
from shoal.execution.engine import Tape
from shoal.execution.variants import Ready, Variant
from shoal.transport import Transport

if TYPE_CHECKING:
    from shoal.execution.module import ParallelModule

_TOLD_RESULTS = 50
"""Of so many results ranks tell which have a gradient: what fits into a number. With more, all are taken to."""


@dataclass(frozen=True)
class Request:
    """What the ranks have agreed to run."""

    variant: Variant
    ready: Ready
    inputs: Mapping[str, Tensor]
    input_grads: frozenset[str]
    """Inputs of which some rank wants the gradient."""
    targets: float | None
    """With a loss: what the sum of this rank's losses is divided by."""
    weights: tuple[float, ...]
    """For every result what its gradient is multiplied by: this rank's weight in the mean over ranks."""
    sync: bool
    """Whether gradients are summed over the ranks."""


@dataclass(frozen=True)
class Asked:
    """Which parameters a backward pass asks for."""

    names: frozenset[str]
    accumulated: frozenset[str]
    """Those whose gradient goes to their `.grad`; that of the others is the caller's."""
    hooked: frozenset[str] = frozenset()
    """Those on which some rank has a hook, which is to see the new gradient alone."""
    results: frozenset[str] | None = None
    """The results that some rank has a gradient of; None: all of them."""


class Step(torch.autograd.Function):
    """One forward pass. Its arguments behind `names`: the inputs, then the parameters of these names."""

    @staticmethod
    def forward(
        ctx: Any, module: "ParallelModule", request: Request, names: tuple[str, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Run it; what is not differentiable is marked so."""
        results, tape = module._run(request, record=True)
        ctx.module, ctx.request, ctx.tape, ctx.names = module, request, tape, names
        ctx.number = module._next_number()
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.set_materialize_grads(False)
        flowing = [fetch.value in tape.route.grads_for for fetch in tape.program.outputs]
        given = [tensor.data_ptr() for tensor in request.inputs.values()]
        results = [result.clone() if result.data_ptr() in given else result for result in results]
        ctx.mark_non_differentiable(*(one for one, flows in zip(results, flowing, strict=True) if not flows))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients that the pass asks for. A collective."""
        module, request, tape = ctx.module, ctx.request, ctx.tape
        count = len(request.inputs)
        nodes = [node for node, _ in ctx.next_functions]
        found = {name: _asked(node) for name, node in zip(ctx.names, nodes[count:], strict=True)}
        asked = Asked(
            frozenset(name for name, (wanted, _) in found.items() if wanted),
            frozenset(name for name, (wanted, own) in found.items() if wanted and own),
        )
        hooked = [name for name in asked.accumulated if module._states[name]._backward_hooks]
        sizes = [module._states[name].shape for name in ctx.names]
        if module._now.ended or sizes != ctx.shapes[count:]:
            raise RunError(
                "the network was laid over the ranks anew between this forward pass and its backward pass.",
                "Call backward before shoal.parallelize takes the module over again.",
            )
        asked = _agreed(module._transport, ctx.number, tape, asked, hooked, grads)
        inputs, states = module._backward(tape, request, grads, asked)
        wanted = [_asked(node)[0] for node in nodes[:count]]
        reached = tape.route.grads_for if asked.results is None else tape.program.behind(asked.results)
        first = [
            _or_zeros(inputs.get(name), tensor) if asks and name in reached else None
            for (name, tensor), asks in zip(request.inputs.items(), wanted, strict=True)
        ]
        return None, None, None, *first, *(states.get(name) for name in ctx.names)


def _agreed(
    transport: Transport, number: int, tape: Tape, asked: Asked, hooked: Sequence[str], grads: Sequence[Tensor | None]
) -> Asked:
    """What all ranks ask for; refused on all where one must not ask, or where they differ. A collective."""
    wanted = sorted(asked.names), sorted(asked.accumulated)
    digest = float(zlib.crc32(repr(wanted).encode()))
    given = sum(1 << place for place, grad in enumerate(grads[:_TOLD_RESULTS]) if grad is not None)
    table = transport.header("backward", [number, torch.is_grad_enabled(), tape.used, digest, bool(hooked), given])
    numbers, second, used, digests, hooks, results = zip(*table, strict=True)
    if any(second):
        raise RunError(
            "create_graph=True asks for a second derivative through a network that is laid over ranks, "
            "which it does not have.",
            "Take gradient penalties (WGAN-GP, R1) and the like on the plain module, or approximate them by finite "
            "differences of two calls.",
        )
    if len(set(numbers)) > 1:
        rank = next(rank for rank, other in enumerate(numbers) if other != numbers[0])
        raise RunError(
            f"rank 0 goes back through forward pass {numbers[0]:.0f} while rank {rank} goes back through pass "
            f"{numbers[rank]:.0f}.",
            "Call backward in the same order on all ranks.",
        )
    if any(used):
        raise RunError("backward ran twice through one forward pass.", "Call the model again before each backward.")
    if len(set(digests)) > 1:
        told = transport.gather_objects(wanted)
        rank = next(rank for rank, other in enumerate(told) if other != told[0])
        names = [set(told[0][kind]) ^ set(told[rank][kind]) for kind in (0, 1)]
        raise RunError(
            f"rank 0 and rank {rank} ask for the gradients of different parameters: "
            f"{min(names[0] or names[1])!r} on one of them only.",
            "Call backward(), backward(inputs=...) or torch.autograd.grad with the same parameters on all ranks.",
        )
    tape.used = True
    everyones = transport.gather_objects(list(hooked)) if any(hooks) else []
    outputs = tape.program.graph.outputs
    have = [name for place, name in enumerate(outputs) if any(int(bits) >> place & 1 for bits in results)]
    return replace(
        asked,
        hooked=frozenset(name for names in everyones for name in names),
        results=None if len(have) == len(outputs) or len(outputs) > _TOLD_RESULTS else frozenset(have),
    )


def _asked(node: Any) -> tuple[bool, bool]:
    """(whether the backward pass that runs wants a gradient from here, whether it ends in `.grad`)."""
    if node is None:
        return False, False
    try:
        return torch._C._will_engine_execute_node(node), True
    except RuntimeError:  # a leaf that torch.autograd.grad asks for, of which torch says so in this way
        return True, False


def _or_zeros(grad: Tensor | None, tensor: Tensor) -> Tensor:
    """A gradient of the input's shape: a rank may have passed something of which nobody reads a part."""
    return torch.zeros_like(tensor) if grad is None else grad.to(tensor.dtype)


def results_of(request: Request, tape: Tape, tiles: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
    """What this rank returns, from its tiles of the results: with a loss, the loss of its share."""
    results = []
    for fetch, tile in zip(tape.program.outputs, tiles, strict=True):
        if tile is None:
            shape = list(tape.program.graph.specs[fetch.value].shape)
            shape[_emptied(tape, fetch.value)] = 0
            tile = torch.empty(shape, dtype=tape.types[fetch.value], device=device)
        results.append(tile)
    if request.targets is None:
        return results
    total = results[0].sum()
    return [total / request.targets if request.targets else total]


def _emptied(tape: Tape, name: str) -> int:
    """The dim in which a rank without samples has none."""
    return tape.program.graph.batch_dim(name) or 0


def seeds_of(request: Request, tape: Tape, grads: Sequence[Tensor | None], rank: int) -> list[Tensor | None]:
    """The gradients of this rank's tiles of the results, weighted."""
    found: list[Tensor | None] = []
    for fetch, grad, weight in zip(tape.program.outputs, grads, request.weights, strict=True):
        tile = fetch.tiles[rank]
        if tile is None or grad is None:
            found.append(None)
        else:
            found.append((grad * weight).to(tape.types[fetch.value]).expand(tile.shape))
    return found
