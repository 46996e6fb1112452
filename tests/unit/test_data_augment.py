"""What augmentation does to a sample depends on seed, epoch and sample alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from shoal.data import Augment
from shoal.errors import ConfigError

ALL = np.arange(40, dtype=np.int64)


def parsed(spec: str, seed: int = 0) -> Augment:
    augment = Augment.parse(spec, seed=seed)
    assert augment is not None
    return augment


def run(spec: str, x: Tensor, y: Tensor | None = None, *, epoch: int = 0, seed: int = 0) -> tuple[Tensor, Tensor]:
    labels = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    return parsed(spec, seed)(x, labels, indices=np.arange(len(x), dtype=np.int64), epoch=epoch)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(40, 3, 6, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("spec", "dim"), [("flip", 3), ("vflip", 2)])
def test_a_flip_mirrors_some_samples_and_twice_is_the_identity(spec: str, dim: int, images: Tensor) -> None:
    once, _ = run(spec, images)
    mirrored = images.flip(dim)
    flipped = [bool((a == m).all()) for a, m in zip(once, mirrored, strict=True)]
    same = [bool((a == o).all()) for a, o in zip(once, images, strict=True)]
    assert all(f != s for f, s in zip(flipped, same, strict=True))
    assert 8 < sum(flipped) < 32
    assert torch.equal(run(spec, once)[0], images)


def test_shift_moves_and_fills_with_the_mean() -> None:
    x = torch.zeros(40, 1, 9, 9)
    x[:, :, 4, 4] = 1.0
    moved, _ = run("shift:2", x)
    assert moved.shape == x.shape
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(40))  # the fill is zero, the mean
    places = {(int(p[2]), int(p[3])) for p in moved.nonzero()}
    assert {p[0] for p in places} == {p[1] for p in places} == {2, 3, 4, 5, 6}


def test_crop_is_a_window_of_the_sample() -> None:
    x = torch.arange(64.0).view(1, 1, 8, 8).repeat(40, 1, 1, 1)
    cropped, _ = run("crop:5", x)
    corners = cropped[:, 0, 0, 0]
    rows, columns = corners // 8, corners % 8
    assert set(rows.tolist()) == set(columns.tolist()) == {0, 1, 2, 3}
    for window, row, column in zip(cropped, rows.int(), columns.int(), strict=True):
        assert torch.equal(window[0], x[0, 0, row : row + 5, column : column + 5])
    assert parsed("crop:5").out_shape((1, 8, 8)) == (1, 5, 5)


def test_samples_and_their_pixel_labels_move_together() -> None:
    y = torch.randint(1, 5, (40, 10, 12), generator=torch.Generator().manual_seed(2))
    x, moved = run("flip,vflip,shift:3,crop:7", y.unsqueeze(1).float(), y)
    assert moved.shape == (40, 7, 7)
    assert torch.equal(x.squeeze(1).long(), moved)
    assert not torch.equal(moved[0], moved[1])


def test_volumes() -> None:
    x = torch.randn(10, 2, 4, 6, 8)
    out, _ = run("flip,vflip,shift:1,crop:3", x)
    assert out.shape == (10, 2, 3, 3, 3)


@given(st.permutations(range(40)).map(lambda p: np.array(p[:7], dtype=np.int64)), st.integers(0, 5))
def test_a_sample_is_changed_alike_whatever_its_batch(indices: NDArray[np.int64], epoch: int) -> None:
    images = torch.arange(40 * 36.0).view(40, 1, 6, 6)
    augment = parsed("flip,shift:2", seed=9)
    labels = torch.zeros(40, dtype=torch.int64)
    few, _ = augment(images[indices], labels[indices], indices=indices, epoch=epoch)
    whole, _ = parsed("flip,shift:2", seed=9)(images, labels, indices=ALL, epoch=epoch)
    assert torch.equal(few, whole[indices])


def test_another_word_leaves_the_draws_of_the_first(images: Tensor) -> None:
    flipped, _ = run("flip", images)
    both, _ = run("shift:1,flip,vflip", images)
    others, _ = run("shift:1,vflip", images)
    mirrored = torch.tensor([not torch.equal(f, i) for f, i in zip(flipped, images, strict=True)])
    assert torch.equal(both[~mirrored], others[~mirrored])
    assert torch.equal(both[mirrored], others[mirrored].flip(-1))


def test_epochs_and_seeds_differ(images: Tensor) -> None:
    first, _ = run("flip,shift:2", images)
    assert not torch.equal(first, run("flip,shift:2", images, epoch=1)[0])
    assert not torch.equal(first, run("flip,shift:2", images, seed=1)[0])
    assert torch.equal(first, run("flip,shift:2", images)[0])


def test_nothing_to_do() -> None:
    assert Augment.parse("") is None
    assert Augment.parse("none") is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("flop", "unknown word 'flop'.\nDid you mean 'flip'"),
        ("flip,", "unknown word ''"),
        ("shift", "Write shift:PIXELS"),
        ("shift:x", "Write shift:PIXELS"),
        ("shift:0", "Write shift:PIXELS"),
        ("crop:-4", "Write crop:PIXELS"),
        ("flip:3", "flip takes no number"),
        ("flip,flip", "has flip twice"),
    ],
)
def test_words_that_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Augment.parse(spec)


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("crop:40", (3, 32, 64), "crop:40 is larger .*\n.*at most 32"),
        ("shift:28", (1, 28, 28), "out of sight.\n.*less than 28"),
        ("vflip", (1, 100), "needs a height"),
        ("crop:8,shift:8", (1, 28, 28), "out of sight"),
    ],
)
def test_changes_that_do_not_fit_the_sample(spec: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(spec).out_shape(shape)
