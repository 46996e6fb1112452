"""Lowering: a graph and a cut for every layer -> the list of instructions of one step. Integers only."""
