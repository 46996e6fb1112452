"""Compression between real ranks, replicas and servers: the same bits everywhere, the bytes that were predicted."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from shoal.exchanges import parse_exchange
from shoal.exchanging.compression import make_codec
from shoal.exchanging.compression.codecs import CodecName
from shoal.exchanging.downpour import Downpour
from shoal.exchanging.servers.server import RemoteShard
from tests.exchanging import compressed
from tests.exchanging.together import Side, at_once, batch, meeting, network, sgd
from tests.parity.pool import Pool
from tests.unit import by_hand

pytestmark = pytest.mark.timeout(150)

NAMES: tuple[CodecName, ...] = get_args(CodecName)
ELEMENTS = sum(parameter.numel() for parameter in network().parameters())


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", NAMES)
def test_ddp_with_the_hook_is_what_is_computed_by_hand(pool: Pool, name: CodecName) -> None:
    """Bucket by bucket as DDP laid them out: gradients and what was left, compressed, and the mean of that."""
    ranks = pool.run(compressed.trained, name)
    (buckets, weights, _), (other_buckets, other_weights, _) = ranks
    assert buckets == other_buckets
    assert buckets[0] != buckets[-1], "DDP laid its buckets out anew, which feedback must follow"
    assert all(torch.equal(weights[key], other_weights[key]) for key in weights)
    model = compressed.network()
    left: list[dict[str, NDArray[np.float64]]] = [
        {key: np.zeros(parameter.numel()) for key, parameter in model.named_parameters()} for _ in ranks
    ]
    for step, layout in enumerate(buckets):
        given = []
        for rank in range(2):
            model.zero_grad()
            x, y = compressed.batch(step, rank)
            torch.autograd.backward(F.cross_entropy(model(x), y))
            gradients = {key: parameter.grad.view(-1).numpy().copy() for key, parameter in model.named_parameters()}  # type: ignore[union-attr]
            given.append({key: gradients[key] + left[rank][key] for key in gradients})
        for keys in layout:
            flat = [np.concatenate([values[key] for key in keys]) for values in given]
            mean = by_hand.mean(name, flat, compressed.DENSITY)
            start = 0
            for key in keys:
                stop = start + model.get_parameter(key).numel()
                for rank in range(2):
                    unsent = flat[rank] - by_hand.sent(name, flat[rank], compressed.DENSITY)
                    left[rank][key] = unsent[start:stop]
                change = torch.from_numpy(mean[start:stop]).view_as(model.get_parameter(key))
                with torch.no_grad():
                    model.get_parameter(key).sub_(compressed.RATE * change)
                start = stop
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(weights[key], parameter.detach(), rtol=1e-9, atol=1e-12)
        for rank in range(2):
            expected = torch.from_numpy(left[rank][key])
            torch.testing.assert_close(ranks[rank][2][key], expected, rtol=1e-9, atol=1e-12)
    assert any(residual.any() for residual in left[0].values()), "nothing was left: feedback was not tested"


def test_bf16_without_feedback_is_torchs_own_hook(pool: Pool) -> None:
    for ours, torchs in pool.run(compressed.as_torch_does):
        assert torch.equal(ours, torchs)


def test_a_hook_keeps_to_its_group(pool: Pool) -> None:
    assert pool.run(compressed.in_half_the_world) == [0.0, 0.0]


def test_sparse_layouts_are_refused(pool: Pool) -> None:
    assert all("sparse layout" in said for said in pool.run(compressed.with_an_error))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_replicas_are_equal_to_the_bit_and_send_what_was_predicted(
    name: CodecName, replicas: int, kind: torch.dtype
) -> None:
    options: dict[str, Any] = {"compress": name, "bucket_bytes": 5000}
    predicted = parse_exchange("allreduce", options).bytes_per_step(4 * ELEMENTS, replicas, in_memory=False)
    assert predicted is not None
    steps = 4
    with meeting("allreduce", replicas, **options) as (side, _):

        def train(number: int) -> tuple[torch.Tensor, Side]:
            replica = side(number, kind=kind)
            for step in range(steps):
                assert replica.step(*batch(replicas * step + number, kind=kind))
            return replica.weights(), replica

        trained = at_once([partial(train, number) for number in range(replicas)])
        assert all(torch.equal(weights, trained[0][0]) for weights, _ in trained)
        assert not torch.equal(trained[0][0], side_by_side(replicas, steps, kind)), "nothing was lost"
        torch.testing.assert_close(trained[0][0], side_by_side(replicas, steps, kind), rtol=1, atol=0.2)
        tallies = [replica.exchange.tally for _, replica in trained]
        if kind == torch.float32:
            assert sum(tally.sent_bytes for tally in tallies) == pytest.approx(
                predicted * replicas * steps, abs=replicas
            )
        assert sum(tally.sent_bytes for tally in tallies) == sum(tally.received_bytes for tally in tallies)


def side_by_side(replicas: int, steps: int, kind: torch.dtype) -> torch.Tensor:
    """One replica with the whole batch."""
    model = network(kind)
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        parts = [batch(replicas * step + number, kind=kind) for number in range(replicas)]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


IN_STEP: list[tuple[str, int, dict[str, Any]]] = [
    ("allreduce", 0, {"bucket_bytes": 5000}),
    ("sync", 2, {}),
]
ALONE: list[tuple[str, int, dict[str, Any]]] = [
    ("downpour", 2, {"compress": "sign"}),
    ("downpour", 1, {"compress": "topk", "n_sync": 3}),
    ("downpour", 1, {"compress": "int8", "n_sync": 3, "rule": "sgd"}),
    ("dasgd", 2, {"density": 0.05}),
    ("dasgd", 0, {"density": 0.05, "n_sync": 1}),
    ("dasgd", 1, {"density": 0.05, "n_sync": 1, "momentum_at": "server", "sparse": "topk"}),
]


@pytest.mark.parametrize(
    ("name", "replicas", "servers", "options"),
    [(name, 2, servers, {"compress": "sign", **options}) for name, servers, options in IN_STEP]
    + [(name, 1, servers, options) for name, servers, options in ALONE],
)
def test_what_was_not_sent_is_saved_and_goes_on_to_the_bit(
    name: str, replicas: int, servers: int, options: dict[str, Any]
) -> None:
    """Replicas that load weights, momentum and what was kept back do the steps of others; without the last not."""
    saved: dict[int, Any] = {}

    def steps(replica: Side, numbers: range) -> None:
        for step in numbers:
            replica.step(*batch(replicas * step + replica.number))

    def train(side: Callable[..., Side], number: int) -> torch.Tensor:
        replica = side(number)
        steps(replica, range(9))
        saved[number] = saved_of(replica)
        return after(replica)

    def after(replica: Side) -> torch.Tensor:
        steps(replica, range(9, 15))
        replica.exchange.settle()
        return replica.weights()

    def resume(side: Callable[..., Side], number: int, *, with_own: bool) -> torch.Tensor:
        common, own = saved[number]
        replica = side(number, loaded=common)
        replica.exchange.put_own_state(own if with_own else {})
        return after(replica)

    def all_of(work: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        with meeting(name, replicas, servers=servers, **options) as (side, _):
            return at_once([partial(work, side, number) for number in range(replicas)])

    expected = all_of(train)
    assert any(value.any() for _, own in saved.values() for key, value in own.items() if key.startswith("residual/"))
    assert torch.equal(all_of(partial(resume, with_own=True))[0], expected[0])
    assert not torch.equal(all_of(partial(resume, with_own=False))[0], expected[0])


def saved_of(replica: Side) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """As a checkpoint has it: what the replica hands in, then the common weights."""
    replica.exchange.flush()
    own = {key: value.clone() for key, value in replica.exchange.own_state().items()}
    with replica.exchange.showing():
        model = {key: value.clone() for key, value in replica.model.state_dict().items()}
        return {"model": model, "optimizer": _copied(replica.optimizer)}, own


def test_what_was_kept_back_fits_other_servers_and_no_other_network() -> None:
    with meeting("downpour", 1, servers=3, compress="sign") as (side, _):
        replica = side(0)
        replica.step(*batch(0))
        own = {key: value.clone() for key, value in replica.exchange.own_state().items()}
        assert set(own) == {f"residual/{name}" for name, _ in replica.model.named_parameters()}
    with meeting("downpour", 1, servers=1, compress="int8") as (side, _):
        replica = side(0)
        replica.exchange.put_own_state(own)
        assert all(torch.equal(value, own[key]) for key, value in replica.exchange.own_state().items())
        shorter = {key: value[1:] for key, value in own.items()}
        with pytest.raises(ValueError, match="is not of 63 elements"):
            replica.exchange.put_own_state(shorter)
        with pytest.raises(ValueError, match="was not sent yet of"):
            replica.exchange.put_own_state(dict(list(own.items())[:1]))
    with meeting("downpour", 1, servers=1) as (side, _):
        plain = side(0)
        plain.exchange.put_own_state(own)
        assert not plain.exchange.own_state(), "who keeps nothing back forgets what was kept"


def _copied(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    kept = {
        key: {what: value.clone() for what, value in remembered.items()} for key, remembered in state["state"].items()
    }
    return {"state": kept, "param_groups": state["param_groups"]}


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_sync_is_equal_to_the_bit_and_servers_have_what_was_sent(name: CodecName, servers: int) -> None:
    with meeting("sync", 2, servers=servers, compress=name) as (side, _):

        def train(number: int) -> tuple[torch.Tensor, int]:
            replica = side(number)
            for step in range(4):
                assert replica.step(*batch(2 * step + number))
                sent = replica.exchange.take_tally().sent_bytes
            return replica.weights(), sent

        (first, sent), (second, also) = at_once([partial(train, number) for number in range(2)])
        assert torch.equal(first, second)
        torch.testing.assert_close(first, side_by_side(2, 4, torch.float32), rtol=1, atol=0.2)
        assert sent == also
        codec = make_codec(name)
        if servers == 1:
            assert sent == codec.nbytes(ELEMENTS, torch.float32)
        assert sent <= codec.nbytes(ELEMENTS, torch.float32) + (servers - 1) * 4 * 1024


@pytest.mark.parametrize("options", [{}, {"n_sync": 2}, {"n_sync": 2, "rule": "sgd"}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_downpour_pushes_and_what_is_left_is_all(name: CodecName, options: dict[str, Any]) -> None:
    """Weights at the servers, and what the replica has not sent, are where plain pushes would have taken them."""
    with meeting("downpour", 1, servers=2, compress=name, **options) as (side, _):
        replica = side(0, kind=torch.float64, momentum=0.0, weight_decay=0.0)
        begun = replica.weights()
        total = torch.zeros_like(begun)
        for step in range(6):
            draws = torch.Generator().manual_seed(step)
            for parameter in replica.model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
            total += torch.cat([parameter.grad.view(-1) for parameter in replica.model.parameters()])  # type: ignore[union-attr]
            replica.exchange.step(1.0)
        sent = replica.exchange.take_tally().sent_bytes
        replica.exchange.settle()
        exchange = replica.exchange
        assert isinstance(exchange, Downpour)
        left: dict[str, list[torch.Tensor]] = {}
        for slices, shard in zip(exchange._slices, exchange._shards, strict=True):
            assert isinstance(shard, RemoteShard)
            for part, kept in zip(slices, shard.residuals[0].state(), strict=True):
                left.setdefault(part.name, []).append(kept)
        unsent = torch.cat([torch.cat(left[key]) for key, _ in replica.model.named_parameters()])
        assert unsent.any()
        adds = options.get("n_sync", 1) > 1 and "rule" not in options
        torch.testing.assert_close(replica.weights() + (unsent if adds else -unsent), begun - total)
        first, pushes = 8 * ELEMENTS, 6 // options.get("n_sync", 1)
        assert sent - first <= pushes * (make_codec(name).nbytes(ELEMENTS, torch.float64) + 8 * 1024)
        if name != "topk":  # of so little most is sent whole
            assert sent - first < pushes * first / 3


def test_one_shard_counts_the_bytes_of_a_push() -> None:
    for name in NAMES:
        with meeting("downpour", 1, servers=1, compress=name) as (side, _):
            replica = side(0)
            replica.push(1.0)
            replica.exchange.take_tally()
            replica.push(1.0)
            tally = replica.exchange.take_tally()
            predicted = parse_exchange("downpour", {"compress": name}).bytes_per_step(4 * ELEMENTS, 1, in_memory=False)
            assert tally.sent_bytes + tally.received_bytes == predicted


def test_a_gradient_that_is_not_finite_reaches_the_servers() -> None:
    for name in NAMES:
        with meeting("downpour", 1, servers=1, compress=name) as (side, _):
            replica = side(0)
            replica.push(float("nan"))
            assert not replica.weights().isfinite().all(), name


LEARN: list[tuple[str, int, dict[str, Any]]] = [
    ("allreduce", 0, {}),
    ("sync", 1, {}),
    ("downpour", 1, {}),
    ("local", 1, {"period": 3}),
    ("local", 1, {"period": 3, "outer_lr": 0.7, "outer_momentum": 0.5}),
    ("gossip", 0, {"period": 1, "mode": "pair"}),
    ("gossip", 0, {"period": 4, "mode": "push"}),
]


@pytest.mark.parametrize(
    ("exchange", "servers", "more", "name"),
    [(*one, name) for one in LEARN for name in NAMES if one[2].get("mode") != "push" or name in ("bf16", "int8")],
)
def test_compressed_training_learns(exchange: str, servers: int, more: dict[str, Any], name: CodecName) -> None:
    """Eight batches are learnt by heart, at a rate at which plain steps do so too."""
    options: dict[str, Any] = {"compress": name, **more, **({"density": 0.05} if name == "topk" else {})}
    with meeting(exchange, 2, servers=servers, **options) as (side, _):
        both = threading.Barrier(2, timeout=60)

        def train(number: int) -> tuple[float, float]:
            replica = side(number, momentum=0.0, weight_decay=0.0)
            before = loss(replica)
            for step in range(150):
                if exchange == "gossip":  # a replica that is ahead gives all of its share away
                    both.wait()
                replica.step(*batch(4 * number + step % 4), rate=0.1)
            both.wait()
            replica.exchange.settle()
            return before, loss(replica)

        for before, after in at_once([partial(train, number) for number in range(2)]):
            assert after < 0.4 * before


@pytest.mark.parametrize("outer", [{}, {"outer_lr": 0.7, "outer_momentum": 0.9}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_local_sgd_sends_and_what_is_left_is_all(name: CodecName, outer: dict[str, Any]) -> None:
    """Common weights are where the mean of what was sent takes them, by torch's own outer optimizer."""
    with meeting("local", 2, servers=2, compress=name, period=2, **outer) as (side, _):
        begun = network(torch.float64)
        expected = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in begun.parameters()]))
        momentum = outer.get("outer_momentum", 0.0)
        nesterov = torch.optim.SGD(
            [expected], lr=outer.get("outer_lr", 1.0), momentum=momentum, nesterov=bool(momentum)
        )

        def train(number: int) -> list[Any]:
            replica = side(number, kind=torch.float64, momentum=0.0, weight_decay=0.0)
            told, left = [], torch.zeros_like(expected)
            for period in range(3):
                before = replica.weights()
                own = before.clone()
                for step in range(2):
                    draws = torch.Generator().manual_seed(100 * period + 10 * step + number)
                    for parameter in replica.model.parameters():
                        parameter.grad = torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
                    own -= 0.1 * torch.cat([p.grad.view(-1) for p in replica.model.parameters()])  # type: ignore[union-attr]
                    counted = replica.exchange.step(0.1)
                assert counted
                kept = replica.exchange.own_state()
                now = torch.cat([kept[f"residual/{key}"] for key, _ in replica.model.named_parameters()])
                told.append((own - before + left - now, replica.weights()))
                left = now
            return told

        first, second = at_once([partial(train, number) for number in range(2)])
        for (sent, weights), (also_sent, also_weights) in zip(first, second, strict=True):
            assert torch.equal(weights, also_weights)
            expected.grad = -(sent + also_sent) / 2
            nesterov.step()
            torch.testing.assert_close(weights, expected.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_local_sgd_moves_the_bytes_that_were_predicted(name: CodecName) -> None:
    options: dict[str, Any] = {"compress": name, "period": 2}
    predicted = parse_exchange("local", options).bytes_per_step(4 * ELEMENTS, 1, in_memory=False)
    assert predicted is not None
    with meeting("local", 1, servers=1, **options) as (side, _):
        replica = side(0)
        for _ in range(2):
            replica.push(1.0)
        replica.exchange.take_tally()
        for _ in range(6):
            replica.push(1.0)
        tally = replica.exchange.take_tally()
        assert tally.sent_bytes + tally.received_bytes == pytest.approx(6 * predicted, abs=6)


@pytest.mark.parametrize(
    ("mode", "name"), [("push", "bf16"), ("push", "int8"), *(("pair", name) for name in NAMES)], ids=str
)
def test_gossip_sends_a_payload_for_every_message(mode: str, name: CodecName) -> None:
    """In pairs an answer as large as the question; the first two of a pair are whole."""
    payload, whole = make_codec(name).nbytes(ELEMENTS, torch.float32), 4 * ELEMENTS
    with meeting("gossip", 2, mode=mode, compress=name, period=1) as (side, _):
        first, second = side(0), side(1)
        begun = first.exchange.take_tally()
        while not first.exchange._peers.there():  # type: ignore[attr-defined]
            time.sleep(0.001)
        second.exchange.take_tally()
        for _ in range(4):
            first.push(1.0)
            first.exchange.flush()
        first.exchange._count_traffic()  # type: ignore[attr-defined]
        tally = first.exchange.take_tally()
        assert begun.updates == tally.dropped == 0
        firsts = 1 if mode == "pair" else 0
        assert tally.updates == 4
        assert tally.sent_bytes == firsts * whole + (4 - firsts) * payload
        assert tally.received_bytes == (tally.sent_bytes if mode == "pair" else 0)


def test_a_lost_push_comes_back_whole() -> None:
    """What the message would have left out, and what it had, are the weights again."""
    with meeting("gossip", 2, mode="push", compress="int8", period=1, heartbeat=1.0) as (side, _):
        first, second = (side(number, kind=torch.float64, momentum=0.0, weight_decay=0.0) for number in range(2))
        while not first.exchange._peers.there():  # type: ignore[attr-defined]
            time.sleep(0.001)
        first.push(1.0, rate=0.1)
        first.exchange.flush()
        begun = first.weights()
        second.exchange._peers._door.close()  # type: ignore[attr-defined]
        first.push(1.0, rate=0.1)
        first.exchange.flush()
        assert first.exchange.tally.dropped == 1
        assert (first.weights() - (begun - 0.1)).abs().max() > 1e-6, "nothing was left out"
        own, share = first.exchange.weights_now()  # type: ignore[attr-defined]
        torch.testing.assert_close(torch.cat(own), begun - 0.1, rtol=0, atol=1e-14)
        assert share == 0.25


def loss(side: Side) -> float:
    with torch.no_grad():
        losses = [F.cross_entropy(side.model(x), y) for x, y in map(batch, range(8))]
    return float(sum(losses)) / len(losses)
