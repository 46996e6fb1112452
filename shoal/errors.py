"""Every error that Shoal raises on purpose.

    ShoalError                  exit 1   base; carries a problem and a remedy
    ├── InputError              exit 2   something the user gave does not work; nothing was started
    │   ├── ConfigError                  an option or a line of a recipe
    │   ├── ModelError                   a model's name, factory or size
    │   ├── CaptureError                 a network that cannot be followed
    │   ├── DataError                    a data set that is missing, corrupt or too small
    │   ├── PlanError                    a cut that cannot be read or does not fit
    │   ├── OutputError                  a folder that cannot be written, or already holds a run
    │   └── CheckpointError              a run that cannot be resumed
    └── RunError                exit 1   a run that had begun and could not go on
        ├── DivergedError                the loss is no longer a number
        ├── OutOfMemoryError             a step needs more memory than there is
        ├── PeerError                    another rank's trouble, which that rank itself tells better
        └── StoppedError        exit 130 stopped by the user; a checkpoint was left

A problem names the value that was wrong; a remedy is what to do next. The command line prints both
as one message and exits with the class's code; a traceback is shown only for our own bugs.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ShoalError(Exception):
    """A problem, and the way out of it. Survives pickling between processes."""

    exit_code = 1

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}\n{self.remedy}"


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
    """A run that cannot be resumed."""


class RunError(ShoalError):
    """A run that had begun and could not go on."""


class DivergedError(RunError):
    """The loss is no longer a number."""


class PeerError(RunError):
    """Another rank failed or is gone. Shown only where that rank itself said nothing."""


class OutOfMemoryError(RunError):
    """A step needs more memory than there is."""


class StoppedError(RunError):
    """Stopped by the user; a checkpoint was left."""

    exit_code = 130


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """A remedy for a mistyped name: the nearest known name, if any, and all of them.

    >>> suggestion("resnet19", ["lenet5", "resnet18"])
    "Did you mean 'resnet18'? Known: lenet5, resnet18."
    """
    names = list(known)
    near = get_close_matches(wrong, names, n=1)
    return (f"Did you mean {near[0]!r}? " if near else "") + f"Known: {', '.join(names)}."
