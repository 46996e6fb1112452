"""Planning: which cut each layer gets."""

from shoal.planning.resolve import Resolved, resolve

__all__ = ["Resolved", "resolve"]
