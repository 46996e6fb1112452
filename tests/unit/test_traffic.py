"""Buckets of gradients: who shares one, and when it is closed."""

from shoal.lowering.step_traffic import fill_buckets
from shoal.traffic import Sent, ring_bytes, total


def test_a_bucket_has_one_set_of_ranks_and_one_type() -> None:
    shards = [
        ("a", (0, 1), "float32", 40),
        ("b", (0, 1), "bfloat16", 20),
        ("c", (0, 1, 2), "float32", 40),
        ("d", (0, 1), "float32", 40),
        ("alone", (0,), "float32", 40),
        ("empty", (0, 1), "float32", 0),
    ]
    assert [(b.ranks, b.names, b.bytes) for b in fill_buckets(shards, 10**6)] == [
        ((0, 1), ["a", "d"], 80),
        ((0, 1), ["b"], 20),
        ((0, 1, 2), ["c"], 40),
    ]


def test_a_full_bucket_is_closed() -> None:
    shards = [(name, (0, 1), "float32", 40) for name in "abcde"]
    assert [b.names for b in fill_buckets(shards, 80)] == [["a", "b"], ["c", "d"], ["e"]]


def test_a_ring_sends_its_bytes_exactly() -> None:
    assert sum(ring_bytes(1001, 7, index) for index in range(7)) == 2 * 6 * 1001
    assert total({"a": Sent(3, 1), "b": Sent(4, 2)}) == Sent(7, 3)
