"""Replicas: several copies of one network in training, each on its share of the batches.

    worker ──question (orders.py)──▶ conducting.py ──▶ Conductor ──▶ an order, and effects
                                                                      └▶ recorder.py: files; listener; members

`run.py` starts the replicas of a run, or joins one. `worker.py` is one replica's life. `conductor.py` decides, and does
nothing else: no clock, file, thread or link is in it; `budget.py` and `scores.py` count for it. `conducting.py` is the
loop around it. `own_loop.py` is an exchange in a user's own training loop, without a conductor:
`roll_call.py` finds which ranks are which replica, `finishing.py` is where they wait for each other, `in_step.py` tells
why a step failed that all take together.
"""
