"""The data sets that have a name: which there are, where each was found, and how to add it. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.data.search import VARIABLE, find, searched
from shoal.errors import DataError, suggestion


@dataclass(frozen=True)
class CatalogEntry:
    """A named data set on this machine, for people."""

    name: str
    about: str
    found: str | None
    """The folder or file it is read from; None where it is missing."""
    remedy: str
    """How to add it."""


@dataclass(frozen=True)
class Known:
    """A data set of fixed size that is kept in files of known names."""

    name: str
    about: str
    files: tuple[str, ...]
    inside: tuple[str, ...]
    """Names of the sub-folder that may hold the files; the first is the one we advise."""
    remedy: str
    """How to add it to this machine."""

    def find(self) -> Path | None:
        """The folder that holds its files, if any."""
        return find(self.files, inside=self.inside)

    def place(self) -> CatalogEntry:
        """What `where` tells of it."""
        return CatalogEntry(self.name, self.about, _text(self.find()), self.remedy)

    def locate(self) -> Path:
        """The folder that holds its files; `DataError` names the folders searched and the remedy."""
        folder = self.find()
        if folder is None:
            raise DataError(
                f"data set {self.name!r} was not found: no {self.inside[0]}/{self.files[0]} in {searched()}.",
                self.remedy + " Or use --data digits, which is installed with Shoal.",
            )
        return folder


def _put(folder: str, file: str) -> str:
    return f"Put {file} in a folder {folder} and set {VARIABLE} to the folder above it."


FASHION_MNIST = Known(
    "fashion-mnist",
    "60,000 + 10,000 product photographs, 28x28 grey, 10 classes",
    (
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte.gz",
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    ),
    ("fashion_mnist", "fashion-mnist", "FashionMNIST/raw"),
    "Downloaded on first use (29 MiB) by --data fashion-mnist; on Debian: apt install dataset-fashion-mnist.",
)
PETS32 = Known(
    "pets32",
    "5,878 + 1,457 photographs of pets, 32x32 RGB, 37 breeds",
    ("pets32.npz",),
    ("pets32",),
    _put("pets32", "pets32.npz"),
)
AUDIOMNIST = Known(
    "audiomnist",
    "5,400 + 1,800 spoken digits, log-mel 40x96, 10 classes",
    ("audiomnist_logmel.npz",),
    ("audiomnist_logmel", "audiomnist"),
    _put("audiomnist_logmel", "audiomnist_logmel.npz"),
)
NUCLEI = Known(
    "nuclei",
    "12 + 4 microscopy images with nucleus masks, 1024x1024 grey, 2 classes of pixels",
    ("nuclei_1024x1024.npz",),
    ("nuclei",),
    _put("nuclei", "nuclei_1024x1024.npz"),
)
IN_FOLDERS = (FASHION_MNIST, PETS32, AUDIOMNIST, NUCLEI)

DIGITS_ABOUT = "4,000 + 1,000 handwritten digits, 28x28 grey, 10 classes"
DIGITS_FILE = Path(__file__).with_name("digits.npz")
DIGITS_REMEDY = "Install Shoal again: in its folder, pip install --force-reinstall --no-deps ."

FORMS = ("folder:PATH", "pairs:PATH", "windows:PATH", "npz:PATH", "synthetic:SAMPLES")


def names() -> tuple[str, ...]:
    """Every name that `load` takes as it stands, without an argument."""
    return ("default", *(known.name for known in IN_FOLDERS), "digits", "synthetic")


def forms() -> tuple[str, ...]:
    """The forms that take an argument, as people write them."""
    return FORMS


def default_name() -> str:
    """What "default" stands for here: fashion-mnist if this machine has it, else digits; never a download."""
    return FASHION_MNIST.name if FASHION_MNIST.find() else "digits"


def where(name: str | None = None) -> tuple[CatalogEntry, ...]:
    """Where each named data set lies, or only `name`. Takes no more than a few file system calls."""
    looks: dict[str, Callable[[], CatalogEntry]] = {known.name: known.place for known in IN_FOLDERS}
    looks["digits"] = lambda: CatalogEntry("digits", DIGITS_ABOUT, _text(digits_file()), DIGITS_REMEDY)
    if name is None:
        return tuple(look() for look in looks.values())
    if name not in looks:
        raise DataError(f"no data set is named {name!r}.", suggestion(name, looks))
    return (looks[name](),)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def digits_file() -> Path | None:
    """The file of the digits that is installed with Shoal; None where the installation lost it."""
    return DIGITS_FILE if DIGITS_FILE.is_file() else None
