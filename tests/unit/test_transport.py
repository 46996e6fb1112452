"""Parts of transports by themselves. What all of them promise: tests/transport/test_contract.py."""

import pytest

from shoal.errors import ConfigError, PeerError, SilentError, network_trouble, of_network
from shoal.transport import MemoryTransport, Transport, memory, run_ranks
from shoal.transport.agreement import agree
from shoal.transport.groups import in_order
from shoal.transport.memory import Hub


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
