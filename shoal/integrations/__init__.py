"""Shoal inside other trainers. Nothing here is imported by the rest, and each file needs a package of its own."""
