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

from shoal.diary import BACKWARD_PASS, now
from shoal.errors import RunError
from shoal.execution.around import is_batch_of_gradients, outside_of_transforms
from shoal.execution.cut_parameters import plainly
from shoal.execution.tape import Tape
from shoal.execution.untouched import Change
from shoal.execution.variants import Ready, Variant
from shoal.transport import Transport

if TYPE_CHECKING:
    from shoal.execution.passes import Passes

_TOLD_RESULTS = 50
"""Ranks tell which results have a gradient by one bit each. With more results than this, all are taken to have one."""

_PLAIN, _SECOND, _BATCHED = range(3)
"""Kinds of backward passes: for gradients, for a second derivative, for many gradients at once."""


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
    accumulating: bool = False
    """Whether some rank has gradients of passes before in the `.grad` of one that is to get more."""
    results: frozenset[str] | None = None
    """The results that some rank has a gradient of; None: all of them."""


class Step(torch.autograd.Function):
    """One forward pass. Its arguments behind `names`: the inputs, then the parameters of these names."""

    @staticmethod
    def forward(
        ctx: Any, passes: "Passes", request: Request, names: tuple[str, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the pass, and mark the results that have no gradient."""
        with plainly():
            results, tape = passes.forward(request, record=True)
            ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.passes, ctx.request, ctx.tape, ctx.names = passes, request, tape, names
        ctx.number = passes.next_number()
        ctx.set_materialize_grads(False)
        flowing = [fetch.value in tape.route.grads_for for fetch in tape.program.outputs]
        given = [tensor.data_ptr() for tensor in request.inputs.values()]
        results = [result.clone() if result.data_ptr() in given else result for result in results]
        ctx.untouched = passes.untouched(request, tape, results)
        ctx.mark_non_differentiable(*(own for own, flows in zip(results, flowing, strict=True) if not flows))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients that the pass asks for. A collective."""
        diary = ctx.passes.transport.diary
        begun = 0 if diary is None else now()
        with plainly():
            returned = Step._backward(ctx, *grads)
        if diary is not None and diary.notes_passes:
            diary.note_pass("backward", BACKWARD_PASS, begun)
        return returned

    @staticmethod
    def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        passes: Passes = ctx.passes
        request, tape = ctx.request, ctx.tape
        count = len(request.inputs)
        nodes = [node for node, _ in ctx.next_functions]
        asked_of = {name: _asked(node) for name, node in zip(ctx.names, nodes[count:], strict=True)}
        asked = Asked(
            frozenset(name for name, (wanted, _) in asked_of.items() if wanted),
            frozenset(name for name, (wanted, own) in asked_of.items() if wanted and own),
        )
        accumulating = request.sync and any(passes.states[name].grad is not None for name in asked.accumulated)
        hooked = [name for name in asked.accumulated if passes.states[name]._backward_hooks]
        sizes = [passes.states[name].shape for name in ctx.names]
        if passes.ended or sizes != ctx.shapes[count:]:
            raise RunError(
                "the network was laid over the ranks anew between this forward pass and its backward pass.",
                "Call backward before shoal.parallelize takes the module over again.",
            )
        passes.copies.note_changes()
        change = ctx.untouched.change(tape, [grad is not None for grad in grads])
        asking = Asking(passes.transport, tape, asked, hooked, grads, change, accumulating=accumulating)
        asking.begin(ctx.number)
        if asking.batched:
            with outside_of_transforms():
                asking.agreed()
        inputs, states = passes.backward(tape, request, grads, asking)
        asked = asking.agreed()
        wanted = [_asked(node)[0] for node in nodes[:count]]
        reached = tape.route.grads_for if asked.results is None else tape.program.behind(asked.results)
        first = [
            _or_zeros(inputs.get(name), tensor) if asks and name in reached else None
            for (name, tensor), asks in zip(request.inputs.items(), wanted, strict=True)
        ]
        return None, None, None, *first, *(states.get(name) for name in ctx.names)


class Asking:
    """A backward pass that the ranks agree on, while each of them begins with it where it can.

    `hooked`: parameters on which this rank has a hook; `grads`: of its results; `change`: what the pass must read
    again and is not what it was; `accumulating`: whether this rank has gradients of passes before.
    """

    def __init__(
        self,
        transport: Transport,
        tape: Tape,
        asked: Asked,
        hooked: Sequence[str],
        grads: Sequence[Tensor | None],
        change: Change | None = None,
        *,
        accumulating: bool = False,
    ) -> None:
        self._transport, self._tape, self._hooked, self._change = transport, tape, hooked, change
        self._wanted = sorted(asked.names), sorted(asked.accumulated)
        self._accumulating = accumulating
        self._given = sum(1 << place for place, grad in enumerate(grads[:_TOLD_RESULTS]) if grad is not None)
        self.asked = asked
        """What is known so far. The rest does not change what a plain pass computes before its first message."""
        self.batched = is_batch_of_gradients(grads)
        unusual = torch.is_grad_enabled() or self.batched or tape.used or bool(hooked) or change is not None
        self.plain = not unusual and len(grads) == 1 and grads[0] is not None
        """Whether this rank can begin before the others have answered."""

    def begin(self, number: int) -> None:
        """Tell the others, as a header; `number`: of the forward pass."""
        digest = float(zlib.crc32(repr(self._wanted).encode()))
        kind = _SECOND if torch.is_grad_enabled() else _BATCHED if self.batched else _PLAIN
        changed = 0 if self._change is None else 2 if self._change.always else 1
        unusual = bool(self._hooked) + 2 * self._accumulating
        row = [number, kind, self._tape.used, digest, unusual, self._given, changed]
        with outside_of_transforms():
            self._transport.header_later("backward", row, self._check)

    def agreed(self) -> Asked:
        """What all ranks ask for; refused on all where one must not ask, or where they differ. A collective."""
        self._transport.read_header()
        return self.asked

    def _check(self, table: Sequence[Sequence[float]]) -> None:
        numbers, kinds, used, digests, unusual, results, changed = zip(*table, strict=True)
        if _BATCHED in kinds:
            raise RunError(
                "a backward pass with many gradients at once (torch.vmap, is_grads_batched=True, vectorize=True) "
                "cannot go through a network that is laid over ranks.",
                "Call the model and backward once for each of them.",
            )
        if _SECOND in kinds:
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
        if max(changed) > (1 if len(set(results)) == 1 else 0):
            everyones = self._transport.gather_objects(self._change)
            rank, change = next((rank, change) for rank, change in enumerate(everyones) if change is not None)
            raise RunError(
                change.told(rank),
                "Change it after backward, or a clone of it; call the model again after optimizer.step() and "
                "load_state_dict().",
            )
        if len(set(digests)) > 1:
            told = self._transport.gather_objects(self._wanted)
            rank = next(rank for rank, other in enumerate(told) if other != told[0])
            names = [set(told[0][kind]) ^ set(told[rank][kind]) for kind in (0, 1)]
            raise RunError(
                f"rank 0 and rank {rank} ask for the gradients of different parameters: "
                f"{min(names[0] or names[1])!r} on one of them only.",
                "Call backward(), backward(inputs=...) or torch.autograd.grad with the same parameters on all ranks.",
            )
        hooks = any(int(bits) & 1 for bits in unusual)
        hooked = self._transport.gather_objects(list(self._hooked)) if hooks else []
        outputs = self._tape.program.graph.outputs
        have = [name for place, name in enumerate(outputs) if any(int(bits) >> place & 1 for bits in results)]
        self.asked = replace(
            self.asked,
            hooked=frozenset(name for names in hooked for name in names),
            accumulating=any(int(bits) & 2 for bits in unusual),
            results=None if len(have) == len(outputs) or len(outputs) > _TOLD_RESULTS else frozenset(have),
        )


def _asked(node: Any) -> tuple[bool, bool]:
    """(whether the backward pass that runs wants a gradient from here, whether it ends in `.grad`)."""
    if node is None:
        return False, False
    try:
        return torch._C._will_engine_execute_node(node), True
    except RuntimeError:  # torch's way to say that torch.autograd.grad asks for this leaf
        return True, False


def _or_zeros(grad: Tensor | None, tensor: Tensor) -> Tensor:
    """The gradient of an input: zeros where no part of the network read what this rank passed."""
    return torch.zeros_like(tensor) if grad is None else grad.to(tensor.dtype)


def results_of(request: Request, tape: Tape, tiles: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
    """What this rank returns, from its tiles of the results: with a loss, the loss of its share."""
    results = []
    for fetch, tile in zip(tape.program.outputs, tiles, strict=True):
        if tile is None:
            shape = list(tape.program.graph.specs[fetch.value].shape)
            shape[_emptied(tape, fetch.value)] = 0
            tile = torch.empty(shape, dtype=tape.types[fetch.value], device=device)
        results.append(tile.clone() if tile._is_view() else tile)  # the caller may change it in place
    if request.targets is None:
        return results
    total = results[0].sum()
    return [total / request.targets if request.targets else total]


def _emptied(tape: Tape, name: str) -> int:
    """The dim that has length 0 on a rank without samples."""
    return tape.program.graph.batch_dim(name) or 0


def seeds_of(request: Request, tape: Tape, grads: Sequence[Tensor | None], rank: int) -> list[Tensor | None]:
    """The gradients of this rank's tiles of the results, weighted."""
    seeds: list[Tensor | None] = []
    for fetch, grad, weight in zip(tape.program.outputs, grads, request.weights, strict=True):
        tile = fetch.tiles[rank]
        if tile is None or grad is None:
            seeds.append(None)
        else:
            seeds.append((grad * weight).to(tape.types[fetch.value]).expand(tile.shape))
    return seeds
