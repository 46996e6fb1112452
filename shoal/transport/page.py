"""A page for the browser of this machine: the files of a folder and some texts, to this host alone."""

from collections.abc import Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"


class PageServer(ThreadingHTTPServer):
    """Serves `folder`, and `texts` under their names, until it is closed. Whoever asks by another host's name gets 403.

    `port` 0 takes a free one. A port that is taken is an OSError.
    """

    daemon_threads = True

    def __init__(self, folder: Path, texts: Mapping[str, bytes], port: int = 0) -> None:
        self.texts = texts
        super().__init__((LOOPBACK, port), partial(_Handler, directory=str(folder)))

    @property
    def address(self) -> str:
        """What to open."""
        return f"http://{LOOPBACK}:{self.server_address[1]}"


class _Handler(SimpleHTTPRequestHandler):
    server: PageServer

    def send_head(self) -> Any:
        host = (self.headers.get("Host") or "").partition(":")[0]
        if host not in (LOOPBACK, "localhost"):  # a page of somebody else's, under a name that leads here
            self.send_error(403)
            return None
        name = urlsplit(self.path).path.rpartition("/")[2]
        if name not in self.server.texts:
            return super().send_head()
        text = self.server.texts[name]
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        return BytesIO(text)

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """A person reads the terminal, not a list of files."""
