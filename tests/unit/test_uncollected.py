"""Within `uncollected` Python does not look for cycles; afterwards it does as before."""

import gc

import pytest

from shoal.uncollected import uncollected


def test_the_collector_rests_within_and_goes_on_afterwards() -> None:
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="within"), uncollected():
        raise ValueError("within")
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
