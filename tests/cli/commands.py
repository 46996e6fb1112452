"""The command line in processes of its own, which begin as copies of one that has loaded torch.

Other modules, such as torchrun, are started as people start them.
"""

import multiprocessing as mp
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import forkserver
from pathlib import Path
from typing import Protocol

LOADED = ["torch.export._trace", "shoal.cli.main", "shoal.running.start", "shoal.replicas.run"]
_numbers = count()
_server = vars(forkserver.ForkServer())


class Begun(Protocol):
    """A process that a test began."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


def begin(folder: Path, module: str, *arguments: str, **variables: str) -> Begun:
    """`python -m MODULE ARGUMENTS` in `folder`, without colours."""
    environment = {**os.environ, "NO_COLOR": "1", **variables}
    if module == "shoal" and "forkserver" in mp.get_all_start_methods():
        return _Command(folder, arguments, environment)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class _Command:
    """`shoal ARGUMENTS`, as a copy of a process that has loaded torch and has done nothing else."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        number = next(_numbers)
        self._files = [folder / f".printed-{number}-{name}" for name in ("out", "err")]
        self._arguments = arguments
        with _own_server():
            context = mp.get_context("forkserver")
            context.set_forkserver_preload(LOADED)
            self._process = context.Process(target=_command, args=(folder, arguments, environment, *self._files))
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._arguments, timeout or 0.0)
        return self.returncode

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (path.read_text() if path.exists() else "" for path in self._files)
        return out, err

    def send_signal(self, sig: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, sig)

    def kill(self) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)


@contextmanager
def _own_server() -> Iterator[None]:
    """Within, processes are forked from a server of the commands' own.

    Else `shoal.launching.forked` would find in it the helper of somebody else's program, and would spawn all processes
    that a test starts in this process later.
    """
    present = vars(forkserver._forkserver)
    others = dict(present)
    present.update(_server)
    try:
        yield
    finally:
        _server.update(present)
        present.update(others)


def _command(folder: Path, arguments: tuple[str, ...], environment: Mapping[str, str], out: Path, err: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # as -m does
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate((Path(os.devnull), out, err)):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests under nohup ignores it
    sys.argv = ["shoal", *arguments]
    from shoal.cli.main import main

    main()
