"""Running: settings -> who trains, and where.

`start.py` decides: this process alone, ranks that it starts, one rank of a world that is there, or replicas.
"""

from shoal.running.start import changes_to, resume, train

__all__ = ["changes_to", "resume", "train"]
