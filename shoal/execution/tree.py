"""The user's own tree of modules over this rank's shards: what is read from it in every pass, and what is refused.

A parallel network shows the tree of the module that it was made of: the same module objects, their parameters this
rank's shards. Whatever a script sets on it counts from the next pass on, as with the module itself: training flags,
`requires_grad`, a dropout's `p`, any plain attribute. What cannot be honoured is refused by the module's path:

    a child that holds cut parameters is called on its own        its forward pre-hook says so
    a hook registered on a module inside                          it would never fire
    a parameter or a module replaced by another                   nobody laid it over the ranks
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.hooks import RemovableHandle

from shoal.capturing.watching import keeps_nothing
from shoal.errors import RunError

_PLAIN = (bool, int, float, str, tuple, type(None), torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MISSING = object()


class Tree:
    """A tree of modules, read in every pass."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._guards: list[_NotAlone] = []
        self._reading: list[Any] = []
        self._sizes: list[int] = []
        self._key = ""
        self.look()

    def look(self) -> None:
        """Take the tree as it is now for what was laid over the ranks."""
        self._plain: list[tuple[dict[str, Any], str, str]] = []
        self._contents: list[dict[str, Any]] = []
        self._fixed: list[tuple[Mapping[str, Any], str, object, str]] = []
        self._hooks: list[tuple[Mapping[int, Any], str]] = []
        for path, module in self.root.named_modules():
            content = module.__dict__
            self._contents.append(content)
            own = [name for name, value in content.items() if name in ("training",) or _is_plain(name, value)]
            self._plain += [(content, name, path) for name in own]
            for kind in ("_modules", "_parameters"):
                where = content[kind]
                self._fixed += [(where, name, value, _join(path, name)) for name, value in where.items()]
            self._hooks += [(content[kind], path) for kind in _HOOKS if kind in content]
        self._key = ""

    def key(self) -> str:
        """A mark of all that the network's code may read of its modules. Equal marks: the same network.

        Costs some 60 ns per attribute. A `RunError` names a hook, module or parameter that was put there since.
        """
        self._refuse_changes()
        sizes = list(map(len, self._contents))
        if sizes != self._sizes:  # attributes came or went
            self.look()
            self._sizes = sizes
        reading = [content.get(name, _MISSING) for content, name, _ in self._plain]
        if reading != self._reading or not self._key:
            self._reading = reading
            self._key = hashlib.blake2b(repr(self.settings()).encode(), digest_size=16).hexdigest()
        return self._key

    def settings(self) -> list[tuple[str, str]]:
        """What the last key stands for: every attribute and its value."""
        return [
            (_join(path, name), repr(value)) for (_, name, path), value in zip(self._plain, self._reading, strict=True)
        ]

    def _refuse_changes(self) -> None:
        for hooks, path in self._hooks:
            if hooks and not all(map(keeps_nothing, hooks.values())):
                raise RunError(
                    f"module {path!r} has a hook, which a network that is laid over ranks would never call.",
                    "Return the value from the network instead (it may return several), or register the hook on the "
                    "parallel network itself or on its parameters.",
                )
        for where, name, value, path in self._fixed:
            if where.get(name) is not value:
                raise RunError(
                    f"{path!r} is not what it was when the network was laid over the ranks.",
                    "Change weights in place (with torch.no_grad(): p.copy_(...)), or change the module first and call "
                    "shoal.parallelize then.",
                )

    def guard(self, cut: Mapping[str, str], undo: Callable[[], None]) -> list[RemovableHandle]:
        """Refuse to call modules on their own that hold cut parameters; handles to end that.

        `cut`: such modules' paths, and a parameter; `undo`: makes them whole again.
        """
        handles = []
        for path, parameter in cut.items():
            guard = _NotAlone(path, parameter, self.root, undo)
            handles.append(self.root.get_submodule(path).register_forward_pre_hook(guard, prepend=True))
            self._guards.append(guard)
        self.look()
        return handles

    @contextmanager
    def whole(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[FakeTensorMode]:
        """Within, every tensor of the tree has its whole shape and no content, and every module can be called.

        `shapes`: of all parameters and buffers, by name. Nothing is allocated.
        """
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        kept = []
        made: dict[int, Tensor] = {}
        for path, module in self.root.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        kept.append((tensors, name, tensor))
                        tensors[name] = made.setdefault(id(tensor), _fake(tensor, shapes, _join(path, name), fakes))
        for guard in self._guards:
            guard.awake = False
        try:
            yield fakes
        finally:
            for tensors, name, tensor in kept:
                tensors[name] = tensor
            for guard in self._guards:
                guard.awake = True


class _NotAlone:
    """A forward pre-hook of a module whose parameters are cut."""

    def __init__(self, path: str, parameter: str, root: nn.Module, undo: Callable[[], None]) -> None:
        self.path, self.parameter, self.root, self.undo = path, parameter, root, undo
        self.awake = True

    def __call__(self, _module: nn.Module, _args: object) -> None:
        if self.awake:
            raise RunError(
                f"module {self.path!r} cannot be called on its own: this rank holds a part of {self.parameter!r}.",
                "Call the parallel network; let it return the values that you need, or lay the network by a plan that "
                "does not cut this module's parameters.",
            )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise RunError(
            f"a network whose parameters are cut, such as {self.parameter!r}, cannot be copied.",
            "Copy the module before shoal.parallelize, or make a new one and load model.state_dict() into it.",
        )

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__(None)


def _fake(tensor: Tensor, shapes: Mapping[str, tuple[int, ...]], name: str, fakes: FakeTensorMode) -> Tensor:
    shape = shapes.get(name, tuple(tensor.shape))
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    with fakes:
        made = torch.empty(shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def made_whole(root: nn.Module) -> nn.Module:
    """A module that may be laid over ranks already, with whole tensors again. A collective where it is.

    A `RunError` if only a part of what was laid is given.
    """
    hooks = [hook for module in root.modules() for hook in module._forward_pre_hooks.values()]
    guard = next((hook for hook in hooks if isinstance(hook, _NotAlone)), None)
    if guard is None:
        return root
    if guard.root is not root:
        raise RunError(
            f"{type(root).__name__} is a part of a network that is laid over ranks already: it holds a part of "
            f"{guard.parameter!r}.",
            "Lay the whole network, or lay its parts before they become one.",
        )
    guard.undo()
    return root


def copied(root: nn.Module) -> nn.Module:
    """The same tree in module objects of its own, with the same tensors: no tensor is copied."""
    made: dict[int, nn.Module] = {}

    def copy_of(module: nn.Module) -> nn.Module:
        if id(module) not in made:
            own = made[id(module)] = type(module).__new__(type(module))  # not by copy: parametrized modules refuse it
            own.__dict__.update(module.__dict__)
            for kind, value in module.__dict__.items():
                if kind.startswith("_") and isinstance(value, dict | set):  # tensors, children and hooks
                    own.__dict__[kind] = copy.copy(value)
            for name, child in module._modules.items():
                own._modules[name] = None if child is None else copy_of(child)
        return made[id(module)]

    return copy_of(root)


def _is_plain(name: str, value: object) -> bool:
    return isinstance(value, _PLAIN) and (not name.startswith("_") or type(value) in (bool, int, float, str))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
