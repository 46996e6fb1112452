"""Workers and parameter servers beside closed forms."""

from dataclasses import replace

import pytest

from shoal.errors import InputError
from shoal.simulating.served import Served, serve

ALONE = Served(workers=1, step=1.0, pushed=20.0, fetched=10.0, bandwidth=100.0)


def test_one_worker_steps_pushes_and_fetches() -> None:
    service = serve(replace(ALONE, latency=0.05), rounds=10)
    assert service.seconds == pytest.approx(10 * (1.0 + 0.2 + 0.1 + 2 * 0.05))
    assert service.rate == pytest.approx(1 / 1.4)
    assert service.staleness == (0,) * 10
    assert service.bytes == 10 * 30.0


@pytest.mark.parametrize(("servers", "messages"), [(1, 4 * 0.3), (2, 2 * 0.3), (4, 0.3), (8, 0.3)])
def test_together_the_servers_cards_are_shared_until_the_workers_own_decide(servers: int, messages: float) -> None:
    service = serve(replace(ALONE, workers=4, servers=servers, together=True), rounds=6)
    assert service.seconds == pytest.approx(6 * (1.0 + messages))
    assert service.rate == pytest.approx(4 / (1.0 + messages))
    assert set(service.staleness) == {0}


def test_a_push_now_and_then_costs_its_part() -> None:
    service = serve(replace(ALONE, every=10), rounds=4)
    assert service.steps == 40
    assert service.seconds == pytest.approx(4 * (10.0 + 0.3))


def test_asynchronous_workers_do_not_wait_for_a_slow_step_and_are_stale() -> None:
    free = replace(ALONE, workers=8, jitter=0.3, seed=1)
    asynchronous, together = serve(free), serve(replace(free, together=True))
    assert asynchronous.rate > 1.2 * together.rate
    assert asynchronous.mean_staleness == pytest.approx(7, abs=0.5)
    # Every update is one push: what a worker has not seen, others did.
    assert len(asynchronous.staleness) == 800
    assert serve(free) == asynchronous


def test_a_server_that_is_full_gives_what_its_card_carries() -> None:
    full = serve(replace(ALONE, workers=20, step=0.1, jitter=0.1))
    assert full.rate == pytest.approx(100.0 / 20.0, rel=0.03)


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"servers": 0}, {"every": 0}, {"step": 0.0}, {"bandwidth": 0.0}])
def test_refusals(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="cannot be simulated"):
        replace(ALONE, **wrong)  # type: ignore[arg-type]


def test_one_round_says_nothing() -> None:
    with pytest.raises(InputError, match="1 rounds"):
        serve(ALONE, rounds=1)
