"""What a run is about, and what it did: said once, for one worker, many ranks and many replicas alike."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config import TrainConfig
from shoal.data import Splits
from shoal.inference import Inference
from shoal.plan import Plan
from shoal.planning.strategies import AUTO
from shoal.result import BestTest, BytesPerStep, ClassScore, ExchangeReport, RunResult, Staleness, WentOn, versions
from shoal.training.evaluate import Evaluation
from shoal.training.listener import About
from shoal.training.own_objects import PREFIX


def describe(
    config: TrainConfig,
    splits: Splits,
    *,
    parameters: int,
    steps_per_epoch: int,
    plan: str | Plan,
    device: str,
    done: int = 0,
    exchange: str = "none",
    survives: bool = False,
    own_loss: bool = False,
) -> About:
    """What a run is about to do. `config` is that of the whole run, `done` the steps of its earlier parts; `plan`
    says how each layer is cut, or is a name alone where that is not known yet.
    """
    return About(
        model=config.model,
        parameters=parameters,
        data=splits.name,
        train_samples=len(splits.train),
        test_samples=len(splits.test),
        classes=splits.train.classes,
        origin=splits.origin,
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        batch=config.batch,
        workers=config.workers,
        plan=plan if isinstance(plan, str) else plan.name,
        plan_in_words=plan.in_words() if isinstance(plan, Plan) and plan.ranks > 1 else None,
        searched=config.plan == AUTO and config.workers > 1,
        replicas=config.replicas,
        exchange=exchange,
        device=device,
        threads=config.threads or 1,
        timeout=config.timeout,
        survives=survives,
        done=done,
        accumulate=config.accumulate,
        class_names=splits.test.class_names,
        own_loss=own_loss,
    )


def inference_of(config: TrainConfig, splits: Splits) -> Inference:
    """What the network of a run needs beside its weights. `config` is that of the ranks that test."""
    return Inference(
        task=splits.train.task,
        model=None if config.model.startswith(PREFIX) else config.model,
        model_options=config.model_options,
        input=splits.train.shape,
        classes=splits.train.class_names,
        preparation=splits.train.preparation,
        data=splits.name,
        seed=config.seed,
        batch=config.batch,
        versions=versions(),
    )


@dataclass(frozen=True)
class Measured:
    """What was counted and timed while a run went on, over all its parts unless said otherwise."""

    epochs: int
    steps: int
    samples: int
    final_loss: float
    step_seconds_median: float
    samples_per_second: float
    bytes_per_step: BytesPerStep
    peak_memory_bytes: tuple[int, ...]
    """Of this part of the run, per rank."""
    wall_seconds: float
    left_out: int = 0
    """Samples at the ends of epochs."""
    repeated: int = 0
    """Samples that were trained on twice."""
    went_on: tuple[WentOn, ...] = ()
    step_seconds_predicted: float | None = None
    best: BestTest | None = None
    stopped_early: bool = False
    staleness: Staleness | None = None
    exchanged: ExchangeReport | None = None


def class_scores(names: Sequence[str], tested: Evaluation) -> dict[str, ClassScore]:
    """How a test went for each class."""
    return {
        name: ClassScore(samples=samples, accuracy=right / samples if samples else None)
        for name, samples, right in zip(names, tested.samples, tested.right, strict=True)
    }


def result_of(config: TrainConfig, about: About, tested: Evaluation, measured: Measured) -> RunResult:
    """What a finished run did, for `result.json`."""
    return RunResult(
        model=about.model,
        data=about.data,
        plan=about.plan,
        plan_in_words=about.plan_in_words,
        exchange=about.exchange,
        workers=about.workers,
        replicas=about.replicas,
        seed=config.seed,
        epochs=measured.epochs,
        stopped_early=measured.stopped_early,
        steps=measured.steps,
        samples=measured.samples,
        samples_left_out=measured.left_out,
        samples_repeated=measured.repeated,
        restarts=len(measured.went_on),
        went_on=list(measured.went_on),
        final_loss=measured.final_loss,
        test_loss=tested.loss,
        test_accuracy=tested.accuracy,
        test_iou=tested.iou,
        best=measured.best,
        per_class=class_scores(about.class_names, tested),
        confusion=None if tested.confusion is None else list(map(list, tested.confusion)),
        step_seconds_median=measured.step_seconds_median,
        step_seconds_predicted=measured.step_seconds_predicted,
        samples_per_second=measured.samples_per_second,
        bytes_per_step=measured.bytes_per_step,
        peak_memory_bytes=list(measured.peak_memory_bytes),
        staleness=measured.staleness,
        exchanged=measured.exchanged,
        wall_seconds=measured.wall_seconds,
        parameters=about.parameters,
        batch=about.batch,
        accumulate=about.accumulate,
        optimizer=config.optimizer,
        threads=about.threads,
        device=about.device,
        origin=about.origin,
        versions=versions(),
    )
