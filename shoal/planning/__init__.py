"""Planning: which cut each layer gets."""

from shoal.planning.resolve import Resolved, check, resolve

__all__ = ["Resolved", "check", "resolve"]
