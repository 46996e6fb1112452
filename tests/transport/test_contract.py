"""One contract for every rank transport: processes over Gloo, and threads. That of links: test_links.py."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal.transport import Transport, run_ranks
from tests.conftest import RunOnRanks
from tests.transport import cases

WORLD = 3
OnAll = Callable[[cases.Work], list[Any]]


@pytest.fixture(params=["gloo", "threads"])
def on_all(request: pytest.FixtureRequest, on_ranks: RunOnRanks) -> OnAll:
    """What `work(transport)` returns on each of three ranks."""
    if request.param == "threads":
        return lambda work: run_ranks(WORLD, work)
    return lambda work: on_ranks(WORLD, cases.over_gloo, work)


def test_a_header_brings_every_ranks_numbers(on_all: OnAll) -> None:
    assert on_all(cases.headers) == [[[float(rank), 0.5, float("inf")] for rank in range(WORLD)]] * WORLD


def test_a_header_has_room_for_seven_numbers(on_all: OnAll) -> None:
    assert on_all(cases.full_headers) == [[[1.0] * 7] * WORLD] * WORLD


def test_different_calls_are_refused_by_all(on_all: OnAll) -> None:
    (message,) = set(on_all(cases.different_calls))
    assert message == (
        "rank 0 called state_dict() while ranks 1 and 2 called forward(): nobody would get an answer.\n"
        "Call it on all ranks, in the same order, and write the file on rank 0."
    )


def test_gathers_of_any_length(on_all: OnAll) -> None:
    numbers = [[float(rank)] * 9 * rank for rank in range(WORLD)]
    assert on_all(cases.gathers) == [(numbers, [{"rank": ""}, {"rank": "x"}, {"rank": "xx"}])] * WORLD


def test_any_error_of_one_rank_ends_all(on_all: OnAll) -> None:
    division = "integer division or modulo by zero"
    peer = f"rank 1 failed: ZeroDivisionError: {division}."
    assert on_all(cases.one_fails) == [peer, division, peer]


def test_payload_arrives_and_is_counted(on_all: OnAll) -> None:
    for rank, (tensors, counted) in enumerate(on_all(cases.payload)):
        before = (rank - 1) % WORLD
        assert tensors == [[6.0] * 3, [6.0] * 2, [2.0, 0.0], [5], [before] * 4]
        # a ring sends 2 (P-1) times the bytes, of which each rank sends its share
        assert counted["move"] == 16
        assert counted.get("tell", 0) == (16 if rank == 0 else 0)
        assert sum(counted[label] for label in ("sum", "later", "max")) == pytest.approx(
            2 * 2 / 3 * (12 + 16 + 8), abs=3
        )


def test_a_group_of_one_costs_nothing(on_all: OnAll) -> None:
    assert on_all(cases.alone_in_a_group) == [(float(rank), {}) for rank in range(WORLD)]


def test_a_header_that_nobody_waits_for_is_read_before_anything_else_is_sent(on_all: OnAll) -> None:
    on_all(cases.later_headers)


def test_such_headers_of_different_calls_are_refused_by_all(on_all: OnAll) -> None:
    (message,) = set(on_all(cases.later_headers_of_different_calls))
    assert message.startswith("rank 0 called state_dict() while ranks 1 and 2 called backward(): ")


def test_one_that_is_alone() -> None:
    transport = Transport(alone=True)
    assert transport.header("forward", [4.0]) == [[4.0]]
    seen: list[Any] = []
    transport.header_later("backward", [5.0], seen.append)
    assert seen == []
    transport.read_header()
    transport.read_header()
    assert seen == [[[5.0]]]
