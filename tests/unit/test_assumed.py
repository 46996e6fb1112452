"""OptCNN's way to count messages, beside closed forms."""

import numpy as np
import pytest

from shoal.cluster import Cluster, Level
from shoal.planning.assumed import one_by_one_seconds, paired_one_by_one_seconds, server_seconds
from shoal.planning.boxes import Boxes
from shoal.simulating.collectives import shape_of
from tests.unit.test_transfers import DEVICE


def level(size: int, bandwidth: float) -> Level:
    return Level(name=f"of {size}", size=size, bandwidth=bandwidth, latency=1.0, source="made up")


TWO_HOSTS = Cluster(name="made up", device=DEVICE, levels=(level(2, 100.0), level(4, 10.0)))


def rows(*cuts: tuple[tuple[int, int], ...]) -> Boxes:
    """For every cut and rank the rows (start, stop) that it has of a vector."""
    edges = np.array(cuts)[..., None, :]
    return Boxes(edges[..., 0], edges[..., 1], None, None, None)


SHARED = rows(((0, 2), (2, 4), (4, 6), (6, 8)))
EVERYTHING = rows(((0, 8),) * 4)


def test_a_server_gets_every_copy_but_its_own_and_sends_as_many() -> None:
    assert server_seconds(50.0, shape_of((0, 1), TWO_HOSTS), TWO_HOSTS) == 2 * 50 / 100
    assert server_seconds(50.0, shape_of((0, 2), TWO_HOSTS), TWO_HOSTS) == 2 * 50 / 10
    # Two copies from the other host by the outer link, at the same time as one by the inner.
    assert server_seconds(50.0, shape_of(range(4), TWO_HOSTS), TWO_HOSTS) == 2 * 2 * 50 / 10
    assert server_seconds(50.0, shape_of((0,), TWO_HOSTS), TWO_HOSTS) == 0


def test_messages_one_by_one_add_up() -> None:
    # Each of 4 ranks gets 2 elements from its neighbour and 2 from each of the others' host.
    expected = 4 * (2 * 4 / 100 + 2 * 2 * 4 / 10)
    assert one_by_one_seconds(SHARED, EVERYTHING, 4, TWO_HOSTS) == pytest.approx(np.array([[expected]]))
    assert paired_one_by_one_seconds(SHARED, EVERYTHING, 4, TWO_HOSTS) == pytest.approx(np.array([expected]))
    assert one_by_one_seconds(SHARED, SHARED, 4, TWO_HOSTS) == 0


def test_every_cut_meets_every_other() -> None:
    both = rows(((0, 2), (2, 4), (4, 6), (6, 8)), ((0, 8),) * 4)
    table = one_by_one_seconds(SHARED, both, 4, TWO_HOSTS)
    assert table.shape == (1, 2)
    assert table[0, 0] == 0 < table[0, 1]
