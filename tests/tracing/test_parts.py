"""What a trace is made of: notes, clocks, windows of steps, and what is told of it."""

import threading
from collections import defaultdict

import pytest

from shoal.config import TrainConfig
from shoal.diary import Diary, MessageEnd, now
from shoal.errors import ConfigError, RunError
from shoal.timeline import Message, Slice, Trace
from shoal.tracing.clocks import ahead_of, clock_offsets, offsets_of
from shoal.tracing.merge import RankRecord, left_out, together, trace_of
from shoal.tracing.own_loop import trace as recorded_steps
from shoal.tracing.summary import own_seconds, summarize
from shoal.transport import Transport, run_ranks

SECOND = 10**9


def record(rank: int, diary: Diary, ahead: int = 0) -> RankRecord:
    full = RankRecord.of(diary, rank, f"rank {rank}")
    return RankRecord(full.rank, full.name, full.events, full.ends, full.left_out, ahead)


def diaries() -> tuple[Diary, Diary]:
    """Rank 0 sends to rank 1, whose clock is two seconds ahead."""
    first, second = Diary(), Diary()
    for diary, ahead in ((first, 0), (second, 2 * SECOND)):
        diary.begin_step(1)
        diary.note("step", "step 1", ahead, ahead + 8 * SECOND, lane="steps")
    first.end(MessageEnd(1, 0, 1, 5, first.number(0, 1, 5), True, 1 * SECOND, "conv", 64))
    second.end(MessageEnd(1, 0, 1, 5, second.number(0, 1, 5), False, 5 * SECOND, "conv", 64))
    second.note("wait", "conv", 4 * SECOND, 5 * SECOND, peers=(0,))
    return first, second


def test_both_ends_of_a_message_are_one_on_one_clock() -> None:
    first, second = diaries()
    trace = trace_of([record(0, first), record(1, second, 2 * SECOND)], "two")
    assert trace.messages == (Message(0, 1, "conv", 1.0, 3.0, 64),)
    wait = next(piece for piece in trace.slices if piece.kind == "wait")
    assert (wait.start, wait.end, wait.peers) == (2.0, 3.0, (0,))


def test_messages_of_a_step_are_told_apart_by_their_number() -> None:
    diary = Diary()
    diary.begin_step(1)
    assert [diary.number(0, 1, 5), diary.number(0, 1, 5), diary.number(0, 1, 7)] == [0, 1, 0]
    diary.begin_step(2)
    assert diary.number(0, 1, 5) == 0


def test_an_end_without_the_other_makes_no_message() -> None:
    first, second = diaries()
    second.ends.clear()
    assert trace_of([record(0, first), record(1, second)], "two").messages == ()


def test_traces_of_replicas_are_put_under_each_other() -> None:
    first, second = diaries()
    pair = trace_of([record(0, first), record(1, second, 2 * SECOND)], "two")
    four = together([pair, pair], "four")
    assert len(four.ranks) == 4
    assert {(message.src, message.dst) for message in four.messages} == {(0, 1), (2, 3)}
    assert {piece.peers for piece in four.slices if piece.kind == "wait"} == {(0,), (2,)}


def test_a_full_diary_counts_what_it_leaves_out() -> None:
    diary = Diary(most_events=2)
    for _ in range(5):
        diary.note("forward", "conv", now())
    diary.end(MessageEnd(0, 0, 1, 0, 0, True, 0, "conv", 1))
    kept = record(0, diary)
    assert len(kept.events) == 2
    assert left_out([kept, kept]) == ("the trace is full: 6 events of its last steps are missing. Record fewer steps.")
    assert left_out([record(0, Diary())]) is None


def test_ranks_of_one_host_have_one_clock() -> None:
    assert run_ranks(3, clock_offsets) == [[0, 0, 0]] * 3


def test_clocks_of_hosts_are_put_on_one() -> None:
    """Four ranks on two hosts; the clock of the second is an hour ahead. Threads answer within a second."""
    ahead = [0, 0, 3600 * SECOND, 3600 * SECOND]

    def offsets(transport: Transport) -> list[int]:
        mine = ahead[transport.rank]
        return clock_offsets(transport, lambda: now() + mine, host=f"host {mine}")

    for found in run_ranks(4, offsets):
        assert found[:2] == [0, 0]
        assert found[2] == found[3]
        assert abs(found[2] - 3600 * SECOND) < SECOND


def test_the_tightest_bounds_win() -> None:
    """Rank 1's clock is 1000 ahead. One gather is slow for rank 0, one for rank 1, one is quick for both."""
    slow_0, slow_1, quick = ((0, 900), (1010, 1020)), ((2000, 2020), (3000, 3800)), ((5000, 5010), (6001, 6011))
    readings = [[rounds[rank] for rounds in (slow_0, slow_1, quick)] for rank in (0, 1)]
    assert abs(offsets_of(readings, ["a", "b"])[1] - 1000) <= 5


def test_the_shortest_of_some_round_trips_wins() -> None:
    trips = iter([(0, 400), (1000, 1010), *[(2000 + 100 * n, 2090 + 100 * n) for n in range(10)]])
    state: defaultdict[str, list[int]] = defaultdict(list)

    def clock() -> int:
        if not state["read"]:
            state["read"] += next(trips)
        return 7000 + state["read"].pop(0)

    def ask() -> tuple[int, str]:
        return state["read"][0] - 5, "another host"

    assert ahead_of(ask, clock, host="this host") == 7000
    assert ahead_of(lambda: (123, "this host"), host="this host") == 0


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (None, range(0)),
        ("10", range(6, 16)),
        (3, range(6, 9)),
        (True, range(6, 16)),
        (False, range(0)),
        ("20-30", range(20, 31)),
        ("20:30", range(20, 31)),
        ("7-7", range(7, 8)),
    ],
)
def test_which_steps_are_recorded(given: object, steps: range) -> None:
    config = TrainConfig.parse({"trace": given})
    assert config.traced_steps(0, 100) == steps
    assert TrainConfig.parse({"trace": config.trace}).traced_steps(0, 100) == steps


def test_a_short_run_is_recorded_as_far_as_it_goes() -> None:
    config = TrainConfig(trace="10")
    assert config.traced_steps(0, 12) == range(3, 13)
    assert config.traced_steps(0, 4) == range(1, 5)
    assert config.traced_steps(40, 100) == range(46, 56)
    assert config.traced_steps(100, 100) == range(101, 101)


@pytest.mark.parametrize("given", ["0", "-3", "30-20", "x", "5-", "1.5", "1001", "1-5000", "recipe.yaml"])
def test_steps_that_cannot_be_recorded_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="trace = ") as refused:
        TrainConfig.parse({"trace": given})
    assert given in refused.value.problem


def test_what_is_left_of_a_slice_without_those_in_it() -> None:
    outer, inner, innermost = (Slice("forward", 0, str(n), n, 10.0 - n) for n in range(3))
    after = Slice("update", 0, "optimizer", 10.0, 12.0)
    assert [seconds for _, seconds in own_seconds([after, innermost, inner, outer])] == [2.0, 2.0, 6.0, 2.0]


def test_where_a_step_goes_and_who_was_late() -> None:
    trace = Trace(
        "two",
        "measured",
        ("rank 0", "rank 1"),
        (
            Slice("step", 0, "step 1", 0.0, 10.0, "steps", 1),
            Slice("forward", 0, "pass", 0.0, 8.0, step=1),
            Slice("forward", 0, "conv", 1.0, 7.0, step=1),
            Slice("wait", 0, "conv", 2.0, 6.0, step=1, peers=(1,)),
            Slice("update", 0, "optimizer", 8.0, 9.0, step=1),
            Slice("test", 0, "all", 11.0, 20.0, step=1),
            Slice("gradients", 0, "all", 2.0, 9.0, "network", 1),
            Slice("step", 1, "step 1", 0.0, 10.0, "steps", 1),
            Slice("forward", 1, "conv", 0.0, 9.5, step=1),
            Slice("wait", 1, "conv", 5.9, 6.0, step=1, peers=(0,)),
        ),
    )
    first, second = summarize(trace)
    assert first.by_kind == pytest.approx({"forward": 4.0, "wait": 4.0, "update": 1.0})
    assert (first.seconds, first.steps, first.rest) == pytest.approx((10.0, 1, 1.0))
    assert second.waited_for == pytest.approx(4.0)
    assert first.waited_for == 0.0, "rank 1 came last: nobody was waited for by it"


def test_a_second_recording_inside_the_first_is_refused() -> None:
    with recorded_steps(), pytest.raises(RunError, match="already"), recorded_steps():
        pass
    assert Transport.diary is None


def test_a_loop_that_fails_waits_for_nobody_and_records_no_more() -> None:
    with pytest.raises(ZeroDivisionError), recorded_steps() as recorded:
        raise ZeroDivisionError
    assert Transport.diary is None
    assert recorded.trace is None


def test_threads_may_note_at_the_same_time() -> None:
    diary = Diary()

    def push() -> None:
        for _ in range(500):
            diary.note("exchange", "push", now())

    threads = [threading.Thread(target=push) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(diary.events) == 2000
