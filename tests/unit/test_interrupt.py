"""The first request to stop is a question for the loop, the second ends the process."""

import signal
import sys

import pytest

from shoal.launching import stopping
from shoal.training.interrupt import StopSignal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


def test_signals_that_come_together_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `timeout` sends them: to the command and to its group."""
    now = [100.0]
    monkeypatch.setattr(stopping, "monotonic", lambda: now[0])
    with StopSignal() as stop:
        assert not stop
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
            assert stop
        now[0] += 2 * stopping.TOGETHER_SECONDS
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_slurm_is_told_to_send_before_the_end_asks_to_stop() -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGUSR1)
        assert stop
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_program_that_uses_that_signal_itself_keeps_it() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGUSR1)
            assert not stop
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
