"""Codecs and error feedback: sizes known before, errors within bounds, nothing lost, nothing hidden."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.errors import ConfigError
from shoal.exchanges import parse_exchange
from shoal.exchanging.compression import Codec, HookState, Residual, make_codec
from shoal.exchanging.compression.averaging import bucket_sizes
from shoal.exchanging.compression.codecs import (
    BLOCK,
    CodecName,
    packed,
    packed_by_torch,
    unpacked,
    unpacked_by_torch,
)
from shoal.exchanging.compression.hook import FlatBucket, mean_bytes
from tests.unit import by_hand

pytestmark = pytest.mark.usefixtures("one_thread")

few = settings(max_examples=40, derandomize=True)
NAMES: tuple[CodecName, ...] = get_args(CodecName)
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
codecs = st.builds(make_codec, st.sampled_from(NAMES), st.sampled_from([0.001, 0.01, 0.3, 0.34, 1.0]))
sizes = st.sampled_from([0, 1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 1023, 1024, 1025, 5003])
scales = st.sampled_from([1e-4, 1.0, 300.0])
seeds = st.integers(0, 99)


def normal(size: int, seed: int, kind: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(kind)


def there_and_back(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), values.numel(), values.dtype)


@few
@given(codecs, sizes, st.sampled_from(KINDS), seeds, scales, st.booleans())
def test_sizes_are_known_before_and_tensors_come_back(
    codec: Codec, size: int, kind: torch.dtype, seed: int, scale: float, zeros: bool
) -> None:
    values = normal(size, seed, kind, scale)
    if zeros:
        values[::2] = 0
    before = values.clone()
    payload = codec.encode(values)
    assert payload.dtype == torch.uint8
    assert payload.numel() == codec.nbytes(size, kind)
    found = codec.decode(payload, size, kind)
    assert (found.dtype, found.shape) == (kind, values.shape)
    assert torch.equal(values, before)
    assert torch.equal(payload, codec.encode(values)), "the same values, the same bytes"
    # wherever it lies in a larger message
    message = torch.cat([torch.zeros(3, dtype=torch.uint8), payload])
    assert torch.equal(codec.decode(message[3:], size, kind), found)


@few
@given(st.sampled_from(NAMES), sizes, seeds, scales)
def test_what_arrives_is_what_is_computed_by_hand(name: CodecName, size: int, seed: int, scale: float) -> None:
    values = normal(size, seed, torch.float64, scale)
    expected = torch.from_numpy(by_hand.sent(name, values.numpy(), density=0.05))
    torch.testing.assert_close(there_and_back(make_codec(name, 0.05), values), expected, rtol=1e-12, atol=0)


@few
@given(sizes, st.sampled_from(KINDS), seeds, scales)
def test_errors_are_within_their_bounds(size: int, kind: torch.dtype, seed: int, scale: float) -> None:
    values = normal(size, seed, kind, scale)
    rounding = torch.finfo(kind).eps
    for name in NAMES:
        error = (there_and_back(make_codec(name), values).double() - values.double()).abs()
        for start in range(0, size, BLOCK):
            block, off = values[start : start + BLOCK].double().abs(), error[start : start + BLOCK]
            match name:
                case "bf16":
                    assert (off <= 2**-8 * block + 1e-40).all()
                case "int8":
                    assert off.max() <= block.max() * (1 / 254 + 2 * rounding)
                case "topk":
                    assert (off <= block).all()
                case "sign":
                    assert off.norm() <= block.norm() * (1 + 4 * rounding)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [5, 3000])
def test_zeros_stay_zeros(name: CodecName, size: int) -> None:
    assert not there_and_back(make_codec(name), torch.zeros(size)).any()


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_and_the_largest_numbers_make_no_trouble(name: CodecName) -> None:
    smallest = torch.tensor([1e-45, -3e-44, 2e-43] * 700)
    assert there_and_back(make_codec(name), smallest).abs().max() <= 2.1e-43
    largest = torch.tensor([3e38, -3e38] * 700)
    assert there_and_back(make_codec(name), largest).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_told_and_does_not_stay(name: CodecName, wrong: float, kind: torch.dtype) -> None:
    """By the element itself, or by all of its block; other blocks are as ever, and so is the next message."""
    codec = make_codec(name)
    values = normal(4 * BLOCK, 1, kind)
    values[BLOCK + 3] = wrong
    residual = Residual(codec, [values])
    found = codec.decode(residual.take([values]), values.numel(), kind)
    assert not found[BLOCK + 3].isfinite()
    elsewhere = torch.cat([found[:BLOCK], found[2 * BLOCK :]])
    assert elsewhere.isfinite().all()
    assert all(left.isfinite().all() for left in residual.state())
    again = codec.decode(residual.take([normal(4 * BLOCK, 2, kind)]), values.numel(), kind)
    assert again.isfinite().all()


@few
@given(codecs, st.lists(sizes, min_size=1, max_size=3), seeds, st.sampled_from(KINDS[:3]))
def test_residual_and_sent_are_input(codec: Codec, sizes: list[int], seed: int, kind: torch.dtype) -> None:
    like = [torch.empty(size, dtype=kind) for size in sizes]
    residual = Residual(codec, like)
    for step in range(3):
        values = [normal(size, seed + 100 * step + number, kind) for number, size in enumerate(sizes)]
        before = [left.clone() for left in residual.state()]
        expected = torch.cat([left + new for left, new in zip(before, values, strict=True)])
        arrived = codec.decode(residual.take(values), sum(sizes), kind)
        kept = torch.cat(residual.state())
        if codec.name == "topk":
            assert torch.equal(kept + arrived, expected)
        rounding = 4 * torch.finfo(kind).eps * float(expected.abs().max() if expected.numel() else 0)
        torch.testing.assert_close(kept + arrived, expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("name", NAMES)
def test_in_the_long_run_all_is_sent(name: CodecName) -> None:
    """Of one gradient over and over the mean of what arrives comes to it as 1 / steps; without feedback it does not."""
    gradient = normal(2 * BLOCK + 100, 5)
    codec = make_codec(name, density=0.05)
    off = {}
    for feedback in (True, False):
        residual = Residual(codec, [gradient], feedback=feedback)
        total = torch.zeros_like(gradient)
        for _ in range(200):
            total += codec.decode(residual.take([gradient]), gradient.numel(), gradient.dtype)
        off[feedback] = float((total / 200 - gradient).norm() / gradient.norm())
    assert off[True] < 0.2
    assert off[True] < 0.35 * off[False]


@pytest.mark.parametrize("name", NAMES)
def test_a_residual_goes_on_from_its_state(name: CodecName) -> None:
    like = [torch.empty(700), torch.empty(900)]
    one, other = Residual(make_codec(name), like), Residual(make_codec(name), like)
    one.take([normal(700, 1), normal(900, 2)])
    other.load_state([left.clone() for left in one.state()])
    more = [normal(700, 3), normal(900, 4)]
    assert torch.equal(one.take(more), other.take(more))
    with pytest.raises(ValueError, match="other sizes"):
        one.load_state([torch.empty(900), torch.empty(700)])


def test_feedback_follows_parameters_into_other_buckets() -> None:
    """DDP lays its buckets out anew after the first backward."""

    class Bucket(FlatBucket):
        def __init__(self, number: int, members: list[Tensor]) -> None:
            super().__init__(number, torch.empty(sum(one.numel() for one in members)))
            object.__setattr__(self, "members", members)

        def parameters(self) -> list[Tensor]:
            return self.members  # type: ignore[attr-defined, no-any-return]

    first, second, third = (torch.empty(2, 3), torch.empty(4), torch.empty(5))
    state = HookState("sign")
    old = [Bucket(0, [first, second]), Bucket(1, [third])]
    for bucket in old:
        state.residual(bucket).take([normal(one.numel(), one.numel()) for one in bucket.parameters()])  # type: ignore[arg-type]
    left = [one.clone() for one in state.state([first, second, third])]
    assert all(one.any() for one in left)
    for bucket in (Bucket(0, [third, first]), Bucket(1, [second])):
        state.residual(bucket)  # type: ignore[arg-type]
    moved = state.state([first, second, third])
    assert all(torch.equal(a, b) for a, b in zip(moved, left, strict=True))
    other = HookState("sign")
    other.load_state([first, second, third], left)
    assert torch.equal(torch.cat(other.residual(old[0]).state()), torch.cat(left[:2]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sizes differ"):
        other.load_state([first], [torch.empty(5)])


@few
@given(st.lists(st.booleans(), max_size=40))
def test_bits_are_packed_alike_on_every_device(bits: list[bool]) -> None:
    given = torch.tensor(bits, dtype=torch.bool)
    packs = packed(given)
    assert torch.equal(packs, packed_by_torch(given))
    for found in (unpacked(packs, len(bits)), unpacked_by_torch(packs, len(bits))):
        assert found.tolist() == bits
    assert packs.tolist() == np.packbits(np.array(bits, dtype=bool), bitorder="little").tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_of_another_size_is_refused(name: CodecName) -> None:
    codec = make_codec(name)
    payload = codec.encode(normal(3000, 1))
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]]), payload[:0], payload.view(torch.int8)):
        with pytest.raises(ValueError, match="bytes, where"):
            codec.decode(wrong, 3000, torch.float32)


@pytest.mark.parametrize("place", [-1, 3000])
def test_places_outside_of_the_tensor_are_refused(place: int) -> None:
    codec = make_codec("topk")
    payload = codec.encode(normal(3000, 1))
    payload[-4:] = torch.tensor([place], dtype=torch.int32).view(torch.uint8)
    with pytest.raises(ValueError, match="places from"):
        codec.decode(payload, 3000, torch.float32)


def test_what_cannot_be_compressed_is_refused() -> None:
    with pytest.raises(ValueError, match="not flat floats"):
        make_codec("int8").encode(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="not flat floats"):
        make_codec("int8").encode(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="no compression 'zip'"):
        make_codec("zip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="several types"):
        Residual(make_codec("int8"), [torch.zeros(1), torch.zeros(1, dtype=torch.float64)])


@given(st.integers(0, 10**6), st.sampled_from([2, 4, 8]), st.sampled_from([1, 4096, 1 << 20]))
def test_buckets_are_cut_between_blocks(elements: int, itemsize: int, limit: int) -> None:
    found = bucket_sizes(elements, itemsize, limit)
    assert sum(found) == elements
    assert all(size % BLOCK == 0 for size in found[:-1])
    int8 = make_codec("int8")
    assert sum(int8.nbytes(size, torch.float32) for size in found) == int8.nbytes(elements, torch.float32)


def test_predicted_bytes_are_those_of_the_payloads() -> None:
    """A million float32: of a mean over four replicas, and of a push with the weights that come back."""
    weights, blocks = 4_000_000, 1954
    expected = {
        "none": (6_000_000, 8_000_000),
        "bf16": (3_000_000, 6_000_000),
        "int8": (3 * (1_000_000 + 4 * blocks), 5_000_000 + 4 * blocks),
        "sign": (3 * (125_000 + 4 * blocks), 4_125_000 + 4 * blocks),
        "topk": (3 * 80_000, 4_080_000),
    }
    for name, (mean, push) in expected.items():
        found = [
            parse_exchange(exchange, {"compress": name}).bytes_per_step(weights, 4, in_memory=False)
            for exchange in ("allreduce", "sync", "downpour")
        ]
        assert found == [mean, push, push], name
        local = parse_exchange("local", {"compress": name, "period": 4})
        assert local.bytes_per_step(weights, 4, in_memory=False) == round(push / 4)
    assert mean_bytes(make_codec("sign"), 0, torch.float32, 4, 0) == 0


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("allreduce", {"compress": "zip"}, "compress = 'zip' does not work"),
        ("sync", {"compress": "topk", "density": 0.0}, "density = 0.0 does not work"),
        ("allreduce", {"density": 0.1}, "density = 0.1 is of compress=topk"),
        ("downpour", {"compress": "int8", "servers": "direct"}, "in shared memory nothing is sent"),
        ("local", {"compress": "int8", "average": "once"}, "compress = 'int8' with average = 'once'"),
        ("gossip", {"compress": "topk", "mode": "push"}, "compress = 'topk' with mode = 'push' would leave out most"),
        ("gossip", {"compress": "sign", "mode": "push"}, "compress = 'sign' with mode = 'push'"),
        ("gossip", {"compress": "bf16", "density": 0.1}, "density = 0.1 is of compress=topk"),
        ("backup", {"compress": "int8"}, "no option 'compress'"),
        ("dasgd", {"compress": "int8"}, "no option 'compress'"),
    ],
)
def test_options_that_cannot_be_are_refused(name: str, options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_exchange(name, options)


@pytest.mark.parametrize(
    ("name", "options", "slots"),
    [
        ("allreduce", {}, False),
        ("allreduce", {"compress": "int8"}, True),
        ("sync", {"compress": "sign"}, True),
        ("downpour", {}, False),
        ("downpour", {"compress": "bf16"}, True),
        ("local", {}, True),
        ("dasgd", {}, True),
        ("dasgd", {"residual": False, "momentum_at": "server"}, False),
    ],
)
def test_checkpoints_have_slots_where_something_is_kept_back(
    name: str, options: dict[str, object], slots: bool
) -> None:
    assert parse_exchange(name, options).hands_in == slots


def test_what_is_to_be_compressed_is_sent_also_on_one_host() -> None:
    plain, compressed = (parse_exchange("downpour", {"compress": one}) for one in ("none", "int8"))
    assert plain.holding(2, one_host=True, weight_bytes=100).place == "direct"
    assert compressed.holding(2, one_host=True, weight_bytes=100) == ("processes", 1)
