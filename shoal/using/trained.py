"""A trained network, loaded from the folder of its run or from its weights file.

Trust     the folder of a run names the Python code that builds its network, as `--resume` runs it too: load folders of
          people you trust. A weights file alone never decides which code runs: only networks of the zoo are built
          from it, any other must be given; unless it lies in its run's folder, which says the same.
"""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model
from torch import Tensor, nn

from shoal import zoo
from shoal.errors import CheckpointError, ModelError
from shoal.inference import METADATA, Inference
from shoal.training.device import choose_device
from shoal.training.run_folder import RunFolder
from shoal.using.predicting import Prediction, predictions
from shoal.using.transform import Sample, Size, Transform

GIVE = "Give the --out folder of a finished run, or its model.safetensors."
GIVE_NETWORK = "Or give the network: --model package.module:factory or path/to/file.py:factory (in Python: model=...)."


class Trained(nn.Module):
    """A trained network with what it needs to be used. `module` is the network itself, a plain module.

    In evaluation mode, with the trained weights. Called, it does as `module` does: prepared samples in, scores out.
    """

    def __init__(self, module: nn.Module, inference: Inference) -> None:
        super().__init__()
        self.module = module
        self.inference = inference
        """What its run's `inference.json` says."""
        self.transform = Transform(inference)
        """One raw sample (a path, a PIL image, an array, a tensor) as `module` reads it."""
        self.eval()

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class, in the order of the scores."""
        return self.inference.classes

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch of prepared samples: logits, as in training."""
        scores: Tensor = self.module(x)
        return scores

    def predict(
        self,
        samples: Sequence[Sample],
        *,
        batch: int | None = None,
        size: Size | Literal["windows"] | None = None,
    ) -> list[Prediction]:
        """A prediction for each raw sample, in batches on the network's device. A `DataError` names one that is wrong.

        `size` is for images to segment: see `transform`; "windows" goes through them by windows as in training, for
        images too large for memory.
        """
        return list(predictions(self.module, self.inference, samples, batch=batch, size=size))


def load(
    run: str | PathLike[str], *, device: str | torch.device = "cpu", model: str | nn.Module | None = None
) -> Trained:
    """The trained network of a run: of its folder, or of a weights file such as its `model.safetensors`.

    The network is built by the name that the run was given, or is `model`: another name, or a module whose weights are
    replaced. Leaves torch's random state as it was.

    A `CheckpointError` where no finished run lies there or the file is not a run's; a `ModelError` where the network
    cannot be built any more or the weights do not fit it.
    """
    path = Path(run)
    weights = _weights_of(path)
    inference = read_inference(weights)
    module = model if isinstance(model, nn.Module) else _build(model, inference, path)
    _put_in(weights, module)
    module.to(choose_device(str(device)))
    return Trained(module, inference)


def _weights_of(path: Path) -> Path:
    """The weights file that `path` is, or that lies in it."""
    if path.is_file():
        return path
    folder = RunFolder(path)
    if folder.weights.is_file():
        return folder.weights
    if folder.checkpoint.exists():
        raise CheckpointError(
            f"the run in {str(path)!r} is not finished: it has no {folder.weights.name} yet.",
            f"Finish it: shoal train --resume {path}",
        )
    problem = f"no run lies in {str(path)!r}." if path.is_dir() else f"there is no run {str(path)!r}."
    raise CheckpointError(problem, GIVE)


def read_inference(weights: Path) -> Inference:
    """What the metadata of a weights file say; a `CheckpointError` where it is not one of a run's."""
    try:
        with safe_open(weights, "pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{str(weights)!r} is no weights file: {error}.", GIVE) from None
    if METADATA not in metadata:
        raise CheckpointError(
            f"{str(weights)!r} was not written by a run: its metadata lack {METADATA!r}.",
            f"{GIVE} The tensors alone are read with safetensors.torch.load_file.",
        )
    return Inference.from_json(metadata[METADATA], source=f"the metadata of {str(weights)!r}")


def _build(given: str | None, inference: Inference, path: Path) -> nn.Module:
    name = given or inference.model
    if name is None:
        raise ModelError(
            f"the network of {str(path)!r} was given to its run as an object, without a name.",
            "Give it: model=..., or --model package.module:factory.",
        )
    if given is None and name not in zoo.names() and not _said_by_folder(path, inference):
        raise ModelError(
            f"{str(path)!r} names the network {name!r}, but a weights file does not decide which code runs.",
            f"Give its run's folder instead. {GIVE_NETWORK}",
        )
    try:
        with torch.random.fork_rng(devices=[]):
            return zoo.build(
                name, input=inference.input, classes=len(inference.classes), options=inference.model_options
            )
    except ModelError as error:
        if given is not None:
            raise
        raise ModelError(
            f"the network of {str(path)!r} cannot be built any more: {error.problem}",
            f"Work in the folder where the run was started. {GIVE_NETWORK}",
        ) from error


def _said_by_folder(path: Path, inference: Inference) -> bool:
    """Whether this is a run's folder, or a weights file that lies in its own run's."""
    if path.is_dir():
        return True
    beside = RunFolder(path.parent).inference
    try:
        return beside.read_text(encoding="utf-8") == inference.to_json()
    except (OSError, UnicodeDecodeError):
        return False


def _put_in(weights: Path, module: nn.Module) -> None:
    try:
        missing, unexpected = load_model(module, str(weights), strict=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip().rstrip(".")
        raise _misfit(weights, reason) from None
    if missing:
        raise _misfit(weights, f"the file lacks {min(missing)!r}")
    if unexpected:
        raise _misfit(weights, f"the network has no {min(unexpected)!r}")


def _misfit(weights: Path, why: str) -> ModelError:
    return ModelError(
        f"the weights of {str(weights)!r} do not fit the network: {why}.",
        f"It has changed since it was trained: restore it as it was. {GIVE_NETWORK}",
    )
