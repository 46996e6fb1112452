"""`group=`: networks on parts of a world, and several at a time, on four real processes, against one device."""

import pytest

from tests.parity import group_cases
from tests.parity.conftest import RunOnRanks

PLANS = ["data", "model", "spatial"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "case",
    [
        group_cases.halves,
        group_cases.half_only,
        group_cases.on_one_group,
        group_cases.on_two_groups,
        group_cases.overlapping,
        group_cases.messages_of_the_script,
    ],
    ids=lambda case: case.__name__,
)
def test_networks_on_groups(on_ranks: RunOnRanks, case: object, plan: str) -> None:
    on_ranks(4, case, plan)


def test_a_rank_outside_its_group_and_a_group_that_is_gone(on_ranks: RunOnRanks) -> None:
    by_rank = on_ranks(4, group_cases.refused_groups)
    for rank in (2, 3):
        (message,) = by_rank[rank]
        assert f"rank {rank} is not in the group that it passed" in message
    for rank in (0, 1):
        (message,) = by_rank[rank]
        assert f"rank {rank} passed a group that is no longer there" in message


def test_the_given_groups_time_out_counts(on_ranks: RunOnRanks) -> None:
    by_rank = on_ranks(4, group_cases.late_rank)
    kind, message = by_rank[0]
    assert kind == "SilentError"
    assert "rank 1 of the group (rank 3 of the world) did not answer within 1.5 seconds" in message
    assert "waited for 'forward'" in message
    kind, message = by_rank[3]
    assert kind == "PeerError"
    assert "lost its connection to rank 0" in message
    assert by_rank[1] is None


def test_different_calls_are_refused_on_all_ranks_at_once(on_ranks: RunOnRanks) -> None:
    by_rank = on_ranks(4, group_cases.headers)
    for messages in by_rank:
        assert messages[:4] == by_rank[0][:4]
    calls, networks, gathers, control = by_rank[0][:4]
    assert calls.startswith("rank 0 called state_dict() while ranks 1, 2 and 3 called forward(): ")
    assert networks.startswith("ranks 0 and 2 called forward() of network ")
    assert " while ranks 1 and 3 called forward() of network " in networks
    assert gathers.startswith("ranks 0, 1 and 2 called forward() while rank 3 called gather_objects(): ")
    assert control.startswith("ranks 0, 1 and 2 called gather_objects() while rank 3 called gather_numbers(): ")
    inside = "rank 0 of the group (rank 1 of the world) called state_dict() while "
    assert all(messages[4].startswith(inside) for messages in by_rank[1:])


def test_what_fails_on_one_rank_fails_on_all(on_ranks: RunOnRanks) -> None:
    first, same, foreign, mixed, two = zip(*on_ranks(4, group_cases.disagreements), strict=True)
    assert first == (("InputError", "rank 1: bad lr."),) * 4
    assert same == (("InputError", "bad lr."),) * 4
    peer = ("PeerError", "rank 2 failed: ZeroDivisionError: division.")
    assert foreign == (peer, peer, ("ZeroDivisionError", "division\nby zero"), peer)
    told = ("ConfigError", "rank 3: bad.")
    assert mixed == (told, told, ("ZeroDivisionError", "division"), told)
    told = ("RunError", "rank 0: broken.")
    assert two == (told, told, told, ("KeyError", "'x'"))
