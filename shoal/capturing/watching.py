"""What is watched while torch.export traces a network: all that it would lose, or freeze as it was.

    seen and written down    custom autograd functions (custom_functions.py), torch.inference_mode as no_grad,
                             torch.utils.checkpoint as a plain call
    answered                 what the network asks about its call (questions.py)
    refused, by the line     hooks on tensors, torch.autograd.grad, numpy, values changed for backward alone, errors of
                             the trace itself that the network catches
    refused, by the module   hooks on modules, random numbers that are not torch's, checkpointed batch norm

Some of it is done by replacing functions of torch for the time of the trace, in this thread only.
"""

import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import vmap as torch_vmap
from torch._subclasses.fake_tensor import DataDependentOutputException, is_fake
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional
from torch.nn.modules import module as torch_modules
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

from shoal.capturing.attributes import Picture, take
from shoal.capturing.custom_functions import Tracing
from shoal.capturing.place import called_by_network, line_now, read_by_network
from shoal.capturing.questions import GRAD_MODE, REQUIRES_GRAD, askable, from_network, question_of, variable
from shoal.capturing.replacing import here, replaced
from shoal.errors import CaptureError

log = logging.getLogger("shoal")

_ALLOWED_HOOKS = ("torch.nn.utils.", "timm.", "shoal.")
"""Where hooks come from that keep nothing: torch's weight norm and spectral norm compute a part of the network."""

_GLOBAL_HOOKS: list[dict[int, Any]] = [
    getattr(torch_modules, f"_global_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")
]
"""torch's own places for hooks on all modules."""

_OUTSIDE = "or leave that part of the network outside of shoal.parallelize."

_NORMS: dict[Any, Sequence[str]] = {
    functional.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training"),
    functional.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training"),
    torch.instance_norm: ("input", "weight", "bias", "running_mean", "running_var", "use_input_stats"),
}
"""Norms with running statistics, and their arguments in order."""

_REFUSED_CALLS = {
    "Tensor.register_hook": ("puts a hook on a tensor", f"Use a torch.autograd.Function instead, {_OUTSIDE}"),
    "TensorBase.register_hook": ("puts a hook on a tensor", f"Use a torch.autograd.Function instead, {_OUTSIDE}"),
    "Tensor.register_post_accumulate_grad_hook": (
        "puts a hook on a parameter in its forward pass", "Put it there once, before or after shoal.parallelize.",
    ),
    "TensorBase.retain_grad": (
        "keeps the gradient of an inner tensor", "Return the tensor as a further output, and ask for its gradient.",
    ),
    "Tensor.backward": ("runs a backward pass of its own", f"Write the derivative down as operators, {_OUTSIDE}"),
    "Tensor.numpy": ("hands a tensor to numpy", f"Use torch's operators, a torch.autograd.Function, {_OUTSIDE}"),
    "TensorBase.numpy": ("hands a tensor to numpy", f"Use torch's operators, {_OUTSIDE}"),
    "Tensor.__array__": ("hands a tensor to numpy", f"Use torch's operators, {_OUTSIDE}"),
}  # fmt: skip
"""Calls that have no place in a graph: (what the network does, the way out)."""


def refuse_hooks(model: nn.Module) -> None:
    """Hooks that a graph would not call, and parameters that do not exist yet."""
    if (common_hook := hook_on_all()) is not None:
        raise CaptureError(
            f"there is a hook on all modules ({common_hook}), which a parallel network would not call.",
            "Remove it before shoal.parallelize.",
        )
    for path, module in model.named_modules():
        where = f"module {path!r}" if path else f"the network {type(model).__name__}"
        if any(is_lazy(tensor) for tensor in [*module._parameters.values(), *module._buffers.values()]):
            raise CaptureError(
                f"{where} has parameters without a shape.", "Run the network once before shoal.parallelize."
            )
        backward = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
        if backward:
            raise CaptureError(
                f"{where} has a backward hook ({_function_name(backward[0])}), which a parallel network would not "
                "call.",
                "Remove it before shoal.parallelize; a torch.autograd.Function in forward may change gradients.",
            )
        for hook in [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]:
            if not keeps_nothing(hook):
                raise CaptureError(
                    f"{where} has a forward hook ({_function_name(hook)}), which a parallel network would not call.",
                    "Remove it before shoal.parallelize. To see an inner value, return it as a further output.",
                )


def hook_on_all() -> str | None:
    """The name of a hook that torch calls for every module there is; None without one, or where it is ours."""
    for hooks in _GLOBAL_HOOKS:
        for hook in list(hooks.values()):
            if not _home(hook).startswith("shoal."):
                return _function_name(hook)
    return None


def keeps_nothing(hook: Any) -> bool:
    """Whether a module's hook is known to compute a part of the network and to keep nothing."""
    return _home(hook).startswith(_ALLOWED_HOOKS)


def _home(hook: Any) -> str:
    """The Python module that a hook's code is in."""
    function = getattr(hook, "__func__", getattr(hook, "func", hook))  # of a method, or of a partial
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _function_name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


class Watch:
    """One trace under watch."""

    def __init__(self, model: nn.Module, records: bool = True) -> None:
        self.model, self._records = model, records
        self.asked: dict[str, str] = {}
        """What the network asks about its call, and where."""
        self.refused: list[CaptureError] = []
        """What was refused, even if the network caught the error."""
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._modules: list[tuple[int, tuple[object, ...] | None]] = []
        """The modules that are running, outermost first, with the random generators as they were; torch's own layers
        without, since they draw with torch alone."""
        self.drawing: str | None = None
        """The innermost module that drew a random number which torch.export does not see."""
        self.before: Picture | None = None
        self.after: Picture | None = None
        """The network's attributes when it began and when it ended: torch.export puts some back by itself."""
        self.autocast = ""
        """Where the network first sets torch.autocast, for people."""
        self._without_effect: list[Any] = []
        """Autocasts that the network is in and that change nothing."""
        self._calls: _Calls | None = None
        """Sees the network's calls while it runs."""
        self._checkpointed = 0
        self._undecided: CaptureError | None = None
        """What the trace could not decide, even if the network caught the error."""
        self._functions = Tracing()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within, the network is watched. Random generators are left as they were."""
        before, kept = _generators(), _generator_states()
        try:
            with ExitStack() as stack:
                self._replace(stack)
                stack.callback(self._stop_calls)
                yield
        finally:
            if _generators() != before:
                self.drawing = self.drawing or self.where(())
                _restore_generators(kept)
        self.raise_refused()
        if self._undecided is not None:  # the network caught it
            raise self._undecided

    def raise_refused(self) -> None:
        """What the network did that cannot be followed, first to last."""
        if self.refused:
            raise self.refused[0]

    def refuse_draws(self) -> None:
        """Refuse a network that draws random numbers by itself."""
        self.refuse(
            f"{self.drawing} draws random numbers with Python, numpy or a seed of its own in its forward pass, which "
            "would be drawn once for ever.",
            "Draw with torch's dropout, or torch.bernoulli with a fixed probability, or pass the numbers in as an "
            "input.",
        )

    def refuse(self, problem: str, remedy: str) -> None:
        """Stop the trace; where the network catches it, after the trace."""
        error = CaptureError(problem, remedy)
        self.refused.append(error)
        raise error

    def where(self, running: tuple[int, ...] | None = None) -> str:
        """The innermost module that is running, for people."""
        modules = [module for module, _ in self._modules] if running is None else list(running)
        path = next((self._paths[module] for module in reversed(modules) if self._paths.get(module)), "")
        return f"module {path!r}" if path else f"the network {type(self.model).__name__}"

    # Replacing functions of torch

    def _replace(self, stack: ExitStack) -> None:
        single = torch.autograd.function._SingleLevelFunction
        context = torch.autograd.function.FunctionCtx
        stack.enter_context(replaced(single, "apply", classmethod(here(self._apply, _plain_apply))))
        stack.enter_context(self._extended(context, "mark_dirty", lambda *_: self._functions.mark_dirty()))
        stack.enter_context(
            self._extended(
                context, "set_materialize_grads", lambda _, value: self._functions.set_materialize_grads(value)
            )
        )
        module = torch.autograd.function
        stack.enter_context(
            self._extended(module, "custom_function_call", lambda cls, *_: self._functions.batched(cls))
        )
        autocast = torch.amp.autocast_mode.autocast
        surroundings: list[tuple[Any, str, Callable[..., Any]]] = [
            (torch.inference_mode, "__enter__", self._enter_inference),
            (torch.inference_mode, "__exit__", self._exit_inference),
            (autocast, "__enter__", self._enter_autocast),
            (autocast, "__exit__", self._exit_autocast),
        ]
        for kind, name, own in surroundings:
            plain = getattr(kind, name)
            stack.enter_context(replaced(kind, name, here(partial(own, plain), plain)))
        generator = "_checkpoint_without_reentrant_generator"
        plain = getattr(torch_checkpoint, generator)
        stack.enter_context(replaced(torch_checkpoint, generator, here(self._checkpoint, plain)))
        for name in ("grad", "backward"):
            stack.enter_context(self._extended(torch.autograd, name, self._refuse_backward))
        stack.enter_context(self._extended(torch_vmap, "_vmap_increment_nesting", self._refuse_transform))
        hooks = torch.autograd.graph.saved_tensors_hooks
        stack.enter_context(self._extended(hooks, "__enter__", self._refuse_saved))
        for kind in (GuardOnDataDependentSymNode, DataDependentOutputException):
            stack.enter_context(self._extended(kind, "__init__", self._note_undecided))
        for (owner, name), question in askable():
            plain = getattr(owner, name)
            stack.enter_context(replaced(owner, name, here(partial(self._answer, plain, question), plain)))
        stack.enter_context(self._extended(torch.enable_grad, "__enter__", lambda _: self._switch_on(mode=True)))
        stack.enter_context(
            self._extended(torch.set_grad_enabled, "__init__", lambda _, mode: self._switch_on(mode=mode))
        )
        plain = os._Environ.__getitem__
        stack.enter_context(replaced(os._Environ, "__getitem__", here(partial(_of_self, self, plain), plain)))
        for register, own_hook in (
            (torch_modules.register_module_forward_pre_hook, self._enter_module),
            (torch_modules.register_module_forward_hook, self._leave_module),
        ):
            stack.callback(register(here(own_hook, lambda *_: None)).remove)

    def _extended(self, owner: Any, name: str, before: Callable[..., None]) -> Any:
        """`owner.name` with something done before."""
        plain = getattr(owner, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            before(*args, **kwargs)
            return plain(*args, **kwargs)

        return replaced(owner, name, here(both, plain))

    # Autograd

    def _apply(self, cls: type[torch.autograd.Function], *arguments: Any, **named: Any) -> Any:
        def plain(*given: Any) -> Any:
            return _plain_apply(cls, *given, **named)

        if cls is torch_checkpoint.CheckpointFunction:
            function, _, *given = arguments
            return self._reentrant(function, given)
        try:
            return self._functions.apply(cls, plain, arguments)
        except CaptureError as error:
            self.refused.append(error)
            raise

    def _enter_inference(self, plain: Callable[..., Any], mode: Any) -> None:
        """As torch.no_grad, where it is the network that asks for it; torch itself does so too."""
        if called_by_network():
            mode._inference_mode_context = torch.set_grad_enabled(not mode.mode)
        else:
            plain(mode)

    def _exit_inference(self, plain: Callable[..., Any], mode: Any, *error: Any) -> None:
        if isinstance(mode._inference_mode_context, torch.set_grad_enabled):
            mode._inference_mode_context.__exit__(*error)
        else:
            plain(mode, *error)

    def _refuse_backward(self, *_: Any, **__: Any) -> None:
        self.refuse(
            f"the network runs a backward pass of its own{line_now()}.",
            f"Write the derivative down as operators, {_OUTSIDE}",
        )

    def _refuse_transform(self, *_: Any) -> None:
        self.refuse(
            f"the network uses torch.vmap or another transform of torch.func{line_now()}.",
            f"Write it with operators on the whole batch, {_OUTSIDE}",
        )

    def _refuse_saved(self, hooks: Any) -> None:
        if not isinstance(hooks, torch.autograd.graph.save_on_cpu):  # which only moves them
            self.refuse(
                f"the network changes what autograd keeps{line_now()}.",
                f"Remove torch.autograd.graph.saved_tensors_hooks, {_OUTSIDE}",
            )

    # Questions

    def ask(self, question: str) -> None:
        """The network asks something about its call."""
        self.asked.setdefault(question, line_now())

    def requires_grad(self, tensor: Tensor, found: bool) -> bool:
        """What the network hears of a tensor; gradients are always recorded in a trace."""
        return found and (self._records or tensor.is_leaf)

    def _answer(self, plain: Callable[..., Any], question: str, *args: Any, **kwargs: Any) -> Any:
        if not from_network(3):
            return plain(*args, **kwargs)
        if not question:
            return False
        self.ask(question)
        found = plain(*args, **kwargs)
        return found and self._records if question == GRAD_MODE else found

    def _switch_on(self, *, mode: bool) -> None:
        """Gradients are switched on by the network, whatever its caller says."""
        if mode and called_by_network():
            self.ask(GRAD_MODE)
            if not self._records:
                self.refuse(
                    f"the network switches gradients on{line_now()}, and is called without them.",
                    "Call it without torch.no_grad() and torch.inference_mode(), and detach what it returns.",
                )

    def _note_undecided(self, *_: Any, **__: Any) -> None:
        self._undecided = self._undecided or CaptureError(
            f"the network catches an error of its capture{line_now()}: what it does next depends on the values of a "
            "tensor.",
            f"Write it without the decision (torch.where, or a fixed setting), {_OUTSIDE}",
        )

    # Precision

    def _enter_autocast(self, plain: Callable[..., Any], autocast: Any) -> Any:
        """An autocast that is off where none is on changes nothing, and torch.export need not hear of it."""
        self.autocast = self.autocast or line_now()
        if not autocast._enabled and not torch.is_autocast_enabled(autocast.device):
            self._without_effect.append(autocast)
            return autocast
        return plain(autocast)

    def _exit_autocast(self, plain: Callable[..., Any], autocast: Any, *error: Any) -> Any:
        if self._without_effect and self._without_effect[-1] is autocast:
            self._without_effect.pop()
            return None
        return plain(autocast, *error)

    def set_grad(self, enabled: bool) -> None:
        """The network switches gradients on or off."""
        if enabled != torch.is_grad_enabled() and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            self.refuse(  # torch.export forgets it
                f"the network switches gradients {'on' if enabled else 'off'} inside of torch.autocast{line_now()}.",
                "Put torch.autocast inside of torch.no_grad, or around the call of the network.",
            )

    # Checkpoints

    def _reentrant(self, function: Callable[..., Any], given: list[Any]) -> Any:
        """A plain call, where some argument has a gradient; else torch would give none to anything inside."""
        learns = any(isinstance(value, Tensor) and value.requires_grad for value in given)
        if self._records and torch.is_grad_enabled() and not learns:
            self.refuse(
                f"{self.where()} calls torch.utils.checkpoint with use_reentrant=True on tensors without a gradient"
                f"{line_now()}, which leaves all parameters inside without one.",
                "Say use_reentrant=False, or call the layer directly and pass recompute=True to shoal.parallelize.",
            )
        with self._inside_checkpoint():
            return function(*given)

    def _checkpoint(self, *_: Any, **__: Any) -> Iterator[None]:
        with self._inside_checkpoint():
            yield

    @contextmanager
    def _inside_checkpoint(self) -> Iterator[None]:
        say_once("torch.utils.checkpoint in the network is left out; to save memory, pass recompute=True")
        self._checkpointed += 1
        try:
            yield
        finally:
            self._checkpointed -= 1

    def norm(self, running: Any, training: Any) -> None:
        """A norm is called that updates running statistics in training."""
        if self._checkpointed and training and running is not None:
            self.refuse(
                f"{self.where()} keeps running statistics inside of torch.utils.checkpoint, which counts every batch "
                "twice.",
                "Call it without torch.utils.checkpoint, and pass recompute=True to shoal.parallelize.",
            )

    # Modules

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if not self._modules:
            self._stop_calls()
            with torch._C.DisableTorchFunction():
                self.before = take(self.model)
            self._calls = _Calls(self)
            self._calls.__enter__()  # type: ignore[no-untyped-call]
        self._modules.append((id(module), None if _is_torchs(module) else _generators()))

    def _leave_module(self, module: nn.Module, _: Any, __: Any) -> None:
        while self._modules:
            entered, before = self._modules.pop()
            if entered == id(module):
                if self.drawing is None and before is not None and _generators() != before:
                    self.drawing = self.where((*(other for other, _ in self._modules), entered))
                break
        if not self._modules:
            self._stop_calls()
            with torch._C.DisableTorchFunction():
                self.after = take(self.model)

    def _stop_calls(self) -> None:
        if self._calls is not None:
            calls, self._calls = self._calls, None
            calls.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Calls(TorchFunctionMode):
    """Sees the calls of torch's functions that a network makes."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if refusal := _REFUSED_CALLS.get(getattr(func, "__qualname__", "")):
            self.watch.refuse(f"the network {refusal[0]}{line_now()}.", refusal[1])
        if func is torch._C._set_grad_enabled:
            self.watch.set_grad(*args)
        if func in _NORMS:
            given = {**dict(zip(_NORMS[func], args, strict=False)), **kwargs}
            self.watch.norm(given.get("running_mean"), given.get("training", given.get("use_input_stats", False)))
        if getattr(getattr(func, "__self__", None), "__name__", "") == "grad_fn" and called_by_network():
            self.watch.refuse(
                f"the network looks into autograd's own graph{line_now()}.",
                f"Use a torch.autograd.Function to change gradients, {_OUTSIDE}",
            )
        if torch.is_grad_enabled():
            for value in pytree.tree_iter((args, kwargs)):
                if isinstance(value, Tensor) and value.requires_grad and not is_fake(value):
                    self.watch.refuse(
                        f"a tensor that learns is used{line_now()}, and is no parameter of the network: it would get "
                        "no gradient.",
                        "Register it as a parameter of the network, detach it, or compute that part outside of "
                        "shoal.parallelize.",
                    )
        result = func(*args, **kwargs)
        if (question := question_of(func)) is not None and called_by_network():
            self.watch.ask(question)
            if question == REQUIRES_GRAD:
                result = self.watch.requires_grad(args[0], result)
        for value in result if type(result) in (tuple, list) else (result,):
            if isinstance(value, Tensor) and not all(type(size) is int for size in value.shape):
                self.watch.refuse(
                    f"the shape of a tensor depends on the values of another{line_now()}.",
                    "Keep the shape fixed (torch.where, a mask that is multiplied, topk with a fixed k), " + _OUTSIDE,
                )
        return result


def _of_self(watch: Watch, plain: Callable[..., Any], environment: Any, name: str) -> Any:
    """`os.environ[name]`, which the network may read."""
    if read_by_network():
        watch.ask(variable(name))
    return plain(environment, name)


def _plain_apply(cls: type[torch.autograd.Function], *arguments: Any, **named: Any) -> Any:
    return super(torch.autograd.function._SingleLevelFunction, cls).apply(*arguments, **named)  # type: ignore[misc]


_said: set[str] = set()


def say_once(text: str) -> None:
    """A warning, the first time."""
    if text not in _said:
        _said.add(text)
        log.warning(text)


# Random generators


def _numpy() -> Any:
    return sys.modules.get("numpy.random")


def _generators() -> tuple[object, ...]:
    """The states of Python's and numpy's generators, and the seed of torch's, to compare."""
    numpy = _numpy()
    states: tuple[object, ...] = ()
    if numpy is not None:
        _, numbers, position, *_ = numpy.get_state()
        states = numbers.tobytes(), position
    return (random.getstate(), states, torch.default_generator.initial_seed())


def _is_torchs(module: nn.Module) -> bool:
    """Whether a module's code is torch's, and not that of a class or a function of the user's."""
    return type(module).__module__.startswith("torch.") and "forward" not in vars(module)


def _generator_states() -> tuple[Any, Any, Tensor]:
    numpy = _numpy()
    return random.getstate(), None if numpy is None else numpy.get_state(), torch.get_rng_state()


def _restore_generators(states: tuple[Any, Any, Tensor]) -> None:
    python, of_numpy, of_torch = states
    random.setstate(python)
    if of_numpy is not None:
        _numpy().set_state(of_numpy)
    torch.set_rng_state(of_torch)


# Precision


@contextmanager
def without_autocast() -> Iterator[None]:
    """Within, no autocast is on; the caller's holds for running a network, not for capturing it."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
