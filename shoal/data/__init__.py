"""Data sets, the order in which their samples are visited, and how batches are made.

The functions that tell what there is (`names` to `default_name` in `__all__`) need neither torch nor numpy;
the rest is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shoal.data.catalog import CatalogEntry, default_name, forms, names, where
from shoal.data.search import search_folders

if TYPE_CHECKING:
    from shoal.data.augment import Augment, parse_augment
    from shoal.data.batch_part import BatchPart
    from shoal.data.dataset import ArrayData, DataSet, Splits, Task
    from shoal.data.loader import Loader, first_indices, sequential_batches
    from shoal.data.loading import fit_splits, load
    from shoal.data.order import BatchOrder, Position

__all__ = [
    "load",
    "fit_splits",
    "names",
    "forms",
    "where",
    "search_folders",
    "default_name",
    "CatalogEntry",
    "Splits",
    "DataSet",
    "ArrayData",
    "Task",
    "BatchOrder",
    "Position",
    "Loader",
    "sequential_batches",
    "first_indices",
    "BatchPart",
    "Augment",
    "parse_augment",
]

_HOME = {
    "load": "loading",
    "fit_splits": "loading",
    "Splits": "dataset",
    "DataSet": "dataset",
    "ArrayData": "dataset",
    "Task": "dataset",
    "BatchOrder": "order",
    "Position": "order",
    "Loader": "loader",
    "sequential_batches": "loader",
    "first_indices": "loader",
    "BatchPart": "batch_part",
    "Augment": "augment",
    "parse_augment": "augment",
}


if not TYPE_CHECKING:  # else a name that does not exist would pass the type check

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
