"""Where in the user's own code something happened: the deepest line outside of torch and Shoal."""

import linecache
import re
import sys
import sysconfig
import traceback
from pathlib import Path

import torch
from torch.fx import Node

TORCH = str(Path(torch.__file__).parent)
LAYERS = f"{TORCH}/nn/modules/"
_PYTHON = sysconfig.get_paths()["stdlib"]
_DECORATORS = str(Path(TORCH) / "utils" / "_contextlib.py")
CAPTURING = str(Path(__file__).parent)
TRACING = str(Path(__file__).with_name("tracing.py"))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*\n\s*(?P<code>[^\n]*)')


def line_of(node: Node) -> str:
    """` at file:line (code)` of the line that made a node; empty where torch does not say."""
    frames = [
        (match["file"], int(match["line"]), match["code"])
        for match in _FRAME.finditer(node.meta.get("stack_trace") or "")
    ]
    return _deepest(frames)


def line_of_error(error: BaseException) -> str:
    """` at file:line (code)` of the line that raised an error."""
    frames = [
        (frame.filename, frame.lineno or 0, frame.line or "") for frame in traceback.extract_tb(error.__traceback__)
    ]
    return _deepest([frame for frame in frames if not frame[0].startswith((CAPTURING, "<"))])


def line_now() -> str:
    """` at file:line (code)` of the line of the network that is being run."""
    frames = []
    for frame, number in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file == TRACING:  # from here on it is the caller's
            break
        if not file.startswith((CAPTURING, "<")):
            frames.append((file, number, linecache.getline(file, number).strip()))
    return _deepest(frames[::-1])


def called_by_network() -> bool:
    """Whether it is the network's own line that called torch just now, not torch itself."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        passing = frame.f_code.co_name == "__torch_function__" or file.startswith(CAPTURING) or file == _DECORATORS
        if not passing:
            return not file.startswith(TORCH)
    return False


def read_by_network() -> bool:
    """Whether it is the network's own code that reads something of Python's just now: not torch's, nor an import.

    `os.environ.get` is Python's code, so the first line outside of it counts.
    """
    own = False
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return False
        if file.startswith(TORCH):
            return own
        own = own or not (file.startswith(CAPTURING) or _of_python(file))
    return own


def _of_python(file: str) -> bool:
    installed = "site-packages" in file or "dist-packages" in file
    return file.startswith("<") or (file.startswith(_PYTHON) and not installed)


def _deepest(frames: list[tuple[str, int, str]]) -> str:
    """The user's own line; where there is none, the line of torch's layer."""
    own = [frame for frame in frames if not _is_pythons(frame[0]) and not frame[0].startswith(TORCH)]
    layers = [frame for frame in frames if frame[0].startswith(LAYERS)]
    file, line, code = (own or layers or [("", 0, "")])[-1]
    return f" at {file}:{line} ({code})" if file else ""


def _is_pythons(file: str) -> bool:
    return file.startswith(_PYTHON) and "site-packages" not in file
