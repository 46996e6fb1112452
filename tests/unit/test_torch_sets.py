"""torch's data sets and loaders as splits: what is read, by whom, with which random numbers, and what is refused."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from shoal.data import BatchOrder, BatchPart, Loader, Splits, first_indices, load
from shoal.data.torch_sets import TorchData, batch_of, own_splits
from shoal.errors import DataError, RunError


class Noisy(Dataset[Any]):
    """Draws from all three generators."""

    classes = ("cat", "dog", "bee")

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(1, 4, 6) + random.random() + np.random.rand()  # noqa: NPY002
        return noise + 10 * index, index % 3


class Of(Dataset[Any]):
    """Whatever a function makes of a number."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def of(data: Any, **options: Any) -> Splits:
    return own_splits(data, **{"classes": None, "seed": 0, "workers": None, **options})


def test_a_sample_depends_on_seed_epoch_and_number_alone() -> None:
    torch.manual_seed(5)
    before = random.getstate(), torch.get_rng_state()
    data = of((Noisy(), Noisy())).train
    assert (data.shape, data.classes, data.class_names, data.task) == ((1, 4, 6), 3, Noisy.classes, "classify")
    order = BatchOrder(samples=12, batch=4, seed=1)
    whole, part = Loader(data, order), BatchPart((slice(1, 3), slice(0, 1), slice(2, 4), slice(0, 6)), (slice(0, 4),))
    x, y = whole.batch(2, 1)
    assert torch.equal(whole.batch(2, 1)[0], x)
    assert not torch.equal(data.batch(order.indices(2, 1))[0], x)  # which is epoch 0
    assert not torch.equal(of((Noisy(), Noisy()), seed=1).train.batch(order.indices(2, 1))[0], x)
    window, labels = Loader(data, order, parts={order.batch: part}).batch(
        2, 1
    )  # as a rank under a spatial plan reads it
    assert torch.equal(window, x[1:3, :, 2:4])
    assert torch.equal(labels, y)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_workers_read_the_same_and_leave_nobody() -> None:
    alone, helped = of((Noisy(), Noisy())).train, of((Noisy(), Noisy()), workers=2).train
    assert helped.prefetch
    before = psutil.Process().children()
    order = BatchOrder(samples=12, batch=5)
    pairs = zip(Loader(alone, order).epoch(1), Loader(helped, order).epoch(1), strict=True)
    assert all(torch.equal(a, b) for mine, others in pairs for a, b in zip(mine, others, strict=True))
    readers = [child for child in psutil.Process().children() if child not in before]
    assert len(readers) == 2
    assert isinstance(helped, TorchData)
    helped.close()
    assert not any(child.is_running() for child in readers)


def test_a_worker_that_dies_is_told_of() -> None:
    data = of((Of(lambda i: os._exit(3) if i == 5 else (torch.zeros(1, 2, 2), 0)), Noisy()), classes=3, workers=1).train
    data.batch(first_indices(4))
    with pytest.raises(RunError, match=r"a process that reads .*Of died"):
        data.batch(first_indices(8))


def test_pixels_may_have_labels() -> None:
    data = of([TensorDataset(torch.zeros(5, 3, 4, 4), torch.arange(80).view(5, 4, 4) % 7)] * 2).test
    assert (data.task, data.classes, data.shape) == ("segment", 7, (3, 4, 4))
    assert data.batch(first_indices(2))[1].shape == (2, 4, 4)


def test_classes_are_found_where_they_are() -> None:
    plain = TensorDataset(torch.zeros(5, 1, 4, 4), torch.tensor([0, 1, 4, 1, 0]))
    assert of((Subset(plain, [0, 1]), plain)).train.classes == 5
    assert of((plain, plain), classes=9).train.classes == 9
    with pytest.raises(DataError, match=r"does not say how many classes.*\n.*classes=N"):
        of((Of(lambda i: (torch.zeros(1, 2, 2), i)), plain))


def test_a_loader_gives_its_data_set_batch_and_workers() -> None:
    loader = DataLoader(Noisy(), batch_size=6, shuffle=True, num_workers=1)
    assert batch_of((loader, Noisy())) == 6
    assert of((loader, DataLoader(Noisy()))).train.prefetch
    assert not of((loader, loader), workers=0).train.prefetch


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(1, 2, 2), 0


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Stream(), "cannot be read by number"),
        (DataLoader(Stream()), "cannot be read by number"),
        (DataLoader(Noisy()), r"in order \(shuffle=False\)"),
        (DataLoader(Noisy(), sampler=WeightedRandomSampler([1.0] * 12, 12)), "has its own sampler"),
        (DataLoader(Noisy(), shuffle=True, collate_fn=list), "has its own collate_fn"),
        (DataLoader(Noisy(), batch_size=None, shuffle=True), "has its own batch_sampler"),
        (DataLoader(Noisy(), shuffle=True, worker_init_fn=print), "has its own worker_init_fn"),
        (3, "int cannot be read by number"),
        (Of(lambda _: torch.zeros(1, 2, 2)), "sample 0 of .*Of is torch.Tensor, not a pair"),
        (Of(lambda _: {"x": 1}), "is dict, not a pair"),
        (Of(lambda _: (torch.zeros(2, 2), 1, 2)), "is 3 things, not a pair"),
        (Of(lambda _: ("a.png", 1)), "x of sample 0 of .*Of is str"),
        (Of(lambda _: (torch.zeros(3), 1)), r"float32 array of the shape \(3,\)"),
        (Of(lambda _: (torch.zeros(1, 2, 2), 0.5)), "y of sample 0 of .* is float64, not whole numbers"),
        (Of(lambda _: (torch.zeros(1, 2, 2), torch.zeros(3, 3, dtype=torch.long))), r"labels of the shape \(3, 3\)"),
        (Of(lambda i: (torch.zeros(1, 2, 2), 1 / (i - 0))), "sample 0 of .*Of cannot be read: ZeroDivisionError"),
    ],
)
def test_parts_that_are_refused(part: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        of((part, Noisy()), classes=3)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (lambda i: (torch.zeros(1, 2, 2 + i // 7), 0), r"sample 7 of .*Of has the shapes \(1, 2, 3\) and \(\)"),
        (lambda i: (torch.zeros(1, 2, 2), i), "sample 3 of .* has labels 3 to 3; classes are 0 to 2"),
    ],
)
def test_samples_that_are_refused(item: Callable[[int], Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        of((Of(item), Noisy()), classes=3).train.batch(first_indices(8))


def test_data_that_is_no_pair_is_refused() -> None:
    with pytest.raises(DataError, match="Noisy is not a training and a test part"):
        of(Noisy())
    with pytest.raises(DataError, match="Give two parts of one data set"):
        of((Noisy(), TensorDataset(torch.zeros(5, 3, 4, 4), torch.zeros(5, dtype=torch.long))), classes=3)


def test_splits_of_shoal_are_taken_as_they_are() -> None:
    splits = load("synthetic:64")
    assert of(splits) is splits
    assert of((splits.train, splits.test)).train is splits.train
