"""A user's own objects in the place of names: network, data, loss and optimizer, from Python.

They go to ranks that Shoal starts by cloudpickle, which sends functions and classes of a script or a notebook whole. A
run's folder keeps their names only: to go on with such a run they are given once more.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import TrainConfig
from shoal.data import Splits, fit_splits
from shoal.data.torch_sets import name_of, own_splits
from shoal.errors import CheckpointError, ConfigError, DataError, ModelError
from shoal.files import write_text_atomically
from shoal.training.network import Criterion
from shoal.training.run_folder import RunFolder
from shoal.zoo.by_name import build, make

PREFIX = "python:"
"""How a setting begins that stands for an object."""
SCHEMA = "shoal.objects/1"

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OwnObjects:
    """Those that were given; None where a setting's name, or the usual, stands."""

    model: nn.Module | Callable[..., nn.Module] | None = None
    data: object = None
    """(train, test), `Splits`, or a function that gives either, called on each rank."""
    loss: Criterion | None = None
    optimizer: Factory | None = None
    loader_workers: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, tuple(_packed(field.name, getattr(self, field.name)) for field in fields(self))

    def names(self) -> dict[str, str]:
        """What each is called, for the run's folder."""
        given = {field.name: getattr(self, field.name) for field in fields(self)[:4]}
        return {name: PREFIX + self._name(name, value) for name, value in given.items() if value is not None}

    @staticmethod
    def _name(what: str, value: object) -> str:
        if what == "data" and not callable(value):
            return name_of(value)
        kind = value if hasattr(value, "__qualname__") else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"

    def build(self, config: TrainConfig, splits: Splits) -> nn.Module:
        """The network, made anew: a copy of the one that was given, or what the factory makes of the data's sizes."""
        shape, classes, options = splits.train.shape, splits.train.classes, config.model_options
        if self.model is None:
            return build(config.model, input=shape, classes=classes, options=options)
        if not isinstance(self.model, nn.Module):
            return make(config.model.removeprefix(PREFIX), self.model, input=shape, classes=classes, options=options)
        if config.model_options:
            raise ConfigError(
                f"model_options = {config.model_options} are for a factory, and a module was given, which is built.",
                "Give the factory, or leave model_options out.",
            )
        try:
            return copy.deepcopy(self.model).train()
        except Exception as error:  # whatever an object of others raises
            raise ModelError(
                f"the module that was given cannot be copied: {type(error).__name__}: {error}.",
                "Give a function that makes it, or leave out what cannot be copied, such as open files.",
            ) from error

    def splits(self, config: TrainConfig) -> Splits:
        """Both parts of the data that was given, brought to the shape that the settings ask for."""
        data = self.data() if callable(self.data) else self.data
        found = own_splits(data, classes=config.classes, seed=config.seed, workers=self.loader_workers)
        named = Splits(self.names()["data"], found.train, found.test, found.origin)
        return fit_splits(named, config.input, config.classes)

    def loss_on(self, device: torch.device) -> Criterion:
        """The loss, with its own tensors on the device."""
        return self.loss.to(device) if isinstance(self.loss, nn.Module) else self.loss or F.cross_entropy

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """What the factory makes of them; a `ConfigError` where it is no optimizer, or one of other parameters."""
        assert self.optimizer is not None
        given = list(parameters)
        name = self.names()["optimizer"].removeprefix(PREFIX)
        try:
            made = self.optimizer(given)
        except Exception as error:
            raise ConfigError(
                f"the optimizer's factory {name} raised {type(error).__name__}: {error}.",
                "It is called with the list of the network's parameters.",
            ) from error
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"the optimizer's factory {name} returned {type(made).__name__}, not a torch.optim.Optimizer.",
                "Give a function of the parameters, such as lambda params: torch.optim.AdamW(params, lr=1e-3).",
            )
        known = {id(parameter) for parameter in given}
        if any(id(parameter) not in known for group in made.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"the optimizer of {name} trains other parameters than those it was given.",
                "Let the factory use its argument: ranks train copies of the network.",
            )
        return made

    def check_settings(self, config: TrainConfig) -> None:
        """Refuse settings of an optimizer or a loss beside one of one's own, which has them itself."""
        if self.loss is not None and config.label_smoothing:
            raise ConfigError(
                f"label_smoothing = {config.label_smoothing:g} is given beside a loss of your own.",
                "Leave label_smoothing out, and let the loss do it.",
            )
        for name in ("optimizer", "optimizer_options", "lr", "momentum", "weight_decay"):
            if self.optimizer is not None and config.tells(name):
                raise ConfigError(
                    f"{name} = {getattr(config, name)!r} is given beside an optimizer of your own, which has its own.",
                    f"Leave {name} out, and give it to the optimizer.",
                )

    def settled(self, config: TrainConfig, optimizer: torch.optim.Optimizer) -> TrainConfig:
        """The settings with what an optimizer of one's own has for rate, momentum and weight decay."""
        if self.optimizer is None:
            return config
        first = optimizer.param_groups[0]
        return config.model_copy(
            update={name: float(first.get(name, 0.0)) for name in ("lr", "momentum", "weight_decay")}
        )

    def check_loss(self, scores: Tensor, target: Tensor) -> None:
        """Refuse a loss that is not the mean over samples, from the scores of one of them."""
        if self.loss is None:
            return
        name = self.names()["loss"].removeprefix(PREFIX)
        remedy = "It is called with scores and classes, for one number: their mean."
        loss = self.loss_on(scores.device)
        try:
            once, twice = loss(scores, target), loss(torch.cat([scores] * 2), torch.cat([target] * 2))
        except Exception as error:
            raise ModelError(
                f"the loss {name} raised {type(error).__name__}: {error}. Scores have the shape {tuple(scores.shape)}, "
                f"classes {tuple(target.shape)}.",
                remedy,
            ) from error
        if not isinstance(twice, Tensor) or twice.dim():
            got = f"a tensor of the shape {tuple(twice.shape)}" if isinstance(twice, Tensor) else type(twice).__name__
            raise ModelError(f"the loss {name} of two samples returns {got}, not one number.", remedy)
        if once.item() and torch.isclose(twice, 2 * once, rtol=1e-4).item():
            raise ModelError(
                f"the loss {name} is a sum: of one sample it is {once.item():.4g}, of that sample given twice "
                f"{twice.item():.4g}.",
                "Let it be the mean, so that a rate suits any batch, and shares of a batch can be put together.",
            )

    def digest(self) -> str:
        """Of the weights of a module that was given, in which all ranks must agree; empty for anything else."""
        if not isinstance(self.model, nn.Module):
            return ""
        found = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


NO_OBJECTS = OwnObjects()


def other_weights() -> ConfigError:
    """That the module of one rank is not that of another."""
    return ConfigError(
        "the module that was given does not have the same weights on all ranks.",
        "Call torch.manual_seed before it is made, load the same file on all ranks, or give a factory as model.",
    )


def write_objects(folder: RunFolder, own: OwnObjects) -> None:
    """Note in a run's folder what objects it was begun with, if any."""
    if names := own.names():
        with folder.writing(folder.objects):
            write_text_atomically(folder.objects, json.dumps({"schema": SCHEMA, **names}, indent=2) + "\n")


def objects_of(run: RunFolder) -> dict[str, str]:
    """What each object is called that the run was begun with; a `CheckpointError` where that cannot be read."""
    path = run.objects
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}.", "Restore it, or start another run.") from None
    return {name: str(value) for name, value in written.items() if name != "schema"}


def check_same(run: RunFolder, given: Mapping[str, str]) -> None:
    """Refuse to go on with a run with other objects than it was begun with, if with any; a `CheckpointError`."""
    before, folder = objects_of(run), run.path
    call = f"shoal.resume({str(folder)!r}, {', '.join(f'{name}=...' for name in before)})"
    for name, value in before.items():
        if name not in given:
            raise CheckpointError(
                f"the run in {str(folder)!r} was begun from Python with a {name} of one's own, "
                f"{value.removeprefix(PREFIX)}, which its folder does not hold.",
                f"Go on from Python with the same objects: {call}",
            )
    for name, value in given.items():
        if before.get(name) != value:
            had = f"the {name} {before[name].removeprefix(PREFIX)}" if name in before else f"no {name} of one's own"
            raise CheckpointError(
                f"the run in {str(folder)!r} was begun with {had}, now it is {value.removeprefix(PREFIX)}.",
                f"Give the same objects: {call}" if before else f"Leave {name} out, or start another run.",
            )


def _packed(name: str, value: object) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps(value)
    except Exception as error:  # whatever an object of others raises
        kind = DataError if name == "data" else ConfigError
        raise kind(
            f"the {name} that was given cannot be sent to other processes: {type(error).__name__}: {error}.",
            f"Give a function that makes the {name} there, or leave out what cannot be sent, such as open files."
            if name in ("model", "data")
            else "Let it hold nothing but plain values and functions.",
        ) from error
    return packed


def _unpacked(*values: bytes) -> OwnObjects:
    return OwnObjects(*map(cloudpickle.loads, values))
