"""The user's own tree of modules over this rank's shards: what is read from it in every pass, and what is refused.

A parallel network shows the tree of the module that it was made of: the same module objects, their parameters this
rank's shards. Whatever a script sets on it counts from the next pass on, as with the module itself: training flags,
`requires_grad`, a dropout's `p`, whatever the code reads (capturing/sight.py). What cannot be honoured is refused by
the module's path:

    a child that holds cut parameters is called on its own        its forward pre-hook says so
    a hook registered on a module inside                          it would never fire
    a parameter or a module replaced by another                   nobody laid it over the ranks
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.hooks import RemovableHandle

from shoal.capturing.sight import Sight
from shoal.capturing.watching import hook_on_all, keeps_nothing
from shoal.errors import RunError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Tree:
    """A tree of modules, read in every pass."""

    def __init__(self, root: nn.Module, loss: Any = None) -> None:
        self.root, self._loss = root, loss
        self._guards: list[_NotAlone] = []
        self._sight = Sight(root, loss)
        self._settings: list[tuple[str, str]] = []
        self.look()

    def look(self) -> None:
        """Take the tree as it is now for what was laid over the ranks."""
        self._fixed: list[tuple[Mapping[str, Any], str, object, str]] = []
        self._names: list[tuple[Mapping[str, Any], list[str], str]] = []
        self._hooks: list[tuple[Mapping[int, Any], str]] = []
        for path, module in self.root.named_modules():
            content = module.__dict__
            for kind in ("_modules", "_parameters", "_buffers"):
                where = content[kind]
                self._names.append((where, list(where), path))
                if kind != "_buffers":  # these may be replaced
                    self._fixed += [(where, name, value, _join(path, name)) for name, value in where.items()]
            self._hooks += [(content[kind], path) for kind in _HOOKS if kind in content]
        self._kept = [where for where, _, _ in self._names]
        self._lengths = [*map(len, self._kept)]
        if isinstance(self._loss, nn.Module):
            for path, module in self._loss.named_modules():
                self._hooks += [(vars(module)[kind], _join("loss", path)) for kind in _HOOKS]

    def key(self) -> str:
        """A mark of all that the network's code, and the loss's, may read besides tensors of the network.

        Equal marks: the same network. Costs some 0.1 ms for 180 modules where nothing changed. A `RunError` names a
        hook, module or parameter that was put there since.
        """
        self._refuse_changes()
        key, self._settings = self._sight.now()
        return key

    def settings(self) -> list[tuple[str, str]]:
        """What the last key stands for: every attribute and its value."""
        return self._settings

    def _refuse_changes(self) -> None:
        if (hook := hook_on_all()) is not None:
            raise RunError(
                f"there is a hook on all modules ({hook}), which a network that is laid over ranks would never call.",
                "Remove it, or register it on the parallel network itself.",
            )
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
        if [*map(len, self._kept)] != self._lengths:
            for where, names, path in self._names:
                if len(where) == len(names):
                    continue
                new = next((name for name in where if name not in names), "")
                raise RunError(
                    f"{_join(path, new)!r} was not there when the network was laid over the ranks.",
                    "Give the module all its parts first and call shoal.parallelize then.",
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


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
