"""Comparing: one network under several strategies at equal samples, in one folder: docs/compare.md.

`cells.py` decides what is run, without doing anything; `runs.py` is one run, `timing.py` times steps in turns
(`turns.py`), `course.py` goes from the first run to the last. What it says is `reporting/`'s.
"""

from shoal.comparing.course import compare

__all__ = ["compare"]
