"""`shoal train` as people use it: what it prints, what it leaves, stopping and going on."""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from shoal import TrainConfig, train
from shoal.errors import StoppedError
from shoal.inference import METADATA, Inference
from shoal.running import resume
from shoal.training.evaluate import evaluate
from shoal.training.run_folder import RunFolder
from tests.cli.commands import Begun, begin
from tests.cli.conftest import Shoal

RESULT_FIELDS = (
    "schema model data plan exchange workers replicas seed epochs steps samples final_loss test_accuracy "
    "step_seconds_median samples_per_second bytes_per_step peak_memory_bytes staleness wall_seconds versions"
)


def result_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return content


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_files(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    run = shoal(
        "train",
        "--data",
        tiny,
        "--epochs",
        "9",
        "--batch",
        "16",
        "--log-every",
        "2",
        "--eval-every",
        "4",
        "--out",
        "out",
    )
    assert run.returncode == 0, run.stderr
    out = tmp_path / "out"
    names = {"result.json", "metrics.jsonl", "config.yaml", "plan.json", "checkpoints", "model.safetensors"}
    names |= {"inference.json", "best.safetensors"}
    assert {path.name for path in out.iterdir()} == names

    result = result_of(out)
    assert set(RESULT_FIELDS.split()) <= set(result)
    assert (result["steps"], result["samples"], result["epochs"]) == (45, 720, 9)
    assert result["bytes_per_step"] == {"predicted": 0, "counted": 0}
    assert result["test_accuracy"] > 0.5  # chance is 0.25
    assert json.loads((out / "plan.json").read_text())["layers"] == {"*": "1"}

    lines = metrics_of(out)
    assert [line["step"] for line in lines if line["event"] == "steps"][:6] == [2, 4, 5, 7, 9, 10]
    assert [line["epoch"] for line in lines if line["event"] == "test"] == [4, 8, 9]
    assert lines[-1]["test_accuracy"] == result["test_accuracy"]

    assert "test accuracy" in run.stdout
    assert "images/s" in run.stdout
    assert "out" in run.stdout.splitlines()[-1]
    with safe_open(out / "model.safetensors", "pt") as weights:
        text = weights.metadata()[METADATA]
    assert text == (out / "inference.json").read_text()
    known = Inference.from_json(text, source="")
    assert (known.model, known.input, known.classes) == ("lenet5", (1, 8, 8), ("0", "1", "2", "3"))


def test_same_seed_same_result_bit_for_bit(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    for out, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        run = shoal("train", "--data", tiny, "--epochs", "2", "--batch", "16", "--seed", seed, "--out", out)
        assert run.returncode == 0, run.stderr
    a, b, c = (load_file(tmp_path / out / "model.safetensors") for out in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)
    assert result_of(tmp_path / "a")["final_loss"] == result_of(tmp_path / "b")["final_loss"]


def when_tested(folder: Path) -> list[tuple[int, int]]:
    return [(line["epoch"], line["step"]) for line in metrics_of(folder) if line["event"] == "test"]


def test_tests_between_change_nothing_else(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    settings = ["--data", tiny, "--epochs", "4", "--batch", "16", "--eval-every", "3"]
    plain = shoal("train", *settings, "--out", "plain")
    often = shoal("train", *settings, "--eval-steps", "4", "--out", "often")
    assert (plain.returncode, often.returncode) == (0, 0), often.stderr
    a, b = (load_file(tmp_path / out / "model.safetensors") for out in ("plain", "often"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert when_tested(tmp_path / "plain") == [(3, 15), (4, 20)]
    assert when_tested(tmp_path / "often") == [(1, 4), (2, 8), (3, 12), (3, 15), (4, 16), (4, 20)]
    assert "epoch 1/4, step 4: test accuracy" in often.stdout  # no loss was logged yet
    assert "epoch 2/4, step 8: loss" in often.stdout
    assert "epoch 3/4: loss" in often.stdout


def test_a_test_that_a_stop_cut_short_is_made_when_the_run_goes_on(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the test after step 8, inside the second epoch."""
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"data": tiny, "epochs": 3, "batch": 16, "eval_steps": 4}
    train(TrainConfig(**settings, out=Path("whole")))
    made: list[object] = []

    def evaluate_twice(*arguments: object, **options: object) -> object:
        made.append(arguments)
        return None if len(made) == 3 else evaluate(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("shoal.training.loop.evaluate", evaluate_twice)
    with pytest.raises(StoppedError, match="after step 3 of 5"):
        train(TrainConfig(**settings, out=Path("parts")))
    resume(Path("parts"), {})
    assert when_tested(tmp_path / "parts") == when_tested(tmp_path / "whole")
    assert when_tested(tmp_path / "whole") == [(1, 4), (1, 5), (2, 8), (2, 10), (3, 12), (3, 15)]


def test_a_run_that_learns_nothing_is_told_of(shoal: Shoal, tiny: str) -> None:
    run = shoal("train", "--data", tiny, "--epochs", "2", "--batch", "16", "--lr", "1e-12", "--out", "run")
    assert run.returncode == 0, run.stderr
    assert "is that of guessing among 4 classes" in " ".join(run.stdout.split())


def test_training_from_python_leaves_torch_as_it_was(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    config = TrainConfig(data=tiny, epochs=1, batch=16, threads=threads + 1, out=Path("run"))
    assert train(config).steps == 5
    assert torch.get_num_threads() == threads
    assert sys.float_info.min / 2 > 0.0, "values near zero must not go to zero in the caller's own arithmetic"


def test_recipe_options_and_print_config(shoal: Shoal, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("epochs: 7\nlr: 5e-3\nmodel: alexnet\n")
    run = shoal("train", "recipe.yaml", "--epochs", "9", "--print-config")
    assert run.returncode == 0
    printed = yaml.safe_load(run.stdout)
    assert (printed["epochs"], printed["lr"], printed["model"]) == (9, 5e-3, "alexnet")
    (tmp_path / "again.yaml").write_text(run.stdout)
    assert shoal("train", "again.yaml", "--print-config").stdout == run.stdout


def test_own_model_from_the_working_folder(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(input, classes, width=5):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, classes))\n"
    )
    run = shoal(
        "train",
        "--model",
        "mine:net",
        "--model-options",
        "width=7",
        "--data",
        tiny,
        "--epochs",
        "1",
        "--out",
        "o",
    )
    assert run.returncode == 0, run.stderr
    assert result_of(tmp_path / "o")["parameters"] == 64 * 7 + 7 + 7 * 4 + 4


def test_default_folder_is_new_each_time(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    for _ in range(2):
        assert shoal("train", "--data", tiny, "--epochs", "1", "--batch", "40").returncode == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


LONG = [
    "--eval-every",
    "20",
    "--checkpoint-every",
    "100",
    "--batch",
    "8",
    "--log-every",
    "3",
    "--seed",
    "5",
    "--model",
    "mine:net",
]
WITH_DROPOUT = (
    "from torch import nn\n"
    "def net(classes):\n"
    "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), "
    "nn.Linear(144, classes))\n"
)


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_stopped_and_resumed_equals_never_stopped(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WITH_DROPOUT)
    settings = ["train", "--data", tiny, *LONG, "--epochs", "60", "--augment", "flip,shift:1"]
    assert shoal(*settings, "--out", "whole").returncode == 0

    process = begin(tmp_path, "shoal", *settings, "--out", "parts")
    try:
        stop_during_training(process, tmp_path / "parts" / "metrics.jsonl", signal.SIGINT)  # test_workers.py: SIGTERM
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "shoal train --resume parts" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "parts" / "result.json").exists()
    stopped_at = RunFolder(tmp_path / "parts").checkpoints.all()[-1].steps
    assert 0 < stopped_at < 600  # the signal came in the middle, or this test shows nothing
    metrics_of(tmp_path / "parts")  # whole lines only

    run = shoal("train", "--resume", "parts")
    assert run.returncode == 0, run.stderr
    whole, parts = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    timeless = [
        [
            {
                k: v
                for k, v in line.items()
                if k not in ("samples_per_sec", "step_time_ms", "train_seconds", "wall_seconds")
            }
            for line in metrics_of(tmp_path / out)
        ]
        for out in ("whole", "parts")
    ]
    assert timeless[0] == timeless[1]
    assert result_of(tmp_path / "whole")["final_loss"] == result_of(tmp_path / "parts")["final_loss"]


def stop_during_training(process: Begun, metrics: Path, number: signal.Signals) -> None:
    """Send the signal once the run has written some lines."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.stat().st_size > 2000:
            process.send_signal(number)
            return
        time.sleep(0.005)
    pytest.fail("the run ended before it could be stopped")


def test_resume_refuses_what_would_change_the_past_and_takes_more_epochs(
    shoal: Shoal, tiny: str, tmp_path: Path
) -> None:
    assert shoal("train", "--data", tiny, "--epochs", "1", "--batch", "16", "--out", "o").returncode == 0
    finished = shoal("train", "--resume", "o")
    assert finished.returncode == 2
    assert "--epochs" in finished.stderr
    changed = shoal("train", "--resume", "o", "--batch", "8", "--epochs", "2")
    assert changed.returncode == 2
    assert "batch = 16" in changed.stderr
    more = shoal("train", "--resume", "o", "--epochs", "3")
    assert more.returncode == 0, more.stderr
    assert result_of(tmp_path / "o")["epochs"] == 3
    assert [line["epoch"] for line in metrics_of(tmp_path / "o") if line["event"] == "test"] == [1, 2, 3]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    settings = ["train", "--data", tiny, "--epochs", "2", "--batch", "16"]
    assert shoal(*settings, "--out", "whole").returncode == 0
    assert shoal(*settings, "--out", "o").returncode == 0
    (tmp_path / "o" / "result.json").unlink()
    older, newer = RunFolder(tmp_path / "o").checkpoints.all()
    path = newer.path / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # one bit
    path.write_bytes(content)

    asked = shoal("train", "--resume", f"o/checkpoints/{newer.path.name}")
    assert asked.returncode == 2
    assert f"{newer.path.name}': optimizer.safetensors has another checksum" in asked.stderr
    run = shoal("train", "--resume", "o")
    assert run.returncode == 0, run.stderr
    warnings = [line["text"] for line in metrics_of(tmp_path / "o") if line["event"] == "warning"]
    (told,) = [text for text in warnings if "damaged" in text]
    assert f"{newer.path.name}' is damaged: optimizer.safetensors has another checksum" in told
    assert told.endswith(f"The run goes on from {older.path.name}.")
    whole, again = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "o"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)

    for checkpoint in RunFolder(tmp_path / "o").checkpoints.all():
        (checkpoint.path / "manifest.json").write_text("{")
    run = shoal("train", "--resume", "o", "--epochs", "3")
    assert run.returncode == 2
    assert "manifest.json cannot be read" in run.stderr
    assert "Traceback" not in run.stderr


def test_pickles_of_earlier_versions_are_refused_by_name(shoal_here: Shoal, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    torch.save({}, tmp_path / "old" / "checkpoint.pt")
    (tmp_path / "old" / "config.yaml").write_text("model: lenet5\n")
    for arguments in (["--resume", "old"], ["--resume", "auto", "--out", "old"]):
        run = shoal_here("train", *arguments)
        assert run.returncode == 2
        assert "checkpoint.pt there was written by an earlier version, as a pickle" in run.stderr


def test_auto_begins_a_run_goes_on_with_it_and_leaves_a_finished_one(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    def auto(epochs: str) -> str:
        run = shoal("train", "--data", tiny, "--batch", "16", "--out", "o", "--resume", "auto", "--epochs", epochs)
        assert run.returncode == 0, run.stderr
        return run.stdout

    auto("1")
    before = (tmp_path / "o" / "metrics.jsonl").read_bytes()
    assert "the run in o is finished" in auto("1")
    assert (tmp_path / "o" / "metrics.jsonl").read_bytes() == before
    assert "going on with the run in o" in auto("2")
    assert [line["epoch"] for line in metrics_of(tmp_path / "o") if line["event"] == "test"] == [1, 2]
    run = shoal("train", "--resume", "auto")
    assert (run.returncode, "--out DIR" in run.stderr) == (2, True)


@pytest.mark.parametrize("every", ["3steps", "0.0001min"])
def test_checkpoints_come_by_steps_and_by_the_clock_and_the_newest_are_kept(
    every: str, shoal: Shoal, tiny: str, tmp_path: Path
) -> None:
    settings = ["train", "--data", tiny, "--batch", "8", "--epochs", "2", "--checkpoint-every", every, "--keep", "4"]
    run = shoal(*settings, "--out", "o")
    assert run.returncode == 0, run.stderr
    kept = RunFolder(tmp_path / "o").checkpoints.all()
    assert [checkpoint.damage() for checkpoint in kept] == [None] * 4
    if every == "3steps":
        assert [checkpoint.path.name for checkpoint in kept] == [f"step-{n:08d}" for n in (12, 15, 18, 20)]
    whole = load_file(tmp_path / "o" / "model.safetensors")
    run = shoal("train", "--resume", f"o/checkpoints/{kept[0].path.name}")
    assert run.returncode == 0, run.stderr
    told = [line["text"] for line in metrics_of(tmp_path / "o") if line["event"] == "warning"]
    assert any(f"left-{kept[-1].path.name} is newer than where the run goes on from" in text for text in told)
    again = load_file(tmp_path / "o" / "model.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_a_folder_belongs_to_one_run_until_that_ends_however_it_does(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WITH_DROPOUT)
    settings = ["--data", tiny, *LONG, "--threads", "1", "--checkpoint-every", "9000", "--epochs", "9000"]
    metrics = tmp_path / "o" / "metrics.jsonl"

    def while_it_goes_on(begun: tuple[str, ...], tried: tuple[str, ...], number: signal.Signals) -> str:
        """What a second command says while a first uses the folder, which then gets a signal."""
        run = begin(tmp_path, "shoal", "train", *begun)
        try:
            before = metrics.stat().st_size if metrics.exists() else 0
            wait_until(lambda: metrics.exists() and metrics.stat().st_size > before + 2000)
            second = shoal("train", *tried)
            assert run.poll() is None
            run.send_signal(number)
            run.wait(60)
        finally:
            run.kill()
            run.wait()
        assert second.returncode == 2
        return second.stderr.replace(f"process {run.pid} on", "process P on")

    new = (*settings, "--out", "o")
    assert "--out 'o': another run is under way there (process P on" in while_it_goes_on(new, new, signal.SIGINT)
    resume = ("--resume", "o")
    message = while_it_goes_on(resume, resume, signal.SIGKILL)
    assert "--resume 'o': that run is still under way (process P on" in message
    saved = RunFolder(tmp_path / "o").checkpoints.all()[-1].state()
    (tmp_path / "o" / ".plan.json.1234.tmp").write_bytes(b"half")
    (tmp_path / "o" / "checkpoints" / ".save-3.1234.tmp").mkdir()
    (tmp_path / "o" / "checkpoints" / ".save-3.1234.tmp" / "model.safetensors").write_bytes(b"half")
    after = shoal("train", "--resume", "o", "--epochs", str(saved["progress"]["position"]["epoch"] + 1))
    assert after.returncode == 0, after.stderr
    assert not [path.name for path in (tmp_path / "o").rglob("*") if path.name.startswith(".")]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("exchange", "left"),
    [
        pytest.param([], None, id="gone"),
        pytest.param([], 100, id="shorter", marks=pytest.mark.thorough),
        pytest.param(["--exchange", "downpour"], None, id="gone, downpour", marks=pytest.mark.thorough),
        pytest.param(["--exchange", "downpour"], 100, id="shorter, downpour"),
    ],
)
def test_a_run_goes_on_without_lines_of_metrics_that_are_gone_and_says_so(
    shoal: Shoal, tiny: str, tmp_path: Path, exchange: list[str], left: int | None
) -> None:
    settings = ["--data", tiny, "--epochs", "1", "--batch", "16", "--log-every", "1", "--threads", "1", *exchange]
    assert shoal("train", *settings, "--out", "o").returncode == 0
    path = tmp_path / "o" / "metrics.jsonl"
    before = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(before[: len(before) - left])
    run = shoal("train", "--resume", "o", "--epochs", "2")
    assert run.returncode == 0, run.stderr
    assert "metrics.jsonl is not whole" in run.stdout
    lines = metrics_of(tmp_path / "o")  # whole lines only
    kept = [] if left is None else [json.loads(line) for line in before[: len(before) - left].splitlines()[:-1]]
    assert lines[: len(kept)] == kept
    warned = [line["text"] for line in lines if line["event"] == "warning"]
    assert any("lines about the first 5 steps are missing" in text for text in warned)
    assert [line["epoch"] for line in lines if line["event"] == "test"] == [2]
