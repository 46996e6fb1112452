"""Gradients from factors are those of one device, to rounding, and what they send is what is predicted."""

import pytest

from shoal.partition import Cut
from shoal.plan import Plan
from tests.conftest import RunOnRanks
from tests.parity import factor_cases

HYBRID = Plan(
    name="c2n2", ranks=4, layers=(("*", Cut.parse("n4")), ("middle", Cut.parse("c2n2")), ("last", Cut.parse("k2n2")))
)
"""Weights cut in two, each half on two ranks: by output, and by input with partial sums."""


@pytest.mark.parametrize(
    ("world", "plan", "recompute"),
    [
        (2, "data", False),
        (2, "data", True),
        (4, "data", False),
        (4, "2x2", False),
        pytest.param(4, HYBRID, False, id="hybrid"),
        (2, "model", False),
    ],
)
def test_steps_are_one_devices(on_ranks: RunOnRanks, world: int, plan: str | Plan, recompute: bool) -> None:
    on_ranks(world, factor_cases.exact, plan, recompute=recompute)


@pytest.mark.parametrize("world", [2, 4])
def test_other_shares_and_frozen_weights(on_ranks: RunOnRanks, world: int) -> None:
    on_ranks(world, factor_cases.other_shares)


@pytest.mark.parametrize("world", [2, 4])
def test_what_accumulated_is_summed(on_ranks: RunOnRanks, world: int) -> None:
    on_ranks(world, factor_cases.accumulated)


def test_under_autocast(on_ranks: RunOnRanks) -> None:
    on_ranks(2, factor_cases.autocast)


def test_auto_takes_factors_where_the_slowest_rank_gains(on_ranks: RunOnRanks) -> None:
    assert on_ranks(2, factor_cases.choices, "data", (0.01, 0.02), (0.001, 0.015)) == [("0",), ("0",)]
    assert on_ranks(2, factor_cases.choices, "data", (0.01, 0.02), (0.001, 0.025)) == [(), ()]
    assert on_ranks(2, factor_cases.choices, "model", (0.01, 0.02), (0.001, 0.001)) == [(), ()]
