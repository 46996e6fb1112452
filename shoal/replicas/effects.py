"""What the conductor wants done: it decides, others act."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.data import Position
from shoal.training.best import Best
from shoal.training.evaluate import Evaluation
from shoal.training.outcome import Measured


@dataclass(frozen=True)
class HowFar:
    """How far a run of replicas is, for a checkpoint; and what an earlier part of a resumed run did."""

    counted: int = 0
    """Batches that were trained on and counted."""
    again: tuple[int, ...] = ()
    """Numbers below the largest handed out that were not counted."""
    position: Position = field(default_factory=Position)
    wall_seconds: float = 0.0
    train_seconds: float = 0.0
    """In which some replica trained, without tests during which nobody did."""
    last_loss: float = float("nan")
    step_seconds: tuple[float, ...] = ()
    tested: int = 0
    """Steps up to which no test is due any more."""
    scores: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """What `Scores.saved` gave."""
    events: tuple[Mapping[str, Any], ...] = ()
    best: Best = field(default_factory=Best)


@dataclass(frozen=True)
class Log:
    """A line for `metrics.jsonl` and the listener."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class Mark:
    """The lines of metrics so far belong to what this replica saves."""

    replica: int


@dataclass(frozen=True)
class Stepped:
    """So many batches and whole epochs are done: for the listener."""

    steps: int
    epochs: int


@dataclass(frozen=True)
class EndServers:
    """Nobody can go on: replicas that wait for a server must not do so any longer."""


@dataclass(frozen=True)
class Told:
    """Something happened to a replica or a server: for the listener."""

    what: str
    who: int


@dataclass(frozen=True)
class Rest:
    """A replica has nothing to do, so that no round waits for it; or it has something to do again."""

    replica: int
    resting: bool


@dataclass(frozen=True)
class Suspect:
    """A replica gives signs of life but makes no progress: treat it as frozen; or no longer."""

    replica: int
    hangs: bool


@dataclass(frozen=True)
class WritePlan:
    """How the layers are cut."""

    text: str


@dataclass(frozen=True)
class WriteOwn:
    """Save a replica's own state, for a checkpoint of this moment."""

    replica: int
    moment: int


@dataclass(frozen=True)
class WriteCheckpoint:
    """Save what the replica sent, as of this moment of the run."""

    replica: int
    how_far: HowFar
    own: Mapping[int, int] = field(default_factory=dict)
    """The moment of each replica's own state, where they have one."""


@dataclass(frozen=True)
class WriteBest:
    """The test was the best so far: write the weights that the replica sent."""


@dataclass(frozen=True)
class WriteResult:
    """The run is done: write the weights that the replica sent, and what the run did."""

    tested: Evaluation
    measured: Measured


@dataclass(frozen=True)
class WriteTrace:
    """Put what a replica recorded beside what the others did."""

    replica: int


ForFiles = WritePlan | WriteOwn | WriteBest | WriteCheckpoint | WriteResult | WriteTrace
"""Effects that may take long: they are carried out while others ask."""
Effect = Log | Mark | Stepped | Told | Rest | Suspect | EndServers | ForFiles
