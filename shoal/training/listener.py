"""Who hears what a run does: the progress bar, or a user's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.launching import say
from shoal.result import RunResult, WentOn
from shoal.training.run_folder import RunFolder


@dataclass(frozen=True)
class About:
    """What a run is about to do."""

    model: str
    parameters: int
    data: str
    train_samples: int
    test_samples: int
    classes: int
    origin: str
    """Where the data was found."""
    epochs: int
    steps_per_epoch: int
    batch: int
    workers: int
    plan: str
    plan_in_words: str | None
    """How the layers are cut, where that is known from the beginning and there is something to cut."""
    searched: bool
    """Whether the plan was asked for as auto, and so was found and not given."""
    replicas: int
    exchange: str
    device: str
    threads: int
    timeout: float
    """Seconds that the workers wait for each other before the run ends."""
    survives: bool
    """Whether the run goes on without a replica that is lost."""
    done: int
    """Steps of an earlier part of the run."""
    accumulate: int = 1
    """Batches of one step."""
    class_names: tuple[str, ...] = ()
    own_loss: bool = False
    """Whether the loss is a function of the user's own."""


class Listener:
    """Hears what a run does; override what you want to hear. Called often: be quick."""

    def starting(self, done: str, by: int, of: int) -> None:
        """In the process that starts the workers: what `by` of them have done on their way to the first step."""

    def restarting(self, why: str, left: int) -> None:
        """In the process that starts the workers: one was lost, and the run goes on; so often it may yet do so."""

    def regrouping(self, change: WentOn) -> None:
        """In the process that starts the workers: the run goes on with fewer of them after a loss, or with more."""

    def planning(self, done: int, of: int, what: str) -> None:
        """With the plan `auto`: how far profiling, search and race are, and what comes next."""

    def started(self, about: About, folder: RunFolder) -> None:
        """Everything is checked; the first step comes next."""

    def stepped(self, steps: int, epoch: int) -> None:
        """So many steps are done, and so many whole epochs."""

    def logged(self, metrics: Mapping[str, Any]) -> None:
        """A line was written to `metrics.jsonl`."""

    def happened(self, what: str, replica: int) -> None:
        """With several replicas: one joined, was lost, froze, came back or left; or in its place another is started."""

    def finished(self, result: RunResult, folder: RunFolder) -> None:
        """`result.json` is written."""

    def ended(self) -> None:
        """Nothing more will be heard, whether the run finished, failed or was interrupted."""


@dataclass(frozen=True)
class Listeners(Listener):
    """Several, who all hear the same, one after the other."""

    all: tuple[Listener, ...]

    def starting(self, done: str, by: int, of: int) -> None:
        for listener in self.all:
            listener.starting(done, by, of)

    def planning(self, done: int, of: int, what: str) -> None:
        for listener in self.all:
            listener.planning(done, of, what)

    def started(self, about: About, folder: RunFolder) -> None:
        for listener in self.all:
            listener.started(about, folder)

    def stepped(self, steps: int, epoch: int) -> None:
        for listener in self.all:
            listener.stepped(steps, epoch)

    def logged(self, metrics: Mapping[str, Any]) -> None:
        for listener in self.all:
            listener.logged(metrics)

    def happened(self, what: str, replica: int) -> None:
        for listener in self.all:
            listener.happened(what, replica)

    def finished(self, result: RunResult, folder: RunFolder) -> None:
        for listener in self.all:
            listener.finished(result, folder)

    def ended(self) -> None:
        for listener in self.all:
            listener.ended()


class Relayed(Listener):
    """On a rank of another host: what it hears is told to the process that started it, where `hearing` passes it on."""

    def planning(self, done: int, of: int, what: str) -> None:
        say(("planning", (done, of, what)))

    def started(self, about: About, folder: RunFolder) -> None:
        say(("started", (about, folder)))

    def stepped(self, steps: int, epoch: int) -> None:
        say(("stepped", (steps, epoch)))

    def logged(self, metrics: Mapping[str, Any]) -> None:
        say(("logged", (dict(metrics),)))

    def happened(self, what: str, replica: int) -> None:
        say(("happened", (what, replica)))

    def finished(self, result: RunResult, folder: RunFolder) -> None:
        say(("finished", (result, folder)))

    def ended(self) -> None:
        say(("ended", ()))


def hearing(listener: Listener) -> Callable[[tuple[str, tuple[Any, ...]]], None]:
    """What makes `listener` hear what a `Relayed` one is told."""

    def heard(word: tuple[str, tuple[Any, ...]]) -> None:
        name, values = word
        getattr(listener, name)(*values)

    return heard
