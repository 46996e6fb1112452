"""torch's own data sets and loaders as splits of Shoal's.

Order     Shoal's: every epoch a fresh shuffle that seed and epoch decide, whatever the plan and the number of ranks.
Draws     before a sample is read, Python's, numpy's and torch's random numbers are seeded by (seed, epoch, sample), and
          afterwards they are as they were. So a data set that changes its samples at random changes each in the same
          way wherever it is read: on one device, on the rank that has it, and on every rank that has a window of it.
Workers   with some, that many processes of each rank read a batch, a part of it each, while the last one is trained on;
          else the rank reads it itself. A sample is the same either way.
Failure   a sample that cannot be read, or is no pair of tensor and class, is a `DataError` with its number.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from shoal.data.dataset import DataSet, Splits, Task
from shoal.errors import DataError, RunError
from shoal.inference import Preparation, numbered

PAIR = "A data set gives (x, y) for a number: a tensor with its channels first, and its class, or one class per pixel."
Sample = tuple[NDArray[Any], NDArray[np.int64]]


class TorchData:
    """One split: a map-style data set of torch's, read sample by sample.

    Costs about 0.1 ms for each sample beside what the data set itself takes.
    """

    def __init__(self, dataset: Any, *, classes: int, seed: int = 0, workers: int = 0) -> None:
        self._dataset, self._seed, self._workers = dataset, seed, workers
        self._readers: ProcessPoolExecutor | None = None
        self.prefetch = workers > 0
        self.classes = classes
        ((x, y),) = self._read(np.zeros(1, dtype=np.int64), 0)
        self.shape: tuple[int, ...] = x.shape
        self.class_names = _class_names(dataset, classes)
        self.preparation = Preparation.own(x.shape)
        self.task: Task = "segment" if y.ndim else "classify"
        if y.ndim and y.shape != x.shape[1:]:
            raise DataError(
                f"sample 0 of {_name(dataset)} has the shape {x.shape} and labels of the shape {y.shape}.",
                "Give one class per sample, or one for each of its pixels.",
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """See `DataSet.batch`. Samples are taken as they come, as float32."""
        return self.batch_in(0, indices)

    def batch_in(self, epoch: int, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """See `Changing.batch_in`."""
        samples = self._read(indices, epoch) if not self._workers else self._read_beside(indices, epoch)
        for index, (x, y) in zip(indices, samples, strict=True):
            wanted = self.shape[1:] if self.task == "segment" else ()
            if x.shape != self.shape or y.shape != wanted:
                raise DataError(
                    f"sample {index} of {_name(self._dataset)} has the shapes {x.shape} and {y.shape}, sample 0 has "
                    f"{self.shape} and {wanted}.",
                    "Bring all samples to one shape.",
                )
            if y.size and not 0 <= y.min() <= y.max() < self.classes:
                raise DataError(
                    f"sample {index} of {_name(self._dataset)} has labels {y.min()} to {y.max()}; classes are 0 to "
                    f"{self.classes - 1}.",
                    "Number the classes from 0, and give their number: classes=N.",
                )
        x, y = (np.stack(part) for part in zip(*samples, strict=True))
        return torch.from_numpy(x), torch.from_numpy(y)

    def _read(self, indices: NDArray[np.int64], epoch: int) -> list[Sample]:
        with _random_state_kept():
            return _read_samples(self._dataset, self._seed, epoch, indices.tolist())

    def _read_beside(self, indices: NDArray[np.int64], epoch: int) -> list[Sample]:
        if self._readers is None:
            way = "fork" if "fork" in get_all_start_methods() else "spawn"
            first = (self._dataset, self._seed, os.getpid())
            self._readers = ProcessPoolExecutor(self._workers, get_context(way), _begin_reader, first)
        parts = [part.tolist() for part in np.array_split(indices, self._workers) if len(part)]
        try:
            waiting = [self._readers.submit(_read_part, epoch, part) for part in parts]
            return [sample for part in waiting for sample in part.result()]
        except BrokenProcessPool as error:
            raise RunError(
                f"a process that reads {_name(self._dataset)} died.",
                "Perhaps memory ran out: give fewer loader_workers; or look for what ends it, with loader_workers=0.",
            ) from error

    def close(self) -> None:
        """End the processes that read. They would end with this one; reading again begins new ones."""
        if self._readers is not None:
            self._readers.shutdown()
            self._readers = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": None}  # processes are not sent to others


@dataclass(frozen=True)
class Loaded:
    """What a user gave for one split, without its loader."""

    dataset: Any
    batch: int | None = None
    workers: int | None = None


def own_splits(data: object, *, classes: int | None, seed: int, workers: int | None) -> Splits:
    """Both splits of what a user gave: `Splits`, or a training and a test part.

    A part is a map-style `Dataset`, a `DataLoader` of one, or a data set of Shoal's. `classes` of a `Dataset` are its
    own (`dataset.classes`, or the largest of its labels where these lie ready) unless given. `workers`: processes of a
    rank that read a `Dataset`; a loader's own number unless given.
    """
    if isinstance(data, Splits):
        return data
    train, test = (unloaded(part, training=not number) for number, part in enumerate(parts_of(data)))
    first = _split(train, classes, seed, workers)
    second = _split(test, first.classes, seed, workers)
    if (first.shape[0], first.task) != (second.shape[0], second.task) or first.classes != second.classes:
        raise DataError(
            f"training samples have the shape {first.shape}, to {first.task} {first.classes} classes; test samples "
            f"{second.shape}, to {second.task} {second.classes}.",
            "Give two parts of one data set.",
        )
    return Splits(name_of(data), first, second, name_of(data))


def parts_of(data: object) -> tuple[object, object]:
    """The training and the test part; a `DataError` where it is no pair."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise DataError(f"data = {_name(data)} is not a training and a test part.", "Give data=(train, test).")
    return data[0], data[1]


def batch_of(data: object) -> int | None:
    """Samples of a batch, where the training part is a loader that says so."""
    if isinstance(data, Splits) or not isinstance(data, tuple | list) or len(data) != 2:
        return None
    return unloaded(data[0], training=True).batch


def name_of(data: object) -> str:
    """What a run's folder says of it."""
    if isinstance(data, Splits):
        return data.name
    if isinstance(data, tuple | list):
        return ", ".join(dict.fromkeys(_name(unloaded(part, training=False).dataset) for part in data))
    return _name(data)


def unloaded(part: object, *, training: bool) -> Loaded:
    """The data set of a loader; a `DataError` that names what of the loader cannot be honoured."""
    if not isinstance(part, DataLoader):
        return Loaded(part)
    loader: DataLoader[Any] = part
    if isinstance(loader.dataset, IterableDataset):
        raise _not_by_number(loader.dataset)
    usual = {
        "sampler": isinstance(loader.sampler, RandomSampler | SequentialSampler) and _plain(loader.sampler),
        "batch_sampler": loader.batch_size is not None,
        "collate_fn": loader.collate_fn is default_collate,
        "worker_init_fn": loader.worker_init_fn is None,
    }
    if other := [name for name, honoured in usual.items() if not honoured]:
        raise DataError(
            f"the loader of {_name(loader.dataset)} has its own {other[0]}, in whose place Shoal has its own.",
            "Give the data set itself; what it does to a sample is kept.",
        )
    if training and isinstance(loader.sampler, SequentialSampler):
        raise DataError(
            f"the loader of {_name(loader.dataset)} leaves samples in order (shuffle=False); Shoal shuffles them for "
            "every epoch.",
            "Give DataLoader(..., shuffle=True), or the data set itself.",
        )
    return Loaded(loader.dataset, loader.batch_size, loader.num_workers)


def _plain(sampler: Any) -> bool:
    """Whether it takes every sample once."""
    return not getattr(sampler, "replacement", False) and getattr(sampler, "_num_samples", None) is None


def _split(part: Loaded, classes: int | None, seed: int, workers: int | None) -> DataSet:
    dataset = part.dataset
    if all(hasattr(dataset, name) for name in ("batch", "shape", "classes", "task", "prefetch")):
        own: DataSet = dataset
        return own
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise _not_by_number(dataset)
    if not len(dataset):
        raise DataError(f"{_name(dataset)} has no sample.", PAIR)
    count = classes if classes is not None else _classes(dataset)
    return TorchData(dataset, classes=count, seed=seed, workers=(part.workers or 0) if workers is None else workers)


def _not_by_number(dataset: object) -> DataError:
    return DataError(
        f"{_name(dataset)} cannot be read by number: it needs len(dataset) and dataset[i].",
        f"{PAIR} Samples that only come one after the other cannot be shared among ranks exactly.",
    )


def _classes(dataset: Any) -> int:
    """As many as the data set says that there are, or as its labels tell."""
    if isinstance(dataset, Subset):
        return _classes(dataset.dataset)
    told = getattr(dataset, "classes", None)
    if isinstance(told, int):
        return told
    if isinstance(told, Sequence) and told:
        return len(told)
    ready = dataset.tensors[-1] if isinstance(dataset, TensorDataset) else getattr(dataset, "targets", None)
    if ready is not None and not torch.is_floating_point(labels := torch.as_tensor(ready)):
        return int(labels.max()) + 1
    raise DataError(
        f"{_name(dataset)} does not say how many classes there are: it has neither classes nor targets.",
        "Give their number: classes=N.",
    )


def _class_names(dataset: Any, classes: int) -> tuple[str, ...]:
    """Those that the data set has, as torchvision's do; else numbers."""
    if isinstance(dataset, Subset):
        return _class_names(dataset.dataset, classes)
    told = getattr(dataset, "classes", None)
    names = tuple(map(str, told)) if isinstance(told, Sequence) else ()
    return names if len(set(names)) == classes == len(names) else numbered(classes)


def _name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _read_samples(dataset: Any, seed: int, epoch: int, indices: Sequence[int]) -> list[Sample]:
    """Each as it is for this seed and epoch. Leaves random states that only these samples decide."""
    samples = []
    for index in indices:
        word = int(np.random.SeedSequence([seed, epoch, index]).generate_state(1, np.uint64)[0]) >> 1
        random.seed(word)
        np.random.seed(word % 2**32)  # noqa: NPY002  (the state that data sets of others draw from)
        torch.default_generator.manual_seed(word)
        try:
            item = dataset[index]
        except Exception as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise DataError(
                f"sample {index} of {_name(dataset)} cannot be read: {type(error).__name__}: {reason}.",
                f"Correct the data set until dataset[{index}] works.",
            ) from error
        samples.append(_sample(item, index, dataset))
    return samples


def _sample(item: Any, index: int, dataset: Any) -> Sample:
    if not isinstance(item, tuple | list) or len(item) != 2:
        what = f"{len(item)} things" if isinstance(item, tuple | list) else _name(item)
        raise DataError(f"sample {index} of {_name(dataset)} is {what}, not a pair.", PAIR)
    x, y = (part.detach().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part) for part in item)
    is_array = isinstance(item[0], Tensor | np.ndarray)
    if not is_array or x.dtype.kind not in "buif" or x.ndim < 2:
        what = f"a {x.dtype} array of the shape {x.shape}" if is_array else _name(item[0])
        raise DataError(
            f"x of sample {index} of {_name(dataset)} is {what}, not a tensor of real numbers with channels first.",
            "Make it one, with a transform such as torchvision's ToTensor.",
        )
    if y.dtype.kind not in "bui":
        what = _name(item[1]) if y.dtype.kind == "O" else str(y.dtype)
        raise DataError(
            f"y of sample {index} of {_name(dataset)} is {what}, not whole numbers.",
            f"{PAIR} For other targets, use shoal.parallelize in a loop of your own.",
        )
    return x.astype(np.float32, copy=False), y.astype(np.int64, copy=False)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Of Python, numpy and torch, for the network that draws from them too."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


# In the processes that read

_reads: Callable[[int, Sequence[int]], list[Sample]]


def _begin_reader(dataset: Any, seed: int, parent: int) -> None:
    global _reads
    torch.set_num_threads(1)  # threads of the process that this one was forked from are not here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides what a Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _reads = lambda epoch, indices: _read_samples(dataset, seed, epoch, indices)  # noqa: E731


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _read_part(epoch: int, indices: Sequence[int]) -> list[Sample]:
    return _reads(epoch, indices)
