"""What a network remembers in Python: attributes of its modules, of their classes, and the globals that they use.

torch.export runs `forward` once. Whatever `forward` keeps for the next pass (a counter, a schedule, a list of
activations) would be frozen as it was. A picture before and one after tell what changed.
"""

import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

OWN = frozenset(vars(nn.Module()))
"""What every module has; parameters, buffers and children are looked at apart."""
DEEPEST, MOST = 6, 20_000
"""How far a look goes into values that hold others, and how many it takes."""
_MISSING: Any = ("missing",)
_NOTHING = "nothing"
_PARAMETERS, _BUFFERS, _MODULES = ", of its parameters", ", of its buffers", ", of its modules"

Look = tuple[Any, ...]
"""A value as it was, to compare with: (kind, ...)."""

_LISTS_OF_WEIGHTS = ("_flat_weights", "_flat_weight_refs")
"""Attributes in which nn.LSTM, nn.GRU and nn.RNN list their own parameters, anew when these are others."""


@dataclass(frozen=True)
class Change:
    """Something that a pass left otherwise than it was."""

    owner: str
    """Whose it is, for people: `module 'features.3'`."""
    name: str
    before: str
    after: str
    tensors: tuple[Tensor, ...]
    """The tensors that it now holds and did not hold."""

    @property
    def expected(self) -> bool:
        """Whether torch.export itself follows it: a buffer that is given a new value, or nn.LSTM's list of weights."""
        buffer = self.owner.endswith(_BUFFERS) and _NOTHING not in (self.before, self.after)
        return buffer or self.name in _LISTS_OF_WEIGHTS

    @property
    def structural(self) -> bool:
        """Whether the network's own parts changed: its parameters, buffers or modules."""
        return self.owner.endswith((_PARAMETERS, _BUFFERS, _MODULES))

    def __str__(self) -> str:
        for kind in (_PARAMETERS, _BUFFERS, _MODULES):
            if self.owner.endswith(kind):
                what = kind.split()[-1].removesuffix("s")
                return f"{self.owner.removesuffix(kind)} sets its {what} {self.name!r} anew in its forward pass"
        return f"{self.owner} changes its {self.name!r} in its forward pass: {self.before} becomes {self.after}"


@dataclass
class Picture:
    """The plain attributes of all modules at one moment."""

    holders: dict[str, dict[str, Any] | type]
    """Where attributes are kept, by owner."""
    looks: dict[tuple[str, str], Look]
    held: dict[tuple[str, str], Any]
    """The values themselves, and what lists and dicts held."""
    tensors: dict[tuple[str, str], list[Tensor]] = field(default_factory=dict)
    """All tensors that a value held, however deep."""
    alive: list[Any] = field(default_factory=list)
    """Everything seen: as long as it lives, its identity is its own."""

    def changes(self, later: "Picture") -> list[Change]:
        """What is otherwise in a later picture."""
        changes = []
        for key in {**self.looks, **later.looks}:
            before, after = self.looks.get(key, _MISSING), later.looks.get(key, _MISSING)
            if before != after:
                old = set(map(id, self.tensors.get(key, ())))
                new = tuple(tensor for tensor in later.tensors.get(key, ()) if id(tensor) not in old)
                changes.append(Change(*key, _told(before), _told(after), new))
        return changes

    def restore(self, changes: list[Change]) -> None:
        """Put back what was changed: attributes, and the items of lists, dicts and sets."""
        for change in changes:
            holder, key = self.holders.get(change.owner), (change.owner, change.name)
            if holder is None:
                continue
            if key not in self.held:
                _remove(holder, change.name)
                continue
            value, items = self.held[key]
            _put(holder, change.name, value)
            if isinstance(value, list):
                value[:] = items
            elif isinstance(value, dict | set):
                value.clear()
                value.update(items)
            elif isinstance(value, deque):
                value.clear()
                value.extend(items)

    def put_back(self) -> None:
        """Every attribute the very object that it was: torch.export leaves copies of lists and dicts."""
        for (owner, name), (value, _) in self.held.items():
            holder = self.holders[owner]
            if (vars(holder) if isinstance(holder, type) else holder).get(name, _MISSING) is not value:
                _put(holder, name, value)


def _put(holder: dict[str, Any] | type, name: str, value: Any) -> None:
    if isinstance(holder, type):
        setattr(holder, name, value)
    else:
        holder[name] = value


def _remove(holder: dict[str, Any] | type, name: str) -> None:
    if not isinstance(holder, type):
        holder.pop(name, None)
    elif name in vars(holder):
        delattr(holder, name)


def take(model: nn.Module) -> Picture:
    """The picture of a network as it is now."""
    picture = Picture({}, {}, {})
    looking = _Looking()
    for owner, holder, names in _holders(model):
        picture.holders[owner] = holder
        for name in names:
            value = vars(holder)[name] if isinstance(holder, type) else holder[name]
            whole = owner.endswith((_PARAMETERS, _BUFFERS, _MODULES))  # torch.export follows writes to it
            picture.looks[owner, name] = ("one", id(value), type(value).__name__) if whole else looking.at(value)
            picture.held[owner, name] = (value, _items(value))
            picture.tensors[owner, name] = [seen for seen in looking.seen if isinstance(seen, Tensor)]
            picture.alive += [value, *looking.seen]
            looking.seen.clear()
    return picture


def _holders(model: nn.Module) -> Iterator[tuple[str, dict[str, Any] | type, list[str]]]:
    """(owner, where it keeps things, their names)."""
    classes: dict[type, None] = {}
    for path, module in model.named_modules():
        owner = f"module {path!r}" if path else f"the network {type(model).__name__}"
        held = vars(module)
        yield owner, held, [name for name in held if name not in OWN]
        for kind in (_PARAMETERS, _BUFFERS, _MODULES):
            yield f"{owner}{kind}", held[f"_{kind.split()[-1]}"], list(held[f"_{kind.split()[-1]}"])
        classes.update(dict.fromkeys(cls for cls in type(module).__mro__ if _is_users(cls)))
    seen = set()
    for cls in classes:
        names = [name for name, value in vars(cls).items() if not name.startswith("__") and _is_plain(value)]
        yield f"class {cls.__qualname__}", cls, names
        forward = vars(cls).get("forward")
        code, around = getattr(forward, "__code__", None), getattr(forward, "__globals__", None)
        if code is not None and around is not None and (id(around), code) not in seen:
            seen.add((id(around), code))
            names = [name for name in code.co_names if name in around and _is_plain(around[name])]
            yield f"file {code.co_filename}", around, names


def _is_users(kind: type) -> bool:
    return issubclass(kind, nn.Module) and not kind.__module__.startswith("torch.")


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | None | list | dict | set | deque)


def _items(value: Any) -> Any:
    """What a list, dict or set holds now."""
    if isinstance(value, list | dict | set | deque):
        return value.copy()
    return None


class _Looking:
    """Looks at values, deep, and notes all that it saw."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.inside: set[int] = set()
        self.left = MOST

    def at(self, value: Any, depth: int = 0) -> Look:
        self.left -= 1
        if isinstance(value, bool | int | float | complex | str | bytes | None | torch.dtype | torch.device):
            return ("plain", type(value).__name__, repr(value))
        self.seen.append(value)
        if depth > DEEPEST or self.left < 0 or id(value) in self.inside:
            return ("one", id(value), type(value).__name__)
        self.inside.add(id(value))
        try:
            return self._inner(value, depth + 1)
        finally:
            self.inside.discard(id(value))

    def _inner(self, value: Any, depth: int) -> Look:
        kind = type(value).__name__
        if isinstance(value, Tensor):
            return ("tensor", id(value), version_of(value), tuple(value.shape))
        if isinstance(value, nn.Module | type) or callable(value):
            return ("one", id(value), kind)
        if isinstance(value, dict):
            return ("many", kind, tuple((self.at(key, depth), self.at(item, depth)) for key, item in value.items()))
        if isinstance(value, set | frozenset):
            return ("many", kind, tuple(sorted(self.at(item, depth) for item in value)))
        if isinstance(value, list | tuple | deque):
            return ("many", kind, tuple(self.at(item, depth) for item in value))
        if (state := _generator_state(value)) is not None:
            return ("state", kind, state)
        inner = getattr(value, "__dict__", None)
        if isinstance(inner, dict):
            return ("object", id(value), kind, tuple((name, self.at(item, depth)) for name, item in inner.items()))
        return ("one", id(value), kind)


def version_of(tensor: Tensor) -> int:
    """A number that grows when a tensor is changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def _generator_state(value: Any) -> str | None:
    """The state of an array of numbers or of a source of random ones."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, torch.Generator):
        return repr(value.initial_seed())
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return repr(value.get_state())
    if numpy is not None and isinstance(value, numpy.ndarray):
        return f"{value.shape} {hash(value.tobytes())}"
    return None


def short(text: str) -> str:
    """A text for people, of 60 letters at most."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def _told(look: Look) -> str:
    match look:
        case ("missing",):
            return _NOTHING
        case ("plain", _, text):
            return short(text)
        case ("tensor", _, _, shape):
            return f"a tensor {shape}"
        case ("many", kind, items):
            return f"a {kind} of {len(items)}"
        case (_, _, kind, *_):
            return f"a {kind}"
    return "a value"
