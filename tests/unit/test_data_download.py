"""Downloads, from a server on this machine: whole and checked, or nothing."""

import hashlib
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shoal.data.catalog import FASHION_MNIST
from shoal.data.download import Remote, check, fetch
from shoal.data.fashion import load_fashion
from shoal.errors import DataError

CONTENT = bytes(range(256)) * 600


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address under which its files can be fetched."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def refused() -> str:
    """An address where nobody listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    return f"http://127.0.0.1:{port}/"


def remote(name: str, content: bytes = CONTENT) -> Remote:
    return Remote(name, len(content), hashlib.sha256(content).hexdigest())


def test_files_arrive_whole(served: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, url = served
    (source / "a.gz").write_bytes(CONTENT)
    (source / "b.gz").write_bytes(b"b")
    files = [remote("a.gz"), remote("b.gz", b"b")]
    target = tmp_path / "new" / "cache"
    fetch(files, base_url=url, folder=target, remedy="")
    assert (target / "a.gz").read_bytes() == CONTENT
    assert sorted(file.name for file in target.iterdir()) == ["a.gz", "b.gz"]
    for file in files:
        check(target / file.name, file, "")
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "150.0 KiB" in message


def test_a_bar_is_drawn_on_a_terminal(
    served: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, url = served
    (source / "a.gz").write_bytes(CONTENT)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    fetch([remote("a.gz")], base_url=url, folder=tmp_path, remedy="")
    assert "downloading" in capsys.readouterr().err


def test_only_missing_files_are_fetched(served: tuple[Path, str], tmp_path: Path) -> None:
    _, url = served
    (tmp_path / "a.gz").write_bytes(CONTENT)
    fetch([remote("a.gz")], base_url=url, folder=tmp_path, remedy="")  # the server does not have it


def test_a_wrong_checksum_leaves_nothing(served: tuple[Path, str], tmp_path: Path) -> None:
    source, url = served
    (source / "a.gz").write_bytes(CONTENT[:-1])
    target = tmp_path / "cache"
    with pytest.raises(DataError, match=r"a\.gz gave a file with the sha256 \w+, not \w+; it was not kept"):
        fetch([remote("a.gz")], base_url=url, folder=target, remedy="")
    assert not list(target.iterdir())


def test_a_file_the_server_lacks(served: tuple[Path, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"could not download .*404(.|\n)*do without"):
        fetch([remote("a.gz")], base_url=served[1], folder=tmp_path / "cache", remedy="do without")
    assert not list((tmp_path / "cache").iterdir())


def test_a_folder_that_cannot_be_made(served: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"could not download .* to .*file/cache"):
        fetch([remote("a.gz")], base_url=served[1], folder=tmp_path / "file" / "cache", remedy="")


@pytest.mark.usefixtures("nowhere")
def test_without_a_network_the_way_out_is_named(refused: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_fashion(base_url=refused)
    assert refused in caught.value.problem
    assert all(name in caught.value.remedy for name in FASHION_MNIST.files)
    assert "SHOAL_DATA" in caught.value.remedy
    assert "--data digits" in caught.value.remedy
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_local_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "a.gz"
    file.write_bytes(CONTENT[:-1])
    with pytest.raises(DataError, match=r"a\.gz has 153599 bytes where 153600"):
        check(file, remote("a.gz"), "")
    file.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(DataError, match=r"a\.gz is corrupt or another file"):
        check(file, remote("a.gz"), "")
    with pytest.raises(DataError, match=r"b\.gz cannot be read"):
        check(tmp_path / "b.gz", remote("b.gz"), "")
