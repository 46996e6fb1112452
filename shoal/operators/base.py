"""What an operator rule is.

An operator works through an iteration space: the dims of its output, and the dims that it sums over. A cut
divides this space into parts, one per rank. For a part, a rule answers in integers

    needs    which box of each argument the part reads (halo and true borders included)
    writes   which box of the output it computes; a partial sum where a summed axis is cut

and computes that box from those boxes with plain torch. Everything else that anybody asks about an operator (what it
costs, what it saves, whether it draws) is a fact that its rule states too: adding an operator means adding one rule.
docs/add_an_operator.md shows how.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from shoal.graph import Layer, State, Value
from shoal.operators.user_function import FUNCTION, NAMESPACE, WORD, FunctionOperator, with_whole_gradient
from shoal.partition import Box, Span, volume, whole

_LETTERS = {0: "", 1: "n", 2: "nc", 3: "ncw", 4: "nchw", 5: "ncdhw"}


def letters(ndim: int) -> str:
    """The letter of each dim of a tensor, by position; `-` for a dim that has none and is never cut.

    >>> letters(4), letters(2), letters(6)
    ('nchw', 'nc', 'nc----')
    """
    return _LETTERS.get(ndim, "nc" + "-" * (ndim - 2))


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction in which a layer may be cut."""

    letter: str
    size: int
    grain: int = 1
    """Parts hold multiples of this many rows."""
    summed: bool = False
    """Whether parts along this axis hold partial sums of the same output."""


Part = Mapping[str, Span]
"""For every axis of a layer, by letter, the rows of one part."""


@dataclass(frozen=True, slots=True)
class Need:
    """A box of an argument, and how many rows of padding to lay around it in each dim."""

    box: Box
    pad: tuple[tuple[int, int], ...] = ()
    fill: float = 0.0

    @property
    def padded(self) -> bool:
        """Whether there is any padding."""
        return any(before or after for before, after in self.pad)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tile that a part is given."""
        pad = self.pad or ((0, 0),) * len(self.box)
        return tuple(len(span) + sum(p) for span, p in zip(self.box, pad, strict=True))


Operator = torch._ops.OpOverload | FunctionOperator


@cache
def operator_named(name: str) -> Operator:
    """The torch operator, or the user's own function, that a layer names: `aten.conv2d.default`."""
    namespace, word, overload = name.split(".", 2)
    if (namespace, word) == (NAMESPACE, WORD):
        return FUNCTION
    operator: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), word), overload)
    return operator


@dataclass(frozen=True)
class Op:
    """A layer with the shapes of its tensors at hand."""

    layer: Layer
    shapes: Mapping[str, tuple[int, ...]]
    """Global shape of every tensor argument that is given, by argument name."""

    worked_out: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What rules have worked out about the layer and ask for in every step."""

    def __getitem__(self, argument: str) -> Any:
        return self.layer.arguments[argument]

    @property
    def operator(self) -> Operator:
        """The torch operator itself."""
        return operator_named(self.layer.op)

    @property
    def out(self) -> tuple[int, ...]:
        """Global shape of the output."""
        return self.layer.output.shape

    def output_axes(self, **grains: int) -> tuple[Axis, ...]:
        """One axis per dim of the output that has a letter."""
        return tuple(
            Axis(letter, size, grains.get(letter, 1))
            for letter, size in zip(letters(len(self.out)), self.out, strict=True)
            if letter != "-"
        )

    def output_box(self, part: Part) -> Box:
        """The part's rows of the output, for operators whose axes are the dims of their output."""
        if "dims" not in self.worked_out:
            self.worked_out["dims"] = list(zip(letters(len(self.out)), whole(self.out), strict=True))
        return tuple([part.get(letter, everything) for letter, everything in self.worked_out["dims"]])


class Peers(Protocol):
    """The other parts of the same layer, for operators whose mathematics crosses parts."""

    def sum(self, tensor: Tensor, over: str) -> Tensor:
        """Sum over the parts that differ from this one in the axes `over` only. Differentiable."""
        ...

    def max(self, tensor: Tensor, over: str) -> Tensor:
        """The largest, likewise; carries no gradient."""
        ...

    def sum_now(self, tensor: Tensor, over: str) -> None:
        """The same sum in place, without a gradient: for rules that write their own backward."""
        ...

    def count(self, over: str) -> int:
        """How many parts such a sum joins."""
        ...

    def index(self, over: str) -> int:
        """Which of them this part is."""
        ...


class Random(Protocol):
    """Random draws that depend on seed, layer and step, never on the plan."""

    def box(self, shape: tuple[int, ...], box: Box, *, keep: float, like: Tensor) -> Tensor:
        """The part's box of a mask over the whole shape: 1 with probability `keep`, else 0."""
        ...

    def in_step(self) -> AbstractContextManager[None]:
        """Within, torch's own generators draw the same on every rank; they are left as they were."""
        ...


@dataclass(slots=True)
class Call:
    """One part of one layer, with its tensors. Made for every layer of every step: not frozen, which costs time."""

    op: Op
    part: Part
    cut: frozenset[str]
    """Letters of the axes along which the layer has more than one part."""
    tensors: Mapping[str, Tensor]
    """Tile or shard of every tensor argument that the rule needs, by argument name."""
    peers: Peers
    random: Random
    local_statistics: bool = False
    """Batch norm as DDP has it: over this part's own samples."""
    overwrites: bool = False
    """Whether nobody else reads the first argument, so that the result may be written over it."""

    def torch(self, **changed: Any) -> Tensor:
        """The operator itself on the part's tensors, with some arguments changed."""
        arguments = {
            name: changed[name] if name in changed else self._tensors_in(name, value)
            for name, value in self.op.layer.arguments.items()
        }
        result = self.op.operator(**arguments)
        picked: Tensor = result if self.op.layer.result is None else result[self.op.layer.result]
        return picked

    def _tensors_in(self, name: str, value: Any) -> Any:
        if isinstance(value, Value | State):
            return self.tensors[name]
        if isinstance(value, tuple):
            return [self._tensors_in(f"{name}.{index}", item) for index, item in enumerate(value)]
        return value


class Facts:
    """What holds of an operator however it is called and cut. Subclasses say what is special about theirs.

    An operator that nothing is known about counts as one kernel that computes one number per element, saves nothing
    and changes nothing.
    """

    # What it is

    view = False
    """Whether it runs no kernel: its output is memory of its input."""
    detaches = False
    """Whether no gradient goes back through it."""
    follows = False
    """Whether, alone behind another layer, it shares that layer's choice of a cut."""
    dense = False
    """Whether every output feature reads every input feature: where the plan `owt` turns from samples to channels."""
    mixes_samples = False
    """Whether a sample's result depends on the others in training, which `batch_norm="local"` keeps within a share."""
    casts = False
    """Whether it gives its input in another type."""
    constant = False
    """Whether it stands for a tensor that the network's code makes of numbers."""
    overwrites = False
    """Whether its result is its second argument, in the shape and type of the first."""
    masks = False
    """Whether, in place, it fills its first argument with ones, of the probability `p`, and zeros."""
    real_only = False
    """Whether it has no derivative for complex tensors, though it has one for real ones."""
    called = ""
    """What its layers are called, where its own word says little."""

    # What it costs

    outer_product = False
    """Whether the gradient of `weight` is that of the output times `input`, both as rows, summed over all rows."""
    contracts = False
    """Whether it is a convolution or a matrix product, with a kernel like forward's for each of its gradients."""
    passes_gradient = False
    """Whether the gradient of its input is that of its output itself."""
    reads_twice = False
    """Whether its kernel goes over its input twice."""
    saves_input = False
    """Whether its backward reads what it was given."""
    saves_output = False
    """Whether its backward reads what it gave."""
    index_bytes = 0
    """Bytes per element of the output that it saves besides its tensors."""
    fresh_output = False
    """Whether what it gives is new memory that its backward does not read: the layer behind it may write over it."""
    can_overwrite = False
    """Whether it can write its result over its first argument, as `Call.overwrites` asks it to."""
    own_layout = False
    """Whether its kernel works on copies of its tensors in a layout of its own."""
    autocast: Literal["lower", "full"] | None = None
    """Whether torch.autocast runs it in the lower precision or keeps it in float32; None: in that of its input."""

    # What it changes

    statistics: tuple[str, ...] = ()
    """Arguments that are running statistics, changed in training without a word of it in the operator's signature."""
    returns: ClassVar[Mapping[int, str]] = {}
    """Of several results those that are the new value of an argument, by their number."""

    def work(self, op: Op, needs: Mapping[str, "Need"], written: int) -> int:
        """Floating-point operations of a part that reads `needs` and writes so many elements."""
        return 0 if self.view else written

    def channels(self, op: Op, needs: Mapping[str, "Need"]) -> tuple[int, int] | None:
        """(of its output, of its input) of a part, where each output channel is a product of all the input's.

        Then its kernels are products of matrices that have channels as columns, or channels and windows.
        """
        return None

    def trains(self, arguments: Mapping[str, Any]) -> bool:
        """Whether, called so, it changes its running statistics."""
        return False

    def updates(self, layer: Layer) -> tuple[str, ...]:
        """Arguments that are states and that a layer of this operator changes, on every rank that holds them."""
        if layer.result not in (None, 0) or not self.trains(layer.arguments):
            return ()
        return tuple(name for name in self.statistics if isinstance(layer.arguments.get(name), State))

    def draws(self, arguments: Mapping[str, Any]) -> bool:
        """Whether, called so, it draws random numbers; asked of operators that torch says may."""
        return True

    def counts_up(self, others: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
        """Whether, given these besides its first argument, it adds one to it."""
        return False

    def idle(self, arguments: Mapping[str, Any]) -> bool:
        """Whether, called so, it returns its input itself, though torch.export takes that for a copy."""
        return False

    def may_be_input(self, tensors: int) -> bool:
        """Whether, given so many tensors, it may return its input's own memory though its signature denies it."""
        return False

    def check(self, op: Op, parts: Iterable[Part | None], *, local: bool) -> None:
        """Raise what torch raises where shapes alone forbid a call; on every rank, with or without a part of it."""


def of_each(number: int, needs: Mapping[str, "Need"]) -> int:
    """So many operations for each element of the first argument."""
    return number * volume(next(iter(needs.values())).box)


def wide(x: Tensor) -> Tensor:
    """What is summed over many elements or parts: in float32 at least, as torch's own kernels do."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Rule(Facts):
    """How one operator is cut, and all that is known about it."""

    apart = False
    """Whether the gradients of its input and of its parameters, found one after the other, cost no more than both
    at once: then the first can travel while the second is computed."""

    def speaks_of(self, op: Op) -> bool:
        """Whether it holds for this way of calling the operator; else the call runs whole."""
        return True

    def axes(self, op: Op) -> tuple[Axis, ...]:
        """The directions in which the layer may be cut."""
        return op.output_axes()

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        """What the part reads of every tensor argument; an argument that is left out is not read."""
        raise NotImplementedError

    def writes(self, op: Op, part: Part) -> Box:
        """What the part computes of the output."""
        return op.output_box(part)

    def sums(
        self, op: Op, part: Part, cut: frozenset[str], parts: Mapping[str, int], *, local: bool
    ) -> tuple["GroupSum", ...]:
        """What crosses between parts while the rule runs, in float32 at least, for counting.

        `parts`: how many along each axis.
        """
        return ()

    def run(self, call: Call) -> Tensor:
        """Compute the part's box."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class GroupSum:
    """A sum that a rule takes over the parts that differ in the axes `over`."""

    over: str
    elements: int
    forward: bool = True
    backward: bool = True


class Whole(Rule):
    """An operator without a rule, or called in a way that its rule does not speak of.

    It runs whole, on every rank, correct and without gain. What is known about it stands in its `Facts`.
    """

    def axes(self, op: Op) -> tuple[Axis, ...]:
        return ()

    def needs(self, op: Op, part: Part) -> Mapping[str, Need]:
        return {name: Need(whole(shape)) for name, shape in op.shapes.items()}

    def writes(self, op: Op, part: Part) -> Box:
        return whole(op.out)

    def sums(
        self, op: Op, part: Part, cut: frozenset[str], parts: Mapping[str, int], *, local: bool
    ) -> tuple[GroupSum, ...]:
        return (GroupSum("", volume(whole(op.out)), forward=False),) if op.operator is FUNCTION else ()

    def run(self, call: Call) -> Tensor:
        if call.op.operator is FUNCTION:
            return with_whole_gradient(lambda tensors: replace(call, tensors=tensors).torch(), call.tensors, call.peers)
        draws = torch.Tag.nondeterministic_seeded in call.op.operator.tags
        with call.random.in_step() if draws else nullcontext():
            return call.torch()
