"""Paper: what a publication reports, where each of its numbers is from, and what would have to be simulated beside it.

Frozen values only; `shoal/papers/` has one file of them for every paper, and `shoal/repeating/` answers what they ask.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from shoal.cluster import Cluster


class Mark(StrEnum):
    """Where a number is from. Every number that is shown has one."""

    PAPER = "paper"
    """Read in the paper or its abstract."""
    SECOND_HAND = "second-hand"
    """Read where others quote it, or its authors elsewhere."""
    RECALLED = "recalled"
    """From memory: nobody here could read it again. Never to be taken for the paper's."""
    ASSUMED = "assumed"
    """Ours, in place of what nobody could read."""
    DERIVED = "derived"
    """Our arithmetic on numbers that are the paper's."""
    SIMULATED = "simulated"
    """From data sheets, by Shoal's simulator."""
    MEASURED = "measured"
    """On this machine, now."""


@dataclass(frozen=True)
class Number:
    """One cell of a table, with its origin."""

    text: str
    """As it is shown; a range or a word where the paper has no more."""
    mark: Mark
    source: str
    value: float | None = None


@dataclass(frozen=True)
class Missing:
    """A cell without a number, and why."""

    why: str


@dataclass(frozen=True)
class Way:
    """What is taken for granted about a step. As the engine works, unless said otherwise."""

    overlap: bool = True
    """Played in time; else all tasks are added up, none behind another, and the search minimises that sum."""
    servers: bool = False
    """Gradients by a server for each layer instead of the quickest sum. Without overlap only."""
    equal: bool = False
    """Only cuts into equal parts, along samples, channels, height and width. Without overlap only."""
    one_by_one: bool = False
    """Messages between two layers one after the other. Without overlap only."""

    def __post_init__(self) -> None:
        if self.overlap and (self.servers or self.equal or self.one_by_one):
            raise ValueError("servers, equal cuts and messages one by one are added up, not played: set overlap=False")


@dataclass(frozen=True)
class Step:
    """One training step of a network under a plan on a cluster."""

    network: str
    """Of the zoo, with its published input and classes."""
    ranks: int
    plan: str
    """A strategy's name, or `layer-wise`: the search."""
    each: int
    """Samples per device; the batch grows with the devices."""
    cluster: str | Cluster
    batch: int | None = None
    """Samples of all devices together, where that stays as devices are added."""
    way: Way = Way()
    bandwidth: float = 1.0
    """A factor on all links."""
    fitted: bool = False
    """With the preset's own efficiency, which may be fitted to the paper, instead of the one that all papers share."""
    pins: tuple[tuple[str, str], ...] = ()
    """(layers, cut) that the search has to take."""

    @property
    def samples(self) -> int:
        """Of all devices together."""
        return self.batch or self.each * self.ranks


@dataclass(frozen=True)
class Replicas:
    """Workers that push to parameter servers; each works on its own batch."""

    step: Step
    """Of one worker, on all of its devices."""
    workers: int
    bandwidth: str
    """Of every worker's and every server's card, such as `10Gbit/s`."""
    servers: int = 1
    every: int = 1
    together: bool = False
    """Whether the servers wait for all workers."""
    pushed: float = 1.0
    """Bytes of a push, as a part of the parameters' bytes."""
    latency: float = 30e-6
    jitter: float = 0.1
    """Of a worker's step, as a part of it; assumed. Without any, workers would push at the same moments for ever."""


Case = Step | Replicas


@dataclass(frozen=True)
class Rate:
    """Samples per second of the fastest of some cases, over that of the fastest of others; divided by `per`."""

    of: tuple[Case, ...]
    over: tuple[Case, ...]
    per: int = 1


@dataclass(frozen=True)
class Seconds:
    """Of one step."""

    of: Step


@dataclass(frozen=True)
class Kernels:
    """Seconds that some layers compute on the busiest device, forward and backward."""

    of: Step
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Sent:
    """Bytes that all devices send in one step; with `less_than`, how many times as many that case sends."""

    of: Step
    less_than: Step | None = None


@dataclass(frozen=True)
class Staleness:
    """Updates by others that a push has not seen, in the mean."""

    of: Replicas


@dataclass(frozen=True)
class Cuts:
    """How a plan cuts some layers, by patterns of their names."""

    of: Step
    layers: tuple[str, ...]


@dataclass(frozen=True)
class SearchTime:
    """Seconds of a whole search on this machine: tables, elimination and playing. Measured, so only when asked for."""

    of: Step


Asked = Rate | Seconds | Kernels | Sent | Staleness | Cuts | SearchTime
Cell = Number | Missing | Asked


@dataclass(frozen=True)
class Line:
    """A row."""

    label: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Question:
    """A table of the paper, and what is to stand beside its numbers."""

    title: str
    headings: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wrong = [line.label for line in self.lines if len(line.cells) != len(self.headings)]
        if wrong:
            raise ValueError(f"table {self.title!r}: {wrong} have not {len(self.headings)} cells")


@dataclass(frozen=True)
class Setting:
    """What was trained, and how: a fact that the simulation rests on."""

    what: str
    value: Number


@dataclass(frozen=True)
class Paper:
    """One publication."""

    name: str
    title: str
    authors: str
    year: int
    where: str
    read: str
    """How much of it could be read."""
    settings: tuple[Setting, ...]
    questions: tuple[Question, ...]
    notes: tuple[str, ...] = ()

    def asked(self) -> Iterator[Asked]:
        """All that has to be answered."""
        for question in self.questions:
            for line in question.lines:
                yield from (cell for cell in line.cells if not isinstance(cell, Number | Missing))
