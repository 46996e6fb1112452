"""The command line in processes of its own, which begin as copies of one that has loaded torch.

So does the helper from which a command forks its ranks (`shoal/launching/forked.py`): it is the command's own child, as
always, and only need not load torch once more, which would be most of the time that a short run takes. A helper as it
is without tests: `tests/launching/test_forked.py`, and the `program` of `tests/cli/test_workers.py`.
Other modules, such as torchrun, are started as people start them.
"""

import ctypes
import faulthandler
import fcntl
import multiprocessing as mp
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, Protocol

import torch

from shoal.exchanging.membership import meeting
from shoal.exchanging.servers import reach
from shoal.exchanging.servers.process import TOKEN, start_server
from shoal.exchanging.servers.process import main as serve
from shoal.launching import forked
from shoal.launching.process import environment
from shoal.transport.links import Address
from tests.replicas.worlds import free_port

LOADED = [
    *("torch.export._trace", "shoal.cli.main", "shoal.cli.progress", "shoal.running.start", "shoal.replicas.run"),
    *("shoal.finding", "shoal.training.laid", "shoal.planning.outlining"),  # what ranks need under a plan
]
_NEW_NET = 0x40000000
_numbers = count()
_server = vars(forkserver.ForkServer())
_kept: list[object] = []


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
        return Command(folder, arguments, environment)
    return program(folder, module, *arguments, **variables)


def begin_printing(folder: Path, arguments: Sequence[str], printed: Path) -> Begun:
    """`shoal ARGUMENTS` in `folder`, with all that it prints in one file."""
    return Command(folder, tuple(arguments), {**os.environ, "NO_COLOR": "1"}, (printed, printed))


def program(folder: Path, module: str, *arguments: str, **variables: str) -> Begun:
    """The same, always as people start it: nothing is loaded before."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def script(folder: Path, path: Path, *arguments: str, **variables: str) -> Begun:
    """`python PATH ARGUMENTS` in `folder`, its torch loaded before."""
    return Command(folder, arguments, {**os.environ, **variables}, script=path)


def load() -> None:
    """Start the process of which the others are copies."""
    with _own_server():
        mp.get_context("forkserver").set_forkserver_preload(LOADED)
        forkserver.ensure_running()


def as_ranks(
    folder: Path, ranks: int, path: Path, *arguments: str, seconds: float = 110.0, code: int = 0
) -> tuple[str, str]:
    """What a script printed that ran in so many processes with the variables of torchrun; all have ended with `code`.

    As torchrun itself starts them: `tests/test_examples.py` has one of each kind.
    """
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    begun = [script(folder, path, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **world) for rank in range(ranks)]
    try:
        printed = [one.communicate(timeout=seconds) for one in begun]
    finally:
        for one in begun:
            one.kill()
    assert [one.returncode for one in begun] == [code] * ranks, "".join(err for _, err in printed)
    return "".join(out for out, _ in printed), "".join(err for _, err in printed)


class Command:
    """`shoal ARGUMENTS`, as a copy of a process that has loaded torch and has done nothing else.

    Or a script; `network`: the name of the network namespace in which it lives.
    """

    def __init__(
        self,
        folder: Path,
        arguments: tuple[str, ...],
        environment: Mapping[str, str],
        into: Sequence[Path] | None = None,
        *,
        script: Path | None = None,
        network: str | None = None,
    ) -> None:
        number = next(_numbers)
        self._files = into or [folder / f".printed-{number}-{name}" for name in ("out", "err")]
        self._arguments = arguments
        with _own_server():
            context = mp.get_context("forkserver")
            context.set_forkserver_preload(LOADED)
            self._process = context.Process(
                target=_command, args=(folder, arguments, environment, *self._files, script, network)
            )
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
        """What it printed, once it has ended; where it does not end, the error has what its threads are at."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired as error:
            self.send_signal(signal.SIGABRT)
            self._process.join(5.0)
            error.add_note("\n".join(self._printed()))
            raise
        out, err = self._printed()
        return out, err

    def _printed(self) -> list[str]:
        return [path.read_text() if path.exists() else "" for path in self._files]

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


def _command(
    folder: Path,
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    out: Path,
    err: Path,
    script: Path | None,
    network: str | None,
) -> None:
    if network is not None:
        _move_to(network)
    os.chdir(folder)
    sys.path.insert(0, str(folder if script is None else script.parent))  # as python itself does
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate((Path(os.devnull), out, err)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests under nohup ignores it
    faulthandler.enable()  # SIGABRT has it say what its threads are at
    if "OMP_NUM_THREADS" in environment:  # which torch has read already
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    vars(util)["spawnv_passfds"] = _helpers_from(_spare(), util.spawnv_passfds)
    for module in (meeting, reach):
        vars(module)["start_server"] = _Server
    if script is not None:
        sys.argv = [str(script), *arguments]
        # Kept until the process ends, as Python itself keeps it. Were it let go of here, DDP would end the last group,
        # and seldom (seen twice in some 150 runs) wait for ever: for a thread of Gloo that waits for Python's lock.
        _kept.append(runpy.run_path(str(script), run_name="__main__"))
        return
    sys.argv = ["shoal", *arguments]
    from shoal.cli.main import main

    main()


def _move_to(network: str) -> None:
    """As `ip netns exec` does; a process that it would start has torch to load."""
    with (Path("/var/run/netns") / network).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), "setns")


class _Server:
    """What `start_server` gives, forked from the helper that is to fork the ranks; without one, it itself.

    A server as it is without tests: `tests/replicas/test_own_loop.py`.
    """

    def __new__(cls, address: Address, token: str, number: int) -> Any:
        return super().__new__(cls) if forked._loaded_with is not None else start_server(address, token, number)

    def __init__(self, address: Address, token: str, number: int) -> None:
        loaded_with = forked._loaded_with
        assert loaded_with is not None
        with environment(**loaded_with, **{TOKEN: token}):
            self._process = forked.begin(_serve, (address, number), name=f"shoal server {number}")
        self._ended = threading.Event()
        threading.Thread(target=self._await, daemon=True).start()

    def _await(self) -> None:  # several threads wait for it, which a process of multiprocessing does not bear
        self._process.join()
        self._ended.set()

    def wait(self, timeout: float | None = None) -> int | None:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a server", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        if not self._ended.is_set():
            self._process.kill()


def _serve(address: Address, number: int) -> None:
    os.setsid()
    sys.argv = ["-c", address[0], str(address[1]), str(number)]
    serve()


_START_OF_A_HELPER = "from multiprocessing.forkserver import main"
_SPAWN = Callable[[Any, Sequence[Any], Sequence[int]], int]


def _helpers_from(spare: tuple[socket.socket, int], spawn: _SPAWN) -> _SPAWN:
    """What starts processes, with `spare` in the place of the first helper that it would start."""
    spares = [spare]

    def start(path: Any, arguments: Sequence[Any], files: Sequence[int]) -> int:
        if spares and str(arguments[-1]).startswith(_START_OF_A_HELPER):
            way, process = spares.pop()
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            told = pickle.dumps((arguments[-1], list(files), dict(os.environ), mask))
            with way, suppress(OSError):  # it was ended: then as without tests
                socket.send_fds(way, [len(told).to_bytes(8, "big")], list(files))
                way.sendall(told)
                return process
        return spawn(path, arguments, files)

    return start


def _spare() -> tuple[socket.socket, int]:
    """A copy of this process, as long as it has one thread, that can become its helper; the way to it, and its number.

    It ends when this process does, as the helper would.
    """
    ours, theirs = socket.socketpair()
    if process := os.fork():
        theirs.close()
        return ours, process
    code = 1
    try:
        _wait_to_be_helper(theirs)
        code = 0
    except SystemExit:  # how a helper ends
        code = 0
    finally:
        os._exit(code)


def _wait_to_be_helper(way: socket.socket) -> None:
    """Hear what the helper would be started with, and do it."""
    tracker = vars(resource_tracker._resource_tracker)["_fd"]
    kept = {0, 1, 2, way.fileno(), tracker}
    for file in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if file not in kept:
            with suppress(OSError):  # the one that has listed them
                os.close(file)
    size, received, _, _ = socket.recv_fds(way, 8, 16)
    if not size:  # the command has ended, and had no need of a helper
        return
    told = b""
    while len(told) < int.from_bytes(size, "big"):
        told += way.recv(1 << 20)
    code, files, environment, mask = pickle.loads(told)
    way.close()
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in received]
    for file, wanted in zip(aside, files, strict=True):
        os.dup2(file, wanted)
    for file in {*received, *aside} - set(files):
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    exec(code, {})
