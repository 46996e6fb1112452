"""Networks cut over ranks beside the same networks on one device: what the tests of operator rules share.

A `Subject` is a network that was captured once. `agree` lays it over ranks (threads) under one cut per layer and
compares output, gradients, buffers and traffic with one device. `EXAMPLES` has a call for every operator with a
rule: docs/operators.md is made from it, and tests run every cell of that table.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.capturing import capture_with_states
from shoal.execution.laying import Captured, lay
from shoal.execution.module import ParallelModule
from shoal.graph import Layer, LayerGraph, State, TensorSpec, Value
from shoal.lowering.placement import depends_on_input, most_parts, op_of
from shoal.operators.base import Axis, Op, Rule
from shoal.operators.registry import WHOLE, rule_for
from shoal.partition import Cut, slices, whole
from shoal.plan import Plan
from shoal.transport import Transport
from shoal.transport.memory import run_ranks

TOLERANCE = 1e-9


@contextmanager
def quick_ranks() -> Iterator[None]:
    """Ranks are threads here: each computes with one thread and hands over to the others at once."""
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(2e-4)
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


@dataclass(frozen=True)
class Outcome:
    """What one training step gives."""

    out: Tensor
    input_grad: Tensor | None
    grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A captured network, a batch, and how one device runs it; without `eager`, one rank is the reference."""

    captured: Captured
    x: Tensor
    eager: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None
    input_grad: bool = True

    @property
    def graph(self) -> LayerGraph:
        return self.captured.graphs[True]

    @property
    def tolerance(self) -> float:
        """Relative; what is captured in float32 is compared as such."""
        return 1e-5 if any(spec.dtype == "float32" for spec in self.graph.specs.values()) else TOLERANCE

    @cached_property
    def cotangent(self) -> Tensor:
        """What the output is multiplied by, so that every element of it has a gradient of its own."""
        return random(*self.graph.specs[self.graph.output].shape, seed=99)

    @cached_property
    def reference(self) -> Outcome:
        if self.eager is None:
            return self.ranks({layer.name: Cut() for layer in self.graph.layers}, 1)[0]
        x = self.x.clone().requires_grad_(self.input_grad)
        states = {
            name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for name, tensor in self.captured.states.items()
        }
        out = self.eager(x, states)
        if out.requires_grad:
            torch.autograd.backward((out * self.cotangent).sum())
        grads = {name: state.grad for name, state in states.items() if state.grad is not None}
        buffers = {
            name: state for name, state in states.items() if not isinstance(self.captured.states[name], nn.Parameter)
        }
        return Outcome(out.detach(), x.grad, grads, buffers)

    def cuttable(self) -> dict[str, tuple[Axis, ...]]:
        """The layers that may be cut, and how."""
        sees_batch = depends_on_input(self.graph)
        found = {}
        for layer in self.graph.layers:
            op = op_of(layer, self.graph)
            if layer.name in sees_batch and rule_for(op) is not WHOLE:
                found[layer.name] = rule_for(op).axes(op)
        return found

    def ranks(self, cuts: Mapping[str, Cut], world: int) -> list[Outcome]:
        """What every rank gets; gradients and buffers are put together from their shards, on which ranks must agree."""
        plan = Plan(name="test", ranks=world, layers=tuple(cuts.items()))
        steps = run_ranks(world, lambda transport: self._step(plan, transport))
        modules = [module for _, _, module in steps]
        grads, buffers = {}, {}
        for name, tensor in self.captured.states.items():
            if tensor.requires_grad:
                shards = [module._states[name].grad for module in modules]
                if any(shard is not None for shard in shards):
                    grads[name] = _joined(name, tensor, shards, modules)
            else:
                buffers[name] = _joined(name, tensor, [module._states[name] for module in modules], modules)
        return [Outcome(out, input_grad, grads, buffers) for out, input_grad, _ in steps]

    def _step(self, plan: Plan, transport: Transport) -> tuple[Tensor, Tensor | None, ParallelModule]:
        module = lay(self.captured, plan, transport, io="whole", seed=7, bucket_bytes=1 << 10)
        x = self.x.clone().requires_grad_(self.input_grad)
        out = module(x)
        if out.requires_grad:
            torch.autograd.backward((out * self.cotangent).sum())
            predicted = module.predicted(input_grad=self.input_grad)
            assert dict(predicted) == dict(module.counted), f"predicted {predicted}, counted {module.counted}"
        return out.detach(), x.grad, module


def _joined(name: str, like: Tensor, shards: Sequence[Tensor | None], modules: Sequence[ParallelModule]) -> Tensor:
    """A whole tensor from its shards; elements that nobody has stay NaN, and never equal anything."""
    full = torch.full_like(like.detach(), float("nan") if like.is_floating_point() else 0)
    known = torch.zeros_like(full, dtype=torch.bool)
    for rank, (shard, module) in enumerate(zip(shards, modules, strict=True)):
        box = module._states.layouts[name][rank]
        if box is not None and shard is not None:
            place = slices(box, whole(like.shape))
            assert torch.equal(full[place][known[place]], shard[known[place]]), f"ranks disagree on {name}"
            full[place], known[place] = shard, True
    return full


def agree(subject: Subject, cuts: Mapping[str, Cut], world: int) -> None:
    """Fail unless every rank's step is one device's."""
    one = subject.reference
    scale = max([1e-3, *(float(grad.abs().max()) for grad in one.grads.values() if grad.numel())])
    where = f"{ {name: str(cut) for name, cut in cuts.items()} } on {world} ranks"
    for many in subject.ranks(cuts, world):
        _close(many.out, one.out, 0.0, subject.tolerance, f"output, {where}")
        if subject.input_grad:
            _close(many.input_grad, one.input_grad, scale, subject.tolerance, f"gradient of the input, {where}")
        for name, state in subject.captured.states.items():
            if state.requires_grad:
                _close(
                    many.grads.get(name), one.grads.get(name), scale, subject.tolerance, f"gradient of {name}, {where}"
                )
        for name, buffer in one.buffers.items():
            _close(many.buffers[name], buffer, 0.0, subject.tolerance, f"buffer {name}, {where}")


def _close(found: Tensor | None, wanted: Tensor | None, scale: float, tolerance: float, what: str) -> None:
    if found is None or wanted is None:
        for one in (found, wanted):
            assert one is None or not one.count_nonzero(), f"{what}: {found} is not {wanted}"
        return
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)} is not {tuple(wanted.shape)}"
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype} is not {wanted.dtype}"
    found, wanted = found.detach().double(), wanted.detach().double()
    finite = [float(v) for v in wanted[wanted.isfinite()].abs().flatten().tolist()]
    atol = tolerance * max([scale, *finite])
    assert torch.allclose(found, wanted, rtol=tolerance, atol=atol, equal_nan=True), (
        f"{what}: off by {float((found - wanted).abs().max())}"
    )


def fitting_cuts(axes: tuple[Axis, ...], world: int) -> list[Cut]:
    """Every cut of these axes into at most `world` parts."""
    choices = [range(1, min(most_parts(axis), world) + 1) for axis in axes]
    cuts = [Cut.of(**{a.letter: d for a, d in zip(axes, chosen, strict=True)}) for chosen in product(*choices)]
    return [cut for cut in cuts if cut.parts <= world]


def random(*shape: int, seed: int = 0, low: float = -1.0, high: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low


# From a module


def subject_of(model: nn.Module, *shape: int, input_grad: bool = True, drawn: bool = False) -> Subject:
    """A module in the mode it is in. `drawn`: it draws random numbers, so one rank is the reference."""
    model = model.double()
    with torch.no_grad():
        for index, tensor in enumerate([*model.parameters(), *model.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(random(*tensor.shape, seed=index + 1, low=0.25 if "var" in _name(model, tensor) else -1.0))
    x = random(*shape)
    graph, states = capture_with_states(model, x)
    captured = Captured(model, {True: graph, False: graph}, states, None)

    def eager(x: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        known = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
        result: Tensor = functional_call(model, {n: t for n, t in given.items() if n in known}, (x,))
        return result

    return Subject(captured, x, None if drawn else eager, input_grad)


def _name(model: nn.Module, tensor: Tensor) -> str:
    return next(name for name, one in [*model.named_parameters(), *model.named_buffers()] if one is tensor)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# From one operator


@dataclass(frozen=True)
class Example:
    """One call of one operator: the argument named `data` is the batch, other tensors are parameters."""

    op: str
    """Such as `conv2d.default`."""
    x: Tensor
    arguments: Mapping[str, Any]
    data: str = "self"
    result: int | None = None
    drawn: bool = False
    blank: bool = False
    """Its values mean nothing: it is multiplied by zero."""
    note: str = ""
    """How this call differs from another of the same operator, for the table."""

    @property
    def word(self) -> str:
        return self.op.partition(".")[0]

    @cached_property
    def subject(self) -> Subject:
        arguments, states = self._arguments()
        with torch.no_grad():
            out = self._run(arguments, self.x.clone(), {name: state.detach().clone() for name, state in states.items()})
        layers = self._layers(arguments, out)
        graph = LayerGraph(
            layers=layers,
            inputs={"x": _spec(self.x)},
            states={name: _spec(state) for name, state in states.items()},
            outputs=(layers[-1].name,),
            training=True,
            batch=self.x.shape[0],
            any_batch=False,
        )
        holder = nn.Module()
        for name, state in states.items():
            if isinstance(state, nn.Parameter):
                holder.register_parameter(name, state)
            else:
                holder.register_buffer(name, state)

        def eager(x: Tensor, states: Mapping[str, Tensor]) -> Tensor:
            if self.blank:
                return x + 0
            result = self._run(arguments, x, states)
            return result if len(layers) == 1 else x + result

        captured = Captured(holder, {True: graph, False: graph}, states, None)
        return Subject(captured, self.x, None if self.drawn else eager, self.x.is_floating_point())

    @property
    def _target(self) -> Any:
        packet, _, overload = self.op.partition(".")
        return getattr(getattr(torch.ops.aten, packet), overload)

    def _arguments(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The call as a layer has it, and the tensors that it names."""
        states: dict[str, Tensor] = {}

        def refer(name: str, value: Any) -> Any:
            if value is self.x:
                return Value("x")
            if isinstance(value, Tensor):
                frozen = not value.is_floating_point() or "running" in name
                states[name] = value.clone() if frozen else nn.Parameter(value.clone())
                return State(name)
            if isinstance(value, list | tuple):
                return tuple(refer(f"{name}{index}", item) for index, item in enumerate(value))
            return value

        given = {**({self.data: self.x} if self.data else {}), **self.arguments}
        schema = self._target._schema.arguments
        assert given.keys() <= {argument.name for argument in schema}, f"{self.op}: {list(given)}"
        return {a.name: refer(a.name, given.get(a.name, a.default_value)) for a in schema}, states

    def _run(self, arguments: Mapping[str, Any], x: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        functional = "functional" in self.op  # the rule writes the new statistics to the buffers itself
        read = {n: state.clone() if functional and "running" in n else state for n, state in states.items()}

        def real(value: Any) -> Any:
            if isinstance(value, Value | State):
                return x if isinstance(value, Value) else read[value.name]
            return list(map(real, value)) if isinstance(value, tuple) else value

        result = self._target(**{name: real(value) for name, value in arguments.items()})
        if functional:
            states["running_mean"].copy_(result[3])
            states["running_var"].copy_(result[4])
        picked: Tensor = result if self.result is None else result[self.result]
        return picked

    def _layers(self, arguments: Mapping[str, Any], out: Tensor) -> tuple[Layer, ...]:
        """The operator; what was made from nothing is added to the batch, for a network reads its input."""
        layers = [Layer("op", f"aten.{self.op}", arguments, _spec(out), self.result)]
        if self.blank:
            rest = dict.fromkeys(["dtype", "layout", "device", "pin_memory", "memory_format"])
            layers.append(Layer("zero", "aten.zeros_like.default", {"self": Value("op"), **rest}, _spec(out)))
        if self.blank or not layers[0].reads:
            both = {"self": Value("x"), "other": Value(layers[-1].name), "alpha": 1}
            layers.append(Layer("sum", "aten.add.Tensor", both, _spec(self.x)))
        return tuple(layers)

    @property
    def at_hand(self) -> Op:
        return op_of(self.subject.graph.layers[0], self.subject.graph)

    @property
    def rule(self) -> Rule:
        return rule_for(self.at_hand)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that can be cut at all."""
        return tuple(axis for axis in self.rule.axes(self.at_hand) if most_parts(axis) > 1)

    def agrees(self, cut: Cut, world: int | None = None) -> None:
        cuts = {layer.name: cut for layer in self.subject.graph.layers}
        agree(self.subject, cuts, world or cut.parts)


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _elementwise() -> Iterator[Example]:
    x, positive = random(3, 4, 3, 5), random(3, 4, 3, 5, low=0.25, high=2.0)
    other = random(3, 4, 1, 1, seed=1, low=0.5, high=1.5)
    plain = """
        abs alias atan ceil celu clone contiguous cos cosh detach elu erf erfc exp exp2 expm1 floor gelu hardshrink
        hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lift_fresh_copy log_sigmoid logical_not mish
        nan_to_num neg ones_like relu relu6 round selu sgn sigmoid sign silu sin sinc sinh softplus softshrink square
        tan tanh trunc zeros_like _to_copy
    """
    for word in plain.split():
        yield Example(f"{word}.default", x, {})
    for word in ["log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sqrt"]:
        yield Example(f"{word}.default", positive, {})
    for word in ["add", "sub", "mul", "div", "eq", "ne", "ge", "gt", "le", "lt", "fmod", "remainder"]:
        yield Example(f"{word}.Tensor", x, {"other": other})
    for word in ["maximum", "minimum", "logical_and", "logical_or", "logical_xor", "atan2"]:
        yield Example(f"{word}.default", x, {"other": other})
    yield Example("rsub.Scalar", x, {"other": 2.0})
    yield Example("pow.Tensor_Scalar", positive, {"exponent": 2.5})
    yield Example("clamp.default", x, {"min": -0.5, "max": 0.4})
    yield Example("clamp_min.default", x, {"min": -0.5})
    yield Example("clamp_max.default", x, {"max": 0.5})
    yield Example("threshold.default", x, {"threshold": 0.1, "value": 3.0})
    yield Example("to.dtype", x, {"dtype": torch.float32})
    yield Example("masked_fill.Scalar", x, {"mask": other > 1, "value": 2.0})
    yield Example("where.self", x, {"condition": other > 1, "other": other})
    yield Example("addcmul.default", x, {"tensor1": other, "tensor2": random(4, 1, 1, seed=2), "value": 0.5})
    yield Example("addcdiv.default", x, {"tensor1": random(4, 1, 1, seed=2), "tensor2": other})
    yield Example("lerp.Tensor", x, {"end": other, "weight": random(5, seed=3)})
    yield Example("prelu.default", x, {"weight": random(4, seed=1)})
    yield Example("_prelu_kernel.default", x, {"weight": random(1, 4, 1, 1, seed=1)})
    yield Example("dropout.default", x, {"p": 0.4, "train": True}, "input", drawn=True)
    yield Example("native_dropout.default", x, {"p": 0.4, "train": True}, "input", 0, drawn=True)
    yield Example("feature_dropout.default", x, {"p": 0.4, "train": True}, "input", drawn=True)
    yield Example("bernoulli.p", x, {"p": 0.4}, drawn=True)
    yield Example("empty_like.default", x, {}, blank=True)
    made: dict[str, Any] = {"size": (3, 4, 3, 5), "dtype": torch.float64}
    for word in ("zeros", "ones"):
        yield Example(f"{word}.default", x, made, "")
    yield Example("empty.memory_format", x, made, "", blank=True)
    yield Example("full.default", x, {**made, "fill_value": 2.5}, "")


def _views() -> Iterator[Example]:
    x = random(3, 4, 5, 2)
    yield Example("view.default", x, {"size": (3, 2, 2, 5, 2)})
    yield Example("_unsafe_view.default", x, {"size": (3, 2, 2, 5, 2)})
    yield Example("reshape.default", x, {"shape": (3, 4, 10)})
    yield Example("flatten.using_ints", x, {"start_dim": 1})
    yield Example("unflatten.int", x, {"dim": 1, "sizes": (2, 2)})
    yield Example("unsqueeze.default", x, {"dim": 1})
    yield Example("squeeze.dim", random(3, 1, 4, 5), {"dim": 1})
    yield Example("permute.default", x, {"dims": (0, 2, 3, 1)})
    yield Example("transpose.int", x, {"dim0": 1, "dim1": -1})
    yield Example("t.default", random(3, 5), {})
    yield Example("slice.Tensor", x, {"dim": 2, "start": 1, "step": 2})
    yield Example("select.int", x, {"dim": 1, "index": -1})
    yield Example("unbind.int", x, {"dim": 2}, result=3)
    yield Example("split.Tensor", x, {"split_size": 2, "dim": 2}, result=1)
    yield Example("split_with_sizes.default", x, {"split_sizes": (2, 3), "dim": 2}, result=1)
    yield Example("chunk.default", x, {"chunks": 2, "dim": 1}, result=1)
    yield Example("expand.default", random(3, 1, 1, 5), {"size": (3, 4, 3, -1)})
    yield Example("cat.default", x, {"tensors": (x, random(3, 3, 5, 2, seed=2), x), "dim": 1}, "")
    yield Example("pad.default", x, {"pad": (1, 2, -1, 3), "mode": "constant"})
    yield Example("pad.default", x, {"pad": (1, 1, 2, 3), "mode": "reflect"}, note="reflect, replicate, circular")
    yield Example("constant_pad_nd.default", x, {"pad": (1, 2, -1, 3), "value": 0.5})
    yield Example("flip.default", x, {"dims": (1, -1)})


def _spatial(dims: int, *front: int) -> tuple[int, ...]:
    return (*front, 5, 6, 7)[: len(front)] + (5, 6, 7)[3 - dims :] if dims < 3 else (*front, 3, 4, 5)


def _windows() -> Iterator[Example]:
    for d in (1, 2, 3):
        x, image = random(*_spatial(d, 2, 3)), random(*_spatial(d, 3, 4))
        weight, bias = random(4, 3, *(3,) * d, seed=1), random(4, seed=2)
        yield Example(f"conv{d}d.default", x, {"weight": weight, "bias": bias, "padding": (1,) * d}, "input")
        grouped = {"weight": random(4, 2, *(3,) * d, seed=1), "bias": bias, "groups": 2, "padding": (1,) * d}
        yield Example(f"conv{d}d.default", image, grouped, "input", note="groups: whole groups")
        transposed = random(3, 4, *(3,) * d, seed=1)
        strided = {"stride": (2,) * d, "padding": (1,) * d, "output_padding": (1,) * d}
        operator = f"conv_transpose{d}d.{'default' if d == 1 else 'input'}"
        yield Example(operator, x, {"weight": transposed, "bias": bias, **strided}, "input")
        grouped = {"weight": random(4, 2, *(3,) * d, seed=1), "bias": bias, "groups": 2, **strided}
        yield Example(operator, image, grouped, "input", note="groups: whole groups")
        window = {"kernel_size": (3,) * d, "stride": (2,) * d, "padding": (1,) * d, "ceil_mode": True}
        yield Example(f"max_pool{d}d.default", image, window)
        yield Example(f"avg_pool{d}d.default", image, window)
        yield Example(f"adaptive_avg_pool{d}d.default", image, {"output_size": (3,) * d})
        yield Example(f"adaptive_avg_pool{d}d.default", image, {"output_size": (1,) * d}, note="to one row")
        sizes: dict[str, Any] = {"output_size": tuple(2 * size - 1 for size in image.shape[2:]), "scale_factors": None}
        yield Example(f"upsample_nearest{d}d.vec", image, sizes, "input")
        yield Example(f"_upsample_nearest_exact{d}d.vec", image, sizes, "input")
        linear = ("linear", "bilinear", "trilinear")[d - 1]
        yield Example(f"upsample_{linear}{d}d.vec", image, {**sizes, "align_corners": False}, "input")
    yield Example("pixel_shuffle.default", random(2, 8, 3, 3), {"upscale_factor": 2})
    yield Example("pixel_unshuffle.default", random(2, 2, 6, 4), {"downscale_factor": 2})


def _products() -> Iterator[Example]:
    weight, bias = random(4, 5, seed=1), random(4, seed=2)
    yield Example("linear.default", random(3, 5), {"weight": weight, "bias": bias}, "input")
    yield Example("linear.default", random(3, 2, 5), {"weight": weight, "bias": bias}, "input", note="3-D input")
    query, key, value = random(3, 4, 5, 2), random(3, 4, 6, 2, seed=1), random(3, 4, 6, 3, seed=2)
    mask = random(4, 1, 6, seed=3)
    ways: list[dict[str, Any]] = [{}, {"attn_mask": mask}, {"is_causal": True}]
    for more in ways:
        arguments = {"key": key, "value": value, **more}
        yield Example("scaled_dot_product_attention.default", query, arguments, "query")
    arguments = {"key": key[:, 0], "value": value[:, 0]}
    yield Example("scaled_dot_product_attention.default", query[:, 0], arguments, "query", note="without heads")
    for word in ("mean", "sum"):
        overload = "dim" if word == "mean" else "dim_IntList"
        yield Example(f"{word}.{overload}", random(3, 4, 5, 2), {"dim": (2, 3), "keepdim": True})


def _norms() -> Iterator[Example]:
    x = random(3, 4, 5, 2)
    affine = {"weight": random(4, seed=1), "bias": random(4, seed=2)}
    running = {"running_mean": random(4, seed=3), "running_var": random(4, seed=4, low=0.5)}
    for word in ("batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"):
        rest = {"training": True, "momentum": 0.1, "eps": 1e-5, **({"cudnn_enabled": False} if word[0] != "_" else {})}
        result = None if word == "batch_norm" else 0
        yield Example(f"{word}.default", x, {**affine, **running, **rest}, "input", result)
    rest = {"momentum": 0.1, "eps": 1e-5}
    yield Example("_native_batch_norm_legit_no_training.default", x, {**affine, **running, **rest}, "input", 0)
    group = {"num_groups": 2, "eps": 1e-5, "cudnn_enabled": False}
    yield Example("group_norm.default", x, {**affine, **group}, "input", note="whole groups")
    instance = {"running_mean": None, "running_var": None, "use_input_stats": True, "momentum": 0.1, "eps": 1e-5}
    yield Example("instance_norm.default", x, {**affine, **instance, "cudnn_enabled": False}, "input")
    layer = {"normalized_shape": (4, 5, 2), "weight": random(4, 5, 2, seed=1), "bias": random(4, 5, 2, seed=2)}
    yield Example("layer_norm.default", x, layer, "input")
    for word in ("softmax", "log_softmax"):
        yield Example(f"{word}.int", x, {"dim": 1})


def _losses() -> Iterator[Example]:
    scores, target = random(3, 4, 2, 3), torch.tensor([[[0, 1, 3], [2, -100, 1]]] * 3)
    each = {"target": target, "reduction": 0}
    yield Example("cross_entropy_loss.default", scores, {**each, "label_smoothing": 0.1})
    yield Example("nll_loss_nd.default", scores, each)
    yield Example("nll_loss.default", random(3, 5), {"target": torch.tensor([1, 0, 4]), "reduction": 0})
    for word in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        yield Example(f"{word}.default", scores, {"target": random(3, 4, 2, 3, seed=1), "reduction": 0})


def _without_rule() -> Iterator[Example]:
    x = random(2, 4, 6, 5)
    yield Example("cumsum.default", x, {"dim": 1})
    yield Example("roll.default", x, {"shifts": (1,), "dims": (2,)})
    yield Example("adaptive_max_pool2d.default", x, {"output_size": (2, 2)}, result=0)
    yield Example(
        "upsample_bicubic2d.vec", x, {"output_size": (7, 8), "align_corners": False, "scale_factors": None}, "input"
    )
    yield Example("max_pool2d_with_indices.default", x, {"kernel_size": (2, 2)}, result=0)
    yield Example("glu.default", x, {"dim": 1})


EXAMPLES: tuple[Example, ...] = (
    *_windows(), *_products(), *_norms(), *_elementwise(), *_views(), *_losses(),
)  # fmt: skip
"""At least one call of every operator with a rule."""
WITHOUT_RULE: tuple[Example, ...] = tuple(_without_rule())
"""Some operators that have none."""
