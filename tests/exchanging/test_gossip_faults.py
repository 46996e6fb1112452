"""Gossip when peers are slow, frozen or asked while they send: no share is lost, doubled or waited for."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.exchanging.gossip import MISSED_AT_MOST, PATIENCE_SECONDS, Gossip
from shoal.transport.links import Link, connect
from tests.exchanging.test_averaging import acquainted, drained, share_of, sides
from tests.exchanging.together import Side, at_once, meeting

pytestmark = pytest.mark.timeout(60)
BEAT = 0.5


@contextmanager
def pair_of(mode: str = "push", **options: Any) -> Iterator[list[Side]]:
    chosen = {"period": 1, "heartbeat": BEAT, "mode": mode, **options}
    with meeting("gossip", 2, **chosen) as (side, _):
        yield acquainted(sides(side, 2, momentum=0.0, weight_decay=0.0))


def gossip(side: Side) -> Gossip:
    assert isinstance(side.exchange, Gossip)
    return side.exchange


def mean(pair: list[Side]) -> Tensor:
    """By shares, of weights with what arrived mixed in."""
    parts = [gossip(side).weights_now() for side in pair]
    flats = [share * torch.cat([w.reshape(-1) for w in weights]) for weights, share in parts]
    return torch.stack(flats).sum(0) / sum(share for _, share in parts)


def slow_to_answer(monkeypatch: pytest.MonkeyPatch, side: Side, release: threading.Event) -> list[str]:
    """Let a replica, once it has received all that a peer sent, do nothing until `release`, as one that is stopped."""
    room, seen = gossip(side)._arrivals.room, []

    class Frozen:
        @contextmanager
        def room(self) -> Iterator[list[Tensor]]:
            with room() as arrived:
                seen.append("asked")
                release.wait(30)
                yield arrived

    monkeypatch.setattr(gossip(side), "_arrivals", Frozen())
    return seen


@pytest.mark.parametrize("mode", ["push", "pair"])
def test_what_a_sender_took_back_does_not_count_at_a_receiver_that_wakes(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair_of(mode) as pair:
        release, total = threading.Event(), sum(map(share_of, pair))
        seen = slow_to_answer(monkeypatch, pair[1], release)
        pair[0].push(1.0)
        drained(pair)
        assert seen == ["asked"]
        assert gossip(pair[0]).tally.dropped == 1
        before = mean(pair)
        release.set()
        monkeypatch.undo()
        for _ in range(3):  # on a new link, behind what came late on the old one
            pair[0].push(0.0)
            drained(pair)
        assert sum(map(share_of, pair)) == pytest.approx(total)
        torch.testing.assert_close(mean(pair), before)


@pytest.mark.parametrize("mode", ["push", "pair"])
def test_replicas_that_test_while_others_send_to_them_leave_nobody_out(mode: str) -> None:
    with pair_of(mode, heartbeat=5.0) as pair:
        total = sum(map(share_of, pair))

        def train(side: Side) -> None:
            for _ in range(40):
                side.push(1.0, rate=0.01)
                if side.number == 0:
                    with side.exchange.showing():
                        pass

        at_once([partial(train, side) for side in pair])
        drained(pair)
        assert [gossip(side).tally.dropped for side in pair] == [0, 0]
        assert sum(map(share_of, pair)) == pytest.approx(total)


def test_a_peer_frozen_in_the_middle_of_a_push_blocks_neither_pushes_nor_tests() -> None:
    with pair_of() as pair:
        door = gossip(pair[0])._peers._door
        assert door is not None
        half_sent = connect(door.address, door.token, {}, name="a replica that freezes")
        half_sent._socket.sendall(frame_of_a_push(pair[0])[:-8])
        for number in range(3):
            pair[1].push(1.0 + number)
            drained(pair)
            pair[0].exchange.settle()
        assert gossip(pair[1]).tally.dropped == 0
        assert sum(map(share_of, pair)) == pytest.approx(1.0)
        half_sent.close()


@pytest.mark.parametrize("answers", [True, False])
def test_a_second_meeting_is_not_missed_unless_the_last_message_takes_long(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On crowded cores replicas that never waited met too rarely to learn; on a slow link they wait once a message."""
    release, waits = threading.Event(), []
    with pair_of("pair", heartbeat=20.0) as pair:
        seen, outbox = slow_to_answer(monkeypatch, pair[1], release), gossip(pair[0])._outbox
        wait = outbox.wait

        def wait_until_it_answers(seconds: float) -> None:
            waits.append(seconds)
            if answers:
                release.set()
                wait(20)

        monkeypatch.setattr(outbox, "wait", wait_until_it_answers)
        for _ in range(MISSED_AT_MOST + 2):
            pair[0].push(1.0)
        assert waits == [PATIENCE_SECONDS]
        assert gossip(pair[0]).tally.updates == (2 if answers else 1)
        if not answers:
            pair[0].push(1.0)
            pair[0].push(1.0)
            assert waits == [PATIENCE_SECONDS]
        release.set()
        monkeypatch.setattr(outbox, "wait", wait)
        drained(pair)
        assert seen


def frame_of_a_push(side: Side) -> bytes:
    """What travels when weights of these sizes are pushed."""
    weights = [torch.zeros_like(weight) for weight in gossip(side).replica.weights]
    with socket.create_server(("127.0.0.1", 0)) as door:
        link = Link(socket.create_connection(door.getsockname()), "a recorder")
        theirs, _ = door.accept()
    link.send({"op": "push", "share": 0.25, "compressed": False}, weights)
    link.close()
    with theirs, theirs.makefile("rb") as frame:
        return frame.read()
