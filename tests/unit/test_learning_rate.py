"""The rate of every step."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.config import Schedule
from shoal.training.learning_rate import rate_at

schedules = st.sampled_from(["cosine", "step", "constant"])


@given(schedule=schedules, warmup=st.integers(0, 50), rest=st.integers(1, 200), peak=st.floats(1e-6, 10))
def test_climbs_to_the_peak_then_never_rises(schedule: Schedule, warmup: int, rest: int, peak: float) -> None:
    total = warmup + rest
    rates = [
        rate_at(step, peak=peak, schedule=schedule, warmup_steps=warmup, total_steps=total) for step in range(total)
    ]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[warmup] == peak
    assert all(0 < rate <= peak for rate in rates)
    if warmup:
        assert rates[warmup - 1] == peak


@given(peak=st.floats(1e-6, 10), total=st.integers(4, 100))
def test_cosine_ends_near_zero(peak: float, total: int) -> None:
    last = rate_at(total - 1, peak=peak, schedule="cosine", warmup_steps=0, total_steps=total)
    assert last < peak * (4 / total) ** 2
