"""What people read while a run starts and goes on: early, on whole lines, and within a screen."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from shoal.cli import progress, train
from shoal.config import TrainConfig
from shoal.partition import Cut
from shoal.plan import Plan
from shoal.training.listener import About
from shoal.training.run_folder import RunFolder

ABOUT = About(
    model="resnet18",
    parameters=11_173_962,
    data="pets32",
    train_samples=3_680,
    test_samples=3_669,
    classes=37,
    origin="/home/somebody/.local/share/shoal/pets32",
    epochs=20,
    steps_per_epoch=57,
    batch=64,
    workers=2,
    plan="auto-2",
    plan_in_words="60 layers by sample (n2), 1 by channel (c2)",
    searched=True,
    replicas=1,
    exchange="none",
    device="cpu",
    threads=1,
    timeout=120.0,
    survives=False,
    done=0,
)


def printed(*, terminal: bool) -> list[str]:
    file = io.StringIO()
    lines = progress._Lines(Console(file=file, width=80, force_terminal=terminal, color_system=None))
    lines.started(ABOUT, RunFolder(Path("runs/resnet18-pets32-20260131-120000")))
    return file.getvalue().splitlines()


def test_a_run_begins_with_whole_words_on_a_narrow_screen() -> None:
    on_screen, in_file = printed(terminal=True), printed(terminal=False)
    assert max(map(len, on_screen)) <= 80
    assert " ".join(on_screen).split() == " ".join(in_file).split()  # broken between words alone
    assert in_file[2] == "20 epochs of 57 steps, batch 64, 2 workers, plan auto, cpu, threads 1"


def test_what_auto_chose_is_told_before_the_first_step() -> None:
    assert printed(terminal=False)[3] == "plan auto chose 60 layers by sample (n2), 1 by channel (c2)"


def test_workers_that_take_their_time_to_start_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now, file = [0.0], io.StringIO()
    monkeypatch.setattr("shoal.cli.progress.time.monotonic", lambda: now[0])
    lines = progress._Lines(Console(file=file, width=80))
    lines.starting("have begun", 1, 64)  # too early to be worth a line
    for moment, by in ((4.0, 9), (5.0, 10), (8.0, 30), (20.0, 64)):
        now[0] = moment
        lines.starting("have begun", by, 64)
    told = [f"starting: {by} of 64 workers have begun" for by in (9, 30)]
    assert file.getvalue().splitlines() == told


def test_more_workers_than_cores_are_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "cores", lambda: 2)
    monkeypatch.setattr(train, "has_gpu_driver", lambda: False)
    assert "64 workers share 2 cores" in train.crowded(TrainConfig(workers=64))
    assert train.crowded(TrainConfig(workers=2)) == ""
    monkeypatch.setattr(train, "has_gpu_driver", lambda: True)
    assert train.crowded(TrainConfig(workers=64)) == ""
    assert "64 workers" in train.crowded(TrainConfig(workers=64, device="cpu"))


def test_a_plan_of_many_cuts_is_told_in_few_words() -> None:
    cuts = ["n4"] * 5 + ["c4"] * 3 + ["n2h2"] * 2 + ["1"] * 2 + ["k4", "w4"]
    plan = Plan(name="mine", ranks=4, layers=tuple((f"l{i}", Cut.parse(cut)) for i, cut in enumerate(cuts)))
    words = "5 layers by sample (n4), 3 by channel (c4), 2 by sample and height (n2h2), 2 whole, 2 otherwise"
    assert plan.in_words() == words
