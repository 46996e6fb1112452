"""Tables: processes find each other in them, and ports hear nobody once all are there."""

import multiprocessing as mp
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from shoal.exchanging import Meeting
from shoal.transport.groups import told_by_first
from shoal.transport.strangers import hear_again, hear_nobody, noted
from shoal.transport.table import OwnTable, all_are_here, all_may_come, serve_table, table_at

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="filters and nameless files are Linux's"),
    pytest.mark.timeout(120),
]


def write(url: str) -> None:
    table_at(url, 20).set("from", "a child")


def answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=0.3).close()
    except TimeoutError:
        return False
    return True


def listens_at(pid: int = 0) -> set[str]:
    connections = psutil.Process(pid or os.getpid()).net_connections("tcp")
    return {f"{connection.laddr.ip}" for connection in connections if connection.status == psutil.CONN_LISTEN}


def test_processes_meet_in_a_file_that_has_no_name_and_no_port() -> None:
    before = psutil.Process().net_connections("tcp")
    table = OwnTable()
    child = mp.get_context("spawn").Process(target=write, args=(table.url,))
    child.start()
    here = table_at(table.url, 60)
    assert here.get("from") == b"a child"
    child.join()
    assert psutil.Process().net_connections("tcp") == before
    table.close()
    table.close()  # again, which does no harm
    here.set("still", "there")  # whoever opened it has it
    assert here.get("still") == b"there"


def test_a_silent_table_is_left_after_its_time_out() -> None:
    table = OwnTable()
    with pytest.raises(RuntimeError, match="imeout"):
        table_at(table.url, 0.2).get("nothing")
    table.close()


def test_nothing_stays_of_a_table_whose_keeper_died() -> None:
    code = "from shoal.transport.table import OwnTable; t = OwnTable(); print(t.url, flush=True); import os; os.abort()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == -6
    assert not Path(run.stdout.strip().removeprefix("file://")).exists()


def test_a_table_of_a_world_listens_at_one_address_and_to_nobody_new() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = listens_at()
    table = serve_table("localhost", port, 20, one_host=True)
    assert listens_at() - before <= {"127.0.0.1"}
    assert serve_table("localhost", port, 20, one_host=True) is table
    table.set("key", "value")
    assert table_at(f"tcp://localhost:{port}", 20).get("key") == b"value"
    assert answers(("127.0.0.1", port))
    all_are_here()
    assert not answers(("127.0.0.1", port))
    assert table.get("key") == b"value"  # who was there stays
    all_may_come()
    assert answers(("127.0.0.1", port))


def test_a_port_that_hears_nobody_keeps_its_connections() -> None:
    with noted() as opened:
        server = socket.create_server(("127.0.0.1", 0))
    assert opened == {server.fileno()}
    with server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            hear_nobody(opened)
            assert not answers(server.getsockname())
            near.sendall(b"here")
            assert far.recv(4) == b"here"
        hear_again(opened)
        hear_again(opened)
        assert answers(server.getsockname())


def test_what_the_first_rank_tells_all_is_not_in_the_table() -> None:
    table, words = OwnTable(), "a token, é, and " + "much more" * 1000

    def told(rank: int) -> str:
        store = table_at(table.url, 60)
        return told_by_first(store, "told", rank, 3, words if rank == 0 else None, 60, "127.0.0.1")

    before = listens_at()
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(told, range(3))) == [words] * 3
    assert listens_at() - before == set()
    written = Path(table.url.removeprefix("file://")).read_bytes()
    assert b"told" in written
    assert b"token" not in written
    table.close()


def test_the_name_of_a_meeting_tells_nothing_of_its_token() -> None:
    meeting = Meeting(("127.0.0.1", 1), "a" * 32, 2, 60.0)
    other = Meeting(("127.0.0.1", 1), "b" * 32, 2, 60.0)
    assert meeting.name != other.name
    assert meeting.token not in meeting.name
    assert Meeting.from_json(meeting.to_json()) == meeting
