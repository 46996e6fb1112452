"""A factory is run, and its large tensors are described instead of held.

    torch.empty(...)         a meta tensor, and a `Memory` under the address of its storage: views and ties are torch's
    weight.uniform_(...)     a line in that memory's journal; the generator moves on as if it had been drawn
    weight.t(), x.view(...)  meta tensors of the same storage; nothing is written down
    weight * 0.02            another memory that begins as this result
    weight.norm().item()     computed now, as values are wanted now

The factory sees tensors on the CPU. What cannot be followed (numpy's view of a tensor, several tensors written to at
once) is a `ModelError`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.building.factory_journal import Draws, Filled, Held, Memory, Place, Ref, Result, Step, grid
from shoal.building.playing import Whole
from shoal.errors import ModelError

CPU, META = torch.device("cpu"), torch.device("meta")

_aten = torch.ops.aten

_DRAWN_IN_ORDER = {"uniform_", "normal_", "random_", "log_normal_", "cauchy_", "geometric_"}
"""Random fills whose numbers come one after the other from the generator. `bernoulli_` and `exponential_` are given
to MKL on some processors, which draws otherwise."""

_Fill = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]

_CREATIONS: dict[str, _Fill] = {
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"), lambda *_: None),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda *_: 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda *_: 1),
    **dict.fromkeys(("full", "full_like"), lambda args, kwargs: _argument(args, kwargs, 1, "fill_value")),
    "new_full": lambda args, kwargs: _argument(args, kwargs, 2, "fill_value"),
    **dict.fromkeys(("rand", "randn", "rand_like", "randn_like"), lambda *_: None),
}
"""Operators that make a tensor out of nothing, and the value it begins with."""

_CREATION_DRAWS: dict[str, tuple[Any, tuple[float, float]]] = {
    **dict.fromkeys(("rand", "rand_like"), (_aten.uniform_.default, (0.0, 1.0))),
    **dict.fromkeys(("randn", "randn_like"), (_aten.normal_.default, (0.0, 1.0))),
}

_VALUES_NOW = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], at: int, name: str) -> Any:
    return args[at] if len(args) > at else kwargs[name]


class Recorder:
    """Within it, tensors of more than `small` elements are described; `chunk` elements are drawn at a time."""

    def __init__(self, small: int, chunk: int) -> None:
        self.small, self.chunk = small, chunk
        self.paused = False
        self._memories: dict[int, Memory] = {}
        self._modes = ExitStack()

    def __enter__(self) -> "Recorder":
        self._modes.enter_context(_AsOnCpu(self))
        self._modes.enter_context(_Journaling(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._modes.__exit__(kind, error, trace)

    def begin(self, tensor: Tensor, start: Filled | Held | Result) -> Memory:
        """A new memory for a meta tensor that is the first in its storage."""
        storage = tensor.untyped_storage()
        memory = self._memories[storage._cdata] = Memory(storage, tensor.dtype, start)
        return memory

    def known(self, tensor: Tensor) -> bool:
        """Whether the tensor is one that is described."""
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._memories

    def ref(self, tensor: Tensor) -> Ref:
        """A described tensor, as it is now."""
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        if memory is None:
            refuse("it uses a tensor on the meta device that was made elsewhere")
        if tensor.is_conj() or tensor.is_neg() or memory.meta.nbytes() % memory.dtype.itemsize:
            refuse("it uses a view of complex numbers")
        return Ref(memory, memory.version, Place.of(tensor))

    def described(self, tensor: Tensor) -> Tensor:
        """A tensor that is held, or its storage, as one that is described: the storage's values are kept."""
        storage = tensor.untyped_storage()
        with self._pause():
            meta = torch.empty(storage.nbytes(), dtype=torch.uint8, device=META)
            twin = Place.of(tensor).tensor(meta.untyped_storage())
        self.begin(twin, Held(storage))
        return twin

    def value(self, tensor: Tensor) -> Tensor:
        """A described tensor's values, whole."""
        with self._pause():
            return Whole(self.chunk).tensor(self.ref(tensor)).clone()

    def forget_unused(self) -> None:
        """Drop memories that no tensor lies in any more; those that others are made of live on in these."""
        for address in [a for a in self._memories if torch._C._storage_Use_Count(a) == 1]:
            del self._memories[address]

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Operators inside are our own."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


def refuse(problem: str) -> NoReturn:
    """Say what a factory does that cannot be followed."""
    raise ModelError(
        f"the network cannot be built in parts: {problem}.",
        "Leave that out of the function that makes the network, or pass the network itself, built whole.",
    )


def become(tensor: Tensor, content: Tensor) -> None:
    """Let a tensor be another one and stay the same object, with its class and attributes."""
    content = content.detach()
    if content.is_floating_point() or content.is_complex():
        content.requires_grad_(tensor.requires_grad)
    # not torch.utils.swap_tensors, which refuses objects with weak references, such as an LSTM's weights: it cares for
    # those who hold the other object, and here nobody does
    torch._C._swap_tensor_impl(tensor, content)


class _AsOnCpu(TorchFunctionMode):
    """Described tensors say that they are on the CPU, and do not leave it by being told to go there."""

    _UNSEEN = (
        *("numpy", "__array__", "__dlpack__", "data_ptr", "share_memory_", "pin_memory"),
        *("storage", "untyped_storage", "__reduce_ex__"),
    )

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._answers: dict[Any, Any] = {
            Tensor.device.__get__: CPU,
            Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
        }
        self._set_data = Tensor.data.__set__  # type: ignore[attr-defined]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder, own = self._recorder, args[0] if args else None
        if func == self._set_data:
            return self._assign(*args)
        if func is Tensor.to and any(map(_is_meta, (own, *args, *kwargs.values()))):
            return self._moved(*args, **kwargs)
        if not isinstance(own, Tensor) or not recorder.known(own):
            return func(*args, **kwargs)
        if func in self._answers:
            return self._answers[func]
        if func is Tensor.cpu:
            return own
        if func is Tensor.new_tensor:
            return torch.tensor(args[1], **{"dtype": own.dtype, **kwargs})
        if func is Tensor.tolist:
            return recorder.value(own).tolist()
        if getattr(func, "__name__", "") in self._UNSEEN:
            refuse(f"it asks for the memory of a large tensor by {func.__name__}")
        return func(*args, **kwargs)

    def _assign(self, own: Tensor, value: Tensor) -> None:
        """`x.data = value`: where one is held and one is described, `x` becomes what `value` is, in its memory."""
        if own.is_meta == value.is_meta:
            self._set_data(own, value)
        else:
            become(own, value)

    @staticmethod
    def _moved(own: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`x.to(...)`: to the CPU is to where `x` is, held or described; `x.to(other)` is to its type."""
        home = META if own.is_meta else CPU
        words = [word for arg in args for word in ((arg.device, arg.dtype) if isinstance(arg, Tensor) else (arg,))]
        if isinstance(other := kwargs.pop("other", None), Tensor):
            words += [other.device, other.dtype]
        args = tuple(home if _names(word, "cpu", "meta") else word for word in words)
        if _names(kwargs.get("device"), "cpu", "meta"):
            kwargs["device"] = home
        return own.to(*args, **kwargs)


def _is_meta(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_meta


def _names(word: Any, *kinds: str) -> bool:
    return isinstance(word, str | torch.device) and torch.device(word).type in kinds


class _Journaling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator that a described tensor meets, or could come from."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._recorder.paused:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._follow(func, args, dict(kwargs or {}))

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        described = [t for t in tree_leaves((args, kwargs)) if _is_meta(t)]
        for tensor in described:
            self._recorder.ref(tensor)
        if _names(kwargs.get("device"), "meta"):
            kwargs["device"] = CPU
        here = "device" not in kwargs or kwargs["device"] is None or _names(kwargs["device"], "cpu")
        if func.overloadpacket.__name__ in _CREATIONS and here and kwargs.get("layout") in (None, torch.strided):
            own = args[0] if args and isinstance(args[0], Tensor) else None
            if own is None or own.device in (CPU, META) or "device" in kwargs:
                return self._create(func, args, {**kwargs, "device": CPU})
        if not described:
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self._changed_view(func, args, kwargs)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        return self._compute(func, args, kwargs, here=here)

    def _create(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        name = func.overloadpacket.__name__
        meta: Tensor = func(*args, **{**kwargs, "device": META, "pin_memory": False})
        if meta.numel() <= self._recorder.small:
            made: Tensor = func(*args, **kwargs)
            return made
        memory = self._recorder.begin(meta, Filled(_CREATIONS[name](args, kwargs)))
        if name in _CREATION_DRAWS:
            draw, numbers = _CREATION_DRAWS[name]
            self._record(memory, draw, meta, (meta, *numbers), {"generator": kwargs.get("generator")})
        return meta

    def _changed_view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not all(map(_is_meta, (tensor for tensor in args if isinstance(tensor, Tensor)))):
            refuse(f"it joins a large tensor with another by {func}")
        sizes = [storage.nbytes() for storage in self._storages(args)]
        result = func(*args, **kwargs)
        if sizes != [storage.nbytes() for storage in self._storages(args)]:
            refuse(f"it changes the size of a large tensor by {func}")
        for tensor in args:
            if _is_meta(tensor):
                self._recorder.ref(tensor)
        return result

    @staticmethod
    def _storages(args: tuple[Any, ...]) -> list[torch.UntypedStorage]:
        return [tensor.untyped_storage() for tensor in args if _is_meta(tensor)]

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = tree_leaves(_written(func, args, kwargs))
        if not any(map(_is_meta, written)):
            return self._now(func, args, kwargs)
        if len(written) != 1:
            refuse(f"it writes to several tensors at once by {func}")
        (target,) = written
        size = target.untyped_storage().nbytes()
        if self._try_on_meta(func, args, kwargs) is None and torch.Tag.nondeterministic_seeded not in func.tags:
            self._now(func, *tree_map_only(Tensor, self._copied, (args, kwargs)))  # an error is told now, by torch
        if target.untyped_storage().nbytes() != size:
            refuse(f"it changes the size of a large tensor by {func}")
        self._record(self._recorder.ref(target).memory, func, target, args, kwargs)
        return target

    def _record(self, memory: Memory, func: Any, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder, place = self._recorder, self._recorder.ref(target)

        def written_down(tensor: Tensor) -> Ref | Tensor:
            if tensor is target:
                return place
            return recorder.ref(tensor) if tensor.is_meta else tensor.detach().clone()

        kept = {name: value for name, value in kwargs.items() if name != "generator"}
        its_args, its_kwargs = tree_map_only(Tensor, written_down, (args, kept))
        step = Step(func, its_args, its_kwargs, place)
        if torch.Tag.nondeterministic_seeded in func.tags:
            draws = self._advance(step, kwargs.get("generator") or torch.default_generator)
            step = Step(func, its_args, its_kwargs, place, draws)
        memory.writes.append(step)

    def _advance(self, step: Step, generator: torch.Generator) -> Draws:
        """Move the generator on by what the step draws, and keep where it was."""
        target = step.target
        assert target is not None
        if generator.device != CPU:
            refuse("it fills a tensor on the CPU by a generator that is elsewhere")
        numbers = [arg for arg in tree_leaves((step.args, dict(step.kwargs))) if arg is not target]
        plain = not any(isinstance(arg, Ref | Tensor) for arg in numbers)
        if target.covers and plain and step.func.overloadpacket.__name__ in _DRAWN_IN_ORDER:
            return Draws(self._draw_chunks(step, target, generator), by_chunk=True)
        state = generator.get_state()
        whole = torch.empty(target.memory.elements, dtype=target.memory.dtype)
        scratch = target.place.tensor(whole.untyped_storage())
        values = Whole(self._recorder.chunk)
        args, kwargs = tree_map_only(
            Ref, lambda ref: scratch if ref is target else values.tensor(ref), (step.args, dict(step.kwargs))
        )
        step.func(*args, **kwargs, generator=generator)
        return Draws(state[None], by_chunk=False)

    def _draw_chunks(self, step: Step, target: Ref, generator: torch.Generator) -> Tensor:
        """The generator's state before every chunk, which is drawn and dropped.

        All is allocated before: small pieces of memory that stay, between large ones that go, make holes in which
        nothing fits, up to the size of the whole.
        """
        chunks = list(grid(target.memory.elements, self._recorder.chunk))
        states = generator.get_state().repeat(len(chunks), 1)
        scratch = torch.empty(max(stop - start for start, stop in chunks), dtype=target.place.dtype)
        for state, (start, stop) in zip(states, chunks, strict=True):
            state.copy_(generator.get_state())
            args = (scratch[: stop - start] if arg is target else arg for arg in step.args)
            step.func(*args, **step.kwargs, generator=generator)
        return states

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, here: bool) -> Any:
        if not here or any(tag in func.tags for tag in _VALUES_NOW):
            return self._now(func, args, kwargs)
        result = self._try_on_meta(func, args, kwargs)
        tensors = tree_leaves(result)
        if not tensors or not all(_is_meta(tensor) and tensor.layout == torch.strided for tensor in tensors):
            return self._now(func, args, kwargs)
        if all(map(self._recorder.known, tensors)):
            return result  # views
        recorder = self._recorder
        its_args, its_kwargs = tree_map_only(
            Tensor,
            lambda tensor: recorder.ref(tensor) if tensor.is_meta else tensor.detach().clone(),
            (args, kwargs),
        )
        step = Step(func, its_args, its_kwargs)
        for number, tensor in enumerate(tensors):
            if not recorder.known(tensor):
                recorder.begin(tensor, Result(step, number, Place.of(tensor)))
        return result

    def _now(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it on values, whole; nothing that is described may be written to."""
        values, recorder = Whole(self._recorder.chunk), self._recorder
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: values.tensor(recorder.ref(tensor)) if tensor.is_meta else tensor, (args, kwargs)
        )
        result = func(*args, **kwargs)
        values.settle()
        recorder.forget_unused()
        return result

    def _copied(self, tensor: Tensor) -> Tensor:
        return self._recorder.value(tensor) if tensor.is_meta else tensor

    @staticmethod
    def _try_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator gives as to sizes; None where torch cannot say that without values, or it is wrong."""
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(META), (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = META
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError, ValueError, IndexError):
            return None


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    given = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given.append(args[at] if at < len(args) else kwargs.get(argument.name))
    return [value for value in given if value is not None]
