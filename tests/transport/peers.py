"""What the processes at the other end of a link do. Importable, so that spawned processes find it."""

import os
import time

import torch

from shoal.transport.links import Link, connect

MUCH = 200_000_000
"""Bytes; far more than the system holds between two sockets."""

Address = tuple[str, int]


def call(address: Address, token: str) -> Link:
    return connect(address, token, {"pid": os.getpid()}, name="the test")


def echo(address: Address, token: str) -> None:
    """Send back whatever comes."""
    with call(address, token) as link:
        while True:
            frame = link.receive()
            link.send(frame.head, frame.buffers)


def take_only_the_head(address: Address, token: str) -> None:
    """Say when a frame has begun to come, and leave its buffers where they are."""
    with call(address, token) as link:
        link.receive_head()
        link.send({"begun": True})
        time.sleep(1000)


def send_much(address: Address, token: str) -> None:
    with call(address, token) as link:
        link.send({"much": MUCH}, [torch.zeros(MUCH, dtype=torch.uint8)])
        time.sleep(1000)


def have_a_child(address: Address, token: str) -> None:
    """Fork a process, which outlives this one."""
    with call(address, token) as link:
        child = os.fork()
        if child == 0:
            time.sleep(1000)
            os._exit(0)
        link.send({"child": child})
        time.sleep(1000)
