"""A trained network tested on the test part of a data set: in this process, on ranks under any plan, or in a world.

The same numbers as in the run's `result.json` for the same data; under another plan or batch to rounding.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from shoal import data, planning
from shoal.config import EvaluateConfig, TrainConfig
from shoal.data import DataSet, Splits
from shoal.data.as_trained import as_trained
from shoal.errors import DataError
from shoal.inference import Inference
from shoal.launching import joined, run, surrounding
from shoal.machine import threads_each
from shoal.result import EvaluateResult, versions
from shoal.training.device import device_of_rank, kind_of_device
from shoal.training.evaluate import evaluate
from shoal.training.network import Network, on_one_device
from shoal.training.outcome import class_scores
from shoal.training.own_objects import PREFIX, objects_of
from shoal.training.run_folder import RunFolder
from shoal.transport import Transport
from shoal.transport.agreement import agree
from shoal.using.trained import Trained, load


@dataclass(frozen=True)
class _Test:
    """A network and the samples that it is tested on."""

    trained: Trained
    splits: Splits
    samples: DataSet
    batch: int


def start(path: Path, config: EvaluateConfig) -> EvaluateResult:
    """Test the network of the run in `path` as `config` says. In a world of ranks, all of them call it.

    What is wrong with the input is an `InputError`, found before ranks are started.
    """
    world = surrounding()
    if world is not None and world.size > 1:
        asked = config.workers if config.tells("workers") else None
        config = config.model_copy(update={"workers": world.workers(asked)})
        here = world.local_size or world.size
        with joined(world, kind_of_device(config, here), config.timeout):
            return on_rank(path, config, here)
    if config.workers == 1:
        return on_rank(path, config, 1)
    planning.check(config.plan, config.workers)
    prepare(path, config, "cpu")
    results = run(
        on_rank,
        path,
        config,
        config.workers,
        workers=config.workers,
        threads=threads_each(config.threads, config.workers),
        timeout=config.timeout,
        device=kind_of_device(config, config.workers),
    )
    return results[0]


def prepare(path: Path, config: EvaluateConfig, device: str) -> _Test:
    """Network and samples, found to fit each other."""
    trained = load(path, device=device, model=config.model)
    known = trained.inference
    name = config.data or known.data
    splits = _load(name, known)
    samples = as_trained(splits.test, name, class_names=known.classes, preparation=known.preparation)
    return _Test(trained, splits, samples, min(config.batch or known.batch, len(samples)))


def _load(name: str, known: Inference) -> Splits:
    """The data set in the shape that the network reads."""
    if name.startswith(PREFIX):
        raise DataError(
            f"the network was trained on an object from Python, {name.removeprefix(PREFIX)}, which has no name here.",
            "Give data with --data, with samples as those; or test from Python, with shoal.load.",
        )
    is_told = name.partition(":")[0] in ("synthetic", "windows")  # of the others we ask how many classes they have
    splits = data.load(name, shape=known.input, classes=len(known.classes) if is_told else None, seed=known.seed)
    if splits.test.task != known.task:
        raise DataError(
            f"{name!r} is to {splits.test.task}, but the network was trained to {known.task}.",
            f"Give data to {known.task}.",
        )
    return splits


def on_rank(path: Path, config: EvaluateConfig, ranks_here: int) -> EvaluateResult:
    """The test, as one rank of the present process group, or alone without one."""
    transport = Transport()
    threads = threads_each(config.threads, ranks_here)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # as in training, so that the numbers are the same
    device = device_of_rank(config, ranks_here) if transport.world > 1 else config.device
    test = agree(transport, lambda: prepare(path, config, device))
    where = next(test.trained.parameters()).device
    network = on_one_device(test.trained.module, config.plan, F.cross_entropy)
    if transport.world > 1:
        network = _laid(test, config, transport)
    begun = time.perf_counter()
    tested = evaluate(network, test.samples, batch=test.batch, device=where)
    assert tested is not None, "nobody stops it"
    return EvaluateResult(
        run=str(path),
        data=test.splits.name,
        origin=test.splits.origin,
        samples=len(test.samples),
        plan=network.plan.name,
        workers=transport.world,
        batch=test.batch,
        device=str(where),
        loss=tested.loss,
        own_loss=_own_loss(path),
        accuracy=tested.accuracy,
        iou=tested.iou,
        per_class=class_scores(test.trained.classes, tested),
        confusion=None if tested.confusion is None else list(map(list, tested.confusion)),
        seconds=time.perf_counter() - begun,
        versions=versions(),
    )


def _own_loss(path: Path) -> str | None:
    """As the folder of the run calls it, where it had a loss of one's own."""
    name = objects_of(RunFolder(path if path.is_dir() else path.parent)).get("loss")
    return None if name is None else name.removeprefix(PREFIX)


def _laid(test: _Test, config: EvaluateConfig, transport: Transport) -> Network:
    from shoal.training.laid import Shapes, lay_over_ranks  # one worker need not wait for it to load

    shape = (test.batch, *test.samples.shape)
    shapes = Shapes(shape, shape, test.samples.task == "segment")
    settings = TrainConfig(
        plan=config.plan, workers=transport.world, batch=test.batch, seed=test.trained.inference.seed
    )
    module = test.trained.module.train()  # as whoever lays it expects; the test itself puts it in evaluation mode
    return lay_over_ranks(module, settings, transport, shapes, F.cross_entropy, lambda: module, lambda *_: None)
