"""Replicas that train apart and exchange what they learned."""
