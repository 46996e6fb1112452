"""A network that is known before it is held: built in parts, with the weights of one device."""

from shoal.building.draft import Draft, build, draft

__all__ = ["Draft", "build", "draft"]
