"""The papers, one file each: what they report, where every number is from, and what is asked beside it."""

from importlib import import_module

from shoal.errors import InputError, suggestion
from shoal.paper import Paper

NAMES = ("optcnn", "owt", "yadan", "poseidon", "campos", "chan-lane", "paine")
"""In the order in which they are shown."""


def load(name: str) -> Paper:
    """The paper of this name; another name is an `InputError`."""
    if name not in NAMES:
        raise InputError(f"there is no paper {name!r}.", suggestion(name, NAMES))
    paper: Paper = import_module(f"shoal.papers.{name.replace('-', '_')}").PAPER
    return paper
