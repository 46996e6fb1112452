"""Simulating: a list of tasks played in time, on devices and links that need not be here."""
