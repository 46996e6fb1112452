"""One rank's part of a network, as an nn.Module for an ordinary training loop."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch._compile import _disable_dynamo

from shoal.building import Draft
from shoal.capturing.signature import Call, bind
from shoal.diary import FORWARD_PASS, now
from shoal.errors import ConfigError, RunError
from shoal.execution.around import outside_of_transforms, problem_around, refuse_writing_down, writing_down
from shoal.execution.autograd_node import Step
from shoal.execution.calling import Caller, Laying
from shoal.execution.cut_parameters import plainly
from shoal.execution.engine import Engine
from shoal.execution.factors import choose_factors
from shoal.execution.gradients import PURPOSE as GRADIENT
from shoal.execution.passes import Passes
from shoal.execution.states import Shard, keep_state_dicts_whole, shard_tree
from shoal.execution.tree import Tree
from shoal.execution.variants import Form, Variant
from shoal.lowering.boundary import Boundary, even_shares, own_inputs
from shoal.lowering.owners import OptimizerState, cut_homes
from shoal.lowering.placement import sharers
from shoal.lowering.program import state_homes
from shoal.moves import Layout
from shoal.plan import FactorsOption, Plan, steps_in_laps
from shoal.planning import Resolved
from shoal.traffic import Sent


@dataclass
class _Switches:
    """What a script sets between passes."""

    flag: int = 0
    sync: bool = True


class ParallelModule(nn.Module):
    """One rank's part of a network; made by `shoal.parallelize`.

    It shows the tree of the module that it was made of: `model.module`, the same children, the same parameters and
    buffers under the same names, each this rank's shard. After `backward()` each parameter holds the gradient of the
    mean of the ranks' losses, weighted by their samples. `state_dict()` and `load_state_dict()` are whole.
    """

    def __init__(
        self,
        root: nn.Module,
        forms: Mapping[bool, Form],
        resolved: Mapping[bool, Resolved],
        call: Call | None,
        laying: Laying,
        *,
        engine: Engine,
        boundary: Boundary,
        bucket_bytes: int | None,
        factors: FactorsOption,
        optimizer_state: OptimizerState,
        in_place: bool,
        draft: Draft | None = None,
    ) -> None:
        super().__init__()
        transport = engine.transport
        self._engine, self._transport = engine, transport
        self._plan = resolved[True].plan(transport.world, also=resolved[False].cuts)
        self._switches = _Switches()
        first = {mode: Variant(form, resolved[mode]) for mode, form in forms.items()}
        shares = even_shares(forms[True].graph.batch, transport.world)
        first[True].lapped(shares, boundary)  # refused while the module is whole
        uses = state_homes(*(first[mode].program(shares, boundary) for mode in (True, False)))
        learning = {name for name, parameter in root.named_parameters() if parameter.requires_grad}
        homes = cut_homes(uses, learning) if optimizer_state == "cut" else uses
        self._states = shard_tree(root, homes, transport, uses=uses, in_place=in_place, draft=draft)
        example = call or bind(root, [torch.empty(0) for _ in own_inputs(forms[False].graph)], {})
        tree = Tree(root, laying.loss)
        self._caller = Caller(
            tree, self._states, transport, boundary, laying, engine.device, first, example, engine.local_statistics
        )
        transport.make_groups(
            [(GRADIENT, ranks) for layout in self._states.layouts.values() for ranks in sharers(layout).values()]
        )
        for variant in first.values():
            self._caller.prepare(variant, shares)
        program = self._caller.prepare(first[True], shares).program
        factors = "never" if resolved[True].laps is not None else factors
        factored = choose_factors(program, homes, self._states.tensors(), factors, transport)
        self._plan = replace(self._plan, factors=factored, recompute=engine.recompute)
        self._passes = Passes(self._caller, engine, bucket_bytes, factored)
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []  # that have stepped, in the order of all ranks
        self._before_whole: list[Callable[[ParallelModule], None]] = []
        cut = self._states.cut_leaves()
        undo = _when_alive(self, ParallelModule._make_whole)
        self._handles = [
            *keep_state_dicts_whole(root, self._states, transport),
            *tree.guard({path: next(iter(own.values())) for path, own in cut.items()}, undo),
        ]
        self._tree = tree
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = root.__dict__[kind]  # from here on our tree is the user's own

    # What people use

    @property
    def module(self) -> nn.Module:
        """The network that was laid over the ranks; its parameters are this rank's shards."""
        return self._tree.root

    @property
    def cuts_parameters(self) -> bool:
        """Whether some rank holds less than all of some parameter or buffer."""
        return bool(self._states.cut_leaves())

    @property
    def cuts_optimizer_state(self) -> bool:
        """Whether ranks that read the same part of a parameter keep, and step over, some rows of it each."""
        return any(self._states.layouts[name] != use for name, use in self._states.uses.items())

    @property
    def plan(self) -> Plan:
        """The plan as it was laid, one line per layer; `plan.save(path)` keeps it."""
        return self._plan

    @property
    def bucket_bytes(self) -> int:
        """Bytes of gradients that are summed at a time: given, or measured on the link."""
        return self._passes.bucket_bytes

    @property
    def training(self) -> bool:
        """Whether the module itself is in training."""
        tree = self.__dict__.get("_tree")
        return True if tree is None else bool(tree.root.training)

    @training.setter
    def training(self, mode: bool) -> None:
        tree = self.__dict__.get("_tree")
        if tree is not None:
            tree.root.training = mode

    @property
    def flag(self) -> int:
        """Bits that are set on any rank before a forward pass are in `flagged` on all ranks after it, at no cost."""
        return self._switches.flag

    @flag.setter
    def flag(self, value: int) -> None:
        self._switches.flag = value

    @property
    def flagged(self) -> int:
        """Bits that some rank had set in its flag before the last forward pass."""
        return self._caller.flagged

    @property
    def loss_share(self) -> float | None:
        """What this rank's loss weighed in the mean over the batch at the last forward pass, all ranks together 1.

        None where the loss was no mean over samples: then every rank has the loss of the whole batch.
        """
        return self._caller.loss_share

    @property
    def steps(self) -> int:
        """Forward passes in training so far; dropout's masks depend on it. Set it to go on with a stopped run."""
        return self._passes.training_passes

    @steps.setter
    def steps(self, value: int) -> None:
        self._passes.training_passes = value

    def train(self, mode: bool = True) -> "ParallelModule":
        """Set training mode, or evaluation mode, in all modules of the network."""
        self._tree.root.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network returns for this rank's part of the batch; in training with a loss, the loss of its share.

        A collective: all ranks call it, each with its own samples (or the whole, or its tile, as io says).
        """
        if not torch.compiler.is_dynamo_compiling():  # whose graphs end here: what follows runs as it is
            refuse_writing_down()  # before a look at the arguments, which torch.fx does not allow
        return self._forward(args, kwargs)

    @_disable_dynamo
    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        diary = self._transport.diary
        if diary is None or not diary.notes_passes:
            return self._run(args, kwargs)
        begun = now()
        returned = self._run(args, kwargs)
        diary.note_pass("forward", FORWARD_PASS, begun)
        return returned

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._passes.ended:
            raise RunError(
                "this network was laid over the ranks anew by a later shoal.parallelize of the same module.",
                "Use what that call returned.",
            )
        problem = problem_around((args, kwargs))
        if problem is not None:
            with outside_of_transforms():
                self._caller.refuse(problem, flag=self._switches.flag)
        request = self._caller.agree(args, kwargs, flag=self._switches.flag, sync=self._switches.sync)
        learning = self._states.learning(request.ready.first_uses)
        if torch.is_grad_enabled() and (request.input_grads or learning):
            results = Step.apply(  # type: ignore[no-untyped-call]
                self._passes, request, tuple(learning), *request.inputs.values(), *learning.values()
            )
        else:
            with plainly():
                results = self._passes.forward(request, record=False)[0]
        return request.variant.form.returned.build(results)

    def after_lap(self, step: Callable[[], object]) -> None:
        """With a plan whose linear layers step after every lap (`owt:b1`, `owt:c1`): say what steps them.

        `step()` is called on every rank after each lap of a training pass with a loss, within the call of the network.
        Then the linear layers' parameters have their gradients, of the mean loss of the lap's samples, and all others
        none, so that `optimizer.step` of an optimizer of all parameters is right: it passes over what has no gradient.
        After `backward()` the others have theirs, for the step as always, and the linear layers none.
        """
        if not steps_in_laps(self._plan.laps):
            raise ConfigError(
                f"under plan {self._plan.name!r} all weights step once a step, not after laps.",
                "Lay the network by 'owt:b1' or 'owt:c1', or leave after_lap out.",
            )
        self._passes.after_lap = step

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of passes begun inside stay this rank's own; the next one outside averages what accumulated."""
        before, self._switches.sync = self._switches.sync, False
        try:
            yield
        finally:
            self._switches.sync = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own: its keys and whole tensors. Where the plan cuts any, a collective that all ranks call."""
        return self._tree.root.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of the module, of whole tensors; each rank takes its shards."""
        if assign:
            raise RunError(
                "load_state_dict(assign=True) would put other parameters in the place of those that are laid over the "
                "ranks.",
                "Load without assign, or load into the module before shoal.parallelize.",
            )
        return self._tree.root.load_state_dict(state_dict, strict)

    def shards(self) -> dict[str, Shard]:
        """This rank's part of every parameter and buffer, by name, and where it lies in the whole one."""
        return self._states.shards()

    def input_tile(self, batch: int) -> Any:
        """With io="tile": the box that this rank passes of a batch of so many samples, in the present mode.

        None where it passes nothing. For several inputs a tuple, in the order of `forward`'s arguments.
        """
        boxes = self._caller.mode.input_boxes(batch, self._transport.rank, self._transport.world)
        return boxes if len(boxes) > 1 else boxes[0]

    def output_tile(self, batch: int) -> Any:
        """With io="tile": this rank's box of the result of such a batch, and of the target where there is a loss.

        None where it gets nothing. Of several results their boxes, in the tuple, dict or whatever the network returns.
        """
        variant = self._caller.mode
        return variant.form.returned.build(variant.output_boxes(batch, self._transport.rank, self._transport.world))

    @property
    def input_box(self) -> Any:
        """`input_tile` of the batch that the network was captured with."""
        return self.input_tile(self._caller.mode.form.graph.batch)

    @property
    def output_box(self) -> Any:
        """`output_tile` of the batch that the network was captured with."""
        return self.output_tile(self._caller.mode.form.graph.batch)

    def value_layout(self, layer: str) -> Layout:
        """Which box of a layer's output each rank holds, in the present mode, for the captured batch."""
        return self._passes.captured(training=self.training).program.layouts[layer]

    @property
    def counted(self) -> Mapping[str, Sent]:
        """Payload that this rank has sent so far, by layer."""
        return dict(self._transport.counted)

    def predicted(self, *, input_grad: bool = False, accumulated: bool = False) -> Mapping[str, Sent]:
        """Payload that this rank sends in one training step of the captured batch, by layer, from the moves alone.

        `accumulated`: where gradients of passes before are there still, with which all gradients are summed.
        """
        return self._passes.predicted(input_grad=input_grad, accumulated=accumulated)

    def extra_repr(self) -> str:
        """What `print(model)` says besides the module's own tree."""
        return f"plan={self._plan.name!r}, rank {self._transport.rank} of {self._transport.world}"

    # The tree is the user's: its names come first, and what is set goes where the network's code reads it

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            root = self.__dict__.get("_tree")
            if root is None or name.startswith("__"):
                raise
            return getattr(root.root, name)

    def __setattr__(self, name: str, value: Any) -> None:
        tree = self.__dict__.get("_tree")
        if tree is not None and isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        elif tree is not None and not name.startswith("_") and name not in self.__dict__ and hasattr(tree.root, name):
            setattr(tree.root, name, value)
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise RunError(
            "a network that is laid over ranks cannot be copied or pickled: it has connections to the others.",
            "Keep model.state_dict(), which is whole and loads into the plain module; or copy the module before "
            "shoal.parallelize.",
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.__deepcopy__(None)

    def __prepare_scriptable__(self) -> NoReturn:
        raise writing_down("torch.jit.script")

    def _make_whole(self) -> None:
        """Give the module its whole tensors back; this network ends. A collective."""
        for prepare in self._before_whole:
            prepare(self)
        for handle in self._handles:
            handle.remove()
        self._states.make_whole(self._transport)
        self._passes.ended = True


def _when_alive(model: ParallelModule, method: Callable[[ParallelModule], None]) -> Callable[[], None]:
    """A call of a network's method that does not keep the network alive."""
    known = weakref.ref(model)

    def call() -> None:
        alive = known()
        if alive is None:
            raise RunError(
                "the module holds the shards of a parallel network that is gone, so that nobody can put them together.",
                "Keep the parallel network until its module is laid over ranks anew, or make a new module.",
            )
        method(alive)

    return call
