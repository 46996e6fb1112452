"""`shoal train` on several workers: the same training, started in every way, stopped, resumed and killed."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from shoal.training.run_folder import RunFolder
from tests.cli.commands import begin, program
from tests.cli.conftest import Shoal
from tests.cli.test_train import WITH_DROPOUT, metrics_of, result_of, stop_during_training
from tests.replicas.worlds import free_port

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
    pytest.mark.timeout(400),  # every run loads torch three times, which a busy machine does slowly
]

WITHOUT_DROPOUT = WITH_DROPOUT.replace("nn.Dropout(), ", "")
NET = ["--model", "mine:net", "--batch", "8", "--log-every", "3", "--seed", "5", "--schedule", "constant"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_near(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=2e-3, atol=2e-4)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics_of(folder) if line["event"] == "steps"]


def timeless(folder: Path) -> list[dict[str, Any]]:
    times = ("samples_per_sec", "step_time_ms", "train_seconds", "wall_seconds")
    return [{k: v for k, v in line.items() if k not in times} for line in metrics_of(folder)]


def test_two_workers_train_as_one_does_and_either_goes_on_for_the_other(
    shoal: Shoal, tiny: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(WITHOUT_DROPOUT)
    settings = ["train", "--data", tiny, *NET, "--epochs", "2", "--augment", "flip"]
    for out, workers in (("one", "1"), ("two", "2")):
        run = shoal(*settings, "--workers", workers, "--threads", "1", "--out", out)
        assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("loading mine:net and the data set npz:tiny.npz ...\n")
    assert "2 workers, plan data" in run.stdout
    assert "data: every layer by sample (n2)" in run.stdout
    assert "sent per step" in run.stdout
    one, two = tmp_path / "one", tmp_path / "two"
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert_near(weights(one), weights(two))

    result = result_of(two)
    assert (result["workers"], result["plan"], len(result["peak_memory_bytes"])) == (2, "data", 2)
    assert result["plan_in_words"] == "every layer by sample (n2)"
    assert (result["steps"], result["samples"]) == (20, 160)
    assert result["bytes_per_step"]["predicted"] == result["bytes_per_step"]["counted"] > 0
    assert result["test_loss"] == pytest.approx(result_of(one)["test_loss"], rel=1e-4)
    plan = json.loads((two / "plan.json").read_text())
    assert (plan["ranks"], plan["layers"]["0"]) == (2, "n2")

    shutil.copytree(two, tmp_path / "then_one")
    for out, workers in (("one", "1"), ("then_one", "1")):
        run = shoal("train", "--resume", out, "--workers", workers, "--epochs", "3")
        assert run.returncode == 0, run.stderr
    assert_near(weights(one), weights(tmp_path / "then_one"))
    assert result_of(tmp_path / "then_one")["workers"] == 1
    assert result_of(tmp_path / "then_one")["final_loss"] == pytest.approx(result_of(one)["final_loss"], rel=1e-3)


def test_stopped_and_resumed_equals_never_stopped(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WITH_DROPOUT)
    settings = ["train", "--data", tiny, *NET, "--epochs", "24", "--eval-every", "12", "--checkpoint-every", "100"]
    settings += ["--workers", "2", "--augment", "flip,shift:1"]
    assert shoal(*settings, "--out", "whole").returncode == 0
    process = begin(tmp_path, "shoal", *settings, "--out", "parts")
    try:
        stop_during_training(process, tmp_path / "parts" / "metrics.jsonl", signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "shoal train --resume parts" in stderr
    assert stderr.count("shoal: ") == 1
    assert "Traceback" not in stderr
    steps = RunFolder(tmp_path / "parts").checkpoints.all()[-1].steps
    assert 0 < steps < 240  # the signal came in the middle, or this test shows nothing
    shutil.copytree(tmp_path / "parts", tmp_path / "cut")

    run = shoal("train", "--resume", "parts")
    assert run.returncode == 0, run.stderr
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")
    sent = result_of(tmp_path / "parts")["bytes_per_step"]
    assert sent == result_of(tmp_path / "whole")["bytes_per_step"]

    run = shoal("train", "--resume", "cut", "--plan", "model", "--recompute")
    assert run.returncode == 0, run.stderr
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=2e-2, abs=2e-3)
    sent = result_of(tmp_path / "cut")["bytes_per_step"]
    assert sent["predicted"] == sent["counted"] != result_of(tmp_path / "whole")["bytes_per_step"]["counted"]


def test_a_plan_that_recomputes_does_so_untold_and_a_run_goes_on_with_it(
    shoal: Shoal, tiny: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(WITHOUT_DROPOUT)
    layers = {"schema": "shoal.plan/1", "name": "again", "ranks": 2, "layers": {"*": "n2", "0": "h2", "1": "h2"}}
    (tmp_path / "again.json").write_text(json.dumps({**layers, "recompute": True}))
    settings = ["train", "--data", tiny, *NET, "--workers", "2", "--plan", "again.json"]
    ways: dict[str, list[str]] = {"again": [], "told": ["--recompute"], "kept": ["--no-recompute"]}
    for out, flags in ways.items():
        run = shoal(*settings, "--epochs", "2", *flags, "--out", out)
        assert run.returncode == 0, run.stderr
        assert ("it is laid without that, as asked" in run.stdout + run.stderr) == (out == "kept")
    again, told, kept = (result_of(tmp_path / out) for out in ("again", "told", "kept"))
    assert again["plan_in_words"].endswith("activations are recomputed")
    assert "recomputed" not in kept["plan_in_words"]
    assert again["bytes_per_step"] == told["bytes_per_step"]
    assert again["bytes_per_step"]["predicted"] == again["bytes_per_step"]["counted"]
    assert again["bytes_per_step"]["counted"] > kept["bytes_per_step"]["counted"], "halos travel again"
    assert "recompute: true" in (tmp_path / "again" / "config.yaml").read_text(), "what was really used"
    assert json.loads((tmp_path / "again" / "plan.json").read_text())["recompute"] is True
    assert_near(weights(tmp_path / "again"), weights(tmp_path / "kept"))

    run = shoal("train", "--resume", "again", "--epochs", "3")
    assert run.returncode == 0, run.stderr
    assert result_of(tmp_path / "again")["bytes_per_step"] == told["bytes_per_step"]
    run = shoal("train", "--resume", "told", "--epochs", "3", "--no-recompute")
    assert run.returncode == 0, run.stderr
    assert result_of(tmp_path / "told")["bytes_per_step"] == kept["bytes_per_step"]


def test_ranks_read_windows_of_large_images(shoal: Shoal, tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (15, 32, 32), dtype=np.uint8)
    np.savez(tmp_path / "cells.npz", x=x, y=(x > 128).astype(np.uint8))
    settings = ["train", "--data", "npz:cells.npz", "--model", "unet", "--model-options", "width=4,depth=2"]
    settings += ["--batch", "2", "--epochs", "1", "--log-every", "1", "--lr", "0.01", "--augment", "vflip,crop:16"]
    for out, workers in (("one", ["--threads", "1"]), ("two", ["--workers", "2", "--plan", "spatial"])):
        run = shoal(*settings, *workers, "--out", out)
        assert run.returncode == 0, run.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    one, two = result_of(tmp_path / "one"), result_of(tmp_path / "two")
    assert two["test_iou"] == pytest.approx(one["test_iou"], abs=5e-3)
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-3)
    assert two["bytes_per_step"]["predicted"] == two["bytes_per_step"]["counted"] > 0


def test_a_world_of_others_and_more_ranks_than_samples(tiny: str, tmp_path: Path) -> None:
    """With the variables of torchrun; that itself starts the ranks of `tests/cli/test_kills.py`."""
    arguments = ["train", "--data", tiny, "--epochs", "1", "--batch", "2", "--log-every", "10", "--out", "o"]
    world = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [begin(tmp_path, "shoal", *arguments, RANK=rank, LOCAL_RANK=rank, **world) for rank in "012"]
    told = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], told
    result = result_of(tmp_path / "o")
    assert (result["workers"], result["steps"]) == (3, 40)
    assert (result["samples"], result["samples_left_out"]) == (80, 0)
    assert [out.count("test accuracy") for out, _ in told] == [2, 0, 0]  # rank 0 alone shows the run


@pytest.mark.parametrize(
    "kind",
    [
        ["--workers", "3"],
        pytest.param(["--workers", "2", "--plan", "spatial"], marks=pytest.mark.thorough),
        pytest.param(["--replicas", "2", "--exchange", "downpour", "--batch", "26"], marks=pytest.mark.thorough),
        pytest.param(["--replicas", "2", "--exchange", "allreduce", "--batch", "26"], marks=pytest.mark.thorough),
    ],
    ids=lambda kind: kind[-1],
)
def test_every_sample_is_accounted_for_where_nothing_divides_evenly(
    kind: list[str], shoal: Shoal, tiny: str, tmp_path: Path
) -> None:
    """80 samples in steps of 25 or 26, 20 to test, on ranks with unequal shares."""
    (tmp_path / "mine.py").write_text(WITHOUT_DROPOUT)
    run = shoal("train", "--data", tiny, *NET, "--batch", "25", *kind, "--epochs", "2", "--out", "o")
    assert run.returncode == 0, run.stderr
    result = result_of(tmp_path / "o")
    step = result["batch"]
    assert (result["samples"], result["samples_left_out"]) == (2 * 3 * step, 2 * (80 - 3 * step))
    assert result["samples"] + result["samples_left_out"] == 2 * 80
    assert sum(score["samples"] for score in result["per_class"].values()) == 20


def test_srun(tiny: str, tmp_path: Path) -> None:
    arguments = ["train", "--data", tiny, "--epochs", "1", "--batch", "16", "--out", "o", "--timeout", "60"]
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "here"}
    ranks = [
        begin(tmp_path, "shoal", *arguments, **slurm, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert result_of(tmp_path / "o")["workers"] == 2
    assert told[1][0] == ""

    ranks = [
        begin(tmp_path, "shoal", *arguments, **slurm, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "already holds a run" in told[0][1]
    assert told[1][1] == ""  # once is enough


def test_workers_that_differ_from_the_world_are_refused(shoal: Shoal, tiny: str) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    run = shoal("train", "--data", tiny, "--workers", "3", **world)
    assert run.returncode == 2
    assert "workers = 3, but torchrun started 2 ranks" in run.stderr


def test_a_killed_worker_is_named_and_no_process_is_left(tiny: str, tmp_path: Path) -> None:
    process = program(
        tmp_path, "shoal", "train", "--data", tiny, "--workers", "2", "--batch", "8", "--epochs", "1000", "--out", "o"
    )
    try:
        metrics = tmp_path / "o" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.02)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks = sorted(
            (one for one in family if one.name().startswith("shoal rank")), key=lambda one: int(one.name().split()[-1])
        )
        assert len(ranks) == 2
        ranks[1].kill()
        start = time.monotonic()
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1, stderr
    assert stderr.startswith("shoal: rank 1 was killed by signal SIGKILL.")
    assert time.monotonic() - start < 20
    assert psutil.wait_procs(family, timeout=5)[1] == []


def test_a_wrong_plan_is_refused_before_any_rank_starts(shoal: Shoal, tiny: str) -> None:
    run = shoal("train", "--data", tiny, "--workers", "2", "--plan", "spacial")
    assert run.returncode == 2
    assert "Did you mean 'spatial'?" in run.stderr
    assert run.stdout.count("\n") == 1  # that it loads something, and no more


def test_a_plan_that_does_not_fit_is_told_once(shoal: Shoal, tiny: str, tmp_path: Path) -> None:
    plan = {"schema": "shoal.plan/1", "name": "mine", "ranks": 2, "layers": {"*": "n2", "nothing": "c2"}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run = shoal("train", "--data", tiny, "--workers", "2", "--plan", "plan.json", "--out", "o")
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("shoal: plan 'mine' names 'nothing', which matches no layer.")
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "o").exists()
