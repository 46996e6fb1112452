"""The meeting point of a run: what very many replicas cost it, and for whom it waits how long."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest

from shoal.errors import PeerError, RunError
from shoal.exchanging.membership.coordinator import Coordinator, Event
from shoal.exchanging.membership.meeting import Meeting
from shoal.exchanging.membership.seat import Seat
from shoal.transport.links import JSON, Link, LinkLost, connect
from shoal.transport.links.crowd import SPARE, Crowd, Guest
from shoal.transport.links.link import _packed
from shoal.transport.links.sockets import allow_many_files

pytestmark = pytest.mark.timeout(120)


@contextmanager
def meeting_point(**options: Any) -> Iterator[Coordinator]:
    coordinator = Coordinator(**{"heartbeat": 30.0, **options})
    try:
        yield coordinator
    finally:
        coordinator.close()


def come(place: Coordinator, replica: int | None) -> Link:
    link = connect(place.address, place.token, {"as": "replica", "replica": replica, "pids": []}, name="the place")
    link.timeout = 60
    link.receive()
    return link


def come_from(host: str, place: Coordinator, replica: int) -> Link:
    """A replica of another host: whatever begins with 127 is an address of this one."""
    link = Link(socket.create_connection(place.address, source_address=(host, 0)), "the place", 60.0)
    link.send({"token": place.token, "hello": {"as": "replica", "replica": replica, "pids": []}})
    for _ in range(2):
        link.receive()
    return link


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def listen(place: Coordinator, replica: int, token: str = "") -> Link:
    """An ear of a replica that has an inbox; what is told to it stays unread until somebody receives."""
    hello: dict[str, JSON] = {"as": "ear", "replica": replica, "rank": 0, "inbox": ["127.0.0.1", 1], "token": token}
    return connect(place.address, place.token, hello, name="the place")


def test_a_rank_that_does_not_listen_holds_up_nobody() -> None:
    """Its link fills up: whoever tells it of the others must not wait, neither while it is frozen nor before."""
    with meeting_point(heartbeat=0.3, replicas=3) as place, ExitStack() as stack:
        for replica in range(3):
            stack.enter_context(come(place, replica))
        ears = [stack.enter_context(listen(place, replica, token=f"{replica}" * 20_000)) for replica in range(2)]

        def changes(number: int) -> None:
            for _ in range(number):
                place.rest(0, resting=True)
                place.rest(0, resting=False)
                place.suspect(2, hangs=True)
                place.suspect(2, hangs=False)

        def all_told() -> list[Any]:
            told = [ears[0].receive().head["peers"]]
            while told[-1] != [[1, ["127.0.0.1", 1], "1" * 20_000]]:
                told.append(ears[0].receive().head["peers"])
            return told

        assert all_told()
        place.suspect(1, hangs=True)  # from now on it reads nothing
        busy = threading.Thread(target=changes, args=(500,), daemon=True)
        busy.start()
        busy.join(30)
        assert not busy.is_alive(), "a frozen rank holds up the coordinator"
        assert place.active() == [0, 2]
        place.suspect(1, hangs=False)
        busy = threading.Thread(target=changes, args=(500,), daemon=True)
        busy.start()
        busy.join(30)
        assert not busy.is_alive(), "a rank that lives and does not listen holds up the coordinator"
        assert place.active() == [0, 1, 2]
        assert until(lambda: place.members[1].ears[0].link.fileno() == -1), "it never filled up"
        again = stack.enter_context(listen(place, 1))
        assert again.receive().head["peers"] == [[0, ["127.0.0.1", 1], "0" * 20_000]]


def test_a_seat_listens_anew_when_its_ear_is_lost() -> None:
    with meeting_point(replicas=2) as place, ExitStack() as stack:
        told: list[Any] = []
        seat = Seat(Meeting(place.address, place.token, 2, 30.0, None, None), rank=0, replica=0, pids=[1], heartbeat=30)
        stack.callback(seat.leave)
        seat.listen(0, told.append, inbox=(("127.0.0.1", 1), "mine"))
        assert until(lambda: len(told) == 1)
        place.members[0].ears[0].link.close()
        assert until(lambda: len(told) == 2), "nobody listens any more"
        stack.enter_context(come(place, 1))
        stack.enter_context(listen(place, 1, "theirs"))
        assert until(lambda: told[-1] == {"peers": [[1, ["127.0.0.1", 1], "theirs"]]})


def test_a_replica_that_gives_up_is_not_told_as_lost() -> None:
    with meeting_point(replicas=2) as place:
        meeting = Meeting(place.address, place.token, 2, 30.0, None, None)
        seats = [Seat(meeting, rank=rank, replica=0, pids=[1, 2], heartbeat=30) for rank in range(2)]
        for seat in seats:
            seat.live(0)
        assert until(lambda: place.members[0].pulses.keys() == {1})
        for seat in reversed(seats):
            seat.give_up()
            seat.hang_up()
        assert until(lambda: place.members[0].state == "left")
        assert [event.what for event in place.events] == ["joined", "gave up"]


def test_servers_end_when_nobody_can_go_on() -> None:
    with meeting_point(servers=1) as place:
        hello: dict[str, JSON] = {"as": "server", "number": 0, "address": ["127.0.0.1", 1], "token": "a"}
        with connect(place.address, place.token, hello, name="the place") as server:
            server.receive()
            place.end_servers()
            server.timeout = 30
            server.receive()  # who takes part
            with pytest.raises(LinkLost):
                server.receive()


def test_many_replicas_cost_one_file_each_and_no_thread() -> None:
    many = 700  # and as many files of this test's own
    allow_many_files()
    with ExitStack() as stack:
        coordinator = stack.enter_context(meeting_point(replicas=many, wanted=many))
        links = [stack.enter_context(come(coordinator, 0))]
        files, threads = psutil.Process().num_fds(), threading.active_count()
        links += [stack.enter_context(come(coordinator, number)) for number in range(1, many)]
        for link in links:
            link.send({"ask": "pulse"})
            link.send({"ask": "ticket", "version": 0})
        for link in links:
            assert link.receive().head["counts"]
        assert len(coordinator.active()) == many
        assert until(lambda: threading.active_count() <= threads + SPARE)
        assert psutil.Process().num_fds() <= files + 2 * (many - 1) + SPARE
        links[5].close()
        assert until(lambda: 5 not in coordinator.active())


def test_a_replica_waits_for_others_when_all_its_ranks_say_so() -> None:
    with ExitStack() as stack:
        coordinator = stack.enter_context(meeting_point())
        place = Meeting(coordinator.address, coordinator.token, 1, 60.0)
        seats = [Seat(place, rank=rank, replica=0, pids=[1, 2], heartbeat=0.2) for rank in range(2)]
        for seat in seats:
            stack.callback(seat.hang_up)
            seat.live(0)
        for said in ([False, True], [True, True], [True, False]):
            for seat, waits in zip(seats, said, strict=True):
                seat.waits = lambda waits=waits: waits  # type: ignore[misc]
            ranks = {rank for rank, waits in enumerate(said) if waits}
            assert until(lambda ranks=ranks: coordinator.members[0].waiting_ranks == ranks)  # type: ignore[misc]
            assert coordinator.members[0].waits is all(said)


def test_answers_that_wait_cost_no_thread() -> None:
    with ExitStack() as stack:
        coordinator = stack.enter_context(meeting_point(replicas=50, servers=50))
        links = [stack.enter_context(come(coordinator, number)) for number in range(50)]
        threads = threading.active_count()
        for link in links[1:]:
            link.send({"ask": "servers"})
        for number in range(50):
            links[0].send({"ask": "serve", "number": number, "address": ["127.0.0.1", 1 + number], "token": "x"})
            assert links[0].receive().head == {}
            # some threads are just receiving what came in a crowd; one for each answer that waits would stay
            assert until(lambda: threading.active_count() <= threads + SPARE + 1)
        for link in links[1:]:
            assert len(link.receive().head["servers"]) == 50


def test_a_replica_that_dies_while_it_waits_for_an_answer_is_missed_at_once() -> None:
    with meeting_point(replicas=2, servers=1) as coordinator:
        link = come(coordinator, 0)
        link.send({"ask": "servers"})
        assert until(lambda: bool(coordinator._waiting))
        link.close()
        assert until(lambda: coordinator.active() == [])


def test_a_server_that_is_late_is_awaited_and_one_that_never_comes_is_named() -> None:
    errors: list[Exception] = []
    with meeting_point(replicas=2, servers=2, timeout=1.0, heartbeat=0.1, on_error=errors.append) as coordinator:
        serve: dict[str, Any] = {"ask": "serve", "address": ["127.0.0.1", 1], "token": "x"}
        with come(coordinator, 0) as first:
            first.send({**serve, "number": 0})
            first.receive()
            first.send({"ask": "servers"})
            with pytest.raises(LinkLost):
                first.receive()
        (error,) = errors
        assert isinstance(error, PeerError)
        assert error.problem == "server 1 did not come in 1 seconds; of 2, 1 are missing."
        assert "bug" not in error.remedy


def test_whose_threads_others_need_stays_while_one_is_at_work() -> None:
    """Longer than the time-out, which is for those that give no sign of life."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(meeting_point(replicas=2, timeout=0.5, heartbeat=0.1))
        first, second = (stack.enter_context(come(coordinator, number)) for number in range(2))
        first.send({"ask": "farewell"})
        assert not first.poll(1.5)
        second.send({"ask": "farewell"})
        assert (first.receive().head, second.receive().head) == ({}, {})


def test_who_never_comes_is_awaited_for_the_time_out() -> None:
    with meeting_point(replicas=2, timeout=0.5, heartbeat=0.1) as coordinator, come(coordinator, 0) as first:
        first.send({"ask": "farewell"})
        assert first.receive().head == {}
    with meeting_point(replicas=2, timeout=1000.0, heartbeat=0.1) as coordinator, come(coordinator, 0) as first:
        first.send({"ask": "farewell"})
        assert not first.poll(0.5)
        coordinator.drop(1)  # its process ended before it came
        assert first.receive().head == {}


def test_one_that_freezes_in_the_middle_of_a_frame_is_told_of_and_its_frame_arrives_when_it_wakes() -> None:
    heard: list[int] = []

    def answer(_: object, frame: Any) -> tuple[dict[str, Any], list[Any]]:
        heard.append(len(frame.buffers[0]))
        return {}, []

    with meeting_point(heartbeat=0.2, answer=answer) as coordinator, come(coordinator, 0) as link:
        frame = _frame({"ask": "result"}, 1000)
        link._socket.sendall(frame[:500])
        assert until(lambda: [event.what for event in coordinator.events] == ["joined", "frozen"])
        link._socket.sendall(frame[500:])
        assert link.receive().head == {}
        assert heard == [1000]
        assert [event.what for event in coordinator.events] == ["joined", "frozen", "back"]


def test_a_failure_is_told_to_those_who_wait_and_to_those_who_ask_later() -> None:
    with ExitStack() as stack:
        coordinator = stack.enter_context(meeting_point(replicas=2, servers=1, timeout=1000.0))
        first, second = (stack.enter_context(come(coordinator, number)) for number in range(2))
        first.send({"ask": "servers"})
        assert until(lambda: bool(coordinator._waiting))
        coordinator.fail(RunError("the disk is full.", "Free space."))
        assert first.receive().head == {"failed": ["the disk is full.", "Free space."]}
        second.send({"ask": "servers"})
        assert second.receive().head == {"failed": ["the disk is full.", "Free space."]}
        second.send({"ask": "leave"})
        assert second.receive().head == {}


def test_a_failure_is_told_to_who_asks_while_the_coordinator_closes() -> None:
    """Whoever heard it first may end the run at once; the others must not be left with a link that is gone."""
    coordinator = Coordinator(heartbeat=5.0, replicas=1)
    with come(coordinator, 0) as asker:
        coordinator.fail(RunError("the disk is full.", "Free space."))
        closing = threading.Thread(target=coordinator.close)
        closing.start()
        time.sleep(0.2)
        asker.send({"ask": "ticket", "version": 0})
        assert asker.receive().head == {"failed": ["the disk is full.", "Free space."]}
        closing.join(10)
    assert not closing.is_alive()


def test_the_end_of_a_server_is_told_once_also_where_it_never_came() -> None:
    with meeting_point(replicas=2, servers=2) as coordinator:
        for _ in range(2):
            hello: dict[str, Any] = {"as": "end of server", "number": 1}
            connect(coordinator.address, coordinator.token, hello, name="the place").close()
        assert until(lambda: bool(coordinator.events))
        coordinator.lose_server(1)
        assert [(event.what, event.who) for event in coordinator.events] == [("server lost", 1)]


@pytest.mark.parametrize("what", ["frozen", "lost", "left"])
def test_an_error_of_whoever_hears_of_events_is_told_and_everybody_is_heard_as_before(what: str) -> None:
    errors: list[Exception] = []

    def on_event(event: Event) -> None:
        if event.what == what:
            raise OSError("no space")

    with ExitStack() as stack:
        told: dict[str, Any] = {"on_event": on_event, "on_error": errors.append}
        coordinator = stack.enter_context(meeting_point(replicas=2, heartbeat=0.2, wanted=1, **told))
        first, second = (stack.enter_context(come(coordinator, number)) for number in range(2))
        match what:
            case "frozen":
                second.send({"ask": "pulse"})
            case "left":
                second.send({"ask": "leave"})
            case "lost":
                second.close()
        assert until(lambda: bool(errors))
        assert [str(error) for error in errors] == ["no space"]
        assert [event.what for event in coordinator.events][-1] == what
        first.send({"ask": "ticket", "version": 0})
        assert first.receive().head["counts"]
        stack.enter_context(come(coordinator, 2))


def test_an_error_in_the_thread_that_hears_all_is_told_and_others_are_heard() -> None:
    errors: list[Exception] = []
    with socket.create_server(("127.0.0.1", 0)) as door:
        speaks = Link(socket.create_connection(door.getsockname()), "the crowd", 5.0)
        silent = Link(door.accept()[0], "a silent one", 5.0)
    crowd = Crowd(0.05, on_error=errors.append)
    heard = threading.Event()

    def on_silence() -> None:
        raise OSError("no space")

    def hear(guest: Guest) -> bool:
        guest.link.receive()
        heard.set()
        raise ZeroDivisionError("of a receiver")

    try:
        crowd.add(silent, hear, on_silence).watched = True
        assert until(lambda: len(errors) > 1)
        assert {type(error) for error in errors} == {OSError}
        speaks.send({})
        assert heard.wait(30)
        assert until(lambda: type(errors[-1]) is ZeroDivisionError)
        assert until(lambda: silent.closed)
    finally:
        assert crowd.close(30)
        speaks.close()


def _frame(head: dict[str, Any], size: int) -> bytes:
    """As a link sends it, with one buffer."""
    return _packed(head, [size]) + bytes(size)


@pytest.mark.skipif(sys.platform != "linux", reason="needs several addresses of loopback")
def test_servers_are_started_by_replicas_each_on_its_host_the_coordinators_first() -> None:
    with ExitStack() as stack:
        coordinator = stack.enter_context(meeting_point(replicas=4, servers=5, servers_on_hosts=True))
        hosts = ["127.0.0.3", "127.0.0.2", "127.0.0.3", "127.0.0.1"]
        links = [stack.enter_context(come_from(host, coordinator, number)) for number, host in enumerate(hosts[:3])]
        links[0].send({"ask": "servers"})
        assert not links[0].poll(0.3)  # one of them may be on a host that nobody knows yet
        links.append(stack.enter_context(come_from(hosts[3], coordinator, 3)))
        assert links[0].receive().head == {"start": [1, 4]}
        for link in links:
            link.send({"ask": "servers"})
        assert links[3].receive().head == {"start": [0, 3]}
        assert links[1].receive().head == {"start": [2]}
        assert not links[2].poll(0.1)  # another has started those of its host
        for number in range(5):
            where: dict[str, Any] = {"address": ["127.0.0.1", 1 + number], "token": "x"}
            hello = {"as": "server", "number": number, **where}
            stack.enter_context(connect(coordinator.address, coordinator.token, hello, name="the place"))
        for link in (links[0], links[2]):
            assert len(link.receive().head["servers"]) == 5


def test_servers_do_not_wait_long_for_a_host_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.exchanging.membership.coordinator.PLACE_SECONDS", 0.3)
    with ExitStack() as stack:
        options: dict[str, Any] = {"replicas": 2, "servers": 2, "servers_on_hosts": True, "heartbeat": 0.2}
        coordinator = stack.enter_context(meeting_point(**options))
        first = stack.enter_context(come(coordinator, 0))
        first.send({"ask": "servers"})
        assert first.receive().head == {"start": [0, 1]}
