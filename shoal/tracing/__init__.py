"""Diaries of ranks -> a Trace: switched on for some steps, put on one clock, gathered, told in a table.

`recording.py` is for training runs, `own_loop.py` is `shoal.trace`. `merge.py`, `summary.py`, `predicted.py` are pure.
"""
