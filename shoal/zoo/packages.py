"""Networks of other packages by name: `timm:convnext_atto`, `torchvision:resnet18`, `monai:SegResNet`. None is needed.

Each factory is given one sample's shape and the number of classes under the names that its package has for them;
weights are drawn anew. Whatever else the package takes is an option.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from shoal.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

Factory = Callable[..., "nn.Module"]


@dataclass(frozen=True)
class Package:
    """A package of networks that has a name for each."""

    home: str
    """The module to import."""
    names: Callable[[Any], Sequence[str]]
    """All names, from that module."""
    make: Callable[[Any, str], Factory]
    """A factory with the keywords `input` and `classes`, from that module and a name."""
    listing: str
    """Where people find the names."""


def factory(package: str, name: str) -> Factory:
    """What makes the network `name` of a package in `PACKAGES`; a `ModelError` if either is not there."""
    known, spec = PACKAGES[package], f"{package}:{name}"
    try:
        home = importlib.import_module(known.home)
    except ImportError as error:
        raise ModelError(
            f"the model {spec!r} needs {package}, which cannot be imported: {error}.",
            f"Install it: pip install {package}",
        ) from error
    except RuntimeError as error:  # torchvision's compiled operators, beside another build of torch
        raise ModelError(
            f"the model {spec!r} needs {package}, which does not load: {error}.",
            "Install the builds of torch and torchvision that belong together: both for CPU, or both for one CUDA.",
        ) from error
    names = known.names(home)
    if name not in names:
        by_letters = {known_name.lower(): known_name for known_name in names}
        near = " or ".join(repr(by_letters[word]) for word in get_close_matches(name.lower(), by_letters, n=3))
        raise ModelError(
            f"{package} has no network {name!r}.", f"Did you mean {near}?" if near else f"Look it up: {known.listing}"
        )
    return known.make(home, name)


def _timm(timm: Any, name: str) -> Factory:
    def make(input: tuple[int, ...] = (3, 224, 224), classes: int = 1000, **options: object) -> "nn.Module":
        model: nn.Module = timm.create_model(name, in_chans=input[0], num_classes=classes, **options)
        return model

    return make


def _torchvision(models: Any, name: str) -> Factory:
    def make(input: tuple[int, ...] = (3, 224, 224), classes: int = 1000, **options: object) -> "nn.Module":
        if input[0] != 3:
            raise ModelError(
                f"torchvision's networks read images of 3 channels, not {input[0]}.",
                f"Give --input {','.join(map(str, (3, *input[1:])))}: grey images are then repeated in each channel.",
            )
        without = {"weights", "weights_backbone"} & inspect.signature(models.get_model_builder(name)).parameters.keys()
        model: nn.Module = models.get_model(name, **{**dict.fromkeys(without), "num_classes": classes, **options})
        return model

    return make


def _monai(nets: Any, name: str) -> Factory:
    kind = getattr(nets, name)
    takes = inspect.signature(kind).parameters

    def make(input: tuple[int, ...] = (1, 96, 96, 96), classes: int = 2, **options: object) -> "nn.Module":
        offered = {
            "spatial_dims": len(input) - 1,
            "in_channels": input[0],
            "out_channels": classes,
            "num_classes": classes,
            "img_size": input[1:],
        }
        model: nn.Module = kind(**{key: value for key, value in offered.items() if key in takes} | options)
        return model

    return make


def _timm_names(timm: Any) -> Sequence[str]:
    names: Sequence[str] = timm.list_models()
    return names


def _torchvision_names(models: Any) -> Sequence[str]:
    names: Sequence[str] = models.list_models(module=models)  # classifiers: the others return several things
    return names


def _monai_names(nets: Any) -> Sequence[str]:
    from torch import nn

    return [name for name, value in vars(nets).items() if inspect.isclass(value) and issubclass(value, nn.Module)]


PACKAGES = {
    "timm": Package("timm", _timm_names, _timm, "timm.list_models()"),
    "torchvision": Package("torchvision.models", _torchvision_names, _torchvision, "torchvision.models.list_models()"),
    "monai": Package("monai.networks.nets", _monai_names, _monai, "the classes of monai.networks.nets"),
}
