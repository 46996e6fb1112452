"""What exchanges are told, and what they tell before they begin."""

from typing import Any

import pytest

from shoal.config import TrainConfig
from shoal.errors import ConfigError
from shoal.exchanges import EXCHANGES, Rates, parse_exchange
from shoal.exchanging.dasgd import Options as Dasgd
from shoal.exchanging.gossip import Options as Gossip


def dasgd(**options: Any) -> Dasgd:
    parsed = parse_exchange("dasgd", options)
    assert isinstance(parsed, Dasgd)
    return parsed


def test_dasgd_as_in_the_paper_is_a_preset_beside_the_defaults() -> None:
    paper, default = dasgd(preset="paper"), dasgd()
    assert (paper.sparse, paper.momentum_at, paper.push_every, paper.fetch_every) == ("threshold", "server", 1, 1)
    assert (default.sparse, default.momentum_at, default.push_every) == ("sampled", "worker", 4)


def test_what_is_given_wins_over_the_preset() -> None:
    assert dasgd(preset="paper", n_sync=3).push_every == 3
    assert dasgd(preset="paper", n_push=2, n_fetch=2).push_every == 2
    assert dasgd(preset="paper", sparse="topk").sparse == "topk"


def test_a_preset_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="preset = 'papers' does not work"):
        dasgd(preset="papers")


def test_what_was_chosen_is_read_back_as_it_was() -> None:
    paper = dasgd(preset="paper")
    assert dasgd(**paper.model_dump(mode="json", exclude_none=True)) == paper


def test_adagrad_says_that_it_uses_no_momentum() -> None:
    adagrad = parse_exchange("downpour", {"rule": "adagrad"})
    assert "momentum 0.9 is not used" in adagrad.warnings(2, lr=0.1, momentum=0.9)[0]
    assert adagrad.warnings(2, lr=0.1, momentum=0.0) == []


def test_what_is_under_way_beside_compute_cannot_be_dropped() -> None:
    assert "overlap" in parse_exchange("downpour", {"overlap": True, "n_sync": 2}).model_dump()
    with pytest.raises(ConfigError, match="max_staleness = 3 drops a push after the next steps were begun"):
        parse_exchange("downpour", {"overlap": True, "max_staleness": 3})


@pytest.mark.parametrize("name", EXCHANGES)
def test_rates_of_every_exchange_from_those_of_one_worker(name: str) -> None:
    """As the table in docs/exchanges.md has them."""
    given = Rates(0.08, 0.9)
    own = {
        **dict.fromkeys(("downpour", "hogwild"), Rates(0.02, 0.6)),
        "dasgd": Rates(0.02, 0.8),
        **dict.fromkeys(("softsync", "gossip", "local"), Rates(0.08, 0.8)),
    }
    options = parse_exchange(name, {})
    assert options.tuned(given, 4) == pytest.approx(own.get(name, given))
    assert options.tuned(given, 1) == given
    assert parse_exchange(name, {"rates": "given"}).tuned(given, 4) == given


def test_momentum_remembers_less_where_servers_keep_it_than_where_replicas_do() -> None:
    given = Rates(0.08, 0.9)
    for name, options, momentum in (
        ("downpour", {"n_sync": 4}, 0.8),
        ("downpour", {"rule": "add"}, 0.8),
        ("dasgd", {"momentum_at": "server"}, 0.6),
        ("dasgd", {"preset": "paper"}, 0.6),
    ):
        assert parse_exchange(name, options).tuned(given, 4) == pytest.approx(Rates(0.02, momentum)), options


@pytest.mark.parametrize("replicas", [2, 3, 4, 8, 16, 64])
def test_any_number_of_asynchronous_replicas_bears_the_same_curvature(replicas: int) -> None:
    """On a parabola, with every gradient R - 1 updates late; a momentum that remembers twice as much does not."""
    own = parse_exchange("downpour", {}).tuned(Rates(1.0, 0.9), replicas)
    assert settles(own, curvature=0.5, late=replicas - 1)
    assert not settles(own.remembering(2), curvature=0.5, late=replicas - 1)


def settles(rates: Rates, *, curvature: float, late: int) -> bool:
    """Whether SGD with momentum goes to the bottom of a parabola by gradients that are so many updates late."""
    points, speed = [1.0] * (late + 1), 0.0
    for _ in range(400 * (late + 1)):
        speed = rates.momentum * speed - rates.lr * curvature * points[-1 - late]
        points.append(points[-1] + speed)
        if abs(points[-1]) > 1e6:
            return False
    return abs(points[-1]) < 1e-3


@pytest.mark.parametrize(("name", "option"), [("dasgd", "n_sync"), ("easgd", "period"), ("admm", "period")])
def test_more_replicas_meet_more_often_unless_told(name: str, option: str) -> None:
    untold, told = parse_exchange(name, {}), parse_exchange(name, {option: 7})
    assert [getattr(untold.among(replicas), option) for replicas in (1, 2, 3, 4, 8)] == [4, 4, 2, 2, 2]
    assert getattr(told.among(8), option) == 7
    assert getattr(TrainConfig(replicas=4, exchange=name).exchange_settings(), option) == 2


def test_more_replicas_gossip_more_often_unless_told() -> None:
    gossip = Gossip()
    assert [gossip.among(replicas).probability for replicas in (2, 4)] == [0.25, 0.5]
    assert Gossip(probability=0.1).among(4).probability == 0.1
