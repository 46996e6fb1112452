"""What ranks tell each other, on ranks that are threads; with processes: tests/parity/test_groups.py."""

import pytest

from shoal.errors import ConfigError, PeerError, RunError, SilentError, network_trouble, of_network
from shoal.transport import MemoryTransport, Transport, memory, run_ranks
from shoal.transport.agreement import agree
from shoal.transport.groups import in_order
from shoal.transport.memory import Hub


def test_a_header_brings_every_ranks_numbers() -> None:
    found = run_ranks(3, lambda transport: transport.header("forward", [transport.rank, 0.5, float("inf")]))
    assert found == [[[0.0, 0.5, float("inf")], [1.0, 0.5, float("inf")], [2.0, 0.5, float("inf")]]] * 3
    assert Transport(alone=True).header("forward", [4.0]) == [[4.0]]


def test_a_header_has_room_for_seven_numbers() -> None:
    assert run_ranks(2, lambda transport: transport.header("forward", [1.0] * 7)) == [[[1.0] * 7] * 2] * 2
    with pytest.raises(ValueError, match="8 numbers do not fit"):
        run_ranks(2, lambda transport: transport.header("forward", [1.0] * 8))


def test_different_calls_are_refused_by_all() -> None:
    def call(transport: Transport) -> str:
        with pytest.raises(RunError) as caught:
            transport.header("state_dict" if transport.rank == 0 else "forward", [])
        assert transport.header("forward", [1.0]) == [[1.0]] * 3  # and all can go on
        return str(caught.value)

    (message,) = set(run_ranks(3, call))
    assert message == (
        "rank 0 called state_dict() while ranks 1 and 2 called forward(): nobody would get an answer.\n"
        "Call it on all ranks, in the same order, and write the file on rank 0."
    )


def test_gathers_of_any_length() -> None:
    def work(transport: Transport) -> object:
        numbers = transport.gather_numbers([float(transport.rank)] * 9 * transport.rank)
        return numbers, transport.gather_objects({"rank": "x" * transport.rank})

    numbers = [[float(rank)] * 9 * rank for rank in range(3)]
    assert run_ranks(3, work) == [(numbers, [{"rank": ""}, {"rank": "x"}, {"rank": "xx"}])] * 3


def test_any_error_of_one_rank_ends_all() -> None:
    def attempt(rank: int) -> int:
        return 6 // (1 - rank)

    def work(transport: Transport) -> str:
        with pytest.raises(ArithmeticError if transport.rank == 1 else PeerError) as caught:
            agree(transport, lambda: attempt(transport.rank))
        return str(caught.value).partition("\n")[0]

    division = "integer division or modulo by zero"
    peer = f"rank 1 failed: ZeroDivisionError: {division}."
    assert run_ranks(3, work) == [peer, division, peer]


def test_a_lost_rank_is_not_told() -> None:
    """Who raises a PeerError knows that nobody would answer: it waits for nobody."""

    def lost() -> None:
        raise PeerError("gone.", "See it.")

    with pytest.raises(PeerError, match="gone"):
        agree(MemoryTransport(Hub(), 0, 2), lost)


def test_a_silent_thread_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PATIENCE", 0.2)
    with pytest.raises(SilentError, match=r"rank 1 did not answer within 0.2 seconds; rank 0 waited for 'forward'"):
        run_ranks(2, lambda transport: transport.rank or transport.header("forward", []))


def test_a_group_of_no_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="in no world"):
        Transport(object())  # type: ignore[arg-type]


def test_groups_are_made_in_one_order_by_their_members_alone() -> None:
    wanted = [("layer", (2, 3)), ("gradient", (0, 1)), ("layer", (0, 1, 2)), ("gradient", (0, 1)), ("layer", (1,))]
    assert in_order(wanted, 0) == [("gradient", (0, 1)), ("layer", (0, 1, 2))]
    assert in_order(wanted, 2) == [("layer", (0, 1, 2)), ("layer", (2, 3))]


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer", "gone"),
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation", "silent"),
        ("Application timeout caused pair closure", "silent"),
        ("[enforce fail at gloo/x.cc] only float tensors", None),
    ],
)
def test_what_gloo_says_is_known(text: str, trouble: str | None) -> None:
    assert of_network(RuntimeError(text))
    assert network_trouble(RuntimeError(text)) == trouble
    assert not of_network(RuntimeError("connection reset by peer"))  # the user's own
