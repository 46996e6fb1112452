"""What papers report, repeated by the simulator: the answers to what `shoal/papers/` asks."""
