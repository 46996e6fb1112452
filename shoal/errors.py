"""Every error that Shoal raises on purpose.

    ShoalError                  exit 1   base; carries a problem and a remedy
    ├── InputError              exit 2   something the user gave does not work; nothing was started
    │   ├── ConfigError                  an option or a line of a recipe
    │   ├── ModelError                   a model's name, factory or size
    │   ├── CaptureError                 a network that cannot be followed
    │   ├── DataError                    a data set that is missing, corrupt or too small
    │   ├── PlanError                    a cut that cannot be read or does not fit
    │   ├── OutputError                  a folder that cannot be written, or already holds a run
    │   └── CheckpointError              a run that cannot be resumed or used
    └── RunError                exit 1   a run that had begun and could not go on
        ├── DivergedError                the loss is no longer a number
        ├── OutOfMemoryError             a step needs more memory than there is
        ├── DiedError                    a process that the run needs ended without a word, or fell silent
        ├── PeerError                    another rank's trouble, which that rank itself tells better
        │   ├── LostError                a replica is gone that the others cannot go on without
        │   ├── SilentError              another rank that does not answer: frozen, or busy with something else
        │   └── MessageError             another rank said something that has no meaning here
        └── StoppedError        exit 130 stopped by the user; a checkpoint was left
            └── LeftError       exit 0   one replica of several, asked to stop, left in good order; the others go on

A problem names the value that was wrong; a remedy is what to do next. The command line prints both
as one message and exits with the class's code; a traceback follows only what nobody raised
on purpose: an error in the user's own code, or a bug of ours.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

# What Gloo, NCCL and torch's store say when a peer is gone or silent. It is never this rank's own fault.
_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|pair closure|connectfullmesh|remote process exited"
    r"|unhandled system error|communicator was aborted|socket closed|recvvalue|sendbytes|failed to recv",
    re.IGNORECASE,
)
_SILENT = re.compile(r"timed out|timeout", re.IGNORECASE)


class ShoalError(Exception):
    """A problem, and the way out of it. Survives pickling between processes."""

    exit_code = 1

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}\n{self.remedy}"


@dataclass(frozen=True)
class Loss:
    """Workers that a run lost, as far as is known where it was noticed."""

    lost: tuple[int, ...]
    """Ranks, or, of replicas that need each other, replicas."""
    noticed: float
    """Wall clock."""
    steps: int | None = None
    """Steps of the run that were done."""
    stepped: float | None = None
    """Wall clock of the last of them: all were alive then."""


class InputError(ShoalError):
    """Something the user gave does not work; nothing was started."""

    exit_code = 2


class ConfigError(InputError):
    """An option on the command line or a line of a recipe."""


class ModelError(InputError):
    """A model's name, its factory, or a size it cannot take."""


class CaptureError(InputError):
    """A network that torch.export, or a plan, cannot follow."""


class DataError(InputError):
    """A data set that is missing, corrupt or too small."""


class PlanError(InputError):
    """A cut or a plan that cannot be read or does not fit."""


class OutputError(InputError):
    """A folder that cannot be written, or that already holds a run."""


class CheckpointError(InputError):
    """A run that cannot be resumed or used."""


class RunError(ShoalError):
    """A run that had begun and could not go on."""

    loss: "Loss | None" = None
    """Who was lost, where that is why and it is known."""


class DivergedError(RunError):
    """The loss is no longer a number."""


class DiedError(RunError):
    """A process that the run needs ended without a word, or fell silent. Another attempt may go well."""


class NoPlaceError(RunError):
    """Whoever gives processes their place had none for so many. For fewer there may be one."""


class PeerError(RunError):
    """Another rank failed or is gone. Shown only where that rank itself said nothing."""


class LostError(PeerError):
    """A replica is gone that the others cannot go on without. Whoever started it may know why."""


class SilentError(PeerError):
    """Another rank did not answer in time. It may live: frozen, far behind, or in another call."""


class MessageError(PeerError):
    """Another rank said something that has no meaning here: a field is missing, of another type, or out of range."""


class OutOfMemoryError(RunError):
    """A step needs more memory than there is."""


class StoppedError(RunError):
    """Stopped by the user; a checkpoint was left."""

    exit_code = 130


class LeftError(StoppedError):
    """One replica of several was asked to stop and left in good order; the others go on."""

    exit_code = 0


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """A remedy for a mistyped name: the nearest known name, if any, and all of them.

    >>> suggestion("resnet19", ["lenet5", "resnet18"])
    "Did you mean 'resnet18'? Known: lenet5, resnet18."
    """
    names = list(known)
    near = get_close_matches(wrong, names, n=1)
    return (f"Did you mean {near[0]!r}? " if near else "") + f"Known: {', '.join(names)}."


def show_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0 and 2`.

    >>> show_ranks([1]), show_ranks([0, 2, 3])
    ('rank 1', 'ranks 0, 2 and 3')
    """
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def of_network(error: BaseException) -> bool:
    """Whether torch's network raised it: a DistError, or Gloo's RuntimeError, which names its source file or a pair.

    >>> of_network(RuntimeError("timed out in my own code"))
    False
    """
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in ("gloo", "pair closure"))


def network_trouble(error: BaseException) -> Literal["gone", "silent"] | None:
    """What torch's network says of a peer; None where the error is not the network's, or is about something else.

    >>> network_trouble(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    'gone'
    """
    if not of_network(error):
        return None
    if _SILENT.search(str(error)):
        return "silent"
    return "gone" if _GONE.search(str(error)) else None
