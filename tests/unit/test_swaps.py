"""Compressed meetings of two replicas: what one gains the other loses, whatever arrives, is lost, or comes too late."""

import math
from dataclasses import dataclass, field
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.exchanging.compression import make_codec
from shoal.exchanging.compression.codecs import CodecName
from shoal.exchanging.compression.packing import Packer
from shoal.exchanging.compression.swaps import Refusal, Said, Swaps

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES: tuple[CodecName, ...] = get_args(CodecName)
SIZES, KINDS = [1100, 7, 5], [torch.float64, torch.float64, torch.float32]


def drawn(seed: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=draws).to(kind) for size, kind in zip(SIZES, KINDS, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_packed_and_come_back_in_their_order(name: CodecName) -> None:
    packer, tensors = Packer(make_codec(name, 0.05), SIZES, KINDS), drawn(1)
    flats = packer.flats(tensors)
    assert all(torch.equal(*pair) for pair in zip(packer.tensors(flats), tensors, strict=True))
    for whole in (True, False):
        buffers = packer.packed(flats, whole=whole)
        assert [buffer.shape for buffer in buffers] == [buffer.shape for buffer in packer.empty(whole=whole)]
        found = packer.tensors(packer.unpacked(buffers, whole=whole))
        assert [(one.dtype, one.shape) for one in found] == [(one.dtype, one.shape) for one in tensors]
        assert not whole or all(torch.equal(*pair) for pair in zip(found, tensors, strict=True))
        with pytest.raises(ValueError, match="buffers, where 2 belong"):
            packer.unpacked(buffers[:1], whole=whole)
        with pytest.raises(ValueError, match="bytes, where"):
            packer.unpacked([buffer[1:] for buffer in buffers], whole=whole)


@dataclass
class Message:
    """A question on its way from one end to another, or its answer on its way back."""

    asker: int
    other: int
    said: Said | Refusal
    is_answer: bool = False
    given_up: bool = False
    """Whether nobody waits for the answer any more: the question may still arrive, perhaps after later ones."""


@dataclass
class World:
    """Ends that meet in pairs, and what is on its way between them. An end asks one question at a time."""

    codec: CodecName
    ends: int = 3
    weights: list[list[Tensor]] = field(default_factory=list)
    under_way: list[Message] = field(default_factory=list)
    asking: dict[int, Message] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        packer = Packer(make_codec(self.codec, 0.05), SIZES, KINDS)
        self.weights = [packer.flats(drawn(end)) for end in range(self.ends)]
        self.pairs = {(a, b): Swaps(packer, a, b) for a in range(self.ends) for b in range(self.ends) if a != b}

    def add(self, end: int, change: list[Tensor]) -> None:
        if change:
            self.weights[end] = [weight + more for weight, more in zip(self.weights[end], change, strict=True)]

    def ask(self, asker: int, other: int) -> None:
        if asker not in self.asking and not {asker, other} & self.dead:
            self.asking[asker] = Message(asker, other, self.pairs[asker, other].ask(self.weights[asker]))
            self.under_way.append(self.asking[asker])

    def deliver(self, which: int) -> None:
        message = self.under_way.pop(which)
        asker, other = message.asker, message.other
        if message.is_answer:
            if not message.given_up:
                del self.asking[asker]
                self.add(asker, self.pairs[asker, other].hear(message.said))
        elif other not in self.dead:
            assert isinstance(message.said, Said)
            answer, change = self.pairs[other, asker].answer(message.said, self.weights[other])
            self.add(other, change)
            self.under_way.append(Message(asker, other, answer, is_answer=True, given_up=message.given_up))
            if not message.given_up:
                self.asking[asker] = self.under_way[-1]

    def give_up(self, asker: int) -> None:
        """The answer to what it asked is lost, wherever it is."""
        if asker in self.asking:
            message = self.asking.pop(asker)
            message.given_up = True
            self.pairs[asker, message.other].lose()

    def die(self, end: int) -> None:
        self.give_up(end)
        self.dead.add(end)

    def settle(self) -> None:
        """All that is on its way arrives; then every pair that lives meets until both ends know the same."""
        self._deliver_all()
        for asker in list(self.asking):
            self.give_up(asker)
        for a in range(self.ends):
            for b in range(a):
                for _ in range(2):  # the first may be refused, for a whole message
                    self.ask(a, b)
                    self._deliver_all()

    def _deliver_all(self) -> None:
        while self.under_way:
            self.deliver(0)

    def total(self) -> float:
        return sum(map(sum_of, self.weights))

    def off_by_the_dead(self) -> float:
        """Changes of ends that answered one that did not hear of it before one of them died."""
        off = 0.0
        for (a, b), pair in self.pairs.items():
            other = self.pairs[b, a]
            if {a, b} & self.dead and pair._last not in (other._last, other._before):
                off -= sum_of(pair._taken_back())
        return off


def sum_of(flats: list[Tensor]) -> float:
    return sum(float(flat.double().sum()) for flat in flats)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from(NAMES), st.sampled_from(["all arrives", "losses", "deaths"]))
def test_the_sum_moves_by_gradients_alone(data: st.DataObject, name: CodecName, trouble: str) -> None:
    world = World(name)
    expected = world.total()
    kinds = ["ask", "ask", "deliver", "deliver", "deliver", "step"]
    kinds += {"all arrives": [], "losses": ["give up"], "deaths": ["give up", "die"]}[trouble]
    for _ in range(data.draw(st.integers(1, 40))):
        end = data.draw(st.integers(0, 2))
        match data.draw(st.sampled_from(kinds)):
            case "ask":
                world.ask(end, (end + data.draw(st.integers(1, 2))) % 3)
            case "deliver" if world.under_way:
                world.deliver(data.draw(st.integers(0, len(world.under_way) - 1)))
            case "give up":
                world.give_up(end)
            case "die":
                world.die(end)
            case "step":
                gradient = [torch.full_like(flat, 0.25) for flat in world.weights[end]]
                world.add(end, gradient)
                expected += sum_of(gradient)
        if trouble == "all arrives" and not world.under_way:
            assert world.total() == pytest.approx(expected, abs=1e-3)
    world.settle()
    assert world.total() == pytest.approx(expected + world.off_by_the_dead(), abs=1e-3)
    for (a, b), pair in world.pairs.items():
        if not {a, b} & world.dead:
            other = world.pairs[b, a]
            assert pair._last == other._last
            assert pair._middle is not None
            assert other._middle is not None
            assert all(torch.equal(*flats) for flats in zip(pair._middle, other._middle, strict=True)), "to the bit"


@pytest.mark.parametrize("name", NAMES)
def test_ends_come_together_without_a_step_size(name: CodecName) -> None:
    """Though only a part is told at a time; what is told is used once, so nothing overshoots."""
    world = World(name, ends=4)

    def apart() -> float:
        mean = [torch.stack(flats).mean(0) for flats in zip(*world.weights, strict=True)]
        ways = (flat - middle for flats in world.weights for flat, middle in zip(flats, mean, strict=True))
        return math.sqrt(sum(float(way.square().sum()) for way in ways))

    begun = apart()
    for turn in range(240):
        a = turn % 4
        world.ask(a, (a + 1 + turn // 4 % 3) % 4)
        world._deliver_all()
    assert apart() < 0.02 * begun


def test_a_message_that_cannot_be_changes_nothing() -> None:
    world = World("int8", ends=2)
    asked = world.pairs[0, 1].ask(world.weights[0])
    short = Said("0.1", 1, "", "", True, [buffer[8:] for buffer in asked.buffers])
    for wrong in (short, Said("0.1", 1, "", "", True, asked.buffers[:1])):
        with pytest.raises(ValueError, match="where"):
            world.pairs[1, 0].answer(wrong, world.weights[1])
    answer, _ = world.pairs[1, 0].answer(asked, world.weights[1])
    assert isinstance(answer, Said)
    with pytest.raises(ValueError, match=r"an answer to '7.1', where '0.1' was asked"):
        world.pairs[0, 1].hear(Said("7.1", 1, "", "", True, answer.buffers))
    assert world.pairs[0, 1].hear(answer)
