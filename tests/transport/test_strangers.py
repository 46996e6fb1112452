"""Strangers at every port of a live run: it is unharmed, tells them nothing, and listens nowhere but on loopback.

The longer form, also from another host: python -m benchmarks.strangers
"""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks.strangers.attack import attack, room_for
from benchmarks.strangers.ports import ports_of, tree
from shoal.replicas.journal import TROUBLES
from tests.cli.commands import begin
from tests.cli.conftest import tiny
from tests.cli.test_exchange import LONG, end, goes_on, lines, mine, under_way, wait_for

__all__ = ["mine", "tiny"]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("ss") is None, reason="needs ss, and /proc"),
    pytest.mark.timeout(200),
]

CROWD = 2000
SECONDS = 6.0
"""Longer than a stranger has to say who it is."""
FILES = 1024
"""What a process may open on many systems."""


@pytest.mark.parametrize(
    ("options", "doors", "others"),
    [
        pytest.param(["--exchange", "downpour", "--exchange-options", "servers=processes"], 2, 0, id="downpour"),
        pytest.param(["--exchange", "allreduce"], 1, 2, id="allreduce", marks=pytest.mark.thorough),
        pytest.param(["--exchange", "gossip"], 3, 0, id="gossip", marks=pytest.mark.thorough),
    ],
)
def test_strangers_at_every_port_harm_nobody_and_learn_nothing(
    mine: list[str], tmp_path: Path, options: list[str], doors: int, others: int
) -> None:
    out = tmp_path / "run"
    run = begin(tmp_path, "shoal", "train", *mine, *LONG, "--replicas", "2", *options, "--out", "run")
    try:
        psutil.Process(run.pid).rlimit(psutil.RLIMIT_NOFILE, (FILES, FILES))
        wait_for(under_way(out, [0, 1]), run)
        meeting = json.loads((out / "meeting.json").read_text())
        assert (out / "meeting.json").stat().st_mode & 0o077 == 0

        wait_for(lambda: len(ports_of(tree(run.pid))) >= doors + others, run)  # a replica may be active but not begun
        ports = ports_of(tree(run.pid))
        assert len(ports) == doors + others
        assert [port for port in ports if not port.loopback] == []

        crowd = room_for(CROWD * len(ports)) // len(ports)
        with ThreadPoolExecutor(len(ports)) as pool:
            attacks = [pool.submit(attack, (port.host, port.port), crowd=crowd, seconds=SECONDS) for port in ports]
            goes_on(out, run)  # in the midst of it
            seen = [attack.result() for attack in attacks]

        assert sum(1 for attack in seen if attack.took) == doors  # the others, which are Gloo's, hear nobody
        assert [attack.answered for attack in seen] == [b""] * len(ports)
        assert [attack.left for attack in seen] == [0] * len(ports)
        assert meeting["token"] not in repr(seen)

        goes_on(out, run)
        assert lines(out, "steps")[-1]["active"] == [0, 1]
        assert not [line for trouble in TROUBLES for line in lines(out, trouble)]
        assert [process for pid in tree(run.pid) if (process := psutil.Process(pid)).num_fds() > FILES // 2] == []
        assert ports_of(tree(run.pid)) == ports
        printed = end(run)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, printed
