"""Diaries of ranks -> a Trace: switched on for some steps, put on one clock, gathered, told in a table."""

from shoal.tracing.own_loop import trace
from shoal.tracing.recording import Recording

__all__ = ["Recording", "trace"]
