"""`shoal predict`: images -> class names and scores, or masks."""

import csv
import io
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.errors import DataError, OutputError
from shoal.files import write_atomically, write_text_atomically

if TYPE_CHECKING:
    from shoal.using import Prediction, Trained

SCHEMA = "shoal.predictions/1"
FILE_WIDTH, CLASS_WIDTH, SCORE_WIDTH = 16, 24, 6
"""Columns of the table: the least of a file's name, the most of a class's, and those of a score."""
PROGRESS_SECONDS = 3.0


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--top", metavar="K", default=1, type=click.IntRange(min=1), help="Classes shown of each file.  [1]")
@click.option(
    "--csv", "csv_file", metavar="FILE", type=click.Path(path_type=Path), help="Write a CSV file; - is standard output."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON with the scores of all classes instead.")
@click.option(
    "--out",
    "masks",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="To segment: write a mask of each file into this folder.",
)
@click.option(
    "--size",
    type=click.Choice(["own", "training", "windows"]),
    help="To segment an image of another size than in training: as it is, resized, or window by window as in "
    "training, for images too large for memory (TIFF, OME-Zarr).",
)
@click.option("--batch", metavar="N", type=click.IntRange(min=1), help="Files at a time; up to 64 unless given.")
@click.option(
    "--model", metavar="TEXT", help="The network where the run's own name for it does not lead to it any more."
)
@click.option("--device", metavar="TEXT", default="auto", help="cpu, cuda, cuda:1, ...  [auto]")
def predict(
    run: Path,
    files: tuple[Path, ...],
    top: int,
    csv_file: Path | None,
    as_json: bool,
    masks: Path | None,
    size: Any,
    batch: int | None,
    model: str | None,
    device: str,
) -> None:
    """Predict the class of each image, or of each of its pixels.

    RUN is the folder of a finished run, or its model.safetensors. FILES are images (PNG, JPEG, TIFF, ...), .npy arrays
    of raw values, or folders of them. Files that cannot be read are named, the others are predicted; then the exit
    code is 1.
    """
    chosen = _listed(files)
    if csv_file is not None:
        _check_csv(csv_file)
    # torch loads here and not before: a wrong option is answered at once
    from shoal.using import load
    from shoal.using.predicting import predictions

    trained = load(run, device=device, model=model)
    writer = None if masks is None else _MaskWriter(trained, masks, chosen)
    failed: dict[str, str] = {}

    def unreadable(name: str, error: DataError) -> None:
        failed[name] = error.problem
        click.echo(f"shoal: {error.problem}", err=True)

    found = predictions(
        trained.module,
        trained.inference,
        chosen,
        batch=batch,
        size=size,
        unreadable=unreadable,
        on_progress=_Progress(),
    )
    if writer is not None:
        found = writer.through(found)
    rows = [replace(prediction, mask=None) for prediction in found]  # masks are large
    if csv_file is not None:
        _write_csv(csv_file, rows, min(top, len(trained.classes)))
    if as_json:
        click.echo(_json(run, trained, rows, failed))
    elif csv_file is None:
        _show(rows, top, Console(highlight=False), "share" if trained.inference.task == "segment" else "score")
    if failed:
        click.echo(f"shoal: {len(failed)} of {len(chosen)} files could not be predicted.", err=True)
        sys.exit(1)


def _listed(files: Sequence[Path]) -> list[Path]:
    """The files, and the images of folders among them."""
    from shoal.data.pixels import images_below

    found: list[Path] = []
    for path in files:
        if path.is_dir() and path.suffix.lower() != ".zarr":
            below = images_below(path)
            if not below:
                raise DataError(f"the folder {str(path)!r} holds no image.", "Give images, or a folder of them.")
            found += below
        else:
            found.append(path)
    return found


def _check_csv(file: Path) -> None:
    """Somebody may have forgotten the name and given an image in its place."""
    from shoal.data.pixels import SUFFIXES

    if file.suffix.lower() in SUFFIXES:
        raise OutputError(f"--csv {str(file)!r} would be written over an image.", "Give the name of a .csv file, or -.")


def _write_csv(file: Path, found: "Iterable[Prediction]", top: int) -> None:
    """file, class, score, and class_2, score_2, ... where more are asked for."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    more = [f"{name}_{place}" for place in range(2, top + 1) for name in ("class", "score")]
    writer.writerow(["file", "class", "score", *more])
    for prediction in found:
        pairs = [cell for name, score in prediction.top(top) for cell in (name, f"{score:.6f}")]
        writer.writerow([prediction.source, *pairs])
    if str(file) == "-":
        click.echo(stream.getvalue(), nl=False)
        return
    try:
        write_text_atomically(file, stream.getvalue())
    except OSError as error:
        raise OutputError(
            f"{str(file)!r} cannot be written: {error.strerror or error}.", "Give another --csv."
        ) from None


def _json(run: Path, trained: "Trained", found: "Iterable[Prediction]", failed: dict[str, str]) -> str:
    rows = [
        {
            "file": prediction.source,
            "class": prediction.name,
            "score": prediction.score,
            "scores": dict(zip(prediction.classes, prediction.scores.tolist(), strict=True)),
        }
        for prediction in found
    ]
    unreadable = [{"file": name, "problem": problem} for name, problem in failed.items()]
    content = {"schema": SCHEMA, "run": str(run), "task": trained.inference.task, "predictions": rows}
    return json.dumps({**content, "unreadable": unreadable}, indent=2, ensure_ascii=False)


def _show(found: "Sequence[Prediction]", top: int, console: Console, score: str) -> None:
    """A table that fits the terminal: long names of files lose their beginning. `score`: what a score is called."""
    if not found:
        return
    rows = [(prediction.source, prediction.top(top)) for prediction in found]
    table = Table(box=None, pad_edge=False)
    table.add_column("file", no_wrap=True)
    taken = 0
    for place in range(len(rows[0][1])):
        heading = f"class {place + 1}" if place else "class"
        width = min(CLASS_WIDTH, max(len(heading), *(len(classes[place][0]) for _, classes in rows)))
        table.add_column(heading, no_wrap=True, overflow="ellipsis", width=width)
        table.add_column(score, justify="right", no_wrap=True, width=SCORE_WIDTH)
        taken += width + SCORE_WIDTH + 4  # two spaces before each column
    left = max(FILE_WIDTH, console.width - taken)
    for file, classes in rows:
        shown = file if len(file) <= left else f"...{file[3 - left :]}"
        table.add_row(escape(shown), *(cell for name, part in classes for cell in (escape(name), f"{part:.4f}")))
    console.width = max(console.width, FILE_WIDTH + taken)  # scores are never cut
    console.print(table)


class _Progress:
    """A line on the error stream every few seconds, where it takes long."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, what: str, done: int, of: int) -> None:
        if done < of and time.monotonic() - self._told > PROGRESS_SECONDS:
            self._told = time.monotonic()
            click.echo(f"predicted {done:,} of {of:,} {what} ...", err=True)


class _MaskWriter:
    """Writes masks: class numbers as an image with a palette, or as `.npy` where an image cannot hold them."""

    def __init__(self, trained: "Trained", folder: Path, files: Sequence[Path]) -> None:
        if trained.inference.task != "segment":
            raise OutputError(
                f"--out {str(folder)!r} is for masks, but this network gives one class for a whole image.",
                "Leave --out out; --csv FILE keeps the classes.",
            )
        flat = len(trained.inference.input) == 3 and len(trained.classes) <= 256
        self._ending = ".png" if flat else ".npy"
        self._folder = folder
        self._check(files)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"--out {str(folder)!r}: {error.strerror or error}.", "Give another folder.") from None

    def _path(self, file: Path) -> Path:
        return self._folder / f"{file.stem}{self._ending}"

    def _check(self, files: Sequence[Path]) -> None:
        taken: dict[Path, Path] = {}
        read = {file.resolve() for file in files}
        for file in files:
            path = self._path(file)
            if path.resolve() in read:
                raise OutputError(f"the mask {str(path)!r} would be written over an image.", "Give another --out.")
            if path in taken:
                raise OutputError(
                    f"{str(taken[path])!r} and {str(file)!r} would have the same mask {str(path)!r}.",
                    "Rename one, or predict them in two calls with another --out.",
                )
            taken[path] = file

    def through(self, found: "Iterable[Prediction]") -> "Iterator[Prediction]":
        """The same predictions, the mask of each written when it comes by."""
        for prediction in found:
            assert prediction.mask is not None
            path = self._path(Path(prediction.source))
            try:
                write_mask(prediction.mask.numpy(), path, len(prediction.classes))
            except OSError as error:
                raise OutputError(
                    f"the mask {str(path)!r} cannot be written: {error.strerror or error}.", "Give another --out."
                ) from None
            yield prediction


def write_mask(mask: Any, path: Path, classes: int) -> None:
    """Class numbers as a `.npy`, or as a PNG whose palette tells them apart: its pixels are the numbers themselves."""
    import numpy as np

    from shoal.data.pixels import pillow

    numbers = mask.astype(np.uint8 if classes <= 256 else np.int32, copy=False)
    if path.suffix == ".npy":
        with path.open("wb") as file:
            np.save(file, numbers)
        return
    image = pillow().fromarray(numbers)
    image.putpalette(palette())
    write_atomically(path, lambda draft: image.save(draft, format="PNG"))


def palette() -> list[int]:
    """256 colours that are easy to tell apart, the first black: those of the PASCAL VOC masks.

    >>> palette()[:12]
    [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0]
    """
    colours = []
    for number in range(256):
        for channel in range(3):
            bits = (number >> (3 * place + channel) & 1 for place in range(3))
            colours.append(sum(bit << (7 - place) for place, bit in enumerate(bits)))
    return colours
