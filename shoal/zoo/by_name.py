"""From a name to a model: of the zoo, of another package (`timm:NAME`), `package.module:factory` or `file.py:factory`.

The zoo is listed by name only, so that asking for the list does not load torch.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

from shoal.errors import ModelError, ShoalError, suggestion
from shoal.zoo import packages

if TYPE_CHECKING:
    from torch import nn

_ZOO = {
    "lenet5": "shoal.zoo._lenet",
    "alexnet": "shoal.zoo._alexnet",
    "vgg16": "shoal.zoo._vgg",
    "inception_v3": "shoal.zoo._inception",
    "resnet18": "shoal.zoo._resnet",
    "resnet50": "shoal.zoo._resnet",
    "mobilenet_v2": "shoal.zoo._mobilenet",
    "unet": "shoal.zoo._unet",
    "acoustic": "shoal.zoo._acoustic",
}
"""Name of each factory, and the module that defines it."""

_OWN_FORM = "A model of your own is given as package.module:factory, or as path/to/file.py:factory."


def names() -> tuple[str, ...]:
    """Names of the zoo's networks, in the order in which they are shown.

    >>> names()[:2]
    ('lenet5', 'alexnet')
    """
    return tuple(_ZOO)


def zoo_factory(name: str) -> "Callable[..., nn.Module]":
    """The zoo's factory of this name, which must be one of `names()`."""
    factory: Callable[..., nn.Module] = getattr(importlib.import_module(_ZOO[name]), name)
    return factory


def build(
    spec: str,
    *,
    input: tuple[int, ...] | None = None,
    classes: int | None = None,
    options: Mapping[str, object] = MappingProxyType({}),
) -> "nn.Module":
    """The model that `spec` names: a zoo name, `timm:NAME`, `package.module:factory`, or `path/to/file.py:factory`.

    The factory gets those of `input` (one sample's shape, channels first) and `classes` that are given
    and that it accepts, and all of `options`, which it must accept. A factory's module is found as
    `python -m` finds it, in the working directory too; a file as `python file.py` finds it, with what lies beside it.
    Whatever goes wrong is a ModelError; errors that are Shoal's own pass through.
    """
    offered = {name: value for name, value in (("input", input), ("classes", classes)) if value is not None}
    if spec in _ZOO:
        return _call(spec, zoo_factory(spec), offered, options)
    if spec.startswith("python:"):
        raise ModelError(
            f"the model {spec.removeprefix('python:')} was given as an object from Python, which has no name here.",
            "Use it from Python, where that object is, or name a factory: package.module:factory.",
        )
    module_name, attribute = _split(spec)
    importlib.import_module("torch")  # before the working directory can come in its way
    if module_name in packages.PACKAGES:
        return _call(spec, packages.factory(module_name, attribute), offered, options)
    folder = Path.cwd()
    if module_name.endswith(".py"):
        folder, module_name = _file(spec, Path(module_name))
    with _importable(folder):
        return _call(spec, _find(spec, module_name, attribute), offered, options)


def make(
    name: str,
    factory: Callable[..., object],
    *,
    input: tuple[int, ...] | None = None,
    classes: int | None = None,
    options: Mapping[str, object] = MappingProxyType({}),
) -> "nn.Module":
    """What a factory at hand makes, given as `build` gives it; `name` is for messages."""
    offered = {key: value for key, value in (("input", input), ("classes", classes)) if value is not None}
    return _call(name, factory, offered, options)


def _call(
    spec: str, factory: Callable[..., object], offered: Mapping[str, object], options: Mapping[str, object]
) -> "nn.Module":
    """What the factory makes of those offers that it accepts, and of all options."""
    from torch import nn

    for name in options:
        if not _accepts(factory, name):
            raise ModelError(
                f"the model {spec!r} has no option {name!r}.",
                suggestion(name, _keywords(factory) or ["none"]),
            )
    given = {name: value for name, value in offered.items() if _accepts(factory, name)} | dict(options)
    try:
        model = factory(**given)
    except ShoalError:
        raise
    except Exception as error:
        call = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ModelError(
            f"the model {spec!r} could not be built: its factory raised {_describe(error)}.",
            f"It was called as factory({call}): correct the factory, or what it is given.",
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model {spec!r} could not be built: it returned {_type_name(model)}, not a torch.nn.Module.",
            "Name a function that returns the model, or the model's class.",
        )
    return model


def _split(spec: str) -> tuple[str, str]:
    """The module and the factory that `package.module:factory` names."""
    module_name, colon, attribute = spec.partition(":")
    if not colon:
        raise ModelError(f"there is no model {spec!r} in the zoo.", f"{suggestion(spec, names())} {_OWN_FORM}")
    if not module_name or not attribute:
        raise ModelError(f"the model {spec!r} lacks a module or a factory.", _OWN_FORM)
    return module_name, attribute


def _find(spec: str, module_name: str, attribute: str) -> Callable[..., object]:
    """The callable of this name in this module."""
    from torch import nn

    module = _import_module(spec, module_name)
    if not hasattr(module, attribute):
        known = _callables(module)
        remedy = suggestion(attribute, known) if known else f"{module_name} defines no function and no class."
        raise ModelError(f"the model {spec!r} was not found: {module_name} has no {attribute!r}.", remedy)
    factory: object = getattr(module, attribute)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ModelError(
            f"the model {spec!r} cannot be built: {attribute} is {_type_name(factory)}, not a factory.",
            "Name a function that returns the model, or the model's class.",
        )
    return factory


def _import_module(spec: str, module_name: str) -> ModuleType:
    """The module, or a ModelError that tells its absence from a fault inside it."""
    importlib.invalidate_caches()  # the file may have been written a moment ago
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        problem = f"the model {spec!r} cannot be imported: there is no module {missing!r}."
        if module_name == missing or module_name.startswith(f"{missing}."):
            remedy = f"It was looked for in {Path.cwd()} and among the installed packages. {_OWN_FORM}"
        else:
            remedy = f"{module_name} imports {missing}: install it, or correct that import."
        raise ModelError(problem, remedy) from error
    except ShoalError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"the model {spec!r} cannot be imported: importing {module_name} raised {_describe(error)}.",
            f"Correct that module until `python -c 'import {module_name}'` succeeds.",
        ) from error


def _file(spec: str, path: Path) -> tuple[Path, str]:
    """The folder of a file that holds a model, and its module's name there."""
    if not path.is_file():
        raise ModelError(
            f"the model {spec!r} cannot be imported: there is no file {str(path)!r}.",
            f"It was looked for from {Path.cwd()}. {_OWN_FORM}",
        )
    folder, name = path.resolve().parent, path.stem
    if not name.isidentifier():
        raise ModelError(
            f"the model {spec!r} cannot be imported: {name!r} is not a name that Python can import.",
            "Rename the file: letters, digits and underscores.",
        )
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() != path.resolve():
        raise ModelError(
            f"the model {spec!r} cannot be imported: another module is called {name!r}.", "Rename the file."
        )
    return folder, name


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let imports find the modules of a folder first, as `python -m` does with the present one, and only meanwhile."""
    here = str(folder)
    if here in sys.path or ("" in sys.path and folder == Path.cwd()):
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:  # the imported module may have taken it out itself
            sys.path.remove(here)


def _accepts(factory: Callable[..., object], name: str) -> bool:
    """Whether the factory can be called with this keyword."""
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _parameters(factory))
    return anything or name in _keywords(factory)


def _keywords(factory: Callable[..., object]) -> list[str]:
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in _parameters(factory) if p.kind in by_keyword]


def _parameters(factory: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # some built-in callables have none to show
        return []


def _callables(module: ModuleType) -> list[str]:
    """Public functions and classes that the module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    ]


def _describe(error: BaseException) -> str:
    """An exception's type and text, on one line, without the text's own full stop."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _type_name(value: object) -> str:
    """A value's type, as a reader would look it up.

    >>> _type_name(None), _type_name(3)
    ('None', 'int')
    """
    if value is None:
        return "None"
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
