"""Folders of runs and of comparisons, read into values. What is missing, unfinished or damaged is named, never raised.

Only a path that holds neither a run nor a comparison is an `InputError`: somebody typed it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import yaml
from pydantic import ValidationError

from shoal import comparison
from shoal.comparison import Comparison
from shoal.errors import InputError
from shoal.outline import Outline
from shoal.result import RunResult
from shoal.timeline import Trace

State = Literal["finished", "unfinished", "failed", "waiting", "unreadable"]
RESULT, METRICS, CONFIG, OUTLINE, TRACE, PREDICTED_TRACE = (
    "result.json", "metrics.jsonl", "config.yaml", "outline.json", "trace.json", "predicted_trace.json",
)  # fmt: skip
_MARKS = (RESULT, METRICS, CONFIG)
"""A folder with one of these holds a run."""
_LINES = frozenset({"steps", "test", "warning"})
"""Events of metrics.jsonl that are not about who came and went."""
Read = TypeVar("Read")
Line = Mapping[str, Any]


@dataclass(frozen=True)
class TestPoint:
    """One test of a run."""

    __test__ = False  # no test of ours, whatever its name begins with

    step: int
    samples: int
    seconds: float
    """Of training until then, or since the first step: see `RunRecord.clock`."""
    accuracy: float
    loss: float
    iou: float | None = None


@dataclass(frozen=True)
class StepPoint:
    """Some steps of a run together."""

    step: int
    """The last of them."""
    samples: int
    seconds: float
    """As of `TestPoint`; between two tests as far as the steps are."""
    loss: float | None
    samples_per_second: float
    spread: float | None = None
    """Between replicas, where it was measured."""


@dataclass(frozen=True)
class Happening:
    """A replica or a server that joined, was lost, froze, came back or left."""

    what: str
    who: str
    seconds: float


@dataclass(frozen=True)
class RunRecord:
    """One run, as far as its folder tells."""

    name: str
    folder: Path
    state: State
    why: str = ""
    """Of a run that is not finished: what is known."""
    problems: tuple[str, ...] = ()
    """Files that could not be read, and why."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`config.yaml`."""
    result: RunResult | None = None
    steps: tuple[StepPoint, ...] = ()
    tests: tuple[TestPoint, ...] = ()
    happenings: tuple[Happening, ...] = ()
    warnings: tuple[str, ...] = ()
    clock: Literal["training", "wall"] = "wall"
    """What the seconds of its points count: steps alone, or tests too."""
    outline: Outline | None = None
    trace: Trace | None = None
    predicted_trace: Trace | None = None

    @property
    def seed(self) -> int | None:
        """As it was given."""
        seed = self.settings.get("seed", None if self.result is None else self.result.seed)
        return seed if isinstance(seed, int) else None


@dataclass(frozen=True)
class StudyRun:
    """A run under the name of its strategy, the same for all its seeds."""

    strategy: str
    run: RunRecord


@dataclass(frozen=True)
class Study:
    """What a page is about: one run, or several beside each other."""

    title: str
    runs: tuple[StudyRun, ...]
    command: str | None = None
    """What to type to repeat it; None where each run is repeated for itself."""
    target: float | None = None
    """The accuracy that was asked for."""
    baseline: str | None = None
    """The strategy beside which speedup stands."""
    turns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By strategy: seconds of a step in each round, timed in turns."""
    not_timed: Mapping[str, str] = field(default_factory=dict)
    """By strategy: why not."""
    rates: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """By strategy: accuracy by rate, where a rate was searched."""
    problems: tuple[str, ...] = ()

    @property
    def strategies(self) -> tuple[str, ...]:
        """In the order in which they were asked for."""
        return tuple(dict.fromkeys(entry.strategy for entry in self.runs))

    @property
    def alone(self) -> RunRecord | None:
        """The run, where it is one."""
        return self.runs[0].run if len(self.runs) == 1 else None

    def of(self, strategy: str) -> list[RunRecord]:
        """All its runs, whatever became of them."""
        return [entry.run for entry in self.runs if entry.strategy == strategy]


# Folders


def read_study(folders: Sequence[Path]) -> Study:
    """One folder of a run, of a comparison or of several runs; or several folders of runs."""
    if len(folders) > 1:
        return _beside([read_run(folder) for folder in folders], title=" and ".join(path.name for path in folders[:4]))
    (folder,) = folders
    if (folder / comparison.FILE).exists():
        return _compared(folder)
    if _holds_run(folder):
        run = read_run(folder)
        return Study(title=run.name, runs=(StudyRun(_label(run), run),))
    inside = sorted(path for path in folder.iterdir() if _holds_run(path)) if folder.is_dir() else []
    if not inside:
        raise InputError(
            f"no run lies in {str(folder)!r}.",
            "Give the --out folder of `shoal train` or `shoal compare`, or a folder of such folders.",
        )
    return _beside([read_run(path) for path in inside], title=folder.resolve().name)


def _holds_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def _compared(folder: Path) -> Study:
    compared = Comparison.load(folder)
    runs = []
    for cell in compared.cells:
        path = folder / cell.folder
        run = read_run(path) if _holds_run(path) else RunRecord(Path(cell.folder).name, path, "waiting")
        if cell.state == "failed":
            run = replace(run, state="failed", why=cell.why or "it gave no reason")
        elif cell.state == "waiting" and run.state != "finished":
            run = replace(run, state="waiting", why="it had not begun when this page was made")
        runs.append(StudyRun(cell.strategy, replace(run, settings={**cell.settings, **run.settings})))
    return Study(
        title=folder.resolve().name,
        runs=tuple(runs),
        command=compared.command,
        target=compared.target,
        baseline=compared.baseline,
        turns=compared.step_seconds,
        not_timed=compared.left_out,
        rates=compared.rates,
    )


def _beside(runs: Sequence[RunRecord], title: str) -> Study:
    """Runs that nobody compared until now: those that differ in their seeds alone are of one strategy."""
    settings = [{k: v for k, v in run.settings.items() if k not in ("seed", "out")} for run in runs]
    labels = [_label(run) for run in runs]
    named = []
    for run, own, label in zip(runs, settings, labels, strict=True):
        alike = all(other == own for other, name in zip(settings, labels, strict=True) if name == label)
        named.append(StudyRun(label if alike else run.name, run))
    return Study(title=title, runs=tuple(named))


def _label(run: RunRecord) -> str:
    """What people call its strategy."""
    result, settings = run.result, run.settings
    workers = result.workers if result else settings.get("workers", 1)
    replicas = result.replicas if result else settings.get("replicas", 1)
    plan = str(settings.get("plan") or (result.plan if result else "data"))  # `auto` by its name, whatever it chose
    plan = Path(plan).stem if plan.endswith(".json") else plan
    exchange = result.exchange if result else settings.get("exchange")
    if exchange in (None, "none"):
        return plan if workers != 1 else "one worker"
    return f"{plan} + {exchange}" if workers != replicas else str(exchange)


# One run


def read_run(folder: Path) -> RunRecord:
    """A folder of a run; what it lacks or what cannot be read of it is told in the record."""
    if not _holds_run(folder):
        raise InputError(f"no run lies in {str(folder)!r}.", "Give the --out folder of `shoal train`.")
    problems: list[str] = []

    def read(name: str, how: Callable[[Path], Read]) -> Read | None:
        path = folder / name
        if not path.exists():
            return None
        try:
            return how(path)
        except (InputError, OSError, ValueError, yaml.YAMLError) as error:
            first = str(error.problem if isinstance(error, InputError) else error).splitlines() or [""]
            problems.append(f"{name} of {folder.name} cannot be read: {first[0]}".rstrip(".") + ".")
            return None

    result = read(RESULT, _result)
    settings = read(CONFIG, _settings) or {}
    lines = read(METRICS, lambda path: _lines(path, problems)) or []
    steps, tests, clock = _points(lines, settings, result)
    state: State = "finished" if result is not None else "unreadable" if (folder / RESULT).exists() else "unfinished"
    why = ""
    if state == "unfinished":
        done = max([*(point.step for point in steps), *(point.step for point in tests)], default=0)
        why = f"it has no {RESULT} yet: it goes on, or was stopped, after step {done}" if done else "no step is logged"
    elif state == "unreadable":
        why = f"its {RESULT} cannot be read"
    return RunRecord(
        name=folder.resolve().name,
        folder=folder,
        state=state,
        why=why,
        settings=settings,
        result=result,
        steps=steps,
        tests=tests,
        clock=clock,
        happenings=tuple(_happenings(lines)),
        warnings=tuple(str(line["text"]) for line in lines if line["event"] == "warning" and "text" in line),
        outline=read(OUTLINE, Outline.load),
        trace=read(TRACE, Trace.load),
        predicted_trace=read(PREDICTED_TRACE, Trace.load),
        problems=tuple(problems),
    )


def _result(path: Path) -> RunResult:
    try:
        return RunResult.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _settings(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it does not hold settings")  # noqa: TRY004  (of the file, not of a caller)
    return content


def _lines(path: Path, problems: list[str]) -> list[Line]:
    """The lines that are whole; of a run that goes on the last may not be."""
    good: list[Line] = []
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    wrong = 0
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            wrong += 1
            continue
        if isinstance(line, dict) and isinstance(line.get("event"), str):
            good.append(line)
        else:
            wrong += 1
    if wrong:
        lines = f"{wrong} of {len(texts)} lines are" if wrong > 1 else "1 line is"
        problems.append(f"{METRICS} of {path.parent.name}: {lines} not whole and left out.")
    return good


def _points(
    lines: Sequence[Line], settings: Mapping[str, Any], result: RunResult | None
) -> tuple[tuple[StepPoint, ...], tuple[TestPoint, ...], Literal["training", "wall"]]:
    batch = _samples_per_step(settings, result)
    tested = [line for line in lines if line["event"] == "test" and _has(line, "step", "test_accuracy", "test_loss")]
    clock: Literal["training", "wall"] = (
        "training" if tested and all(_has(line, "train_seconds") for line in tested) else "wall"
    )
    key = "train_seconds" if clock == "training" else "wall_seconds"
    tests = tuple(
        TestPoint(
            step=int(line["step"]),
            samples=int(line.get("samples", line["step"] * batch)),
            seconds=float(line[key]),
            accuracy=float(line["test_accuracy"]),
            loss=float(line["test_loss"]),
            iou=line.get("test_iou"),
        )
        for line in tested
        if _has(line, key)
    )
    logged = [line for line in lines if line["event"] == "steps" and _has(line, "step", "samples_per_sec")]
    seconds = _clock(tests, logged)
    steps = tuple(
        StepPoint(
            step=int(line["step"]),
            samples=int(line.get("samples", line["step"] * batch)),
            seconds=seconds(int(line["step"])),
            loss=line["loss"] if _has(line, "loss") else None,
            samples_per_second=float(line["samples_per_sec"]),
            spread=line["spread"] if _has(line, "spread") else None,
        )
        for line in logged
    )
    return steps, tests, clock


def _has(line: Line, *names: str) -> bool:
    """Whether these are numbers there."""
    return all(isinstance(line.get(name), int | float) and not isinstance(line[name], bool) for name in names)


def _samples_per_step(settings: Mapping[str, Any], result: RunResult | None) -> float:
    if result is not None and result.steps:
        return result.samples / result.steps
    batch, accumulate = settings.get("batch", 1), settings.get("accumulate", 1)
    return batch * accumulate if isinstance(batch, int) and isinstance(accumulate, int) else 1


def _clock(tests: Sequence[TestPoint], logged: Sequence[Line]) -> Callable[[int], float]:
    """When a step was done: between two tests as far as it is between them; beyond them by the steps' own times."""
    known = [(0, 0.0), *((point.step, point.seconds) for point in tests)]
    for before, line in pairwise([{"step": 0}, *logged]):
        step, (last, seconds) = int(line["step"]), known[-1]
        if step > last and step > before["step"] and _has(line, "step_time_ms"):
            known.append((step, seconds + (step - max(last, int(before["step"]))) * line["step_time_ms"] / 1000))
    known.sort()
    steps, seconds_then = zip(*known, strict=True)
    return lambda step: float(np.interp(step, steps, seconds_then))


def _happenings(lines: Sequence[Line]) -> Iterator[Happening]:
    for line in lines:
        who = next((f"{kind} {line[kind]}" for kind in ("replica", "server") if kind in line), None)
        if line["event"] not in _LINES and who is not None and _has(line, "wall_seconds"):
            yield Happening(str(line["event"]).replace("_", " "), who, float(line["wall_seconds"]))
