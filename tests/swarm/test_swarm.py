"""Many replicas in simulated time beside closed forms; whatever travels is accounted for."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.exchanges import EXCHANGE_NAMES, Rates, parse_exchange
from shoal.exchanging.gossip import Gossip
from shoal.simulating.links import Agenda
from shoal.swarm import Churn, Outcome, Setting, simulate_swarm
from shoal.swarm.stage import Moment, Stage
from shoal.swarm.swarm import Swarm
from shoal.swarm.wire import Wire
from shoal.swarm.work import StandIn, Training

BETWEEN_HOSTS = [name for name in EXCHANGE_NAMES if name != "hogwild"]
MB = 1e6


def setting(**changes: Any) -> Setting:
    return Setting(**{"replicas": 4, "steps": 20, "step_seconds": 0.1, "bandwidth": 10 * MB, **changes})


def ran(name: str, options: dict[str, Any] | None = None, weights: float = MB, **changes: Any) -> Outcome:
    return simulate_swarm(parse_exchange(name, options or {}), setting(**changes), StandIn(weights))


def test_two_messages_halve_a_link_and_a_death_frees_it() -> None:
    agenda = Agenda()
    times: list[Any] = []
    wire = Wire(agenda, bandwidth=1.0, latency=0.0)
    wire.send("a", "c", 10, lambda: times.append(("a", agenda.now)))
    wire.send("b", "c", 10, lambda: times.append(("b", agenda.now)))
    agenda.run()
    assert times == [("a", pytest.approx(20)), ("b", pytest.approx(20))]
    times.clear()
    begun = agenda.now
    wire.send("a", "c", 10, lambda: times.append(("a", agenda.now - begun)))
    wire.send("b", "c", 10, lambda: times.append(("b", agenda.now - begun)), lambda: times.append(("lost", 0.0)))
    agenda.note(begun + 4, lambda _: wire.die("b"))
    agenda.run()
    assert times == [("lost", 0.0), ("a", pytest.approx(12))]  # 4 seconds at half of the link, then 8 alone
    assert wire.sent == wire.arrived + wire.lost == 40


def test_actors_take_turns_in_the_order_of_time() -> None:
    stage, said, moment = Stage(), [], Moment()

    def first() -> None:
        stage.sleep(2)
        said.append(("first", stage.now))
        moment.happen("word")

    def second() -> None:
        said.append((moment.wait(), stage.now))

    stage.enter(first)
    stage.enter(second)
    stage.run()
    assert said == [("first", 2), ("word", 2)]


def test_what_an_actor_raises_is_raised_and_nobody_is_left() -> None:
    stage = Stage()

    def wait_for_ever() -> None:
        Moment().wait()

    def fail() -> None:
        raise ValueError("mine")

    waiting = stage.enter(wait_for_ever)
    stage.enter(fail)
    with pytest.raises(ValueError, match="mine"):
        stage.run()
    assert not waiting.there


def test_servers_link_is_the_bottleneck() -> None:
    """Many fast replicas that only push do so as often as the link takes a push."""
    options = {"rule": "add", "n_push": 1, "n_fetch": 1000}
    outcome = ran("downpour", options, replicas=16, steps=60, step_seconds=1e-3, jitter=0.5)
    assert outcome.counted / outcome.seconds == pytest.approx(10.0, rel=0.05)  # 10 MB/s of 1 MB each
    assert outcome.busiest_link == pytest.approx(1.0, rel=0.05)


def test_staleness_is_everybody_elses_push() -> None:
    """Where all take equally long, each of the others pushes once between a fetch and the next push."""
    outcome = ran("downpour", replicas=16, steps=60)
    assert outcome.mean_staleness == pytest.approx(15, rel=0.05)


def test_more_servers_share_the_load() -> None:
    one, four = (ran("downpour", {"shards": n}, replicas=16, step_seconds=1e-3) for n in (1, 4))
    assert one.seconds / four.seconds == pytest.approx(4, rel=0.15)


def test_a_lone_round_takes_what_it_weighs() -> None:
    """One replica: a batch's number, a step, a push and a fetch, each after the other."""
    outcome = ran("local", {"period": 1}, replicas=1, steps=10, latency=0.05)
    once = 2 * 0.05 + 0.1 + 2 * 0.05 + (0.05 + 0.1) * 2  # number; step; ticket; weights there and back
    assert outcome.seconds == pytest.approx(10 * once + 0.2, rel=0.02)  # and the first weights


def test_ring_is_two_r_minus_one_over_r() -> None:
    outcome = ran("allreduce", replicas=4, steps=10)
    seconds = 0.1 + 2 * 3 / 4 * 0.1
    assert outcome.seconds == pytest.approx(10 * seconds, rel=0.01)
    assert outcome.bytes_per_step == pytest.approx(2 * 3 / 4 * MB, rel=0.01)


def test_synchronous_steps_last_as_long_as_the_slowest() -> None:
    """Of steps drawn from two values with equal chance, the longest of R is short only with chance 2^-R."""
    outcome = ran("allreduce", weights=8.0, replicas=3, steps=2000, draws=[(1.0, 2.0)])
    expected = 2 - 0.5**3
    assert outcome.seconds / 2000 == pytest.approx(expected, abs=4 * math.sqrt(0.5**3 * (1 - 0.5**3) / 2000))


@pytest.mark.parametrize("backups", [0, 1])
def test_backups_leave_out_a_straggler(backups: int) -> None:
    outcome = ran("backup", {"backups": backups}, weights=8.0, steps=200, slow={3: 0.1})
    once = outcome.seconds / (outcome.counted / (4 - backups))
    assert once == pytest.approx(0.1 if backups else 1.0, rel=0.1)


@pytest.mark.parametrize("name", BETWEEN_HOSTS)
def test_all_batches_count_and_every_byte_arrives(name: str) -> None:
    options = parse_exchange(name, {})
    swarm = Swarm(options, setting(jitter=0.3, latency=0.01), StandIn(MB), Rates(0.05, 0.9))
    outcome = swarm.run()
    assert outcome.ended is None
    assert outcome.counted == 80
    assert outcome.sent_bytes == outcome.arrived_bytes + swarm.wire.under_way
    assert outcome.lost_bytes == 0


@pytest.mark.parametrize("name", [name for name in BETWEEN_HOSTS if parse_exchange(name, {}).survives])
def test_deaths_and_joins(name: str) -> None:
    """All batches count whoever dies; bytes that did not arrive belonged to the dead."""
    churn = Churn(lifetime=8.0, away=2.0)
    changes = setting(replicas=6, steps=60, jitter=0.3, latency=0.02, churn=churn)
    swarm = Swarm(parse_exchange(name, {"heartbeat": 1.0}), changes, StandIn(MB), Rates(0.05, 0.9))
    outcome = swarm.run()
    assert outcome.deaths > 0
    assert outcome.joins > 0
    assert outcome.ended is None
    assert outcome.counted == 360
    assert outcome.sent_bytes == pytest.approx(outcome.arrived_bytes + outcome.lost_bytes + swarm.wire.under_way)


@pytest.mark.parametrize("name", ["allreduce", "sync"])
def test_a_death_ends_what_cannot_go_on(name: str) -> None:
    outcome = ran(name, {"heartbeat": 1.0}, steps=1000, churn=Churn(lifetime=5.0, away=1.0))
    assert outcome.ended is not None
    assert "was lost" in outcome.ended
    assert outcome.counted < 4000


@pytest.mark.parametrize("name", BETWEEN_HOSTS)
def test_same_seed_same_run(name: str) -> None:
    changes: dict[str, Any] = {"jitter": 0.3, "latency": 0.01, "churn": Churn(10.0, 2.0)}
    assert ran(name, **changes) == ran(name, **changes)
    assert ran(name, **changes) != ran(name, **changes, seed=1)


def test_shares_of_gossip_add_up_to_one() -> None:
    """Those held and those that are on their way; nothing is lost while nobody dies."""
    options = parse_exchange("gossip", {"mode": "push", "probability": 0.5})
    swarm = Swarm(options, setting(replicas=8, jitter=0.5), StandIn(MB), Rates(0.05, 0.0))
    seen: list[float] = []
    on_the_way = [0.0]
    take, put = Gossip._taken_to_send, Gossip._put_in_inbox

    def leave(self: Gossip) -> Any:
        message = take(self)
        on_the_way[0] += message[1]
        return message

    def arrive(self: Gossip, weights: Any, share: float) -> None:
        on_the_way[0] -= share
        put(self, weights, share)

    swarm._progress = lambda *_: seen.append(swarm.shares() + on_the_way[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gossip, "_taken_to_send", leave)
        patch.setattr(Gossip, "_put_in_inbox", arrive)
        swarm.run()
    assert len(seen) == 160
    assert seen == pytest.approx([1.0] * 160)


def test_no_two_steps_at_once_on_one_device() -> None:
    swarm = Swarm(parse_exchange("gossip", {}), setting(jitter=0.5), StandIn(MB), Rates(0.05, 0.9), traced=True)
    swarm.run()
    trace = swarm.trace()
    for row in range(4):
        pieces = sorted((s.start, s.end) for s in trace.slices if s.rank == row and s.lane == "compute")
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(pieces))
    assert trace.messages


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("name", [name for name in BETWEEN_HOSTS if name != "admm"])  # which ties every step to z
def test_one_replica_is_plain_sgd(name: str) -> None:
    """With one replica, no latency and the exchange's own rule the trained weights are those of torch's SGD."""
    draw = torch.Generator().manual_seed(3)
    data = torch.randn(64, 16, generator=draw, dtype=torch.float64), torch.randint(0, 3, (64,), generator=draw)
    own_options: dict[str, dict[str, Any]] = {
        "dasgd": {"sparse": "none", "decay": "none"},
        "backup": {"backups": 0},
        "easgd": {"period": 1000},  # it never meets the centre: between pushes it is SGD
    }
    options = own_options.get(name, {})
    work = Training(network, data, data, batch=8)
    swarm = Swarm(parse_exchange(name, options), setting(replicas=1, steps=24), work, Rates(0.1, 0.9))
    swarm.run()
    beside = Training(network, data, data, batch=8)
    replica = beside.trainee(0, 0.9)
    for batch in range(24):
        beside.gradient(replica, batch)
        for group in replica.optimizer.param_groups:
            group["lr"] = 0.1
        replica.optimizer.step()
    own = swarm.members[0].exchange.replica.weights
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(own, replica.weights, strict=True))


def test_shared_memory_sends_nothing() -> None:
    outcome = ran("hogwild", one_host=True)
    assert outcome.counted == 80
    assert outcome.sent_bytes == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [("hogwild", {}), ("downpour", {"compress": "int8"}), ("downpour", {"overlap": True}), ("backup", {"backups": 4})],
)
def test_what_cannot_be_is_refused_by_name(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=name if name == "hogwild" else next(iter(options))):
        ran(name, options)
