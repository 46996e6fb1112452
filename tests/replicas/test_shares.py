"""A replica's share of a batch that may be smaller, and what it counts in an update."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.data import BatchOrder
from shoal.replicas.worker import _Share, weight_in_update
from shoal.training.numbering import Numbering


@given(samples=st.integers(1, 40), each=st.integers(1, 5), replicas=st.integers(1, 5))
def test_shares_are_each_sample_once_and_weigh_as_the_mean_of_all(samples: int, each: int, replicas: int) -> None:
    """Each sample of a step of all counts 1 / n in it, whoever has it."""
    numbering = Numbering(each * replicas, samples)
    alone = BatchOrder(samples=samples, batch=each, seed=3, keep_last=True)
    shares = [_Share(alone, replica, replicas) for replica in range(replicas)]
    whole = BatchOrder(samples=samples, batch=each * replicas, seed=3, keep_last=True)
    assert {share.steps_per_epoch for share in shares} == {numbering.per_epoch}
    for step in range(numbering.per_epoch):
        parts = [share.indices(1, step) for share in shares]
        assert [share.size(step) for share in shares] == [len(part) for part in parts]
        assert [index for part in parts for index in part] == list(whole.indices(1, step))
        for part in parts:
            if len(part):  # the mean of its samples, weighed, in the mean of all replicas
                counts = weight_in_update(numbering, replicas, True, step, len(part)) / len(part) / replicas
                assert math.isclose(counts, 1 / numbering.of_batch(step))


@given(samples=st.integers(1, 40), each=st.integers(1, 5), replicas=st.integers(1, 5))
def test_batches_of_one_replica_weigh_by_their_samples(samples: int, each: int, replicas: int) -> None:
    numbering = Numbering(each, samples)
    for number in range(2 * numbering.per_epoch):
        own = numbering.of_batch(number)
        weight = weight_in_update(numbering, replicas, False, number, own)
        assert weight == (1 if replicas == 1 else own / each)
