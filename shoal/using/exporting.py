"""A trained network for other programs, in one file: its weights, or the network itself with them.

    .safetensors   all weights, whole, with `inference.json` as metadata; for this library and any other
    .pt2           the network as torch.export has it: `torch.export.load(FILE).module()` needs none of its code
    .onnx          the network for ONNX's runtimes; needs the packages onnx and onnxscript

A network that is written with its code takes batches of any size of prepared samples and gives scores, as in training;
`inference.json` is inside it, too.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import ConfigError, ModelError, OutputError
from shoal.files import write_atomically
from shoal.inference import METADATA
from shoal.training.weights import save_weights
from shoal.using.trained import Trained

ENDINGS = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
"""Every format, and how its files are called."""


def export(trained: Trained, file: Path, form: str | None = None) -> str:
    """Write the network, whole or not at all, and give the format; untold, the file's ending tells it.

    An `OutputError` where the file is there already or cannot be written; a `ModelError` where torch cannot export the
    network.
    """
    form = form or _form(file)
    if form not in ENDINGS:
        raise ConfigError(f"there is no format {form!r}.", f"Known: {', '.join(ENDINGS)}.")
    if file.exists():
        raise OutputError(f"{str(file)!r} is there already.", "Give another name, or remove it.")
    write = {"safetensors": _safetensors, "torch-export": _torch_export, "onnx": _onnx}[form](trained)
    try:
        write_atomically(file, write)
    except OSError as error:
        raise OutputError(
            f"{str(file)!r} cannot be written: {error.strerror or error}.", "Name a file in a folder that has room."
        ) from None
    return form


def _form(file: Path) -> str:
    for form, ending in ENDINGS.items():
        if file.suffix == ending:
            return form
    raise ConfigError(
        f"the ending of {str(file)!r} tells no format.",
        f"End it with {', '.join(ENDINGS.values())}, or give --format {'|'.join(ENDINGS)}.",
    )


def _safetensors(trained: Trained) -> Callable[[Path], object]:
    return lambda draft: save_weights(trained.module, draft, trained.inference)


def _torch_export(trained: Trained) -> Callable[[Path], object]:
    with _told_of(trained), _quiet():
        program = torch.export.export(
            trained.module, (_example(trained),), dynamic_shapes=({0: torch.export.Dim("batch")},)
        )
    more = {"inference.json": trained.inference.to_json()}

    def write(draft: Path) -> None:
        with draft.open("wb") as file:
            torch.export.save(program, file, extra_files=more)

    return write


def _onnx(trained: Trained) -> Callable[[Path], object]:
    try:
        import onnxscript  # noqa: F401  (what torch needs, and asks for in words of its own)
    except ImportError:
        raise ConfigError(
            "writing ONNX needs the packages onnx and onnxscript, which are not installed.",
            "Install them: pip install onnx onnxscript. Or export to a .pt2 file.",
        ) from None
    with _told_of(trained), _quiet():
        program = torch.onnx.export(
            trained.module,
            (_example(trained),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=["input"],
            output_names=["scores"],
            verbose=False,
        )
    assert program is not None, "with dynamo"
    program.model.metadata_props[METADATA] = trained.inference.to_json()
    return lambda draft: program.save(draft)


def _example(trained: Trained) -> Tensor:
    device = next(trained.parameters()).device
    return torch.zeros((2, *trained.inference.input), device=device)


@contextmanager
def _told_of(trained: Trained) -> Iterator[None]:
    """Whatever torch says of a network that it cannot follow, in one message."""
    try:
        yield
    except Exception as error:  # torch has dozens of kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        name = trained.inference.model or type(trained.module).__name__
        raise ModelError(
            f"the network {name!r} cannot be exported: {type(error).__name__}: {lines[0] if lines else ''}",
            "Change what torch.export cannot follow, or export the weights alone to .safetensors.",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings about its own code and about packages that nobody asked for."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
