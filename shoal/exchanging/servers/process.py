"""A server as a process of its own, which `start_server` starts; the token is in its environment.

It announces itself to the coordinator and ends when the coordinator does.
"""

import os
import subprocess
import sys

from shoal.exchanging.membership.pulse import Pulse
from shoal.exchanging.servers.server import Server
from shoal.transport.links import JSON, Address, LinkLost, connect, own_address

TOKEN = "SHOAL_TOKEN"


def start_server(address: Address, token: str, number: int) -> "subprocess.Popen[bytes]":
    """Start server `number` of the run whose coordinator is at `address`."""
    command = [
        sys.executable,
        "-c",
        "from shoal.exchanging.servers.process import main; main()",
        address[0],
        str(address[1]),
        str(number),
    ]
    return subprocess.Popen(command, env={**os.environ, TOKEN: token}, start_new_session=True)


def main() -> None:
    """Serve until the coordinator is gone."""
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    host, port, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def tell(error: BaseException) -> None:
        print(f"shoal: server {number} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    serve(Server(host=own_address(host), on_error=tell), (host, port), os.environ[TOKEN], number)


def serve(server: Server, coordinator: Address, token: str, number: int) -> None:
    """Announce the server, and pass on to it what the coordinator says, until the coordinator is gone."""
    hello: dict[str, JSON] = {
        "as": "server",
        "number": number,
        "address": list(server.address),
        "token": server.token,
    }
    link = connect(coordinator, token, hello, name="the coordinator")
    pulse = None
    try:
        told = link.receive().head
        link.give_up_after(told["timeout"])
        server.patience = told["timeout"]
        pulse = Pulse(link, told["heartbeat"])
        while True:
            head = link.receive().head
            server.members(frozenset(head["members"]), frozenset(head["resting"]))
            server.made_by({version: frozenset(makers) for version, makers in head["makers"]})
    except LinkLost:
        pass
    finally:
        link.close()
        if pulse is not None:
            pulse.stop()
        server.close()
