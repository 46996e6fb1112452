"""Folders of runs and comparisons as commands leave them, made in milliseconds: the numbers are formulas, not runs."""

import json
from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any

import yaml

from shoal.comparison import Cell, CellState, Comparison
from shoal.outline import Outline, OutlineEdge, OutlineStage
from shoal.result import BytesPerStep, ClassScore, ExchangeReport, ReplicaReport, RunResult, Staleness, versions
from shoal.timeline import Slice, Trace

CLASSES = ("cat", "dog", "<b>bird</b>")


def outline(plan: str, cut: str, *, predicted: float | None = 0.010) -> Outline:
    share = None if predicted is None else predicted / 4
    stage = {"compute_seconds": share, "communication_seconds": share}
    return Outline(
        plan=plan,
        ranks=2,
        stages=(
            OutlineStage(name="x", operators=(), shape=(8, 1, 28, 28), cut=None, reads=()),
            OutlineStage(
                name="conv", operators=("conv2d", "relu"), shape=(8, 6, 28, 28), cut="n2", reads=("x",),
                parameters=156, gradient_bytes=1248, **stage,
            ),
            OutlineStage(
                name="fc", operators=("linear",), shape=(8, 10), cut=cut, reads=("conv",), parameters=47_050,
                gradient_bytes=376_400 if cut == "n2" else 0, **stage,
            ),
        ),
        edges=() if cut == "n2" else (OutlineEdge(source="conv", reader="fc", bytes=60_000),),
        step_seconds=predicted,
    )  # fmt: skip


def trace(step: float = 0.010, *, steps: int = 3) -> Trace:
    slices = []
    for number in range(steps):
        begin = number * step
        for rank in (0, 1):
            ends = [begin + step * part for part in (0.0, 0.3, 0.6 + 0.2 * rank, 0.9, 1.0)]
            kinds = ("forward", "backward", "wait", "update")
            slices.append(Slice("step", rank, f"step {number}", begin, ends[-1], "steps", number))
            for kind, start, end in zip(kinds, ends, ends[1:], strict=False):
                slices.append(Slice(kind, rank, "conv", start, end, "compute", number))  # type: ignore[arg-type]
            slices.append(Slice("gradients", rank, "bucket 0", ends[1], ends[3], "network", number, 1024))
    return Trace("made up", "measured", ("rank 0", "rank 1"), tuple(slices))


def write_run(
    folder: Path,
    *,
    strategy: str = "data",
    seed: int = 0,
    pace: float = 100.0,
    steps: int = 60,
    every: int = 10,
    accuracy: float = 0.97,
    finished: bool = True,
    replicas: int = 1,
    cut: str | None = None,
    predicted: float | None = None,
    counted: int | None = 376_400,
    traced: bool = False,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A run that gets nearer to `accuracy` with every step, `pace` steps per second."""
    folder.mkdir(parents=True)
    config = {
        "model": "lenet5", "data": "digits", "batch": 64, "seed": seed, "workers": 2, "plan": "data",
        "exchange": "downpour" if replicas > 1 else None, "replicas": replicas, **(settings or {}),
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines: list[dict[str, Any]] = []
    if replicas > 1:
        lines += [{"event": "joined", "replica": r, "step": 0, "wall_seconds": 0.0} for r in range(replicas)]
    for step in range(every, steps + 1, every):
        seconds = step / pace
        loss = 2.3 * exp(-step / 20) + 0.01 * seed
        line = {
            "event": "steps", "epoch": 1, "step": step, "samples": 64 * step, "loss": loss, "lr": 0.1,
            "samples_per_sec": 64 * pace, "step_time_ms": 1000 / pace,
        }  # fmt: skip
        lines.append(line if replicas == 1 else {**line, "spread": 0.02 * exp(-step / 30)})
        reached = accuracy * (1 - exp(-step / 12)) - 0.002 * seed
        lines.append(
            {
                "event": "test", "epoch": 1, "step": step, "samples": 64 * step, "test_loss": loss + 0.1,
                "test_accuracy": reached, "train_seconds": seconds, "wall_seconds": 1.2 * seconds,
            }
        )  # fmt: skip
    if replicas > 1:
        lines.append({"event": "lost", "replica": 1, "step": steps // 2, "wall_seconds": steps / 2 / pace})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if cut is not None:
        outline(strategy, cut, predicted=predicted).save(folder / "outline.json")
    if traced:
        trace(1 / pace).save(folder / "trace.json")
    if finished:
        result = result_of(
            strategy=strategy, seed=seed, pace=pace, steps=steps, accuracy=reached, replicas=replicas,
            predicted=predicted, counted=counted,
        )  # fmt: skip
        (folder / "result.json").write_text(result.to_json())
    return folder


def result_of(
    *,
    strategy: str = "data",
    seed: int = 0,
    pace: float = 100.0,
    steps: int = 60,
    accuracy: float = 0.95,
    replicas: int = 1,
    predicted: float | None = None,
    counted: int | None = 376_400,
) -> RunResult:
    exchanged = ExchangeReport(
        options={},
        servers="processes",
        replicas={
            number: ReplicaReport(
                steps=steps // replicas, updates=steps // replicas, dropped=0, wait_seconds=0.38 * steps / pace,
                train_seconds=steps / pace, sent_bytes=1000, received_bytes=1000,
            )
            for number in range(replicas)
        },
        repeated=0,
        spread=0.02,
        events=[{"what": "lost", "who": 1, "when": 0.3}],
    )  # fmt: skip
    return RunResult(
        model="lenet5", data="digits", plan=strategy, plan_in_words="every layer by sample (n2)",
        exchange="downpour" if replicas > 1 else "none", workers=2, replicas=replicas, seed=seed, epochs=1, steps=steps,
        samples=64 * steps, final_loss=0.05, test_loss=0.15, test_accuracy=accuracy, test_iou=None,
        per_class={name: ClassScore(samples=100, accuracy=0.9 + 0.03 * n) for n, name in enumerate(CLASSES)},
        confusion=[[90, 6, 4], [3, 93, 4], [2, 2, 96]], step_seconds_median=1 / pace, step_seconds_predicted=predicted,
        samples_per_second=64 * pace, bytes_per_step=BytesPerStep(predicted=counted, counted=counted),
        peak_memory_bytes=[300 << 20, 310 << 20],
        staleness=Staleness(mean=0.9, max=3, histogram={0: 20, 1: 30, 2: 8, 3: 2}) if replicas > 1 else None,
        exchanged=exchanged if replicas > 1 else None, wall_seconds=1.2 * steps / pace, parameters=47_206, batch=64,
        threads=1, device="cpu", origin="comes with the package", versions=versions(),
    )  # fmt: skip


def write_comparison(folder: Path, *, seeds: Sequence[int] = (0, 1), steps: int = 60, every: int = 10) -> Path:
    """`owt` before `data` before `ddp`, `downpour` with replicas, one that failed and one that has not begun."""
    folder.mkdir(parents=True)
    cells: list[Cell] = []

    def add(strategy: str, seed: int, **how: Any) -> None:
        name = f"{strategy.replace(' ', '')}-{seed}"
        if how:
            pace = how.pop("pace") * (1 - 0.03 * seed)
            write_run(folder / name, strategy=strategy, seed=seed, steps=steps, every=every, pace=pace, **how)
        begun: CellState = "done" if how else "waiting"
        cells.append(Cell(strategy=strategy, settings={"seed": seed}, folder=name, state=begun))

    for seed in seeds:
        add("owt", seed, pace=180.0, cut="c2", predicted=0.0055, counted=60_000, traced=seed == 0)
        add("data", seed, pace=100.0, cut="n2", predicted=0.0104, counted=376_400)
        add("ddp", seed, pace=90.0, counted=None)
        add("downpour", seed, pace=120.0, replicas=2, accuracy=0.95)
    cells.append(
        Cell(strategy="spatial", settings={"seed": 0}, folder="s-0", state="failed", why="rank 1 <b>died</b>.")
    )
    add("local", 0)
    turns = {
        name: tuple(base * (1 + 0.02 * ((7 * n) % 5 - 2)) for n in range(8))
        for name, base in (("owt", 0.0056), ("data", 0.0101), ("ddp", 0.0112))
    }
    compared = Comparison(
        command="shoal compare --plans data,owt --seeds 2 --out cmp",
        cells=tuple(cells),
        step_seconds=turns,
        rates={"data": {"0.05": 0.93, "0.1": 0.95}, "owt": {"0.05": 0.92, "0.1": 0.96}},
    )
    compared.save(folder)
    return folder
