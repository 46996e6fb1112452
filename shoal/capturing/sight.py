"""What a network's code can read besides its parameters, buffers and inputs, and whether that is still what it was.

A capture holds for the Python values that the code met. They are:

    attributes of modules       numbers and texts all; others where some code that `forward` reaches has their name
    in these, and below them    lists, dicts, sets, objects, functions with their closures, tensors, numpy's arrays
    class attributes, methods   of the modules' own classes, and of those of such objects
    globals                     that `forward`, or a function that it reaches, has the name of

Code is reached by names alone: from `forward` to every method, function and global whose name stands in it. Where it
looks names up as it runs (getattr, vars, ...), every name counts. Code and objects of torch, numpy, pytest and Python
itself are taken as one thing each.

Cost      some 50 ns for each value in every pass; where something changed, milliseconds.
"""

import builtins
import dis
import functools
import hashlib
import sys
import types
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextvars import ContextVar
from enum import Enum
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from shoal.capturing.attributes import DEEPEST, MOST, OWN, version_of

_SCALARS: Any = frozenset((bool, int, float, complex, str, bytes, type(None)))
_WORDS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range, slice, Enum)
"""Values that cannot change, and say all of themselves."""
_OPEN = (types.SimpleNamespace, Namespace)
"""Python's own objects that people keep settings in."""
_LATER = frozenset(
    ("getattr", "vars", "__dict__", "eval", "exec", "globals", "locals", "attrgetter", "asdict", "astuple")
)
"""Code with these names may read what it has no name of."""
_UNASKED = frozenset(("__init__", "__new__", "__repr__", "__str__", "__del__", "__setattr__", "__delattr__", "__dir__"))
"""Methods that Python calls when no network runs."""
_COMPARING = frozenset(("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__replace__"))
"""Methods that a dataclass is given, which have the names of all its fields."""
_REMEMBERED = 4
_MISSING = object()

Read = Callable[[], tuple[Any, ...]]


class Sight:
    """What the code of `network` and of `loss` can read."""

    def __init__(self, network: nn.Module, loss: Any = None) -> None:
        self._network, self._loss = network, loss
        self._numbers: dict[str, list[Callable[[], Any]]] = {}
        """The objects that were seen under a label, in order: ranks cannot compare them otherwise."""
        self._looks: list[_Look] = []
        """The last ones, the latest first: a network goes to and fro between training and evaluation."""

    def now(self) -> tuple[str, list[tuple[str, str]]]:
        """(a mark of everything as it is now, what it stands for: what there is, and its value).

        In words that are the same on all ranks.
        """
        for place, look in enumerate(self._looks):
            if look.still():
                if place:
                    self._looks.insert(0, self._looks.pop(place))
                return look.mark, look.said
        look = self._look()
        look.mark = hashlib.blake2b(repr(look.said).encode(), digest_size=16).hexdigest()
        self._looks = [look, *self._looks[: _REMEMBERED - 1]]
        return look.mark, look.said

    def _look(self) -> "_Look":
        reach = _Reach()
        while True:
            size = reach.size
            look = _Look(reach, self._numbers, self._network)
            look.at(torch.get_default_dtype(), "torch.get_default_dtype()")
            look.watch(lambda: (torch.get_default_dtype(),))
            look.at_modules(self._network, "")
            if self._loss is not None:
                look.at(self._loss, "loss")
            look.at_classes()
            look.at_globals()
            if reach.size == size:
                return look


class _Reach:
    """The code that runs, as far as names tell."""

    def __init__(self) -> None:
        self.names = {"forward"}
        self.every_name = False
        self.classes: dict[type, None] = {}
        self.around: dict[int, tuple[dict[str, Any], set[str]]] = {}
        """Globals, and the names of them that are used."""
        self._followed: set[tuple[types.CodeType, int]] = set()

    @property
    def size(self) -> tuple[int, ...]:
        used = sum(len(names) for _, names in self.around.values())
        return len(self.names), self.every_name, len(self.classes), used, len(self._followed)

    def has(self, name: str) -> bool:
        return name in self.names or self.every_name

    def follow(self, function: types.FunctionType) -> None:
        code, around = function.__code__, function.__globals__
        if (code, id(around)) in self._followed:
            return
        self._followed.add((code, id(around)))
        names = _names_in(code)
        self.names |= names
        if not _is_foreign(function.__module__):
            self.every_name = self.every_name or bool(names & _LATER)
            self._use(around, _globals_in(code), names, set())

    def _use(self, around: dict[str, Any], names: Set[str], further: Set[str], done: set[int]) -> None:
        """Globals are read by these names, and what lies in the Python modules among them by the further ones."""
        done.add(id(around))
        self.around.setdefault(id(around), (around, set()))[1].update(names & around.keys())
        for name in names & around.keys():
            value = around[name]
            own = issubclass(type(value), types.ModuleType) and not _is_foreign(value.__name__)
            if own and id(vars(value)) not in done:
                self._use(vars(value), further, further, done)


class _Look:
    """One look at everything."""

    def __init__(self, reach: _Reach, numbers: dict[str, list[Callable[[], Any]]], network: nn.Module) -> None:
        self.reach, self.numbers = reach, numbers
        self.mark = ""
        self.said: list[tuple[str, str]] = []
        self.mappings: list[tuple[Callable[[Any], tuple[Any, ...]], Mapping[str, Any]]] = []
        """What gets the values that count out of a mapping, and the mapping."""
        self.values: list[Any] = []
        """These values, of all mappings."""
        self.counted: list[Mapping[str, Any]] = []
        self.lengths: list[int] = []
        """Mappings in which a new name would count, and how many they have."""
        self.readers: list[tuple[Read, tuple[Any, ...]]] = []
        self.seen: dict[int, tuple[str, Any]] = {}
        """What was looked at, by identity: its words, and itself, so that the identity stays its own."""
        self.left = MOST
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            self.seen.setdefault(id(tensor), (f"the network's {name!r}", tensor))

    def still(self) -> bool:
        """Whether everything is as it was seen."""
        if [*map(len, self.counted)] != self.lengths:  # attributes came or went
            return False
        present: list[Any] = []
        try:
            for get, mapping in self.mappings:
                present += get(mapping)
        except KeyError:
            return False
        if not all(map(is_, present, self.values)):
            if not all(map(_same, present, self.values)):
                return False
            self.values = present
        for number, (read, before) in enumerate(self.readers):
            now = read()
            if len(now) != len(before) or not all(map(is_, now, before)):
                if len(now) != len(before) or not all(map(_same, now, before)):
                    return False
                self.readers[number] = (read, now)
        return True

    def say(self, label: str, text: str) -> None:
        self.said.append((label, text))

    def watch(self, read: Read) -> None:
        self.readers.append((read, read()))

    def keep(self, mapping: Mapping[str, Any], names: list[str]) -> None:
        if names:
            get = itemgetter(*names, names[0])  # of two at least it gives a tuple
            self.mappings.append((get, mapping))
            self.values += get(mapping)

    # Places with names

    def at_modules(self, root: nn.Module, label: str) -> None:
        """A module and all modules in it."""
        inner = [(path, module) for path, module in root.named_modules() if id(module) not in self.seen]
        for path, module in inner:
            self.seen[id(module)] = (f"module {_join(label, path)!r}", module)
        modules = [module for _, module in inner]
        self.watch(lambda: tuple(map(type, modules)))
        for path, module in inner:
            where, kind, held = _join(label, path), type(module), vars(module)
            self.reach.classes[kind] = None
            self.say(_join(where, "__class__"), kind.__qualname__)
            names = [name for name in held if name not in OWN or name == "training"]
            self.at_names(held, [n for n in names if type(held[n]) in _SCALARS or self.reach.has(n)], where)
            if label:  # no part of the network itself
                for kept in ("_parameters", "_buffers", "_modules"):
                    self.at_names(held[kept], list(held[kept]), where)

    def at_names(self, mapping: Mapping[str, Any], names: list[str], label: str, depth: int = 0) -> None:
        """What a mapping has under these names, and whether it gets others."""
        self.counted.append(mapping)
        self.lengths.append(len(mapping))
        self.keep(mapping, names)
        for name in names:
            self.at(mapping[name], _join(label, name), depth)

    def at_classes(self) -> None:
        """Methods and attributes of the classes whose code runs."""
        bases = dict.fromkeys(base for kind in list(self.reach.classes) for base in kind.__mro__)
        for base in bases:
            content = vars(base)
            if _is_foreign(base.__module__):
                if issubclass(base, nn.Module) and base is not nn.Module:  # its code has names of settings
                    for name in self.reach.names & content.keys():
                        if isinstance(method := _plain_function(content[name]), types.FunctionType):
                            self.reach.follow(method)
                continue
            names = [name for name in content if self._counts(name, content[name], base)]
            self.at_names(content, names, f"class {base.__qualname__}")

    def _counts(self, name: str, value: Any, kind: type) -> bool:
        if name.startswith("__") and name.endswith("__"):  # called by Python, not by name
            skipped = _UNASKED | _COMPARING if "__dataclass_fields__" in vars(kind) else _UNASKED
            return name not in skipped and not issubclass(kind, nn.Module) and isinstance(value, types.FunctionType)
        return self.reach.has(name)

    def at_globals(self) -> None:
        """Globals that the code has names of, and what it reads of the user's own Python modules."""
        namespaces = sorted(self.reach.around.values(), key=lambda namespace: str(namespace[0].get("__name__")))
        for around, used in namespaces:
            names = sorted(used)
            self.keep(around, names)
            for name in names:
                self.at(around[name], f"global {around.get('__name__')}.{name}")

    # Values

    def at(self, value: Any, label: str, depth: int = 0) -> None:
        """A value and all that it holds."""
        kind = type(value)
        if kind in _SCALARS:
            self.say(label, repr(value))
        elif id(value) in self.seen:
            self.say(label, self.seen[id(value)][0])
        elif kind is tuple and all(type(item) in _SCALARS for item in value):
            self.say(label, repr(value))
        else:
            self.seen[id(value)] = (f"the same as {label}", value)
            self.left -= 1
            if depth > DEEPEST or self.left < 0:
                self.at_one(value, label)
            else:
                self._within(value, kind, label, depth + 1)

    def _within(self, value: Any, kind: type, label: str, depth: int) -> None:
        if issubclass(kind, _WORDS):
            self.say(label, repr(value))
            if not _is_foreign(kind.__module__):
                self.reach.classes[kind] = None
        elif issubclass(kind, Tensor):
            self._at_tensor(value, label)
        elif issubclass(kind, nn.Module):
            del self.seen[id(value)]
            self.at_modules(value, label)
        elif issubclass(kind, list | tuple | deque | set | frozenset | dict):
            self._at_items(value, label, depth)
            if not _is_foreign(kind.__module__):
                self._at_object(value, kind, label, depth)
            del self.seen[id(value)]  # two of the same content are as good as one
        elif issubclass(kind, type):
            self.say(label, f"class {_name_of(value)}")
            if not _is_foreign(value.__module__):
                self.reach.classes[value] = None
        elif issubclass(kind, types.ModuleType):
            self.say(label, value.__name__)
        elif issubclass(kind, ContextVar):
            self.watch(lambda: (value.get(None),))
            self.at(value.get(None), f"{label}.get()", depth)
        elif (array := _array(value)) is not None:
            self.say(label, f"an array {array.dtype} {array.shape} {_digest(array)}")
            self.watch(lambda: (_digest(array),))
        else:
            self._at_code(value, kind, label, depth)

    def _at_tensor(self, tensor: Tensor, label: str) -> None:
        try:
            content = content_of(tensor)
        except (RuntimeError, TypeError):  # of a kind whose values cannot be read
            self.at_one(tensor, label)
            content = f"changed {version_of(tensor)} times"
        learns = ", that learns" if tensor.requires_grad else ""
        self.say(label, f"a tensor {tensor.dtype} {tuple(tensor.shape)} {content}{learns}")
        self.watch(lambda: (version_of(tensor), 0 if tensor.is_meta else tensor.data_ptr(), tensor.requires_grad))

    def _at_items(self, value: Any, label: str, depth: int) -> None:
        """Of a list, dict, set, or one of their kin."""
        if isinstance(value, dict):
            self.watch(lambda: (*value, *value.values()))
            pairs = [(f"{label}[{key!r}]" if type(key) in _SCALARS else label, item) for key, item in value.items()]
            if all(type(key) in _SCALARS for key in value):
                self.say(label, f"{type(value).__name__} of {list(value)}")
            else:
                pairs += [(f"{label}, key {number}", key) for number, key in enumerate(value)]
            for inner, item in pairs:
                self.at(item, inner, depth)
            return
        if not isinstance(value, tuple | frozenset):
            self.watch(lambda: tuple(value))
        if all(type(element) in _SCALARS for element in value):
            items = sorted(map(repr, value)) if isinstance(value, set | frozenset) else map(repr, value)
            self.say(label, f"{type(value).__name__} of {', '.join(items)}")
            return
        self.say(label, f"{type(value).__name__} of {len(value)}")
        for number, item in enumerate(sorted(value, key=repr) if isinstance(value, set | frozenset) else value):
            self.at(item, f"{label}[{number}]", depth)

    def _at_code(self, value: Any, kind: type, label: str, depth: int) -> None:
        """Functions, and objects of any kind."""
        if issubclass(kind, types.MethodType | types.BuiltinMethodType) and value.__self__ is not None:
            self.say(label, f"method {value.__name__}")
            self.at(getattr(value, "__func__", None), f"{label}()", depth)
            self.at(value.__self__, f"{label}, its object", depth)
        elif issubclass(kind, functools.partial):
            for name in ("func", "args", "keywords"):
                self.at(getattr(value, name), _join(label, name), depth)
        elif (function := _plain_function(value)) is not value:
            self.at(function, label, depth)
        elif issubclass(kind, types.FunctionType):
            self._at_function(value, label, depth)
        elif issubclass(kind, types.BuiltinFunctionType | types.WrapperDescriptorType):
            self.say(label, _name_of(value))
        elif issubclass(kind, _OPEN) or not _is_foreign(kind.__module__):
            self._at_object(value, kind, label, depth)
        else:
            self.at_one(value, label)

    def _at_function(self, function: types.FunctionType, label: str, depth: int) -> None:
        if _is_foreign(function.__module__):
            self.say(label, _name_of(function))
            return
        self.say(label, f"{_name_of(function)} {_code_of(function.__code__)}")
        self.reach.follow(function)
        self.watch(lambda: (function.__code__, function.__defaults__, function.__kwdefaults__))
        self.at(function.__defaults__, f"{label}, defaults", depth)
        self.at(function.__kwdefaults__, f"{label}, defaults by name", depth)
        cells = function.__closure__ or ()
        if cells:
            self.watch(lambda: tuple(map(_content_of_cell, cells)))
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            self.at(_content_of_cell(cell), f"{label}, {name!r}", depth)

    def _at_object(self, value: Any, kind: type, label: str, depth: int) -> None:
        self.say(label, f"a {kind.__qualname__}")
        self.watch(lambda: (type(value),))
        if not _is_foreign(kind.__module__):
            self.reach.classes[kind] = None
        every = any(name in vars(base) for base in kind.__mro__[:-1] for name in ("__getattr__", "__getattribute__"))
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self.at_names(held, [name for name in held if every or self.reach.has(name)], label, depth)
        slots = [name for name in _slots(kind) if every or self.reach.has(name)]
        if slots:
            self.watch(lambda: tuple(getattr(value, name, _MISSING) for name in slots))
            for name in slots:
                self.at(getattr(value, name, None), _join(label, name), depth)

    def at_one(self, value: Any, label: str) -> None:
        """An object that is taken as one thing: which of those that were seen there."""
        known = self.numbers.setdefault(label, [])
        place = next((place for place, reference in enumerate(known) if reference() is value), len(known))
        if place == len(known):
            try:
                known.append(weakref.ref(value))
            except TypeError:
                known.append(lambda: value)
        self.say(label, f"a {type(value).__qualname__} ({place})")


def _same(a: Any, b: Any) -> bool:
    kind = type(a)
    return a is b or (kind is type(b) and kind in _SCALARS and repr(a) == repr(b))


@functools.lru_cache(maxsize=10_000)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Names that code reads by, texts in it that may be such, and those of the functions in it."""
    names = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=10_000)
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """Names of globals alone; names of attributes may be those of other globals."""
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = [_globals_in(inside) for inside in code.co_consts if isinstance(inside, types.CodeType)]
    return frozenset(names.union(*inner))


def _code_of(code: types.CodeType) -> str:
    """A mark of what code does, wherever it stands."""

    def text(constant: Any) -> str:
        if isinstance(constant, types.CodeType):
            return _code_of(constant)
        if isinstance(constant, frozenset):
            return str(sorted(map(text, constant)))
        return str(list(map(text, constant))) if isinstance(constant, tuple) else repr(constant)

    parts = [repr(code.co_code), text(code.co_consts), repr(code.co_names), repr(code.co_varnames)]
    return hashlib.blake2b("".join(parts).encode(), digest_size=6).hexdigest()


def _plain_function(value: Any) -> Any:
    """The function in a static method, class method, property, or one with a cache; else the value itself."""
    kind = type(value)  # of a weak proxy `isinstance` would ask what may be gone
    if issubclass(kind, staticmethod | classmethod):
        return value.__func__
    if issubclass(kind, property):
        return value.fget
    if issubclass(kind, functools.cached_property):
        return value.func
    return value.__wrapped__ if issubclass(kind, functools._lru_cache_wrapper) else value


def _content_of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                yield name


def _array(value: Any) -> Any:
    numpy: Any = sys.modules.get("numpy")
    return value if numpy is not None and issubclass(type(value), numpy.ndarray | numpy.generic) else None


def _digest(array: Any) -> str:
    data = array.tobytes() if array.dtype != object else repr(array).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def content_of(tensor: Tensor) -> str:
    """A mark of a tensor's values; empty where it has none."""
    if tensor.is_meta or tensor.numel() == 0:
        return ""
    plain = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    flat = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def _is_foreign(home: str | None) -> bool:
    """Whether code is torch's, numpy's or Python's own, or pytest's, which is in every `assert` of a file of tests.

    Nobody changes it after.
    """
    top = str(home).split(".", 1)[0]
    return top in sys.stdlib_module_names or top in ("torch", "numpy", "shoal", "pytest", "_pytest")


def _name_of(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None) or builtins.__name__}.{thing.__qualname__}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def differing(
    settings: Iterable[tuple[str, str]], other_settings: Iterable[tuple[str, str]]
) -> tuple[str, str, str] | None:
    """The first thing that two looks do not have in common: (what, its value in one, in the other)."""
    first, second = dict(settings), dict(other_settings)
    for label in {**first, **second}:
        value, other_value = first.get(label, "nothing"), second.get(label, "nothing")
        if value != other_value:
            return label, value, other_value
    return None
